package selftest

import (
	"fmt"
	"slices"

	"ninfer/internal/backend"
	"ninfer/internal/model"
)

// Stored is how a backend is compared that keeps activations in BF16. Rounding alone moves logits further from the recorded ones than any
// error of a kernel would, and flips close decisions, so the backend is held against a device that rounds where it does: closely with that
// device's decisions forced on it, and free running by statistics over all cases.
type Stored struct {
	// Open returns the device that rounds alike.
	Open func(m *model.Model, tokens int) (backend.Device, error)
	// Bounds of rows of logits with forced decisions: of the worst row, of the median row, and of the worst row of the drafter.
	Worst, Median, Draft float64
	// Bounds of free running rows: the median row's distance from the recorded one, and how many rows are within Near at least. Where the
	// device that rounds alike is worse itself, its own median and share are the bounds, give or take a quarter and eight in a hundred: a decision
	// that falls the other way goes on through the rows after it, so three oracles that differed in one rounding had 57 to 64 % of a model's rows near.
	FreeMedian, Near, Share float64
}

// free collects the distances of free running rows from the recorded ones: of the backend and of the device that rounds alike.
type free struct{ own, alike []float64 }

// distances are those of corresponding rows.
func distances(got, want [][]float32) ([]float64, error) {
	if len(got) != len(want) {
		return nil, fmt.Errorf("%d rows, need %d", len(got), len(want))
	}
	var list []float64
	for r := range want {
		list = append(list, distance(got[r], want[r]))
	}
	return list, nil
}

// spread is the median of a list, its largest member, and the share of those up to near.
func spread(list []float64, near float64) (median, worst, share float64) {
	if len(list) == 0 {
		return 0, 0, 1
	}
	sorted := slices.Sorted(slices.Values(list))
	for _, v := range sorted {
		if v <= near {
			share++
		}
	}
	return sorted[len(sorted)/2], sorted[len(sorted)-1], share / float64(len(sorted))
}

// stored compares a case as Stored says.
func (t *test) stored(all *free) error {
	if t.c.chat() {
		t.conversation()
	}
	s := t.b.Stored
	n := len(t.c.Tokens)
	alike, err := s.Open(t.s.Model, n+len(t.c.Greedy)+len(t.c.Drafts)+1)
	if err != nil {
		return err
	}
	defer alike.Close()
	ref := model.NewRunner(t.s.Model, alike, n)
	trace := &backend.Trace{}
	want, err := ref.Prompt(backend.LaneRows{Tokens: t.c.Tokens, Want: backend.WantLogitsAll, Trace: trace})
	if err != nil {
		return err
	}
	wantDrafts, did, err := t.chained(ref, nil)
	if err != nil {
		return err
	}

	r, err := t.open(n)
	if err != nil {
		return err
	}
	defer r.Dev.Close()
	got, err := r.Prompt(backend.LaneRows{
		Tokens: t.c.Tokens, Want: backend.WantLogitsAll, Force: &backend.Force{Experts: trace.Experts, Selected: trace.Selected},
	})
	if err != nil {
		return err
	}
	list, err := distances(got.Logits, want.Logits)
	if err != nil {
		return err
	}
	median, most, _ := spread(list, 0)
	t.part("forced %.1e median %.1e", most, median)
	if !(most <= s.Worst) || !(median <= s.Median) {
		t.broken("logits with forced decisions off by %.2g, median %.2g; bounds are %.2g and %.2g", most, median, s.Worst, s.Median)
	}
	gotDrafts, _, err := t.chained(r, did)
	if err != nil {
		return err
	}
	t.within("drafts", s.Draft, func() (float64, error) { return worst(gotDrafts, wantDrafts) })
	return t.running(all, want.Logits, trace)
}

