package engine

import (
	"errors"
	"math"
	"slices"
	"sync"

	"ninfer/internal/backend"
	"ninfer/internal/model"
)

// round runs one decoding round of several lanes of a device: drafts, one pass over the pending token and the drafts of each, and a
// commit of what stands. Every generation has exactly one pending token and says in drafts how many drafts it wants. The error is the
// device's; what a watcher returned is in the generation.
func round(r *model.Runner, gs []*generation) error {
	drafts, res, kind, err := pass(r, gs)
	if err != nil {
		return err
	}
	accepted, err := acceptAll(gs, res, drafts)
	if err != nil {
		return err
	}
	for i, g := range gs {
		kept := g.settle(res.Lanes[i], drafts[i], accepted[i])
		if kind == backend.Verify {
			if err := r.Dev.Commit(g.lane, kept); err != nil {
				return err
			}
		}
	}
	return nil
}

// seed runs the drafter over rows that wait for it: of lanes that draft over what is more than a round leaves, of the others where there is no
// room for a round's. A pass each time would cost lanes without drafts what plain decoding saves, and many a request ends without any.
func seed(r *model.Runner, gs []*generation) error {
	var c backend.Control
	rows := 0
	queue := func() error {
		if rows == 0 {
			return nil
		}
		err := r.Queue(backend.Seed, &c)
		c, rows = backend.Control{}, 0
		return err
	}
	for _, g := range gs {
		tokens := g.following()
		switch {
		case g.drafts == 0 || g.req.Drafter != nil:
			if r.Waits(len(tokens)) {
				continue
			}
		case r.Round > 0 && len(tokens) > r.Round:
			tokens = tokens[:len(tokens)-1]
		default:
			continue
		}
		for len(tokens) > 0 {
			n := min(len(tokens), max(1, r.Chunk))
			if rows+n > max(1, r.Chunk) || n < len(tokens) {
				if err := queue(); err != nil {
					return err
				}
			}
			c.Lanes = append(c.Lanes, backend.LaneRows{Lane: g.lane, Tokens: tokens[:n]})
			rows += n
			if tokens = tokens[n:]; len(tokens) > 0 {
				if err := queue(); err != nil {
					return err
				}
			}
		}
	}
	return queue()
}

// pass drafts and runs the pass over pending tokens and drafts.
func pass(r *model.Runner, gs []*generation) ([][]int32, backend.Result, backend.Kind, error) {
	if r.Model.Options.Drafter {
		if err := seed(r, gs); err != nil {
			return nil, backend.Result{}, 0, err
		}
	}
	if order, passes := together(r, gs); passes > 0 {
		drafts, res, err := behind(r, gs, order, passes)
		return drafts, res, backend.Verify, err
	}
	drafts, err := draft(r, gs)
	if err != nil {
		return nil, backend.Result{}, 0, err
	}
	kind := backend.Decode
	c := &backend.Control{}
	for i, g := range gs {
		rows := slices.Concat(g.pending, drafts[i])
		if len(rows) > 1 {
			kind = backend.Verify
		}
		at := r.Dev.Lengths(backend.Lane(g.lane)).Target
		c.Lanes = append(c.Lanes, backend.LaneRows{
			Lane: g.lane, Tokens: rows, Positions: model.Positions(at, len(rows)), Want: g.want(true),
		})
	}
	res, err := r.Launch(kind, c)
	return drafts, res, kind, err
}

// together says in which order lanes go, those that draft first, where as many passes as the longest wants suit all of these: then all drafts and
// what verifies them are queued at once, and a lane that wants fewer leaves some.
func together(r *model.Runner, gs []*generation) (order []int, passes int) {
	if !r.Model.Options.Drafter || !r.Chains() {
		return nil, 0
	}
	for i, g := range gs {
		if g.req.Drafter != nil {
			return nil, 0
		}
		if g.drafts > 0 {
			order = append(order, i)
			passes = max(passes, g.drafts)
		}
	}
	for i, g := range gs {
		switch {
		case g.drafts == 0:
			order = append(order, i)
		case g.limit(passes) < passes:
			return nil, 0
		}
	}
	return order, passes
}

// behind is pass where together says so.
func behind(r *model.Runner, gs []*generation, order []int, passes int) ([][]int32, backend.Result, error) {
	var first, all backend.Control
	for _, i := range order {
		g := gs[i]
		if g.drafts > 0 {
			first.Lanes = append(first.Lanes, backend.LaneRows{Lane: g.lane, Tokens: g.following(), Want: backend.WantLast})
		}
		at := r.Dev.Lengths(backend.Lane(g.lane)).Target
		all.Lanes = append(all.Lanes, backend.LaneRows{Lane: g.lane, Tokens: g.pending, Positions: model.Positions(at, 1+g.drafts), Want: g.want(true)})
	}
	picks, res, err := r.DraftAndVerify(&first, passes-1, &all)
	if err != nil {
		return nil, backend.Result{}, err
	}
	drafts, lanes := make([][]int32, len(gs)), make([]backend.LaneResult, len(gs))
	for j, i := range order {
		if lanes[i] = res.Lanes[j]; j < len(picks) {
			drafts[i] = picks[j][:gs[i].drafts]
		}
	}
	return drafts, backend.Result{Lanes: lanes}, nil
}

