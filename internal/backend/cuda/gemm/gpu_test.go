package gemm

import (
	"encoding/binary"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"ninfer/internal/backend/cuda/gputest"
	"ninfer/internal/num"
)

var (
	portableFlag = flag.Bool("portable", false, "the code was compiled with -DNINFER_PORTABLE")
	libraryFlag  = flag.String("library", "", "cuBLASLt's file")
)

// gpu is a device with kernels loaded, for one test.
type gpu struct {
	*gputest.GPU
	set  *Set
	room Workspace
}

// withGPU runs f on the owner's thread, or skips with the reason.
func withGPU(t *testing.T, library string, f func(g *gpu)) {
	t.Helper()
	gputest.On(t, func(g *gputest.GPU) {
		set, err := Load(g.C, Options{Library: library, Code: gputest.Code(), Portable: *portableFlag})
		g.Check(err)
		defer func() { _ = set.Close(g.C) }()
		f(&gpu{g, set, Workspace{At: g.Alloc(1 << 30), Bytes: 1 << 30}})
	})
}

func bf16(x float64) uint16   { return num.ToBF16(float32(x)) }
func unbf16(w uint16) float64 { return float64(num.FromBF16(w)) }

func sigmoid(x float64) float64 { return 1 / (1 + math.Exp(-x)) }

// weights is a random dense matrix.
type weights struct {
	m     Matrix
	codes []byte
	scale []float64
}

func (g *gpu) weights(rng *rand.Rand, f Format, n, k int, scaleF32 bool) *weights {
	w := &weights{m: Matrix{Format: f, ScaleF32: scaleF32, N: n, K: k}}
	norm := 1 / math.Sqrt(float64(k))
	if f == BF16 {
		w.codes = make([]byte, 2*n*k)
		for i := range n * k {
			v := rng.NormFloat64() * norm
			if i%1009 == 0 {
				v = 0
			}
			binary.LittleEndian.PutUint16(w.codes[2*i:], bf16(v))
		}
	} else {
		w.codes = make([]byte, n*k)
		for i := range w.codes {
			c := uint8(rng.Uint32()) // subnormal codes included
			if c&0x7f == 0x7f {
				c--
			}
			w.codes[i] = c
		}
		var stored []byte
		for r := range n {
			s := norm / 100 * (0.5 + rng.Float64())
			if r%5 == 1 {
				s = 1e-30 // a row of the smallest kind
			}
			if scaleF32 {
				stored = binary.LittleEndian.AppendUint32(stored, math.Float32bits(float32(s)))
				w.scale = append(w.scale, float64(float32(s)))
			} else {
				stored = binary.LittleEndian.AppendUint16(stored, bf16(s))
				w.scale = append(w.scale, unbf16(bf16(s)))
			}
		}
		w.m.Scale = g.Upload(stored)
	}
	w.m.Data = g.Upload(w.codes)
	return w
}

// row is a decoded row; rounded: as BF16.
func (w *weights) row(n int, rounded bool) []float64 {
	v := make([]float64, w.m.K)
	for k := range v {
		if w.m.Format == BF16 {
			v[k] = unbf16(binary.LittleEndian.Uint16(w.codes[2*(n*w.m.K+k):]))
		} else {
			v[k] = float64(num.FromE4M3(w.codes[n*w.m.K+k])) * w.scale[n]
			if rounded {
				v[k] = unbf16(bf16(v[k]))
			}
		}
	}
	return v
}

func dot(w, x []float64) (sum, abs float64) {
	for k, v := range x {
		sum += v * w[k]
		abs += math.Abs(v * w[k])
	}
	return sum, abs
}

// activations are r rows of k BF16 numbers, ld apart, with an outlier channel and some zeros.
func activations(rng *rand.Rand, r, k, ld int) (words []uint16, values [][]float64) {
	words = make([]uint16, r*ld)
	for i := range r {
		row := make([]float64, k)
		for j := range ld {
			v := rng.NormFloat64()
			switch {
			case j == k/3:
				v *= 30
			case j%17 == 3:
				v = 0
			}
			w := bf16(v * math.Pow(2, float64(-4*(i%3))))
			words[i*ld+j] = w
			if j < k {
				row[j] = unbf16(w)
			}
		}
		values = append(values, row)
	}
	return words, values
}

