package num

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
)

// sourceX is X(n,k,e) of docs/format.md 7.
func sourceX(n, k, e int) float32 {
	return float32((977*e+131*n+17*k)%257-128) / 64
}

// bf16Bytes makes little-endian BF16 from exactly representable values.
func bf16Bytes(values ...float32) []byte {
	var b []byte
	for _, v := range values {
		b = binary.LittleEndian.AppendUint16(b, uint16(math.Float32bits(v)>>16))
	}
	return b
}

// hexWords makes little-endian 16-bit words from text.
func hexWords(t testing.TB, s string) []byte {
	var b []byte
	for f := range strings.FieldsSeq(s) {
		var w uint16
		if _, err := fmt.Sscanf(f, "%x", &w); err != nil {
			t.Fatal(err)
		}
		b = binary.LittleEndian.AppendUint16(b, w)
	}
	return b
}

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

func geometry(t testing.TB, f Format, shape ...int) *Geometry {
	t.Helper()
	g, err := NewGeometry(f, LayoutOf(f, len(shape)), shape)
	if err != nil {
		t.Fatal(err)
	}
	return &g
}

// encode encodes a whole matrix with runs of the given number of rows.
func encode(t testing.TB, g *Geometry, src []byte, run int) []byte {
	t.Helper()
	object := make([]byte, g.Bytes)
	for r := 0; r < g.Rows; r += run {
		end := min(r+run, g.Rows)
		dst, err := g.RowBytes(object, r, end)
		if err != nil {
			t.Fatal(err)
		}
		if err := g.EncodeRows(dst, src[2*r*g.Cols:2*end*g.Cols]); err != nil {
			t.Fatal(err)
		}
	}
	return object
}

func scaleWords(b []byte) string {
	var out []string
	for i := 0; i < len(b); i += 2 {
		out = append(out, fmt.Sprintf("%04x", binary.LittleEndian.Uint16(b[i:])))
	}
	return strings.Join(out, " ")
}

func TestRowEncoderVectors(t *testing.T) {
	var m3 []byte
	for n := range 3 {
		for k := range 200 {
			m3 = append(m3, bf16Bytes(sourceX(n, k, 0))...)
		}
	}
	if got, want := sum(m3), "0b7765fbb762c77e9051610b7c003014f485b13e0a17e6c1b2c009e624d8ce1e"; got != want {
		t.Fatalf("source digest %s, want %s", got, want)
	}
	m4 := append(slices.Clone(m3), make([]byte, 400)...)
	for _, c := range []struct {
		f      Format
		src    []byte
		sha    string
		scales string
		codes  []int8
	}{
		{Q4G64, m3, "b4f1e94bc35d08c3094ca97cd0ec215f4f85ac9f4c7549fba2b08de4c5f7fa6b", "3492 3489 3492 3449", []int8{-7, -6, -5, -4, -3, -2}},
		{Q5G64, m3, "a900024690cd985c380650d1dc2310132ede1892f06aaccb4400ab473c08b1ac", "3044 303c 3044 3000", []int8{-15, -13, -11, -9, -7, -5}},
		{Q6G64, m3, "7038c7f9cb8fce0739c1407d4bdc94afb5decb8c112cc6dd7f06608e91f3c987", "2c21 2c19 2c21 2bbe", []int8{-31, -27, -23, -19, -15, -10}},
		{Q8G32, m3, "2e6ae6d6bb8e73714f698a09cc6eae00ead6e81ff4cc15c34e5120579d2f1eb6", "2408 23bf 23bf 2400 2408 23d0 238f 0000", []int8{-127, -110, -93, -76, -60, -43}},
		{FP8RowBF16, m4, "a2b60026352860bc19f12b09ffeffa25b6499c5bea872d4d6bd32fdcce3771ba", "3b92 3b92 3b92 0000", i8(0xfe, 0xfc, 0xfa, 0xf8, 0xf5, 0xf1, 0xeb, 0xe0)},
	} {
		g := geometry(t, c.f, len(c.src)/400, 200)
		for _, run := range []int{1, 2, g.Rows} {
			object := encode(t, g, c.src, run)
			if got := sum(object); got != c.sha {
				t.Errorf("%s in runs of %d rows: digest %s, want %s", c.f, run, got, c.sha)
			}
			tensor, err := NewTensor(g.Format, g.Layout, []int{g.Rows, g.Cols}, object)
			if err != nil {
				t.Fatal(err)
			}
			if err := tensor.Validate(); err != nil {
				t.Errorf("%s: %v", c.f, err)
			}
			p := tensor.Planes()
			scales := p.Scales
			if c.f != FP8RowBF16 {
				scales = scales[:p.ScaleStride]
			}
			if got := scaleWords(scales); got != c.scales {
				t.Errorf("%s: scales %s, want %s", c.f, got, c.scales)
			}
			codes := make([]int8, 200)
			UnpackCodes(c.f, codes, p.Codes[:p.CodeStride], p.High[:p.HighStride])
			if got := codes[:len(c.codes)]; !slices.Equal(got, c.codes) {
				t.Errorf("%s: codes %v, want %v", c.f, got, c.codes)
			}
		}
	}
}

