package chunk_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"ninfer/internal/backend/cuda/chunk"
	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/num"
)

// indexer is what rows are selected by.
type indexer struct {
	queries, keys []float64 // [row][4][128], [block][128]
	qw, pool      []uint16
	same          []int // block with the same key before this one, or -1
}

// makeIndexer makes queries that change slowly from row to row (by far of their size), and keys, some of which are equal.
func makeIndexer(r *rand.Rand, p paged, rows, blocks int, far float64) *indexer {
	x := &indexer{same: make([]int, blocks)}
	q := make([]float64, rows*512)
	for i := range q {
		if i < 512 {
			q[i] = r.NormFloat64()
		} else {
			q[i] = q[i-512]*math.Sqrt(1-far*far) + r.NormFloat64()*far
		}
	}
	x.qw, x.queries = words(q)
	kw, keys := words(normal(r, blocks*128, 1))
	for b := range blocks {
		x.same[b] = -1
		if b > 7 && b%5 == 0 {
			from := b - 1 - r.IntN(7)
			x.same[b] = from
			copy(kw[b*128:], kw[from*128:][:128])
			copy(keys[b*128:], keys[from*128:][:128])
		}
	}
	x.keys = keys
	x.pool = make([]uint16, p.pages*16*128)
	for i := range x.pool {
		x.pool[i] = 0x7fff
	}
	for b := range blocks {
		copy(x.pool[(int(p.table[b/16])*16+b%16)*128:], kw[b*128:][:128])
	}
	return x
}

// scale makes keys larger or smaller; by 0 it makes two of three equal.
func (x *indexer) scale(p paged, by float64) {
	for b := range x.same {
		at := (int(p.table[b/16])*16 + b%16) * 128
		for i := range 128 {
			v := x.keys[b*128+i] * by
			if by == 0 {
				v = x.keys[b*128+i]
				if b > 2 && b%3 > 0 {
					v = x.keys[128+i]
				}
			}
			x.pool[at+i] = num.ToBF16(float32(v))
			x.keys[b*128+i] = float64(num.FromBF16(x.pool[at+i]))
		}
		if by == 0 {
			x.same[b] = -1
			switch {
			case b == 4:
				x.same[b] = 1
			case b > 4 && b%3 == 1:
				x.same[b] = b - 2
			case b > 2 && b%3 == 2:
				x.same[b] = b - 1
			}
		}
	}
}

// scores of a row, and how far a sum in FP32 may be off.
func (x *indexer) scores(row, blocks int) (score, off []float64) {
	score, off = make([]float64, blocks), make([]float64, blocks)
	for b := range blocks {
		for h := range 4 {
			var s float64
			for i, k := range x.keys[b*128:][:128] {
				v := k * x.queries[(row*4+h)*128+i]
				s += v
				off[b] += math.Abs(v) * 1e-5 / math.Sqrt(128)
			}
			score[b] += max(0, s) / math.Sqrt(128)
		}
	}
	return score, off
}

// checkSelection says what is wrong with the tokens of a row: the best blocks and the tail, equal blocks in order.
func (x *indexer) checkSelection(s chunk.AttentionShape, row, position int, tokens []uint32) error {
	visible := position + 1
	n := visible / 4
	chosen := make([]bool, n)
	count := 0
	for i, t := range tokens {
		if i > 0 && t <= tokens[i-1] {
			return fmt.Errorf("token %d after %d", t, tokens[i-1])
		}
		if int(t) >= visible {
			return fmt.Errorf("token %d of %d", t, visible)
		}
		if int(t)/4 < n && t%4 == 0 {
			chosen[t/4] = true
			count++
		}
	}
	if want := min(n, s.Blocks); count != want || len(tokens) != 4*want+visible%4 {
		return fmt.Errorf("%d blocks and %d tokens, want %d and %d", count, len(tokens), want, 4*want+visible%4)
	}
	if n <= s.Blocks {
		return nil
	}
	score, off := x.scores(row, n)
	sorted := slices.Clone(score)
	slices.SortFunc(sorted, func(a, b float64) int { return -cmpFloat(a, b) })
	edge := sorted[s.Blocks-1]
	for b := range n {
		if chosen[b] && score[b] < edge-2*off[b] || !chosen[b] && score[b] > edge+2*off[b] {
			return fmt.Errorf("block %d with %g is chosen: %v, the last of %d has %g", b, score[b], chosen[b], s.Blocks, edge)
		}
		if x.same[b] >= 0 && chosen[b] && !chosen[x.same[b]] {
			return fmt.Errorf("block %d is chosen and its equal %d is not", b, x.same[b])
		}
	}
	return nil
}

