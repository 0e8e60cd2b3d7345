package kernels

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/gputest"
	"ninfer/internal/num"
)

var maxRows = flag.Int("rows", MaxRows, "test at most so many activation rows")

// gpu is a device with kernels loaded, for one test.
type gpu struct {
	*gputest.GPU
	set *Set
}

// withGPU runs f on the owner's thread, or skips with the reason.
func withGPU(t *testing.T, f func(g *gpu)) {
	t.Helper()
	gputest.On(t, func(g *gputest.GPU) {
		set, err := Load(g.C, gputest.Code())
		g.Check(err)
		defer func() { _ = set.Unload(g.C) }()
		f(&gpu{g, set})
	})
}

func run[P any](g *gpu, plan Plan, p *P, pdl bool) {
	g.Check(g.set.Run(g.C, g.S, plan, p, pdl))
}

func bf16(x float64) uint16   { return num.ToBF16(float32(x)) }
func unbf16(w uint16) float64 { return float64(num.FromBF16(w)) }
func e4m3(c uint8) float64    { return float64(num.FromE4M3(c)) }

// matrix is a random stored matrix with float64 access.
type matrix struct {
	f        Format
	rows, k  int
	codes    []byte
	scale    []byte
	scaleF32 bool
	decoded  map[int][]float64
}

func randomMatrix(rng *rand.Rand, f Format, rows, k int, scaleF32 bool) *matrix {
	m := &matrix{f: f, rows: rows, k: k, scaleF32: scaleF32}
	norm := 1 / math.Sqrt(float64(k))
	switch f {
	case FormatBF16:
		m.codes = make([]byte, 2*rows*k)
		for i := range rows * k {
			v := rng.NormFloat64() * norm
			if i%1009 == 0 {
				v = 0
			}
			binary.LittleEndian.PutUint16(m.codes[2*i:], bf16(v))
		}
	case FormatE4M3:
		m.codes = make([]byte, rows*k)
		for i := range m.codes {
			c := uint8(rng.Uint32()) // subnormal codes included
			if c&0x7f == 0x7f {
				c--
			}
			m.codes[i] = c
		}
		for r := range rows {
			s := norm / 100 * (0.5 + rng.Float64())
			if r%5 == 1 {
				s = 1e-30 // a row of the smallest kind
			}
			if scaleF32 {
				m.scale = binary.LittleEndian.AppendUint32(m.scale, math.Float32bits(float32(s)))
			} else {
				m.scale = binary.LittleEndian.AppendUint16(m.scale, bf16(s))
			}
		}
	case FormatQ4:
		kp := (k + 127) / 128 * 128
		m.codes = make([]byte, rows*kp/2)
		for i := range m.codes {
			m.codes[i] = byte(rng.Uint32())
		}
		for range rows * kp / 64 {
			m.scale = binary.LittleEndian.AppendUint16(m.scale, uint16(0x1000+rng.IntN(0x1400))) // subnormal to 2^-6
		}
	}
	return m
}

func (m *matrix) at(r, k int) float64 {
	switch m.f {
	case FormatBF16:
		return unbf16(binary.LittleEndian.Uint16(m.codes[2*(r*m.k+k):]))
	case FormatE4M3:
		s := 0.0
		if m.scaleF32 {
			s = float64(math.Float32frombits(binary.LittleEndian.Uint32(m.scale[4*r:])))
		} else {
			s = unbf16(binary.LittleEndian.Uint16(m.scale[2*r:]))
		}
		return s * e4m3(m.codes[r*m.k+k])
	}
	kp := (m.k + 127) / 128 * 128
	c := m.codes[(r*kp+k)/2] >> (4 * (k & 1)) & 15
	return float64(int(c^8)-8) * float64(num.FromF16(binary.LittleEndian.Uint16(m.scale[2*(r*kp/64+k/64):])))
}

func (m *matrix) part(g *gpu, out driver.Ptr, outLd int, flags uint32) Part {
	if m.scaleF32 {
		flags |= PartScaleF32
	}
	words := slices.Concat(m.scale, make([]byte, -len(m.scale)&3)) // kernels read them by words
	return Part{W: g.Upload(m.codes), Scale: g.Upload(words), Out: out, Rows: uint32(m.rows), OutLd: uint32(outLd), Flags: flags}
}

// dot is the exact product of a row with x and the sum of magnitudes.
func (m *matrix) dot(r int, x []float64) (sum, abs float64) {
	row := m.decoded[r]
	if row == nil {
		row = make([]float64, m.k)
		for k := range row {
			row[k] = m.at(r, k)
		}
		if m.decoded == nil {
			m.decoded = map[int][]float64{}
		}
		m.decoded[r] = row
	}
	for k, v := range x {
		p := row[k] * v
		sum += p
		abs += math.Abs(p)
	}
	return sum, abs
}

// activations are r rows of k BF16 numbers with an outlier channel and some zeros.
func activations(rng *rand.Rand, r, k int) (words []uint16, values [][]float64) {
	for i := range r {
		row := make([]float64, k)
		for j := range row {
			v := rng.NormFloat64()
			switch {
			case j == k/3:
				v *= 300
			case j%17 == 3:
				v = 0
			}
			w := bf16(v * math.Pow(2, float64(-4*(i%3))))
			words = append(words, w)
			row[j] = unbf16(w)
		}
		values = append(values, row)
	}
	return words, values
}

// every is the rows a large matrix is checked at: both ends and every step-th.
func every(n, step int) []int {
	var list []int
	for i := range n {
		if i < 20 || i >= n-20 || i%step == 0 {
			list = append(list, i)
		}
	}
	return list
}

