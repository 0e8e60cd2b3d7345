package cpu

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// task is work that splits into units. do must not depend on which worker runs a unit, nor on the order.
type task interface {
	do(worker, unit int)
}

// pool runs tasks on a fixed number of workers, the caller being worker 0. Between tasks a worker spins for a few microseconds, as
// the next task of a launch is near, and then sleeps until it is woken. It belongs to one goroutine.
type pool struct {
	workers int
	wg      sync.WaitGroup
	wake    []chan struct{}
	asleep  []atomic.Bool
	stop    atomic.Bool

	epoch atomic.Uint32 // counts tasks
	// gate is open | number of workers inside the current task. The caller changes task and units only while nobody is inside.
	gate  atomic.Int32
	next  atomic.Int64
	task  task
	units int
}

const (
	gateOpen = 1 << 24
	spins    = 2000 // about 25 µs
)

func newPool(workers int) *pool {
	p := &pool{workers: max(1, workers)}
	p.wake = make([]chan struct{}, p.workers)
	p.asleep = make([]atomic.Bool, p.workers)
	for w := 1; w < p.workers; w++ {
		p.wake[w] = make(chan struct{}, 1)
		p.wg.Go(func() { p.work(w) })
	}
	return p
}

// run calls t.do for units 0 to n-1 and returns when all are done.
func (p *pool) run(t task, n int) {
	if p.workers == 1 || n <= 1 {
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
		if p.asleep[w].Load() && p.asleep[w].CompareAndSwap(true, false) {
			p.wake[w] <- struct{}{}
		}
	}
	p.take(0)
	p.gate.Add(-gateOpen)
	for i := 0; p.gate.Load() != 0; i++ {
		if i < spins {
			relax()
		} else {
			runtime.Gosched()
		}
	}
	p.task = nil
}

// take takes units until there are none.
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
	seen := uint32(0)
	for {
		for i := 0; p.epoch.Load() == seen; i++ {
			if i < spins {
				relax()
				continue
			}
			p.asleep[w].Store(true)
			// A task that came meanwhile either is seen here or finds this worker asleep.
			if p.epoch.Load() == seen && !p.stop.Load() || !p.asleep[w].CompareAndSwap(true, false) {
				<-p.wake[w]
			}
			if p.stop.Load() {
				return
			}
			i = 0
		}
		seen = p.epoch.Load()
		if p.enter() {
			p.take(w)
			p.gate.Add(-1)
		}
	}
}

// close ends the workers and waits for them.
func (p *pool) close() {
	if p.stop.Swap(true) {
		return
	}
	for w := 1; w < p.workers; w++ {
		if p.asleep[w].CompareAndSwap(true, false) {
			p.wake[w] <- struct{}{}
		}
	}
	p.wg.Wait()
}
