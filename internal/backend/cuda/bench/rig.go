package main

import (
	"io/fs"
	"os"
	"slices"

	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/kernels"
)

// rig is one device with kernels loaded, a stream and the memory taken so far. Its methods panic with an error (driver.Owner.Try): a
// benchmark has no other way to go on.
type rig struct {
	c      *driver.Context
	set    *kernels.Set
	s      driver.Stream
	from   driver.Event
	to     driver.Event
	taken  []driver.Ptr
	bytes  uint64
	seed   uint32
	replay int // timed replays of a graph
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func newRig(c *driver.Context, code fs.FS) *rig {
	r := &rig{c: c, replay: 11}
	var err error
	r.set, err = kernels.Load(c, code)
	must(err)
	r.s, err = c.NewStream()
	must(err)
	r.from, err = c.NewEvent(true)
	must(err)
	r.to, err = c.NewEvent(true)
	must(err)
	return r
}

func (r *rig) alloc(bytes uint64) driver.Ptr {
	p, err := r.c.Alloc("benchmark", bytes)
	must(err)
	r.taken = append(r.taken, p)
	r.bytes += bytes
	return p
}

// reset frees everything alloc gave out.
func (r *rig) reset() {
	must(r.c.Synchronize())
	for _, p := range r.taken {
		must(r.c.Free(p))
	}
	r.taken, r.bytes = r.taken[:0], 0
}

// kinds of random contents, as yard.cu numbers them.
const (
	fillBF16 = iota
	fillE4M3
	fillBytes
	fillScaleWords
	fillF32
	fillPositiveBF16
	fillPositiveF16
)

func (r *rig) fill(p driver.Ptr, count uint64, kind uint32, scale float32) driver.Ptr {
	r.seed++
	must(r.set.Run(r.c, r.s, kernels.Plan{Kernel: kernels.Fill, Grid: 1024},
		&kernels.FillParams{Dst: p, Count: count, Kind: kind, Seed: r.seed, Scale: scale}, false))
	return p
}

func (r *rig) bf16(n uint64, scale float32) driver.Ptr {
	return r.fill(r.alloc(2*n), n, fillBF16, scale)
}

func launch[P any](r *rig, plan kernels.Plan, p *P) {
	must(r.set.Run(r.c, r.s, plan, p, true))
}

// timing is the in-chain time of one launch in microseconds.
type timing struct{ median, min, max float64 }

// chain captures n calls of f in one graph of dependent launches and times its replays. each is how many units a call counts for.
func (r *rig) chain(n int, f func(i int)) timing {
	for i := range 2 { // direct launches first: a first use inside a capture can fail
		f(i)
	}
	must(r.c.SyncStream(r.s))
	e, _, err := r.c.Capture(r.s, func() error {
		for i := range n {
			f(i)
		}
		return nil
	})
	must(err)
	// two warm-ups at least, and some milliseconds: the first op after a pause is slower
	var t []float64
	warm := 0.0
	for i := 0; len(t) < r.replay; i++ {
		must(r.c.Record(r.from, r.s))
		must(r.c.GraphLaunch(e, r.s))
		must(r.c.Record(r.to, r.s))
		must(r.c.Sync(r.to))
		us, err := r.c.Elapsed(r.from, r.to)
		must(err)
		if i >= 2 && warm > 20e3 {
			t = append(t, us/float64(n))
		}
		warm += us
	}
	must(r.c.DestroyExec(e))
	slices.Sort(t)
	return timing{t[len(t)/2], t[0], t[len(t)-1]}
}

// copies is how many distinct sets of weights a chain needs so that none is still in L2 when its turn comes again.
func (r *rig) copies(bytes uint64) int {
	return max(2, int((max(256<<20, 3*uint64(r.c.Device.L2))+bytes-1)/bytes)+1)
}

func (r *rig) download(p driver.Ptr, bytes int) []byte {
	b := make([]byte, bytes)
	must(r.c.SyncStream(r.s))
	must(r.c.ToHost(r.s, b, p))
	must(r.c.SyncStream(r.s))
	return b
}

func folder(dir string) fs.FS {
	if dir == "" {
		return nil
	}
	return os.DirFS(dir)
}
