package nano_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/model"
)

// gpu is a device for nano on the first GPU; without one the test skips.
func (s subject) gpu(t *testing.T, o cpu.Options) *device.Device {
	t.Helper()
	d, err := device.Open(device.Options{States: o.States, Lanes: o.Lanes, Tokens: o.Tokens, Verify: o.Verify, Carry: o.Carry, KV: o.KV})
	if device.Absent(err) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// On a GPU drafting changes nothing about greedy text but where two logits are a rounding step apart, and is right as often as on the CPU.
func TestDraftsOnGPU(t *testing.T) {
	s := open(t, model.Options{Drafter: true})
	s.gpu(t, cpu.Options{States: s.model.States, Lanes: 1, Tokens: 64, Verify: 1, Carry: 64}).Close()
	const most, drafts = 200, 3
	items := slices.DeleteFunc(lines[item](t, "heldout.jsonl"), func(x item) bool { return strings.HasPrefix(x.Skill, "needle") })
	items = items[:min(most, len(items))]
	onCPU := s
	s.device = func(o cpu.Options) backend.Device { return s.gpu(t, o) }
	plain, drafted, cpus := s.ask(t, items, 0), s.ask(t, items, drafts), onCPU.ask(t, items, drafts)
	length := func(of map[string]*answer) float64 {
		rounds, accepted := 0, 0
		for _, x := range items {
			rounds += of[x.ID].outcome.Stats.Rounds
			accepted += of[x.ID].outcome.Stats.Accepted
		}
		return 1 + float64(accepted)/float64(max(rounds, 1))
	}
	near, like := 0, 0
	for _, x := range items {
		a, b := plain[x.ID], drafted[x.ID]
		if slices.Equal(a.outcome.IDs, cpus[x.ID].outcome.IDs) {
			like++
		}
		if slices.Equal(a.outcome.IDs, b.outcome.IDs) {
			continue
		}
		n := 0
		for n < min(len(a.outcome.IDs), len(b.outcome.IDs)) && a.outcome.IDs[n] == b.outcome.IDs[n] {
			n++
		}
		if n == min(len(a.outcome.IDs), len(b.outcome.IDs)) {
			t.Errorf("%s: %d tokens with drafts, %d without", x.ID, len(b.outcome.IDs), len(a.outcome.IDs))
			continue
		}
		prefix := slices.Concat(a.prompt.Prompt, a.outcome.IDs[:n])
		one := s.gpu(t, cpu.Options{States: s.model.States, Lanes: 1, Tokens: len(prefix) + 8, Verify: 1, Carry: len(prefix) + 8, KV: backend.CacheBF16})
		res, err := model.NewRunner(s.model, one, 512).Prompt(backend.LaneRows{Tokens: prefix, Want: backend.WantLogits})
		if err != nil {
			t.Fatal(err)
		}
		line := res.Logits[0]
		gap := math.Abs(float64(line[a.outcome.IDs[n]] - line[b.outcome.IDs[n]]))
		near++
		if gap > tie {
			t.Errorf("%s: token %d is %d with drafts and %d without, %.3f apart", x.ID, n, b.outcome.IDs[n], a.outcome.IDs[n], gap)
		}
		if err := one.Close(); err != nil {
			t.Error(err)
		}
	}
	g, c := length(drafted), length(cpus)
	t.Logf("%d prompts, %d differ at a near tie; %d as on the CPU; %.3f tokens a round at %d drafts, %.3f on the CPU", len(items), near, like, g, drafts, c)
	if math.Abs(g/c-1) > 0.02 || near*10 > len(items) {
		t.Errorf("%.3f tokens a round, %.3f on the CPU; %d of %d texts changed by drafting", g, c, near, len(items))
	}
}
