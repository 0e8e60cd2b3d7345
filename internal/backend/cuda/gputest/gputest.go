// Package gputest runs tests on a GPU: it finds one or skips with the reason, keeps account of device memory, and compares results with exact
// ones. Tests that import it have the flag -code.
package gputest

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math"
	"os"
	"testing"
	"unsafe"

	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/num"
)

var code = flag.String("code", "", "folder with a subfolder fatbin to test instead of the committed machine code")

// Code is the machine code to test, nil for the committed one.
func Code() fs.FS {
	if *code == "" {
		return nil
	}
	return os.DirFS(*code)
}

// GPU is a device and a stream, for one test.
type GPU struct {
	T testing.TB
	C *driver.Context
	S driver.Stream

	taken []driver.Ptr
}

// On runs f with the first GPU, on the goroutine that owns it, or skips with the reason. That goroutine must not end, so nothing in f may call
// T.Fatal or T.Skip: what stops a test there is a panic with an error, as Check's.
func On(t testing.TB, f func(g *GPU)) {
	t.Helper()
	check := func(err error) {
		t.Helper()
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
	check(err)
	o, err := driver.StartOwner(d, 0)
	check(err)
	defer o.Close()
	check(o.Try(func(c *driver.Context) {
		g := &GPU{T: t, C: c}
		g.S, err = c.NewStream()
		g.Check(err)
		defer func() {
			for _, p := range g.taken {
				_ = c.Free(p)
			}
			_ = c.DestroyStream(g.S)
		}()
		f(g)
	}))
}

// Check ends the test if there is an error.
func (g *GPU) Check(err error) {
	if err != nil {
		panic(err)
	}
}

// Alloc takes device memory until the test ends.
func (g *GPU) Alloc(bytes int) driver.Ptr {
	p, err := g.C.Alloc("test", uint64(bytes))
	g.Check(err)
	g.taken = append(g.taken, p)
	return p
}

// Poisoned is memory full of NaN, so that an element nobody wrote is seen.
func (g *GPU) Poisoned(bytes int) driver.Ptr {
	p := g.Alloc(bytes)
	g.Check(g.C.Set(g.S, p, 0xff, uint64(bytes)))
	return p
}

// Free gives back what Alloc has given out, all but the first keep pieces; a negative keep means only the last -keep pieces.
func (g *GPU) Free(keep int) {
	if keep < 0 {
		keep += len(g.taken)
	}
	for _, p := range g.taken[keep:] {
		g.Check(g.C.Free(p))
	}
	g.taken = g.taken[:keep]
}

func bytesOf[T any](v []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), len(v)*int(unsafe.Sizeof(*new(T))))
}

// Upload puts v in device memory; 0 if it is empty.
func (g *GPU) Upload[T any](v []T) driver.Ptr {
	if len(v) == 0 {
		return 0
	}
	p := g.Alloc(len(bytesOf(v)))
	g.Check(g.C.ToDevice(g.S, p, bytesOf(v)))
	g.Check(g.C.SyncStream(g.S))
	return p
}

// Download waits for the stream and reads n values.
func (g *GPU) Download[T any](p driver.Ptr, n int) []T {
	v := make([]T, n)
	g.Check(g.C.SyncStream(g.S))
	g.Check(g.C.ToHost(g.S, bytesOf(v), p))
	g.Check(g.C.SyncStream(g.S))
	return v
}

// Comparison checks series of results, such as rows, against exact ones: the relative L2 distance of each series, and every element.
type Comparison struct {
	Worst float64 // relative L2 distance so far

	diff, ref, rounding float64
	element             string
}

// Add takes an element, which may be off by so many units of BF16's last place and slack.
func (c *Comparison) Add(what string, got, want, units, slack float64) {
	c.diff += (got - want) * (got - want)
	c.ref += want * want
	r := float64(num.FromBF16(num.ToBF16(float32(want)))) - want
	c.rounding += r * r
	unit := math.Pow(2, math.Floor(math.Log2(math.Max(math.Abs(want), 1e-38)))-7)
	if d := math.Abs(got - want); !(d <= units*unit+slack) && c.element == "" {
		c.element = fmt.Sprintf("%s: %g, want %g", what, got, want)
	}
}

// End ends a series, whose relative L2 distance may be bound. Storing exact results in BF16 alone costs up to 3.9e-3 when a few elements
// dominate a short row, so a bound above 1e-3 is what that rounding costs and a twentieth, if this is more.
func (c *Comparison) End(t testing.TB, what string, bound float64) {
	t.Helper()
	l2 := math.Sqrt(c.diff / math.Max(c.ref, 1e-300))
	if bound > 1e-3 {
		bound = max(bound, 1.05*math.Sqrt(c.rounding/math.Max(c.ref, 1e-300)))
	}
	if !(l2 <= bound) || c.element != "" {
		t.Errorf("%s: relative L2 %.2e, bound %.0e; %s", what, l2, bound, c.element)
	}
	if !(l2 <= c.Worst) {
		c.Worst = l2
	}
	*c = Comparison{Worst: c.Worst}
}