// some is the numbers below n that are looked at: both ends, borders of tiles, and a few others.
func some(n, most int) []int {
	var v []int
	for i := range n {
		if n <= most || i == 0 || i == n-1 || i%128 == 127 && i%3 == 0 || i%(n/most+1) == 5 {
			v = append(v, i)
		}
	}
	return v
}

func TestMultiply(t *testing.T) {
	for _, library := range []string{"none", *libraryFlag} {
		withGPU(t, library, func(g *gpu) {
			if library != "none" && g.set.lib == nil {
				t.Log(g.set.Library())
				return
			}
			t.Log(g.set.Library())
			rng := rand.New(rand.NewPCG(1, 2))
			worst := map[Format]float64{}
			for _, shape := range []struct{ n, k int }{{2560, 2560}, {2560, 6144}, {320, 10240}, {1120, 320}, {48, 256}, {1, 128}, {513, 64}, {17, 96}, {128, 640}} {
				for _, f := range []Format{BF16, E4M3} {
					scaleF32 := shape.n%3 == 0
					w := g.weights(rng, f, shape.n, shape.k, scaleF32)
					list := []int{9, 64, 65, 300, 600}
					if shape.n*shape.k < 1<<17 {
						list = append(list, 1, 1111)
					}
					for _, rows := range list {
						ld, outLd := shape.k+8*(rows%2), shape.n+8*(rows%3)
						words, x := activations(rng, rows, shape.k, ld)
						for _, p := range []Product{{}, {OutF32: true}, {Epilogue: Silu, Factor: 0.25}, {Epilogue: Sigmoid2, OutF32: true}} {
							if (p.Epilogue != Plain) != (rows == 65) && rows != 9 {
								continue
							}
							size := 2
							if p.OutF32 {
								size = 4
							}
							p.W, p.OutLd, p.Out = w.m, outLd, g.Poisoned(size*rows*outLd)
							g.Check(g.set.Multiply(g.C, g.S, g.Upload(words), ld, rows, p, g.room))
							raw := g.Download[byte](p.Out, size*rows*outLd)
							bound, slack := 3e-3, 1e-5
							if p.OutF32 {
								bound = 1e-4
							}
							rounded := f == E4M3 && library != "none" && g.set.suits(p, rows)
							tiny := 0.0
							if p.Epilogue != Plain {
								tiny = 1e-7
							}
							var c gputest.Comparison
							cols := some(shape.n, 12)
							decoded := make([][]float64, len(cols))
							for i, n := range cols {
								decoded[i] = w.row(n, rounded)
							}
							name := fmt.Sprintf("%d x %d format %d, %d rows, epilogue %d, FP32 %v, library %v", shape.n, shape.k, f, rows, p.Epilogue, p.OutF32, library != "none")
							for _, r := range some(rows, 10) {
								for i, n := range cols {
									v, abs := dot(decoded[i], x[r])
									switch p.Epilogue {
									case Silu:
										v = v / 4 * sigmoid(v/4)
									case Sigmoid2:
										v = 2 * sigmoid(v)
									}
									got := 0.0
									if p.OutF32 {
										got = float64(math.Float32frombits(binary.LittleEndian.Uint32(raw[4*(r*outLd+n):])))
									} else {
										got = unbf16(binary.LittleEndian.Uint16(raw[2*(r*outLd+n):]))
									}
									c.Add(fmt.Sprintf("row %d, column %d", r, n), got, v, 4, slack*abs+tiny)
								}
								c.End(t, name, bound)
							}
							worst[f] = max(worst[f], c.Worst)
							for i := range outLd - shape.n { // between rows nothing is written
								if b := raw[size*(shape.n+i)]; b != 0xff {
									t.Errorf("%s: written beyond column %d", name, shape.n+i)
									break
								}
							}
							g.Free(-2) // activations and results
						}
					}
				}
			}
			t.Logf("library %v: worst relative L2 BF16 %.2e, E4M3 %.2e", library != "none", worst[BF16], worst[E4M3])
		})
	}
}

