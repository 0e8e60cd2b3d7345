package engine_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"ninfer/internal/backend/cpu"
	"ninfer/internal/engine"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

// A batch's activity agrees at every moment with what its requests are told, and its sums with their outcomes in the end. It can be
// read while a pass runs.
func TestActivity(t *testing.T) {
	m := modeltest.Micro(t)
	const lanes, pages, most = 3, 5, 128
	dev := cpu.NewFast(cpu.Options{States: m.States, Lanes: lanes, Tokens: most, Verify: 6, Carry: 64})
	defer dev.Close()
	b, err := engine.NewBatch(model.NewRunner(m, dev, 16), engine.BatchOptions{
		Limits: engine.Limits{Lanes: lanes, Pages: pages, Pending: 20, GapRows: 8, Passes: 1}, Context: most,
	})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := b.Activity(), (engine.Activity{Lanes: lanes, Pages: pages}); got != want {
		t.Fatalf("at first %+v, want %+v", got, want)
	}
	// Another goroutine always sees a state that can be.
	ctx, cancel := context.WithCancel(context.Background())
	var reader sync.WaitGroup
	reader.Go(func() {
		for ctx.Err() == nil {
			a := b.Activity()
			if a.Running != a.Prefilling+a.DecodeReady || a.Prefilling < 0 || a.DecodeReady < 0 || a.Running > lanes || a.Reserved > pages || a.Reserved < a.Running {
				t.Errorf("%+v", a)
				return
			}
		}
	})
	defer reader.Wait()
	defer cancel()

	type state struct {
		prompt, pages int
		running       bool
		ready         bool // the prompt has run
		watcher       *inserter
	}
	live, begun := map[int]*state{}, time.Now()
	var want engine.Activity
	check := func(when string) {
		t.Helper()
		want.Lanes, want.Pages, want.Running, want.Waiting, want.Prefilling, want.DecodeReady, want.Reserved = lanes, pages, 0, 0, 0, 0, 0
		for _, s := range live {
			switch {
			case !s.running:
				want.Waiting++
				continue
			// Rows of an insertion are like a prompt's, from its commit to the next token's.
			case s.ready && (s.watcher == nil || len(s.watcher.seen) != s.watcher.at+len(s.watcher.ids)):
				want.DecodeReady++
			default:
				want.Prefilling++
			}
			want.Running++
			want.Reserved += s.pages
		}
		if got := b.Activity(); got.Running != want.Running || got.Waiting != want.Waiting || got.Prefilling != want.Prefilling || got.DecodeReady != want.DecodeReady || got.Reserved != want.Reserved {
			t.Fatalf("%s: %+v, want %+v", when, got, want)
		}
	}
	insert := []int32{20, 21}
	drafted := 0
	for i := range 12 {
		prompt := make([]int32, 10+9*i)
		for j := range prompt {
			prompt[j] = int32(50 + (i*j)%400)
		}
		output := 12
		s := &state{prompt: len(prompt), pages: (len(prompt) + output + 63) / 64}
		req := engine.Request{Prompt: prompt, MaxNew: output}
		req.Progress = func(done int) {
			if done > 0 {
				check("in a pass") // the chunk is not behind it before its unit ends
			}
			s.ready = done == s.prompt
		}
		switch {
		case i%3 == 1:
			req.Draft = 2
			req.Drafter = func(out []int32, k int) []int32 {
				drafted++
				if a := b.Activity(); a.DecodeReady < 1 || a.Lanes != lanes { // inside a round: nothing may be locked
					t.Errorf("in a round %+v", a)
				}
				return make([]int32, k)
			}
		case i%3 == 2 && i < 9:
			s.watcher = &inserter{at: 5, ids: insert}
			req.Watcher = s.watcher
		}
		gone, leave := context.WithCancel(ctx)
		defer leave()
		err := b.Add(gone, engine.RequestID(i+1), req, func() { s.running = true; want.PromptTokens += int64(s.prompt) }, func(out engine.Outcome, err error) {
			if err != nil {
				t.Error(err)
			}
			delete(live, i)
			if i == 10 {
				if out.Reason != engine.Cancelled || s.running {
					t.Errorf("the request that left: %+v", out)
				}
				return
			}
			st, before := out.Stats, want.DecodeTokens
			want.PrefillTokens += int64(s.prompt)
			want.GeneratedTokens += int64(len(out.IDs))
			want.DecodeTokens += int64(len(out.IDs) - 1) // the first comes from the prompt's last row
			if req.Watcher != nil {
				want.PrefillTokens += int64(len(insert) + 1) // with the token before them, which had not run
				want.DecodeTokens -= int64(len(insert) + 1)  // and the next one comes from their last row
			}
			if st.Rounds+st.FallbackSteps > 0 {
				want.DecodeLanes += int64(st.Rounds + st.FallbackSteps)
			} else { // a token a round
				want.DecodeLanes += want.DecodeTokens - before
			}
			want.Rounds += int64(st.Rounds)
			want.FallbackSteps += int64(st.FallbackSteps)
			want.Drafted += int64(st.Drafted)
			want.Accepted += int64(st.Accepted)
			if len(out.IDs) != output {
				t.Errorf("request %d: %d ids", i, len(out.IDs))
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		live[i] = s
		check("added")
		if i == 10 {
			leave()
		}
	}
	busy := true
	for steps := 0; busy; steps++ {
		if busy, err = b.Step(); err != nil || steps > 1000 {
			t.Fatal(steps, err)
		}
		check("stepped")
	}
	check("in the end")
	got := b.Activity()
	if took := time.Since(begun); got.DeviceWait <= 0 || got.PromptWork <= 0 || got.RoundWork <= 0 || got.DeviceWait+got.PromptWork+got.RoundWork > took {
		t.Errorf("%+v: times in %v", got, took)
	}
	got.DeviceWait, got.PromptWork, got.RoundWork = 0, 0, 0
	if got.DecodeUnits > got.DecodeLanes || got.DecodeUnits < got.DecodeLanes/lanes {
		t.Errorf("%d rounds of %d lanes together", got.DecodeUnits, got.DecodeLanes)
	}
	want.DecodeUnits = got.DecodeUnits
	if got != want {
		t.Errorf("in the end %+v, want %+v", got, want)
	}
	if drafted == 0 || want.Drafted == 0 || want.FallbackSteps == 0 || want.Rounds == 0 {
		t.Errorf("%+v: the test does not see drafting", want)
	}
}