func i8(b ...byte) []int8 {
	var out []int8
	for _, c := range b {
		out = append(out, int8(c))
	}
	return out
}

func TestFP8RowSaturates(t *testing.T) {
	src := hexWords(t, "3f80 bf00 3e9a 0000 8000 3b00 bf80 3f40")
	got := encode(t, geometry(t, FP8RowBF16, 1, 8), src, 1)
	if c := hex.EncodeToString(got[:8]); c != "7ef670008036fe7b" {
		t.Errorf("codes %s", c)
	}
	if s := scaleWords(got[256:]); s != "3b12" {
		t.Errorf("scale %s, want 3b12", s)
	}
	// An all-zero row has codes 0x00 even where the source is -0.
	if got := encode(t, geometry(t, FP8RowBF16, 1, 2), hexWords(t, "8000 0000"), 1); !slices.Equal(got, make([]byte, 258)) {
		t.Errorf("zero row: %x", got)
	}
}

func TestFP8TableVectors(t *testing.T) {
	var src []byte
	for n := range 2 {
		for k := range 160 {
			src = append(src, bf16Bytes(sourceX(n, k, 0)/128)...)
		}
	}
	for _, c := range []struct {
		src   []byte
		amax  float32
		word  uint16
		first string
		sha   string
	}{
		{src, 0.015625, 0x3813, "fefcfaf8f5f1ebe0", "ba27cfdf8a9192676c5942b058ea933efdad60516f0e0def8a32a359692f1548"},
		{hexWords(t, "3f80 be9a 0000 8000 3c24"), 1, 0x3b13, "7ef0008049", ""},
	} {
		amax, err := MaxAbsBF16(c.src)
		if err != nil || amax != c.amax {
			t.Fatalf("amax %v, %v; want %v", amax, err, c.amax)
		}
		word, err := FP8TableMultiplier(amax)
		if err != nil || word != c.word {
			t.Fatalf("multiplier %04x, %v; want %04x", word, err, c.word)
		}
		table, err := NewFP8Table(word)
		if err != nil {
			t.Fatal(err)
		}
		dst := make([]byte, len(c.src)/2)
		if err := table.Encode(dst, c.src); err != nil {
			t.Fatal(err)
		}
		if got := hex.EncodeToString(dst[:len(c.first)/2]); got != c.first {
			t.Errorf("codes %s, want %s", got, c.first)
		}
		if got := sum(dst); c.sha != "" && got != c.sha {
			t.Errorf("digest %s, want %s", got, c.sha)
		}
	}
}

// The corner of docs/format.md 6.5: the multiplier is the smallest BF16 value
// not below amax/448, also where rounding gives a power of two that is too
// small. Every multiplier of every magnitude is compared with that definition.
func TestFP8TableMultiplierIsSmallest(t *testing.T) {
	for a := 1; a < 0x7f80; a++ {
		amax := FromBF16(uint16(a))
		w, err := FP8TableMultiplier(amax)
		if err != nil {
			t.Fatal(err)
		}
		// 448*m has eleven significant bits and is exact in float64.
		if 448*float64(FromBF16(w)) < float64(amax) || 448*float64(FromBF16(w-1)) >= float64(amax) {
			t.Fatalf("amax %v: multiplier %04x", amax, w)
		}
	}
}