func TestGemv(t *testing.T) {
	withGPU(t, func(g *gpu) {
		rng := rand.New(rand.NewPCG(1, 2))
		type shape struct {
			name  string
			rows  []int
			plain []int
			k     int
			step  int
		}
		shapes := []shape{
			{"gdn_in", []int{10240, 6144}, []int{48, 48}, 2560, 97},
			{"gdn_out", []int{2560}, nil, 6144, 31},
			{"qsa_in", []int{12288, 512, 512}, []int{640}, 2560, 97},
			{"uneven runs", []int{9000}, nil, 2496, 97}, // long enough for two blocks of ten warps on an SM
			{"short runs", []int{24000}, nil, 1024, 97},
			{"micro", []int{384, 128}, []int{3, 3}, 128, 1},
			{"odd", []int{1, 17, 301}, []int{5}, 192, 1},
			{"tiny", []int{7}, nil, 64, 1},
			{"q4", []int{1000, 33}, nil, 1024, 3},
		}
		for _, sh := range shapes {
			for _, f := range []Format{FormatBF16, FormatE4M3, FormatQ4} {
				if !f.Streams(uint32(sh.k)) {
					continue
				}
				plain := sh.plain
				if f == FormatQ4 {
					plain = nil
				}
				for _, scaleF32 := range []bool{false, true} {
					if scaleF32 && f != FormatE4M3 {
						continue
					}
					var ms []*matrix
					var parts []Part
					var outs []driver.Ptr
					first := len(sh.rows)
					if f == FormatBF16 {
						first += len(plain)
					}
					for i, n := range append(append([]int{}, sh.rows...), plain...) {
						ff, flags, size := f, uint32(0), 2
						if i >= len(sh.rows) {
							ff = FormatBF16
						}
						if i == len(sh.rows)-1 {
							flags, size = PartOutF32, 4
						}
						m := randomMatrix(rng, ff, n, sh.k, scaleF32 && ff == FormatE4M3)
						out := g.Poisoned(size * n * MaxRows)
						ms, outs, parts = append(ms, m), append(outs, out), append(parts, m.part(g, out, n, flags))
					}
					for r := 1; r <= *maxRows; r++ {
						if sh.step > 1 && r != 1 && r != 3 && r != 8 {
							continue
						}
						words, x := activations(rng, r, sh.k)
						for i := range outs {
							g.Check(g.C.Set(g.S, outs[i], 0xff, uint64(2*parts[i].Rows*MaxRows)))
						}
						plan, p, err := g.set.Limits.Gemv(f, uint32(r), uint32(sh.k), parts, first, Tuning{})
						g.Check(err)
						p.X, p.XLd = g.Upload(words), uint32(sh.k)
						run(g, plan, &p, true)
						for i, m := range ms {
							f32 := parts[i].Flags&PartOutF32 != 0
							var got []float64
							if f32 {
								for _, v := range g.Download[float32](outs[i], m.rows*r) {
									got = append(got, float64(v))
								}
							} else {
								for _, v := range g.Download[uint16](outs[i], m.rows*r) {
									got = append(got, unbf16(v))
								}
							}
							for a := range r {
								var c gputest.Comparison
								for _, row := range every(m.rows, sh.step) {
									want, abs := m.dot(row, x[a])
									c.Add(fmt.Sprintf("row %d", row), got[a*m.rows+row], want, map[bool]float64{true: 0.02, false: 1}[f32], 1e-5*abs)
								}
								bound := 3e-3
								if f32 {
									bound = 1e-4
								}
								c.End(t, fmt.Sprintf("%s format %d scale32 %v part %d R %d row %d", sh.name, f, scaleF32, i, r, a), bound)
							}
						}
						// the naive kernel agrees too
						if sh.step == 1 && r == 3 {
							m, out := ms[0], g.Poisoned(4*ms[0].rows*r)
							run(g, Plan{Kernel: GemvNaive, Grid: uint32(m.rows+7) / 8}, &NaiveParams{
								X: p.X, W: parts[0].W, Scale: parts[0].Scale, Out: out, R: uint32(r), XLd: p.XLd, K: uint32(sh.k), Rows: uint32(m.rows),
								OutLd: uint32(m.rows), Format: uint32(f), Flags: parts[0].Flags | PartOutF32,
							}, true)
							var c gputest.Comparison
							for i, v := range g.Download[float32](out, m.rows*r) {
								want, abs := m.dot(i%m.rows, x[i/m.rows])
								c.Add("naive", float64(v), want, 0.02, 1e-5*abs)
							}
							c.End(t, sh.name+" naive", 1e-4)
						}
					}
				}
			}
		}
	})
}

// Ties at BF16 go to the lowest id, ids past the valid ones never win, and the blocks' results merge.
func TestArgmax(t *testing.T) {
	withGPU(t, func(g *gpu) {
		argmax(t, g, FormatQ4, 512, Tuning{})
		for _, v := range []Variant{Auto, Ten, Deep} {
			argmax(t, g, FormatBF16, 128, Tuning{Variant: v})
		}
	})
}

