package num

import "math"

// FromBF16 widens a bfloat16 word; exact, NaN payloads kept.
func FromBF16(w uint16) float32 { return math.Float32frombits(uint32(w) << 16) }

// ToBF16 rounds to the nearest bfloat16, ties to even. NaN becomes a quiet NaN
// of the same sign; overflow gives infinity.
func ToBF16(x float32) uint16 {
	b := math.Float32bits(x)
	if b&0x7fffffff > 0x7f800000 {
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// RoundBF16 is the bfloat16 value nearest to x, ties to even, rounded once
// (not through binary32). It is what storing x as BF16 and reading it back
// does.
func RoundBF16(x float64) float64 {
	f := float32(x)
	if d := float64(f); d != x && d == d {
		// Force the last bit of the inexact binary32 value to odd, so that
		// the second rounding sees on which side of a tie x lies.
		b := math.Float32bits(f)
		if math.Abs(d) > math.Abs(x) {
			b--
		}
		f = math.Float32frombits(b | 1)
	}
	return float64(FromBF16(ToBF16(f)))
}

// FromF16 widens a binary16 word; exact, subnormals included, NaN payloads
// kept.
func FromF16(w uint16) float32 {
	sign := uint32(w&0x8000) << 16
	mag := uint32(w&0x7fff) << 13
	if w&0x7c00 == 0x7c00 {
		return math.Float32frombits(sign | 0x7f800000 | mag&0x7fffff)
	}
	// As binary32 the pattern means value * 2^-112; the product is exact.
	v := math.Float32frombits(mag) * 0x1p112
	return math.Float32frombits(math.Float32bits(v) | sign)
}

// ToF16 rounds to the nearest binary16, ties to even. NaN becomes a quiet NaN
// of the same sign; overflow gives infinity.
func ToF16(x float32) uint16 {
	b := math.Float32bits(x)
	sign := uint16(b >> 16 & 0x8000)
	b &= 0x7fffffff
	switch {
	case b > 0x7f800000:
		return sign | 0x7e00 | uint16(b>>13&0x3ff)
	case b >= 0x47800000: // 2^16
		return sign | 0x7c00
	case b < 0x38800000: // below 2^-14: multiples of 2^-24, which is the spacing of binary32 at 0.5
		return sign | uint16(math.Float32bits(math.Float32frombits(b)+0.5)-0x3f000000)
	}
	return sign | uint16((b+0xfff+b>>13&1)>>13-(127-15)<<10)
}

// e4m3Values holds the value of every E4M3FN word.
var e4m3Values = func() (t [256]float32) {
	for w := range 128 {
		e, m := w>>3, float64(w&7)
		v := math.Ldexp(1+m/8, e-7)
		switch {
		case e == 0:
			v = math.Ldexp(m, -9)
		case w == 0x7f:
			v = math.NaN()
		}
		t[w], t[w|0x80] = float32(v), float32(math.Copysign(v, -1))
	}
	return t
}()

// MaxE4M3 is the largest finite E4M3FN value, word 0x7e.
const MaxE4M3 = 448

// FromE4M3 gives the value of an E4M3FN word; 0x7f and 0xff are NaN.
func FromE4M3(w byte) float32 { return e4m3Values[w] }

// ToE4M3 rounds to the nearest E4M3FN word, ties to the even word, and keeps
// the sign bit, so -0 and negative values that round to zero give 0x80.
// Magnitudes above 448 saturate; NaN gives 0x7f with the sign of x.
func ToE4M3(x float32) byte {
	b := math.Float32bits(x)
	sign := byte(b >> 24 & 0x80)
	b &= 0x7fffffff
	if b > 0x7f800000 {
		return sign | 0x7f
	}
	b = min(b, 0x43e00000) // 448
	// Both cases are computed and one selected: their mix is unpredictable.
	// Below 2^-6 words are multiples of 2^-9, the spacing of binary32 at 2^14.
	word := (b+0x7ffff+b>>20&1)>>20 - (127-7)<<3
	small := math.Float32bits(math.Float32frombits(b)+0x1p14) - 0x46800000
	if b < 0x3c800000 {
		word = small
	}
	return sign | byte(word)
}

// e2m1Values holds the value of every E2M1 code.
var e2m1Values = [16]float32{
	0, 0.5, 1, 1.5, 2, 3, 4, 6,
	float32(math.Copysign(0, -1)), -0.5, -1, -1.5, -2, -3, -4, -6,
}

// FromE2M1 gives the value of the E2M1 code in the low four bits of c.
func FromE2M1(c byte) float32 { return e2m1Values[c&15] }

// e2m1Magnitude is the E2M1 code nearest to a >= 0, ties to the even code,
// saturating at 6; a NaN gives 7, callers check for it. It takes binary64 because the value of one encoder is a binary64 quotient whose
// rounding to binary32 could make a tie.
func e2m1Magnitude(a float64) byte {
	b := min(math.Float64bits(a), 0x4018000000000000) // 6
	// As in ToE4M3: below 1 codes are multiples of 0.5, the spacing of
	// binary64 at 2^51.
	code := (b+(1<<50-1)+b>>51&1)>>51 - (1023-1)<<1
	small := math.Float64bits(math.Float64frombits(b)+0x1p51) - 0x4320000000000000
	if b < 0x3ff0000000000000 {
		code = small
	}
	return byte(code)
}
