package chunk_test

import (
	"errors"
	"flag"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"testing"
	"unsafe"

	"ninfer/internal/backend/cuda/chunk"
	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/num"
)

var codeFlag = flag.String("code", "", "folder with a subfolder fatbin to test instead of the committed machine code")

// gpu is a device with kernels loaded, for one test.
type gpu struct {
	t   testing.TB
	c   *driver.Context
	set *chunk.Set
	s   driver.Stream

	taken []driver.Ptr // device memory, freed when the test ends
}

// withGPU runs f on the owner's thread, or skips with the reason.
func withGPU(t testing.TB, f func(g *gpu)) {
	t.Helper()
	skip := func(err error) {
		var none *driver.NoDriverError
		var old *driver.OldDriverError
		var missing *driver.NoDeviceError
		var arch *driver.ArchError
		if errors.As(err, &none) || errors.As(err, &old) || errors.As(err, &missing) || errors.As(err, &arch) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	d, err := driver.Open()
	skip(err)
	o, err := driver.StartOwner(d, 0)
	skip(err)
	defer o.Close()
	var code fs.FS
	if *codeFlag != "" {
		code = os.DirFS(*codeFlag)
	}
	skip(o.Do(func(c *driver.Context) (err error) {
		// the owner's goroutine must not end, so nothing in f may call t.Fatal: failures that stop a test are panics with an error
		defer func() {
			switch p := recover().(type) {
			case nil:
			case error:
				err = p
			default:
				panic(p)
			}
		}()
		set, err := chunk.Load(c, code)
		if err != nil {
			return err
		}
		defer func() { _ = set.Unload(c) }()
		s, err := c.NewStream()
		if err != nil {
			return err
		}
		g := &gpu{t: t, c: c, set: set, s: s}
		defer g.free()
		f(g)
		return nil
	}))
}

func (g *gpu) free() {
	for _, p := range g.taken {
		_ = g.c.Free(p)
	}
	g.taken = nil
}

func (g *gpu) check(err error) {
	if err != nil {
		panic(err)
	}
}

func (g *gpu) alloc(n int) driver.Ptr {
	g.t.Helper()
	p, err := g.c.Alloc("test", uint64(n))
	g.check(err)
	g.taken = append(g.taken, p)
	return p
}

func bytesOf[T any](v []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), uintptr(len(v))*unsafe.Sizeof(v[0]))
}

func upload[T any](g *gpu, v []T) driver.Ptr {
	g.t.Helper()
	p := g.alloc(len(bytesOf(v)))
	g.check(g.c.ToDevice(g.s, p, bytesOf(v)))
	g.check(g.c.SyncStream(g.s))
	return p
}

func download[T any](g *gpu, p driver.Ptr, n int) []T {
	g.t.Helper()
	v := make([]T, n)
	g.check(g.c.SyncStream(g.s))
	g.check(g.c.ToHost(g.s, bytesOf(v), p))
	g.check(g.c.SyncStream(g.s))
	return v
}

// poisoned is output memory full of NaN, so that an element nobody wrote is seen.
func (g *gpu) poisoned(n int) driver.Ptr {
	g.t.Helper()
	p := g.alloc(n)
	g.check(g.c.Set(g.s, p, 0xff, uint64(n)))
	return p
}

// time is what a call takes on the GPU, in microseconds: the least of several rounds of some calls.
func (g *gpu) time(rounds, calls int, f func() error) float64 {
	g.t.Helper()
	from, err := g.c.NewEvent(true)
	g.check(err)
	to, err := g.c.NewEvent(true)
	g.check(err)
	g.check(f())
	best := math.Inf(1)
	for range rounds {
		g.check(g.c.Record(from, g.s))
		for range calls {
			g.check(f())
		}
		g.check(g.c.Record(to, g.s))
		g.check(g.c.Sync(to))
		us, err := g.c.Elapsed(from, to)
		g.check(err)
		best = min(best, us/float64(calls))
	}
	g.check(g.c.DestroyEvent(from))
	g.check(g.c.DestroyEvent(to))
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