// The same call twice gives the same bits, and a row's bits do not depend on the other rows' contents.
func TestSameBits(t *testing.T) {
	withGPU(t, *libraryFlag, func(g *gpu) {
		rng := rand.New(rand.NewPCG(3, 4))
		const rows, n, k = 700, 384, 640
		w := g.weights(rng, BF16, n, k, false)
		words, _ := activations(rng, rows, k, k)
		run := func(words []uint16) []uint16 {
			p := Product{W: w.m, Out: g.Poisoned(2 * rows * n), OutLd: n}
			g.Check(g.set.Multiply(g.C, g.S, g.Upload(words), k, rows, p, g.room))
			return g.Download[uint16](p.Out, rows*n)
		}
		a := run(words)
		if slices.Contains(a, 0xffff) {
			t.Error("some results were not written")
		}
		if b := run(words); !slices.Equal(a, b) {
			t.Error("two calls differ")
		}
		other := slices.Clone(words)
		for i := k; i < len(other); i++ {
			other[i] ^= 0x8000
		}
		if b := run(other); !slices.Equal(a[:n], b[:n]) {
			t.Error("row 0 depends on other rows")
		}
	})
}

func TestRoute(t *testing.T) {
	withGPU(t, "none", func(g *gpu) {
		rng := rand.New(rand.NewPCG(5, 6))
		for _, q := range []struct{ experts, top int }{{512, 10}, {8, 2}, {16, 4}, {33, 16}, {1, 1}} {
			for _, normalize := range []bool{true, false} {
				m := Mixture{Experts: q.experts, TopK: q.top, Hidden: 128, Inter: 64, GateUp: Bank{Layout: Plain16}, Down: Bank{Layout: Plain16}, Normalize: normalize}
				const rows = 37
				logits := make([]float32, rows*q.experts)
				for i := range logits {
					logits[i] = float32(rng.NormFloat64() * 3)
					if i/q.experts%3 == 1 { // ties
						logits[i] = float32(rng.IntN(4))
					}
				}
				for e := range q.experts {
					logits[5*q.experts+e] = float32(math.NaN())
				}
				chosen, weight := g.Poisoned(4*rows*q.top), g.Poisoned(4*rows*q.top)
				g.Check(g.set.Route(g.C, g.S, m, g.Upload(logits), rows, chosen, weight))
				ids, ws := g.Download[uint32](chosen, rows*q.top), g.Download[float32](weight, rows*q.top)
				for r := range rows {
					if r == 5 { // no number is the largest; ids must still be experts, each once
						seen := map[uint32]bool{}
						for _, e := range ids[r*q.top : (r+1)*q.top] {
							if int(e) >= q.experts || seen[e] {
								t.Errorf("NaN row: expert %d", e)
							}
							seen[e] = true
						}
						continue
					}
					l := logits[r*q.experts : (r+1)*q.experts]
					order := make([]int, q.experts)
					for i := range order {
						order[i] = i
					}
					slices.SortStableFunc(order, func(a, b int) int {
						switch {
						case l[a] > l[b]:
							return -1
						case l[a] < l[b]:
							return 1
						}
						return 0
					})
					sum := 0.0
					for i, e := range order {
						if !normalize || i < q.top {
							sum += math.Exp(float64(l[e]))
						}
					}
					for i := range q.top {
						want := math.Exp(float64(l[order[i]])) / sum
						if int(ids[r*q.top+i]) != order[i] || math.Abs(float64(ws[r*q.top+i])-want) > 1e-5*max(want, 1e-3) {
							panic(fmt.Errorf("%d experts, row %d rank %d: expert %d weight %g, want %d %g", q.experts, r, i, ids[r*q.top+i], ws[r*q.top+i], order[i], want))
						}
					}
				}
			}
		}
	})
}

