package gemm

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/gputest"
	tuned "ninfer/internal/backend/cuda/kernels"
	"ninfer/internal/num"
)

// experts is a random bank of one half of all experts: NVFP4 codes and scales, or BF16.
type experts struct {
	e, n, k  int
	codes    []byte // a code a weight; BF16: none
	scales   []byte // a scale for 16 weights
	divisors []float32
	words    []uint16
}

func randomExperts(rng *rand.Rand, e, n, k int, plain bool) *experts {
	b := &experts{e: e, n: n, k: k}
	if plain {
		b.words = make([]uint16, e*n*k)
		for i := range b.words {
			b.words[i] = bf16(rng.NormFloat64() / math.Sqrt(float64(k)))
		}
		return b
	}
	b.codes, b.scales = make([]byte, e*n*k), make([]byte, e*n*k/16)
	for i := range b.codes {
		b.codes[i] = byte(rng.Uint32()) & 15
	}
	for i := range b.scales {
		b.scales[i] = byte(rng.IntN(0x7f)) // subnormal scales and zero included
		if i%3 != 0 {
			b.scales[i] = byte(0x60 + rng.IntN(16))
		}
	}
	for range e {
		b.divisors = append(b.divisors, float32(math.Sqrt(float64(k))*(200+100*rng.Float64())))
	}
	return b
}

func (b *experts) row(e, n int) []float64 {
	v := make([]float64, b.k)
	at := (e*b.n + n) * b.k
	for k := range v {
		if b.words != nil {
			v[k] = unbf16(b.words[at+k])
		} else {
			v[k] = float64(num.FromE2M1(b.codes[at+k])) * float64(num.FromE4M3(b.scales[(at+k)/16])) / float64(b.divisors[e])
		}
	}
	return v
}

// stored is the artifact's form: codes row by row, low nibble first; scales in tiles of 128 rows by 4 groups.
func (b *experts) stored() (codes, scales []byte) {
	codes = make([]byte, len(b.codes)/2)
	for i := range codes {
		codes[i] = b.codes[2*i] | b.codes[2*i+1]<<4
	}
	groups := b.k / 16
	scales = make([]byte, len(b.scales))
	for e := range b.e {
		for r := range b.n {
			for q := range groups {
				at := (r/128*(groups/4)+q/4)*512 + r%32*16 + r%128/32*4 + q%4
				scales[e*b.n*groups+at] = b.scales[(e*b.n+r)*groups+q]
			}
		}
	}
	return codes, scales
}

// packed16 is sixteen codes in two words as the decode kernels' description has it: in each 16-bit half three codes with magnitude and sign nine
// bits apart, the fourth's bits split over both words.
func packed16(c []byte) (w [2]uint32) {
	for k, code := range c {
		magnitude, sign := uint32(code&7), uint32(code>>3)
		half, j, word := 16*(k>>2&1), k&3, k>>3
		if j < 3 {
			w[word] |= (magnitude<<(6-3*j) | sign<<(15-3*j)) << half
			continue
		}
		at := 10 + 3*word + half
		w[0] |= (magnitude & 3) << at
		w[1] |= (magnitude>>2 | sign<<1) << at
	}
	return w
}

// tiles packs the bank into tiles of 16 or 8 rows.
func (b *experts) tiles(size int, paired bool) []byte {
	var out []byte
	word := func(w [2]uint32) {
		for _, x := range w {
			out = append(out, byte(x), byte(x>>8), byte(x>>16), byte(x>>24))
		}
	}
	code := func(e, r, k int) [2]uint32 { at := (e*b.n+r)*b.k + k; return packed16(b.codes[at : at+16]) }
	scale := func(e, r, k int) byte { return b.scales[((e*b.n+r)*b.k+k)/16] }
	for e := range b.e {
		for tile := range b.n / size {
			for pair := range b.k / 128 {
				if size == 8 {
					for lane := range 32 {
						r, k := tile*8+lane/4, pair*128+lane%4*16
						word(code(e, r, k))
						word(code(e, r, k+64))
					}
					for lane := range 32 {
						r, k := tile*8+lane/4, pair*128+lane%4*16
						out = append(out, scale(e, r, k), scale(e, r, k+64))
					}
					continue
				}
				rows := func(lane int) (int, int) {
					if paired {
						return tile*8 + lane/4, b.n/2 + tile*8 + lane/4
					}
					return tile*16 + lane/4, tile*16 + lane/4 + 8
				}
				for half := range 2 {
					for lane := range 32 {
						r0, r1 := rows(lane)
						k := pair*128 + half*64 + lane%4*16
						word(code(e, r0, k))
						word(code(e, r1, k))
					}
				}
				for lane := range 32 {
					r0, r1 := rows(lane)
					k := pair*128 + lane%4*16
					out = append(out, scale(e, r0, k), scale(e, r1, k), scale(e, r0, k+64), scale(e, r1, k+64))
				}
			}
		}
	}
	return out
}

