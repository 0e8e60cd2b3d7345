package cpu

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"ninfer/internal/num"
)

// Few machines have AVX-512, but its kernels must not wait for one to be found wrong. This is an interpreter of the generated assembly,
// for the instructions that the matrix kernels use. It is checked against the processor on the AVX2 kernels, bit by bit, and then
// stands in for one with AVX-512.

// line is one instruction, arguments in the order of the assembler: sources first.
type line struct {
	op   string
	args []string
}

// listing is the assembly file.
type listing struct {
	code   map[string][]line // by function
	labels map[string]map[string]int
	data   map[string][]byte
}

func readListing(t *testing.T) *listing {
	text, err := os.ReadFile("simd_amd64.s")
	if err != nil {
		t.Fatal(err)
	}
	l := &listing{code: map[string][]line{}, labels: map[string]map[string]int{}, data: map[string][]byte{}}
	name := ""
	for s := range strings.Lines(string(text)) {
		s, _, _ = strings.Cut(strings.TrimSpace(s), "//")
		op, rest, _ := strings.Cut(s, " ")
		var args []string
		for a := range strings.SplitSeq(rest, ",") {
			if a = strings.TrimSpace(a); a != "" {
				args = append(args, a)
			}
		}
		switch {
		case op == "" || strings.HasPrefix(op, "#") || op == "GLOBL":
		case op == "DATA":
			where, width, _ := strings.Cut(args[0], "/")
			n, _ := strconv.Atoi(width)
			v, err := strconv.ParseUint(strings.TrimPrefix(args[1], "$"), 0, 64)
			if err != nil {
				t.Fatalf("%q: %v", s, err)
			}
			symbol, _, _ := strings.Cut(where, "<")
			l.data[symbol] = append(l.data[symbol], binary.LittleEndian.AppendUint64(nil, v)[:n]...)
		case op == "TEXT":
			name = strings.TrimSuffix(strings.TrimPrefix(args[0], "·"), "(SB)")
			l.labels[name] = map[string]int{}
		case strings.HasSuffix(op, ":"):
			l.labels[name][strings.TrimSuffix(op, ":")] = len(l.code[name])
		default:
			l.code[name] = append(l.code[name], line{op, args})
		}
	}
	return l
}

// machine64 is the state of one call.
type machine64 struct {
	l     *listing
	regs  map[string]uint64
	vec   map[string]*[64]byte // by number
	args  []uint64
	stack []byte
	zero  bool
}

func (m *machine64) vector(r string) *[64]byte {
	if m.vec[r[1:]] == nil {
		m.vec[r[1:]] = new([64]byte)
	}
	return m.vec[r[1:]]
}

func isVector(a string) bool {
	return len(a) > 1 && strings.ContainsRune("XYZ", rune(a[0])) && a[1] >= '0' && a[1] <= '9'
}

// width of a vector register in bytes.
func width(r string) int { return map[byte]int{'X': 16, 'Y': 32, 'Z': 64}[r[0]] }

// memory gives n bytes at an address operand.
func (m *machine64) memory(a string, n int) []byte {
	if s, rest, ok := strings.Cut(a, "<>+"); ok {
		off, _ := strconv.Atoi(strings.TrimSuffix(rest, "(SB)"))
		return m.l.data[s][off : off+n]
	}
	v := m.address(a) // a pointer of the caller, who keeps its memory alive, or into the stack
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&v)), n)
}

func (m *machine64) address(a string) uint64 {
	disp, rest, _ := strings.Cut(a, "(")
	v := uint64(0)
	if disp != "" {
		d, err := strconv.ParseInt(disp, 0, 64)
		if err != nil {
			panic(a)
		}
		v = uint64(d)
	}
	for i, part := range strings.Split(strings.TrimSuffix(rest, ")"), ")(") {
		r, scale, _ := strings.Cut(part, "*")
		k := uint64(1)
		if i > 0 {
			s, _ := strconv.Atoi(scale)
			k = uint64(s)
		}
		if r == "SP" {
			v += uint64(uintptr(unsafe.Pointer(&m.stack[0])))
		} else {
			v += m.regs[r] * k
		}
	}
	return v
}

// bytes gives n bytes of a vector register or of memory.
func (m *machine64) bytes(a string, n int) []byte {
	if isVector(a) {
		return m.vector(a)[:n]
	}
	return m.memory(a, n)
}