func argmax(t *testing.T, g *gpu, f Format, k int, tuning Tuning) {
	t.Helper()
	const n, valid = 5000, 4990
	rng := rand.New(rand.NewPCG(3, 4))
	m := randomMatrix(rng, f, n, k, false)
	row := func(dst, src int) {
		for _, b := range [][]byte{m.codes, m.scale} {
			w := len(b) / n
			copy(b[dst*w:(dst+1)*w], b[src*w:(src+1)*w])
		}
	}
	words, x := activations(rng, MaxRows, k)
	// the winner of x[0] is copied to two later rows: the lowest must win; a row like x[1] itself stands beyond the valid ids
	best := 0
	top := math.Inf(-1)
	for i := range valid {
		if v, _ := m.dot(i, x[0]); v > top {
			best, top = i, v
		}
	}
	row(4321, best)
	row(123, best)
	for j := range k {
		if f == FormatBF16 {
			binary.LittleEndian.PutUint16(m.codes[2*(valid*k+j):], bf16(x[1][j]))
			continue
		}
		code := byte(7)
		if x[1][j] < 0 {
			code = 9 // -7
		}
		at := &m.codes[(valid*k+j)/2]
		*at = *at&^(15<<(4*(j&1))) | code<<(4*(j&1))
		binary.LittleEndian.PutUint16(m.scale[2*(valid*k+j)/64&^1:], 0x3c00)
	}
	m.decoded = nil
	for r := 1; r <= *maxRows; r++ {
		logits := g.Poisoned(4 * n * r)
		plan, p, err := g.set.Limits.Gemv(f, uint32(r), uint32(k), []Part{m.part(g, logits, n, 0)}, 1, tuning)
		g.Check(err)
		bests, out := g.Poisoned(8*r*int(plan.Grid)), g.Poisoned(4*r)
		p.X, p.XLd, p.Best, p.ValidRows = g.Upload(words), uint32(k), bests, valid
		run(g, plan, &p, true)
		run(g, Plan{Kernel: BestMerge, Grid: uint32(r)}, &BestParams{Best: bests, Out: out, N: plan.Grid, R: uint32(r)}, true)
		ids, got := g.Download[uint32](out, r), g.Download[uint16](logits, n*r)
		for a := range r {
			want, top := 0, math.Inf(-1)
			for i := range valid {
				if v := unbf16(got[a*n+i]); v > top {
					want, top = i, v
				}
			}
			if int(ids[a]) != want {
				t.Errorf("format %d, R %d row %d: id %d, want %d (logit %g)", f, r, a, ids[a], want, top)
			}
			if exact, abs := m.dot(want, x[a]); math.Abs(top-exact) > math.Abs(exact)/128+1e-5*abs {
				t.Errorf("format %d, R %d row %d: logit %g, want %g", f, r, a, top, exact)
			}
		}
		if want := min(best, 123); int(ids[0]) != want {
			t.Errorf("format %d, R %d: tie went to %d, want %d", f, r, ids[0], want)
		}
	}
}

func sigmoid(x float64) float64 { return 1 / (1 + math.Exp(-x)) }

func TestHyperConnection(t *testing.T) {
	withGPU(t, func(g *gpu) {
		rng := rand.New(rand.NewPCG(5, 6))
		for _, sh := range []struct{ h, low int }{{2560, 320}, {128, 64}, {128, 32}, {192, 64}, {1472, 80}} {
			for _, variant := range []int{0, 1, 2} { // BF16, FP8 with BF16 scales, FP8 with FP32 scales
				f := FormatBF16
				if variant > 0 {
					f = FormatE4M3
				}
				if f.rowBytes(uint32(sh.low))%64 != 0 {
					continue
				}
				h, low := sh.h, sh.low
				down := randomMatrix(rng, f, low, 4*h, variant == 2)
				up := randomMatrix(rng, f, 4*h, low, variant == 2)
				injW := randomMatrix(rng, FormatBF16, 4, 4*h, false)
				norm := make([]uint16, 4*h)
				for i := range norm {
					norm[i] = bf16(0.3 * rng.NormFloat64())
				}
				dDown, dUp := down.part(g, 0, 0, 0), up.part(g, 0, 0, 0)
				dInj, dNorm := g.Upload(injW.codes), g.Upload(norm)
				for r := 1; r <= *maxRows; r++ {
					for _, site := range []struct{ pending, injects bool }{{true, true}, {false, true}, {true, false}} {
						pending, injects := site.pending, site.injects
						if h == 2560 && (r > 3 && r != 8 || !pending) {
							continue
						}
						xw, x := activations(rng, 4*r, h)
						yw, y := activations(rng, r, h)
						inject := make([]float32, 4*r)
						for i := range inject {
							inject[i] = rng.Float32() * 2
						}
						xOut, partial, square := g.Poisoned(2*4*h*r), g.Poisoned(4*HyperParts*(low+4)*r), g.Poisoned(4*HyperParts*r)
						mix, injOut := g.Poisoned(2*h*r), g.Poisoned(16*r)
						plan, p, err := g.set.Limits.HcDown(f == FormatE4M3, uint32(r), uint32(h), uint32(low))
						g.Check(err)
						p.X, p.Norm, p.Down, p.DownScale, p.InjW = g.Upload(xw), dNorm, dDown.W, dDown.Scale, dInj
						p.XOut, p.Partial, p.Square = xOut, partial, square
						if pending {
							p.Y, p.Inject = g.Upload(yw), g.Upload(inject)
						}
						if !injects {
							p.InjW = 0
						}
						uPlan, u, err := g.set.Limits.HcUp(f == FormatE4M3, uint32(r), uint32(h), uint32(low))
						g.Check(err)
						u.X, u.Norm, u.Partial, u.Square, u.Up, u.UpScale, u.Mix, u.Inject = xOut, dNorm, partial, square, dUp.W, dUp.Scale, mix, injOut
						if variant == 2 {
							p.ScaleF32, u.ScaleF32 = 1, 1
						}
						if !injects {
							u.Inject = 0
						}
						run(g, plan, &p, true)
						run(g, uPlan, &u, true)
						gotX, gotMix, gotInj := g.Download[uint16](xOut, 4*h*r), g.Download[uint16](mix, h*r), g.Download[float32](injOut, 4*r)
						what := fmt.Sprintf("H %d rank %d variant %d R %d %+v", h, low, variant, r, site)
						for a := range r {
							// exact streams, then everything else from the streams as stored
							n := make([]float64, 4*h)
							for s := range 4 {
								sum := 0.0
								for c := range h {
									want := x[4*a+s][c]
									if pending {
										want += float64(inject[4*a+s]) * y[a][c]
									}
									got := unbf16(gotX[(4*a+s)*h+c])
									ulp := math.Pow(2, math.Floor(math.Log2(math.Max(math.Abs(want), 1e-38)))-7)
									if !(math.Abs(got-want) <= ulp) {
										panic(fmt.Errorf("%s: stream %d channel %d: %g, want %g", what, s, c, got, want))
									}
									sum += got * got
									n[s*h+c] = got * (1 + unbf16(norm[s*h+c]))
								}
								f := 1 / math.Sqrt(sum/float64(h)+1e-6)
								for c := range h {
									n[s*h+c] *= f
								}
							}
							lowv := make([]float64, low)
							for i := range low {
								d, _ := down.dot(i, n)
								lowv[i] = d / 4 * sigmoid(d/4)
							}
							var c gputest.Comparison
							for _, j := range every(h, 7) {
								want := 0.0
								for s := range 4 {
									m, _ := up.dot(s*h+j, lowv)
									want += sigmoid(m) * n[s*h+j] / 4
								}
								c.Add(fmt.Sprintf("mix %d", j), unbf16(gotMix[a*h+j]), want, 2, 1e-4)
							}
							c.End(t, what+" mix", 3e-3)
							if !injects {
								continue
							}
							for i := range 4 {
								d, _ := injW.dot(i, n)
								c.Add(fmt.Sprintf("inject %d", i), float64(gotInj[4*a+i]), 2*sigmoid(d/4), 0.05, 1e-5)
							}
							c.End(t, what+" inject", 1e-4)
						}
					}
				}
			}
		}
	})
}

