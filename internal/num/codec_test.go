package num

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// shapes has one small shape of every format; columns are not multiples of the
// padding where the layout allows that.
var shapes = []struct {
	f     Format
	shape []int
}{
	{BF16, []int{3, 2, 5}},
	{FP32, []int{4, 3}},
	{Int32, []int{4, 3}},
	{Int64, []int{7}},
	{FP8, []int{4, 33}},
	{Q4G64, []int{3, 199}},
	{Q5G64, []int{3, 201}},
	{Q6G64, []int{3, 130}},
	{Q8G32, []int{3, 45}},
	{NVFP4, []int{256, 192}},
	{NVFP4, []int{3, 128, 128}},
	{FP8RowBF16, []int{5, 77}},
	{FP8RowFP32, []int{5, 77}},
	{U4Z8G16, []int{5, 48}},
}

// legal turns arbitrary bytes into the words of a valid tensor by changing
// illegal words only.
func legal(t testing.TB, f Format, shape []int, data []byte) Tensor {
	t.Helper()
	g := geometry(t, f, shape...)
	object := make([]byte, g.Bytes)
	copy(object, data)
	for _, s := range g.Gaps() {
		clear(object[s.Off : s.Off+s.Len])
	}
	tensor, err := NewTensor(f, g.Layout, shape, object)
	if err != nil {
		t.Fatal(err)
	}
	p := tensor.Planes()
	le := binary.LittleEndian
	switch f {
	case FP8RowBF16, FP8RowFP32:
		for i := range p.Codes {
			if p.Codes[i]&0x7f == 0x7f {
				p.Codes[i] ^= 1
			}
		}
		size := p.ScaleStride
		for r := range g.Rows {
			s := p.Scales[r*size:][:size]
			s[size-1] &= 0x7f
			if s[size-1] == 0x7f {
				s[size-1] = 0x3f
			}
			if !slices.ContainsFunc(s, func(b byte) bool { return b != 0 }) {
				for i := range g.Cols {
					p.Codes[r*g.Cols+i] &= 0x80
				}
			}
		}
	case NVFP4:
		for i := range p.Scales {
			if p.Scales[i] &= 0x7f; p.Scales[i] == 0x7f {
				p.Scales[i] = 0x7e
			}
		}
		for e := range g.Experts {
			if d := math.Float32frombits(le.Uint32(p.Divisors[4*e:])); !positive(d) {
				le.PutUint32(p.Divisors[4*e:], 0x43e00000)
			}
		}
	case U4Z8G16:
		for i := range len(p.Scales) / 2 {
			if p.Scales[2*i+1] &= 0x7b; le.Uint16(p.Scales[2*i:]) == 0 {
				copy(p.Codes[8*i:][:8], "\x88\x88\x88\x88\x88\x88\x88\x88")
			}
		}
	case Q4G64, Q5G64, Q6G64, Q8G32:
		lanes := make([]int8, g.PaddedCols)
		for r := range g.Rows {
			codes, high, scales := tensor.row(r)
			UnpackCodes(f, lanes, codes, high)
			for k := range g.Groups {
				if scales[2*k+1] &= 0x7b; k*g.Group >= g.Cols {
					clear(scales[2*k : 2*k+2])
				}
				for i := k * g.Group; i < (k+1)*g.Group; i++ {
					if i >= g.Cols || lanes[i] == -128 || le.Uint16(scales[2*k:]) == 0 {
						lanes[i] = 0
					}
				}
			}
			PackCodes(f, lanes, codes, high)
		}
	}
	return tensor
}

