package model

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"ninfer/internal/backend"
)

// Runner drives one device: it compiles each pass once, feeds prompts in chunks and keeps the drafter behind the target by
// exactly one token.
type Runner struct {
	Model *Model
	Dev   backend.Device
	Chunk int  // most rows of a prefill pass
	Taps  bool // trace every layer's streams
	// Lanes and Round, if set, are the most lanes of a pass and the most rows of a lane in a decoding round: then one program of each kind
	// serves all sizes, and Prepare can compile them all.
	Lanes, Round int
	// Carry, if set, is how many rows of a lane may wait for the drafter: a prompt's last ones do until the lane drafts. If not they are seeded
	// at once, and those of rounds when there are as many as a round may leave.
	Carry int

	// Waited is the time spent so far in launching passes and waiting for them.
	Waited time.Duration

	steps map[stepKey]backend.Step
}

type stepKey struct {
	kind  backend.Kind
	lanes int
	rows  int
}

// NewRunner returns a runner on a device made for m's states. chunk is the most rows of a prefill pass.
func NewRunner(m *Model, dev backend.Device, chunk int) *Runner {
	return &Runner{Model: m, Dev: dev, Chunk: chunk, steps: map[stepKey]backend.Step{}}
}

// Launch runs a pass of the kind over the lanes of c and waits for it. Programs are compiled when first needed, for the number of
// rows rounded up to a prefill chunk where the kind allows it.
func (r *Runner) Launch(kind backend.Kind, c *backend.Control) (backend.Result, error) {
	rows := 0
	for _, l := range c.Lanes {
		rows += len(l.Tokens)
	}
	step, err := r.step(kind, len(c.Lanes), rows)
	if err != nil {
		return backend.Result{}, err
	}
	start := time.Now()
	defer func() { r.Waited += time.Since(start) }()
	seq, err := r.Dev.Launch(step, c)
	if err != nil {
		return backend.Result{}, err
	}
	return r.Dev.Wait(seq)
}

// Queue is Launch of a pass that has no result. It does not wait for it.
func (r *Runner) Queue(kind backend.Kind, c *backend.Control) error {
	rows := 0
	for _, l := range c.Lanes {
		rows += len(l.Tokens)
	}
	step, err := r.step(kind, len(c.Lanes), rows)
	if err != nil {
		return err
	}
	start := time.Now()
	_, err = r.Dev.Launch(step, c)
	r.Waited += time.Since(start)
	return err
}

// Waits says whether so many rows of a lane may go on waiting for the drafter during a round.
func (r *Runner) Waits(rows int) bool {
	if r.Carry == 0 {
		return rows < r.Round
	}
	return rows+r.Round <= r.Carry
}

// Drafts runs a first draft pass whose lanes want their last row's pick and so many further ones, each from the drafts of the one before: on a
// device that can all at once. Each lane's picks are in order.
func (r *Runner) Drafts(c *backend.Control, more int) ([][]int32, error) {
	out := make([][]int32, len(c.Lanes))
	take := func(res backend.Result) {
		for i := range out {
			out[i] = append(out[i], res.Lanes[i].Picks...)
		}
	}
	if dev, ok := r.Dev.(backend.Chainer); ok {
		rows := 0
		for _, l := range c.Lanes {
			rows += len(l.Tokens)
		}
		step, err := r.step(backend.Draft, len(c.Lanes), rows)
		if err != nil {
			return nil, err
		}
		seq, err := dev.Chain(step, c, more)
		if err != nil {
			return nil, err
		}
		res, err := r.Dev.Wait(seq)
		if err != nil {
			return nil, err
		}
		take(res)
		return out, nil
	}
	res, err := r.Launch(backend.Draft, c)
	if err != nil {
		return nil, err
	}
	take(res)
	next := &backend.Control{Lanes: make([]backend.LaneRows, len(c.Lanes))}
	for range more {
		for i, l := range c.Lanes {
			next.Lanes[i] = backend.LaneRows{Lane: l.Lane, Tokens: out[i][len(out[i])-1:], Want: backend.WantLast, Chain: true}
		}
		if res, err = r.Launch(backend.Draft, next); err != nil {
			return nil, err
		}
		take(res)
	}
	return out, nil
}

