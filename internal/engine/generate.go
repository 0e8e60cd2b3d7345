package engine

import (
	"errors"
	"math"
	"slices"
	"sync"
	"time"

	"ninfer/internal/backend"
	"ninfer/internal/model"
)

// Reason is why a generation ended.
type Reason string

// The reasons.
const (
	Continue  Reason = ""          // it did not
	Stop      Reason = "stop"      // a stop id or string
	Length    Reason = "length"    // the output limit
	Context   Reason = "context"   // the context limit
	Cancelled Reason = "cancelled" // the caller's context ended
)

// Verdict is a watcher's answer to a preview.
type Verdict struct {
	Keep   int     // ids that may be committed
	Reason Reason  // if not Continue, generation ends after them
	Insert []int32 // ids to append after them without asking the model; implies all later previewed ids are dropped
}

// Watcher decides over output before it is committed. It is called by one goroutine.
type Watcher interface {
	// Preview is asked about ids that would follow what was committed so far. It must not change anything.
	Preview(ids []int32) Verdict
	// Commit is told what was committed: kept ids, then inserted ones.
	Commit(ids []int32) error
}

// Request is one generation.
type Request struct {
	Prompt   []int32
	MaxNew   int // most ids to commit; 0 runs the prompt only
	Sampling Sampling
	StopIDs  []int32 // an id of them ends the generation and is committed
	Watcher  Watcher // may be nil
	Draft    int     // drafts a round; 0 is plain decoding
	// Logprobs asks for the log-probability of every committed id, with the Top most likely ids at its place.
	Logprobs bool
	Top      int
	// Progress is told how many prompt tokens need not run any more: at the start, and after every chunk. The last call has all of
	// them. May be nil.
	Progress func(done int)
	// Drafter replaces the model's own drafts, for tests: it returns k ids that might follow the output so far.
	Drafter func(output []int32, k int) []int32
}

// Stats are counts and times of a generation.
type Stats struct {
	PromptTokens  int
	OutputTokens  int
	Prefill       time.Duration // until the first token was drawn
	Decode        time.Duration // after that
	Rounds        int           // passes with drafts
	FallbackSteps int           // passes without, while drafting was asked for
	Drafted       int
	Accepted      int
	AcceptedAt    []int // drafts accepted at each position of a round
}

// Outcome is how a generation ended.
type Outcome struct {
	IDs      []int32   // committed output
	Logprobs []Logprob // one for each of IDs, if asked for
	Reason   Reason
	Stats    Stats
}

// ErrPromptTooLong is returned when a prompt leaves no room for output.
var ErrPromptTooLong = errors.New("prompt too long")

// Logprob is what the model thought of an id: the natural logarithm of its probability over all ids of the tokenizer, before penalties,
// temperature and truncation.
type Logprob struct {
	ID     int32
	Value  float64
	Forced bool        // inserted, not asked of the model; Value is 0
	Top    []Candidate // most likely first, the lower id on ties
}

// Candidate is an id with its log-probability.
type Candidate struct {
	ID    int32
	Value float64
}

// logprob measures an id against a row of logits.
func logprob(logits []float32, ids int, id int32, top int) Logprob {
	logits = logits[:ids]
	most := slices.Max(logits)
	var sum float64
	for _, v := range logits {
		sum += math.Exp(float64(v) - float64(most))
	}
	norm := float64(most) + math.Log(sum)
	l := Logprob{ID: id, Value: float64(logits[id]) - norm}
	for i, v := range logits {
		if len(l.Top) == top && (top == 0 || float64(v)-norm <= l.Top[top-1].Value) {
			continue
		}
		c := Candidate{int32(i), float64(v) - norm}
		at := len(l.Top)
		for at > 0 && l.Top[at-1].Value < c.Value {
			at--
		}
		if len(l.Top) == top {
			l.Top = l.Top[:top-1]
		}
		l.Top = slices.Insert(l.Top, at, c)
	}
	return l
}

// WatcherError is what a watcher's Commit returned. It is the request's own failure: the device is well.
type WatcherError struct{ Err error }

func (e *WatcherError) Error() string { return e.Err.Error() }

func (e *WatcherError) Unwrap() error { return e.Err }

// generation is a request in progress. All tokens but the pending ones are in the lane's image.
type generation struct {
	runner  *model.Runner
	lane    int
	context int // most tokens of the sequence
	req     Request
	sampler *sampler
	out     Outcome
	pending []int32 // committed, but not yet run: at least one after the first draw
	drafts  int     // of the next round
	foreign int     // ids of the output that were inserted
	err     error   // of the watcher
}

func newGeneration(r *model.Runner, context int, req Request) *generation {
	g := &generation{runner: r, context: context, req: req, sampler: newSampler(req.Sampling, r.Model.Options.IDs)}
	g.out.Stats.PromptTokens = len(req.Prompt)
	g.out.Stats.AcceptedAt = make([]int, max(req.Draft, 0))
	return g
}

// length is the number of tokens of the sequence, pending ones included.
func (g *generation) length() int { return len(g.req.Prompt) + len(g.out.IDs) }