// hc_down's sums of streams whose values are of very different size, from row to row and within one, and of those that the norm takes away, against
// the magnitudes that are added up: E4M3 weights have operands in FP16 behind a power of two, where 2^-11 of each may be lost.
func TestHyperScales(t *testing.T) {
	withGPU(t, func(g *gpu) {
		rng := rand.New(rand.NewPCG(15, 16))
		const h, low = 2560, 320
		for _, f := range []Format{FormatBF16, FormatE4M3} {
			down, injW := randomMatrix(rng, f, low, 4*h, false), randomMatrix(rng, FormatBF16, 4, 4*h, false)
			norm := make([]uint16, 4*h)
			for i := range norm {
				norm[i] = bf16(0.5 * rng.NormFloat64())
				if i%h < 256 && i >= h { // a warp's share of three streams
					norm[i] = bf16([]float64{-1, 200, -1 + 1.0/128}[i/h-1])
				}
			}
			dDown, dInj, dNorm := down.part(g, 0, 0, 0), g.Upload(injW.codes), g.Upload(norm)
			for _, r := range []int{1, 2, 3, 8} {
				xw, x := activations(rng, 4*r, h)
				for a, row := range x {
					scale := []float64{1, 1e-12, 1e12, 0, 1e-30}[a%5]
					for c := range row {
						v := row[c] * scale
						if c%512 == a {
							v *= 3e4
						}
						xw[a*h+c] = bf16(v)
						row[c] = unbf16(xw[a*h+c])
					}
				}
				xOut, partial, square := g.Poisoned(2*4*h*r), g.Poisoned(4*HyperParts*(low+4)*r), g.Poisoned(4*HyperParts*r)
				plan, p, err := g.set.Limits.HcDown(f == FormatE4M3, uint32(r), h, low)
				g.Check(err)
				p.X, p.Norm, p.Down, p.DownScale, p.InjW = g.Upload(xw), dNorm, dDown.W, dDown.Scale, dInj
				p.XOut, p.Partial, p.Square = xOut, partial, square
				run(g, plan, &p, true)
				parts := int(plan.Grid/(p.Groups+1)) / 4 // of a stream
				gotX, got, gotSquare := g.Download[uint16](xOut, 4*h*r), g.Download[float32](partial, 4*parts*(low+4)*r), g.Download[float32](square, 4*parts*r)
				total := func(list []float32, first, step int) (sum float64) {
					for i := range parts {
						sum += float64(list[first+i*step])
					}
					return sum
				}
				for a, row := range x {
					s, squares := a%4, 0.0
					n := make([]float64, 4*h)
					for c, v := range row {
						squares += v * v
						n[s*h+c] = v * (1 + unbf16(norm[s*h+c]))
					}
					if !slices.Equal(gotX[a*h:(a+1)*h], xw[a*h:(a+1)*h]) {
						t.Errorf("format %d R %d: stream %d is changed where nothing is injected", f, r, a)
					}
					if v := total(gotSquare, parts*a, 1); math.Abs(v-squares) > 1e-5*squares+1e-38 {
						t.Errorf("format %d R %d: squares of stream %d: %g, want %g", f, r, a, v, squares)
					}
					for i := range low + 4 {
						m, j := down, i
						if i >= low {
							m, j = injW, i-low
						}
						want, magnitude := m.dot(j, n)
						if v := total(got, parts*a*(low+4)+i, low+4); !(math.Abs(v-want) <= 5e-4*magnitude+1e-38) {
							t.Fatalf("format %d R %d: sum %d of stream %d: %g, want %g of %g", f, r, i, a, v, want, magnitude)
						}
					}
				}
			}
		}
	})
}