func TestNVFP4BankVector(t *testing.T) {
	const n, k = 128, 64
	var src []byte
	for e := range 2 {
		for r := range n {
			for c := range k {
				v := float32(0)
				if r != 5 || c < 16 || c > 31 {
					v = sourceX(r, c, e) / float32(int(1)<<(5*e))
				}
				src = append(src, bf16Bytes(v)...)
			}
		}
	}
	if got, want := sum(src), "0d3b7e9241d6b50a22f250f19b266c1758aabe75ffbb3264e019198aba777711"; got != want {
		t.Fatalf("source digest %s, want %s", got, want)
	}
	for _, p := range []Profile{ProfileA, ProfileB} {
		object := make([]byte, 9224)
		bank, err := NewTensor(NVFP4, ExpertBlockScale, []int{2, n, k}, object)
		if err != nil {
			t.Fatal(err)
		}
		v := bank.Planes()
		for e := range 2 {
			d, err := EncodeNVFP4(p, n, k, src[e*2*n*k:][:2*n*k],
				v.Codes[e*v.ExpertCodes:][:v.ExpertCodes], v.Scales[e*v.ExpertScales:][:v.ExpertScales])
			if err != nil {
				t.Fatal(err)
			}
			binary.LittleEndian.PutUint32(v.Divisors[4*e:], math.Float32bits(d))
		}
		for _, c := range []struct{ what, got, want string }{
			{"payload", sum(object), "7462472b95a3349fea7006ba9294aaa547c6c6f294ae5458a59b6e79f9705849"},
			{"codes", sum(v.Codes), "cc891f5a717b61fd134df604ff59a989ae078741cfa2c4f4a6d284f6707f8e88"},
			{"scales", sum(v.Scales), "19aee3c5afd2688cd28072261d953256216159d8eccbeb49b2815becea0cd372"},
			{"divisors", hex.EncodeToString(v.Divisors), "0000a84400002847"},
			{"first codes", hex.EncodeToString(v.Codes[:8]), "ffeecd9a21546677"},
			{"first scales", hex.EncodeToString(v.Scales[:8]), "7e7e7d7d7d7d7d7e"},
		} {
			if c.got != c.want {
				t.Errorf("profile %d: %s %s, want %s", p, c.what, c.got, c.want)
			}
		}
		if err := bank.Validate(); err != nil {
			t.Error(err)
		}
	}
}

// The two groups of docs/format.md 2.8 where the profiles differ, each placed in
// an otherwise small matrix whose largest magnitude is the expert's.
func TestNVFP4ProfileGroups(t *testing.T) {
	first := hexWords(t, "bc22 bcc3 3c2e bbe7 bce0 3c8c 3c0e 3b3a bc77 bb92 3c48 3c1f bc87 bc94 3be0 3b71")
	second := bf16Bytes(6, .25, .75, 1.25, 1.75, 2.5, 3.5, 5, -.75, -5, 0, float32(math.Copysign(0, -1)), 0, 0, 1, -6)
	copy(second[24:], hexWords(t, "3dcd bdcd")) // BF16 of 0.1 and -0.1
	for _, c := range []struct {
		group   []byte
		amax    float32
		divisor uint32
		scale   byte
		a, b    string
	}{
		{first, 0.35546875, 0x45ec4ec5, 0x61, "ecb46f14ad45ed23", "fcb46f14ad45ed23"},
		{second, 6, 0x43e00000, 0x7e, "07224466ea8080f2", "07224466ea0080f2"},
	} {
		src := make([]byte, 2*128*64)
		copy(src, c.group)
		copy(src[2*64:], bf16Bytes(c.amax))
		for p, want := range map[Profile]string{ProfileA: c.a, ProfileB: c.b} {
			codes, scales := make([]byte, 128*32), make([]byte, 512)
			d, err := EncodeNVFP4(p, 128, 64, src, codes, scales)
			if err != nil {
				t.Fatal(err)
			}
			if math.Float32bits(d) != c.divisor || scales[0] != c.scale {
				t.Errorf("profile %d: divisor %08x scale %02x, want %08x %02x", p, math.Float32bits(d), scales[0], c.divisor, c.scale)
			}
			if got := hex.EncodeToString(codes[:8]); got != want {
				t.Errorf("profile %d: codes %s, want %s", p, got, want)
			}
		}
	}
	if g, d := math.Float32bits(GateUpActivationDivisor), math.Float32bits(DownActivationDivisor); g != 0x42e00000 || d != 0x3f7cfcfd {
		t.Errorf("activation divisors %08x %08x, want 42e00000 3f7cfcfd", g, d)
	}
}

