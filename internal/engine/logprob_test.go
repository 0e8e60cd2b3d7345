package engine_test

import (
	"math"
	"slices"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/engine"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

// Log-probabilities are those of the prompt's logits, drafted or not, whatever was drawn; inserted ids have none.
func TestLogprobs(t *testing.T) {
	m := modeltest.Micro(t)
	prompt := []int32{50, 60, 70, 80, 90}
	insert := []int32{20, 21}
	for _, draft := range []int{0, 3} {
		s := newSingle(t, m)
		out := generate(t, s, engine.Request{
			Prompt: prompt, MaxNew: 12, Sampling: engine.Sampling{Temperature: 1.2, Presence: 1, Seed: 3}, Draft: draft,
			Logprobs: true, Top: 4, Watcher: &inserter{at: 5, ids: insert},
		})
		if len(out.IDs) != 12 || len(out.Logprobs) != 12 {
			t.Fatalf("%d ids, %d log-probabilities", len(out.IDs), len(out.Logprobs))
		}
		// The same sequence as a prompt: row i has the logits of what follows it.
		check := newSingle(t, m)
		all := slices.Concat(prompt, out.IDs)
		res, err := check.runner.Launch(backend.Prefill, &backend.Control{Lanes: []backend.LaneRows{
			{Tokens: all, Positions: model.Positions(0, len(all)), Want: backend.WantLogitsAll},
		}})
		if err != nil {
			t.Fatal(err)
		}
		for i, l := range out.Logprobs {
			if l.ID != out.IDs[i] {
				t.Errorf("%d: id %d, want %d", i, l.ID, out.IDs[i])
			}
			if forced := i == 5 || i == 6; l.Forced != forced || forced && l.Value != 0 {
				t.Errorf("%d: forced %v with %g", i, l.Forced, l.Value)
			}
			if l.Forced {
				continue
			}
			row := res.Lanes[0].Logits[len(prompt)+i-1][:480]
			var sum float64
			for _, v := range row {
				sum += math.Exp(float64(v))
			}
			if want := float64(row[l.ID]) - math.Log(sum); math.Abs(l.Value-want) > 1e-6 {
				t.Errorf("%d: %g, want %g", i, l.Value, want)
			}
			order := make([]int32, 480)
			for j := range order {
				order[j] = int32(j)
			}
			slices.SortStableFunc(order, func(a, b int32) int {
				switch {
				case row[a] > row[b]:
					return -1
				case row[a] < row[b]:
					return 1
				}
				return 0
			})
			for j, c := range l.Top {
				if c.ID != order[j] || math.Abs(c.Value-(float64(row[c.ID])-math.Log(sum))) > 1e-6 {
					t.Errorf("%d: candidate %d is %+v, want id %d", i, j, c, order[j])
				}
			}
			if len(l.Top) != 4 {
				t.Errorf("%d: %d candidates", i, len(l.Top))
			}
		}
	}
}