// scalar gives the value of a general operand.
func (m *machine64) scalar(a string) uint64 {
	switch {
	case strings.HasPrefix(a, "$"):
		v, err := strconv.ParseInt(a[1:], 0, 64)
		if err != nil {
			panic(a)
		}
		return uint64(v)
	case strings.HasSuffix(a, "(FP)"):
		_, off, _ := strings.Cut(strings.TrimSuffix(a, "(FP)"), "+")
		n, _ := strconv.Atoi(off)
		return m.args[n/8]
	case strings.Contains(a, "("):
		return binary.LittleEndian.Uint64(m.memory(a, 8))
	}
	return m.regs[a]
}

// fma32 rounds a*b+c once: the float64 sum is made odd where it is inexact, so that rounding it again is right.
func fma32(a, b, c float32) float32 {
	p, q := float64(a)*float64(b), float64(c)
	s := p + q
	t := s - p
	e := (p - (s - t)) + (q - t)
	if bits := math.Float64bits(s); e != 0 && bits&1 == 0 {
		if (e > 0) == (s > 0) {
			bits++
		} else {
			bits--
		}
		s = math.Float64frombits(bits)
	}
	return float32(s)
}

var le = binary.LittleEndian

func f32(b []byte, i int) float32 { return math.Float32frombits(le.Uint32(b[4*i:])) }

// call runs a function.
func (l *listing) call(name string, args ...uint64) {
	m := &machine64{l: l, regs: map[string]uint64{}, vec: map[string]*[64]byte{}, args: args, stack: make([]byte, 512)}
	code := l.code[name]
	if code == nil {
		panic("no function " + name)
	}
	for pc := 0; ; pc++ {
		in := code[pc]
		switch in.op {
		case "RET":
			runtime.KeepAlive(m.stack)
			return
		case "JNZ", "JNE":
			if !m.zero {
				pc = l.labels[name][in.args[0]] - 1
			}
		default:
			m.step(in)
		}
	}
}

func (m *machine64) step(in line) {
	dst := in.args
	if len(dst) > 0 {
		dst = dst[len(dst)-1:]
	}
	set := func(v uint64) {
		m.zero = v == 0
		if _, off, ok := strings.Cut(dst[0], "+"); ok { // a parameter
			n, _ := strconv.Atoi(strings.TrimSuffix(off, "(FP)"))
			m.args[n/8] = v
			return
		}
		m.regs[dst[0]] = v
	}
	switch in.op {
	case "VZEROUPPER", "PREFETCHT0":
		return
	case "MOVQ":
		m.regs[dst[0]] = m.scalar(in.args[0]) // no flags
		return
	case "LEAQ":
		if s, _, ok := strings.Cut(in.args[0], "<>+"); ok {
			m.regs[dst[0]] = uint64(uintptr(unsafe.Pointer(&m.l.data[s][0])))
		} else {
			m.regs[dst[0]] = m.address(in.args[0])
		}
		return
	case "MOVBLZX":
		m.regs[dst[0]] = uint64(m.memory(in.args[0], 1)[0])
		return
	case "ADDQ":
		set(m.regs[dst[0]] + m.scalar(in.args[0]))
		return
	case "ANDQ":
		set(m.regs[dst[0]] & m.scalar(in.args[0]))
		return
	case "XORQ":
		set(m.regs[dst[0]] ^ m.scalar(in.args[0]))
		return
	case "SHLQ":
		set(m.regs[dst[0]] << m.scalar(in.args[0]))
		return
	case "DECQ":
		set(m.scalar(dst[0]) - 1)
		return
	case "CMPQ":
		m.zero = m.scalar(in.args[0]) == m.scalar(in.args[1])
		return
	}
	m.vectorStep(in, dst[0])
}

