package chunk_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"ninfer/internal/backend/cuda/chunk"
	"ninfer/internal/num"
)

var (
	microAttention    = chunk.AttentionShape{Heads: 2, KVHeads: 1, HeadDim: 256, IndexHeads: 4, IndexDim: 128, Rotary: 64, Ratio: 4, Blocks: 4}
	officialAttention = chunk.AttentionShape{Heads: 24, KVHeads: 2, HeadDim: 256, IndexHeads: 4, IndexDim: 128, Rotary: 64, Ratio: 4, Blocks: 512}
)

// paged is a lane's pages, in no order among others.
type paged struct {
	table []uint32
	pages int // of the pool
}

func makePages(r *rand.Rand, tokens int) paged {
	n := (tokens + 63) / 64
	p := paged{pages: n + n/2 + 3}
	for _, v := range r.Perm(p.pages)[:n] {
		p.table = append(p.table, uint32(v))
	}
	return p
}

func (p paged) row(token int) int { return int(p.table[token/64])*64 + token%64 }

// kv is a cache with random keys and values of so many tokens.
type kv struct {
	heads        int
	keys, values []float64 // [token][head][256], as stored
	k, v         []uint16  // pool, BF16
	kc, vc       []byte    // pool, codes
	ks, vs       []uint16  // scales
}

func makeKV(r *rand.Rand, p paged, heads, tokens int, fp8 bool) *kv {
	return makeSizedKV(r, p, heads, tokens, fp8, func(int) float64 { return 1 })
}

// makeSizedKV is makeKV with the values of token t about size(t).
func makeSizedKV(r *rand.Rand, p paged, heads, tokens int, fp8 bool, size func(t int) float64) *kv {
	c := &kv{heads: heads}
	c.k, c.keys = words(normal(r, tokens*heads*256, 1))
	v := normal(r, tokens*heads*256, 1)
	for i := range v {
		v[i] *= size(i / (heads * 256))
	}
	c.v, c.values = words(v)
	n := p.pages * 64 * heads
	pool := func(w []uint16) []uint16 {
		all := make([]uint16, n*256)
		for i := range all {
			all[i] = 0x7fff // nobody may look at it
		}
		for t := range tokens {
			copy(all[p.row(t)*heads*256:], w[t*heads*256:][:heads*256])
		}
		return all
	}
	c.k, c.v = pool(c.k), pool(c.v)
	if !fp8 {
		return c
	}
	codes := func(x []float64) ([]byte, []uint16) {
		all, scales := make([]byte, n*256), make([]uint16, n)
		for i := range all {
			all[i] = 0x7f
		}
		for t := range tokens {
			for h := range heads {
				line := x[(t*heads+h)*256:][:256]
				most := 0.
				for _, v := range line {
					most = max(most, math.Abs(v))
				}
				s := num.ToBF16(float32(most / 448))
				scales[p.row(t)*heads+h] = s
				for i, v := range line {
					code := byte(0)
					if s != 0 {
						code = num.ToE4M3(float32(v) / num.FromBF16(s))
					}
					all[(p.row(t)*heads+h)*256+i] = code
					line[i] = float64(num.FromE4M3(code)) * float64(num.FromBF16(s))
				}
			}
		}
		return all, scales
	}
	c.kc, c.ks = codes(c.keys)
	c.vc, c.vs = codes(c.values)
	return c
}

func (c *kv) upload(g *gpu, p paged) chunk.Cache {
	if c.kc != nil {
		return chunk.Cache{Keys: g.Upload(c.kc), Values: g.Upload(c.vc), KeyScales: g.Upload(c.ks), ValueScales: g.Upload(c.vs), Pages: g.Upload(p.table)}
	}
	return chunk.Cache{Keys: g.Upload(c.k), Values: g.Upload(c.v), Pages: g.Upload(p.table)}
}

