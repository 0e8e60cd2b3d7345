package engine_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"ninfer/internal/engine"
	"ninfer/internal/model/modeltest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// counter is a generator whose i-th token is the prompt's first one plus i. A token takes a while.
type counter struct {
	delay time.Duration
	busy  atomic.Int32
	runs  []int32 // first prompt token of each request that ran, in order
	fail  func(prompt int32) error
}

func (c *counter) Check(r engine.Request) error {
	if len(r.Prompt) == 0 {
		return errors.New("no prompt")
	}
	return nil
}

func (c *counter) Generate(ctx context.Context, r engine.Request) (engine.Outcome, error) {
	if c.busy.Add(1) != 1 {
		panic("two requests at a time")
	}
	defer c.busy.Add(-1)
	c.runs = append(c.runs, r.Prompt[0])
	var out engine.Outcome
	for i := range r.MaxNew {
		if c.delay > 0 {
			select {
			case <-ctx.Done():
			case <-time.After(c.delay):
			}
		}
		if ctx.Err() != nil {
			out.Reason = engine.Cancelled
			return out, nil
		}
		id := r.Prompt[0] + int32(i)
		if c.fail != nil {
			if err := c.fail(id); err != nil {
				return out, err
			}
		}
		out.IDs = append(out.IDs, id)
		if r.Watcher != nil {
			if err := r.Watcher.Commit([]int32{id}); err != nil {
				return out, &engine.WatcherError{Err: err}
			}
		}
	}
	out.Reason = engine.Length
	return out, nil
}

// serial is a worker that runs one request after the other, each to its end in one unit.
type serial struct {
	gen   *counter
	queue []handed
	begin func() // before a request runs; may be nil
}

type handed struct {
	ctx    context.Context
	id     engine.RequestID
	req    engine.Request
	onRun  func()
	onDone func(engine.Outcome, error)
}

func (s *serial) Check(r engine.Request) error { return s.gen.Check(r) }

func (s *serial) Add(ctx context.Context, id engine.RequestID, r engine.Request, onRun func(), onDone func(engine.Outcome, error)) error {
	s.queue = append(s.queue, handed{ctx, id, r, onRun, onDone})
	return nil
}

func (s *serial) Remove(id engine.RequestID, err error) bool {
	i := slices.IndexFunc(s.queue, func(h handed) bool { return h.id == id })
	if i < 0 {
		return false
	}
	s.queue[i].onDone(engine.Outcome{Reason: engine.Cancelled}, err)
	s.queue = slices.Delete(s.queue, i, i+1)
	return true
}

func (s *serial) Step() (bool, error) {
	if len(s.queue) == 0 {
		return false, nil
	}
	h := s.queue[0]
	s.queue = s.queue[1:]
	if h.ctx.Err() != nil {
		h.onDone(engine.Outcome{Reason: engine.Cancelled}, nil)
		return true, nil
	}
	if s.begin != nil {
		s.begin()
	}
	h.onRun()
	out, err := s.gen.Generate(h.ctx, h.req)
	h.onDone(out, err)
	var own *engine.WatcherError
	if err != nil && !errors.As(err, &own) {
		return true, err
	}
	return true, nil
}

func (s *serial) Abandon(error) {
	for len(s.queue) > 0 {
		s.Remove(s.queue[0].id, engine.ErrFailed)
	}
}

// recorder is a watcher that keeps what it is told; after closing it complains.
type recorder struct {
	mu     sync.Mutex
	ids    []int32
	closed bool
	late   bool
}

func (r *recorder) Preview(ids []int32) engine.Verdict { return engine.Verdict{Keep: len(ids)} }

func (r *recorder) Commit(ids []int32) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.late = r.late || r.closed
	r.ids = append(r.ids, ids...)
	return nil
}

func (r *recorder) end() ([]int32, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	return r.ids, r.late
}

func drain(q *engine.Queue) { q.Drain(context.Background()) }