func (m *machine64) vectorStep(in line, dst string) {
	if in.op == "VMOVUPS" && !isVector(dst) {
		copy(m.memory(dst, width(in.args[0])), m.vector(in.args[0])[:])
		return
	}
	n := width(dst)
	var out [64]byte // what is beyond the register becomes zero
	src := func(i, n int) []byte { return m.bytes(in.args[i], n) }
	words := func(size int, f func(i int) uint64) {
		for i := range n / size {
			var b [8]byte
			le.PutUint64(b[:], f(i))
			copy(out[size*i:size*(i+1)], b[:])
		}
	}
	floats := func(f func(i int) float32) {
		words(4, func(i int) uint64 { return uint64(math.Float32bits(f(i))) })
	}
	imm := func() uint64 { return m.scalar(in.args[0]) }
	get := func(b []byte, size, i int) uint64 {
		var w [8]byte
		copy(w[:], b[size*i:size*(i+1)])
		return le.Uint64(w[:])
	}
	bitwise := func(f func(a, b byte) byte) {
		a, b := src(0, n), src(1, n)
		words(1, func(i int) uint64 { return uint64(f(a[i], b[i])) })
	}
	// laneOf is where byte i of a 128-bit lane begins.
	laneOf := func(i int) int { return i &^ 15 }
	unpack := func(from int) {
		a, b := src(0, n), src(1, n) // Intel's second and first source
		words(1, func(i int) uint64 {
			at := laneOf(i) + from + i%16/2
			if i%2 == 0 {
				return uint64(b[at])
			}
			return uint64(a[at])
		})
	}
	switch in.op {
	case "VMOVUPS":
		copy(out[:], src(0, n))
	case "VMOVD":
		copy(out[:], src(0, 4))
	case "VXORPS", "VPXOR", "VPXORD":
		bitwise(func(a, b byte) byte { return a ^ b })
	case "VPAND", "VPANDD":
		bitwise(func(a, b byte) byte { return a & b })
	case "VPOR":
		bitwise(func(a, b byte) byte { return a | b })
	case "VFMADD231PS":
		a, b, c := src(0, n), src(1, n), m.vector(dst)
		floats(func(i int) float32 { return fma32(f32(a, i), f32(b, i), f32(c[:], i)) })
	case "VMULPS":
		a, b := src(0, n), src(1, n)
		floats(func(i int) float32 { return f32(a, i) * f32(b, i) })
	case "VADDPS":
		a, b := src(0, n), src(1, n)
		floats(func(i int) float32 { return f32(a, i) + f32(b, i) })
	case "VHADDPS":
		a, b := src(0, n), src(1, n)
		floats(func(i int) float32 {
			from, at := b, i/4*4+i%2*2
			if i%4 >= 2 {
				from = a
			}
			return f32(from, at) + f32(from, at+1)
		})
	case "VCVTDQ2PS":
		a := src(0, n)
		floats(func(i int) float32 { return float32(int32(le.Uint32(a[4*i:]))) })
	case "VCVTPH2PS":
		a := src(0, n/2)
		floats(func(i int) float32 { return num.FromF16(le.Uint16(a[2*i:])) })
	case "VPSLLD":
		a := src(1, n)
		words(4, func(i int) uint64 { return get(a, 4, i) << imm() })
	case "VPSRLD":
		a := src(1, n)
		words(4, func(i int) uint64 { return get(a, 4, i) >> imm() })
	case "VPSRAD":
		a := src(1, n)
		words(4, func(i int) uint64 { return uint64(int32(get(a, 4, i)) >> imm()) })
	case "VPSLLW":
		a := src(1, n)
		words(2, func(i int) uint64 { return get(a, 2, i) << imm() })
	case "VPSRLW":
		a := src(1, n)
		words(2, func(i int) uint64 { return get(a, 2, i) >> imm() })
	case "VPSRAW":
		a := src(1, n)
		words(2, func(i int) uint64 { return uint64(int16(get(a, 2, i)) >> imm()) })
	case "VPSRLVD":
		count, a := src(0, n), src(1, n)
		words(4, func(i int) uint64 { return get(a, 4, i) >> get(count, 4, i) })
	case "VPSUBW":
		a, b := src(0, n), src(1, n)
		words(2, func(i int) uint64 { return get(b, 2, i) - get(a, 2, i) })
	case "VPMULLW":
		a, b := src(0, n), src(1, n)
		words(2, func(i int) uint64 { return get(b, 2, i) * get(a, 2, i) })
	case "VPCMPEQW":
		a, b := src(0, n), src(1, n)
		words(2, func(i int) uint64 {
			if get(b, 2, i) == get(a, 2, i) {
				return 0xffff
			}
			return 0
		})
	case "VPMOVZXWD":
		a := src(0, n/2)
		words(4, func(i int) uint64 { return get(a, 2, i) })
	case "VPMOVSXWD":
		a := src(0, n/2)
		words(4, func(i int) uint64 { return uint64(int16(get(a, 2, i))) })
	case "VPMOVSXBD":
		a := src(0, n/4)
		words(4, func(i int) uint64 { return uint64(int8(a[i])) })
	case "VPMOVZXBW":
		a := src(0, n/2)
		words(2, func(i int) uint64 { return uint64(a[i]) })
	case "VPBROADCASTW":
		a := src(0, 2)
		words(2, func(int) uint64 { return get(a, 2, 0) })
	case "VPBROADCASTD", "VBROADCASTSS":
		a := src(0, 4)
		words(4, func(int) uint64 { return get(a, 4, 0) })
	case "VPBROADCASTQ":
		a := src(0, 8)
		words(8, func(int) uint64 { return get(a, 8, 0) })
	case "VBROADCASTI128":
		a := src(0, 16)
		words(1, func(i int) uint64 { return uint64(a[i%16]) })
	case "VEXTRACTF128", "VEXTRACTI128":
		copy(out[:16], m.vector(in.args[1])[16*imm():][:16])
	case "VEXTRACTF64X4":
		copy(out[:32], m.vector(in.args[1])[32*imm():][:32])
	case "VPSHUFB":
		control, a := src(0, n), src(1, n)
		words(1, func(i int) uint64 {
			if control[i]&0x80 != 0 {
				return 0
			}
			return uint64(a[laneOf(i)+int(control[i]&15)])
		})
	case "VPERMPS":
		a, index := src(0, n), src(1, n)
		words(4, func(i int) uint64 { return get(a, 4, int(get(index, 4, i))%(n/4)) })
	case "VPUNPCKLBW":
		unpack(0)
	case "VPUNPCKHBW":
		unpack(8)
	default:
		panic(fmt.Sprintf("instruction %s is not interpreted", in.op))
	}
	*m.vector(dst) = out
}