// attended is soft-max attention of one query over tokens, times the sigmoid of its gate.
func (c *kv) attended(q, gate []float64, head int, tokens []int) []float64 {
	out := make([]float64, 256)
	score := make([]float64, len(tokens))
	most := math.Inf(-1)
	for i, t := range tokens {
		for j, k := range c.keys[(t*c.heads+head)*256:][:256] {
			score[i] += q[j] * k / 16
		}
		most = max(most, score[i])
	}
	var sum float64
	for i, t := range tokens {
		e := math.Exp(score[i] - most)
		sum += e
		for j, v := range c.values[(t*c.heads+head)*256:][:256] {
			out[j] += e * v
		}
	}
	for j := range out {
		out[j] *= sigmoid(gate[j]) / sum
	}
	return out
}

// check compares the rows of an attention's output with what tokens(row) say; worst is the worst row's distance.
func (c *kv) check(got []uint16, ld int, q, qg []float64, rows, heads int, every int, tokens func(row int) []int) (worst float64) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	for r := 0; r < rows; r += every {
		wg.Go(func() {
			list := tokens(r)
			var want []float64
			for h := range heads {
				gate := qg[(r*heads+h)*512+256:][:256]
				want = append(want, c.attended(q[(r*heads+h)*256:][:256], gate, h/(heads/c.heads), list)...)
			}
			d := distance(fromWords(got[r*ld:][:heads*256]), want)
			mu.Lock()
			defer mu.Unlock()
			if !(d <= worst) {
				worst = d
			}
		})
	}
	wg.Wait()
	return worst
}

func upTo(n int) []int {
	v := make([]int, n)
	for i := range v {
		v[i] = i
	}
	return v
}

func TestAttendAll(t *testing.T) {
	four := officialAttention
	four.Heads = 10 // five queries a key head
	withGPU(t, func(g *gpu) {
		for i, c := range []struct {
			shape      chunk.AttentionShape
			base, rows int
			fp8        bool
		}{
			{microAttention, 0, 1, false},
			{microAttention, 0, 16, false},
			{microAttention, 3, 13, true},
			{four, 70, 59, false},
			{four, 70, 59, true},
			{officialAttention, 0, 1, false},
			{officialAttention, 0, 67, false},
			{officialAttention, 61, 5, true},
			{officialAttention, 1021, 30, false},
			{officialAttention, 2047, 4, false},
			{officialAttention, 130, 200, true},
			{officialAttention, 0, 2051, false},
		} {
			if testing.Short() && c.rows > 70 { // under a checker of memory
				continue
			}
			r := rand.New(rand.NewPCG(uint64(i), 3))
			p := makePages(r, c.base+c.rows)
			cache := makeKV(r, p, c.shape.KVHeads, c.base+c.rows, c.fp8)
			qw, q := words(normal(r, c.rows*c.shape.Heads*256, 1.5))
			gw, gates := words(normal(r, c.rows*c.shape.Heads*512, 2))
			ld := c.shape.Heads*256 + 8
			a := chunk.Attend{
				AttentionShape: c.shape, Cache: cache.upload(g, p), Rows: c.rows, Base: c.base, Q: g.Upload(qw), Qg: g.Upload(gw), QgLd: c.shape.Heads * 512,
				Out: g.Poisoned(2 * c.rows * ld), OutLd: ld,
			}
			for _, a.Plain = range []bool{true, false} {
				g.Check(g.C.Set(g.S, a.Out, 0xff, uint64(2*c.rows*ld)))
				g.Check(g.set.Attend(g.C, g.S, &a))
				got := g.Download[uint16](a.Out, c.rows*ld)
				worst := cache.check(got, ld, q, gates, c.rows, c.shape.Heads, max(1, c.rows/97), func(row int) []int { return upTo(c.base + row + 1) })
				what := fmt.Sprintf("%d/%d heads, %d rows at %d, fp8 %v, plain %v: %.2g", c.shape.Heads, c.shape.KVHeads, c.rows, c.base, c.fp8, a.Plain, worst)
				if !(worst <= 3e-3) {
					t.Error(what)
				} else {
					t.Log(what)
				}
			}
			g.Free(0)
		}
	})
}

