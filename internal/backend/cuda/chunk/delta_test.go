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

// net is a delta net with inputs for some rows, in float64 as the kernels receive them, and what the formulas of transformers' Qwen4ExpTextGatedDeltaNet make of it,
// row after row.
type net struct {
	shape           chunk.DeltaShape
	rows, width     int
	x, z, a, b      []float64
	conv            []float64
	alog, dt, norm  []float64
	window, state   []float64
	out             []float64
	xw, zw, aw, bw  []uint16
	windowW, stateW []uint16
}

func makeNet(r *rand.Rand, shape chunk.DeltaShape, rows int, half, empty bool) *net {
	n := &net{shape: shape, rows: rows, width: (2*shape.KeyHeads + shape.Heads) * shape.Dim}
	x := normal(r, rows*n.width, 1)
	for i := range rows { // a channel far above the others, rows of zeros and of next to nothing
		x[i*n.width+3] *= 60
		for c := range n.width {
			switch {
			case i%50 == 17:
				x[i*n.width+c] = 0
			case i%50 == 23:
				x[i*n.width+c] *= 1e-20
			}
		}
	}
	n.xw, n.x = words(x)
	n.zw, n.z = words(normal(r, rows*shape.Heads*shape.Dim, 1.5))
	n.aw, n.a = words(normal(r, rows*shape.Heads, 2))
	n.bw, n.b = words(normal(r, rows*shape.Heads, 2))
	n.conv = asFloat32(normal(r, 4*n.width, .5))
	n.alog, n.dt, n.norm = asFloat32(normal(r, shape.Heads, 2)), asFloat32(normal(r, shape.Heads, 1)), asFloat32(normal(r, shape.Dim, 1))
	for h := range shape.Heads {
		n.alog[h] = float64(float32(n.alog[h] - 2)) // most heads remember long, some forget at once
	}
	window := normal(r, 3*n.width, 1)
	state := normal(r, shape.Heads*shape.Dim*shape.Dim, .5)
	if empty {
		clear(window)
		clear(state)
	}
	n.windowW, n.window = words(window)
	if half {
		n.stateW, n.state = words(state)
	} else {
		n.state = asFloat32(state)
	}
	return n
}

// run brings window and state forward and computes the outputs.
func (n *net) run() {
	s := n.shape
	all := append(append([]float64(nil), n.window...), n.x...) // three rows more
	n.out = make([]float64, n.rows*s.Heads*s.Dim)
	group := s.Heads / s.KeyHeads
	convolved := func(row, ch int) float64 {
		var v float64
		for j := range 4 {
			v += n.conv[j*n.width+ch] * all[(row+j)*n.width+ch]
		}
		return silu(v)
	}
	var wg sync.WaitGroup
	for h := range s.Heads {
		wg.Go(func() {
			state := n.state[h*s.Dim*s.Dim:][:s.Dim*s.Dim]
			q, k, d, o := make([]float64, s.Dim), make([]float64, s.Dim), make([]float64, s.Dim), make([]float64, s.Dim)
			for row := range n.rows {
				var qq, kk float64
				for i := range s.Dim {
					q[i], k[i] = convolved(row, h/group*s.Dim+i), convolved(row, (s.KeyHeads+h/group)*s.Dim+i)
					qq += q[i] * q[i]
					kk += k[i] * k[i]
				}
				for i := range s.Dim {
					q[i] /= math.Sqrt(qq+1e-6) * math.Sqrt(float64(s.Dim))
					k[i] /= math.Sqrt(kk + 1e-6)
				}
				decay := math.Exp(-math.Exp(n.alog[h]) * math.Log1p(math.Exp(n.a[row*s.Heads+h]+n.dt[h])))
				beta := sigmoid(n.b[row*s.Heads+h])
				clear(d)
				clear(o)
				for i := range s.Dim {
					for j := range s.Dim {
						state[i*s.Dim+j] *= decay
						d[j] += state[i*s.Dim+j] * k[i]
					}
				}
				for j := range s.Dim {
					d[j] = beta * (convolved(row, (2*s.KeyHeads+h)*s.Dim+j) - d[j])
				}
				var square float64
				for i := range s.Dim {
					for j := range s.Dim {
						state[i*s.Dim+j] += k[i] * d[j]
						o[j] += state[i*s.Dim+j] * q[i]
					}
				}
				for j := range s.Dim {
					square += o[j] * o[j]
				}
				scale := 1 / math.Sqrt(square/float64(s.Dim)+1e-6)
				for j := range s.Dim {
					at := (row*s.Heads+h)*s.Dim + j
					n.out[at] = o[j] * scale * n.norm[j] * sigmoid(n.z[at])
				}
			}
		})
	}
	wg.Wait()
	copy(n.window, all[n.rows*n.width:])
}