// The packing examples of docs/format.md 3.2, 3.3, 3.6 and 3.7.
func TestLayoutExamples(t *testing.T) {
	for _, c := range []struct {
		f                 Format
		base, high        string
		group2, group2hi  string
		lanes             []int8
		scales            string
		highLen, scaleLen int
	}{
		{
			Q4G64, "d8721cb650fa943e", "", "d800000000000000", "",
			[]int8{-8, -3, 2, 7, -4, 1, 6, -5},
			"003c013c023c0000103c113c123c0000", 0, 16,
		},
		{
			Q5G64, "50fa943ed8721cb6", "8fe3701c8fe3701c", "5000000000000000", "0300000000000000",
			[]int8{-16, -11, -6, -1, 4, 9, 14, -13},
			"003c013c023c0000103c113c123c0000", 64, 16,
		},
		{
			Q6G64, "50fa943ed8721cb6", "aa3f50a9ff40a5fe", "5000000000000000", "0a00000000000000",
			[]int8{-32, -27, -22, -17, -12, -7, -2, 3},
			"003c013c023c0000103c113c123c0000", 128, 16,
		},
		{
			Q8G32, "81868b90959a9fa4", "", "", "",
			[]int8{-127, -122, -117, -112, -107, -102, -97, -92},
			"", 0, 32,
		},
	} {
		g := geometry(t, c.f, 2, 130)
		tensor, err := NewTensor(c.f, RowSplitK128, []int{2, 130}, make([]byte, g.Bytes))
		if err != nil {
			t.Fatal(err)
		}
		p := tensor.Planes()
		if len(p.High) != c.highLen || len(p.Scales) != c.scaleLen {
			t.Errorf("%s: planes of %d and %d bytes, want %d and %d", c.f, len(p.High), len(p.Scales), c.highLen, c.scaleLen)
		}
		var codes [2][130]int8
		for r := range 2 {
			for i := range 130 {
				if c.f == Q8G32 {
					codes[r][i] = int8((5*i+3*r)%255 - 127)
				} else {
					b := c.f.codeBits()
					codes[r][i] = int8((5*i+3*r)%(1<<b) - 1<<(b-1))
				}
			}
			for s := range (130 + g.Group - 1) / g.Group {
				binary.LittleEndian.PutUint16(p.Scales[r*p.ScaleStride+2*s:], uint16(0x3c00+16*r+s))
			}
			PackCodes(c.f, codes[r][:], p.Codes[r*p.CodeStride:][:p.CodeStride], p.High[r*p.HighStride:][:p.HighStride])
		}
		check := func(what string, got []byte, want string) {
			t.Helper()
			if n := len(want) / 2; len(got) < n || hex.EncodeToString(got[:n]) != want {
				t.Errorf("%s %s: %x, want %s", c.f, what, got[:min(n, len(got))], want)
			}
		}
		check("base", p.Codes, c.base)
		check("high", p.High, c.high)
		check("scales", p.Scales, c.scales)
		if c.group2 != "" {
			check("base of group 2", p.Codes[64:], c.group2)
		}
		if c.group2hi != "" {
			check("high of group 2", p.High[2*highBytes(c.f):], c.group2hi)
		}
		if !slices.Equal(codes[0][:8], c.lanes) {
			t.Errorf("%s: the test's formula gives %v, want %v", c.f, codes[0][:8], c.lanes)
		}
		if err := tensor.Validate(); err != nil {
			t.Errorf("%s: %v", c.f, err)
		}
		row := make([]float64, 130)
		for r := range 2 {
			var back [130]int8
			UnpackCodes(c.f, back[:], p.Codes[r*p.CodeStride:][:p.CodeStride], p.High[r*p.HighStride:][:p.HighStride])
			if back != codes[r] {
				t.Errorf("%s row %d: unpacked %v", c.f, r, back)
			}
			tensor.DecodeRow(row, r)
			for i, got := range row {
				// 0x3c00 + m is 1 + m/1024.
				want := (1 + float64(16*r+i/g.Group)/1024) * float64(codes[r][i])
				if got != want {
					t.Fatalf("%s [%d,%d]: %v, want %v", c.f, r, i, got, want)
				}
			}
		}
	}
}

func TestContiguousExample(t *testing.T) {
	b, _ := hex.DecodeString("01000000feffffff2c010000")
	tensor, err := NewTensor(Int32, Contiguous, []int{3}, b)
	if err != nil {
		t.Fatal(err)
	}
	row := make([]float64, 3)
	tensor.DecodeRow(row, 0)
	if !slices.Equal(row, []float64{1, -2, 300}) {
		t.Errorf("got %v", row)
	}
}

