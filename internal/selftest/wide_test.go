package selftest_test

import (
	"slices"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

// The oracle that rounds like passes of many rows does so in prompts of more rows than it is told, and in nothing else.
func TestWideOracle(t *testing.T) {
	m := modeltest.Micro(t)
	run := func(wide, rows int) []float32 {
		d := cpu.NewOracle(cpu.Options{States: m.States, Lanes: 1, Tokens: 64, Carry: 64, Stored: true, Wide: wide})
		defer d.Close()
		tokens := make([]int32, rows)
		for i := range tokens {
			tokens[i] = int32(20 + 37*i%400)
		}
		r := model.NewRunner(m, d, rows)
		if _, err := r.Prompt(backend.LaneRows{Tokens: tokens}); err != nil {
			t.Fatal(err)
		}
		if err := r.Seed(0, []int32{7}); err != nil {
			t.Fatal(err)
		}
		res, err := r.Prompt(backend.LaneRows{Tokens: []int32{7}, Want: backend.WantLogits})
		if err != nil {
			t.Fatal(err)
		}
		return slices.Clone(res.Logits[0])
	}
	if !slices.Equal(run(4, 4), run(0, 4)) {
		t.Error("four rows are rounded like many")
	}
	if slices.Equal(run(4, 5), run(0, 5)) {
		t.Error("five rows are not rounded like many")
	}
}
