package engine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"ninfer/internal/backend"
	"ninfer/internal/model"
)

// Batch runs requests side by side on the lanes of a device, one unit of work at a time. It belongs to one goroutine and has none of its
// own: Add hands a request over, Step does a unit and returns what ended with it.
type Batch struct {
	runner   *model.Runner
	options  BatchOptions
	sched    *Scheduler
	requests map[RequestID]*running
	lanes    []*running
	policy   *draftPolicy // nil: a request's drafts are what it asks for
	last     RequestID    // the highest that was added
	now      func() time.Time
	sums     Activity // its sums only
	ledger   ledger
	left     []int // lanes whose requests have ended and whose images are still there
}

// BatchOptions size a batch.
type BatchOptions struct {
	Limits        // Chunk is the runner's where it is 0
	Context  int  // most tokens of a sequence
	Adaptive bool // a request's drafts are the most of a round, and each lane chooses
}

// running is a request that was added and has not ended.
type running struct {
	id     RequestID
	ctx    context.Context
	g      *generation
	seen   *acceptance // of its drafts, if the policy chooses
	begun  time.Time   // admitted
	first  time.Time   // its first token was drawn
	rows   []int32     // what the scheduler counts as prompt and has not run: the prompt, later insertions
	onDone func(Outcome, error)
	onRun  func()
}

// NewBatch returns a batch on the runner's device, which has at least as many lanes and pages. It empties the lanes.
func NewBatch(r *model.Runner, o BatchOptions) (*Batch, error) {
	if o.Chunk == 0 {
		o.Chunk = r.Chunk
	}
	if o.GapRows == 0 {
		o.GapRows = o.Chunk
	}
	o.Chunk = min(o.Chunk, r.Chunk)
	s, err := NewScheduler(o.Limits)
	if err != nil {
		return nil, err
	}
	b := &Batch{
		runner: r, options: o, sched: s, requests: map[RequestID]*running{}, lanes: make([]*running, o.Lanes), now: time.Now,
	}
	if o.Adaptive {
		b.policy = newDraftPolicy(mostDrafts)
	}
	for i := range o.Lanes {
		if err := r.Dev.Reset(backend.Lane(i)); err != nil {
			return nil, err
		}
	}
	b.publish(false)
	return b, nil
}

// Check tells why Add would refuse a request, load apart.
func (b *Batch) Check(req Request) error {
	vocabulary, most := b.runner.Model.Config.Text.VocabSize, b.options.Context
	switch {
	case len(req.Prompt) == 0:
		return errors.New("engine: the prompt has no tokens")
	case req.MaxNew < 0:
		return fmt.Errorf("engine: output limit of %d tokens", req.MaxNew)
	case req.Draft < 0:
		return fmt.Errorf("engine: %d drafts a round", req.Draft)
	case req.Top < 0 || req.Top > TopKLimit || req.Top > 0 && !req.Logprobs:
		return fmt.Errorf("engine: %d most likely ids, need 0 to %d and log-probabilities", req.Top, TopKLimit)
	case len(req.Prompt) > most || len(req.Prompt) == most && req.MaxNew > 0:
		return fmt.Errorf("%w: %d tokens and room for output do not fit a context of %d", ErrPromptTooLong, len(req.Prompt), most)
	}
	for _, id := range req.Prompt {
		if id < 0 || int(id) >= vocabulary {
			return fmt.Errorf("engine: prompt id %d is not in the vocabulary of %d", id, vocabulary)
		}
	}
	return nil
}

