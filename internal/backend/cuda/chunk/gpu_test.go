package chunk_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"ninfer/internal/backend/cuda/chunk"
	"ninfer/internal/backend/cuda/gputest"
	"ninfer/internal/num"
)

// gpu is a device with kernels loaded, for one test.
type gpu struct {
	*gputest.GPU
	set *chunk.Set
}

// withGPU runs f on the owner's thread, or skips with the reason.
func withGPU(t testing.TB, f func(g *gpu)) {
	t.Helper()
	gputest.On(t, func(g *gputest.GPU) {
		set, err := chunk.Load(g.C, gputest.Code())
		g.Check(err)
		defer func() { _ = set.Unload(g.C) }()
		f(&gpu{g, set})
	})
}

// time is what a call takes on the GPU, in microseconds: the least of several rounds of some calls.
func (g *gpu) time(rounds, calls int, f func() error) float64 {
	from, err := g.C.NewEvent(true)
	g.Check(err)
	to, err := g.C.NewEvent(true)
	g.Check(err)
	g.Check(f())
	best := math.Inf(1)
	for range rounds {
		g.Check(g.C.Record(from, g.S))
		for range calls {
			g.Check(f())
		}
		g.Check(g.C.Record(to, g.S))
		g.Check(g.C.Sync(to))
		us, err := g.C.Elapsed(from, to)
		g.Check(err)
		best = min(best, us/float64(calls))
	}
	g.Check(g.C.DestroyEvent(from))
	g.Check(g.C.DestroyEvent(to))
	return best
}

// words are values rounded to BF16, and what they are then.
func words(v []float64) ([]uint16, []float64) {
	w, x := make([]uint16, len(v)), make([]float64, len(v))
	for i := range v {
		w[i] = num.ToBF16(float32(v[i]))
		x[i] = float64(num.FromBF16(w[i]))
	}
	return w, x
}

func normal(r *rand.Rand, n int, size float64) []float64 {
	v := make([]float64, n)
	for i := range v {
		v[i] = r.NormFloat64() * size
	}
	return v
}

func floats(v []float64) []float32 {
	f := make([]float32, len(v))
	for i := range v {
		f[i] = float32(v[i])
	}
	return f
}

// asFloat32 makes values exact in FP32.
func asFloat32(v []float64) []float64 {
	for i := range v {
		v[i] = float64(float32(v[i]))
	}
	return v
}

// distance is the relative L2 distance of got from want.
func distance(got, want []float64) float64 {
	var d, n float64
	for i := range want {
		d += (got[i] - want[i]) * (got[i] - want[i])
		n += want[i] * want[i]
	}
	if d == 0 {
		return 0
	}
	return math.Sqrt(d / n)
}

func fromWords(w []uint16) []float64 {
	v := make([]float64, len(w))
	for i := range w {
		v[i] = float64(num.FromBF16(w[i]))
	}
	return v
}

func fromFloats(w []float32) []float64 {
	v := make([]float64, len(w))
	for i := range w {
		v[i] = float64(w[i])
	}
	return v
}

func sigmoid(x float64) float64 { return 1 / (1 + math.Exp(-x)) }
func silu(x float64) float64    { return x * sigmoid(x) }
