package num

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// seeds gives every fuzz target bytes of several kinds to start from.
func seeds(f *testing.F) {
	r := rand.New(rand.NewPCG(9, 10))
	f.Add(byte(0), []byte{})
	for k := range byte(len(shapes)) {
		f.Add(k, randomBytes(r, 700))
		f.Add(k, make([]byte, 64))
	}
	ones := make([]byte, 600)
	for i := range ones {
		ones[i] = 0xff
	}
	f.Add(byte(5), ones)
}

// Arbitrary source words: the encoder either names an error or makes a tensor
// that is valid, the same for any division into runs, and as near to the source
// as the format's steps allow.
func FuzzEncodeRows(f *testing.F) {
	seeds(f)
	formats := []Format{Q4G64, Q5G64, Q6G64, Q8G32, FP8RowBF16}
	f.Fuzz(func(t *testing.T, kind byte, data []byte) {
		format := formats[int(kind)%len(formats)]
		cols := 1 + int(kind)/len(formats)*7
		rows := len(data) / 2 / cols
		if rows == 0 {
			return
		}
		src := data[:2*rows*cols]
		sameRows(t, format, cols, src)
		g := geometry(t, format, rows, cols)
		object := make([]byte, g.Bytes)
		for i := range object {
			object[i] = 0xaa // destinations need not be clear
		}
		for _, s := range g.Gaps() {
			clear(object[s.Off:][:s.Len])
		}
		all, err := g.RowBytes(object, 0, rows)
		if err != nil {
			t.Fatal(err)
		}
		encodeErr := g.EncodeRows(all, src)
		for r := range rows {
			one, err := g.NewRowBytes(r, r+1)
			if err != nil {
				t.Fatal(err)
			}
			row := src[2*r*cols:][:2*cols]
			if err := g.EncodeRows(one, row); err != nil {
				if encodeErr == nil || encodeErr.Error() != err.Error() {
					t.Fatalf("row %d alone: %v, all rows: %v", r, err, encodeErr)
				}
				return
			}
			here, err := g.RowBytes(object, r, r+1)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(one.Codes, here.Codes) || !slices.Equal(one.High, here.High) || !slices.Equal(one.Scales, here.Scales) {
				t.Fatalf("row %d alone differs", r)
			}
		}
		if encodeErr != nil {
			t.Fatalf("no row fails alone: %v", encodeErr)
		}
		tensor, err := NewTensor(format, g.Layout, []int{rows, cols}, object)
		if err != nil {
			t.Fatal(err)
		}
		if err := tensor.Validate(); err != nil {
			t.Fatal(err)
		}
		values := make([]float64, cols)
		for r := range rows {
			tensor.DecodeRow(values, r)
			_, _, scales := tensor.row(r)
			for i, v := range values {
				x := float64(bf16At(src, r*cols+i))
				var bound float64
				if format == FP8RowBF16 {
					s := float64(FromBF16(binary.LittleEndian.Uint16(scales)))
					// Half a step of three fraction bits, or of the subnormals; the
					// largest values also carry the rounding of the scale (2^-8).
					bound = math.Max(math.Abs(x)*(0x1p-4+0x1p-8), s*0x1p-10*(1+0x1p-20))
					if s == 0x1p-133 {
						bound = s * 448
					}
				} else {
					s := float64(FromF16(binary.LittleEndian.Uint16(scales[i/g.Group*2:])))
					// Half a step; the scale's rounding (2^-11, or half of it for
					// subnormals) can move the largest values out of range.
					bound = s*(0.5+0x1p-11*127) + math.Abs(x)*0x1p-20
					if s < 0x1p-14 {
						bound = s * 127
					}
				}
				if math.Abs(v-x) > bound {
					t.Fatalf("%s [%d,%d]: %v became %v, more than %v off", format, r, i, x, v, bound)
				}
			}
		}
	})
}