func (b *experts) bank(g *gpu, l Layout, paired bool) Bank {
	bank := Bank{Layout: l, Divisors: g.Upload(b.divisors)}
	switch l {
	case Tiles16:
		bank.Data = g.Upload(b.tiles(16, paired))
	case Tiles8:
		bank.Data = g.Upload(b.tiles(8, false))
	case Stored:
		codes, scales := b.stored()
		bank.Data, bank.Scales = g.Upload(codes), g.Upload(scales)
	default:
		bank.Data = g.Upload(b.words)
	}
	return bank
}

func TestExperts(t *testing.T) {
	withGPU(t, "none", func(g *gpu) {
		rng := rand.New(rand.NewPCG(9, 10))
		worst := 0.0
		for _, q := range []struct {
			e, top, h, inter int
			up, down         Layout
			rows             []int
		}{
			{8, 2, 128, 128, Tiles16, Tiles8, []int{1, 2, 9, 150, 220, 300, 1000}},
			{8, 2, 128, 128, Tiles16, Tiles8, []int{5, 400}},
			{16, 4, 256, 64, Stored, Stored, []int{1, 33, 700}},
			{8, 2, 128, 64, Plain16, Plain16, []int{3, 200}},
			{24, 10, 2560, 640, Tiles16, Tiles8, []int{9, 90, 513}},
			{24, 10, 2560, 640, Tiles16, Tiles8, []int{130}},
		} {
			up, down := randomExperts(rng, q.e, 2*q.inter, q.h, q.up == Plain16), randomExperts(rng, q.e, q.h, q.inter, q.down == Plain16)
			m := Mixture{Experts: q.e, TopK: q.top, Hidden: q.h, Inter: q.inter, Normalize: true}
			m.GateUp, m.Down = up.bank(g, q.up, true), down.bank(g, q.down, false)
			for _, rows := range q.rows {
				words, x := activations(rng, rows, q.h, q.h)
				chosen, weight := make([]uint32, rows*q.top), make([]float32, rows*q.top)
				for r := range rows {
					for i, e := range rng.Perm(q.e)[:q.top] {
						if r%2 == 0 && i == 0 && q.e > q.top {
							e = 3 // a crowded expert
						}
						for slices.Contains(chosen[r*q.top:r*q.top+i], uint32(e)) {
							e = (e + 1) % q.e
						}
						chosen[r*q.top+i], weight[r*q.top+i] = uint32(e), rng.Float32()
					}
				}
				shared, logit := make([]float32, rows*q.h), make([]float32, rows)
				for i := range shared {
					shared[i] = float32(rng.NormFloat64())
				}
				for i := range logit {
					logit[i] = float32(rng.NormFloat64())
				}
				sp, lp := g.Upload(shared), g.Upload(logit)
				alone := rows == 2 // without a shared expert
				if alone {
					sp, lp = 0, 0
				}
				need := m.Bytes(rows)
				room := Workspace{At: g.Poisoned(int(need)), Bytes: need}
				out := g.Poisoned(2 * rows * q.h)
				xp, cp, wp := g.Upload(words), g.Upload(chosen), g.Upload(weight)
				g.Check(g.set.Experts(g.C, g.S, m, xp, rows, cp, wp, sp, lp, out, room))
				got := g.Download[uint16](out, rows*q.h)
				again := g.Poisoned(2 * rows * q.h)
				g.Check(g.set.Experts(g.C, g.S, m, xp, rows, cp, wp, sp, lp, again, room))
				if !slices.Equal(got, g.Download[uint16](again, rows*q.h)) {
					t.Errorf("%d rows: two calls differ", rows)
				}
				// the last row alone has the same bits
				r := rows - 1
				pick := func(p driver.Ptr, stride int) driver.Ptr {
					if p == 0 {
						return 0
					}
					return p + driver.Ptr(r*stride)
				}
				g.Check(g.set.Experts(g.C, g.S, m, pick(xp, 2*q.h), 1, pick(cp, 4*q.top), pick(wp, 4*q.top), pick(sp, 4*q.h), pick(lp, 4), again, room))
				if !slices.Equal(got[r*q.h:], g.Download[uint16](again, q.h)) {
					t.Errorf("%d rows: the last row alone differs", rows)
				}
				var c gputest.Comparison
				name := fmt.Sprintf("%d experts of %d by %d, layouts %d and %d, %d rows", q.e, q.inter, q.h, q.up, q.down, rows)
				most := 6
				if q.h > 1000 {
					most = 1
				}
				for _, r := range some(rows, most) {
					want := make([]float64, q.h)
					for i := range q.top {
						e := int(chosen[r*q.top+i])
						hidden := make([]float64, q.inter)
						for j := range hidden {
							a, _ := dot(up.row(e, j), x[r])
							b, _ := dot(up.row(e, q.inter+j), x[r])
							hidden[j] = unbf16(bf16(a * sigmoid(a) * b)) // stored so
						}
						for n := range want {
							v, _ := dot(down.row(e, n), hidden)
							want[n] += float64(weight[r*q.top+i]) * unbf16(bf16(v)) // stored so
						}
					}
					for n := range want {
						if !alone {
							want[n] += sigmoid(float64(logit[r])) * float64(shared[r*q.h+n])
						}
						c.Add("", unbf16(got[r*q.h+n]), want[n], 4, 1e9)
					}
					c.End(t, name, 3e-3)
				}
				worst = max(worst, c.Worst)
			}
			g.Free(1) // all but the workspace
		}
		t.Logf("worst relative L2 %.2e", worst)
	})
}