func TestMix(t *testing.T) {
	for _, library := range []string{"none", *libraryFlag} {
		withGPU(t, library, func(g *gpu) {
			rng := rand.New(rand.NewPCG(7, 8))
			worst, farthest, diff, ref := 0.0, 0.0, 0.0, 0.0
			for _, q := range []struct {
				h, rank, rows int
				f             Format
				inject, y     bool
			}{
				{128, 32, 70, BF16, true, true},
				{128, 32, 1, E4M3, true, false},
				{256, 64, 600, E4M3, false, true},
				{2560, 320, 130, BF16, true, true},
				{2560, 320, 40, E4M3, true, true},
				{2560, 320, 520, E4M3, true, true},
				{40, 16, 9, BF16, true, true},
			} {
				down, up := g.weights(rng, q.f, q.rank, 4*q.h, false), g.weights(rng, q.f, 4*q.h, q.rank, false)
				norm, normV := activations(rng, 1, 4*q.h, 4*q.h)
				for i := range norm {
					norm[i] = bf16(normV[0][i] / 8)
				}
				site := Site{Hidden: q.h, Rank: q.rank, Eps: 1e-6, Norm: g.Upload(norm), Down: down.m, Up: up.m}
				var injW *weights
				if q.inject {
					injW = g.weights(rng, BF16, 4, 4*q.h, false)
					site.InjectW = injW.m.Data
				}
				xw, x := activations(rng, q.rows, 4*q.h, 4*q.h)
				yw, y := activations(rng, q.rows, q.h, q.h)
				in := make([]float32, 4*q.rows)
				for i := range in {
					in[i] = float32(2 * sigmoid(rng.NormFloat64()))
				}
				xp, inp, mix := g.Upload(xw), g.Upload(in), g.Poisoned(2*q.rows*q.h)
				yp := g.Upload(yw)
				if !q.y {
					yp = 0
				}
				g.Check(g.set.Mix(g.C, g.S, site, xp, yp, inp, q.rows, mix, g.room))
				gotX, gotIn, gotMix := g.Download[uint16](xp, q.rows*4*q.h), g.Download[float32](inp, 4*q.rows), g.Download[uint16](mix, q.rows*q.h)
				name := fmt.Sprintf("%d rank %d rows %d format %d library %v", q.h, q.rank, q.rows, q.f, library != "none")
				rounded := q.f == E4M3 && library != "none" && q.rows >= widenFrom
				var c gputest.Comparison
				for _, r := range some(q.rows, 3) {
					n := make([]float64, 4*q.h)
					for s := range 4 {
						sq := 0.0
						for k := range q.h {
							i := s*q.h + k
							v := x[r][i]
							if q.y {
								v += float64(in[4*r+s]) * y[r][k]
							}
							got := unbf16(gotX[r*4*q.h+i])
							if d := math.Abs(got - v); d > math.Abs(v)/128+1e-38 {
								t.Errorf("%s: stream %g, want %g", name, got, v)
							}
							n[i] = got // the site goes on from the stored stream
							sq += got * got
						}
						f := 1 / math.Sqrt(sq/float64(q.h)+1e-6)
						for k := range q.h {
							i := s*q.h + k
							n[i] *= f * (1 + unbf16(norm[i]))
						}
					}
					mixed := func(store func(float64) float64) []float64 {
						kept := make([]float64, len(n))
						for i := range kept {
							kept[i] = store(n[i])
						}
						low := make([]float64, q.rank)
						for i := range low {
							d, _ := dot(down.row(i, rounded), kept)
							low[i] = store(d / 4 * sigmoid(d/4))
						}
						v := make([]float64, q.h)
						for k := range v {
							for s := range 4 {
								d, _ := dot(up.row(s*q.h+k, false), low)
								v[k] += sigmoid(d) * kept[s*q.h+k] / 4
							}
						}
						return v
					}
					exact := mixed(func(v float64) float64 { return v })
					for k, v := range mixed(func(v float64) float64 { return unbf16(bf16(v)) }) {
						got := unbf16(gotMix[r*q.h+k])
						c.Add("", got, v, 4, 1e9)
						diff += (got - exact[k]) * (got - exact[k])
						ref += exact[k] * exact[k]
					}
					c.End(t, name+" mix", 3e-3)
					farthest = max(farthest, math.Sqrt(diff/ref))
					diff, ref = 0, 0
					if q.inject {
						for i := range 4 {
							d, _ := dot(injW.row(i, false), n)
							if want := 2 * sigmoid(d/4); math.Abs(float64(gotIn[4*r+i])-want) > 1e-4*want {
								t.Errorf("%s: inject %g, want %g", name, gotIn[4*r+i], want)
							}
						}
					} else if gotIn[4*r] != in[4*r] {
						t.Errorf("%s: a mixer wrote injection weights", name)
					}
				}
				worst = max(worst, c.Worst)
			}
			t.Logf("library %v: worst relative L2 of a mix %.2e; against the formula without stored BF16 %.2e", library != "none", worst, farthest)
		})
	}
}
