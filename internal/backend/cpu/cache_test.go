package cpu

import (
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// The transform is the matrix of its definition, and turning two vectors leaves their product.
func TestHadamard(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, n := range []int{1, 2, 16, 64, 256} {
		x, y := make([]float64, n), make([]float64, n)
		for i := range x {
			x[i], y[i] = r.NormFloat64(), r.NormFloat64()
		}
		want := make([]float64, n)
		for i := range want {
			for j, v := range x {
				if bits.OnesCount(uint(i&j))%2 == 1 {
					v = -v
				}
				want[i] += v / math.Sqrt(float64(n))
			}
		}
		product := dot(x, y)
		single := make([]float32, n)
		for i, v := range x {
			single[i] = float32(v)
		}
		hadamard(x)
		hadamard(y)
		hadamard(single)
		for i, v := range want {
			if math.Abs(x[i]-v) > 1e-13 || math.Abs(float64(single[i])-v) > 2e-6 {
				t.Fatalf("%d values: [%d] is %v and %v, want %v", n, i, x[i], single[i], v)
			}
		}
		if got := dot(x, y); math.Abs(got-product) > 1e-12*float64(n) {
			t.Errorf("%d values: product %v, was %v", n, got, product)
		}
	}
}

// rows that expose errors: outliers, zeros, tiny and large ones, ties.
func cacheRows(r *rand.Rand, width int) [][]float32 {
	var rows [][]float32
	for i := range 40 {
		x := random(r, width)
		scale := float32(math.Exp2(float64(i*5 - 100)))
		for c := range x {
			x[c] *= scale
		}
		switch i % 5 {
		case 1:
			x[r.IntN(width)] *= 500
		case 2:
			x[r.IntN(width)] = 0
		case 3:
			for c := range x {
				x[c] = scale * float32(r.IntN(9)-4)
			}
		}
		rows = append(rows, x)
	}
	return append(rows, make([]float32, width))
}

// FP8: a word is the nearest of all 256 to the value by its scale, and the scale the nearest BF16 to the largest magnitude / 448.
func TestCacheFP8(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 2))
	for _, x := range cacheRows(r, 64) {
		most := 0.0
		for _, v := range x {
			most = max(most, math.Abs(float64(v)))
		}
		word := fp8Scale(x)
		scale := num.FromBF16(word)
		if want := num.RoundBF16(most / 448); float64(scale) != want && want > 0x1p-133 {
			t.Fatalf("scale %v of largest %v, want %v", scale, most, want)
		}
		var d, n float64
		for _, v := range x {
			got := float64(num.FromE4M3(fp8Code(v, scale)))
			best := math.Inf(1)
			for w := range 256 {
				if e := float64(num.FromE4M3(byte(w))); math.Abs(e-float64(v)/float64(scale)) < best {
					best = math.Abs(e - float64(v)/float64(scale))
				}
			}
			if scale > 0 && math.Abs(got-float64(v)/float64(scale)) > best*(1+1e-6) {
				t.Fatalf("%v by %v becomes %v: another word is nearer", v, scale, got)
			}
			e := got*float64(scale) - float64(v)
			d += e * e
			n += float64(v) * float64(v)
		}
		if !(d <= 4e-2*4e-2*n) {
			t.Errorf("row with largest %v: round trip off by %.2g", most, math.Sqrt(d/n))
		}
	}
	nan := []float32{1, float32(math.NaN()), 2, 3}
	if s := num.FromBF16(fp8Scale(nan)); s == s {
		t.Errorf("a row with a NaN has the scale %v: the NaN is lost", s)
	}
}