// limit is the most drafts of a round that still fit: with all of them accepted a round commits one token more.
func (g *generation) limit(drafts int) int {
	return max(0, min(drafts, g.req.MaxNew-len(g.out.IDs)-1, g.context-g.length()-1))
}

// want is what a pass must return, of the last row or of all: picks for greedy requests, likely ids for the others, logits for those that
// want probabilities.
func (g *generation) want(all bool) backend.Want {
	last, every := backend.WantLikely, backend.WantLikelyAll
	switch {
	case g.req.Logprobs:
		last, every = backend.WantLogits, backend.WantLogitsAll
	case g.req.Sampling.Greedy():
		last, every = backend.WantLast, backend.WantAll
	}
	if all {
		return every
	}
	return last
}

// choose draws the next token from the last row of a result.
func (g *generation) choose(res backend.LaneResult, p purpose) (int32, error) {
	if g.req.Sampling.Greedy() {
		return res.Picks[len(res.Picks)-1], nil
	}
	list, err := g.candidates(res, len(res.Picks)-1)
	if err != nil {
		return 0, err
	}
	return g.sampler.next(list, len(g.out.IDs), p), nil
}

// candidates are what a token is drawn from at a row of a result.
func (g *generation) candidates(res backend.LaneResult, row int) ([]candidate, error) {
	if len(res.Likely) == 0 {
		return g.sampler.filter(res.Logits[row]), nil
	}
	if list, ok := g.sampler.among(res.Likely[row]); ok {
		return list, nil
	}
	recalling.Lock() // lanes draw side by side
	logits, err := res.Recall(row)
	recalling.Unlock()
	if err != nil {
		return nil, err
	}
	return g.sampler.filter(logits), nil
}

var recalling sync.Mutex

// verdict asks the limits, the stop ids and the watcher about ids.
func (g *generation) verdict(ids []int32) Verdict {
	v := Verdict{Keep: len(ids)}
	for i, id := range ids {
		if slices.Contains(g.req.StopIDs, id) {
			v = Verdict{Keep: i + 1, Reason: Stop}
			break
		}
	}
	if g.req.Watcher != nil {
		if w := g.req.Watcher.Preview(ids[:v.Keep]); w.Keep < v.Keep || w.Reason != Continue || w.Insert != nil {
			v = w
		}
	}
	left := g.req.MaxNew - len(g.out.IDs)
	room := g.context - g.length()
	if limit := min(left, room); v.Keep+len(v.Insert) >= limit {
		why := Length
		if room < left {
			why = Context
		}
		if v.Keep > limit || v.Reason == Continue {
			v.Reason = why
		}
		v.Keep = min(v.Keep, limit)
		v.Insert = v.Insert[:min(len(v.Insert), limit-v.Keep)]
	}
	return v
}

// keep asks for a verdict on ids and commits what it leaves of them to the output. rows are the logits they were chosen from, needed only
// for log-probabilities. It returns how many of the ids were kept and what was inserted after them.
func (g *generation) keep(ids []int32, rows [][]float32) (int, []int32, error) {
	v := g.verdict(ids)
	if v.Keep+len(v.Insert) == 0 && v.Reason == Continue {
		return 0, nil, errors.New("engine: a watcher kept nothing and did not end the generation")
	}
	n := len(g.out.IDs)
	g.out.IDs = append(append(g.out.IDs, ids[:v.Keep]...), v.Insert...)
	kept := g.out.IDs[n:len(g.out.IDs):len(g.out.IDs)]
	g.foreign += len(v.Insert)
	if g.req.Logprobs {
		for i, id := range kept {
			l := Logprob{ID: id, Forced: true}
			if i < v.Keep {
				l = logprob(rows[i], g.sampler.ids, id, g.req.Top)
			}
			g.out.Logprobs = append(g.out.Logprobs, l)
		}
	}
	g.out.Stats.OutputTokens = len(g.out.IDs)
	g.sampler.count(kept...)
	g.out.Reason = v.Reason
	if g.req.Watcher != nil {
		if err := g.req.Watcher.Commit(kept); err != nil {
			return v.Keep, v.Insert, &WatcherError{err}
		}
	}
	return v.Keep, v.Insert, nil
}

// publish keeps a token that was drawn from the last row of a result, everything before it having run.
func (g *generation) publish(id int32, res backend.LaneResult) error {
	n, insert, err := g.keep([]int32{id}, res.Logits)
	g.pending = append(append(g.pending[:0], id)[:n], insert...)
	return err
}

// following are the tokens after each of the lane's carried rows.
func (g *generation) following() []int32 {
	at, prompt := g.runner.Dev.Lengths(backend.Lane(g.lane)), g.req.Prompt
	from, to, n := at.Drafter+1, at.Target+1, len(prompt)
	switch {
	case from >= n:
		return g.out.IDs[from-n : to-n]
	case to <= n:
		return prompt[from:to]
	}
	return slices.Concat(prompt[from:], g.out.IDs[:to-n])
}
