package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"ninfer/internal/engine"
)

// Through is a measurement of decoding through the engine's queue: so many requests at once, each with a prompt that is read.
type Through struct {
	Prompt   int // tokens
	Batch    int // requests, as many as the engine has lanes
	Steps    int // decoding rounds of all of them together, at least
	Draft    int
	Sampling engine.Sampling
}

// ThroughRow is what Through found.
type ThroughRow struct {
	Microseconds float64 `json:"us"` // of a round of all requests: median of the gaps between the tokens of the last one
	Mean         float64 `json:"us_mean"`
	Rounds       int     `json:"rounds"` // that were looked at
}

// stamps notes when a request's tokens are committed.
type stamps struct {
	mu sync.Mutex
	at []time.Time
}

func (s *stamps) Preview(ids []int32) engine.Verdict { return engine.Verdict{Keep: len(ids)} }

func (s *stamps) Commit([]int32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at = append(s.at, time.Now())
	return nil
}

// Measure runs the requests to their end. The rounds that count are those between the first token of the last request to start and the
// first end of any.
func (t Through) Measure(ctx context.Context, q *engine.Queue, corpus []int32) (ThroughRow, error) {
	var row ThroughRow
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	prompt := make([]int32, t.Prompt)
	watched := make([]*stamps, t.Batch)
	tickets := make([]*engine.Ticket, t.Batch)
	for i := range tickets {
		slot, err := q.Reserve(ctx)
		if err != nil {
			return row, err
		}
		defer slot.Release()
		for j := range prompt {
			prompt[j] = corpus[(i*977+j)%len(corpus)]
		}
		watched[i] = &stamps{}
		s := t.Sampling
		s.Seed = uint64(i)
		// Requests read their prompts one after the other, and those that have read theirs go on between the chunks.
		req := engine.Request{Prompt: slices.Clone(prompt), MaxNew: t.MostNew(), Sampling: s, Draft: t.Draft, Watcher: watched[i]}
		if tickets[i], err = slot.Submit(req); err != nil {
			return row, err
		}
	}
	for _, k := range tickets {
		out, err := k.Outcome()
		if err == nil && out.Reason != engine.Length {
			err = fmt.Errorf("ended after %d tokens: %s", len(out.IDs), out.Reason)
		}
		if err != nil {
			return row, fmt.Errorf("bench: through the engine: %w", err)
		}
	}
	var from, to time.Time
	var last *stamps
	for i, s := range watched {
		if s.at[0].After(from) {
			from, last = s.at[0], s
		}
		if end := s.at[len(s.at)-1]; i == 0 || end.Before(to) {
			to = end
		}
	}
	var gaps []float64
	for i := 1; i < len(last.at) && !last.at[i].After(to); i++ {
		gaps = append(gaps, float64(last.at[i].Sub(last.at[i-1]).Nanoseconds())/1000)
	}
	if len(gaps) < t.Steps {
		return row, errors.New("bench: through the engine: the requests did not overlap for long enough")
	}
	for _, g := range gaps {
		row.Mean += g / float64(len(gaps))
	}
	slices.Sort(gaps)
	row.Microseconds, row.Rounds = gaps[len(gaps)/2], len(gaps)
	return row, nil
}

// MostNew is the output of a request: the steps, and what it generates while later ones read their prompts, a round after each chunk of at
// least 128 tokens.
func (t Through) MostNew() int { return t.Steps + 2 + t.Batch*(t.Prompt/128+2)*(t.Draft+1) }