// Values of any size that BF16 holds are added up as well as ordinary ones, with an FP8 cache too.
func TestAttendSizes(t *testing.T) {
	withGPU(t, func(g *gpu) {
		for _, c := range []struct {
			name string
			size func(t int) float64
		}{
			{"1", func(int) float64 { return 1 }},
			{"1e5", func(int) float64 { return 1e5 }},
			{"1e30", func(int) float64 { return 1e30 }},
			{"1e-6", func(int) float64 { return 1e-6 }},
			{"growing", func(t int) float64 { return math.Pow(2, float64(t)/8) }},
			{"falling", func(t int) float64 { return math.Pow(2, -float64(t)/32) }},
			{"with outliers", func(t int) float64 { return 1 + 1e5*float64(t%50/49) }},
			{"after zeros", func(t int) float64 { return 3000 * float64(t/100) }},
		} {
			const base, rows = 130, 200
			if testing.Short() && c.name != "growing" {
				continue
			}
			for i := range 4 {
				fp8, plain := i > 1, i%2 == 1
				r := rand.New(rand.NewPCG(9, 3))
				p := makePages(r, base+rows)
				cache := makeSizedKV(r, p, 2, base+rows, fp8, c.size)
				qw, q := words(normal(r, rows*24*256, 1.5))
				gw, gates := words(normal(r, rows*24*512, 2))
				a := chunk.Attend{
					AttentionShape: officialAttention, Cache: cache.upload(g, p), Rows: rows, Base: base, Q: g.Upload(qw), Qg: g.Upload(gw), QgLd: 24 * 512,
					Out: g.Poisoned(2 * rows * 24 * 256), OutLd: 24 * 256, Plain: plain,
				}
				g.Check(g.set.Attend(g.C, g.S, &a))
				worst := cache.check(g.Download[uint16](a.Out, rows*24*256), 24*256, q, gates, rows, 24, 7, func(row int) []int { return upTo(base + row + 1) })
				bound := 3e-3
				if fp8 && plain {
					bound = 4e-3 // weights are times the values' scales before they are rounded to BF16, and one value may be all that counts
				}
				if !(worst <= bound) {
					t.Errorf("values of %s, fp8 %v, plain %v: off by %.2g", c.name, fp8, plain, worst)
				} else {
					t.Logf("values of %s, fp8 %v, plain %v: %.2g", c.name, fp8, plain, worst)
				}
				g.Free(0)
			}
		}
	})
}

// wholeAttention is attention of the official size over all tokens up to a row's own.
func wholeAttention(g *gpu, rows int, fp8 bool) *chunk.Attend {
	r := rand.New(rand.NewPCG(1, 3))
	p := makePages(r, rows)
	cache := makeKV(r, p, 2, rows, fp8)
	qw, _ := words(normal(r, 24*256*64, 1.5))
	return &chunk.Attend{
		AttentionShape: officialAttention, Cache: cache.upload(g, p), Rows: rows, Q: repeated(g, qw, rows*24*256), Qg: repeated(g, qw, rows*24*512), QgLd: 24 * 512,
		Out: g.Alloc(2 * rows * 24 * 256), OutLd: 24 * 256,
	}
}

// The same call gives the same bits, whatever the warps' order.
func TestAttendSameBits(t *testing.T) {
	if testing.Short() {
		t.Skip("forty passes of 1,999 rows")
	}
	for _, fp8 := range []bool{false, true} {
		withGPU(t, func(g *gpu) {
			const rows = 1999
			a := wholeAttention(g, rows, fp8)
			var first []uint16
			for i := range 20 {
				g.Check(g.set.Attend(g.C, g.S, a))
				out := g.Download[uint16](a.Out, rows*a.OutLd)
				if i == 0 {
					first = out
				} else if !slices.Equal(out, first) {
					panic(fmt.Errorf("fp8 %v, call %d: other bits", fp8, i))
				}
			}
		})
	}
}

func BenchmarkAttendAll(b *testing.B) {
	for i := range 4 {
		rows, plain := []int{512, 2048}[i%2], i < 2
		b.Run(fmt.Sprintf("%d/plain=%v", rows, plain), func(b *testing.B) {
			withGPU(b, func(g *gpu) {
				a := wholeAttention(g, rows, false)
				a.Plain = plain
				us := g.time(5, 20, func() error { return g.set.Attend(g.C, g.S, a) })
				b.ReportMetric(us, "µs/layer")
				b.ReportMetric(float64(rows)*float64(rows)/2*24*256*4/us/1e6, "TFLOP/s")
				b.ReportMetric(0, "ns/op")
			})
		})
	}
}
