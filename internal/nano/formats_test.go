package nano_test

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"math"
	"path/filepath"
	"testing"

	"ninfer/internal/artifact"
	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/convert"
	"ninfer/internal/front"
	"ninfer/internal/model"
	"ninfer/internal/quality"
	"ninfer/internal/text/chat"
)

// What published builds of the real model were seen to change with 8-bit projections bounds what smaller formats may
// change here; and a token may become another one only where two are nearly as likely.
const (
	mostChange  = 0.086 // of the mean log-probability of a generated token
	lowestText  = -0.024
	highestText = 0.017 // change of perplexity
	mostApart   = 0.5   // the two logits of a token that changed
)

// TestFormats compares nano with itself: in 8-bit projections, with an FP8 cache, with a BF16 state.
func TestFormats(t *testing.T) {
	s := open(t, model.Options{})
	prompts := s.questions(t)
	streams, err := quality.ReadCorpus(filepath.Join(data, "corpus.json"), false)
	if err != nil {
		t.Fatal(err)
	}
	const room = 2560
	on := func(m *model.Model, kv backend.Cache, half bool) *quality.Subject {
		dev := cpu.NewFast(cpu.Options{States: m.States, Lanes: 1, Tokens: room, Carry: 512, KV: kv, BF16State: half})
		t.Cleanup(func() { dev.Close() })
		return &quality.Subject{Runner: model.NewRunner(m, dev, 512), IDs: s.tokenizer.Count()}
	}
	text := func(q *quality.Subject) float64 {
		p, err := quality.Measure(t.Context(), q, streams, s.tokenizer.EncodePlain, quality.PerplexityOptions{Context: room, Stride: room / 2})
		if err != nil {
			t.Fatal(err)
		}
		return p.Overall.Perplexity
	}
	base := on(s.model, backend.CacheBF16, false)
	before := text(base)
	for name, other := range map[string]*quality.Subject{
		"8-bit projections": on(eightBit(t, s.tokenizer.Count()), backend.CacheBF16, false),
		"fp8 cache":         on(s.model, backend.CacheFP8, false),
		"bf16 state":        on(s.model, backend.CacheBF16, true),
	} {
		c, err := quality.Compare(t.Context(), base, other, prompts, 48, nil)
		if err != nil {
			t.Fatal(err)
		}
		change := text(other)/before - 1
		t.Logf("%-17s %d tokens: mean change %+.5f, without sign %.5f, %d flips at most %.3f apart, same text %d of %d, perplexity of the text %+.3f %%",
			name, c.Tokens, c.MeanChange, c.MeanSize, c.Flips, c.LargestMargin, c.SameText, len(prompts), 100*change)
		if c.MeanSize == 0 {
			t.Errorf("%s: nothing changes: it is not in use", name)
		}
		if math.Abs(c.MeanChange) > mostChange || change < lowestText || change > highestText || c.LargestMargin > mostApart {
			t.Errorf("%s: mean change %v, perplexity %+v, largest margin %v", name, c.MeanChange, change, c.LargestMargin)
		}
	}
}

// eightBit converts the checkpoint with 8-bit projections.
func eightBit(t *testing.T, ids int) *model.Model {
	t.Helper()
	out := filepath.Join(t.TempDir(), "qwen3_8_flash_next_125b_a6b_nvfp4_fp8proj.ninfer")
	o := convert.Options{Profile: "radixark", ProjectionFormat: "fp8_e4m3fn_row_bf16", Model: filepath.Join(data, "checkpoint"), Out: out}
	if _, err := convert.Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	f, err := artifact.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	store, err := model.NewArtifact(f)
	if err != nil {
		t.Fatal(err)
	}
	m, err := model.Bind(store.Config(), store, model.Options{IDs: ids})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// questions are the built-in ones of a comparison, as prompts.
func (s subject) questions(t *testing.T) []quality.Prompt {
	t.Helper()
	var list []jsontext.Value
	if err := json.Unmarshal(quality.Questions, &list); err != nil {
		t.Fatal(err)
	}
	var out []quality.Prompt
	for i, raw := range list {
		one := struct {
			Messages jsontext.Value   `json:"messages"`
			Tools    []jsontext.Value `json:"tools"`
		}{Messages: raw}
		if raw.Kind() == '{' {
			if err := json.Unmarshal(raw, &one); err != nil {
				t.Fatal(err)
			}
		}
		messages, err := chat.ParseMessages(one.Messages)
		if err != nil {
			t.Fatal(err)
		}
		think, most := i%2 == 0, 1
		p, err := s.front.Prepare(front.Request{Messages: messages, Tools: one.Tools, EnableThinking: &think, MaxTokens: &most})
		if err != nil {
			t.Fatal(err)
		}
		q := quality.Prompt{Name: string(rune('a' + i)), IDs: p.Prompt, Stops: map[int32]bool{}}
		for _, id := range p.StopIDs {
			q.Stops[id] = true
		}
		out = append(out, q)
	}
	return out
}
