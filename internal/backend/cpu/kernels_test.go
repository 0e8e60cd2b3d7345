package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/optest"
	"ninfer/internal/num"
)

func random(r *rand.Rand, n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(r.NormFloat64())
	}
	return v
}

// multiplied runs multiply the way jobs do: rows of weights in pieces, activations packed.
func multiplied(l Level, m *matrix, x []float32, rows int, cuts ...int) []float32 {
	in := &activations{data: make([]float32, rows*m.padded), ld: m.padded, rows: rows}
	pack(m.order(), in.data, m.padded, x, m.k, m.k, rows)
	out := make([]float32, rows*m.n)
	scratch := make([]float32, m.scratchSize())
	for i := range scratch {
		scratch[i] = float32(math.NaN())
	}
	first := 0
	for _, c := range append(cuts, m.n) {
		m.multiply(l, in, out, m.n, first, c, scratch)
		first = c
	}
	return out
}

// relative is the relative L2 distance of got from want.
func relative(got []float32, want []float64) float64 {
	var d, n float64
	for i, w := range want {
		d += (float64(got[i]) - w) * (float64(got[i]) - w)
		n += w * w
	}
	return math.Sqrt(d / n)
}

func eachLevel(t *testing.T, f func(t *testing.T, l Level)) {
	for _, l := range Levels() {
		t.Run(l.String(), func(t *testing.T) { f(t, l) })
	}
}

// Every format, at every level, gives the product of the represented weights to 1e-6, whatever the rows, and the same bits however
// the rows of activations and of weights are grouped.
func TestMultiply(t *testing.T) {
	eachLevel(t, func(t *testing.T, l Level) {
		ks := kernelsOf(l)
		for _, f := range optest.Formats {
			if ks != nil && ks.formats[f] == nil {
				t.Errorf("%v has no kernel", f)
			}
		}
		testMultiply(t, ks, [][2]int{{1, 1}, {3, 7}, {5, 16}, {130, 33}, {37, 320}, {128, 64}, {256, 192}, {9, 2560}})
	})
}

func testMultiply(t *testing.T, ks *kernels, shapes [][2]int) {
	for _, f := range optest.Formats {
		for _, shape := range shapes {
			n, k := shape[0], shape[1]
			if !optest.Fits(f, n, k) {
				continue
			}
			r := rand.New(rand.NewPCG(1, uint64(n*k)))
			w := optest.Weight(r, f, n, k)
			if n > 20 {
				w = w.Rows(2, n-4) // a view that begins and ends inside a quad
			}
			m := newMatrix(w, ks)
			const rows = 7
			x := random(r, rows*k)
			got := multiplied(best(), &m, x, rows)
			want := make([]float64, rows*w.N)
			line := make([]float64, k)
			for i := range w.N {
				w.Decode(line, i)
				for j := range rows {
					for c, v := range line {
						want[j*w.N+i] += v * float64(x[j*k+c])
					}
				}
			}
			if e := relative(got, want); !(e < 1e-6) {
				t.Errorf("%v [%d,%d]: off by %.2g", f, n, k, e)
			}
			for _, c := range []int{1, 2, 3, 4} {
				for j := 0; j+c <= rows; j += c {
					part := multiplied(best(), &m, x[j*k:(j+c)*k], c, w.N/3, w.N/2)
					if !slices.Equal(part, got[j*w.N:(j+c)*w.N]) {
						t.Fatalf("%v [%d,%d]: rows %d..%d differ from the same rows among %d", f, n, k, j, j+c, rows)
					}
				}
			}
		}
	}
}

// compareKernels checks that two sets of kernels give the same bits, in vectors and in tiles.
func compareKernels(t *testing.T, a, b *kernels) {
	for f := range a.formats {
		if f == num.FP8 {
			continue
		}
		r := rand.New(rand.NewPCG(6, uint64(f)))
		w := optest.Weight(r, f, 128, 192)
		x := random(r, 5*192)
		ma, mb := newMatrix(w, a), newMatrix(w, b)
		for _, rows := range []int{1, 2, 5} {
			if !slices.Equal(multiplied(best(), &ma, x, rows), multiplied(best(), &mb, x, rows)) {
				t.Errorf("%v, %d rows: not the same bits", f, rows)
			}
		}
	}
}