// What a plane keeps, it gives back: rounded as its form says, whatever the columns, the run and the level, over pages in any order.
func TestPlane(t *testing.T) {
	const width, group, tokens = 48, 16, 200
	r := rand.New(rand.NewPCG(3, 3))
	table := []int32{2, 3, 0, 5}
	eachLevel(t, func(t *testing.T, l Level) {
		f := &fast{level: l}
		for _, form := range []backend.Cache{backend.CacheFull, backend.CacheBF16, backend.CacheFP8} {
			for _, s := range []backend.State{
				{Kind: backend.PerToken, Width: width, Group: group},
				{Kind: backend.PerBlock, Width: width, Group: group, Ratio: 4},
				{Kind: backend.PerBlock, Width: width, Group: group, Ratio: 5},
			} {
				p := newPlane[float32](s, form, 6, true)
				o := newPlane[float64](s, form, 6, false)
				oracle := &oracle{round: func(v float64) float64 { return v }}
				n := tokens / p.ratio
				rows := cacheRows(r, width)
				for i := range n {
					x := rows[i%len(rows)]
					f.keep(p, table, i, x)
					exact := make([]float64, width)
					for c, v := range x {
						exact[c] = float64(v)
					}
					oracle.keep(o, table, i, exact)
				}
				seen := map[int]bool{}
				for i := 0; i < n; {
					first, c := p.run(table, i, n-i)
					if limit := r.IntN(c) + 1; r.IntN(2) == 0 {
						c = limit
					}
					tmp := make([]float32, c*width)
					col := group * r.IntN(2)
					got, stride := f.read(p, first, c, col, group, tmp)
					for j := range c {
						if at := p.at(table, i+j); at != first+j || seen[at] {
							t.Fatalf("%v: row %d lies at %d, a run says %d; taken: %v", form, i+j, at, first+j, seen[at])
						}
						seen[first+j] = true
						for k, v := range got[j*stride:][:group] {
							if want := o.row(table, i+j)[col+k]; float64(v) != want && math.Abs(float64(v)-want) > 1e-7*math.Abs(want) {
								t.Fatalf("%v %v: row %d column %d is %v, the oracle has %v", l, form, i+j, col+k, v, want)
							}
						}
					}
					i += c
				}
			}
		}
	})
}

// A block lies in the page of its last token, so that a page with only finished tokens has only finished blocks.
func TestPlaneBlocks(t *testing.T) {
	for _, ratio := range []int{1, 4, 5, 7, 64} {
		p := newPlane[float32](backend.State{Kind: backend.PerBlock, Width: 1, Ratio: ratio}, backend.CacheFull, 8, true)
		table := []int32{7, 1, 2, 4, 0}
		taken := map[int]bool{}
		for i := range 5 * backend.PageTokens / ratio {
			at := p.at(table, i)
			if page := table[(i*ratio+ratio-1)/backend.PageTokens]; at/p.rows != int(page) || taken[at] {
				t.Errorf("ratio %d: block %d at %d, page %d of %d rows; taken: %v", ratio, i, at, page, p.rows, taken[at])
			}
			taken[at] = true
		}
	}
}

// The conversions between forms are those of package num for every word, and for values of all kinds at every length.
func TestConversions(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 4))
	eachLevel(t, func(t *testing.T, l Level) {
		words := make([]uint16, 1<<16)
		for i := range words {
			words[i] = uint16(i)
		}
		wide := make([]float32, len(words))
		l.expandBF16(wide, words)
		for i, v := range wide {
			if math.Float32bits(v) != uint32(i)<<16 {
				t.Fatalf("word %#x becomes %#x", i, math.Float32bits(v))
			}
		}
		x := make([]float32, 1<<16)
		for i := range x {
			b := r.Uint32()
			switch i % 8 {
			case 0: // a tie
				b = b&^0xffff | 0x8000
			case 1: // infinite or NaN
				b |= 0x7f800000
			case 2:
				b &^= 0x7f800000
			}
			x[i] = math.Float32frombits(b)
		}
		for n := range 40 {
			got := make([]uint16, n)
			l.shrinkBF16(got, x[100:])
			for i := range got {
				if want := num.ToBF16(x[100+i]); got[i] != want {
					t.Fatalf("%#x becomes %#x, want %#x", math.Float32bits(x[100+i]), got[i], want)
				}
			}
		}
		got := make([]uint16, len(x))
		l.shrinkBF16(got, x)
		for i := range got {
			if want := num.ToBF16(x[i]); got[i] != want {
				t.Fatalf("%#x becomes %#x, want %#x", math.Float32bits(x[i]), got[i], want)
			}
		}
		codes := make([]byte, 256)
		for i := range codes {
			codes[i] = byte(i)
			if i&0x7f == 0x7f { // NaN is never kept
				codes[i] = 0x7e
			}
		}
		for _, scale := range []float32{1, 0, 3.5, 1e-38, 0x1p-133, 1e30} {
			got, want := make([]float32, 256), make([]float32, 256)
			l.expandFP8(got, codes, scale)
			for i, c := range codes {
				want[i] = scale * num.FromE4M3(c)
			}
			if !slices.Equal(got, want) {
				t.Fatalf("scale %v: %v, want %v", scale, got, want)
			}
		}
	})
}