// acceptAll is accept for all generations. Those that draw look at every logit: they do so side by side.
func acceptAll(gs []*generation, res backend.Result, drafts [][]int32) ([][]int32, error) {
	accepted, failed := make([][]int32, len(gs)), make([]error, len(gs))
	var others sync.WaitGroup
	for i, g := range gs {
		accept := func() { accepted[i], failed[i] = g.accept(res.Lanes[i], drafts[i]) }
		if g.req.Sampling.Greedy() || i == len(gs)-1 {
			accept()
			continue
		}
		others.Go(accept)
	}
	others.Wait()
	return accepted, errors.Join(failed...)
}

// draft returns each generation's drafts: the first of all in one pass, together with the rows that the drafter has not seen, and
// then a pass for each further one; as many as all lanes want come in one go.
func draft(r *model.Runner, gs []*generation) ([][]int32, error) {
	drafts := make([][]int32, len(gs))
	if !r.Model.Options.Drafter {
		for i, g := range gs {
			drafts[i] = g.scripted()
		}
		return drafts, nil
	}
	for depth := 0; ; {
		var c backend.Control
		var lanes []int
		passes := math.MaxInt
		for i, g := range gs {
			rows := backend.LaneRows{Lane: g.lane, Want: backend.WantLast, Chain: depth > 0}
			switch {
			case depth == 0 && (g.drafts == 0 || g.req.Drafter != nil):
				drafts[i] = g.scripted()
				continue
			case depth == 0:
				rows.Tokens = g.following()
			case depth < g.drafts && g.req.Drafter == nil:
				rows.Tokens = drafts[i][depth-1 : depth]
			default:
				continue
			}
			c.Lanes = append(c.Lanes, rows)
			lanes = append(lanes, i)
			passes = min(passes, g.drafts-depth)
		}
		if len(lanes) == 0 {
			return drafts, nil
		}
		picks, err := r.Drafts(&c, passes-1)
		if err != nil {
			return nil, err
		}
		for j, i := range lanes {
			drafts[i] = append(drafts[i], picks[j]...)
		}
		depth += passes
	}
}

// scripted are drafts that do not come from the model.
func (g *generation) scripted() []int32 {
	if g.drafts == 0 || g.req.Drafter == nil {
		return nil
	}
	return g.req.Drafter(g.out.IDs, g.drafts)
}

// settle keeps what stands of a round, given what was accepted, and returns how many of its rows the image keeps: those whose successor is in the output. The last
// token kept, and what was inserted after it, has yet to run.
func (g *generation) settle(res backend.LaneResult, drafts, accepted []int32) int {
	kept, insert, err := g.keep(accepted, res.Logits)
	g.err = err
	if g.req.Draft > 0 {
		if len(drafts) > 0 {
			g.out.Stats.Rounds++
		} else {
			g.out.Stats.FallbackSteps++
		}
	}
	g.out.Stats.Drafted += len(drafts)
	for i := range min(kept, len(accepted)-1) {
		g.out.Stats.Accepted++
		g.out.Stats.AcceptedAt[i]++
	}
	rows := kept
	if len(insert) > 0 || len(drafts) == 0 {
		rows = max(kept, 1) // the pending token has run, and it is not the last one any more, or cannot be cut
	}
	sequence := slices.Concat(g.pending, accepted[:kept], insert)
	g.pending = append(g.pending[:0], sequence[rows:]...)
	return rows
}

// accept returns the drafts that stand and the token after them. An error is the device's.
func (g *generation) accept(res backend.LaneResult, drafts []int32) ([]int32, error) {
	if g.req.Sampling.Greedy() {
		n := 0
		for n < len(drafts) && drafts[n] == res.Picks[n] {
			n++
		}
		return append(drafts[:n:n], res.Picks[n]), nil
	}
	// Penalties count earlier drafts of the round as generated, as they will be if they are kept.
	position := len(g.out.IDs)
	for i, d := range drafts {
		list, err := g.candidates(res, i)
		if err != nil {
			return nil, err
		}
		ok, instead := g.sampler.judge(list, d, position+i)
		if !ok {
			g.sampler.uncount(drafts[:i]...)
			return append(drafts[:i:i], instead), nil
		}
		g.sampler.count(d)
	}
	why := drawBonus
	if len(drafts) == 0 {
		why = drawDecode
	}
	list, err := g.candidates(res, len(drafts))
	if err != nil {
		return nil, err
	}
	bonus := g.sampler.next(list, position+len(drafts), why)
	g.sampler.uncount(drafts...)
	return append(drafts[:len(drafts):len(drafts)], bonus), nil
}
