package engine

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

// Sampled outputs with drafts have the distribution of sampling without: sequences of three tokens, drawn many times side by side on eight
// lanes with drafts that are likely, less likely and impossible, against the product of the filtered distributions that the model gives
// after each prefix. The first token comes from a prompt, the others from acceptance, correction and bonus. NINFER_SAMPLES is how many
// sequences of a setting are drawn.
func TestSampledSpeculation(t *testing.T) {
	samples := 300
	if n, err := strconv.Atoi(os.Getenv("NINFER_SAMPLES")); err == nil {
		samples = n
	}
	m := modeltest.Micro(t)
	ids := m.Options.IDs
	prompt := []int32{31, 7, 200}
	const length, lanes = 3, 8

	single := cpu.NewFast(cpu.Options{States: m.States, Lanes: 1, Tokens: 64, Verify: 1, Carry: 64, Threads: 1})
	defer single.Close()
	alone := model.NewRunner(m, single, 32)
	known := map[string][]float32{}
	logits := func(prefix []int32) []float32 {
		key := fmt.Sprint(prefix)
		if known[key] == nil {
			if err := single.Reset(backend.Lane(0)); err != nil {
				t.Fatal(err)
			}
			res, err := alone.Prompt(backend.LaneRows{Tokens: slices.Concat(prompt, prefix), Want: backend.WantLogits})
			if err != nil {
				t.Fatal(err)
			}
			known[key] = slices.Clone(res.Logits[0])
		}
		return known[key]
	}

	for name, s := range map[string]Sampling{
		"thinking": {Temperature: 1, TopP: 0.95, TopK: 4},
		"plain":    {Temperature: 0.7, TopP: 0.8, TopK: 5, Presence: 1.5, Frequency: 0.25},
		"wide":     {Temperature: 1.7, MinP: 0.02, TopK: 3},
	} {
		t.Run(name, func(t *testing.T) {
			after := func(prefix []int32) map[int32]float64 {
				counts := map[int32]int{}
				for _, id := range prefix {
					counts[id]++
				}
				return reference(s, counts, logits(prefix), ids)
			}
			want := map[string]float64{}
			var expand func(prefix []int32, p float64)
			expand = func(prefix []int32, p float64) {
				if len(prefix) == length {
					want[fmt.Sprint(prefix)] = p
					return
				}
				for id, q := range after(prefix) {
					expand(append(slices.Clone(prefix), id), p*q)
				}
			}
			expand(nil, 1)

			// ranked are the tokens that can follow, the likely ones first.
			ranked := func(prefix []int32) []int32 {
				p := after(prefix)
				var list []int32
				for id := range p {
					list = append(list, id)
				}
				slices.SortFunc(list, func(a, b int32) int {
					if p[a] != p[b] && p[a] > p[b] {
						return -1
					} else if p[a] != p[b] {
						return 1
					}
					return int(a - b)
				})
				return list
			}
			drafter := func(output []int32, k int) []int32 {
				var drafts []int32
				for range k {
					prefix := slices.Concat(output, drafts)
					if len(prefix) >= length {
						drafts = append(drafts, 3)
						continue
					}
					list := append(ranked(prefix), 3, 479)
					h := 0
					for _, id := range prefix {
						h = 31*h + int(id)
					}
					drafts = append(drafts, list[[]int{0, 0, 1, 0, len(list) - 1, 2}[h%6]])
				}
				return drafts
			}

			dev := cpu.NewFast(cpu.Options{States: m.States, Lanes: lanes, Tokens: 64, Verify: length + 1, Carry: 64, Threads: 1})
			defer dev.Close()
			b, err := NewBatch(model.NewRunner(m, dev, 32), BatchOptions{Limits: Limits{Lanes: lanes, Pages: lanes, Pending: samples}, Context: 64})
			if err != nil {
				t.Fatal(err)
			}
			counts := map[string]int{}
			var stats Stats
			for i := range samples {
				req := Request{Prompt: prompt, MaxNew: length + 1, Sampling: s, Draft: 1 + i%3, Drafter: drafter}
				req.Sampling.Seed = uint64(i)
				err := b.Add(context.Background(), RequestID(i+1), req, nil, func(out Outcome, err error) {
					if err != nil {
						t.Error(err)
						return
					}
					counts[fmt.Sprint(out.IDs[:length])]++
					stats.Drafted += out.Stats.Drafted
					stats.Accepted += out.Stats.Accepted
				})
				if err != nil {
					t.Fatal(err)
				}
			}
			for busy := true; busy; {
				if busy, err = b.Step(); err != nil {
					t.Fatal(err)
				}
			}
			// Sequences that are expected less than five times are counted together.
			cells, expected := map[int32]int{}, map[int32]float64{}
			for key, p := range want {
				cell := int32(len(expected))
				if p*float64(samples) < 5 {
					cell = -1
				}
				expected[cell] += p
				cells[cell] += counts[key]
				delete(counts, key)
			}
			for key, n := range counts {
				t.Errorf("%s came %d times and cannot come", key, n)
			}
			p := chiSquare(cells, expected, samples)
			t.Logf("%d sequences in %d cells, %d of %d drafts accepted: p = %.3f", samples, len(expected), stats.Accepted, stats.Drafted, p)
			if !(p > 0.01) || stats.Accepted == 0 || stats.Accepted == stats.Drafted || len(expected) < 8 {
				t.Errorf("p = %g with %d cells, %d of %d drafts accepted", p, len(expected), stats.Accepted, stats.Drafted)
			}
		})
	}
}
