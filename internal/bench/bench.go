// Package bench measures generation through the engine: the route that requests take, not a loop of its own.
//
// A test is a prompt of P tokens (pp), G generated tokens (tg), or both. All requests are greedy and have no stop ids; a repetition that
// ends before its exact number of tokens is an error, not a row. Rates are P divided by the time until the first token, and G divided by
// the time after it: of G+1 generated tokens the first belongs to the prompt.
package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"ninfer/internal/engine"
)

// Test is one measurement. Prompt 0 starts from one token that is not measured; Gen 0 generates one that is not.
type Test struct{ Prompt, Gen int }

// Name is the test's usual name, such as pp512 or pp512+tg128.
func (t Test) Name() string {
	switch {
	case t.Gen == 0:
		return fmt.Sprintf("pp%d", t.Prompt)
	case t.Prompt == 0:
		return fmt.Sprintf("tg%d", t.Gen)
	}
	return fmt.Sprintf("pp%d+tg%d", t.Prompt, t.Gen)
}

// Tokens is how many tokens the test's sequence has in the end.
func (t Test) Tokens() int { return max(t.Prompt, 1) + t.Gen + 1 }

// ParseTests reads the three lists of the command line: "512,8192", "128", "512,256;8192,256". All empty is pp512 and tg128.
func ParseTests(prompts, gens, pairs string) ([]Test, error) {
	var tests []Test
	list := func(option, text string) ([]int, error) {
		var out []int
		for _, w := range strings.Split(text, ",") {
			n, err := strconv.Atoi(strings.TrimSpace(w))
			if err != nil || n < 1 {
				return nil, fmt.Errorf("%s: %q is not a positive number of tokens", option, w)
			}
			out = append(out, n)
		}
		return out, nil
	}
	if prompts != "" {
		ns, err := list("--n-prompt", prompts)
		if err != nil {
			return nil, err
		}
		for _, n := range ns {
			tests = append(tests, Test{Prompt: n})
		}
	}
	if gens != "" {
		ns, err := list("--n-gen", gens)
		if err != nil {
			return nil, err
		}
		for _, n := range ns {
			tests = append(tests, Test{Gen: n})
		}
	}
	if pairs != "" {
		for _, p := range strings.Split(pairs, ";") {
			ns, err := list("--prompt-gen", p)
			if err != nil {
				return nil, err
			}
			if len(ns) != 2 {
				return nil, fmt.Errorf("--prompt-gen: %q is not a pair of prompt and generated tokens", p)
			}
			tests = append(tests, Test{ns[0], ns[1]})
		}
	}
	if tests == nil {
		tests = []Test{{Prompt: 512}, {Gen: 128}}
	}
	return tests, nil
}

// Repetition is one measured run. Times are seconds.
type Repetition struct {
	Prepare float64 `json:"prepare_seconds"` // cutting the prompt
	Vision  float64 `json:"vision_seconds"`  // prompts hold no pictures
	Prefill float64 `json:"prefill_seconds"`
	Decode  float64 `json:"decode_seconds"`
	Total   float64 `json:"total_seconds"`
	IDs     []int32 `json:"ids,omitzero"`
}

// Rate is a mean with its standard deviation, in tokens a second.
type Rate struct {
	Mean      float64 `json:"mean"`
	Deviation float64 `json:"deviation"`
}

// Speculation is what drafting did in the measured runs of a test.
type Speculation struct {
	Enabled          bool    `json:"enabled"`
	Window           int     `json:"draft_window"`
	Rounds           int     `json:"rounds"`
	Drafted          int     `json:"drafted"`
	Accepted         int     `json:"accepted"`
	FallbackSteps    int     `json:"fallback_steps"`
	AcceptanceRate   float64 `json:"acceptance_rate"`
	AcceptanceLength float64 `json:"acceptance_length"`
	AcceptedAt       []int   `json:"accepted_per_position"`
}

// Row is a test's result.
type Row struct {
	Test        string       `json:"test"`
	Prompt      int          `json:"prompt_tokens"`
	Gen         int          `json:"generated_tokens"`
	Repetitions []Repetition `json:"repetitions"`
	Prefill     *Rate        `json:"prefill_tokens_per_second,omitzero"`
	Decode      *Rate        `json:"decode_tokens_per_second,omitzero"`
	Speculation Speculation  `json:"speculation"`
	// On a GPU, see Roof.
	PrefillRoof *Roofline `json:"prefill_roofline,omitzero"`
	DecodeRoof  *Roofline `json:"decode_roofline,omitzero"`
	// GEMM is what the prompt's matrices would need of the time if a GPU multiplied them as fast as it can.
	GEMM float64 `json:"gemm_ratio,omitzero"`
}