func submit(t testing.TB, q *engine.Queue, ctx context.Context, r engine.Request) (*engine.Slot, *engine.Ticket) {
	t.Helper()
	s, err := q.Reserve(ctx)
	if err != nil {
		t.Fatal(err)
	}
	ticket, err := s.Submit(r)
	if err != nil {
		t.Fatal(err)
	}
	return s, ticket
}

// A request whose time is up just as the worker begins with it has ended: nobody is told of what the worker still does.
func TestQueueDropsWhatBegins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gen := &counter{delay: time.Second}
		q := engine.NewQueue(&serial{gen: gen, begin: func() { time.Sleep(2 * time.Second) }}, 1, time.Second)
		told := &recorder{}
		s, tk := submit(t, q, t.Context(), engine.Request{Prompt: []int32{100}, MaxNew: 2, Watcher: told})
		if _, err := tk.Outcome(); !errors.Is(err, engine.ErrPending) {
			t.Errorf("the outcome's error is %v", err)
		}
		told.end()
		time.Sleep(time.Minute)
		s.Release()
		drain(q)
		if ids, late := told.end(); late || len(ids) > 0 || len(gen.runs) != 1 {
			t.Errorf("%v told, late %v, %d runs", ids, late, len(gen.runs))
		}
	})
}

// Places are taken before anything is prepared and given back after delivery; order is that of submission.
func TestQueuePlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gen := &counter{delay: time.Second}
		q := engine.NewQueue(&serial{gen: gen}, 3, time.Hour)
		var slots []*engine.Slot
		var tickets []*engine.Ticket
		for i := range int32(3) {
			s, tk := submit(t, q, t.Context(), engine.Request{Prompt: []int32{100 * (i + 1)}, MaxNew: 2})
			slots, tickets = append(slots, s), append(tickets, tk)
		}
		if _, err := q.Reserve(t.Context()); !errors.Is(err, engine.ErrOverloaded) {
			t.Errorf("a fourth place: %v", err)
		}
		synctest.Wait()
		if l := q.Load(); l != (engine.Load{Running: 1, Waiting: 2, Places: 3}) {
			t.Errorf("load %+v", l)
		}
		for i, tk := range tickets {
			out, err := tk.Outcome()
			base := int32(100 * (i + 1))
			if err != nil || !slices.Equal(out.IDs, []int32{base, base + 1}) || out.Reason != engine.Length {
				t.Errorf("%d: %+v, %v", i, out, err)
			}
		}
		if _, err := q.Reserve(t.Context()); !errors.Is(err, engine.ErrOverloaded) {
			t.Errorf("places of answers not delivered: %v", err)
		}
		slots[1].Release()
		slots[1].Release()
		s, err := q.Reserve(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := q.Reserve(t.Context()); !errors.Is(err, engine.ErrOverloaded) {
			t.Error("releasing twice made two places")
		}
		if _, err := s.Submit(engine.Request{}); err == nil {
			t.Error("a request that cannot run was queued")
		}
		s.Release()
		slots[0].Release()
		slots[2].Release()
		drain(q)
		if !slices.Equal(gen.runs, []int32{100, 200, 300}) {
			t.Errorf("ran in order %v", gen.runs)
		}
	})
}