func randomBytes(r *rand.Rand, n int64) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// element is the value of one element by the letter of docs/format.md 2 and
// 3, computed from the object's bytes alone, without the package's
// geometry, tables or unpackers. num and den are exact; the value is num/den.
func element(f Format, shape []int, b []byte, row, col int) (num, den float64) {
	le := binary.LittleEndian
	cols := shape[len(shape)-1]
	rows := 1
	for _, d := range shape[:len(shape)-1] {
		rows *= d
	}
	up := func(x, a int) int { return (x + a - 1) / a * a }
	small := func(s spec, w uint16) float64 { return s.value(w) }
	i := row*cols + col
	nibble := func(off, i int) int { return int(b[off+i/2]) >> (4 * (i % 2)) & 15 }
	f16At := func(off int) float64 { return small(specs[1], le.Uint16(b[off:])) }
	switch f {
	case BF16:
		return small(specs[0], le.Uint16(b[2*i:])), 1
	case FP32:
		return float64(math.Float32frombits(le.Uint32(b[4*i:]))), 1
	case Int32:
		return float64(int32(le.Uint32(b[4*i:]))), 1
	case Int64:
		return float64(int64(le.Uint64(b[8*i:]))), 1
	case FP8:
		return small(specs[2], uint16(b[i])), 1
	case FP8RowBF16:
		return small(specs[2], uint16(b[i])) * small(specs[0], le.Uint16(b[up(rows*cols, 256)+2*row:])), 1
	case FP8RowFP32:
		return small(specs[2], uint16(b[i])) * float64(math.Float32frombits(le.Uint32(b[up(rows*cols, 256)+4*row:]))), 1
	case U4Z8G16:
		return float64(nibble(0, i)-8) * f16At(up(rows*cols/2, 256)+i/16*2), 1
	case NVFP4:
		experts, n := 1, rows
		if len(shape) == 3 {
			experts, n = shape[0], shape[1]
		}
		e, r, g := row/n, row%n, col/16
		so := up(rows*cols/2, 256)
		swz := (r/128*(cols/64)+g/4)*512 + (r%32)*16 + (r%128)/32*4 + g%4
		scale := small(specs[2], uint16(b[so+e*n*cols/16+swz]))
		d := math.Float32frombits(le.Uint32(b[so+experts*n*cols/16+4*e:]))
		return small(specs[3], uint16(nibble(0, i))) * scale, float64(d)
	}
	// row_split_k128_v1
	bits := map[Format]int{Q4G64: 4, Q5G64: 5, Q6G64: 6, Q8G32: 8}[f]
	hi := map[Format]int{Q5G64: 8, Q6G64: 16}[f]
	G := 64
	if f == Q8G32 {
		G = 32
	}
	groups := up(cols, 128) / G
	group, lane := row*groups+col/G, col%G
	highOff := up(rows*groups*32, 256)
	scaleOff := highOff + up(rows*groups*hi, 256)
	var u int
	switch f {
	case Q8G32:
		u = int(b[group*32+lane])
	default:
		u = nibble(group*32, lane)
		for k := range bits - 4 { // bits-4 high bits a lane, as one bit stream
			t := (bits-4)*lane + k
			u |= int(b[highOff+group*hi+t/8]) >> (t % 8) & 1 << (4 + k)
		}
	}
	if u >= 1<<(bits-1) {
		u -= 1 << bits
	}
	return float64(u) * f16At(scaleOff+2*group), 1
}

// ulp32 is the spacing of binary32 at x.
func ulp32(x float64) float64 {
	x = math.Abs(x)
	if x < 0x1p-126 {
		return 0x1p-149
	}
	_, e := math.Frexp(x)
	return math.Ldexp(1, e-24)
}