// Packed banks are what the decode kernels' repacking makes.
func TestRepack(t *testing.T) {
	withGPU(t, "none", func(g *gpu) {
		set, err := tuned.Load(g.C, nil)
		g.Check(err)
		rng := rand.New(rand.NewPCG(11, 12))
		for _, paired := range []bool{true, false} {
			b := randomExperts(rng, 3, 256, 384, false)
			codes, scales := b.stored()
			size := len(codes) + len(scales)
			out := g.Poisoned(size)
			p := tuned.RepackParams{Codes: g.Upload(codes), Scales: g.Upload(scales), Bank: out, N: 256, K: 384, Count: 3}
			if paired {
				p.Paired = 1
			}
			g.Check(set.Run(g.C, g.S, tuned.Repack(256, 384, 3), &p, false))
			got := g.Download[byte](out, size)
			if !slices.Equal(got, b.tiles(16, paired)) && (paired || !slices.Equal(got, b.tiles(8, false))) {
				t.Errorf("paired %v: repacked experts are in no known layout", paired)
			}
		}
		g.Check(set.Unload(g.C))
	})
}

// Small shapes through every kernel, for a memory checker: odd row counts at the ends of exactly sized allocations.
func TestMemory(t *testing.T) {
	withGPU(t, "none", func(g *gpu) {
		rng := rand.New(rand.NewPCG(13, 14))
		for _, rows := range []int{3, 70, 131} {
			for _, f := range []Format{BF16, E4M3} {
				w := g.weights(rng, f, 150, 208, false)
				words, _ := activations(rng, rows, 208, 208)
				p := Product{W: w.m, Out: g.Alloc(2 * rows * 150), OutLd: 150}
				g.Check(g.set.Multiply(g.C, g.S, g.Upload(words), 208, rows, p, g.room))
				site := Site{Hidden: 88, Rank: 208, Eps: 1e-6, Down: g.weights(rng, f, 208, 352, false).m, Up: g.weights(rng, f, 352, 208, false).m}
				norm, _ := activations(rng, 1, 352, 352)
				x, _ := activations(rng, rows, 352, 352)
				site.Norm = g.Upload(norm)
				g.Check(g.set.Mix(g.C, g.S, site, g.Upload(x), 0, 0, rows, g.Alloc(2*rows*88), g.room))
			}
			for _, l := range [][2]Layout{{Tiles16, Tiles8}, {Stored, Stored}, {Plain16, Plain16}} {
				up, down := randomExperts(rng, 5, 256, 128, l[0] == Plain16), randomExperts(rng, 5, 128, 128, l[0] == Plain16)
				m := Mixture{Experts: 5, TopK: 2, Hidden: 128, Inter: 128, GateUp: up.bank(g, l[0], true), Down: down.bank(g, l[1], false)}
				x, _ := activations(rng, rows, 128, 128)
				logits := make([]float32, 5*rows)
				for i := range logits {
					logits[i] = rng.Float32()
				}
				chosen, weight, out := g.Alloc(8*rows), g.Alloc(8*rows), g.Alloc(256*rows)
				g.Check(g.set.Route(g.C, g.S, m, g.Upload(logits), rows, chosen, weight))
				g.Check(g.set.Experts(g.C, g.S, m, g.Upload(x), rows, chosen, weight, 0, 0, out, Workspace{At: g.Alloc(int(m.Bytes(rows))), Bytes: m.Bytes(rows)}))
				for i, v := range g.Download[uint16](out, 128*rows) {
					if v&0x7f80 == 0x7f80 {
						panic(fmt.Errorf("layouts %v: value %d is no number", l, i))
					}
				}
			}
		}
	})
}