func cmpFloat(a, b float64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

type seen struct {
	list, count driver.Ptr
	ld          int
}

func (g *gpu) see(a *chunk.Attend) seen {
	s := seen{ld: 4*a.Blocks + 3}
	s.list, s.count = g.Poisoned(4*a.Rows*s.ld), g.Poisoned(4*a.Rows)
	a.Seen, a.SeenCount, a.SeenLd = s.list, s.count, s.ld
	return s
}

func (s seen) rows(g *gpu, n int) [][]uint32 {
	list, count := g.Download[uint32](s.list, n*s.ld), g.Download[uint32](s.count, n)
	v := make([][]uint32, n)
	for r := range v {
		v[r] = list[r*s.ld:][:min(int(count[r]), s.ld)]
	}
	return v
}

func TestSelect(t *testing.T) {
	withGPU(t, func(g *gpu) {
		for i, c := range []struct {
			shape      chunk.AttentionShape
			base, rows int
			scale      float64 // of keys; 0 makes two of three equal
		}{
			{microAttention, 0, 130, 1},
			{microAttention, 997, 67, 1},
			{officialAttention, 2040, 20, 1},
			{officialAttention, 2300, 70, 1},
			{officialAttention, 9001, 131, 1},
			{officialAttention, 70_000, 66, 1},
			{officialAttention, 261_600, 32, 1},
			{officialAttention, 9001, 9, 1e-15},
			{officialAttention, 9001, 9, 1e12},
			{officialAttention, 12_000, 40, 0},
		} {
			if testing.Short() && c.base > 3000 { // under a checker of memory
				continue
			}
			r := rand.New(rand.NewPCG(uint64(i), 6))
			s := c.shape
			tokens := c.base + c.rows
			p := makePages(r, tokens)
			x := makeIndexer(r, p, c.rows, tokens/4, .2)
			x.scale(p, c.scale)
			clear(x.queries[3*512:][:512]) // all blocks equal
			clear(x.qw[3*512:][:512])
			heads := p.pages * 64 * s.KVHeads
			a := chunk.Attend{
				AttentionShape: s, Rows: c.rows, Base: c.base, Q: g.Alloc(2 * c.rows * s.Heads * 256), Iq: g.Upload(x.qw), Qg: g.Alloc(2 * c.rows * s.Heads * 512), QgLd: s.Heads * 512,
				Out: g.Alloc(2 * c.rows * s.Heads * 256), OutLd: s.Heads * 256, Work: g.Poisoned(int(s.Workspace(c.rows, tokens))),
				Cache: chunk.Cache{Keys: g.Alloc(2 * heads * 256), Values: g.Alloc(2 * heads * 256), BlockKeys: g.Upload(x.pool), Pages: g.Upload(p.table)},
			}
			seen := g.see(&a)
			// Every row for short contexts, some of long ones: the scores of a row are a lot of work here.
			every := max(1, c.rows*tokens/2_000_000)
			for _, a.Plain = range []bool{true, false} {
				g.Check(g.set.Attend(g.C, g.S, &a))
				lists := seen.rows(g, c.rows)
				var wg sync.WaitGroup
				for row := 0; row < c.rows; row += every {
					wg.Go(func() {
						if err := x.checkSelection(s, row, c.base+row, lists[row]); err != nil {
							t.Errorf("%d rows at %d, plain %v: row %d: %v", c.rows, c.base, a.Plain, row, err)
						}
					})
				}
				wg.Wait()
			}
			g.Free(0)
		}
	})
}

func TestAttendSelected(t *testing.T) {
	withGPU(t, func(g *gpu) {
		for i, c := range []struct {
			shape      chunk.AttentionShape
			base, rows int
			fp8, plain bool
		}{
			{microAttention, 0, 100, false, true},
			{microAttention, 0, 100, false, false},
			{microAttention, 37, 61, true, false},
			{officialAttention, 2045, 12, false, false},
			{officialAttention, 2301, 70, false, true},
			{officialAttention, 2301, 70, false, false},
			{officialAttention, 9000, 37, true, false},
		} {
			if testing.Short() && c.base > 3000 { // under a checker of memory
				continue
			}
			r := rand.New(rand.NewPCG(uint64(i), 7))
			s := c.shape
			tokens := c.base + c.rows
			p := makePages(r, tokens)
			x := makeIndexer(r, p, c.rows, tokens/4, .2)
			cache := makeKV(r, p, s.KVHeads, tokens, c.fp8)
			qw, q := words(normal(r, c.rows*s.Heads*256, 1.5))
			gw, gates := words(normal(r, c.rows*s.Heads*512, 2))
			a := chunk.Attend{
				AttentionShape: s, Cache: cache.upload(g, p), Rows: c.rows, Base: c.base, Q: g.Upload(qw), Iq: g.Upload(x.qw), Qg: g.Upload(gw), QgLd: s.Heads * 512,
				Out: g.Poisoned(2 * c.rows * s.Heads * 256), OutLd: s.Heads * 256, Work: g.Poisoned(int(s.Workspace(c.rows, tokens))),
			}
			a.BlockKeys, a.Plain = g.Upload(x.pool), c.plain
			seen := g.see(&a)
			g.Check(g.set.Attend(g.C, g.S, &a))
			lists := seen.rows(g, c.rows)
			check := func(what string) {
				got := g.Download[uint16](a.Out, c.rows*s.Heads*256)
				worst := cache.check(got, s.Heads*256, q, gates, c.rows, s.Heads, max(1, c.rows/20), func(row int) []int {
					var list []int
					for _, t := range lists[row] {
						list = append(list, int(t))
					}
					return list
				})
				what = fmt.Sprintf("%d/%d heads, %d rows at %d, fp8 %v, plain %v, %s: %.2g", s.Heads, s.KVHeads, c.rows, c.base, c.fp8, c.plain, what, worst)
				if !(worst <= 3e-3) {
					g.T.Error(what)
				} else {
					g.T.Log(what)
				}
			}
			check("own selection")
			before := g.Download[uint16](a.Out, c.rows*s.Heads*256)
			a.Seen, a.SeenCount, a.SeenLd = 0, 0, 0
			a.Out = g.Poisoned(2 * c.rows * s.Heads * 256)
			g.Check(g.set.Attend(g.C, g.S, &a))
			if !slices.Equal(before, g.Download[uint16](a.Out, len(before))) {
				t.Errorf("%d rows at %d: the same call gives other bits", c.rows, c.base)
			}
			// Other blocks by force, in every other row.
			a.ForcedLd = 4*s.Blocks + 3
			forced, counts := make([]uint32, c.rows*a.ForcedLd), make([]uint32, c.rows)
			for row := range c.rows {
				counts[row] = ^uint32(0)
				if row%2 == 1 {
					continue
				}
				visible := c.base + row + 1
				lists[row] = nil
				for _, b := range r.Perm((visible + 3) / 4)[:min(s.Blocks/2, (visible+3)/4)] {
					for j := b * 4; j < min(b*4+4, visible); j++ {
						lists[row] = append(lists[row], uint32(j))
					}
				}
				slices.Sort(lists[row])
				counts[row] = uint32(copy(forced[row*a.ForcedLd:], lists[row]))
			}
			a.Forced, a.ForcedCount = g.Upload(forced), g.Upload(counts)
			g.Check(g.set.Attend(g.C, g.S, &a))
			check("forced")
			g.Free(0)
		}
	})
}

func BenchmarkAttend(b *testing.B) {
	for _, c := range []struct {
		base, rows int
		far        float64 // 1: rows that follow each other have nothing in common
	}{{0, 8192, .16}, {57344, 8192, .16}, {57344, 8192, 1}, {253952, 7680, .16}} {
		for _, fp8 := range []bool{false, true} {
			for _, plain := range []bool{true, false} {
				if plain && (c.base != 0 || fp8) || fp8 && (c.base > 57344 || c.far == 1) {
					continue
				}
				b.Run(fmt.Sprintf("base=%d/far=%v/fp8=%v/plain=%v", c.base, c.far, fp8, plain), func(b *testing.B) {
					withGPU(b, func(g *gpu) {
						r := rand.New(rand.NewPCG(1, 8))
						s := officialAttention
						tokens := c.base + c.rows
						p := makePages(r, tokens)
						x := makeIndexer(r, p, c.rows, tokens/4, c.far)
						few := makeKV(r, paged{table: []uint32{0}, pages: 1}, 2, 64, fp8)
						some, _ := words(normal(r, 24*256*64, 1.5))
						heads := p.pages * 64 * s.KVHeads
						a := chunk.Attend{
							AttentionShape: s, Rows: c.rows, Base: c.base, Q: repeated(g, some, c.rows*24*256), Iq: g.Upload(x.qw), Qg: repeated(g, some, c.rows*24*512), QgLd: 24 * 512,
							Out: g.Alloc(2 * c.rows * 24 * 256), OutLd: 24 * 256, Work: g.Alloc(int(s.Workspace(c.rows, tokens))),
							Cache: chunk.Cache{BlockKeys: g.Upload(x.pool), Pages: g.Upload(p.table)}, Plain: plain,
						}
						if fp8 {
							a.Keys, a.Values = g.Alloc(heads*256), g.Alloc(heads*256)
							g.Check(g.C.Set(g.S, a.Keys, 0x31, uint64(heads*256)))
							g.Check(g.C.Set(g.S, a.Values, 0x35, uint64(heads*256)))
							a.KeyScales, a.ValueScales = repeated(g, few.ks, heads), repeated(g, few.vs, heads)
						} else {
							a.Keys, a.Values = repeated(g, few.k, heads*256), repeated(g, few.v, heads*256)
						}
						seen := g.see(&a)
						g.Check(g.set.Attend(g.C, g.S, &a))
						lists := seen.rows(g, c.rows)
						var shared, union float64
						n := 0
						for row := 1; row < c.rows; row += 61 {
							at := row / 5 * 5
							if at+5 > c.rows || c.base+at < 2100 {
								continue
							}
							blocks := map[uint32]int{}
							for i := at; i < at+10; i++ {
								for _, t := range lists[i] {
									blocks[t] |= 1 << (i - at)
								}
							}
							both := 0
							for _, m := range blocks {
								if m&3 == 3 {
									both++
								}
							}
							shared += float64(both) / float64(len(lists[at]))
							union += float64(len(blocks)) / float64(len(lists[at]))
							n++
						}
						a.Seen, a.SeenCount = 0, 0
						us := g.time(3, 3, func() error { return g.set.Attend(g.C, g.S, &a) })
						var tokensSeen float64
						for i := range c.rows {
							tokensSeen += min(float64(c.base+i+1), 2050)
						}
						b.ReportMetric(us, "µs/layer")
						b.ReportMetric(us/float64(c.rows), "µs/token")
						b.ReportMetric(tokensSeen*24*256*4/us/1e6, "TFLOP/s")
						b.ReportMetric(shared/float64(n), "shared")
						b.ReportMetric(union/float64(n), "union")
						b.ReportMetric(0, "ns/op")
					})
				})
			}
		}
	}
}

func BenchmarkPrep(b *testing.B) {
	withGPU(b, func(g *gpu) {
		const rows = 8192
		s := officialAttention
		r := rand.New(rand.NewPCG(1, 9))
		p := makePages(r, rows)
		some, _ := words(normal(r, 1<<18, 1))
		norms := g.Upload(make([]float32, 256))
		heads := p.pages * 64 * 2
		a := chunk.Prep{
			AttentionShape: s, Rows: rows, RowTable: g.Alloc(rows * 48), Qg: repeated(g, some, rows*24*512), Key: repeated(g, some, rows*512), Value: repeated(g, some, rows*512),
			Index: repeated(g, some, rows*640), QgLd: 24 * 512, KeyLd: 512, ValueLd: 512, IndexLd: 640, QueryNorm: norms, KeyNorm: norms, IndexQueryNorm: norms, IndexKeyNorm: norms,
			Inverse: g.Upload(make([]float32, 64)), Eps: 1e-6, Q: g.Alloc(2 * rows * 24 * 256), Iq: g.Alloc(2 * rows * 512),
			Cache: chunk.Cache{
				Keys: g.Alloc(2 * heads * 256), Values: g.Alloc(2 * heads * 256), Raw: g.Alloc(p.pages * 64 * 256), Positions: g.Alloc(p.pages * 64 * 12), BlockKeys: g.Alloc(p.pages * 16 * 256),
				Pages: g.Upload(p.table),
			},
		}
		us := g.time(5, 20, func() error { return g.set.Prep(g.C, g.S, &a) })
		b.ReportMetric(us, "µs/layer")
		b.ReportMetric(0, "ns/op")
	})
}
