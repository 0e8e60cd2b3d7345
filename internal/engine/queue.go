package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// The ways a queue turns a request away.
var (
	ErrOverloaded = errors.New("all places are taken")
	ErrPending    = errors.New("the request waited too long")
	ErrDraining   = errors.New("shutting down")
	ErrFailed     = errors.New("the engine has failed")
)

// Generator runs one request at a time; *Lane is one.
type Generator interface {
	Check(Request) error
	Generate(context.Context, Request) (Outcome, error)
}

// Queue runs requests on a generator one after another, in the order in which they were submitted. One goroutine owns the generator.
//
// A request first takes a place, of which there are few; it holds it while it is prepared, while it waits and runs, and until its answer
// is delivered. So a flood is refused at the door and memory stays bounded. Drain must be called in the end.
//
// The watcher of a request is called by the queue's goroutine, between Slot.Submit and the end of its Ticket, and must not block.
type Queue struct {
	gen     Generator
	timeout time.Duration
	done    chan struct{} // the goroutine has ended
	failed  chan struct{} // the generator has failed

	mu       sync.Mutex // above what it guards
	places   int        // free ones
	waiting  []*Ticket
	running  *Ticket
	draining bool
	failure  error
	wake     chan struct{} // holds a signal if waiting or draining changed
	all      map[*Slot]struct{}
}

// NewQueue starts a queue with so many places. A request that is not admitted within the timeout of taking its place is turned away.
func NewQueue(gen Generator, places int, timeout time.Duration) *Queue {
	q := &Queue{
		gen: gen, timeout: timeout, places: places, done: make(chan struct{}), failed: make(chan struct{}), wake: make(chan struct{}, 1),
		all: map[*Slot]struct{}{},
	}
	go q.loop()
	return q
}

// Slot is a place in the queue.
type Slot struct {
	queue    *Queue
	deadline time.Time
	ctx      context.Context
	cancel   context.CancelCauseFunc
}

// Reserve takes a place at once or fails with ErrOverloaded, ErrDraining or ErrFailed. The context is the request's: when it ends, so
// does the request, in whatever state. Release the slot in the end.
func (q *Queue) Reserve(ctx context.Context) (*Slot, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.failure != nil:
		return nil, ErrFailed
	case q.draining:
		return nil, ErrDraining
	case q.places == 0:
		return nil, ErrOverloaded
	}
	q.places--
	s := &Slot{queue: q, deadline: time.Now().Add(q.timeout)}
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	q.all[s] = struct{}{}
	return s, nil
}

// Context ends with the request's, and when the queue gives up on it. Preparation should watch it.
func (s *Slot) Context() context.Context { return s.ctx }

// Release gives the place back, ending its request if that still waits or runs. It may be called more than once.
func (s *Slot) Release() {
	s.cancel(context.Canceled)
	q := s.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	if _, ok := q.all[s]; !ok {
		return
	}
	delete(q.all, s)
	q.places++
	if q.draining {
		q.signal()
	}
}

// Ticket is a submitted request.
type Ticket struct {
	slot     *Slot
	req      Request
	admitted chan struct{}
	done     chan struct{}
	stop     func() bool // ends the watch on the context
	timer    *time.Timer

	// Written before done is closed.
	outcome Outcome
	err     error
}

// Submit appends a request to the queue. It fails at once if the request can never run.
func (s *Slot) Submit(req Request) (*Ticket, error) {
	if err := s.queue.gen.Check(req); err != nil {
		return nil, err
	}
	t := &Ticket{slot: s, req: req, admitted: make(chan struct{}), done: make(chan struct{})}
	q := s.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.failure != nil {
		return nil, ErrFailed
	}
	left := time.Until(s.deadline)
	if left <= 0 {
		return nil, ErrPending
	}
	q.waiting = append(q.waiting, t)
	// Both may run at once; they wait for the lock.
	t.stop = context.AfterFunc(s.ctx, func() { q.drop(t, nil) })
	t.timer = time.AfterFunc(left, func() { q.drop(t, ErrPending) })
	q.signal()
	return t, nil
}