// Options say how to measure.
type Options struct {
	Repetitions int
	Warmup      int
	Draft       int
	Corpus      []int32 // prompts are its first tokens, repeated when it is shorter
	KeepIDs     bool    // keep the generated ids
}

// Run measures a test on a batch with one lane.
func Run(ctx context.Context, b *engine.Batch, t Test, o Options) (Row, error) {
	row := Row{Test: t.Name(), Prompt: t.Prompt, Gen: t.Gen, Speculation: Speculation{Enabled: o.Draft > 0, Window: o.Draft, AcceptedAt: make([]int, o.Draft)}}
	if len(o.Corpus) == 0 {
		return row, errors.New("bench: empty corpus")
	}
	var prefill, decode []float64
	for i := range o.Warmup + o.Repetitions {
		start := time.Now()
		prompt := make([]int32, max(t.Prompt, 1))
		for i := range prompt {
			prompt[i] = o.Corpus[i%len(o.Corpus)]
		}
		prepare := time.Since(start)
		out, err := b.Run(ctx, engine.Request{Prompt: prompt, MaxNew: t.Gen + 1, Draft: o.Draft})
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return row, fmt.Errorf("bench: %s: %w", row.Test, err)
		}
		if len(out.IDs) != t.Gen+1 {
			return row, fmt.Errorf("bench: %s: repetition %d ended after %d of %d tokens: %s", row.Test, i, len(out.IDs), t.Gen+1, out.Reason)
		}
		if i < o.Warmup {
			continue
		}
		s := out.Stats
		r := Repetition{Prepare: prepare.Seconds(), Prefill: s.Prefill.Seconds(), Decode: s.Decode.Seconds(), Total: (prepare + s.Prefill + s.Decode).Seconds()}
		if o.KeepIDs {
			r.IDs = out.IDs
		}
		row.Repetitions = append(row.Repetitions, r)
		prefill = append(prefill, float64(t.Prompt)/r.Prefill)
		decode = append(decode, float64(t.Gen)/r.Decode)
		row.Speculation.add(s)
	}
	if t.Prompt > 0 {
		row.Prefill = rate(prefill)
	}
	if t.Gen > 0 {
		row.Decode = rate(decode)
	}
	return row, nil
}

func (s *Speculation) add(e engine.Stats) {
	s.Rounds += e.Rounds
	s.Drafted += e.Drafted
	s.Accepted += e.Accepted
	s.FallbackSteps += e.FallbackSteps
	for i, n := range e.AcceptedAt {
		s.AcceptedAt[i] += n
	}
	if s.Drafted > 0 {
		s.AcceptanceRate = float64(s.Accepted) / float64(s.Drafted)
	}
	if s.Rounds > 0 {
		s.AcceptanceLength = 1 + float64(s.Accepted)/float64(s.Rounds)
	}
}

func rate(v []float64) *Rate {
	var r Rate
	for _, x := range v {
		r.Mean += x / float64(len(v))
	}
	for _, x := range v {
		r.Deviation += (x - r.Mean) * (x - r.Mean)
	}
	if len(v) > 1 {
		r.Deviation = math.Sqrt(r.Deviation / float64(len(v)-1))
	}
	return &r
}

// Corpus is a list of n ids below limit for prompts when no text is given: a fixed sequence whose frequencies fall like those of words,
// so that the same ids come back, and n-grams with them.
func Corpus(n, limit int) []int32 {
	ids := make([]int32, n)
	state := uint64(0x5eed)
	for i := range ids {
		state += 0x9E3779B97F4A7C15
		z := (state ^ state>>30) * 0xBF58476D1CE4E5B9
		z = (z ^ z>>27) * 0x94D049BB133111EB
		u := float64((z^z>>31)>>11) / (1 << 53)
		ids[i] = int32(min(math.Pow(float64(limit), u), float64(limit))) - 1 // rank r with a density of 1/r
	}
	return ids
}