func TestDelta(t *testing.T) {
	micro, official := chunk.DeltaShape{KeyHeads: 1, Heads: 3, Dim: 128, Taps: 4}, chunk.DeltaShape{KeyHeads: 16, Heads: 48, Dim: 128, Taps: 4}
	wide := chunk.DeltaShape{KeyHeads: 2, Heads: 8, Dim: 128, Taps: 4} // more heads a key head than the kernel takes at a time
	type test struct {
		shape       chunk.DeltaShape
		rows        []int // one call after the other
		half, empty bool
	}
	var tests []test
	for _, n := range []int{1, 2, 3, 4, 5, 63, 64, 65, 127, 129, 700} {
		tests = append(tests, test{shape: micro, rows: []int{n}}, test{shape: micro, rows: []int{n}, half: true, empty: true})
	}
	tests = append(tests, test{shape: wide, rows: []int{200}}, test{shape: micro, rows: []int{1, 1, 2, 70, 64, 3, 500}}, test{shape: micro, rows: []int{4096}},
		test{shape: official, rows: []int{300, 213}}, test{shape: official, rows: []int{1024}, empty: true})
	withGPU(t, func(g *gpu) {
		// The kernels of this GPU, those that every GPU has, and those with as little shared memory as RTX cards have.
		for i := range 3 * len(tests) {
			c, plain := tests[i/3], i%3 > 0
			rows := 0
			for _, n := range c.rows {
				rows += n
			}
			if testing.Short() && rows != 5 && rows != 129 { // under a checker of memory
				continue
			}
			had := g.set.Limit(99 << 10)
			if i%3 < 2 {
				g.set.Limit(had)
			}
			n := makeNet(rand.New(rand.NewPCG(uint64(i/3), 1)), c.shape, rows, c.half, c.empty)
			worstOut, worstState, exact := checkDelta(g, n, c.rows, c.half, plain)
			g.set.Limit(had)
			what := fmt.Sprintf("%d/%d heads, rows %v, half %v, empty %v, way %d", c.shape.KeyHeads, c.shape.Heads, c.rows, c.half, c.empty, i%3)
			bound := 2e-3
			if c.half {
				bound = 3e-3 // and a rounding to BF16
			}
			if !(worstOut <= 5e-3) || !(worstState <= bound) || !exact {
				t.Errorf("%s: outputs %.2g off, state %.2g, window right: %v", what, worstOut, worstState, exact)
			} else {
				t.Logf("%s: outputs %.2g, state %.2g", what, worstOut, worstState)
			}
			g.Free(0)
		}
	})
}

// checkDelta runs n on the GPU in calls of so many rows. It returns the worst row's and the worst head's distance.
func checkDelta(g *gpu, n *net, calls []int, half, plain bool) (out, state float64, window bool) {
	s := n.shape
	ld := n.width + 24
	vd := s.Heads * s.Dim
	xw := make([]uint16, n.rows*ld)
	for r := range n.rows {
		copy(xw[r*ld:], n.xw[r*n.width:][:n.width])
	}
	d := chunk.Delta{
		DeltaShape: s, XLd: ld, ZLd: vd, ALd: s.Heads, OutLd: vd + 8, Eps: 1e-6, HalfState: half, Plain: plain,
		Conv: g.Upload(floats(n.conv)), Alog: g.Upload(floats(n.alog)), Dt: g.Upload(floats(n.dt)), Norm: g.Upload(floats(n.norm)),
		Window: g.Upload(n.windowW), Work: g.Poisoned(int(s.Workspace(n.rows))),
	}
	inPlace := n.rows%2 == 1
	if inPlace {
		d.OutLd = vd
	}
	x, z, a, b, o := g.Upload(xw), g.Upload(n.zw), g.Upload(n.aw), g.Upload(n.bw), g.Poisoned(2*n.rows*d.OutLd)
	if half {
		d.State = g.Upload(n.stateW)
	} else {
		d.State = g.Upload(floats(n.state))
	}
	first := 0
	for _, rows := range calls {
		d.Rows = rows
		d.X, d.Z, d.A, d.B = x+driver.Ptr(2*first*ld), z+driver.Ptr(2*first*vd), a+driver.Ptr(2*first*s.Heads), b+driver.Ptr(2*first*s.Heads)
		d.Out = o + driver.Ptr(2*first*d.OutLd)
		if inPlace {
			d.Out = d.Z
		}
		g.Check(g.set.Delta(g.C, g.S, &d))
		first += rows
	}
	if inPlace {
		o = z
	}
	got := fromWords(g.Download[uint16](o, n.rows*d.OutLd))
	var gotState []float64
	if half {
		gotState = fromWords(g.Download[uint16](d.State, len(n.state)))
	} else {
		gotState = fromFloats(g.Download[float32](d.State, len(n.state)))
	}
	gotWindow := g.Download[uint16](d.Window, 3*n.width)
	n.run()
	for r := range n.rows {
		v := distance(got[r*d.OutLd:][:vd], n.out[r*vd:][:vd])
		if v != v {
			v = math.Inf(1)
		}
		out = max(out, v)
	}
	for h := range s.Heads {
		v := distance(gotState[h*s.Dim*s.Dim:][:s.Dim*s.Dim], n.state[h*s.Dim*s.Dim:][:s.Dim*s.Dim])
		if v != v {
			v = math.Inf(1)
		}
		state = max(state, v)
	}
	window = true
	for i, w := range gotWindow {
		window = window && float64(num.FromBF16(w)) == n.window[i]
	}
	return out, state, window
}