// More memory than there is: a typed error with what was asked for and what there is, and the device goes on.
func TestTooLittleMemory(t *testing.T) {
	withGPU(t, func(g *gpu) {
		_, total, err := g.C.MemInfo()
		g.Check(err)
		_, err = g.C.Alloc("weights", total+1)
		var e *driver.MemoryError
		if !errors.As(err, &e) || e.Need != total+1 || e.Total != total || e.Free > total {
			t.Errorf("got %v", err)
		}
		t.Log(err)
		var taken []driver.Ptr // until it is full
		for len(taken) < 1000 {
			p, err := g.C.Alloc("weights", 1<<30)
			if err != nil {
				if !errors.As(err, &e) {
					t.Errorf("got %v", err)
				}
				t.Log(err)
				break
			}
			taken = append(taken, p)
		}
		for _, p := range taken {
			g.Check(g.C.Free(p))
		}
		if got := g.Download[uint32](g.Upload([]uint32{7}), 1); got[0] != 7 {
			t.Errorf("after a failed allocation: %v", got)
		}
	})
}

// bank is a random NVFP4 expert bank in artifact layout (docs/format.md 3.5).
type bank struct {
	e, n, k int
	bytes   []byte
	scaleAt int
	divisor []float32
}

func randomBank(rng *rand.Rand, e, n, k int) *bank {
	b := &bank{e: e, n: n, k: k, scaleAt: (e*n*k/2 + 255) / 256 * 256}
	b.bytes = make([]byte, b.scaleAt+e*n*k/16)
	for i := range e * n * k / 2 {
		b.bytes[i] = byte(rng.Uint32())
	}
	for i := range e * n * k / 16 {
		c := byte(0x28 + rng.IntN(0x20))
		switch rng.IntN(20) {
		case 0:
			c = byte(rng.IntN(8)) // zero and subnormal scales
		case 1:
			c = 0x7e
		}
		b.bytes[b.scaleAt+i] = c
	}
	for range e {
		b.divisor = append(b.divisor, float32(math.Sqrt(float64(k))*20*(0.5+rng.Float64())))
	}
	return b
}

func (b *bank) dot(e, row int, x []float64) (sum float64) {
	for k, v := range x {
		c := b.bytes[(e*b.n+row)*b.k/2+k/2] >> (4 * (k & 1)) & 15
		g := k / 16
		swz := (row/128*(b.k/64)+g/4)*512 + row%32*16 + row%128/32*4 + g%4
		sum += float64(num.FromE2M1(c)) * e4m3(b.bytes[b.scaleAt+e*b.n*b.k/16+swz]) * v
	}
	return sum / float64(b.divisor[e])
}

func (b *bank) pack(g *gpu, paired bool) driver.Ptr {
	raw := g.Upload(b.bytes)
	out := g.Poisoned(b.e * b.n * b.k * 9 / 16)
	p := &RepackParams{Codes: raw, Scales: raw + driver.Ptr(b.scaleAt), Bank: out, N: uint32(b.n), K: uint32(b.k), Count: uint32(b.e)}
	if paired {
		p.Paired = 1
	}
	run(g, Repack(p.N, p.K, p.Count), p, false)
	return out
}