// Add hands a request over. IDs grow: they are the order in which requests came. onRun is called when it gets a lane, and onDone once,
// when it has ended, both from Step or Remove; either may be nil. The error is that of Check, or ErrTooLarge, or ErrOverloaded.
func (b *Batch) Add(ctx context.Context, id RequestID, req Request, onRun func(), onDone func(Outcome, error)) error {
	if err := b.Check(req); err != nil {
		return err
	}
	output := min(req.MaxNew, b.options.Context-len(req.Prompt))
	if err := b.sched.Arrive(id, len(req.Prompt), max(output, 1)); err != nil {
		return err
	}
	r := &running{id: id, ctx: ctx, rows: req.Prompt, onRun: onRun, onDone: onDone}
	r.g = newGeneration(b.runner, b.options.Context, req)
	if b.policy != nil && req.Draft > 0 {
		r.seen = b.policy.request()
	}
	b.requests[id] = r
	b.last = max(b.last, id)
	b.publish(false)
	return nil
}

// Run adds a request and works until it has ended, on everything else that was added too. A context that ends is no error but a
// reason of the outcome.
func (b *Batch) Run(ctx context.Context, req Request) (Outcome, error) {
	var out Outcome
	var ended error
	done := false
	if err := b.Add(ctx, b.last+1, req, nil, func(o Outcome, err error) { out, ended, done = o, err, true }); err != nil {
		return out, err
	}
	for !done {
		if _, err := b.Step(); err != nil {
			b.Abandon(err)
		}
	}
	return out, ended
}

// Load is the number of requests that have a lane, and of those that wait for one.
func (b *Batch) Load() (active, waiting int) { return b.sched.Active(), b.sched.Waiting() }

// mostDrafts is the largest number of drafts that the adaptive policy considers, as many as --draft-tokens takes.
const mostDrafts = 5

// Step ends requests whose context has ended, empties the lanes of those that ended since the last one, then does one unit of work. It reports whether there was any. An error is the device's:
// the batch is of no use after it.
func (b *Batch) Step() (busy bool, err error) {
	start, waited := time.Now(), b.runner.Waited
	var left []RequestID
	for id, r := range b.requests {
		if r.ctx.Err() != nil {
			left = append(left, id)
		}
	}
	slices.Sort(left) // the order of ends is not a map's
	for _, id := range left {
		b.Remove(id, nil)
	}
	for _, lane := range b.left { // their pages are the next requests'
		if err := b.runner.Dev.Reset(backend.Lane(lane)); err != nil {
			return false, err
		}
	}
	b.left = b.left[:0]
	u := b.sched.Next()
	for _, a := range u.Admit {
		r := b.requests[a.ID]
		r.g.lane, r.begun = a.Lane, b.now()
		b.lanes[a.Lane] = r
		b.sums.PromptTokens += int64(len(r.g.req.Prompt))
		if r.onRun != nil {
			r.onRun()
		}
		if r.g.req.Progress != nil {
			r.g.req.Progress(0)
		}
	}
	b.publish(u.Prefill.Last)
	defer b.publish(false)
	work := &b.sums.PromptWork
	switch {
	case u.Prefill.Rows > 0:
		err = b.prefill(b.lanes[u.Prefill.Lane], u.Prefill)
	case len(u.Round) > 0:
		work = &b.sums.RoundWork
		b.sums.DecodeUnits++
		b.sums.DecodeLanes += int64(len(u.Round))
		err = b.round(u.Round)
	default:
		return false, nil
	}
	waited = b.runner.Waited - waited
	b.sums.DeviceWait += waited
	*work += time.Since(start) - waited
	return true, err
}