// Banks: a range of rows of one expert, unaligned too.
func TestMultiplyBank(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 2))
	bank := backend.Whole(optest.Tensor(r, num.NVFP4, 3, 128, 64))
	x := random(r, 64)
	eachLevel(t, func(t *testing.T, l Level) {
		for _, cut := range [][2]int{{128, 128}, {256, 64}, {100, 60}, {255, 2}, {0, 384}} {
			w := bank.Rows(cut[0], cut[1])
			m := newMatrix(w, kernelsOf(l))
			want := make([]float64, w.N)
			line := make([]float64, 64)
			for i := range want {
				w.Decode(line, i)
				for c, v := range line {
					want[i] += v * float64(x[c])
				}
			}
			if e := relative(multiplied(l, &m, x, 1), want); !(e < 1e-6) {
				t.Errorf("rows %v: off by %.2g", cut, e)
			}
		}
	})
}

// Every code of every format decodes to what package num says.
func TestDecodeCodes(t *testing.T) {
	for _, l := range Levels() {
		if l == Plain {
			continue
		}
		for f, k := range kernelsOf(l).formats {
			if k.decode == nil || f == num.FP8 {
				continue
			}
			r := rand.New(rand.NewPCG(3, uint64(f)))
			w := optest.Weight(r, f, 128, 512)
			m := newMatrix(w, kernelsOf(l))
			got, want := make([]float32, m.padded), make([]float64, 512)
			for n := range w.N {
				run := m.at(n, n+1)
				k.decode(&got[0], ptr(run.codes), ptr(run.high), ptr(run.scales), m.blocks)
				w.Decode(want, n)
				for i, v := range got {
					src := orders[k.order]
					c := i/len(src)*len(src) + int(src[i%len(src)])
					u := float64(v)
					switch f {
					case num.FP8RowBF16:
						u *= fp8Factor * float64(num.FromBF16(uint16(run16(m.scales[2*n:]))))
					case num.FP8RowFP32:
						u = 0 // the codes are those of FP8RowBF16
						want[c] = 0
					case num.NVFP4:
						u /= float64(w.T.Divisor(0))
					}
					if u != want[c] {
						t.Fatalf("%v %v: column %d is %v, want %v", l, f, c, u, want[c])
					}
				}
			}
		}
	}
}

func run16(b []byte) int { return int(b[0]) | int(b[1])<<8 }

// The element-wise operations against float64, over the whole range, at every length.
func TestElementwise(t *testing.T) {
	sigmoid := func(x float64) float64 { return 1 / (1 + math.Exp(-x)) }
	values := []float64{0, 1e-9, -1e-9, .5, -.5, 1, -1, 3, -3, 10, -10, 30, -30, 80, -80, 87, -87, 1e4, -1e4}
	r := rand.New(rand.NewPCG(4, 4))
	for range 2000 {
		values = append(values, r.NormFloat64()*math.Exp(4*r.Float64()))
	}
	n := len(values)
	x, y, z := make([]float32, n), random(r, n), random(r, n)
	for i, v := range values {
		x[i] = float32(v)
	}
	ops := map[string]struct {
		run  func(l Level, dst, x, y []float32)
		want func(d, x, y float64) float64
	}{
		"exp":           {func(l Level, d, x, _ []float32) { l.expShift(d, x, 1.5) }, func(_, x, _ float64) float64 { return math.Exp(x - 1.5) }},
		"sigmoidMul":    {func(l Level, d, x, y []float32) { l.sigmoidMul(d, y, x, .25) }, func(_, x, y float64) float64 { return y * sigmoid(x/4) }},
		"silu":          {func(l Level, d, x, _ []float32) { l.silu(d, x, .25) }, func(_, x, _ float64) float64 { return x / 4 * sigmoid(x/4) }},
		"siluMul":       {func(l Level, d, x, y []float32) { l.siluMul(d, x, y) }, func(_, x, y float64) float64 { return x * sigmoid(x) * y }},
		"sigmoidMulAdd": {func(l Level, d, x, y []float32) { l.sigmoidMulAdd(d, y, x) }, func(d, x, y float64) float64 { return d + y*sigmoid(x) }},
		"mul":           {func(l Level, d, x, y []float32) { l.mul(d, x, y) }, func(_, x, y float64) float64 { return x * y }},
		"mulAdd":        {func(l Level, d, x, y []float32) { l.mulAdd(d, x, y) }, func(d, x, y float64) float64 { return d + x*y }},
		"scale":         {func(l Level, d, x, _ []float32) { l.scale(d, x, 3) }, func(_, x, _ float64) float64 { return 3 * x }},
		"scaleMul":      {func(l Level, d, x, y []float32) { l.scaleMul(d, x, y, 3) }, func(_, x, y float64) float64 { return 3 * x * y }},
		"axpy":          {func(l Level, d, x, _ []float32) { l.axpy(d, x, 3) }, func(d, x, _ float64) float64 { return d + 3*x }},
	}
	eachLevel(t, func(t *testing.T, l Level) {
		for name, op := range ops {
			dst := slices.Clone(z)
			op.run(l, dst, x, y)
			for i := range dst {
				if name == "exp" && (x[i] > 88 || x[i] < -85) {
					continue
				}
				want := op.want(float64(z[i]), float64(x[i]), float64(y[i]))
				scale := math.Abs(want) + math.Abs(float64(z[i]))*1e-1 + 1e-30
				if e := math.Abs(float64(dst[i])-want) / scale; !(e < 2e-6) {
					t.Errorf("%s(%v, %v): %v, want %v", name, x[i], y[i], dst[i], want)
				}
			}
			for _, first := range []int{1, 3, 8} { // another place, another length: the same bits
				for _, n := range []int{1, 7, 9, 100} {
					part := slices.Clone(z[first : first+n])
					op.run(l, part, x[first:], y[first:])
					if !slices.Equal(part, dst[first:first+n]) {
						t.Errorf("%s: elements %d..%d depend on their place", name, first, first+n)
					}
				}
			}
			nan := []float32{float32(math.NaN())}
			op.run(l, nan, nan, nan)
			if nan[0] == nan[0] {
				t.Errorf("%s(NaN) = %v", name, nan[0])
			}
		}
		for _, n := range []int{0, 1, 7, 8, 31, 32, 100, 2560} {
			u, v := random(r, n), random(r, n)
			var want, size float64
			for i := range u {
				want += float64(u[i]) * float64(v[i])
				size += math.Abs(float64(u[i]) * float64(v[i]))
			}
			if got := l.inner(u, v); math.Abs(float64(got)-want) > 1e-6*size {
				t.Errorf("inner of %d: %v, want %v", n, got, want)
			}
		}
	})
}