// sizeable is a delta net of the official size over many rows.
func sizeable(g *gpu, rows int) *chunk.Delta {
	shape := chunk.DeltaShape{KeyHeads: 16, Heads: 48, Dim: 128, Taps: 4}
	n := makeNet(rand.New(rand.NewPCG(1, 2)), shape, min(rows, 512), false, true)
	ld, vd := n.width, shape.Heads*shape.Dim
	return &chunk.Delta{
		DeltaShape: shape, Rows: rows, XLd: ld, ZLd: vd, ALd: shape.Heads, OutLd: vd, Eps: 1e-6, Conv: g.Upload(floats(n.conv)), Alog: g.Upload(floats(n.alog)),
		Dt: g.Upload(floats(n.dt)), Norm: g.Upload(floats(n.norm)), Window: g.Upload(n.windowW), State: g.Upload(floats(n.state)),
		X: repeated(g, n.xw, rows*ld), Z: repeated(g, n.zw, rows*vd), A: repeated(g, n.aw, rows*shape.Heads), B: repeated(g, n.bw, rows*shape.Heads),
		Out: g.Alloc(2 * rows * vd), Work: g.Alloc(int(shape.Workspace(rows))),
	}
}

// The same call gives the same bits, whatever the warps' order.
func TestDeltaSameBits(t *testing.T) {
	if testing.Short() {
		t.Skip("twenty passes of 2,065 rows")
	}
	withGPU(t, func(g *gpu) {
		const rows = 2048 + 17
		d := sizeable(g, rows)
		state, window := g.Download[float32](d.State, d.Heads*d.Dim*d.Dim), g.Download[uint16](d.Window, 3*d.XLd)
		var first []uint16
		var firstState []float32
		for i := range 20 {
			d.State, d.Window = g.Upload(state), g.Upload(window)
			g.Check(g.set.Delta(g.C, g.S, d))
			out, after := g.Download[uint16](d.Out, rows*d.OutLd), g.Download[float32](d.State, len(state))
			if i == 0 {
				first, firstState = out, after
			} else if !slices.Equal(out, first) || !slices.Equal(after, firstState) {
				panic(fmt.Errorf("call %d: other bits, outputs alike: %v, states alike: %v", i, slices.Equal(out, first), slices.Equal(after, firstState)))
			}
		}
	})
}

func BenchmarkDelta(b *testing.B) {
	for i := range 4 {
		rows, plain := []int{512, 2048, 8192, 8192}[i], i == 3
		b.Run(fmt.Sprintf("%d/plain=%v", rows, plain), func(b *testing.B) {
			withGPU(b, func(g *gpu) {
				d := sizeable(g, rows)
				d.Plain = plain
				us := g.time(5, 20, func() error { return g.set.Delta(g.C, g.S, d) })
				b.ReportMetric(us, "µs/layer")
				b.ReportMetric(us/float64(rows)*1000, "ns/token")
				b.ReportMetric(0, "ns/op")
			})
		})
	}
}

// repeated uploads n words, v over and over.
func repeated(g *gpu, v []uint16, n int) driver.Ptr {
	w := make([]uint16, n)
	for i := 0; i < n; i += len(v) {
		copy(w[i:], v)
	}
	return g.Upload(w)
}