// The deadline counts from taking the place to admission and not longer.
func TestQueuePending(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gen := &counter{delay: time.Second}
		q := engine.NewQueue(&serial{gen: gen}, 4, 5*time.Second)
		defer drain(q)
		first, running := submit(t, q, t.Context(), engine.Request{Prompt: []int32{0}, MaxNew: 8})
		defer first.Release()
		synctest.Wait()
		late, err := q.Reserve(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer late.Release()
		start := time.Now()
		waiter, waiting := submit(t, q, t.Context(), engine.Request{Prompt: []int32{0}, MaxNew: 1})
		defer waiter.Release()
		if out, err := waiting.Outcome(); !errors.Is(err, engine.ErrPending) || out.Reason != engine.Cancelled || time.Since(start) != 5*time.Second {
			t.Errorf("after %v: %+v, %v", time.Since(start), out, err)
		}
		time.Sleep(time.Millisecond)
		if _, err := late.Submit(engine.Request{Prompt: []int32{0}, MaxNew: 1}); !errors.Is(err, engine.ErrPending) {
			t.Errorf("preparation took longer than the deadline: %v", err)
		}
		if out, err := running.Outcome(); err != nil || len(out.IDs) != 8 {
			t.Errorf("the deadline touched a running request: %+v, %v", out, err)
		}
	})
}

// A context that ends takes a waiting request out at once and stops a running one.
func TestQueueCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gen := &counter{delay: time.Second}
		q := engine.NewQueue(&serial{gen: gen}, 3, time.Hour)
		defer drain(q)
		ctx1, cancel1 := context.WithCancel(t.Context())
		ctx2, cancel2 := context.WithCancel(t.Context())
		s1, running := submit(t, q, ctx1, engine.Request{Prompt: []int32{10}, MaxNew: 100})
		s2, waiting := submit(t, q, ctx2, engine.Request{Prompt: []int32{20}, MaxNew: 100})
		s3, last := submit(t, q, t.Context(), engine.Request{Prompt: []int32{30}, MaxNew: 1})
		defer s3.Release()
		time.Sleep(1500 * time.Millisecond)
		cancel2()
		synctest.Wait()
		select {
		case <-waiting.Done():
		default:
			t.Error("a waiting request did not end at once")
		}
		if out, err := waiting.Outcome(); err != nil || out.Reason != engine.Cancelled || out.IDs != nil {
			t.Errorf("waiting: %+v, %v", out, err)
		}
		s2.Release()
		cancel1()
		synctest.Wait()
		if out, err := running.Outcome(); err != nil || out.Reason != engine.Cancelled || len(out.IDs) != 1 {
			t.Errorf("running: %+v, %v", out, err)
		}
		s1.Release()
		if out, err := last.Outcome(); err != nil || len(out.IDs) != 1 {
			t.Errorf("the next: %+v, %v", out, err)
		}
		if !slices.Equal(gen.runs, []int32{10, 30}) {
			t.Errorf("ran %v", gen.runs)
		}
	})
}

// Releasing a place ends its request.
func TestQueueRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := engine.NewQueue(&serial{gen: &counter{delay: time.Second}}, 2, time.Hour)
		s1, running := submit(t, q, t.Context(), engine.Request{Prompt: []int32{10}, MaxNew: 100})
		s2, waiting := submit(t, q, t.Context(), engine.Request{Prompt: []int32{10}, MaxNew: 100})
		synctest.Wait()
		s2.Release()
		s1.Release()
		for _, tk := range []*engine.Ticket{running, waiting} {
			if out, err := tk.Outcome(); err != nil || out.Reason != engine.Cancelled {
				t.Errorf("%+v, %v", out, err)
			}
		}
		drain(q)
	})
}

func TestQueueDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := engine.NewQueue(&serial{gen: &counter{delay: time.Second}}, 4, time.Hour)
		var ended sync.WaitGroup
		results := make([]error, 3)
		outs := make([]engine.Outcome, 3)
		for i, n := range []int{3, 4, 100} {
			s, tk := submit(t, q, t.Context(), engine.Request{Prompt: []int32{10}, MaxNew: n})
			ended.Go(func() {
				outs[i], results[i] = tk.Outcome()
				s.Release()
			})
		}
		preparing, err := q.Reserve(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ended.Go(func() {
			time.Sleep(11 * time.Second) // longer than the grace
			tk, err := preparing.Submit(engine.Request{Prompt: []int32{10}, MaxNew: 1})
			if err == nil {
				_, err = tk.Outcome()
			}
			if !errors.Is(err, engine.ErrDraining) {
				t.Errorf("a request in preparation: %v", err)
			}
			preparing.Release()
		})
		synctest.Wait()
		start := time.Now()
		grace, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		q.Drain(grace)
		ended.Wait()
		if took := time.Since(start); took < 10*time.Second || took > 11*time.Second {
			t.Errorf("draining took %v", took)
		}
		if results[0] != nil || results[1] != nil || len(outs[0].IDs) != 3 || len(outs[1].IDs) != 4 {
			t.Errorf("requests that fit the grace time: %v", results)
		}
		if !errors.Is(results[2], engine.ErrDraining) || outs[2].Reason != engine.Cancelled || len(outs[2].IDs) < 2 {
			t.Errorf("request that does not: %+v, %v", outs[2], results[2])
		}
		if _, err := q.Reserve(t.Context()); !errors.Is(err, engine.ErrDraining) {
			t.Errorf("a place after draining: %v", err)
		}
	})
}

// A failure of the generator ends everything; one of a watcher only its request.
func TestQueueFailure(t *testing.T) {
	broken := errors.New("device lost")
	synctest.Test(t, func(t *testing.T) {
		gen := &counter{delay: time.Second, fail: func(id int32) error {
			if id == 52 {
				return broken
			}
			return nil
		}}
		q := engine.NewQueue(&serial{gen: gen}, 4, time.Hour)
		s1, own := submit(t, q, t.Context(), engine.Request{Prompt: []int32{10}, MaxNew: 5, Watcher: failing{broken}})
		s2, ok := submit(t, q, t.Context(), engine.Request{Prompt: []int32{20}, MaxNew: 1})
		if _, err := own.Outcome(); !errors.Is(err, broken) {
			t.Errorf("the watcher's: %v", err)
		}
		if _, err := ok.Outcome(); err != nil || q.Failure() != nil {
			t.Errorf("the next: %v, %v", err, q.Failure())
		}
		s3, hit := submit(t, q, t.Context(), engine.Request{Prompt: []int32{50}, MaxNew: 5})
		s4, waiting := submit(t, q, t.Context(), engine.Request{Prompt: []int32{60}, MaxNew: 5})
		<-q.Failed()
		if _, err := hit.Outcome(); !errors.Is(err, broken) {
			t.Errorf("hit: %v", err)
		}
		if _, err := waiting.Outcome(); !errors.Is(err, engine.ErrFailed) {
			t.Errorf("waiting: %v", err)
		}
		if !errors.Is(q.Failure(), broken) {
			t.Errorf("failure %v", q.Failure())
		}
		for _, s := range []*engine.Slot{s1, s2, s3, s4} {
			s.Release()
		}
		if _, err := q.Reserve(t.Context()); !errors.Is(err, engine.ErrFailed) {
			t.Errorf("a place after a failure: %v", err)
		}
		drain(q)
	})
}

