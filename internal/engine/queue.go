package engine

import (
	"context"
	"errors"
	"fmt"
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

// Worker runs requests side by side, a unit of work at a time; *Batch is one. Its methods are called by one goroutine, Check apart.
type Worker interface {
	// Check tells why Add would refuse a request.
	Check(Request) error
	// Add hands a request over. onRun is called when it starts to run and onDone once, when it has ended.
	Add(ctx context.Context, id RequestID, req Request, onRun func(), onDone func(Outcome, error)) error
	// Remove ends a request that does not run yet.
	Remove(id RequestID, err error) bool
	// Step does a unit of work and reports whether there was any. An error is the end of the worker.
	Step() (bool, error)
	// Abandon ends all requests after an error.
	Abandon(cause error)
}

// Queue hands requests to a worker in the order in which they were submitted. One goroutine owns the worker.
//
// A request first takes a place, of which there are few; it holds it while it is prepared, while it waits and runs, and until its answer
// is delivered. So a flood is refused at the door and memory stays bounded. Drain must be called in the end.
//
// The watcher of a request is called by the queue's goroutine, between Slot.Submit and the end of its Ticket, and must not block.
type Queue struct {
	worker  Worker
	timeout time.Duration
	done    chan struct{} // the goroutine has ended
	failed  chan struct{} // the worker has failed

	mu       sync.Mutex // above what it guards
	places   int        // free ones
	arrived  []*Ticket  // submitted, not yet with the worker
	gone     []RequestID
	running  int
	waiting  int
	last     RequestID
	draining bool
	failure  error
	wake     chan struct{} // holds a signal if something of this changed
	all      map[*Slot]struct{}
}

// NewQueue starts a queue with so many places. A request that is not admitted within the timeout of taking its place is turned away.
func NewQueue(w Worker, places int, timeout time.Duration) *Queue {
	q := &Queue{
		worker: w, timeout: timeout, places: places, done: make(chan struct{}), failed: make(chan struct{}), wake: make(chan struct{}, 1),
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
	slot  *Slot
	req   Request
	done  chan struct{}
	stop  func() bool // ends the watch on the context
	timer *time.Timer
	id    RequestID
	runs  bool // under the queue's lock, as is ended
	ended bool

	// Written before done is closed.
	outcome Outcome
	err     error
}

// Submit appends a request to the queue. It fails at once if the request can never run.
func (s *Slot) Submit(req Request) (*Ticket, error) {
	if err := s.queue.worker.Check(req); err != nil {
		return nil, err
	}
	t := &Ticket{slot: s, req: req, done: make(chan struct{})}
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
	q.last++
	t.id = q.last
	q.arrived = append(q.arrived, t)
	q.waiting++
	// Both may run at once; they wait for the lock.
	t.stop = context.AfterFunc(s.ctx, func() { q.drop(t, nil) })
	t.timer = time.AfterFunc(left, func() { q.drop(t, ErrPending) })
	q.signal()
	return t, nil
}

// Done is closed when the request has ended. Its watcher is not called after.
func (t *Ticket) Done() <-chan struct{} { return t.done }

// Outcome is how the request ended; call it after Done. The error is ErrPending, ErrDraining or ErrFailed if the queue ended it, a
// *WatcherError if its watcher did, and otherwise the worker's, which is then a failure of the engine. A request whose context ended
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

// drop ends a waiting request. It does nothing once the request runs: the worker watches the context then.
func (q *Queue) drop(t *Ticket, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.runs || t.ended {
		return
	}
	q.finish(t, cancelled(t), err)
	q.gone = append(q.gone, t.id)
	q.signal()
}

// finish ends a request, once. The lock is held.
func (q *Queue) finish(t *Ticket, out Outcome, err error) {
	if t.ended {
		return
	}
	t.ended = true
	if t.runs {
		q.running--
	} else {
		q.waiting--
	}
	t.stop()
	t.timer.Stop()
	if cause := context.Cause(t.slot.ctx); err == nil && out.Reason == Cancelled && errors.Is(cause, ErrDraining) {
		err = cause
	}
	t.outcome, t.err = out, err
	close(t.done)
}

// loop owns the worker.
func (q *Queue) loop() {
	defer close(q.done)
	for {
		arrived, gone, end := q.news()
		for _, id := range gone {
			q.worker.Remove(id, nil)
		}
		for _, t := range arrived {
			q.hand(t)
		}
		busy, err := q.worker.Step()
		if err != nil {
			q.fail(err)
		}
		switch {
		case err != nil || !busy && end:
			if err != nil {
				q.idle()
			}
			return
		case !busy:
			<-q.wake
		}
	}
}

// news takes what changed since the last unit, and says whether nothing can come any more.
func (q *Queue) news() (arrived []*Ticket, gone []RequestID, end bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	arrived, gone = q.arrived, q.gone
	q.arrived, q.gone = nil, nil
	return arrived, gone, q.draining && len(q.all) == 0
}

// hand gives a request to the worker.
func (q *Queue) hand(t *Ticket) {
	q.mu.Lock()
	ended := t.ended
	q.mu.Unlock()
	if ended {
		return
	}
	req := t.req
	if w := req.Watcher; w != nil {
		req.Watcher = watched{t, w}
	}
	if f := req.Progress; f != nil {
		req.Progress = func(done int) {
			if t.runs {
				f(done)
			}
		}
	}
	err := q.worker.Add(t.slot.ctx, t.id, req, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if !t.ended {
			t.runs = true
			q.waiting--
			q.running++
			t.timer.Stop()
		}
	}, func(out Outcome, err error) {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.finish(t, out, err)
	})
	if err != nil {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.finish(t, cancelled(t), err)
	}
}

// watched is a ticket's watcher while the ticket runs. A ticket may be dropped between the worker's last look at what is gone and its
// start; the worker then runs a request that nobody waits for, and must not reach its watcher. Only the queue's goroutine writes runs.
type watched struct {
	t *Ticket
	w Watcher
}

func (w watched) Preview(ids []int32) Verdict {
	if !w.t.runs {
		return Verdict{Reason: Cancelled}
	}
	return w.w.Preview(ids)
}

func (w watched) Commit(ids []int32) error {
	if !w.t.runs {
		return context.Canceled
	}
	return w.w.Commit(ids)
}

// idle waits until all places are given back after a failure.
func (q *Queue) idle() {
	for {
		q.mu.Lock()
		end := q.draining && len(q.all) == 0
		q.mu.Unlock()
		if end {
			return
		}
		<-q.wake
	}
}

// cancelled is the outcome of a request that never ran.
func cancelled(t *Ticket) Outcome {
	return Outcome{Reason: Cancelled, Stats: Stats{PromptTokens: len(t.req.Prompt)}}
}

// fail ends everything: what ran has the worker's error, what waited ErrFailed.
func (q *Queue) fail(err error) {
	q.mu.Lock()
	q.failure = err
	close(q.failed)
	arrived := q.arrived
	q.arrived = nil
	for _, t := range arrived {
		q.finish(t, cancelled(t), ErrFailed)
	}
	q.mu.Unlock()
	q.worker.Abandon(err)
}

// Failed is closed when the worker has failed; Failure is then why.
func (q *Queue) Failed() <-chan struct{} { return q.failed }

// Failure is the worker's error, or nil.
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
	return Load{Running: q.running, Waiting: q.waiting, Places: len(q.all)}
}

// Stop refuses new requests from now on; those that have a place go on.
func (q *Queue) Stop() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.draining = true
	q.signal()
}

// Drain refuses new requests and waits until all have ended and given their places back. When the context ends it cancels those that
// are left, with ErrDraining, and waits for them. The worker is free after it.
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
