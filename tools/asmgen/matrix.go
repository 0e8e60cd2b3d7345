package main

import (
	"fmt"
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// The matrix kernels. One accumulator vector belongs to one (row of weights, row of activations); block after block it takes
//
//	acc[lane] = fma(weight[lane], x[lane], acc[lane])
//
// and at the end its lanes are added in one fixed tree. So every output is the same sequence of roundings in gemv (weights decoded
// on the way, one row of activations) and in decode followed by dot (weights decoded once for many rows), whatever is computed
// beside it. Four rows of weights at a time give four independent chains.

// isa is one instruction set: the vectors that hold float32 lanes.
type isa struct {
	name  string
	lanes int
}

var isas = []isa{{"AVX2", 8}, {"AVX512", 16}}

func (s isa) vec() VecVirtual {
	if s.lanes == 16 {
		return ZMM()
	}
	return YMM()
}

func (s isa) zero(v VecVirtual) {
	if s.lanes == 16 {
		VPXORD(v, v, v)
	} else {
		VXORPS(v, v, v)
	}
}

// row addresses one of four rows of a plane: base, base+stride, base+2*stride, base+3*stride.
type row struct {
	base, stride, stride3 GPVirtual
}

func (p row) at(i, disp int) Mem {
	m := Mem{Base: p.base, Disp: disp}
	switch i {
	case 1:
		m.Index, m.Scale = p.stride, 1
	case 2:
		m.Index, m.Scale = p.stride, 2
	case 3:
		m.Index, m.Scale = p.stride3, 1
	}
	return m
}

// weights are the planes of four rows and registers the decoders share.
type weights struct {
	isa                 isa
	codes, high, scales row
	tmp, table          GPVirtual // for E4M3 scales by lookup
	local               Mem       // 64 bytes a row
}

// format decodes weights, block columns at a time. block emits the vectors of a block of row i in the order in which activations
// are packed (package cpu, type order), each as soon as it exists, so that its register is free again.
type format struct {
	name    string
	columns int
	bytes   int // of codes a block
	high    int // bytes of the high plane a block
	scales  int // bytes from one block's scales to the next's
	e4m3    bool
	setup   func(w *weights) any
	prepare func(w *weights, i int) // leaves what the parts of a block of row i share in w.local
	parts   int                     // of a block; rows take turns after each, 0 is 1
	block   func(w *weights, consts any, i, part int, emit func(VecVirtual))
}

// blocks runs over the block of some rows, in parts. emit also gets the row and the index of the vector.
func (f format) blocks(w *weights, consts any, rows int, emit func(i, at int, v VecVirtual)) {
	if f.prepare != nil {
		for i := range rows {
			f.prepare(w, i)
		}
	}
	parts := max(1, f.parts)
	for part := range parts {
		for i := range rows {
			at := part * f.columns / parts / w.isa.lanes
			f.block(w, consts, i, part, func(v VecVirtual) {
				emit(i, at, v)
				at++
			})
		}
	}
}

func formats(s isa) []format {
	list := []format{bf16(s), fp32(s), fp8(s), q8(s)}
	if s.lanes == 8 {
		return append(list, nibble("NVFP4", e2m1Hi, e2m1Lo, 16), nibble("Q4", signed4Hi, signed4Lo, 64), q56("Q5", 1), q56("Q6", 2))
	}
	return append(list, permuted("NVFP4", e2m1Float, 16), permuted("Q4", signed4Float, 64))
}

func bf16(s isa) format {
	return format{
		name: "BF16", columns: 16, bytes: 32,
		block: func(w *weights, _ any, i, _ int, emit func(VecVirtual)) {
			for k := 0; k < 16; k += s.lanes {
				v := s.vec()
				VPMOVZXWD(w.codes.at(i, 2*k), v)
				VPSLLD(Imm(16), v, v)
				emit(v)
			}
		},
	}
}

func fp32(s isa) format {
	return format{
		name: "FP32", columns: 16, bytes: 64,
		block: func(w *weights, _ any, i, _ int, emit func(VecVirtual)) {
			for k := 0; k < 16; k += s.lanes {
				v := s.vec()
				VMOVUPS(w.codes.at(i, 4*k), v)
				emit(v)
			}
		},
	}
}

// fp8 moves sign, exponent and mantissa of a code to their places in a binary16, which then is 2^-8 of the value, subnormals included,
// and converts that; the factor of the row has the other 2^8. A float32 would have room for the code as it is, but subnormal ones would
// be subnormal float32, on which processors of Intel spend a hundred cycles; as binary16 they cost nothing. Words of two bytes make two
// vectors each: first those of the even columns, then those of the odd ones.
func fp8(s isa) format {
	wide := s.lanes == 16
	return format{
		name: "FP8", columns: 4 * s.lanes, bytes: 4 * s.lanes,
		setup: func(w *weights) any {
			m := s.vec()
			VPBROADCASTD(fp8Mask, m)
			return m
		},
		block: func(w *weights, c any, i, _ int, emit func(VecVirtual)) {
			d := s.vec()
			VMOVUPS(w.codes.at(i, 0), d)
			for odd := range 2 {
				v := s.vec()
				if odd == 0 {
					VPSLLW(Imm(8), d, v)
					VPSRAW(Imm(1), v, v)
				} else {
					VPSRAW(Imm(1), d, v)
				}
				if wide {
					VPANDD(c.(VecVirtual), v, v)
				} else {
					VPAND(c.(VecVirtual), v, v)
				}
				low, high := s.vec(), s.vec()
				if wide {
					half := YMM()
					VCVTPH2PS(v.AsY(), low)
					emit(low)
					VEXTRACTF64X4(Imm(1), v, half)
					VCVTPH2PS(half, high)
				} else {
					half := XMM()
					VCVTPH2PS(v.AsX(), low)
					emit(low)
					VEXTRACTI128(Imm(1), v, half)
					VCVTPH2PS(half, high)
				}
				emit(high)
			}
		},
	}
}

// scale16 broadcasts the binary16 scale of row i.
func scale16(w *weights, i int) VecVirtual {
	v := w.isa.vec()
	if w.isa.lanes == 16 {
		y := YMM()
		VPBROADCASTW(w.scales.at(i, 0), y)
		VCVTPH2PS(y, v)
	} else {
		x := XMM()
		VPBROADCASTW(w.scales.at(i, 0), x)
		VCVTPH2PS(x, v)
	}
	return v
}

func q8(s isa) format {
	return format{
		name: "Q8", columns: 32, bytes: 32, scales: 2,
		block: func(w *weights, _ any, i, _ int, emit func(VecVirtual)) {
			sc := scale16(w, i)
			for k := 0; k < 32; k += s.lanes {
				v := s.vec()
				VPMOVSXBD(w.codes.at(i, k), v)
				VCVTDQ2PS(v, v)
				VMULPS(sc, v, v)
				emit(v)
			}
		},
	}
}

// nibble decodes 4-bit codes with AVX2, 64 at a time. The values are exact in bfloat16, so two byte shuffles look up both of its
// bytes; interleaved they are words, and a word in the upper half of a 32-bit lane is a float32. With b the byte of a code among
// the 32, the eight vectors are: low nibbles, then high ones; of these b%16 < 8, then the others; of these even b, then odd ones. In
// a vector, lanes 0 to 3 have b < 16 and b%8/2 = lane; lanes 4 to 7 the same with b >= 16.
func nibble(name string, hi, lo Mem, group int) format {
	f := format{name: name, columns: 64, bytes: 32, scales: 2}
	if group == 16 {
		f.scales = 512
	}
	f.setup = func(w *weights) any {
		c := [2]VecVirtual{YMM(), YMM()}
		VBROADCASTI128(hi, c[0])
		VBROADCASTI128(lo, c[1])
		p := GP64()
		LEAQ(AllocLocal(256+64).Offset(63), p)
		ANDQ(I32(-64), p)
		w.local = Mem{Base: p}
		return c
	}
	// The scales of b%16 < 8, and of the others.
	f.prepare = func(w *weights, i int) {
		if group == 64 {
			VMOVUPS(scale16(w, i), w.local.Offset(64*i))
			return
		}
		// Four E4M3 words, each to four words of 16 bits: shifted they are binary16, 2^-8 of the value; the table makes up for it.
		b := XMM()
		VMOVD(w.scales.at(i, 0), b)
		for u := range 2 {
			x, v := XMM(), YMM()
			VPSHUFB(scaleSpread[u], b, x)
			VPSLLW(Imm(7), x, x)
			VCVTPH2PS(x, v)
			VMOVUPS(v, w.local.Offset(64*i+32*u))
		}
	}
	f.parts = 2
	f.block = func(w *weights, consts any, i, n int, emit func(VecVirtual)) {
		c := consts.([2]VecVirtual)
		codes, h := YMM(), YMM()
		VMOVUPS(w.codes.at(i, 0), codes)
		if n == 1 {
			VPSRLW(Imm(4), codes, codes)
		}
		VPAND(nibbleMask, codes, codes)
		VPSHUFB(codes, c[0], h)
		VPSHUFB(codes, c[1], codes)
		for u := range 2 {
			even, odd := YMM(), YMM()
			scale := w.local.Offset(64 * i)
			if u == 0 {
				VPUNPCKLBW(h, codes, odd)
			} else {
				VPUNPCKHBW(h, codes, odd)
				if group == 16 {
					scale = scale.Offset(32)
				}
			}
			VPSLLD(Imm(16), odd, even)
			VPAND(upperMask, odd, odd)
			VMULPS(scale, even, even)
			emit(even)
			VMULPS(scale, odd, odd)
			emit(odd)
		}
	}
	return f
}

// permuted decodes 4-bit codes with AVX-512, where one instruction looks up 16 floats: lanes 2i and 2i+1 hold columns i and 8+i.
func permuted(name string, lut Mem, group int) format {
	f := format{name: name, columns: 64, bytes: 32, scales: 2}
	if group == 16 {
		f.scales, f.e4m3 = 512, true
	}
	f.setup = func(w *weights) any {
		table, shift := ZMM(), ZMM()
		VMOVUPS(lut, table)
		VMOVUPS(nibbleShift, shift)
		return [2]VecVirtual{table, shift}
	}
	f.block = func(w *weights, c any, i, _ int, emit func(VecVirtual)) {
		k := c.([2]VecVirtual)
		var scale VecVirtual
		for part := range 4 {
			if group == 16 {
				scale = ZMM()
				MOVBLZX(w.scales.at(i, part), w.tmp.As32())
				VBROADCASTSS(Mem{Base: w.table, Index: w.tmp, Scale: 4}, scale)
			} else if part == 0 {
				scale = scale16(w, i)
			}
			v := ZMM()
			VPBROADCASTQ(w.codes.at(i, 8*part), v)
			VPSRLVD(k[1], v, v)
			VPERMPS(k[0], v, v)
			VMULPS(scale, v, v)
			emit(v)
		}
	}
	return f
}

// q56 decodes 5- and 6-bit codes with AVX2: a nibble and one or two bits of a second plane. Sixteen code bytes give 32 columns: of
// each 16 first the even, then the odd ones.
func q56(name string, bits int) format {
	f := format{name: name, columns: 64, bytes: 32, high: 8 * bits, scales: 2}
	f.block = func(w *weights, _ any, i, _ int, emit func(VecVirtual)) {
		s := scale16(w, i)
		for part := range 2 {
			c, h := YMM(), YMM()
			VPMOVZXBW(w.codes.at(i, 16*part), c)
			if bits == 1 {
				// Word j of 16 gets the byte with bits 2j and 2j+1.
				VPBROADCASTD(w.high.at(i, 4*part), h)
				VPSHUFB(q5Spread, h, h)
			} else {
				// Word j gets the byte with the bits of columns 2j and 2j+1; for even j they are moved up to where odd j has them.
				VPBROADCASTQ(w.high.at(i, 8*part), h)
				VPSHUFB(q6Spread, h, h)
				VPMULLW(q6Raise, h, h)
			}
			var words [2]VecVirtual
			for odd := range 2 {
				v, b := YMM(), YMM()
				if odd == 0 {
					VPAND(lowNibble, c, v)
				} else {
					VPSRLW(Imm(4), c, v)
				}
				switch {
				case bits == 1: // a set bit is -16: two's complement of five bits
					VPAND(q5Bits[odd], h, b)
					VPCMPEQW(q5Bits[odd], b, b)
					VPAND(minus16, b, b)
					VPOR(b, v, v)
				case odd == 1: // the odd column's two bits are at 6..7, the even one's at 4..5
					VPSRLW(Imm(2), h, h)
					fallthrough
				default:
					VPAND(bits45, h, b)
					VPOR(b, v, v)
					VPXOR(word32, v, v) // sign: (u ^ 32) - 32
					VPSUBW(word32, v, v)
				}
				words[odd] = v
			}
			for half := range 2 {
				for _, v := range words {
					x, f := v.AsX(), YMM()
					if half == 1 {
						hi := XMM()
						VEXTRACTI128(Imm(1), v, hi)
						VPMOVSXWD(hi, f)
					} else {
						VPMOVSXWD(x, f)
					}
					VCVTDQ2PS(f, f)
					VMULPS(s, f, f)
					emit(f)
				}
			}
		}
	}
	return f
}

func matrix() {
	for _, s := range isas {
		for _, f := range formats(s) {
			gemv(s, f, 1)
			if f.high == 0 { // registers are few
				gemv(s, f, 2)
			}
			if f.name != "FP32" {
				decode(s, f)
			}
		}
		for rows := 1; rows <= 3; rows++ {
			dot(s, rows)
		}
	}
}

// plane loads the base of a plane and, for four rows, its stride.
func plane(name string, strided bool) row {
	p := row{base: GP64()}
	Load(Param(name), p.base)
	if strided {
		p.stride, p.stride3 = GP64(), GP64()
		Load(Param(name+"Stride"), p.stride)
		LEAQ(Mem{Base: p.stride, Index: p.stride, Scale: 2}, p.stride3)
	}
	return p
}

func (f format) begin(s isa, strided bool) (*weights, any) {
	w := &weights{isa: s, codes: plane("codes", strided)}
	if f.high > 0 {
		w.high = plane("high", strided)
	}
	if f.scales > 0 {
		w.scales = plane("scales", strided)
	}
	if f.e4m3 {
		w.tmp, w.table = GP64(), GP64()
		LEAQ(e4m3, w.table)
	}
	if f.setup != nil {
		return w, f.setup(w)
	}
	return w, nil
}

func (f format) advance(w *weights) {
	ADDQ(U32(f.bytes), w.codes.base)
	if f.high > 0 {
		ADDQ(U32(f.high), w.high.base)
	}
	if f.scales > 0 {
		ADDQ(U32(f.scales), w.scales.base)
	}
}

// gemv: out[r*ldo+4q+i] = sum over columns of weight[4q+i]*x_r, for quads of rows and one or two x. The Next parameters take a plane
// from the end of a quad to the next one.
func gemv(s isa, f format, rows int) {
	name := fmt.Sprintf("gemv%d%s%s", rows, f.name, s.name)
	TEXT(name, NOSPLIT, "func(out *float32, ldo int, x0, x1 *float32, codes, high, scales *byte, codesStride, highStride, scalesStride, codesNext, highNext, scalesNext, blocks, quads int)")
	Pragma("noescape")
	Doc(fmt.Sprintf("%s multiplies quads of four %s rows with %d vectors; blocks of %d columns.", name, f.name, rows, f.columns))
	w, consts := f.begin(s, true)
	out := Load(Param("out"), GP64())
	n := GP64()
	xs := make([]GPVirtual, rows)
	acc := make([][4]VecVirtual, rows)
	for r := range rows {
		xs[r] = GP64()
		acc[r] = [4]VecVirtual{s.vec(), s.vec(), s.vec(), s.vec()}
	}
	// A row is too short for the processor to see where it leads; the next quad follows this one. Prefetches beyond the end are harmless.
	ahead := row{}
	if f.high == 0 {
		ahead = row{GP64(), w.codes.stride, w.codes.stride3}
	}

	Label("quad")
	if f.high == 0 {
		LEAQ(Mem{Base: w.codes.base, Index: w.codes.stride, Scale: 4}, ahead.base)
	}
	Load(Param("blocks"), n)
	for r := range rows {
		Load(Param(fmt.Sprintf("x%d", r)), xs[r])
		for _, a := range acc[r] {
			s.zero(a)
		}
	}
	Label("block")
	if f.high == 0 {
		for i := range 4 {
			PREFETCHT0(ahead.at(i, 0))
		}
		ADDQ(U32(f.bytes), ahead.base)
	}
	f.blocks(w, consts, 4, func(i, at int, v VecVirtual) {
		for r := range rows {
			VFMADD231PS(Mem{Base: xs[r], Disp: 4 * s.lanes * at}, v, acc[r][i])
		}
	})
	f.advance(w)
	for r := range rows {
		ADDQ(U32(4*f.columns), xs[r])
	}
	DECQ(n)
	JNZ(LabelRef("block"))

	param := func(name string) Mem {
		m, err := Param(name).Resolve()
		if err != nil {
			panic(err)
		}
		return m.Addr
	}
	for r := range rows {
		sum := reduce(s, acc[r])
		if r == 0 {
			VMOVUPS(sum, Mem{Base: out})
		} else {
			MOVQ(param("ldo"), n)
			VMOVUPS(sum, Mem{Base: out, Index: n, Scale: 4})
		}
	}
	ADDQ(U32(16), out)
	ADDQ(param("codesNext"), w.codes.base)
	if f.high > 0 {
		ADDQ(param("highNext"), w.high.base)
	}
	if f.scales > 0 {
		ADDQ(param("scalesNext"), w.scales.base)
	}
	DECQ(param("quads"))
	JNZ(LabelRef("quad"))
	VZEROUPPER()
	RET()
}

// decode writes the float32 values of one row, without what the epilogue applies, in the order of x.
func decode(s isa, f format) {
	TEXT("decode"+f.name+s.name, NOSPLIT, "func(dst *float32, codes, high, scales *byte, blocks int)")
	Pragma("noescape")
	Doc(fmt.Sprintf("decode%s%s decodes one %s row in the column order of gemv1%s%s.", f.name, s.name, f.name, f.name, s.name))
	w, consts := f.begin(s, false)
	dst := Load(Param("dst"), GP64())
	n := Load(Param("blocks"), GP64())
	Label("block")
	f.blocks(w, consts, 1, func(_, at int, v VecVirtual) {
		VMOVUPS(v, Mem{Base: dst, Disp: 4 * s.lanes * at})
	})
	f.advance(w)
	ADDQ(U32(4*f.columns), dst)
	DECQ(n)
	JNZ(LabelRef("block"))
	VZEROUPPER()
	RET()
}

// dot: out[r*ldo+4q+i] = sum over columns of w[4q+i]*x_r for float32 weights and one to three rows of activations.
func dot(s isa, rows int) {
	name := fmt.Sprintf("dot%d%s", rows, s.name)
	TEXT(name, NOSPLIT, "func(out *float32, ldo int, x0, x1, x2 *float32, codes *float32, codesStride, codesNext, vectors, quads int)")
	Pragma("noescape")
	Doc(fmt.Sprintf("%s multiplies quads of four float32 rows with %d vectors of activations, in steps of 16 columns.", name, rows))
	w := plane("codes", true)
	out := Load(Param("out"), GP64())
	ldo := Load(Param("ldo"), GP64())
	SHLQ(Imm(2), ldo)
	quads := Load(Param("quads"), GP64())
	var xs []GPVirtual
	for r := range rows {
		xs = append(xs, GP64())
		Load(Param(fmt.Sprintf("x%d", r)), xs[r])
	}
	at, end := GP64(), GP64()
	Load(Param("vectors"), end)
	SHLQ(Imm(6), end)
	acc := make([][4]VecVirtual, rows)
	for r := range acc {
		acc[r] = [4]VecVirtual{s.vec(), s.vec(), s.vec(), s.vec()}
	}
	Label("quad")
	XORQ(at, at)
	for r := range acc {
		for _, a := range acc[r] {
			s.zero(a)
		}
	}
	Label("step")
	for k := 0; k < 16; k += s.lanes {
		var x []VecVirtual
		for r := range rows {
			x = append(x, s.vec())
			VMOVUPS(Mem{Base: xs[r], Index: at, Scale: 1, Disp: 4 * k}, x[r])
		}
		for i := range 4 {
			v := s.vec()
			VMOVUPS(w.at(i, 4*k), v)
			for r := range rows {
				VFMADD231PS(v, x[r], acc[r][i])
			}
		}
	}
	ADDQ(U32(64), w.base)
	ADDQ(U32(64), at)
	CMPQ(at, end)
	JNE(LabelRef("step"))
	to := GP64()
	MOVQ(out, to)
	for r := range rows {
		VMOVUPS(reduce(s, acc[r]), Mem{Base: to})
		if r < rows-1 {
			ADDQ(ldo, to)
		}
	}
	ADDQ(U32(16), out)
	m, err := Param("codesNext").Resolve()
	if err != nil {
		panic(err)
	}
	ADDQ(m.Addr, w.base)
	DECQ(quads)
	JNZ(LabelRef("quad"))
	VZEROUPPER()
	RET()
}

// reduce adds the lanes of four accumulators: with eight lanes ((0+1)+(2+3)) + ((4+5)+(6+7)); sixteen lanes are first folded to
// eight.
func reduce(s isa, acc [4]VecVirtual) VecVirtual {
	var y [4]VecVirtual
	for i, a := range acc {
		if s.lanes == 8 {
			y[i] = a
			continue
		}
		hi := YMM()
		y[i] = YMM()
		VEXTRACTF64X4(Imm(1), a, hi)
		VADDPS(hi, a.AsY(), y[i])
	}
	a, b := YMM(), YMM()
	VHADDPS(y[1], y[0], a)
	VHADDPS(y[3], y[2], b)
	VHADDPS(b, a, a)
	hi, sum := XMM(), XMM()
	VEXTRACTF128(Imm(1), a, hi)
	VADDPS(hi, a.AsX(), sum)
	return sum
}

// Constant tables.
var (
	e4m3, e2m1Hi, e2m1Lo, signed4Hi, signed4Lo, e2m1Float, signed4Float Mem
	nibbleMask, upperMask, nibbleShift, fp8Mask                         Mem
	q5Spread, q6Spread, q6Raise, lowNibble, minus16, bits45, word32     Mem
	scaleSpread, q5Bits                                                 [2]Mem
)

func tables() {
	e4m3 = GLOBL("e4m3", RODATA|NOPTR)
	for w := range 256 {
		e, m := w>>3&15, float64(w&7)
		v := math.Ldexp(1+m/8, e-7)
		if e == 0 {
			v = math.Ldexp(m, -9)
		}
		if w&0x7f == 0x7f {
			v = math.NaN()
		}
		if w > 127 {
			v = math.Copysign(v, -1)
		}
		DATA(4*w, U32(math.Float32bits(float32(v))))
	}
	magnitudes := []float32{0, .5, 1, 1.5, 2, 3, 4, 6}
	e2m1 := func(c int) float32 {
		if c > 7 {
			return float32(math.Copysign(float64(magnitudes[c-8]), -1))
		}
		return magnitudes[c]
	}
	signed := func(c int) float32 { return float32(int8(c<<4) >> 4) }
	e2m1Hi, e2m1Lo = bf16Tables("e2m1", func(c int) float32 { return 256 * e2m1(c) })
	signed4Hi, signed4Lo = bf16Tables("signed4", signed)
	e2m1Float = floatTable("e2m1Float", e2m1)
	signed4Float = floatTable("signed4Float", signed)
	nibbleMask = words("nibbleMask", 16, func(int) uint16 { return 0x0f0f })
	upperMask = words("upperMask", 16, func(j int) uint16 { return []uint16{0, 0xffff}[j%2] })
	fp8Mask = words("fp8Mask", 2, func(int) uint16 { return 0xbf80 })
	for u := range 2 {
		// Group u to the low bytes of the first four words, group 2+u to those of the others.
		scaleSpread[u] = words(fmt.Sprintf("scaleSpread%d", u), 8, func(j int) uint16 { return 0x8000 | uint16(u+j/4*2) })
	}
	nibbleShift = GLOBL("nibbleShift", RODATA|NOPTR)
	for i := range 16 {
		DATA(4*i, U32(i/2*4))
	}
	// Shuffle control: byte index for the low byte of each word, 0x80 (zero) for the high one. A broadcast plane repeats in both
	// halves of the register, so indices are within 16 bytes.
	q5Spread = words("q5Spread", 16, func(j int) uint16 { return 0x8000 | uint16(j/4) })
	q6Spread = words("q6Spread", 16, func(j int) uint16 { return 0x8000 | uint16(j/2) })
	q6Raise = words("q6Raise", 16, func(j int) uint16 { return []uint16{16, 1}[j%2] })
	for odd := range 2 {
		q5Bits[odd] = words(fmt.Sprintf("q5Bits%d", odd), 16, func(j int) uint16 { return 1 << (2*j%8 + odd) })
	}
	lowNibble = words("lowNibble", 16, func(int) uint16 { return 15 })
	minus16 = words("minus16", 16, func(int) uint16 { return 0xfff0 })
	bits45 = words("bits45", 16, func(int) uint16 { return 0x30 })
	word32 = words("word32", 16, func(int) uint16 { return 32 })
}

func words(name string, n int, f func(int) uint16) Mem {
	m := GLOBL(name, RODATA|NOPTR)
	for j := range n {
		DATA(2*j, U16(f(j)))
	}
	return m
}

func floatTable(name string, f func(int) float32) Mem {
	m := GLOBL(name, RODATA|NOPTR)
	for c := range 16 {
		DATA(4*c, U32(math.Float32bits(f(c))))
	}
	return m
}

// bf16Tables hold the two bytes of bfloat16 values.
func bf16Tables(name string, f func(int) float32) (hi, lo Mem) {
	tables := make([]Mem, 2)
	for i, part := range []string{"Hi", "Lo"} {
		tables[i] = GLOBL(name+part, RODATA|NOPTR)
		for c := range 16 {
			b := math.Float32bits(f(c))
			if b&0xffff != 0 {
				panic("value does not fit the table")
			}
			DATA(c, U8(b>>(24-8*i)))
		}
	}
	return tables[0], tables[1]
}