// Admitted is closed when the request starts to run; never if it is turned away before.
func (t *Ticket) Admitted() <-chan struct{} { return t.admitted }

// Done is closed when the request has ended. Its watcher is not called after.
func (t *Ticket) Done() <-chan struct{} { return t.done }

// Outcome is how the request ended; call it after Done. The error is ErrPending, ErrDraining or ErrFailed if the queue ended it, a
// *WatcherError if its watcher did, and otherwise the generator's, which is then a failure of the engine. A request whose context ended
// has the reason Cancelled and no error.
func (t *Ticket) Outcome() (Outcome, error) {
	<-t.done
	return t.outcome, t.err
}

// signal wakes the goroutine. The lock is held.
func (q *Queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// drop takes a waiting request out. It does nothing once the request runs.
func (q *Queue) drop(t *Ticket, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if i := slices.Index(q.waiting, t); i >= 0 {
		q.waiting = slices.Delete(q.waiting, i, i+1)
		q.finish(t, cancelled(t), err)
	}
}

// finish ends a request that is in no list any more. The lock is held.
func (q *Queue) finish(t *Ticket, out Outcome, err error) {
	t.stop()
	t.timer.Stop()
	if cause := context.Cause(t.slot.ctx); err == nil && out.Reason == Cancelled && errors.Is(cause, ErrDraining) {
		err = cause
	}
	t.outcome, t.err = out, err
	close(t.done)
}

// loop owns the generator.
func (q *Queue) loop() {
	defer close(q.done)
	for {
		t, end := q.next()
		if end {
			return
		}
		if t == nil {
			<-q.wake
			continue
		}
		out, err := q.gen.Generate(t.slot.ctx, t.req)
		q.mu.Lock()
		q.running = nil
		var own *WatcherError
		if err != nil && !errors.As(err, &own) {
			q.fail(err)
		}
		q.finish(t, out, err)
		q.mu.Unlock()
	}
}

// next admits the first waiting request, or says that there will be none.
func (q *Queue) next() (t *Ticket, end bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.waiting) > 0 {
		t = q.waiting[0]
		q.waiting = slices.Delete(q.waiting, 0, 1)
		if t.slot.ctx.Err() != nil { // its watch has not come round yet
			q.finish(t, cancelled(t), nil)
			continue
		}
		q.running = t
		t.timer.Stop()
		close(t.admitted)
		return t, false
	}
	return nil, q.draining && len(q.all) == 0
}

// cancelled is the outcome of a request that never ran.
func cancelled(t *Ticket) Outcome {
	return Outcome{Reason: Cancelled, Stats: Stats{PromptTokens: len(t.req.Prompt)}}
}

// fail ends everything that waits. The lock is held.
func (q *Queue) fail(err error) {
	q.failure = err
	close(q.failed)
	for _, t := range q.waiting {
		q.finish(t, cancelled(t), ErrFailed)
	}
	q.waiting = nil
}

// Failed is closed when the generator has failed; Failure is then why.
func (q *Queue) Failed() <-chan struct{} { return q.failed }

// Failure is the generator's error, or nil.
func (q *Queue) Failure() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.failure
}

// Load is what a queue is doing.
type Load struct {
	Running, Waiting int
	Places           int // taken ones: running, waiting, being prepared, being delivered
}

// Load tells what the queue is doing.
func (q *Queue) Load() Load {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := Load{Waiting: len(q.waiting), Places: len(q.all)}
	if q.running != nil {
		l.Running = 1
	}
	return l
}

// Stop refuses new requests from now on; those that have a place go on.
func (q *Queue) Stop() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.draining = true
	q.signal()
}

// Drain refuses new requests and waits until all have ended and given their places back. When the context ends it cancels those that
// are left, with ErrDraining, and waits for them. The generator is free after it.
func (q *Queue) Drain(ctx context.Context) {
	q.Stop()
	select {
	case <-q.done:
		return
	case <-ctx.Done():
	}
	q.mu.Lock()
	for s := range q.all {
		s.cancel(fmt.Errorf("%w: the time to finish is over", ErrDraining))
	}
	q.mu.Unlock()
	<-q.done
}