func TestExperts(t *testing.T) {
	withGPU(t, func(g *gpu) {
		rng := rand.New(rand.NewPCG(7, 8))
		type shape struct{ h, inner, experts, topk, maxR int }
		shapes := []shape{{2560, 640, 24, 10, 8}, {128, 128, 8, 2, 8}, {256, 128, 37, 5, 8}, {128, 128, 512, 16, 8}}
		if testing.Short() { // under a sanitizer
			shapes = []shape{{256, 128, 37, 5, 8}, {128, 128, 37, 16, 8}}
		}
		for _, sh := range shapes {
			upB, downB := randomBank(rng, sh.experts, 2*sh.inner, sh.h), randomBank(rng, sh.experts, sh.h, sh.inner)
			if sh.inner%128 != 0 || sh.h%128 != 0 {
				panic("bad shape")
			}
			dUp, dDown := upB.pack(g, true), downB.pack(g, false)
			dUpDiv, dDownDiv := g.Upload(upB.divisor), g.Upload(downB.divisor)
			sharedDown := randomMatrix(rng, FormatBF16, sh.h, sh.inner, false)
			dShared := g.Upload(sharedDown.codes)
			for variant := range 3 {
				f := FormatBF16
				if variant > 0 {
					f = FormatE4M3
				}
				router := randomMatrix(rng, f, sh.experts, sh.h, variant == 2)
				gate, up := randomMatrix(rng, f, sh.inner, sh.h, variant == 2), randomMatrix(rng, f, sh.inner, sh.h, variant == 2)
				shared := randomMatrix(rng, FormatBF16, 1, sh.h, false)
				pr, pg, pu, ps := router.part(g, 0, 0, 0), gate.part(g, 0, 0, 0), up.part(g, 0, 0, 0), shared.part(g, 0, 0, 0)
				for r := 1; r <= min(sh.maxR, *maxRows); r++ {
					if (sh.h == 2560 || testing.Short()) && r != 1 && r != 2 && r != 5 && r != 8 {
						continue
					}
					words, x := activations(rng, r, sh.h)
					dx := g.Upload(words)
					logits, hs, sl := g.Poisoned(4*r*sh.experts), g.Poisoned(2*r*sh.inner), g.Poisoned(4*r)
					hid, out, distinct, so := g.Poisoned(2*r*sh.topk*sh.inner), g.Poisoned(2*r*sh.h), g.Poisoned(4), g.Poisoned(4*r*sh.h)
					rPlan, rp, err := g.set.Limits.Router(f == FormatE4M3, uint32(r), uint32(sh.h), uint32(sh.experts), uint32(sh.inner))
					g.Check(err)
					rp.X, rp.Router, rp.RouterScale, rp.Gate, rp.GateScale, rp.Up, rp.UpScale = dx, pr.W, pr.Scale, pg.W, pg.Scale, pu.W, pu.Scale
					rp.Shared, rp.Logits, rp.Hidden, rp.SharedLogit = ps.W, logits, hs, sl
					if variant == 2 {
						rp.ScaleF32 = 1
					}
					uPlan, upp, err := g.set.Limits.ExpertUp(uint32(r), uint32(sh.h), uint32(sh.experts), uint32(sh.topk), uint32(sh.inner), Tuning{})
					g.Check(err)
					upp.X, upp.Logits, upp.Bank, upp.Divisor, upp.Hidden = dx, logits, dUp, dUpDiv, hid
					upp.SharedW, upp.SharedHidden, upp.SharedLogit, upp.SharedOut = dShared, hs, sl, so
					dPlan, dp, err := g.set.Limits.ExpertDown(uint32(r), uint32(sh.h), uint32(sh.experts), uint32(sh.topk), uint32(sh.inner), true)
					g.Check(err)
					dp.Logits, dp.Hidden, dp.Bank, dp.Divisor, dp.SharedW, dp.SharedHidden, dp.SharedLogit = logits, hid, dDown, dDownDiv, dShared, hs, sl
					dp.SharedOut, dp.Out, dp.Distinct = so, out, distinct
					dp.Early = uint32(r % (sh.topk + 1)) // with none, some, all experts' weights before the wait
					run(g, rPlan, &rp, true)
					run(g, uPlan, &upp, true)
					run(g, dPlan, &dp, true)
					what := fmt.Sprintf("H %d I %d E %d top %d variant %d R %d", sh.h, sh.inner, sh.experts, sh.topk, variant, r)
					gotL, gotHs, gotSl := g.Download[float32](logits, r*sh.experts), g.Download[uint16](hs, r*sh.inner), g.Download[float32](sl, r)
					gotH, gotOut := g.Download[uint16](hid, r*sh.topk*sh.inner), g.Download[uint16](out, r*sh.h)
					chosen := map[int]bool{}
					for a := range r {
						var c gputest.Comparison
						for e := range sh.experts {
							want, abs := router.dot(e, x[a])
							c.Add(fmt.Sprintf("logit %d", e), float64(gotL[a*sh.experts+e]), want, 0.02, 1e-5*abs)
						}
						want, abs := shared.dot(0, x[a])
						c.Add("shared logit", float64(gotSl[a]), want, 0.02, 1e-5*abs)
						c.End(t, what+" router", 1e-4)
						sharedV := make([]float64, sh.inner)
						for i := range sh.inner {
							u, _ := gate.dot(i, x[a])
							v, _ := up.dot(i, x[a])
							sharedV[i] = unbf16(gotHs[a*sh.inner+i])
							c.Add(fmt.Sprintf("shared hidden %d", i), sharedV[i], u*sigmoid(u)*v, 2, 1e-2)
						}
						c.End(t, what+" shared hidden", 3e-3)
						// routing from the logits as stored: rank order, ties to the lower id
						ids, ws := topOf(gotL[a*sh.experts:(a+1)*sh.experts], sh.topk)
						var routed [][]float64
						for j, e := range ids {
							chosen[e] = true
							hv := make([]float64, sh.inner)
							for i := range sh.inner {
								hv[i] = unbf16(gotH[(a*sh.topk+j)*sh.inner+i])
							}
							routed = append(routed, hv)
							for _, i := range every(sh.inner, 7) {
								u, v := upB.dot(e, i, x[a]), upB.dot(e, sh.inner+i, x[a])
								c.Add(fmt.Sprintf("expert %d hidden %d", e, i), hv[i], u*sigmoid(u)*v, 2, 1e-2)
							}
						}
						c.End(t, what+" hidden", 3e-3)
						for _, i := range every(sh.h, 13) {
							s, _ := sharedDown.dot(i, sharedV)
							v := sigmoid(float64(gotSl[a])) * s
							for j, e := range ids {
								v += ws[j] * downB.dot(e, i, routed[j])
							}
							c.Add(fmt.Sprintf("out %d", i), unbf16(gotOut[a*sh.h+i]), v, 2, 0.1)
						}
						c.End(t, what+" out", 3e-3)
					}
					if d := g.Download[uint32](distinct, 1)[0]; int(d) != len(chosen) {
						t.Errorf("%s: %d distinct experts, want %d", what, d, len(chosen))
					}
				}
			}
		}
	})
}