func TestDecodeRowsOfAllFormats(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for _, c := range shapes {
		for range 3 {
			tensor := legal(t, c.f, c.shape, randomBytes(r, geometry(t, c.f, c.shape...).Bytes))
			if err := tensor.Validate(); err != nil {
				t.Fatalf("%s: %v", c.f, err)
			}
			row, row32 := make([]float64, tensor.Cols()), make([]float32, tensor.Cols())
			for i := range tensor.Rows() {
				tensor.DecodeRow(row, i)
				tensor.DecodeRow32(row32, i)
				for j, got := range row {
					num, den := element(c.f, c.shape, tensor.Data, i, j)
					want := num / den
					if got != want && (got == got || want == want) {
						t.Fatalf("%s [%d,%d]: %v, want %v", c.f, i, j, got, want)
					}
					got32, want32 := float64(row32[j]), float64(float32(want))
					if c.f == NVFP4 || c.f == Int64 {
						// float32(want) rounds a second time, which can differ from one
						// rounding by a unit in the last place at a near tie.
						if math.Abs(got32-want) > ulp32(want)/2*(1+0x1p-20) && got32 != want32 {
							t.Fatalf("%s [%d,%d]: float32 %v, want %v", c.f, i, j, got32, want)
						}
					} else if got32 != want32 && (got32 == got32 || want32 == want32) {
						t.Fatalf("%s [%d,%d]: float32 %v, want %v", c.f, i, j, got32, want32)
					}
				}
				if c.f == NVFP4 {
					continue
				}
				s, err := tensor.Geometry().RowSpans(i, i+1)
				if err != nil {
					t.Fatal(err)
				}
				cut := func(s Span) []byte { return tensor.Data[s.Off:][:s.Len] }
				alone := make([]float32, len(row32))
				DecodeRowBytes32(c.f, alone, cut(s.Codes), cut(s.High), cut(s.Scales))
				for j := range alone {
					if math.Float32bits(alone[j]) != math.Float32bits(row32[j]) {
						t.Fatalf("%s [%d,%d]: alone %v, in the tensor %v", c.f, i, j, alone[j], row32[j])
					}
				}
			}
		}
	}
}

func TestRankZero(t *testing.T) {
	tensor, err := NewTensor(FP32, Contiguous, nil, []byte{0, 0, 0x80, 0x3f})
	if err != nil {
		t.Fatal(err)
	}
	var row [1]float64
	tensor.DecodeRow(row[:], 0)
	if tensor.Rows() != 1 || tensor.Cols() != 1 || row[0] != 1 {
		t.Errorf("rows %d, cols %d, value %v", tensor.Rows(), tensor.Cols(), row[0])
	}
}