// Chains says whether the device is one for DraftAndVerify.
func (r *Runner) Chains() bool {
	_, ok := r.Dev.(backend.Chainer)
	return ok
}

// DraftAndVerify runs, on a device that chains, a first draft pass and so many further ones as Drafts does, and then a verifying pass. Of that the
// first lanes are those that draft, with the token before the drafts and the positions of all rows that they want verified; others may follow. It
// returns the drafts of the lanes that draft in order, and what came of verifying.
func (r *Runner) DraftAndVerify(drafts *backend.Control, more int, verify *backend.Control) ([][]int32, backend.Result, error) {
	dev, ok := r.Dev.(backend.Chainer)
	if !ok {
		return nil, backend.Result{}, errors.New("model: the device does not chain passes")
	}
	first, last := 0, 0
	for i := range drafts.Lanes {
		first += len(drafts.Lanes[i].Tokens)
	}
	for i := range verify.Lanes {
		last += len(verify.Lanes[i].Positions)
	}
	step, err := r.step(backend.Draft, len(drafts.Lanes), first)
	if err != nil {
		return nil, backend.Result{}, err
	}
	judge, err := r.step(backend.Verify, len(verify.Lanes), last)
	if err != nil {
		return nil, backend.Result{}, err
	}
	start := time.Now()
	defer func() { r.Waited += time.Since(start) }()
	if _, err := dev.Chain(step, drafts, more); err != nil {
		return nil, backend.Result{}, err
	}
	picks, seq, err := dev.Behind(judge, verify)
	if err != nil {
		return nil, backend.Result{}, err
	}
	res, err := r.Dev.Wait(seq)
	return picks, res, err
}

// step is the program for a pass of so many lanes and rows, compiled if it is the first.
func (r *Runner) step(kind backend.Kind, lanes, rows int) (backend.Step, error) {
	key := stepKey{kind, lanes, rows}
	if kind != backend.Prefill {
		key.lanes = max(lanes, r.Lanes)
	}
	switch {
	case kind == backend.Prefill || kind == backend.Seed || kind == backend.Draft && r.Round == 0:
		key.rows = max(rows, r.Chunk)
	case kind == backend.Decode:
		key.rows = max(rows, r.Lanes)
	default:
		key.rows = max(rows, r.Lanes*r.Round)
	}
	if step, ok := r.steps[key]; ok {
		return step, nil
	}
	p, err := r.Model.Program(backend.Pass{Kind: kind, Lanes: key.lanes, Rows: key.rows}, r.Taps)
	if err != nil {
		return nil, err
	}
	step, err := r.Dev.Compile(p)
	if err == nil {
		r.steps[key] = step
	}
	return step, err
}

// Prepare compiles the programs of all passes up to Lanes and Round, so that none needs memory or weights later.
func (r *Runner) Prepare() error {
	kinds := []backend.Kind{backend.Prefill, backend.Decode}
	if r.Round > 1 {
		kinds = append(kinds, backend.Verify)
	}
	if r.Model.mtp != nil {
		kinds = append(kinds, backend.Draft, backend.Seed)
	}
	for _, k := range kinds {
		if _, err := r.step(k, 1, 1); err != nil {
			return err
		}
	}
	return nil
}

// Positions are the rotary positions of n text tokens of which the first stands at position at.
func Positions(at, n int) [][3]int32 {
	p := make([][3]int32, n)
	for i := range p {
		v := int32(at + i)
		p[i] = [3]int32{v, v, v}
	}
	return p
}

// Prompt feeds rows to a lane in chunks, a single row as a decode step, and returns the results of the wanted rows. With a drafter it seeds the drafter's planes
// for every row but the last, whose following token is not known yet. in.Positions nil means text at the lane's length.
func (r *Runner) Prompt(in backend.LaneRows) (backend.LaneResult, error) { return r.prompt(in, false) }

