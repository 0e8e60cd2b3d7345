package num

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
)

// The tests of the scalar conversions know a format only by its parameters and
// work with exact values: decoding is compared with the textbook formula, and
// rounding with a search for the nearest value.

type spec struct {
	name     string
	exp, man int  // field widths
	inf      bool // all-ones exponent means infinity and NaN (else E4M3FN's rule)
	from     func(uint16) float32
	to       func(float32) uint16
}

var specs = []spec{
	{"bf16", 8, 7, true, FromBF16, ToBF16},
	{"f16", 5, 10, true, FromF16, ToF16},
	{"e4m3", 4, 3, false, func(w uint16) float32 { return FromE4M3(byte(w)) }, func(x float32) uint16 { return uint16(ToE4M3(x)) }},
	{"e2m1", 2, 1, false, func(w uint16) float32 { return FromE2M1(byte(w)) }, func(x float32) uint16 { return uint16(toE2M1(x)) }},
}

func (s spec) words() int   { return 2 << (s.exp + s.man) }
func (s spec) sign() uint16 { return 1 << (s.exp + s.man) }

// value is the textbook value of a word.
func (s spec) value(w uint16) float64 {
	bias := 1<<(s.exp-1) - 1
	m := float64(w & (1<<s.man - 1))
	e := int(w >> s.man & (1<<s.exp - 1))
	v := 0.0
	switch {
	case e == 0:
		v = m * math.Pow(2, float64(1-bias-s.man))
	case s.inf && e == 1<<s.exp-1 && m == 0:
		v = math.Inf(1)
	case s.inf && e == 1<<s.exp-1, s.name == "e4m3" && w&0x7f == 0x7f:
		return math.NaN()
	default:
		v = (1 + m/float64(int(1)<<s.man)) * math.Pow(2, float64(e-bias))
	}
	if w&s.sign() != 0 {
		v = -v
		if v == 0 {
			v = math.Copysign(0, -1)
		}
	}
	return v
}

func same(a, b float64) bool {
	return a != a && b != b || a == b && math.Signbit(a) == math.Signbit(b)
}

func TestDecodeAllWords(t *testing.T) {
	for _, s := range specs {
		for w := range s.words() {
			if got, want := float64(s.from(uint16(w))), s.value(uint16(w)); !same(got, want) {
				t.Errorf("%s word %#x: %v, want %v", s.name, w, got, want)
			}
		}
	}
}

func TestEncodeOfDecodeIsTheWord(t *testing.T) {
	for _, s := range specs {
		for w := range s.words() {
			v := s.from(uint16(w))
			if v != v {
				if got := s.from(s.to(v)); got == got || math.Signbit(float64(got)) != (uint16(w)&s.sign() != 0) {
					t.Errorf("%s word %#x: NaN became %v", s.name, w, got)
				}
				continue
			}
			if got := s.to(v); got != uint16(w) {
				t.Errorf("%s word %#x: back as %#x", s.name, w, got)
			}
		}
	}
}

// finite is the number of nonnegative finite words; they are 0..finite-1 in
// increasing order of value.
func (s spec) finite() int {
	switch {
	case s.inf:
		return (1<<s.exp - 1) << s.man
	case s.name == "e4m3":
		return 0x7f
	}
	return 8
}

// Around every midpoint of neighbouring values: the value below goes down, the
// value above up, the midpoint itself to the even word. Beyond the largest
// value the rule is overflow to infinity or saturation.
func TestRoundingAtMidpoints(t *testing.T) {
	for _, s := range specs {
		for w := range s.finite() - 1 {
			lo, hi := s.value(uint16(w)), s.value(uint16(w+1))
			mid := float32((lo + hi) / 2)
			if float64(mid) != (lo+hi)/2 {
				continue // the last bit of binary32 subnormals cannot be halved
			}
			even := uint16(w + w%2)
			for _, c := range []struct {
				x    float32
				want uint16
			}{
				{mid, even},
				{math.Nextafter32(mid, 0), uint16(w)},
				{math.Nextafter32(mid, math.MaxFloat32), uint16(w + 1)},
			} {
				if got := s.to(c.x); got != c.want {
					t.Fatalf("%s: %v (between words %#x and %#x) gives %#x, want %#x", s.name, c.x, w, w+1, got, c.want)
				}
				if got := s.to(-c.x); got != c.want|s.sign() {
					t.Fatalf("%s: %v gives %#x, want %#x", s.name, -c.x, got, c.want|s.sign())
				}
			}
		}
	}
	inf := float32(math.Inf(1))
	for _, c := range []struct {
		s    spec
		x    float32
		want uint16
	}{
		{specs[0], math.MaxFloat32, 0x7f80},
		{specs[0], math.Float32frombits(0x7f7f7fff), 0x7f7f},
		{specs[0], math.Float32frombits(0x7f7f8000), 0x7f80},
		{specs[0], -inf, 0xff80},
		{specs[1], 65504, 0x7bff},
		{specs[1], 65519.996, 0x7bff},
		{specs[1], 65520, 0x7c00},
		{specs[1], 65536, 0x7c00},
		{specs[1], -inf, 0xfc00},
		{specs[2], 449, 0x7e},
		{specs[2], inf, 0x7e},
		{specs[2], -1e30, 0xfe},
		{specs[3], 6.5, 7},
		{specs[3], -inf, 15},
	} {
		if got := c.s.to(c.x); got != c.want {
			t.Errorf("%s: %v gives %#x, want %#x", c.s.name, c.x, got, c.want)
		}
	}
}