// A row has the same bits whatever rows are beside it.
func TestRowsAlone(t *testing.T) {
	withGPU(t, func(g *gpu) {
		rng := rand.New(rand.NewPCG(21, 22))
		for _, sh := range []struct{ h, low, inner, experts, topk int }{{2560, 320, 640, 16, 10}, {256, 64, 128, 37, 5}} {
			for variant := range 2 {
				f := []Format{FormatBF16, FormatE4M3}[variant]
				const rows = MaxRows
				h, low, inner, experts, topk := sh.h, sh.low, sh.inner, sh.experts, sh.topk
				xw, _ := activations(rng, 4*rows, h)
				yw, _ := activations(rng, rows, h)
				x, y := g.Upload(xw), g.Upload(yw)
				inject := make([]float32, 4*rows)
				for i := range inject {
					inject[i] = rng.Float32()
				}
				inj, norm := g.Upload(inject), g.Upload(make([]uint16, 4*h))
				down, up := randomMatrix(rng, f, low, 4*h, false).part(g, 0, 0, 0), randomMatrix(rng, f, 4*h, low, false).part(g, 0, 0, 0)
				injW := randomMatrix(rng, FormatBF16, 4, 4*h, false).part(g, 0, 0, 0)
				router, gate, upW := randomMatrix(rng, f, experts, h, false).part(g, 0, 0, 0), randomMatrix(rng, f, inner, h, false).part(g, 0, 0, 0), randomMatrix(rng, f, inner, h, false).part(g, 0, 0, 0)
				vector, sharedDown := randomMatrix(rng, FormatBF16, 1, h, false).part(g, 0, 0, 0), randomMatrix(rng, FormatBF16, h, inner, false).part(g, 0, 0, 0)
				upB, downB := randomBank(rng, experts, 2*inner, h), randomBank(rng, experts, h, inner)
				dUp, dDown, upDiv, downDiv := upB.pack(g, true), downB.pack(g, false), g.Upload(upB.divisor), g.Upload(downB.divisor)
				upLimits, downLimits := g.set.Limits, g.set.Limits
				distinct := g.Poisoned(4)
				// run1 gives everything that rows [first, first + r) leave behind
				run1 := func(first, r int) (mix, out []uint16, injOut, logits []float32) {
					R, H, L, E, K, I := uint32(r), uint32(h), uint32(low), uint32(experts), uint32(topk), uint32(inner)
					at := driver.Ptr(first)
					xOut, partial, square := g.Poisoned(8*h*r), g.Poisoned(4*HyperParts*(low+4)*r), g.Poisoned(4*HyperParts*r)
					mixP, injP, outP := g.Poisoned(2*h*r), g.Poisoned(16*r), g.Poisoned(2*h*r)
					plan, p, err := g.set.Limits.HcDown(f == FormatE4M3, R, H, L)
					g.Check(err)
					p.X, p.Y, p.Inject, p.Norm, p.Down, p.DownScale, p.InjW = x+at*driver.Ptr(8*h), y+at*driver.Ptr(2*h), inj+at*16, norm, down.W, down.Scale, injW.W
					p.XOut, p.Partial, p.Square = xOut, partial, square
					run(g, plan, &p, true)
					uPlan, u, err := g.set.Limits.HcUp(f == FormatE4M3, R, H, L)
					g.Check(err)
					u.X, u.Norm, u.Partial, u.Square, u.Up, u.UpScale, u.Mix, u.Inject = xOut, norm, partial, square, up.W, up.Scale, mixP, injP
					run(g, uPlan, &u, true)
					lg, hs, sl, hid, so := g.Poisoned(4*r*experts), g.Poisoned(2*r*inner), g.Poisoned(4*r), g.Poisoned(2*r*topk*inner), g.Poisoned(4*r*h)
					rPlan, rp, err := g.set.Limits.Router(f == FormatE4M3, R, H, E, I)
					g.Check(err)
					rp.X, rp.Router, rp.RouterScale, rp.Gate, rp.GateScale, rp.Up, rp.UpScale = mixP, router.W, router.Scale, gate.W, gate.Scale, upW.W, upW.Scale
					rp.Shared, rp.Logits, rp.Hidden, rp.SharedLogit = vector.W, lg, hs, sl
					run(g, rPlan, &rp, true)
					ePlan, ep, err := upLimits.ExpertUp(R, H, E, K, I, Tuning{})
					g.Check(err)
					ep.X, ep.Logits, ep.Bank, ep.Divisor, ep.Hidden = mixP, lg, dUp, upDiv, hid
					ep.SharedW, ep.SharedHidden, ep.SharedLogit, ep.SharedOut = sharedDown.W, hs, sl, so
					run(g, ePlan, &ep, true)
					dPlan, dp, err := downLimits.ExpertDown(R, H, E, K, I, true)
					g.Check(err)
					dp.Logits, dp.Hidden, dp.Bank, dp.Divisor, dp.SharedW, dp.SharedHidden, dp.SharedLogit = lg, hid, dDown, downDiv, sharedDown.W, hs, sl
					dp.SharedOut, dp.Out, dp.Distinct = so, outP, distinct
					run(g, dPlan, &dp, true)
					return g.Download[uint16](mixP, h*r), g.Download[uint16](outP, h*r), g.Download[float32](injP, 4*r), g.Download[float32](lg, experts*r)
				}
				mix, out, injOut, logits := run1(0, rows)
				for _, r := range []int{1, 2, 3, 5} {
					for first := 0; first+r <= rows; first += 3 {
						m, o, i, l := run1(first, r)
						if !slices.Equal(m, mix[first*h:(first+r)*h]) || !slices.Equal(o, out[first*h:(first+r)*h]) || !slices.Equal(i, injOut[4*first:4*(first+r)]) ||
							!slices.Equal(l, logits[first*experts:(first+r)*experts]) {
							t.Errorf("H %d format %d: rows %d to %d of %d have other bits than among %d", h, f, first, first+r, rows, rows)
						}
					}
				}
				// where shared memory is short, less is on its way
				run1(0, rows)
				counted := g.Download[uint32](distinct, 1)[0]
				for {
					upLimits.SharedPerBlock -= 1 << 10
					if _, _, err := upLimits.ExpertUp(rows, uint32(h), uint32(experts), uint32(topk), uint32(inner), Tuning{}); err != nil {
						upLimits.SharedPerBlock += 1 << 10
						break
					}
				}
				for {
					downLimits.SharedPerBlock -= 1 << 10
					if _, _, err := downLimits.ExpertDown(rows, uint32(h), uint32(experts), uint32(topk), uint32(inner), true); err != nil {
						downLimits.SharedPerBlock += 1 << 10
						break
					}
				}
				m, o, i, l := run1(0, rows)
				if !slices.Equal(m, mix) || !slices.Equal(o, out) || !slices.Equal(i, injOut) || !slices.Equal(l, logits) {
					t.Errorf("H %d format %d: other bits with little shared memory", h, f)
				}
				if d := g.Download[uint32](distinct, 1)[0]; d != counted {
					t.Errorf("H %d format %d: %d distinct experts, %d with little shared memory", h, f, counted, d)
				}
			}
		}
	})
}