// prefill runs a chunk of a prompt or of an insertion; after the last one it draws a token.
func (b *Batch) prefill(r *running, c Chunk) error {
	g := r.g
	want := backend.WantNone
	if c.Last {
		want = g.want(false)
	}
	// An insertion comes after rows that the drafter may not have seen.
	if len(g.out.IDs) > 0 {
		if err := b.runner.Seed(g.lane, g.following()); err != nil {
			return err
		}
	}
	feed := b.runner.Prompt
	if c.Last {
		feed = b.runner.PromptEnd
	}
	res, err := feed(backend.LaneRows{Lane: g.lane, Tokens: r.rows[:c.Rows], Ahead: r.rows[c.Rows:min(len(r.rows), c.Rows+b.runner.Chunk)], Want: want})
	if err != nil {
		return err
	}
	r.rows = r.rows[c.Rows:]
	b.sums.PrefillTokens += int64(c.Rows)
	if len(g.out.IDs) == 0 && g.req.Progress != nil {
		g.req.Progress(c.First + c.Rows)
	}
	if !c.Last {
		return nil
	}
	why := drawDecode
	if len(g.out.IDs) == 0 {
		why = drawFirst
		r.first = b.now()
		g.out.Stats.Prefill = r.first.Sub(r.begun)
	}
	if g.req.MaxNew == 0 {
		g.out.Reason = Length
		b.end(r, nil)
		return nil
	}
	before := g.mark()
	id, err := g.choose(res, why)
	if err != nil {
		return err
	}
	err = g.publish(id, res)
	b.tally(g, before, false)
	b.after(r, err)
	return nil
}

// round runs a decoding round of the lanes.
func (b *Batch) round(lanes []int) error {
	gs := make([]*generation, len(lanes))
	limits := make([]drafting, len(lanes))
	for i, l := range lanes {
		r := b.lanes[l]
		gs[i] = r.g
		limits[i] = drafting{limit: r.g.limit(r.g.req.Draft), seen: r.seen}
		r.g.drafts = limits[i].limit
	}
	if b.policy != nil {
		for i, k := range b.policy.choose(limits, min(b.options.Lanes, len(b.requests))) {
			gs[i].drafts = k
		}
	}
	rows, passes := 0, 0
	for _, g := range gs {
		rows += g.drafts + 1
		passes = max(passes, g.drafts)
	}
	before := make([]mark, len(gs))
	for i, g := range gs {
		before[i] = g.mark()
	}
	start := b.now()
	if err := round(b.runner, gs); err != nil {
		return err
	}
	if b.policy != nil {
		b.policy.cost.observe(rows, passes, b.now().Sub(start).Seconds())
	}
	for i, l := range lanes {
		r := b.lanes[l]
		if r.seen != nil && r.g.drafts > 0 {
			b.policy.observe(r.seen, r.g.drafts, r.g.out.Stats.Accepted-before[i].stats.Accepted)
		}
		b.tally(r.g, before[i], true)
		b.after(r, r.g.err)
	}
	return nil
}

// after ends a request that is over, and schedules what was inserted into its output.
func (b *Batch) after(r *running, err error) {
	switch {
	case err != nil || r.g.out.Reason != Continue:
		b.end(r, err)
	case len(r.g.pending) > 1:
		r.rows = slices.Clone(r.g.pending)
		b.sched.Extend(r.id, len(r.rows))
	}
}

// end takes a request out and tells its owner.
func (b *Batch) end(r *running, err error) {
	delete(b.requests, r.id)
	b.sched.Leave(r.id)
	if i := r.g.lane; !r.begun.IsZero() && b.lanes[i] == r {
		b.lanes[i] = nil
		b.left = append(b.left, i)
	}
	if !r.first.IsZero() {
		r.g.out.Stats.Decode = b.now().Sub(r.first)
	}
	b.publish(false)
	if r.onDone != nil {
		r.onDone(r.g.out, err)
	}
}

// Remove ends a request early with an error of the caller's, which onDone gets. It reports whether the request was there.
func (b *Batch) Remove(id RequestID, err error) bool {
	r, ok := b.requests[id]
	if ok {
		r.g.out.Reason = Cancelled
		b.end(r, err)
	}
	return ok
}

// Abandon ends all requests after an error of Step: those that ran get the error, those that waited ErrFailed.
func (b *Batch) Abandon(cause error) {
	for _, id := range slices.Sorted(maps.Keys(b.requests)) {
		err := cause
		if b.requests[id].begun.IsZero() {
			err = ErrFailed
		}
		b.Remove(id, err)
	}
}