// toE2M1 puts the sign before the magnitude, as the encoders do.
func toE2M1(x float32) byte {
	return byte(math.Float32bits(x)>>28&8) | e2m1Magnitude(math.Abs(float64(x)))
}

// The tie rules of E2M1, as docs/format.md 2.1 lists them.
func TestE2M1Ties(t *testing.T) {
	for _, c := range []struct {
		x    float32
		want byte
	}{
		{0.25, 0},
		{0.75, 2},
		{1.25, 2},
		{1.75, 4},
		{2.5, 4},
		{3.5, 6},
		{5, 6},
		{0.26, 1},
		{5.01, 7},
		{1e9, 7},
		{-0.25, 8},
		{-0.75, 10},
		{-5, 14},
		{float32(math.Copysign(0, -1)), 8},
	} {
		if got := toE2M1(c.x); got != c.want {
			t.Errorf("%v gives %d, want %d", c.x, got, c.want)
		}
	}
}

// RoundBF16 is compared with big.Float at eight bits of precision, which rounds
// once to nearest even.
func TestRoundBF16(t *testing.T) {
	check := func(x float64) {
		t.Helper()
		exact := new(big.Float).SetFloat64(x)
		want, _ := new(big.Float).SetPrec(8).SetMode(big.ToNearestEven).Set(exact).Float64()
		if math.Abs(x) < 0x1p-126 { // fewer bits: whole multiples of 2^-133
			want = math.RoundToEven(x*0x1p133) * 0x1p-133
		}
		if got := RoundBF16(x); got != want {
			t.Fatalf("RoundBF16(%b) = %b, want %b", x, got, want)
		}
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 200000 {
		x := math.Ldexp(1+r.Float64(), r.IntN(200)-100)
		check(x)
		check(-x)
		// A tie, and what lies beside it closer than binary32 can tell.
		w := uint16(r.IntN(0x7f00))
		tie := (float64(FromBF16(w)) + float64(FromBF16(w+1))) / 2
		check(tie)
		check(math.Nextafter(tie, 0))
		check(math.Nextafter(tie, math.MaxFloat64))
	}
	// The tie 1 + 2^-8 goes to 1; the smallest step above it must not.
	if got := RoundBF16(1 + 0x1p-8 + 0x1p-50); got != 1+0x1p-7 {
		t.Errorf("above a tie: %v", got)
	}
	if got := RoundBF16(1 + 0x3p-8 - 0x1p-50); got != 1+0x1p-7 {
		t.Errorf("below a tie: %v", got)
	}
	for _, c := range [][2]float64{
		{1e300, math.Inf(1)},
		{-1e300, math.Inf(-1)},
		{math.Inf(1), math.Inf(1)},
		{1e-300, 0},
		{0x1p-133, 0x1p-133},
		{0x1p-134, 0},
		{0x1p-134 + 0x1p-180, 0x1p-133},
		{0x3p-134, 0x1p-132},
	} {
		if got := RoundBF16(c[0]); got != c[1] {
			t.Errorf("RoundBF16(%v) = %v, want %v", c[0], got, c[1])
		}
	}
	if got := RoundBF16(math.NaN()); got == got {
		t.Errorf("NaN became %v", got)
	}
	if got := RoundBF16(math.Copysign(0, -1)); got != 0 || !math.Signbit(got) {
		t.Errorf("-0 became %v", got)
	}
}

// Random binary32 values against a search for the nearest word.
func TestRoundingRandom(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for _, s := range specs[1:] {
		top := s.value(uint16(s.finite() - 1))
		for range 20000 {
			x := float32(math.Ldexp(r.Float64(), r.IntN(40)-28))
			if float64(x) > top {
				continue
			}
			got := s.to(x)
			lo, hi := 0, s.finite()-1
			for hi-lo > 1 {
				if m := (lo + hi) / 2; s.value(uint16(m)) <= float64(x) {
					lo = m
				} else {
					hi = m
				}
			}
			below, above := float64(x)-s.value(uint16(lo)), s.value(uint16(hi))-float64(x)
			want := uint16(lo)
			if above < below || above == below && lo%2 == 1 {
				want = uint16(hi)
			}
			if got != want {
				t.Fatalf("%s: %v gives %#x, want %#x", s.name, x, got, want)
			}
		}
	}
}
