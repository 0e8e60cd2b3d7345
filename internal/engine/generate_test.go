package engine_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/engine"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

// single is a batch with its runner.
type single struct {
	*engine.Batch
	runner *model.Runner
}

func newSingle(t testing.TB, m *model.Model) single { return newBatch(t, m, 1, 160) }

func newBatch(t testing.TB, m *model.Model, lanes, context int) single {
	return newOn(t, m, lanes, context, cpu.NewFast)
}

func newOn(t testing.TB, m *model.Model, lanes, context int, open func(cpu.Options) backend.Device) single {
	dev := open(cpu.Options{States: m.States, Lanes: lanes, Tokens: 160, Verify: 6, Carry: 64, Threads: 1})
	t.Cleanup(func() { dev.Close() })
	r := model.NewRunner(m, dev, 32)
	b, err := engine.NewBatch(r, engine.BatchOptions{Limits: engine.Limits{Lanes: lanes, Pages: 3 * lanes, Pending: 100}, Context: context})
	if err != nil {
		t.Fatal(err)
	}
	return single{b, r}
}

func generate(t testing.TB, s single, r engine.Request) engine.Outcome {
	t.Helper()
	out, err := s.Run(context.Background(), r)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// truth drafts the known continuation, its i-th draft corrupted where wrong says so. Random weights never agree with their target, so
// this is how every number of accepted drafts occurs.
func truth(known []int32, wrong func(round, i int) bool) func([]int32, int) []int32 {
	round := 0
	return func(output []int32, k int) []int32 {
		d := make([]int32, k)
		for i := range d {
			d[i] = 13
			if at := len(output) + i; at < len(known) {
				d[i] = known[at]
			}
			if wrong(round, i) {
				d[i] = (d[i] + 1) % 480
			}
		}
		round++
		return d
	}
}

// Drafting changes nothing but the number of passes: for every number of drafts accepted, and with the end inside a round by stop id,
// output limit, context limit and watcher.
func TestDraftedEqualsPlain(t *testing.T) {
	m := modeltest.Micro(t)
	rng := rand.New(rand.NewPCG(5, 5))
	prompt := make([]int32, 9)
	for i := range prompt {
		prompt[i] = int32(rng.IntN(480))
	}
	plain := generate(t, newSingle(t, m), engine.Request{Prompt: prompt, MaxNew: 40}).IDs
	if len(plain) != 40 {
		t.Fatalf("%d tokens", len(plain))
	}
	for k := 1; k <= 5; k++ {
		seen := map[int]bool{}
		for n := range k + 1 {
			l := newSingle(t, m)
			out := generate(t, l, engine.Request{Prompt: prompt, MaxNew: 40, Draft: k, Drafter: truth(plain, func(_, i int) bool { return i >= n })})
			if !slices.Equal(out.IDs, plain) {
				t.Errorf("k %d, %d accepted: %v, plain is %v", k, n, out.IDs, plain)
			}
			if s := out.Stats; s.Rounds > 0 && s.Accepted >= s.Rounds*n-n {
				seen[n] = true
			}
		}
		if len(seen) != k+1 {
			t.Errorf("k %d: only %v accepted counts occurred", k, seen)
		}
	}
	// Every possible end.
	for end := 1; end <= 14; end++ {
		if slices.Contains(plain[:end-1], plain[end-1]) {
			continue // the stop id would end it earlier
		}
		for _, r := range []engine.Request{
			{Prompt: prompt, MaxNew: end},
			{Prompt: prompt, MaxNew: 40, StopIDs: []int32{plain[end-1]}},
			{Prompt: prompt, MaxNew: 40, Watcher: &cutter{at: end}},
		} {
			want := engine.Stop
			if r.MaxNew == end {
				want = engine.Length
			}
			r.Draft = 3
			l := newSingle(t, m)
			r.Drafter = truth(plain, func(round, i int) bool { return i >= 3-round%2 })
			out := generate(t, l, r)
			if !slices.Equal(out.IDs, plain[:end]) || out.Reason != want {
				t.Errorf("end %d: %d tokens, reason %s, want %s", end, len(out.IDs), out.Reason, want)
			}
			// The state is that of plain decoding: going on from it gives the plain continuation.
			lengths := l.runner.Dev.Lengths
			if got := lengths(laneZero).Target; got != len(prompt)+end-1 {
				t.Errorf("end %d: image of %d tokens, want %d", end, got, len(prompt)+end-1)
			}
			rest := continueFrom(t, l, plain[end-1], 6)
			if !slices.Equal(rest, plain[end:end+6]) {
				t.Errorf("end %d: continues with %v, want %v", end, rest, plain[end:end+6])
			}
		}
	}
	l := newBatch(t, m, 1, len(prompt)+7)
	out := generate(t, l, engine.Request{Prompt: prompt, MaxNew: 40, Draft: 3, Drafter: truth(plain, func(int, int) bool { return false })})
	if !slices.Equal(out.IDs, plain[:7]) || out.Reason != engine.Context {
		t.Errorf("context limit: %d tokens, %s", len(out.IDs), out.Reason)
	}
}

// cutter is a watcher that keeps so many tokens.
type cutter struct{ at, seen int }

func (c *cutter) Preview(ids []int32) engine.Verdict {
	if c.seen+len(ids) >= c.at {
		return engine.Verdict{Keep: c.at - c.seen, Reason: engine.Stop}
	}
	return engine.Verdict{Keep: len(ids)}
}

func (c *cutter) Commit(ids []int32) error {
	c.seen += len(ids)
	return nil
}

// inserter puts text after the at-th token.
type inserter struct {
	at   int
	ids  []int32
	seen []int32
}

func (c *inserter) Preview(ids []int32) engine.Verdict {
	if n := c.at - len(c.seen); n >= 1 && n <= len(ids) {
		return engine.Verdict{Keep: n, Insert: c.ids}
	}
	return engine.Verdict{Keep: len(ids)}
}

func (c *inserter) Commit(ids []int32) error {
	c.seen = append(c.seen, ids...)
	return nil
}

// Inserted tokens are part of the sequence as if the model had said them, drafting or not.
func TestInsert(t *testing.T) {
	m := modeltest.Micro(t)
	prompt := []int32{50, 60, 70, 80, 90}
	plain := generate(t, newSingle(t, m), engine.Request{Prompt: prompt, MaxNew: 12}).IDs
	insert := []int32{20, 21, 22}
	for at := 1; at < 8; at++ {
		after := generate(t, newSingle(t, m), engine.Request{Prompt: slices.Concat(prompt, plain[:at], insert), MaxNew: 6}).IDs
		want := slices.Concat(plain[:at], insert, after)
		for _, draft := range []int{0, 3} {
			w := &inserter{at: at, ids: insert}
			r := engine.Request{Prompt: prompt, MaxNew: len(want), Watcher: w, Draft: draft}
			if draft > 0 {
				r.Drafter = truth(plain, func(round, i int) bool { return i > round%3 })
			}
			out := generate(t, newSingle(t, m), r)
			if !slices.Equal(out.IDs, want) || !slices.Equal(w.seen, want) {
				t.Errorf("insert after %d, draft %d: %v, want %v", at, draft, out.IDs, want)
			}
		}
	}
}

// A watcher may replace what the model said altogether, drafting or not.
func TestReplace(t *testing.T) {
	m := modeltest.Micro(t)
	prompt := []int32{50, 60, 70, 80, 90}
	plain := generate(t, newSingle(t, m), engine.Request{Prompt: prompt, MaxNew: 12}).IDs
	for at := range 6 {
		after := generate(t, newSingle(t, m), engine.Request{Prompt: slices.Concat(prompt, plain[:at], []int32{33}), MaxNew: 6}).IDs
		want := slices.Concat(plain[:at], []int32{33}, after)
		for _, draft := range []int{0, 1, 3} {
			out := generate(t, newSingle(t, m), engine.Request{Prompt: prompt, MaxNew: len(want), Watcher: &replacer{at: at}, Draft: draft})
			if !slices.Equal(out.IDs, want) {
				t.Errorf("token %d, draft %d: %v, want %v", at, draft, out.IDs, want)
			}
		}
	}
}

// replacer puts 33 in the place of the at-th token.
type replacer struct{ at, seen int }

func (r *replacer) Preview(ids []int32) engine.Verdict {
	if n := r.at - r.seen; n >= 0 && n < len(ids) {
		return engine.Verdict{Keep: n, Insert: []int32{33}}
	}
	return engine.Verdict{Keep: len(ids)}
}

func (r *replacer) Commit(ids []int32) error {
	r.seen += len(ids)
	return nil
}

func TestGenerateRefuses(t *testing.T) {
	m := modeltest.Micro(t)
	l := newSingle(t, m)
	for name, r := range map[string]engine.Request{
		"no prompt":    {MaxNew: 1},
		"output":       {Prompt: []int32{1}, MaxNew: -1},
		"drafts":       {Prompt: []int32{1}, MaxNew: 1, Draft: -1},
		"too long":     {Prompt: make([]int32, 160), MaxNew: 1},
		"far too long": {Prompt: make([]int32, 161)},
		"beyond vocab": {Prompt: []int32{512}, MaxNew: 1},
		"negative":     {Prompt: []int32{-1}, MaxNew: 1},
	} {
		if _, err := l.Run(context.Background(), r); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	out, err := l.Run(ctx, engine.Request{Prompt: []int32{20, 21}, MaxNew: 5})
	if err != nil || out.Reason != engine.Cancelled || len(out.IDs) != 0 {
		t.Errorf("cancelled: %v, %v", out, err)
	}
}

// Without output only the prompt runs, also one that fills the context; progress is told from 0 on, chunk by chunk.
func TestPromptOnly(t *testing.T) {
	l := newSingle(t, modeltest.Micro(t))
	for _, n := range []int{1, 31, 32, 33, 160} {
		var seen []int
		out := generate(t, l, engine.Request{Prompt: make([]int32, n), Progress: func(done int) { seen = append(seen, done) }})
		if len(out.IDs) != 0 || out.Reason != engine.Length || l.runner.Dev.Lengths(laneZero).Target != n {
			t.Errorf("%d tokens: %+v", n, out)
		}
		var want []int
		for done := 0; done < n; done += 32 {
			want = append(want, done)
		}
		if want = append(want, n); !slices.Equal(seen, want) {
			t.Errorf("%d tokens: progress %v, want %v", n, seen, want)
		}
	}
}

// failing is a watcher that cannot go on.
type failing struct{ err error }

func (f failing) Preview(ids []int32) engine.Verdict { return engine.Verdict{Keep: len(ids)} }
func (f failing) Commit([]int32) error               { return f.err }

func TestWatcherError(t *testing.T) {
	cause := errors.New("no room")
	_, err := newSingle(t, modeltest.Micro(t)).Run(context.Background(), engine.Request{Prompt: []int32{20}, MaxNew: 3, Watcher: failing{cause}})
	var w *engine.WatcherError
	if !errors.As(err, &w) || !errors.Is(err, cause) {
		t.Errorf("%v", err)
	}
}

// The model's own drafter: greedy output is that of plain decoding.
func TestModelDrafter(t *testing.T) {
	m := modeltest.Micro(t)
	for seed := range int32(3) {
		prompt := []int32{20 + seed, 300, 6, 41}
		plain := generate(t, newSingle(t, m), engine.Request{Prompt: prompt, MaxNew: 16}).IDs
		for _, k := range []int{1, 3, 5} {
			out := generate(t, newSingle(t, m), engine.Request{Prompt: prompt, MaxNew: 16, Draft: k})
			if !slices.Equal(out.IDs, plain) {
				t.Errorf("k %d: %v, plain is %v", k, out.IDs, plain)
			}
			if out.Stats.Rounds == 0 || out.Stats.Drafted == 0 {
				t.Errorf("k %d: no rounds: %+v", k, out.Stats)
			}
		}
	}
}

var laneZero = backend.Lane(0)

// continueFrom decodes on from a lane's image whose last token has not run.
func continueFrom(t testing.TB, l single, last int32, n int) []int32 {
	t.Helper()
	var out []int32
	at := l.runner.Dev.Lengths(laneZero).Target
	for i := range n {
		res, err := l.runner.Launch(backend.Prefill, &backend.Control{Lanes: []backend.LaneRows{
			{Tokens: []int32{last}, Positions: model.Positions(at+i, 1), Want: backend.WantLast},
		}})
		if err != nil {
			t.Fatal(err)
		}
		last = res.Lanes[0].Picks[0]
		out = append(out, last)
	}
	return out
}
