package server

import (
	"sync"
	"time"

	"ninfer/internal/engine"
	"ninfer/internal/front"
)

// output is the watcher of a request. The engine's goroutine puts events in and never waits; the request's own takes them out. What it
// holds is bounded by the request's output limit.
type output struct {
	session *front.Session
	wake    chan struct{} // holds a signal if there are items
	count   *counters
	metrics *metrics
	arrived time.Time // the request
	queued  time.Time
	timed   bool       // every item has its clock
	mu      sync.Mutex // above what it guards
	items   []item
	taken   []item // what take returned, to be filled again after the next call
	clock   clock
}

// item is something to tell a client.
type item struct {
	event    front.Event
	progress bool   // the item is not an event but prompt progress
	clock    *clock // as it was then, of progress and where each piece is timed; a stream has an item for every token, so they are small
}

// clock is what timings are made of.
type clock struct {
	admitted  time.Time
	processed time.Time // the last prompt token ran
	first     time.Time // the first token was committed
	last      time.Time
	cached    int // prompt tokens that did not run
	prompt    int // prompt tokens processed so far, cached ones included
	output    int
}

func newOutput(g *generation) *output {
	return &output{
		session: g.prepared.Session(), wake: make(chan struct{}, 1), count: &g.server.counters, metrics: g.server.metrics,
		arrived: g.start, queued: g.submitted, timed: g.timed,
	}
}

// Preview is of engine.Watcher.
func (o *output) Preview(ids []int32) engine.Verdict {
	keep, ends, insert := o.session.Preview(ids)
	v := engine.Verdict{Keep: keep, Insert: insert}
	if ends {
		v.Reason = engine.Stop
	}
	return v
}

// Commit is of engine.Watcher.
func (o *output) Commit(ids []int32) error {
	now := time.Now()
	events := o.session.Commit(ids)
	o.count.decode.Add(int64(len(ids)))
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.clock.first.IsZero() {
		o.clock.first = now
		o.metrics.firstToken.Observe(now.Sub(o.arrived).Seconds())
	}
	o.clock.last = now
	o.clock.output += len(ids)
	o.put(events)
	return nil
}

// progress is engine.Request's.
func (o *output) progress(done int) {
	now := time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.clock.admitted.IsZero() {
		o.clock.admitted, o.clock.cached = now, done
		o.metrics.queue.Observe(now.Sub(o.queued).Seconds())
	}
	o.count.prefill.Add(int64(done - o.clock.prompt))
	o.clock.prompt, o.clock.processed = done, now
	at := o.clock
	o.items = append(o.items, item{progress: true, clock: &at})
	o.signal()
}

// put appends events. The lock is held.
func (o *output) put(events []front.Event) {
	var at *clock
	if o.timed {
		now := o.clock
		at = &now
	}
	for _, e := range events {
		o.items = append(o.items, item{event: e, clock: at})
	}
	if len(events) > 0 {
		o.signal()
	}
}

func (o *output) signal() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// take returns what has come since the last call. It is the caller's until the next one.
func (o *output) take() []item {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.items, o.taken = o.taken[:0], o.items
	return o.taken
}

// finish returns what is left. The engine must be done with the request.
func (o *output) finish() []item {
	events := o.session.Finish()
	o.mu.Lock()
	o.put(events)
	o.mu.Unlock()
	return o.take()
}

// times returns the clock.
func (o *output) times() clock {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.clock
}

// timings are those of llama.cpp's server.
type timings struct {
	CacheN             int     `json:"cache_n"`
	PromptN            int     `json:"prompt_n"`
	PromptMS           float64 `json:"prompt_ms"`
	PromptPerTokenMS   float64 `json:"prompt_per_token_ms"`
	PromptPerSecond    float64 `json:"prompt_per_second"`
	PredictedN         int     `json:"predicted_n"`
	PredictedMS        float64 `json:"predicted_ms"`
	PredictedPerToken  float64 `json:"predicted_per_token_ms"`
	PredictedPerSecond float64 `json:"predicted_per_second"`
	DraftN             *int    `json:"draft_n,omitzero"`
	DraftAccepted      *int    `json:"draft_n_accepted,omitzero"`
}

// timings computes them: the prompt's time runs from admission to the first committed token, the output's from there to the last, over
// one interval less than there are tokens.
func (c clock) timings() *timings {
	t := &timings{CacheN: c.cached, PromptN: c.prompt - c.cached, PredictedN: c.output}
	end := c.first
	if end.IsZero() {
		end = c.processed
	}
	prompt, output := end.Sub(c.admitted), c.last.Sub(c.first)
	t.PromptMS, t.PredictedMS = milliseconds(prompt), milliseconds(output)
	t.PromptPerTokenMS, t.PromptPerSecond = rates(prompt, t.PromptN)
	t.PredictedPerToken, t.PredictedPerSecond = rates(output, t.PredictedN-1)
	return t
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// rates are milliseconds for each of n and how many of them a second has, 0 where there is no answer.
func rates(d time.Duration, n int) (perItem, perSecond float64) {
	if d <= 0 || n <= 0 {
		return 0, 0
	}
	return milliseconds(d) / float64(n), float64(n) / d.Seconds()
}
