package engine_test

import (
	"context"
	"encoding/json/v2"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"ninfer/internal/artifact"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/engine"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
	"ninfer/internal/text/token"
)

// TestAdaptiveAgainstFixed measures committed tokens a second of a mixed workload with each fixed number of drafts and with the adaptive
// policy, over and over and each time in another order: medians count. The best of several numbers is better than it is by as much as the
// times are noisy, so which number is the best half of the rounds say and how good it is the other half, both ways. NINFER_POLICY is "micro", for drafts that are right as often as a request's
// kind wants, or the path of an artifact, which continues parts of a text, parts of it twice and random tokens with drafts of its own,
// or empty for nothing. NINFER_POLICY_PROMPTS is a file of objects, one a line, with prompt_tokens and tokens, that replace these prompts.
func TestAdaptiveAgainstFixed(t *testing.T) {
	path := os.Getenv("NINFER_POLICY")
	if path == "" {
		t.Skip("NINFER_POLICY is not set")
	}
	const lanes, most, output, room = 4, 5, 48, 512
	var m *model.Model
	var text []int32
	rng := rand.New(rand.NewPCG(4, 44))
	if path == "micro" {
		m = modeltest.Micro(t)
	} else {
		m, text = bound(t, path)
	}
	var requests []engine.Request
	for i := range 12 {
		prompt := make([]int32, 8+rng.IntN(80))
		for j := range prompt {
			prompt[j] = int32(rng.IntN(m.Options.IDs))
		}
		if i%3 < 2 && text != nil {
			copy(prompt, text[rng.IntN(len(text)-len(prompt)):])
			if i%3 == 0 {
				copy(prompt[len(prompt)/2:], prompt)
			}
		}
		requests = append(requests, engine.Request{Prompt: prompt, MaxNew: output})
	}
	if file := os.Getenv("NINFER_POLICY_PROMPTS"); file != "" {
		requests = recordedPrompts(t, file, room, output)
	}
	dev := cpu.NewFast(cpu.Options{States: m.States, Lanes: lanes, Tokens: room, Verify: most + 1, Carry: 140})
	defer dev.Close()
	r := model.NewRunner(m, dev, 128)
	batch := func(adaptive bool) *engine.Batch {
		b, err := engine.NewBatch(r, engine.BatchOptions{
			Limits: engine.Limits{Lanes: lanes, Pages: lanes * room / engine.PageTokens, Pending: len(requests), GapRows: 128}, Context: room, Adaptive: adaptive,
		})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	var known [][]int32
	for _, req := range requests {
		out, err := batch(false).Run(context.Background(), req)
		if err != nil {
			t.Fatal(err)
		}
		known = append(known, out.IDs)
	}
	id := engine.RequestID(0)
	run := func(b *engine.Batch, k int) (float64, float64) {
		start, tokens, drafted, accepted := time.Now(), 0, 0, 0
		for i, req := range requests {
			if req.Draft = k; path == "micro" && k > 0 {
				right := []float64{0.95, 0.6, 0.15}[i%3]
				rng := rand.New(rand.NewPCG(uint64(i), 45))
				req.Drafter = truth(known[i], func(int, int) bool { return rng.Float64() > right })
			}
			id++
			err := b.Add(context.Background(), id, req, nil, func(out engine.Outcome, err error) {
				if err != nil || !slices.Equal(out.IDs, known[i]) {
					t.Errorf("request %d with %d drafts: %v, %v, want %v", i, k, out.IDs, err, known[i])
				}
				tokens += len(out.IDs)
				drafted += out.Stats.Drafted
				accepted += out.Stats.Accepted
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		for busy := true; busy; {
			var err error
			if busy, err = b.Step(); err != nil {
				t.Fatal(err)
			}
		}
		return float64(tokens) / time.Since(start).Seconds(), float64(accepted) / max(1, float64(drafted))
	}
	names := []string{"plain"}
	batches := []*engine.Batch{batch(false)}
	for k := 1; k <= most; k++ {
		names, batches = append(names, fmt.Sprint(k, " drafts")), append(batches, batch(false))
	}
	names, batches = append(names, "adaptive"), append(batches, batch(true))
	rates, accepted := make([][]float64, len(batches)), make([]float64, len(batches))
	const rounds = 14
	for range rounds {
		for _, i := range rng.Perm(len(batches)) {
			rate, part := run(batches[i], min(i, most))
			rates[i] = append(rates[i], rate)
			accepted[i] += part / rounds
		}
	}
	half := func(i, which int) float64 {
		var v []float64
		for j := which; j < rounds; j += 2 {
			v = append(v, rates[i][j])
		}
		slices.Sort(v)
		return v[len(v)/2]
	}
	ratio := 0.0
	for which := range 2 {
		best := 1
		for i := 2; i <= most; i++ {
			if half(i, which) > half(best, which) {
				best = i
			}
		}
		part := half(len(rates)-1, 1-which) / half(best, 1-which)
		t.Logf("%s are the best in half of the rounds; in the other half adaptive reaches %.3f of them", names[best], part)
		ratio += part / 2
	}
	for i, v := range rates {
		slices.Sort(v)
		t.Logf("%-9s %7.1f committed tokens a second (%.1f to %.1f), %2.0f %% of drafts accepted", names[i], v[rounds/2], v[0], v[rounds-1], 100*accepted[i])
	}
	t.Logf("adaptive reaches %.3f of the best fixed number", ratio)
	if ratio < 0.97 {
		t.Errorf("adaptive is %.1f %% behind the best fixed number", 100*(1-ratio))
	}
}

// recordedPrompts are requests whose answers are not short, evenly spread over a file.
func recordedPrompts(t *testing.T, file string, room, output int) []engine.Request {
	t.Helper()
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var fit []engine.Request
	for line := range strings.Lines(string(raw)) {
		var r struct {
			Prompt []int32 `json:"prompt_tokens"`
			Tokens []int32 `json:"tokens"`
		}
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatal(err)
		}
		if n := min(len(r.Tokens), output); n >= 12 && len(r.Prompt)+n <= room {
			fit = append(fit, engine.Request{Prompt: r.Prompt, MaxNew: n})
		}
	}
	var some []engine.Request
	for i := range min(24, len(fit)) {
		some = append(some, fit[i*len(fit)/min(24, len(fit))])
	}
	return some
}

// bound binds an artifact with its drafter, and reads a text with its tokenizer.
func bound(t *testing.T, path string) (*model.Model, []int32) {
	t.Helper()
	f, err := artifact.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	store, err := model.NewArtifact(f)
	if err != nil {
		t.Fatal(err)
	}
	var resources [2][]byte
	for i, role := range []string{"tokenizer.json", "tokenizer_config.json"} {
		if resources[i], err = store.Resource("text", role); err != nil {
			t.Fatal(err)
		}
	}
	tokenizer, err := token.Load(resources[0], resources[1])
	if err != nil {
		t.Fatal(err)
	}
	m, err := model.Bind(store.Config(), store, model.Options{Drafter: true, IDs: tokenizer.Count()})
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../../docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	return m, tokenizer.Encode(string(text))
}
