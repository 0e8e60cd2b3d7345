package engine_test

import (
	"context"
	"math/rand/v2"
	"testing"

	"ninfer/internal/backend/cpu"
	"ninfer/internal/engine"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

// decoded is how many bytes of weights a token takes when so many sequences are decoded side by side.
func decoded(t *testing.T, m *model.Model, lanes int) float64 {
	const most, output = 128, 40
	dev := cpu.NewFast(cpu.Options{States: m.States, Lanes: lanes, Tokens: most, Verify: 1, Carry: most, Threads: 1})
	defer dev.Close()
	b, err := engine.NewBatch(model.NewRunner(m, dev, 64), engine.BatchOptions{Limits: engine.Limits{Lanes: lanes, Pages: 2 * lanes, Pending: lanes}, Context: most})
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(6, 6))
	read := func() int64 { return dev.(interface{ WeightBytes() int64 }).WeightBytes() }
	for i := range lanes {
		prompt := make([]int32, 20)
		for j := range prompt {
			prompt[j] = int32(rng.IntN(m.Options.IDs))
		}
		if err := b.Add(context.Background(), engine.RequestID(i+1), engine.Request{Prompt: prompt, MaxNew: output}, nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	// Only rounds with all lanes count.
	var bytes, tokens int64
	for busy := true; busy; {
		before, had := read(), b.Activity()
		if busy, err = b.Step(); err != nil {
			t.Fatal(err)
		}
		if had.DecodeReady == lanes && had.Running == lanes && b.Activity().PrefillTokens == had.PrefillTokens {
			bytes += read() - before
			tokens += b.Activity().DecodeTokens - had.DecodeTokens
		}
	}
	if tokens < int64(20*lanes) {
		t.Fatalf("%d tokens of %d lanes", tokens, lanes)
	}
	return float64(bytes) / float64(tokens)
}

// Eight sequences side by side read a quarter of the weights a token, or less: matrices once for all, of experts those that anyone chose.
func TestWeightsShared(t *testing.T) {
	m := modeltest.Micro(t)
	m.Options.Drafter = false
	one, eight := decoded(t, m, 1), decoded(t, m, 8)
	t.Logf("%.0f bytes a token alone, %.0f of eight lanes: %.3f", one, eight, eight/one)
	if !(eight > 0) || eight > one/4 {
		t.Errorf("%.0f bytes a token alone, %.0f of eight lanes", one, eight)
	}
}
