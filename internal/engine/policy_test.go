package engine

import (
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
			for k := 1; k <= 5; k++ {
				if r := simulate(func() int { return k }, func(int, int, float64) {}, acceptance, perDraft, 0.03, seed); r > best {
					best, at = r, k
				}
			}
			cost := &roundCost{}
			p := newDraftPolicy(5, cost)
			got := simulate(func() int { return p.choose(5, 0, 0) }, func(k, n int, s float64) {
				cost.observe(k+1, k, s)
				p.observe(k, n)
			}, acceptance, perDraft, 0.03, seed)
			if got < 0.97*best {
				t.Errorf("%s, %.2f a draft: %.3f tokens a second, %d fixed drafts give %.3f", name, perDraft, got, at, best)
			}
		}
	}
}

func TestDraftPolicyLimits(t *testing.T) {
	p := newDraftPolicy(5, &roundCost{})
	for limit := 1; limit <= 5; limit++ {
		for range 30 {
			if k := p.choose(limit, 3, 2); k < 1 || k > limit {
				t.Fatalf("%d drafts of at most %d", k, limit)
			}
			p.cost.observe(4, 2, 0.01)
			p.observe(3, 3)
		}
	}
}