// PromptEnd is Prompt for the last rows of a prompt: as many of them wait for the drafter as may.
func (r *Runner) PromptEnd(in backend.LaneRows) (backend.LaneResult, error) {
	return r.prompt(in, true)
}

func (r *Runner) prompt(in backend.LaneRows, last bool) (backend.LaneResult, error) {
	var out backend.LaneResult
	n := len(in.Tokens)
	if n == 0 {
		return out, errors.New("model: empty prompt")
	}
	if in.Positions == nil {
		in.Positions = Positions(r.Dev.Lengths(backend.Lane(in.Lane)).Target, n)
	}
	for first := 0; first < n; first += r.Chunk {
		end := min(first+r.Chunk, n)
		// The rows left by the chunk before, or by the last round, are followed by this chunk's first token.
		if err := r.Seed(in.Lane, in.Tokens[first:first+1]); err != nil {
			return out, err
		}
		part := in
		part.Tokens, part.Positions = in.Tokens[first:end], in.Positions[first:end]
		if in.Media != nil {
			part.Media = in.Media[first:end]
		}
		part.Force = in.Force.From(first)
		if end < n {
			part.Ahead = in.Tokens[end:min(end+r.Chunk, n)]
			if !in.Want.All() {
				part.Want = backend.WantNone
			}
		}
		kind := backend.Prefill
		if end-first == 1 {
			kind = backend.Decode
		}
		res, err := r.Launch(kind, &backend.Control{Lanes: []backend.LaneRows{part}})
		if err != nil {
			return out, err
		}
		out.Picks = append(out.Picks, res.Lanes[0].Picks...)
		if end == n && len(res.Lanes[0].Likely) > 0 { // of its last row only: WantLikelyAll is for rounds
			out.Likely, out.Recall = res.Lanes[0].Likely, res.Lanes[0].Recall
		}
		for _, row := range res.Lanes[0].Logits {
			out.Logits = append(out.Logits, slices.Clone(row)) // the next launch may overwrite it
		}
		if last && end == n && r.Carry > 0 && r.Waits(end-first) {
			break
		}
		if err := r.Seed(in.Lane, part.Tokens[1:]); err != nil {
			return out, err
		}
	}
	return out, nil
}

// Seed appends drafter rows for the lane's carried rows: following are the tokens after each of them, and there may be one fewer
// than rows are carried, when the last one's successor is not known. Without a drafter, or with no token, it does nothing.
func (r *Runner) Seed(lane int, following []int32) error {
	at := r.Dev.Lengths(backend.Lane(lane))
	carried := at.Target - at.Drafter
	if r.Model.mtp == nil || carried == 0 || len(following) == 0 {
		return nil
	}
	if len(following) < carried-1 || len(following) > carried {
		return fmt.Errorf("model: seed: %d tokens follow %d carried rows", len(following), carried)
	}
	for len(following) > 0 {
		n := min(len(following), max(1, r.Chunk))
		if err := r.Queue(backend.Seed, &backend.Control{Lanes: []backend.LaneRows{{Lane: lane, Tokens: following[:n]}}}); err != nil {
			return err
		}
		following = following[n:]
	}
	return nil
}

// Draft returns k draft tokens that follow the given ones. following are the tokens after each carried row: what the last round
// accepted and its new token. One pass runs them all, each further draft is a pass of one row.
func (r *Runner) Draft(lane int, following []int32, k int, want backend.Want) ([]int32, [][]float32, error) {
	var drafts []int32
	var logits [][]float32
	rows := backend.LaneRows{Lane: lane, Tokens: following, Want: want}
	for range k {
		res, err := r.Launch(backend.Draft, &backend.Control{Lanes: []backend.LaneRows{rows}})
		if err != nil {
			return nil, nil, err
		}
		l := res.Lanes[0]
		d := l.Picks[len(l.Picks)-1]
		drafts = append(drafts, d)
		for _, row := range l.Logits {
			logits = append(logits, slices.Clone(row))
		}
		rows = backend.LaneRows{Lane: lane, Tokens: []int32{d}, Want: want, Chain: true}
	}
	return drafts, logits, nil
}