// The delta rule's kernels against the oracle's step, and folding against writing bit by bit.
func TestDeltaKernels(t *testing.T) {
	eachLevel(t, func(t *testing.T, l Level) {
		for _, dim := range []int{8, 64, 128} {
			r := rand.New(rand.NewPCG(5, uint64(dim)))
			s, q, k, v := random(r, dim*dim), random(r, dim), random(r, dim), random(r, dim)
			const decay, beta = 0.9, 0.7
			wide := func(x []float32) (w []float64) {
				for _, v := range x {
					w = append(w, float64(v))
				}
				return w
			}
			next, out := make([]float64, dim*dim), make([]float64, dim)
			delta(next, wide(s), wide(q), wide(k), wide(v), float64(float32(decay)), float64(float32(beta)), out)

			u, d, o := make([]float32, dim), make([]float32, dim), make([]float32, dim)
			l.deltaRead(u, s, k)
			for j := range d {
				d[j] = beta * (v[j] - decay*u[j])
			}
			folded := slices.Clone(s)
			l.deltaWrite(o, s, k, q, d, decay)
			l.deltaFold(folded, k, d, decay)
			if a, b := relative(s, next), relative(o, out); !(a < 1e-6) || !(b < 1e-6) {
				t.Errorf("dim %d: state off by %.2g, output by %.2g", dim, a, b)
			}
			if !slices.Equal(s, folded) {
				t.Errorf("dim %d: folding differs from writing", dim)
			}
		}
	})
}

func ExampleLevel() {
	fmt.Println(Plain, AVX2, AVX512)
	// Output: plain avx2 avx512
}

// A job counts the stored bytes of its matrices, whole ones and parts of banks, once for all rows of activations.
func TestJobWeighs(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 8))
	for _, f := range optest.Formats {
		dev := &fast{level: best(), kernels: kernelsOf(best()), pool: newPool(1), scratches: make([][]float32, 1)}
		dev.job.f = dev
		w := optest.Weight(r, f, 128, 512)
		m := newMatrix(w, dev.kernels)
		for _, rows := range []int{1, 5, 40} {
			x, out := newOperand(random(r, rows*512), 512, 512, rows), make([]float32, rows*128)
			before := dev.weighed
			dev.job.add(&m, &x, out, 128)
			dev.job.run()
			if got := dev.weighed - before; got != int64(len(w.T.Data))/128*128 {
				t.Errorf("%v with %d rows: %d bytes of %d", f, rows, got, len(w.T.Data))
			}
		}
		dev.pool.close()
	}
}