// chained are the drafts after the recorded next token, each from the recorded one before it, with decisions to force, or to tell.
func (t *test) chained(r *model.Runner, force []*backend.Force) (rows [][]float32, did []*backend.Force, err error) {
	next := t.c.Next
	for i, d := range t.c.Drafts {
		in := backend.LaneRows{Tokens: []int32{next}, Want: backend.WantLogits, Chain: i > 0}
		if force != nil {
			in.Force = force[i]
		} else {
			in.Trace = &backend.Trace{}
		}
		res, err := r.Launch(backend.Draft, &backend.Control{Lanes: []backend.LaneRows{in}})
		if err != nil {
			return nil, nil, err
		}
		rows = append(rows, slices.Clone(res.Lanes[0].Logits[0]))
		if in.Trace != nil {
			did = append(did, &backend.Force{Experts: in.Trace.Experts, Selected: in.Trace.Selected})
		}
		next = d
	}
	return rows, did, nil
}

// running runs the case without forced decisions: prompt, then the recorded continuation.
func (t *test) running(all *free, alike [][]float32, trace *backend.Trace) error {
	n := len(t.c.Tokens)
	want, err := t.g.rows(t.line.Case+".logits", n)
	if err != nil {
		return err
	}
	r, err := t.open(n)
	if err != nil {
		return err
	}
	defer r.Dev.Close()
	own := &backend.Trace{}
	got, err := r.Prompt(backend.LaneRows{Tokens: t.c.Tokens, Want: backend.WantLogitsAll, Trace: own})
	if err != nil {
		return err
	}
	list, err := distances(got.Logits, want)
	if err != nil {
		return err
	}
	all.own = append(all.own, list...)
	median, _, share := spread(list, t.b.Stored.Near)
	t.part("free median %.1e, %.0f%% near", median, 100*share)
	if list, err = distances(alike, want); err != nil {
		return err
	}
	all.alike = append(all.alike, list...)
	routed, chosen, rows := 0, 0, 0
	for l := range trace.Experts {
		routed += differing(trace.Experts[l], own.Experts[l], slices.Equal[[]int32])
		rows += len(trace.Experts[l])
	}
	picked := 0
	for l := range trace.Selected {
		chosen += differing(trace.Selected[l], own.Selected[l], slices.Equal[[]bool])
		picked += len(trace.Selected[l])
	}
	t.part("routing %d/%d selection %d/%d differ", routed, rows, chosen, picked)

	// The recorded continuation, token by token: where another one wins, by how little.
	last, equal := got.Logits[n-1], 0
	for i, id := range t.c.Greedy {
		best, v := greedy(last, t.s.Model.Options.IDs)
		if best == id {
			equal++
		} else {
			t.part("token %d is %d, not %d (margin %.2g, step %.2g)", i, best, id, t.c.Margin[i], bf16Step(v))
		}
		if i+1 == len(t.c.Greedy) {
			break
		}
		res, err := r.Launch(backend.Decode, &backend.Control{Lanes: []backend.LaneRows{
			{Tokens: []int32{id}, Positions: model.Positions(n+i, 1), Want: backend.WantLogits},
		}})
		if err != nil {
			return err
		}
		last = slices.Clone(res.Lanes[0].Logits[0])
	}
	t.part("greedy %d/%d", equal, len(t.c.Greedy))
	return nil
}

// statistics is the line about the free running rows of all cases.
func (b *Backend) statistics(all *free) Line {
	l := Line{Backend: b.Name, Case: "all rows"}
	s := b.Stored
	typical, _, most := spread(all.alike, s.Near)
	median, worst, share := spread(all.own, s.Near)
	l.Parts = append(l.Parts, fmt.Sprintf("%d rows: median %.1e, worst %.1e, %.1f%% within %g; the oracle that rounds alike: median %.1e, %.1f%%",
		len(all.own), median, worst, 100*share, s.Near, typical, 100*most))
	if need, limit := min(s.Share, most-0.08), max(s.FreeMedian, 1.25*typical); !(median <= limit) || share < need {
		l.Broken = append(l.Broken, fmt.Sprintf("median %.2g or the %.1f%% near rows: bounds are %.2g and %.1f%%", median, 100*share, limit, 100*need))
	}
	return l
}
