package engine

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// simulate plays rounds against drafts that stand with a probability that changes with time, and a machine whose rounds cost base
// plus so much a draft. It returns tokens per second.
func simulate(choose func() int, observe func(k, accepted int, seconds float64), acceptance func(round int) float64, perDraft, noise float64, seed uint64) float64 {
	rng := rand.New(rand.NewPCG(seed, 4))
	var tokens, seconds float64
	for round := range 6000 {
		k := choose()
		n := 0
		for n < k && rng.Float64() < acceptance(round) {
			n++
		}
		t := (1 + perDraft*float64(k)) * (1 + noise*rng.NormFloat64())
		tokens += float64(n + 1)
		seconds += t
		observe(k, n, t)
	}
	return tokens / seconds
}

// On steady and changing acceptance, with cheap and dear drafts, adapting is at most 3 % behind the best fixed length.
func TestDraftPolicy(t *testing.T) {
	for name, acceptance := range map[string]func(int) float64{
		"never":    func(int) float64 { return 0.02 },
		"rarely":   func(int) float64 { return 0.3 },
		"often":    func(int) float64 { return 0.75 },
		"always":   func(int) float64 { return 0.97 },
		"changing": func(r int) float64 { return []float64{0.9, 0.1, 0.6, 0.95}[r/300%4] },
	} {
		for _, perDraft := range []float64{0.05, 0.15, 0.4} {
			seed := uint64(100 * perDraft)
			best, at := 0.0, 0
			for k := range 6 {
				if r := simulate(func() int { return k }, func(int, int, float64) {}, acceptance, perDraft, 0.03, seed); r > best {
					best, at = r, k
				}
			}
			p := newDraftPolicy(5)
			seen := p.request()
			got := simulate(func() int { return p.choose([]drafting{{5, seen}}, 1)[0] }, func(k, n int, s float64) {
				p.cost.observe(k+1, k, s)
				p.observe(seen, k, n)
			}, acceptance, perDraft, 0.03, seed)
			if got < 0.97*best {
				t.Errorf("%s, %.2f a draft: %.3f tokens a second, %d fixed drafts give %.3f", name, perDraft, got, at, best)
			}
		}
	}
}

func TestDraftPolicyLimits(t *testing.T) {
	p := newDraftPolicy(5)
	seen := p.request()
	for limit := 0; limit <= 7; limit++ {
		for range 60 {
			lanes := []drafting{{limit, seen}, {3, seen}, {0, nil}}
			for i, k := range p.choose(lanes, 3) {
				if k < 0 || k > min(5, lanes[i].limit) {
					t.Fatalf("%d drafts of at most %d", k, lanes[i].limit)
				}
			}
			p.cost.observe(4, 2, 0.01)
			p.observe(seen, 3, 3)
		}
	}
	if k := p.choose([]drafting{{0, nil}}, 1); k[0] != 0 {
		t.Errorf("%d drafts of a lane without", k[0])
	}
}

// Short requests of kinds that differ: what one request learned helps the next, and each still finds its own. Rows cost little, or as much as on a
// GPU where eight at a time go through the weights, so that many lanes had better not draft at all.
func TestDraftPolicyShortRequests(t *testing.T) {
	for _, c := range []struct {
		base, perRow float64
		together     int // rows that cost as much as one
	}{{1, 0.05, 1}, {0.3, 0.15, 1}, {0.2, 0.11, 8}} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			shortRequests(t, func(perDraft float64, rows, passes int) float64 {
				rows = (rows + c.together - 1) / c.together * c.together
				return c.base + perDraft*float64(passes) + c.perRow*float64(rows)
			})
		})
	}
}