// kernels are those of a level, interpreted.
func (l *listing) kernels(level string, like *kernels) *kernels {
	word := func(p any) uint64 {
		switch p := p.(type) {
		case *float32:
			return uint64(uintptr(unsafe.Pointer(p)))
		case *byte:
			return uint64(uintptr(unsafe.Pointer(p)))
		}
		return uint64(p.(int))
	}
	call := func(name string, args ...any) {
		var w []uint64
		for _, a := range args {
			w = append(w, word(a))
		}
		l.call(name+level, w...)
		runtime.KeepAlive(args)
	}
	ks := &kernels{formats: map[num.Format]*kernel{}}
	for i := range ks.dot {
		ks.dot[i] = func(out *float32, ldo int, x0, x1, x2 *float32, w *float32, stride, next, vectors, quads int) {
			call(fmt.Sprint("dot", i+1), out, ldo, x0, x1, x2, w, stride, next, vectors, quads)
		}
	}
	names := map[num.Format]string{
		num.BF16: "BF16", num.FP32: "FP32", num.FP8RowBF16: "FP8", num.FP8RowFP32: "FP8", num.NVFP4: "NVFP4", num.Q4G64: "Q4", num.Q5G64: "Q5",
		num.Q6G64: "Q6", num.Q8G32: "Q8",
	}
	for f, k := range like.formats {
		name := names[f]
		if l.code["gemv1"+name+level] == nil {
			continue
		}
		c := *k
		c.dot = &ks.dot
		for i := range c.gemv {
			if k.gemv[i] != nil {
				c.gemv[i] = func(out *float32, ldo int, x0, x1 *float32, codes, high, scales *byte, cs, hs, ss, cn, hn, sn, blocks, quads int) {
					call(fmt.Sprint("gemv", i+1, name), out, ldo, x0, x1, codes, high, scales, cs, hs, ss, cn, hn, sn, blocks, quads)
				}
			}
		}
		if k.decode != nil {
			c.decode = func(dst *float32, codes, high, scales *byte, blocks int) {
				call("decode"+name, dst, codes, high, scales, blocks)
			}
		}
		ks.formats[f] = &c
	}
	return ks
}

// The interpreter does what the processor does.
func TestInterpreter(t *testing.T) {
	if best() < AVX2 {
		t.Skip("this processor has no AVX2")
	}
	compareKernels(t, readListing(t).kernels("AVX2", &kernelsAVX2), &kernelsAVX2)
}

// The AVX-512 kernels give the products of the represented weights, and the same bits however rows are grouped.
func TestMultiplyAVX512(t *testing.T) {
	ks := readListing(t).kernels("AVX512", &kernelsAVX512)
	if len(ks.formats) < 7 {
		t.Fatalf("only %d formats have AVX-512 kernels", len(ks.formats))
	}
	testMultiply(t, ks, [][2]int{{3, 7}, {5, 16}, {37, 320}, {128, 64}, {9, 640}})
	if best() >= AVX512 {
		compareKernels(t, ks, &kernelsAVX512)
	}
}
