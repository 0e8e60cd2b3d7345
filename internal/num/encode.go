package num

import (
	"encoding/binary"
	"fmt"
	"math"
	"sync"
)

// EncodeRows encodes rows [dst.First, dst.First+dst.N) of a matrix. src holds
// exactly these rows as little-endian BF16, row-major; dst need not be clear.
// BF16 copies the words and FP32 widens them, NaN included; the quantizing
// formats fail on a source value that is not finite, naming row and column,
// and leave dst in an undefined state. Rows are independent of each other, so
// any division into runs gives the same bytes. It panics if lengths do not
// agree, and for formats that are not made from BF16 rows: NVFP4 is made a matrix
// at a time by EncodeNVFP4, an FP8 table by FP8Table, the others are copied.
func (g *Geometry) EncodeRows(dst RowBytes, src []byte) error {
	g.must(dst)
	if len(src) != 2*dst.N*g.Cols {
		panic(fmt.Sprintf("num: %d source bytes for %d rows of %d bf16 words", len(src), dst.N, g.Cols))
	}
	switch g.Format {
	case BF16:
		copy(dst.Codes, src)
		return nil
	case FP32:
		widen(dst.Codes, src)
		return nil
	}
	for i := range dst.N {
		row := src[2*i*g.Cols:][:2*g.Cols]
		switch g.Format {
		case Q4G64, Q5G64, Q6G64, Q8G32:
			codes := dst.Codes[i*int(g.Codes.Stride):][:g.Codes.Stride]
			high := dst.High[i*int(g.High.Stride):][:g.High.Stride]
			scales := dst.Scales[i*int(g.Scales.Stride):][:g.Scales.Stride]
			if c := encodeGroupedRow(g.Format, codes, high, scales, row); c >= 0 {
				if c := bf16NotFinite(row); c >= 0 {
					return notFinite(dst.First+i, c, row)
				}
				return fmt.Errorf("row %d column %d: group needs a scale beyond binary16", dst.First+i, c)
			}
		case FP8RowBF16:
			scale, ok := encodeFP8Row(dst.Codes[i*g.Cols:][:g.Cols], row)
			if !ok {
				if c := bf16NotFinite(row); c >= 0 {
					return notFinite(dst.First+i, c, row)
				}
				return fmt.Errorf("row %d: values are so small that the reciprocal of their scale 0x%04x is not finite", dst.First+i, scale)
			}
			binary.LittleEndian.PutUint16(dst.Scales[2*i:], scale)
		default:
			panic("num: no encoder for format " + g.Format.String())
		}
	}
	return nil
}

func notFinite(row, col int, src []byte) error {
	return fmt.Errorf("row %d column %d: source value %v is not finite", row, col, bf16At(src, col))
}

func bf16At(src []byte, i int) float32 { return FromBF16(binary.LittleEndian.Uint16(src[2*i:])) }

// bf16NotFinite is the index of the first BF16 word that is infinite or NaN,
// -1 if there is none.
func bf16NotFinite(src []byte) int {
	n := len(src) / 2
	i := 0
	for ; i+4 <= n; i += 4 {
		// A magnitude of 0x7f80 or more carries into the lane's high bit.
		if (binary.LittleEndian.Uint64(src[2*i:])&^lanesHigh+0x0080*lanesOne)&lanesHigh != 0 {
			break
		}
	}
	for ; i < n; i++ {
		if src[2*i+1]&0x7f == 0x7f && src[2*i]&0x80 != 0 {
			return i
		}
	}
	return -1
}

// bf16Infinity and all words above it are not finite.
const bf16Infinity = 0x7f80

// bf16MaxAbs is the word of the largest magnitude of BF16 words: their order is
// that of their bits without the sign. It is at least bf16Infinity if a word is
// not finite.
func bf16MaxAbs(src []byte) uint16 {
	var first uint16
	if n := len(src) / 32; vectors && n > 0 {
		groupMaxAVX2(&first, &src[0], 1, n)
		src = src[32*n:]
	}
	var a, b uint64
	for ; len(src) >= 16; src = src[16:] {
		a = lanesMax(a, binary.LittleEndian.Uint64(src)&^lanesHigh)
		b = lanesMax(b, binary.LittleEndian.Uint64(src[8:])&^lanesHigh)
	}
	a = lanesMax(a, b)
	a = lanesMax(a, a>>32)
	m := max(first, uint16(max(a&0xffff, a>>16&0xffff)))
	for i := range len(src) / 2 {
		m = max(m, binary.LittleEndian.Uint16(src[2*i:])&0x7fff)
	}
	return m
}

// widen writes BF16 words as the binary32 words of the same values.
func widen(dst, src []byte) {
	for ; len(src) >= 8; src, dst = src[8:], dst[16:] {
		v := binary.LittleEndian.Uint64(src)
		binary.LittleEndian.PutUint64(dst, v&0xffff<<16|v&0xffff0000<<32)
		binary.LittleEndian.PutUint64(dst[8:], v>>32&0xffff<<16|v>>48<<48)
	}
	for ; len(src) > 0; src, dst = src[2:], dst[4:] {
		binary.LittleEndian.PutUint32(dst, uint32(binary.LittleEndian.Uint16(src))<<16)
	}
}

