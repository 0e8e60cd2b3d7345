package cpu

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// task is work that splits into units. do must not depend on which worker runs a unit, nor on the order.
type task interface {
	do(worker, unit int)
}

// pool runs tasks on a fixed number of workers, the caller being worker 0. Between tasks a worker spins for a few microseconds, as
// the next task of a launch is near, and then sleeps until it is woken. It belongs to one goroutine.
//
// Where other programs want the processors too, a worker's thread may lose its own in the middle of a unit, and everybody waits for
// it. Such a worker rests for a while: the others are faster without it.
type pool struct {
	workers int
	wg      sync.WaitGroup
	helpers []helper // of them, 1 to workers-1
	stop    atomic.Bool

	epoch atomic.Uint32 // counts tasks
	// gate is gateOpen while units may be left, plus the number of helpers inside the task. The caller changes task and units only
	// while nobody is inside.
	gate  atomic.Int32
	next  atomic.Int64
	task  task
	units int

	resting int // helpers that rest
	until   time.Time
}

// helper is a worker that is a goroutine of its own.
type helper struct {
	wake   chan struct{}
	asleep atomic.Bool
	rests  atomic.Bool
	inside atomic.Bool
	_      [64]byte // another cache line for the next one
}

const (
	gateOpen = 1 << 24
	spins    = 2000 // about 25 µs
	restMost = time.Second / 2
)

func newPool(workers int) *pool {
	p := &pool{workers: max(1, workers)}
	p.helpers = make([]helper, p.workers)
	for w := 1; w < p.workers; w++ {
		p.helpers[w].wake = make(chan struct{}, 1)
		p.wg.Go(func() { p.work(w) })
	}
	return p
}

// run calls t.do for units 0 to n-1 and returns when all are done.
func (p *pool) run(t task, n int) {
	if p.resting > 0 && time.Now().After(p.until) {
		for w := range p.helpers {
			p.helpers[w].rests.Store(false)
		}
		p.resting = 0
	}
	if p.workers-p.resting == 1 || n <= 1 {
		for u := range n {
			t.do(0, u)
		}
		return
	}
	p.task, p.units = t, n
	p.next.Store(0)
	p.gate.Store(gateOpen)
	p.epoch.Add(1)
	// No more helpers are woken than there are units for.
	for w := 1; w < p.workers && w < n; w++ {
		h := &p.helpers[w]
		if !h.rests.Load() && h.asleep.Load() && h.asleep.CompareAndSwap(true, false) {
			h.wake <- struct{}{}
		}
	}
	p.take(0)
	p.gate.Add(-gateOpen)
	p.await()
	p.task = nil
}

// await waits until no helper is inside.
func (p *pool) await() {
	for i := 0; p.gate.Load() != 0; i++ {
		if i < spins {
			relax()
		} else if i < spins+100 {
			runtime.Gosched()
		} else {
			p.stalled()
			return
		}
	}
}

// stalled waits for helpers that seem to have lost their processors, and sends them to rest for twenty times as long.
func (p *pool) stalled() {
	begin := time.Now()
	late := 0
	for w := 1; w < p.workers; w++ {
		if h := &p.helpers[w]; h.inside.Load() && !h.rests.Swap(true) {
			late++
		}
	}
	for p.gate.Load() != 0 {
		time.Sleep(50 * time.Microsecond)
	}
	if late > 0 {
		p.resting += late
		p.until = time.Now().Add(min(restMost, 20*time.Since(begin)))
	}
}

// take does units until there are none.
func (p *pool) take(worker int) {
	for {
		u := int(p.next.Add(1)) - 1
		if u >= p.units {
			return
		}
		p.task.do(worker, u)
	}
}

// enter joins the current task unless it is closed.
func (p *pool) enter() bool {
	for {
		g := p.gate.Load()
		if g&gateOpen == 0 {
			return false
		}
		if p.gate.CompareAndSwap(g, g+1) {
			return true
		}
	}
}

func (p *pool) work(w int) {
	h := &p.helpers[w]
	seen := uint32(0)
	for {
		for i := 0; p.epoch.Load() == seen || h.rests.Load(); i++ {
			if i < spins && !h.rests.Load() {
				relax()
				continue
			}
			h.asleep.Store(true)
			// A task that came meanwhile either is seen here or finds this helper asleep.
			if (p.epoch.Load() == seen || h.rests.Load()) && !p.stop.Load() || !h.asleep.CompareAndSwap(true, false) {
				<-h.wake
			}
			if p.stop.Load() {
				return
			}
			i = 0
		}
		seen = p.epoch.Load()
		if p.enter() {
			h.inside.Store(true)
			p.take(w)
			h.inside.Store(false)
			p.gate.Add(-1)
		}
	}
}

// close ends the helpers and waits for them.
func (p *pool) close() {
	if p.stop.Swap(true) {
		return
	}
	for w := 1; w < p.workers; w++ {
		if h := &p.helpers[w]; h.asleep.CompareAndSwap(true, false) {
			h.wake <- struct{}{}
		}
	}
	p.wg.Wait()
}