func shortRequests(t *testing.T, cost func(perDraft float64, rows, passes int) float64) {
	const output, adaptive = 48, -1
	for name, kinds := range map[string][]float64{
		"bad":   {0.3, 0.1, 0.3},
		"good":  {0.9, 0.8, 0.95},
		"mixed": {0.9, 0.15, 0.6},
	} {
		for _, perDraft := range []float64{0.1, 0.3, 0.8} {
			// run plays requests on lanes side by side: rounds take base, draft passes as many as the longest needs, and rows.
			run := func(fixed, lanes int) float64 {
				rng := rand.New(rand.NewPCG(11, 4))
				p := newDraftPolicy(5)
				type request struct {
					a    float64
					left int
					seen *acceptance
				}
				next := 0
				begin := func() *request {
					r := &request{kinds[next%len(kinds)], output, p.request()}
					next++
					return r
				}
				active := make([]*request, lanes)
				for i := range active {
					active[i] = begin()
				}
				var tokens, seconds float64
				for next < 300 {
					limits := make([]drafting, lanes)
					for i, r := range active {
						limits[i] = drafting{min(5, r.left-1), r.seen}
					}
					ks := make([]int, lanes)
					if fixed == adaptive {
						ks = p.choose(limits, lanes)
					}
					rows, passes := 0, 0
					for i, r := range active {
						if fixed != adaptive {
							ks[i] = min(fixed, r.left-1)
						}
						rows += ks[i] + 1
						passes = max(passes, ks[i])
					}
					s := cost(perDraft, rows, passes) * (1 + 0.05*rng.NormFloat64())
					if fixed == adaptive {
						p.cost.observe(rows, passes, s)
					}
					seconds += s
					for i, r := range active {
						n := 0
						for n < ks[i] && rng.Float64() < r.a {
							n++
						}
						if fixed == adaptive && ks[i] > 0 {
							p.observe(r.seen, ks[i], n)
						}
						tokens += float64(n + 1)
						if r.left -= n + 1; r.left <= 0 {
							active[i] = begin()
						}
					}
				}
				return tokens / seconds
			}
			for _, lanes := range []int{1, 4, 8} {
				best, at := 0.0, 0
				for k := range 6 {
					if r := run(k, lanes); r > best {
						best, at = r, k
					}
				}
				if got := run(adaptive, lanes); got < 0.97*best {
					t.Errorf("%s, %.1f a pass, %d lanes: %.3f tokens a second, %d fixed drafts give %.3f", name, perDraft, lanes, got, at, best)
				} else {
					t.Logf("%s, %.1f a pass, %d lanes: %.2f of %d fixed drafts", name, perDraft, lanes, got/best, at)
				}
			}
		}
	}
}

// Requests that wait for a lane, and a prompt before each round as long as one is free: what a round of few lanes takes keeps the others from coming
// together, so that many rows are no gain though they would be if nobody else came.
func TestDraftPolicyPrompts(t *testing.T) {
	const lanes, output, adaptive = 8, 13, -1
	for name, c := range map[string]struct{ base, perRow, perTurn, perPass, prompt, stand float64 }{
		"small, good drafts": {135, 34, 153, 123, 1350, 0.95}, // microseconds of a small model on a GPU
		"small, bad drafts":  {135, 34, 153, 123, 1350, 0.4},
		"large, good drafts": {900, 600, 800, 180, 20000, 0.9},
		"free rows":          {1000, 1, 0, 50, 1350, 0.9},
	} {
		run := func(fixed int) float64 {
			rng := rand.New(rand.NewPCG(12, 4))
			p := newDraftPolicy(5)
			type request struct {
				left int
				seen *acceptance
			}
			var active []*request
			var tokens, us float64
			for began := 0; began < 400 || len(active) > 0; {
				if began < 400 && len(active) < lanes {
					began++
					us += c.prompt
					active = append(active, &request{output - 1, p.request()})
				}
				limits, ks := make([]drafting, len(active)), make([]int, len(active))
				for i, r := range active {
					limits[i] = drafting{min(5, r.left-1), r.seen}
					ks[i] = min(max(0, fixed), r.left-1)
				}
				if fixed == adaptive {
					ks = p.choose(limits, min(lanes, len(active)+400-began))
				}
				rows, passes := 0, 0
				for _, k := range ks {
					rows += k + 1
					passes = max(passes, k)
				}
				d := (c.base + c.perRow*float64(rows) + c.perTurn*float64((rows+7)/8) + c.perPass*float64(passes)) * (1 + 0.05*rng.NormFloat64())
				us += d
				if fixed == adaptive {
					p.cost.observe(rows, passes, d/1e6)
				}
				left := active[:0]
				for i, r := range active {
					n := 0
					for n < ks[i] && rng.Float64() < c.stand {
						n++
					}
					if ks[i] > 0 {
						p.observe(r.seen, ks[i], n)
					}
					tokens += float64(n + 1)
					if r.left -= n + 1; r.left > 0 {
						left = append(left, r)
					}
				}
				active = left
			}
			return tokens / us * 1e6
		}
		best, at := 0.0, 0
		for k := range 6 {
			if r := run(k); r > best {
				best, at = r, k
			}
		}
		if got := run(adaptive); got < 0.95*best {
			t.Errorf("%s: %.0f tokens a second, %d fixed drafts give %.0f", name, got, at, best)
		} else {
			t.Logf("%s: %.3f of %d fixed drafts", name, got/best, at)
		}
	}
}