// encodeGroupedRow is the grouped absmax encoder of docs/format.md 2.3 for one
// row. It returns the first column of a group whose scale overflows or that has
// a value that is not finite, else -1.
func encodeGroupedRow(f Format, codes, high, scales, src []byte) int {
	group := f.Group()
	hb := highBytes(f)
	done := 0 // groups
	if vectors {
		var bad bool
		if done, bad = vectorGroups(f, codes, high, scales, src); bad {
			return done * group
		}
	}
	for g := done; g < len(scales)/2; g++ {
		first := 2 * g * group
		part := src[min(first, len(src)):min(first+2*group, len(src))]
		scale, ok := groupScale(f, bf16MaxAbs(part))
		if !ok {
			return g * group
		}
		binary.LittleEndian.PutUint16(scales[2*g:], scale)
		encodeGroup(f, codes[32*g:][:32], high[hb*g:][:hb], part, scale)
	}
	return -1
}

// vectorGroups encodes the whole groups at a row's beginning and returns how many these are, or which one of them cannot be encoded.
func vectorGroups(f Format, codes, high, scales, src []byte) (groups int, bad bool) {
	encode := q4GroupsAVX2
	switch f {
	case Q5G64:
		encode = q5GroupsAVX2
	case Q6G64:
		encode = q6GroupsAVX2
	case Q8G32:
		encode = q8GroupsAVX2
	}
	var words [64]uint16
	var inv [64]float32
	group, hb := f.Group(), highBytes(f)
	groups = len(src) / (2 * group)
	for first := 0; first < groups; first += len(words) {
		n := min(len(words), groups-first)
		part := src[2*group*first:]
		groupMaxAVX2(&words[0], &part[0], n, group/16)
		for i, word := range words[:n] {
			scale, ok := groupScale(f, word)
			if !ok {
				return first + i, true
			}
			binary.LittleEndian.PutUint16(scales[2*(first+i):], scale)
			inv[i] = groupInverse(scale)
		}
		h := &codes[0] // unused where there is no high plane
		if hb > 0 {
			h = &high[hb*first]
		}
		encode(&codes[32*first], h, &part[0], &inv[0], n)
		for i := range n { // what the vectors cannot round
			g := first + i
			if scale := binary.LittleEndian.Uint16(scales[2*g:]); scale < leastNormal {
				encodeGroup(f, codes[32*g:][:32], high[hb*g:][:hb], part[2*group*i:][:2*group], scale)
			}
		}
	}
	return groups, false
}

// leastNormal is the smallest binary16 word that is not subnormal.
const leastNormal = 0x0400

// groupScale is the scale word of a group with a largest magnitude word, and false where there is none.
func groupScale(f Format, word uint16) (uint16, bool) {
	if word == 0 || word >= bf16Infinity {
		return 0, word == 0
	}
	scale := max(ToF16(float32(float64(FromBF16(word))/float64(int32(1)<<(f.codeBits()-1)-1))), 1)
	return scale, scale < 0x7c00
}

// groupInverse is what the values of a group are multiplied by.
func groupInverse(scale uint16) float32 { return float32(1 / float64(FromF16(scale))) }

// encodeGroup rounds and packs a group, which may be short.
func encodeGroup(f Format, base, high, part []byte, scale uint16) {
	inv := groupInverse(scale)
	if scale >= leastNormal && len(part) == 2*f.Group() {
		roundGroup(f, base, high, part, inv)
		return
	}
	var lanes [64]int8
	if scale > 0 {
		qmax := int32(1)<<(f.codeBits()-1) - 1
		qmin := -qmax - 1
		if f == Q8G32 {
			qmin = -qmax
		}
		for i := range lanes[:len(part)/2] {
			lanes[i] = roundCode(bf16At(part, i)*inv, qmin, qmax)
		}
	}
	packGroup(f, lanes[:f.Group()], base, high)
}

// integers is where they are the spacing of binary32: adding it rounds to the
// nearest, ties to even, and leaves the integer in the low bits.
const integers = 0x1.8p23