// The same of the streaming kernels, whose blocks are of other kinds for many rows than for few.
func TestStreamedRowsAlone(t *testing.T) {
	withGPU(t, func(g *gpu) {
		rng := rand.New(rand.NewPCG(23, 24))
		for _, sh := range []struct{ rows, k int }{{16384, 2560}, {24000, 1024}, {2560, 6144}, {129, 256}} {
			for _, f := range []Format{FormatBF16, FormatE4M3, FormatQ4} {
				if !f.Streams(uint32(sh.k)) {
					continue
				}
				w, plain := randomMatrix(rng, f, sh.rows, sh.k, false).part(g, 0, 0, 0), randomMatrix(rng, FormatBF16, 48, sh.k, false).part(g, 0, 0, 0)
				words, _ := activations(rng, MaxRows, sh.k)
				x := g.Upload(words)
				product := func(first, r int) []float32 {
					out := g.Poisoned(4 * (sh.rows + 48) * r)
					parts := []Part{w, plain}
					if f == FormatQ4 { // no BF16 beside it
						parts[1] = w
						parts[1].Rows = 48
					}
					for i := range parts {
						parts[i].Out, parts[i].OutLd, parts[i].Flags = out+driver.Ptr(4*i*sh.rows), uint32(sh.rows+48), parts[i].Flags|PartOutF32
					}
					from := 2
					if f == FormatE4M3 {
						from = 1
					}
					plan, p, err := g.set.Limits.Gemv(f, uint32(r), uint32(sh.k), parts, from, Tuning{})
					g.Check(err)
					p.X, p.XLd = x+driver.Ptr(2*first*sh.k), uint32(sh.k)
					run(g, plan, &p, true)
					return g.Download[float32](out, (sh.rows+48)*r)
				}
				all := product(0, MaxRows)
				for r := 1; r < MaxRows; r++ {
					first, width := MaxRows-r, sh.rows+48
					if !slices.Equal(product(first, r), all[first*width:]) {
						t.Errorf("%d rows of %d, format %d: %d rows of activations have other bits than among %d", sh.rows, sh.k, f, r, MaxRows)
					}
				}
			}
		}
	})
}

// topOf is the k largest logits, the lower id first on ties, and their soft-max weights.
func topOf(l []float32, k int) (ids []int, w []float64) {
	used := map[int]bool{}
	for range k {
		best := -1
		for i, v := range l {
			if !used[i] && (best < 0 || v > l[best]) {
				best = i
			}
		}
		used[best] = true
		ids = append(ids, best)
	}
	sum := 0.0
	for _, i := range ids {
		w = append(w, math.Exp(float64(l[i])-float64(l[ids[0]])))
		sum += w[len(w)-1]
	}
	for i := range w {
		w[i] /= sum
	}
	return ids, w
}

// Equal logits: the lowest ids win, in order, whether few or many are equal.
func TestRoutingTies(t *testing.T) {
	withGPU(t, func(g *gpu) {
		const h, inner = 128, 128
		rng := rand.New(rand.NewPCG(9, 10))
		b := randomBank(rng, 512, 2*inner, h)
		packed, div := b.pack(g, true), g.Upload(b.divisor)
		shared := randomMatrix(rng, FormatBF16, h, inner, false).part(g, 0, 0, 0)
		for _, c := range []struct{ e, topk, values int }{{64, 4, 0}, {64, 4, 3}, {512, 10, 40}, {512, 10, 300}, {512, 10, 5000}, {512, 16, 2}, {512, 16, 500}, {100, 10, 30}, {37, 1, 4}} {
			for _, r := range []int{1, 3, 8} {
				logits := make([]float32, r*c.e)
				for a := range r {
					if c.values == 0 {
						logits[a*c.e+40], logits[a*c.e+13], logits[a*c.e+50] = 1, 1, 2
						continue
					}
					for i := range c.e { // zeros of both signs are equal
						logits[a*c.e+i] = float32(math.Copysign(float64(rng.IntN(c.values)), rng.Float64()-0.3))
					}
				}
				words, x := activations(rng, r, h)
				hid := g.Poisoned(2 * r * c.topk * inner)
				plan, p, err := g.set.Limits.ExpertUp(uint32(r), h, uint32(c.e), uint32(c.topk), inner, Tuning{})
				g.Check(err)
				p.X, p.Logits, p.Bank, p.Divisor, p.Hidden = g.Upload(words), g.Upload(logits), packed, div, hid
				p.SharedW, p.SharedHidden, p.SharedLogit, p.SharedOut = shared.W, g.Upload(words), g.Upload(logits), g.Poisoned(4*r*h)
				run(g, plan, &p, false)
				got := g.Download[uint16](hid, r*c.topk*inner)
				for a := range r {
					ids, _ := topOf(logits[a*c.e:(a+1)*c.e], c.topk)
					for j, want := range ids {
						u, v := b.dot(want, 5, x[a]), b.dot(want, inner+5, x[a])
						if w := u * sigmoid(u) * v; math.Abs(unbf16(got[(a*c.topk+j)*inner+5])-w) > 1e-2*math.Abs(w)+1e-3 {
							t.Errorf("%+v: row %d of %d: rank %d is not expert %d", c, a, r, j, want)
						}
					}
				}
			}
		}
	})
}