func TestNewTensorSize(t *testing.T) {
	for _, n := range []int{0, 259, 261} {
		if _, err := NewTensor(FP8RowBF16, RowScale, []int{2, 3}, make([]byte, n)); err == nil || !strings.Contains(err.Error(), "260") {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
}

func TestDecodeDoesNotAllocate(t *testing.T) {
	for _, c := range shapes {
		tensor := legal(t, c.f, c.shape, nil)
		row, row32 := make([]float64, tensor.Cols()), make([]float32, tensor.Cols())
		if n := testing.AllocsPerRun(10, func() { tensor.DecodeRow(row, 0); tensor.DecodeRow32(row32, 0) }); n != 0 {
			t.Errorf("%s: %v allocations a row", c.f, n)
		}
	}
}

// Every kind of illegal word is refused, with its place named.
func TestValidateRefuses(t *testing.T) {
	type poke struct {
		off  int
		want string // in the error; empty: still valid
		b    string // hex
	}
	for _, c := range []struct {
		f     Format
		shape []int
		pokes []poke
	}{
		{FP8RowBF16, []int{2, 3}, []poke{
			{4, "row 1 column 1 (offset 4): fp8 code 0x7f is NaN", "7f"},
			{2, "row 0 column 2 (offset 2): fp8 code 0xff is NaN", "ff"},
			{0, "row 0 column 0 (offset 0): fp8 code 0x01 in a row whose scale is zero", "01"},
			{1, "", "80"},
			{258, "row 1 (offset 258): row scale 0x8000", "0080"},
			{256, "row 0 (offset 256): row scale 0x7f80", "807f"},
			{256, "row 0 (offset 256): row scale 0x7fc0", "c07f"},
			{256, "", "7f7f"},
			{256, "", "0100"},
			{6, "padding at offset 6 ", "01"},
			{255, "padding at offset 255 ", "80"},
		}},
		{FP8RowFP32, []int{2, 3}, []poke{
			{3, "row 1 column 0 (offset 3): fp8 code 0x7f", "7f"},
			{5, "row 1 column 2 (offset 5): fp8 code 0x81 in a row", "81"},
			{260, "row 1 (offset 260): row scale 0x80000000", "00000080"},
			{256, "row 0 (offset 256): row scale 0x7f800000", "0000807f"},
			{256, "", "ffff7f7f"},
			{100, "padding at offset 100 ", "01"},
		}},
		{NVFP4, []int{2, 128, 64}, []poke{
			{0, "", "ffffffff"},
			{8192, "row 0 column 0 (offset 8192): scale 0x7f", "7f"},
			{8192, "", "7e"},
			{8192 + 22, "row 33 column 32 (offset 8214): scale 0x80", "80"},
			{8192 + 511, "row 127 column 48 (offset 8703): scale 0xff", "ff"},
			{8192 + 512 + 16, "row 129 column 0 (offset 8720): scale 0xfe", "fe"},
			{9216, "expert 0 (offset 9216): divisor 0 ", "00000000"},
			{9220, "expert 1 (offset 9220): divisor -1 ", "000080bf"},
			{9220, "expert 1 (offset 9220): divisor +Inf", "0000807f"},
			{9220, "expert 1 (offset 9220): divisor NaN", "0000c07f"},
			{9220, "", "01000000"},
		}},
		{U4Z8G16, []int{2, 32}, []poke{
			{9, "row 0 column 19 (offset 9): code 7 in a group", "78"},
			{31, "row 1 column 30 (offset 31): code 0 in a group", "80"},
			{260, "row 1 column 0 (offset 260): scale 0x8000", "0080"},
			{258, "row 0 column 16 (offset 258): scale 0x7c00", "007c"},
			{258, "", "ff7b"},
			{32, "padding at offset 32 ", "01"},
		}},
		{Q4G64, []int{2, 130}, []poke{
			{5, "row 0 column 10 (offset 5): q4_g64_fp16 code -8 in a group whose scale is zero", "08"},
			{128 + 65, "row 1 column 130 (offset 193): q4_g64_fp16 code 1 beyond the last column", "01"},
			{128 + 96, "row 1 column 193 (offset 224): q4_g64_fp16 code -1 beyond the last column", "f0"},
			{256, "row 0 column 0 (offset 256): scale 0x8000", "0080"},
			{266, "row 1 column 64 (offset 266): scale 0x7c00", "007c"},
			{266, "", "0100"},
			{270, "row 1 column 192 (offset 270): scale 0x0001 of a group beyond", "0100"},
		}},
		{Q5G64, []int{1, 130}, []poke{
			{128, "padding at offset 128 ", "01"},
			{256, "row 0 column 3 (offset 1): q5_g64_fp16 code -16 in a group whose scale is zero", "08"},
			{256 + 16, "row 0 column 130 (offset 65): q5_g64_fp16 code -16 beyond", "04"},
		}},
		{Q6G64, []int{1, 130}, []poke{
			{256 + 1, "row 0 column 5 (offset 2): q6_g64_fp16 code 16 in a group whose scale is zero", "04"},
			{256 + 32 + 1, "row 0 column 132 (offset 66): q6_g64_fp16 code -32 beyond", "02"},
			{320, "padding at offset 320 ", "01"},
			{512, "row 0 column 0 (offset 512): scale 0xfc00", "00fc"},
		}},
		{Q8G32, []int{1, 130}, []poke{
			{7, "row 0 column 7 (offset 7): q8_g32_fp16 code -128 is not allowed", "80"},
			{32, "row 0 column 32 (offset 32): q8_g32_fp16 code 127 in a group whose scale is zero", "7f"},
			{130, "row 0 column 130 (offset 130): q8_g32_fp16 code 1 beyond", "01"},
			{256 + 10, "row 0 column 160 (offset 266): scale 0x3c00 of a group beyond", "003c"},
		}},
		{FP8, []int{2, 2}, []poke{{0, "", "7fff"}}},
		{BF16, []int{2, 2}, []poke{{0, "", "ffff0080"}}},
	} {
		g := geometry(t, c.f, c.shape...)
		for _, p := range c.pokes {
			tensor := legal(t, c.f, c.shape, nil) // all zero, except what may not be
			b, err := hex.DecodeString(p.b)
			if err != nil {
				t.Fatal(err)
			}
			copy(tensor.Data[p.off:], b)
			err = tensor.Validate()
			switch {
			case p.want == "" && err != nil:
				t.Errorf("%s %s at %d: %v", c.f, p.b, p.off, err)
			case p.want != "" && (err == nil || !strings.HasPrefix(err.Error(), p.want)):
				t.Errorf("%s %s at %d: got %v, want %s...", c.f, p.b, p.off, err, p.want)
			}
		}
		// q8's illegal code is so under any scale.
		if c.f == Q8G32 {
			tensor := legal(t, c.f, c.shape, nil)
			tensor.Data[g.Scales.Off] = 1
			tensor.Data[31] = 0x80
			if err := tensor.Validate(); err == nil {
				t.Error("q8 code -128 accepted")
			}
		}
	}
}

func TestE4M3NaN(t *testing.T) {
	for n := range 40 {
		for _, c := range []byte{0x7f, 0xff} {
			b := bytes.Repeat([]byte{0x7e, 0xfe, 0x80}, 14)[:40]
			if got := E4M3NaN(b); got != -1 {
				t.Fatalf("found %d where there is none", got)
			}
			b[n] = c
			if got := E4M3NaN(b); got != n {
				t.Errorf("NaN at %d: found %d", n, got)
			}
		}
	}
}

func TestEncoderErrors(t *testing.T) {
	rows := func(f Format, src []byte, cols int) error {
		g := geometry(t, f, len(src)/2/cols, cols)
		dst, err := g.NewRowBytes(0, g.Rows)
		if err != nil {
			t.Fatal(err)
		}
		return g.EncodeRows(dst, src)
	}
	for _, bad := range []string{"7f80", "ff80", "7fc0", "ffff", "7f81"} {
		src := hexWords(t, "3f80 3f80 3f80 "+bad)
		for _, f := range []Format{Q4G64, Q5G64, Q6G64, Q8G32, FP8RowBF16} {
			if err := rows(f, src, 2); err == nil || !strings.HasPrefix(err.Error(), "row 1 column 1: source value") {
				t.Errorf("%s of %s: %v", f, bad, err)
			}
		}
		if _, err := MaxAbsBF16(src); err == nil || !strings.HasPrefix(err.Error(), "value 3:") {
			t.Errorf("table of %s: %v", bad, err)
		}
		full := make([]byte, 2*128*64)
		copy(full[2*(64*5+7):], hexWords(t, bad))
		for _, p := range []Profile{ProfileA, ProfileB} {
			if _, err := EncodeNVFP4(p, 128, 64, full, make([]byte, 4096), make([]byte, 512)); err == nil || !strings.HasPrefix(err.Error(), "row 5 column 7: source value") {
				t.Errorf("nvfp4 of %s: %v", bad, err)
			}
		}
	}
	// 65520 is the smallest quotient that rounds to binary16 infinity.
	for _, c := range []struct {
		f    Format
		x    float32
		fail bool
	}{
		{Q4G64, 65520 * 7, false}, // rounded down to BF16 below
		{Q4G64, 65536 * 7, true},
		{Q5G64, 65536 * 15, true},
		{Q6G64, 65536 * 31, true},
		{Q8G32, 65536 * 127, true},
		{FP8RowBF16, 0x1p-118, false},
		{FP8RowBF16, 0x1p-120, true},
		{FP8RowBF16, 0x1p-133, true},
	} {
		src := bf16Bytes(0, c.x)
		if err := rows(c.f, src, 2); (err != nil) != c.fail {
			t.Errorf("%s of %v: %v", c.f, c.x, err)
		}
	}
	// A group with the smallest scale.
	g := geometry(t, Q4G64, 1, 2)
	object := encode(t, g, bf16Bytes(0x1p-133, 0x1p-24), 1)
	if s := scaleWords(object[256:258]); s != "0001" || object[0] != 0x10 {
		t.Errorf("tiny group: scale %s, codes %02x", s, object[0])
	}

	zero := make([]byte, 2*128*64)
	codes, scales := bytes.Repeat([]byte{9}, 4096), bytes.Repeat([]byte{9}, 512)
	if d, err := EncodeNVFP4(ProfileA, 128, 64, zero, codes, scales); d != 1 || err != nil ||
		!slices.Equal(codes, make([]byte, 4096)) || !slices.Equal(scales, make([]byte, 512)) {
		t.Errorf("profile A of zeros: %v, %v", d, err)
	}
	if _, err := EncodeNVFP4(ProfileB, 128, 64, zero, codes, scales); err == nil {
		t.Error("profile B of zeros accepted")
	}
	copy(zero, bf16Bytes(0x1p-130))
	for _, p := range []Profile{ProfileA, ProfileB} {
		if _, err := EncodeNVFP4(p, 128, 64, zero, codes, scales); err == nil {
			t.Errorf("profile %d of values without a finite divisor accepted", p)
		}
	}

	for _, x := range []float32{0, -1, float32(math.Inf(1)), float32(math.NaN())} {
		if _, err := FP8TableMultiplier(x); err == nil {
			t.Errorf("multiplier for %v", x)
		}
		if _, err := NewFP8Table(uint16(math.Float32bits(x) >> 16)); err == nil {
			t.Errorf("table with multiplier %v", x)
		}
	}
	table, err := NewFP8Table(0x3f80)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []float32{450, -450, float32(math.Inf(1)), float32(math.NaN())} {
		if err := table.Encode(make([]byte, 2), bf16Bytes(1, x)); err == nil || !strings.HasPrefix(err.Error(), "value 1:") {
			t.Errorf("table value %v: %v", x, err)
		}
	}
}

func TestDirectEncode(t *testing.T) {
	src := hexWords(t, "3f80 8000 7fc1 0001 ff80 4049")
	if got := encode(t, geometry(t, BF16, 2, 3), src, 1); !slices.Equal(got, src) {
		t.Errorf("bf16: %x", got)
	}
	got := encode(t, geometry(t, FP32, 2, 3), src, 1)
	if h := hex.EncodeToString(got); h != "0000803f"+"00000080"+"0000c17f"+"00000100"+"000080ff"+"00004940" {
		t.Errorf("fp32: %s", h)
	}
}

func TestSwizzleScales(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for _, s := range [][2]int{{128, 64}, {256, 192}, {384, 640}} {
		n, k := s[0], s[1]
		natural := randomBytes(r, int64(n*k/16))
		plane := make([]byte, len(natural))
		// Two calls at a row that is not a tile's border, as when gate and up are fused.
		cut := n/2 + 3
		SwizzleScales(plane, natural, 0, cut, k)
		SwizzleScales(plane, natural[cut*k/16:], cut, n-cut, k)
		for i := range n {
			for g := range k / 16 {
				if plane[Swizzle(i, g, k)] != natural[i*k/16+g] {
					t.Fatalf("%v: word (%d,%d) is misplaced", s, i, g)
				}
				if a, b := unswizzle(Swizzle(i, g, k), k); a != i || b != g {
					t.Fatalf("%v: unswizzle gives (%d,%d), want (%d,%d)", s, a, b, i, g)
				}
			}
		}
	}
}

func BenchmarkDecodeRow32(b *testing.B) {
	for _, c := range []struct {
		f     Format
		shape []int
	}{
		{BF16, []int{8, 2560}},
		{Q4G64, []int{8, 2560}},
		{Q6G64, []int{8, 2560}},
		{NVFP4, []int{128, 2560}},
		{FP8RowBF16, []int{8, 2560}},
		{U4Z8G16, []int{8, 2560}},
	} {
		b.Run(c.f.String(), func(b *testing.B) {
			tensor := legal(b, c.f, c.shape, randomBytes(rand.New(rand.NewPCG(1, 1)), geometry(b, c.f, c.shape...).Bytes))
			row := make([]float32, 2560)
			b.SetBytes(2560)
			for b.Loop() {
				tensor.DecodeRow32(row, 3)
			}
		})
	}
}