// roundGroup rounds and packs a whole group. Its scale is not subnormal, so that
// no product is further than 2^-10 outside the codes' range, and rounding
// brings it back inside.
func roundGroup(f Format, base, high, src []byte, inv float32) {
	for i := 0; i < len(src)/16; i++ {
		a, b := binary.LittleEndian.Uint64(src[16*i:]), binary.LittleEndian.Uint64(src[16*i+8:])
		w := uint64(fourCodes(a, inv)) | uint64(fourCodes(b, inv))<<32
		if f == Q8G32 {
			binary.LittleEndian.PutUint64(base[8*i:], w)
			continue
		}
		x := w & 0x0f0f0f0f0f0f0f0f
		x = (x | x>>4) & 0x00ff00ff00ff00ff
		x = (x | x>>8) & 0x0000ffff0000ffff
		binary.LittleEndian.PutUint32(base[4*i:], uint32(x|x>>16))
		switch f {
		case Q5G64:
			high[i] = byte(w >> 4 & 0x0101010101010101 * 0x0102040810204080 >> 56)
		case Q6G64:
			x := w >> 4 & 0x0303030303030303
			x = (x | x>>6) & 0x000f000f000f000f
			x = (x | x>>12) & 0x000000ff000000ff
			binary.LittleEndian.PutUint16(high[2*i:], uint16(x|x>>24))
		}
	}
}

// fourCodes rounds four BF16 values to the bytes of their codes.
func fourCodes(v uint64, inv float32) uint32 {
	lo, hi := uint32(v), uint32(v>>32)
	return math.Float32bits(float32(math.Float32frombits(lo<<16)*inv)+integers)&0xff |
		math.Float32bits(float32(math.Float32frombits(lo&0xffff0000)*inv)+integers)&0xff<<8 |
		math.Float32bits(float32(math.Float32frombits(hi<<16)*inv)+integers)&0xff<<16 |
		math.Float32bits(float32(math.Float32frombits(hi&0xffff0000)*inv)+integers)<<24
}

// roundCode is the integer nearest to y, ties to even, inside the limits. |y| is
// at most twice qmax, however coarse a subnormal scale is.
func roundCode(y float32, qmin, qmax int32) int8 {
	n := int32(math.Float32bits(float32(y)+integers)) - 0x4b400000
	return int8(max(qmin, min(qmax, n)))
}

// encodeFP8Row is the row encoder of docs/format.md 2.5 for one row; it returns
// the scale word, and false where its reciprocal overflows (then no product
// would be finite) and where a value is not finite. The scale is the nearest BF16 word and may
// be too small, so that the largest values saturate: that is intended.
func encodeFP8Row(codes, src []byte) (uint16, bool) {
	word := bf16MaxAbs(src)
	if word >= bf16Infinity {
		return 0, false
	}
	if word == 0 {
		clear(codes)
		return 0, true
	}
	amax := FromBF16(word)
	scale := max(ToBF16(float32(float64(amax)/MaxE4M3)), 1)
	q := float32(1 / float64(FromBF16(scale)))
	if !positive(q) {
		return scale, false
	}
	src = src[:2*len(codes)]
	if n := len(codes) &^ 31; vectors && n > 0 {
		fp8TimesAVX2(&codes[0], &src[0], n, q)
		codes, src = codes[n:], src[2*n:]
	}
	exponent := int(scale >> 7)
	if exponent < 32 { // subnormal values might count
		for i := range codes {
			codes[i] = ToE4M3(float32(bf16At(src, i) * q))
		}
		return scale, true
	}
	table := fp8Rows()[scale&0x7f]
	base := (exponent + fp8RowFirst) << 7
	n := len(codes) &^ 3
	for i := 0; i < n; i += 4 {
		v := binary.LittleEndian.Uint64(src[2*i:])
		a, b, c, d := table[max(int(v&0x7fff)-base, 0)], table[max(int(v>>16&0x7fff)-base, 0)], table[max(int(v>>32&0x7fff)-base, 0)], table[max(int(v>>48&0x7fff)-base, 0)]
		x := v & lanesHigh >> 8
		x = (x | x>>8)
		binary.LittleEndian.PutUint32(codes[i:], uint32(a)|uint32(b)<<8|uint32(c)<<16|uint32(d)<<24|uint32(x&0xffff|x>>16&0xffff0000))
	}
	for i := n; i < len(codes); i++ {
		w := binary.LittleEndian.Uint16(src[2*i:])
		codes[i] = table[max(int(w&0x7fff)-base, 0)] | byte(w>>8)&0x80
	}
	return scale, true
}

// A value's code depends on the fractions of value and scale and on the
// distance of their exponents: a power of two in the scale moves both factors
// and the product exactly. Values 2^fp8RowFirst scales large or smaller become
// zero; none is 2^(fp8RowLast+1) scales large.
const (
	fp8RowFirst = -11
	fp8RowLast  = 9
)

type fp8Row [(fp8RowLast - fp8RowFirst + 1) << 7]byte

// fp8Rows holds, by the fraction of the scale, the code of every magnitude from
// 2^fp8RowFirst times the scale's power of two on.
var fp8Rows = sync.OnceValue(func() *[128]fp8Row {
	t := new([128]fp8Row)
	const one = 127 << 7 // BF16 word of 1
	for f := range t {
		q := float32(1 / float64(FromBF16(uint16(one|f))))
		for i := range t[f] {
			x := FromBF16(uint16(one + fp8RowFirst<<7 + i))
			t[f][i] = ToE4M3(float32(x * q))
		}
	}
	return t
})