// Random requests, cancelled, released and late at random: whatever happens to others, each commits a prefix of what it would alone, all
// of it unless it was cut short, ends once, and leaves its place.
func TestQueueRandom(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			gen := &counter{delay: time.Millisecond}
			const places = 5
			q := engine.NewQueue(&serial{gen: gen}, places, 40*time.Millisecond)
			var clients sync.WaitGroup
			var whole, cut, refused, late atomic.Int32
			for i := range int32(60) {
				n, pause := 1+rng.IntN(12), time.Duration(rng.IntN(300))*time.Millisecond
				leaves, releases := rng.IntN(3) == 0, rng.IntN(4) == 0
				after := time.Duration(rng.IntN(30_000)) * time.Microsecond
				clients.Go(func() {
					time.Sleep(pause)
					ctx, cancel := context.WithCancel(context.Background())
					defer cancel()
					s, err := q.Reserve(ctx)
					if errors.Is(err, engine.ErrOverloaded) {
						refused.Add(1)
						return
					}
					if err != nil {
						t.Error(err)
						return
					}
					defer s.Release()
					w := &recorder{}
					tk, err := s.Submit(engine.Request{Prompt: []int32{1000 * i}, MaxNew: n, Watcher: w})
					if err != nil {
						t.Error(err)
						return
					}
					if leaves {
						time.AfterFunc(after, cancel)
					}
					if releases {
						time.AfterFunc(after, s.Release)
					}
					out, err := tk.Outcome()
					ids, after := w.end()
					var want []int32
					for j := range n {
						want = append(want, 1000*i+int32(j))
					}
					switch {
					case errors.Is(err, engine.ErrPending):
						late.Add(1)
						if len(ids) > 0 {
							t.Errorf("%d: late, and said %v", i, ids)
						}
					case err != nil || after:
						t.Errorf("%d: %v, commits after the end: %v", i, err, after)
					case out.Reason == engine.Cancelled && (leaves || releases):
						cut.Add(1)
						if !slices.Equal(ids, want[:len(ids)]) {
							t.Errorf("%d: %v", i, ids)
						}
					default:
						whole.Add(1)
						if !slices.Equal(ids, want) || !slices.Equal(out.IDs, want) {
							t.Errorf("%d: %v, want %v", i, ids, want)
						}
					}
				})
			}
			clients.Wait()
			if l := q.Load(); l != (engine.Load{}) {
				t.Errorf("left behind: %+v", l)
			}
			drain(q)
			if whole.Load() == 0 || cut.Load() == 0 {
				t.Errorf("seed %d: %d whole, %d cut, %d refused, %d late", seed, whole.Load(), cut.Load(), refused.Load(), late.Load())
			}
		})
	}
}

// Through real lanes: neighbours that come, leave and fail do not change a request's tokens.
func TestQueueBatch(t *testing.T) {
	m := modeltest.Micro(t)
	want := map[int32][]int32{}
	alone := newSingle(t, m)
	const n = 4
	for i := range int32(3) {
		want[i] = generate(t, alone, engine.Request{Prompt: []int32{20 + i, 30, 40}, MaxNew: n, Sampling: engine.Sampling{Temperature: 1, Seed: 5}}).IDs
	}
	q := engine.NewQueue(newBatch(t, m, 3, 160), 12, time.Minute)
	var clients sync.WaitGroup
	for k := range 12 {
		clients.Go(func() {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			s, err := q.Reserve(ctx)
			if err != nil {
				t.Error(err)
				return
			}
			defer s.Release()
			i := int32(k % 3)
			r := engine.Request{Prompt: []int32{20 + i, 30, 40}, MaxNew: n, Sampling: engine.Sampling{Temperature: 1, Seed: 5}}
			switch k % 4 {
			case 1:
				r.Watcher = failing{fmt.Errorf("own")}
			case 2:
				r.MaxNew = 100
				r.Watcher = leaver{cancel}
			}
			tk, err := s.Submit(r)
			if err != nil {
				t.Error(err)
				return
			}
			out, err := tk.Outcome()
			switch k % 4 {
			case 1:
				if err == nil {
					t.Error("no error")
				}
			case 2:
				if err != nil || out.Reason != engine.Cancelled || !slices.Equal(out.IDs, want[i][:1]) {
					t.Errorf("left: %+v, %v", out, err)
				}
			default:
				if err != nil || !slices.Equal(out.IDs, want[i]) {
					t.Errorf("%d: %v, %v, want %v", k, out.IDs, err, want[i])
				}
			}
		})
	}
	clients.Wait()
	drain(q)
}

// leaver goes away at the first token: generation must stop within one more.
type leaver struct{ cancel func() }

func (l leaver) Preview(ids []int32) engine.Verdict { return engine.Verdict{Keep: len(ids)} }

func (l leaver) Commit([]int32) error {
	l.cancel()
	return nil
}
