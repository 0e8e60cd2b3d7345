package driver

import (
	"errors"
	"runtime"
	"sync"
	"time"
)

// Owner is the one goroutine that owns a GPU. It locks its OS thread, makes the device's primary context current and runs the functions
// given to Do, one after another.
type Owner struct {
	work chan job
	done chan struct{}
	once sync.Once
	ctx  *Context
	idle func()
}

type job struct {
	f    func(*Context) error
	done chan outcome
}

type outcome struct {
	err      error
	panicked any
}

// run calls f and always answers: a panic is handed to the caller of Do, so that it surfaces where the work was asked for.
func (j job) run(c *Context) {
	o := outcome{err: ErrClosed} // stays if f ends the goroutine
	defer func() {
		o.panicked = recover()
		j.done <- o
	}()
	o.err = j.f(c)
}

// ErrClosed is returned by Do after Close.
var ErrClosed = errors.New("cuda: the device has been closed")

// StartOwner takes GPU number ordinal. The goroutine runs until Close.
func StartOwner(d *Driver, ordinal int) (*Owner, error) {
	o := &Owner{work: make(chan job, 1), done: make(chan struct{})} // room for one: who brings it need not be woken twice
	ready := make(chan error)
	go func() {
		defer close(o.done)
		runtime.LockOSThread() // never unlocked: the thread dies with the goroutine, and the context binding with it
		ctx, err := newContext(d, ordinal)
		o.ctx = ctx
		ready <- err
		if err != nil {
			return
		}
		for {
			j, ok := o.next()
			if !ok {
				break
			}
			j.run(ctx)
		}
		ctx.release()
	}()
	if err := <-ready; err != nil {
		<-o.done
		return nil, err
	}
	return o, nil
}

// awake is how long the owner looks for work before it sleeps: waking a thread takes tens of microseconds, as long as many kernels.
const awake = 10 * time.Millisecond

// next is the next job. Shortly after a job it looks for one without sleeping, since steps follow each other, if that takes no processor from
// those who would bring it.
func (o *Owner) next() (j job, ok bool) {
	for end := time.Now().Add(awake); runtime.GOMAXPROCS(0) > 2 && time.Now().Before(end); {
		for range 64 {
			select {
			case j, ok = <-o.work:
				return j, ok
			default:
			}
		}
	}
	if o.idle != nil {
		o.idle()
	}
	j, ok = <-o.work
	return j, ok
}

// Idle makes the owner call f whenever it goes to sleep.
func (o *Owner) Idle(f func()) {
	_ = o.Do(func(*Context) error { o.idle = f; return nil })
}

// Device is the GPU owned.
func (o *Owner) Device() Device { return o.ctx.Device }

// answers are channels that jobs are answered on, one answer a job: empty again when Do is over.
var answers = sync.Pool{New: func() any { return make(chan outcome, 1) }}

// Do runs f on the owning goroutine and waits for it. f must not call Do.
func (o *Owner) Do(f func(*Context) error) error {
	j := job{f: f, done: answers.Get().(chan outcome)}
	if !o.send(j) {
		return ErrClosed
	}
	r := <-j.done
	answers.Put(j.done)
	if r.panicked != nil {
		panic(r.panicked)
	}
	return r.err
}

// Try is Do for tests and benchmarks: f ends with a panic whose value is an error where it cannot go on.
func (o *Owner) Try(f func(*Context)) error {
	return o.Do(func(c *Context) (err error) {
		defer func() {
			switch p := recover().(type) {
			case nil:
			case error:
				err = p
			default:
				panic(p)
			}
		}()
		f(c)
		return nil
	})
}

// send says whether the job was taken; a send on the closed channel means that Close came first.
func (o *Owner) send(j job) (ok bool) {
	defer func() { ok = recover() == nil }()
	o.work <- j
	return
}

// Close waits for running work, releases the context and ends the goroutine.
func (o *Owner) Close() {
	o.once.Do(func() { close(o.work) })
	<-o.done
}