func TestPackedU4Example(t *testing.T) {
	tensor, err := NewTensor(U4Z8G16, PackedU4, []int{2, 32}, make([]byte, 264))
	if err != nil {
		t.Fatal(err)
	}
	p := tensor.Planes()
	copy(p.Scales, hexWords(t, "3c00 3800 0001 2e66"))
	scales := [2][2]float64{{1, 0.5}, {0x1p-24, float64(0x666) / 0x4000}} // 0x2e66 = 1.599609375 * 2^-4
	for r := range 2 {
		var u [32]int8
		for k := range u {
			u[k] = int8((5*k + r) % 16)
		}
		PackCodes(U4Z8G16, u[:], p.Codes[r*16:][:16], nil)
		row := make([]float64, 32)
		tensor.DecodeRow(row, r)
		for k, got := range row {
			if want := float64(u[k]-8) * scales[r][k/16]; got != want {
				t.Errorf("[%d,%d]: %v, want %v", r, k, got, want)
			}
		}
	}
	if got, want := hex.EncodeToString(p.Codes), "50fa943ed8721cb650fa943ed8721cb6610ba54fe9832dc7610ba54fe9832dc7"; got != want {
		t.Errorf("codes %s, want %s", got, want)
	}
	if got, want := hex.EncodeToString(p.Scales), "003c00380100662e"; got != want {
		t.Errorf("scales %s, want %s", got, want)
	}
	if got, want := sum(tensor.Data), "56b5ef1ea3a3c4534f4d7533221ceeb6e73e13730b23baf821de652c901fd019"; got != want {
		t.Errorf("digest %s, want %s", got, want)
	}
	if err := tensor.Validate(); err != nil {
		t.Error(err)
	}
}

func TestRowScaleExample(t *testing.T) {
	for _, c := range []struct {
		f      Format
		scales []byte
	}{
		{FP8RowBF16, hexWords(t, "3f00 4000")},
		{FP8RowFP32, []byte{0, 0, 0, 0x3f, 0, 0, 0, 0x40}},
	} {
		g := geometry(t, c.f, 2, 3)
		tensor, err := NewTensor(c.f, g.Layout, []int{2, 3}, make([]byte, g.Bytes))
		if err != nil {
			t.Fatal(err)
		}
		copy(tensor.Data, []byte{0x38, 0xb8, 0x7e, 0x01, 0x80, 0x40})
		copy(tensor.Data[256:], c.scales)
		for r, want := range [][]float64{{0.5, -0.5, 224}, {0x1p-8, 0, 4}} {
			row := make([]float64, 3)
			tensor.DecodeRow(row, r)
			if !slices.Equal(row, want) {
				t.Errorf("%s row %d: %v, want %v", c.f, r, row, want)
			}
		}
		if err := tensor.Validate(); err != nil {
			t.Error(err)
		}
	}
}

func TestCheckpointDivisors(t *testing.T) {
	for _, c := range []struct {
		m, want float32
		ok      bool
	}{
		{0.25, 4, true},
		{3, 1. / 3, true},
		{math.MaxFloat32, 1 / float32(math.MaxFloat32), true}, // the reciprocal is subnormal
		{0, 0, false},
		{-1, 0, false},
		{0x1p-149, 0, false},
		{float32(math.Inf(1)), 0, false},
		{float32(math.NaN()), 0, false},
	} {
		got, err := ModelOptDivisor(c.m)
		if got != c.want || (err == nil) != c.ok {
			t.Errorf("ModelOptDivisor(%v) = %v, %v", c.m, got, err)
		}
	}
	if d, err := PackedFusedDivisor(1344, 1344); d != 1344 || err != nil {
		t.Errorf("PackedFusedDivisor: %v, %v", d, err)
	}
	for _, p := range [][2]float32{{1, 2}, {0, 0}, {-1, -1}, {float32(math.Inf(1)), float32(math.Inf(1))}} {
		if _, err := PackedFusedDivisor(p[0], p[1]); err == nil {
			t.Errorf("PackedFusedDivisor(%v, %v) accepted", p[0], p[1])
		}
	}
	if CheckPackedInputScale(1) != nil || CheckPackedInputScale(1.0000001) == nil {
		t.Error("input scale check")
	}
}