// Encoding inverts decoding: objects that an encoder can have produced (the
// largest code present in every group that has a scale, scales that are powers
// of two so that BF16 holds the values) decode to values that encode to the
// same bytes.
func FuzzEncodeInvertsDecode(f *testing.F) {
	seeds(f)
	formats := []Format{Q4G64, Q5G64, Q6G64, Q8G32, FP8RowBF16}
	f.Fuzz(func(t *testing.T, kind byte, data []byte) {
		format := formats[int(kind)%len(formats)]
		cols := 1 + int(kind)/len(formats)*5
		shape := []int{3, cols}
		tensor := legal(t, format, shape, data)
		g := tensor.Geometry()
		lanes := make([]int8, g.PaddedCols)
		for r := range g.Rows {
			codes, high, scales := tensor.row(r)
			UnpackCodes(format, lanes, codes, high)
			group := max(g.Group, 1)
			if format == FP8RowBF16 {
				group = cols
			}
			for k := 0; k*group < cols; k++ {
				part := lanes[k*group : min((k+1)*group, cols)]
				w := binary.LittleEndian.Uint16(scales[2*k:])
				switch {
				case format == FP8RowBF16:
					if w &= 0x7f80; w < 0x0400 || w > 0x7a00 { // room for 448 and for the reciprocal
						w = 0x3f80
					}
					part[int(kind)%len(part)] = 0x7e
				default:
					if w &= 0x7c00; w == 0 {
						w = 0x3c00
					}
					part[int(kind)%len(part)] = int8(1<<(format.codeBits()-1) - 1)
				}
				if len(data)%3 == 0 && k%2 == 1 { // some groups without values
					clear(part)
					w = 0
				}
				binary.LittleEndian.PutUint16(scales[2*k:], w)
			}
			// -8 and its like are never the only largest magnitude's code.
			if format != FP8RowBF16 {
				for i, c := range lanes[:cols] {
					if int(c) == -1<<(format.codeBits()-1) {
						lanes[i]++
					}
				}
			}
			PackCodes(format, lanes[:cols], codes, high)
		}
		if err := tensor.Validate(); err != nil {
			t.Fatal(err)
		}
		if got := encode(t, g, toBF16(t, tensor), 2); !slices.Equal(got, tensor.Data) {
			t.Fatalf("%s %v: bytes differ\n got %x\nwant %x", format, shape, got, tensor.Data)
		}
	})
}

// toBF16 decodes a tensor to BF16, which must hold every value.
func toBF16(t *testing.T, tensor Tensor) []byte {
	t.Helper()
	var src []byte
	row := make([]float64, tensor.Cols())
	for r := range tensor.Rows() {
		tensor.DecodeRow(row, r)
		for i, v := range row {
			w := ToBF16(float32(v))
			if float64(FromBF16(w)) != v {
				t.Fatalf("[%d,%d]: %v is not a bf16 value", r, i, v)
			}
			src = binary.LittleEndian.AppendUint16(src, w)
		}
	}
	return src
}

// The same for NVFP4, whose largest product fixes the divisor.
func FuzzNVFP4InvertsDecode(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, kind byte, data []byte) {
		const n, k = 128, 64
		tensor := legal(t, NVFP4, []int{n, k}, data)
		p := tensor.Planes()
		d := float32(math.Ldexp(1, int(kind)%64-32))
		binary.LittleEndian.PutUint32(p.Divisors, math.Float32bits(d))
		for r := range n {
			for g := range k / 16 {
				s := &p.Scales[Swizzle(r, g, k)]
				if r == 0 && g == 0 {
					*s = 0x7e
				}
				codes := p.Codes[(r*k+16*g)/2:][:8]
				codes[int(kind)%8] |= 0x07 // a 6 in every group
				for i := range codes {     // no negative zeros: profile B drops them
					if codes[i]&15 == 8 {
						codes[i] &= 0xf0
					}
					if codes[i]>>4 == 8 {
						codes[i] &= 0x0f
					}
				}
				if *s == 0 {
					clear(codes)
				}
			}
		}
		src := toBF16(t, tensor)
		for _, profile := range []Profile{ProfileA, ProfileB} {
			codes, scales := make([]byte, n*k/2), make([]byte, n*k/16)
			got, err := EncodeNVFP4(profile, n, k, src, codes, scales)
			if err != nil {
				t.Fatal(err)
			}
			if got != d || !slices.Equal(codes, p.Codes) || !slices.Equal(scales, p.Scales) {
				t.Fatalf("profile %d: divisor %v, want %v; codes equal %v, scales equal %v", profile, got, d,
					slices.Equal(codes, p.Codes), slices.Equal(scales, p.Scales))
			}
		}
	})
}

// Arbitrary BF16 matrices: words are valid and near the source.
func FuzzEncodeNVFP4(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, kind byte, data []byte) {
		const n, k = 128, 64
		src := make([]byte, 2*n*k)
		copy(src, data)
		profile := Profile(kind % 2)
		sameNVFP4(t, profile, n, k, src)
		object := make([]byte, n*k/2+n*k/16+4)
		tensor, err := NewTensor(NVFP4, BlockScale, []int{n, k}, object)
		if err != nil {
			t.Fatal(err)
		}
		p := tensor.Planes()
		d, err := EncodeNVFP4(profile, n, k, src, p.Codes, p.Scales)
		if err != nil {
			return
		}
		binary.LittleEndian.PutUint32(p.Divisors, math.Float32bits(d))
		if err := tensor.Validate(); err != nil {
			t.Fatal(err)
		}
		row := make([]float64, k)
		for r := range n {
			tensor.DecodeRow(row, r)
			for i, v := range row {
				x := float64(bf16At(src, r*k+i))
				group := float64(FromBF16(bf16MaxAbs(src[2*(r*k+i/16*16):][:32])))
				// Half of the widest step (2 of 6), plus the rounding of the scale:
				// 2^-4 of it, or half the smallest scale.
				bound := group*(1./6+0x1p-4)*(1+0x1p-20) + 6*0x1p-10/float64(d)*(1+0x1p-20)
				if math.Abs(v-x) > bound {
					t.Fatalf("profile %d [%d,%d]: %v became %v, more than %v off", profile, r, i, x, v, bound)
				}
			}
		}
	})
}

