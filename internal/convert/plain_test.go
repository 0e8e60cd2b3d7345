package convert

import (
	"math"
	"testing"

	"ninfer/internal/artifact"
	"ninfer/internal/convert/converttest"
	"ninfer/internal/hf"
	"ninfer/internal/num"
)

// checkFP8Rows is docs/format.md 2.5 again.
func checkFP8Rows(t *testing.T, o artifact.Object, x num.Tensor, source []byte) {
	t.Helper()
	rows, cols := o.Shape[0], o.Shape[1]
	scales := x.Data[(rows*cols+255)/256*256:]
	for r := range rows {
		most := 0.
		for c := range cols {
			most = max(most, math.Abs(bf16(source, r*cols+c)))
		}
		s := nearestBF16(float64(float32(most / 448)))
		if got := bf16(scales, r); got != s {
			t.Fatalf("%s: multiplier %v of row %d, want %v", o.ID, got, r, s)
		}
		q := float32(1 / s)
		for c := range cols {
			want := byte(0)
			if most > 0 {
				want = converttest.NearestE4M3(float64(float32(bf16(source, r*cols+c) * float64(q))))
			}
			if got := x.Data[r*cols+c]; got != want {
				t.Fatalf("%s[%d,%d] = %02x, want %02x", o.ID, r, c, got, want)
			}
		}
	}
}

// nearestBF16 is the nearest value with eight bits, ties to even.
func nearestBF16(x float64) float64 {
	if x == 0 {
		return 0
	}
	_, e := math.Frexp(x)
	unit := math.Ldexp(1, e-8)
	return math.RoundToEven(x/unit) * unit
}

// checkTable is docs/format.md 2.7 again.
func checkTable(t *testing.T, id string, codes, source []byte, scale float64) {
	t.Helper()
	most := 0.
	for i := range codes {
		most = max(most, math.Abs(bf16(source, i)))
	}
	_, e := math.Frexp(most / 448)
	if unit := math.Ldexp(1, e-8); scale != math.Ceil(most/448/unit)*unit {
		t.Errorf("%s has multiplier %v for %v", id, scale, most)
	}
	for i, c := range codes {
		if want := converttest.NearestE4M3(float64(float32(bf16(source, i) / scale))); c != want {
			t.Fatalf("%s: code %d is %02x, want %02x", id, i, c, want)
		}
	}
}

// checkEncodedBank is docs/format.md 2.8 again: profile A in binary32, or B in binary64.
func checkEncodedBank(t *testing.T, o artifact.Object, x num.Tensor, source hf.Tensor, a bool) {
	t.Helper()
	n, k := o.Shape[1], o.Shape[2]
	p := x.Planes()
	for e := range o.Shape[0] {
		src := source.Data[2*e*n*k:][:2*n*k]
		most := 0.
		for i := range n * k {
			most = max(most, math.Abs(bf16(src, i)))
		}
		g := most / 2688
		d := float32(1 / g)
		if a {
			d = float32(2688 / most)
		}
		if got := x.Divisor(e); got != d {
			t.Fatalf("%s: divisor %v of expert %d, want %v", o.ID, got, e, d)
		}
		for r := range n {
			for group := range k / 16 {
				most := 0.
				for i := range 16 {
					most = max(most, math.Abs(bf16(src, r*k+16*group+i)))
				}
				s := min(most/(6*g), 448)
				if a {
					s = float64(min(float32(most*float64(d))/6, 448))
				}
				at := (r/128*(k/64)+group/4)*512 + r%32*16 + r%128/32*4 + group%4
				word := p.Scales[e*n*k/16+at]
				if want := converttest.NearestE4M3(float64(float32(s))); word != want {
					t.Fatalf("%s: scale of expert %d row %d group %d is %02x, want %02x", o.ID, e, r, group, word, want)
				}
				for i := range 16 {
					v, s := bf16(src, r*k+16*group+i), e4m3(word)
					q := v / (s / float64(d))
					if a {
						q = float64(float32(v*float64(d)) / float32(s))
					}
					want := byte(0)
					if s > 0 {
						want = converttest.NearestE2M1(math.Abs(q))
						if a && math.Signbit(q) || q < 0 {
							want |= 8
						}
					}
					if got := p.Codes[(e*n*k+r*k+16*group+i)/2] >> (i % 2 * 4) & 15; got != want {
						t.Fatalf("%s: code of expert %d row %d column %d is %x, want %x", o.ID, e, r, 16*group+i, got, want)
					}
				}
			}
		}
	}
}