// The table encoder is compared with the division and rounding of its
// definition, done in binary64: the quotient of two BF16 values is a tie of
// E4M3 only if it is one exactly, and binary64 keeps what is beside it.
func FuzzFP8Table(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, _ byte, data []byte) {
		src := data[:len(data)/2*2]
		amax, err := MaxAbsBF16(src)
		if err != nil {
			return
		}
		word, err := FP8TableMultiplier(amax)
		if err != nil {
			if amax != 0 {
				t.Fatal(err)
			}
			return
		}
		table, err := NewFP8Table(word)
		if err != nil {
			t.Fatal(err)
		}
		codes := make([]byte, len(src)/2)
		if err := table.Encode(codes, src); err != nil {
			t.Fatal(err)
		}
		m := float64(FromBF16(word))
		for i, c := range codes {
			x := float64(bf16At(src, i))
			if c&0x7f == 0x7f || math.Signbit(x) != (c&0x80 != 0) {
				t.Fatalf("%v became code %02x", x, c)
			}
			q := math.Abs(x) / m
			best := math.Abs(q - specs[2].value(uint16(c&0x7f)))
			for _, n := range []int{int(c&0x7f) - 1, int(c&0x7f) + 1} {
				if n < 0 || n > 0x7e {
					continue
				}
				other := math.Abs(q - specs[2].value(uint16(n)))
				if other < best || other == best && c%2 == 1 {
					t.Fatalf("%v / %v = %v became code %02x, but %02x is right", x, m, q, c, n)
				}
			}
		}
	})
}

// Packing inverts unpacking on arbitrary bytes.
func FuzzPackCodes(f *testing.F) {
	seeds(f)
	formats := []Format{Q4G64, Q5G64, Q6G64, Q8G32, NVFP4, U4Z8G16, FP8}
	f.Fuzz(func(t *testing.T, kind byte, data []byte) {
		format := formats[int(kind)%len(formats)]
		var codes, high []byte
		var cols int
		if b := 32 + highBytes(format); format.codeBits() > 0 {
			groups := len(data) / b
			codes, high = data[:32*groups], data[32*groups:b*groups]
			cols = groups * format.Group()
		} else {
			codes, cols = data, len(data)*2
			if format == FP8 {
				cols = len(data)
			}
		}
		lanes := make([]int8, cols)
		UnpackCodes(format, lanes, codes, high)
		lo, hi := int8(0), int8(15)
		switch b := format.codeBits(); {
		case b > 0:
			lo, hi = int8(-1<<(b-1)), int8(1<<(b-1)-1)
		case format == FP8:
			lo, hi = -128, 127
		}
		for i, c := range lanes {
			if c < lo || c > hi {
				t.Fatalf("%s: code %d is %d", format, i, c)
			}
		}
		gotCodes, gotHigh := make([]byte, len(codes)), make([]byte, len(high))
		for i := range gotCodes {
			gotCodes[i] = 0xaa
		}
		PackCodes(format, lanes, gotCodes, gotHigh)
		if !slices.Equal(gotCodes, codes) || !slices.Equal(gotHigh, high) {
			t.Fatalf("%s: packing is not the inverse", format)
		}
	})
}

// Arbitrary objects: Validate never panics, rows decode without panicking, and
// what legal makes of the bytes is valid.
func FuzzValidate(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, kind byte, data []byte) {
		c := shapes[int(kind)%len(shapes)]
		g := geometry(t, c.f, c.shape...)
		object := make([]byte, g.Bytes)
		copy(object, data)
		tensor, err := NewTensor(c.f, g.Layout, c.shape, object)
		if err != nil {
			t.Fatal(err)
		}
		wasValid := tensor.Validate() == nil
		row := make([]float32, tensor.Cols())
		for r := range tensor.Rows() {
			tensor.DecodeRow32(row, r)
		}
		mended := legal(t, c.f, c.shape, data)
		if err := mended.Validate(); err != nil {
			t.Fatalf("%s: %v", c.f, err)
		}
		if same := slices.Equal(mended.Data, object); wasValid != same {
			t.Fatalf("%s: valid %v, but changed by the repair of illegal words %v", c.f, wasValid, !same)
		}
	})
}
