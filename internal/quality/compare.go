package quality

import (
	"context"
	"fmt"
	"math"
	"slices"
)

// Prompt is what two subjects are compared on.
type Prompt struct {
	Name  string
	IDs   []int32
	Stops map[int32]bool // ids that end an answer
}

// Flip is a place where the other subject would have picked another token than the base did.
type Flip struct {
	Prompt string  `json:"prompt"`
	At     int     `json:"position"` // in the answer
	Base   int32   `json:"base_token"`
	Other  int32   `json:"other_token"`
	Margin float64 `json:"base_margin"` // of the base's logits, between its token and the other's: 0 is a tie
}

// Answer is the comparison on one prompt. Log-probabilities are of the base's greedy answer, under each of the two.
type Answer struct {
	Prompt  string  `json:"prompt"`
	Tokens  int     `json:"tokens"`
	Base    float64 `json:"base_logprob"` // sums
	Other   float64 `json:"other_logprob"`
	Worst   float64 `json:"largest_change"` // of one token's log-probability, without sign
	KL      float64 `json:"kl"`             // sum over the tokens of the divergence of the other's distribution from the base's
	Flips   []Flip  `json:"flips"`
	Same    bool    `json:"same_text"`  // decoding freely, the other gives the same tokens
	Differs int     `json:"differs_at"` // first token that is another, if the text is not the same
}

// Comparison is the result over all prompts.
type Comparison struct {
	Answers []Answer `json:"answers"`
	Tokens  int      `json:"tokens"`
	// MeanChange is the mean of a token's log-probability under the other less that under the base, MeanSize the mean without sign.
	MeanChange      float64 `json:"mean_logprob_change"`
	MeanSize        float64 `json:"mean_logprob_change_size"`
	LargestChange   float64 `json:"largest_logprob_change"`
	MeanKL          float64 `json:"mean_kl"`
	BasePerplexity  float64 `json:"base_perplexity"` // of the answers
	OtherPerplexity float64 `json:"other_perplexity"`
	Flips           int     `json:"flips"`
	LargestMargin   float64 `json:"largest_flip_margin"`
	SameText        int     `json:"same_text"`
}

// Compare lets base answer every prompt greedily with at most most tokens, and has other score the same tokens. done is called after each
// answer; it may be nil.
func Compare(ctx context.Context, base, other *Subject, prompts []Prompt, most int, done func(Answer)) (*Comparison, error) {
	if base.IDs != other.IDs {
		return nil, fmt.Errorf("the tokenizers have %d and %d ids: only models with the same tokenizer can be compared", base.IDs, other.IDs)
	}
	c := &Comparison{}
	for _, p := range prompts {
		a, size, err := compare(ctx, base, other, p, most)
		if err != nil {
			return nil, fmt.Errorf("prompt %q: %w", p.Name, err)
		}
		c.Answers = append(c.Answers, a)
		c.Tokens += a.Tokens
		c.MeanChange += a.Other - a.Base
		c.MeanSize += size
		c.MeanKL += a.KL
		c.BasePerplexity -= a.Base
		c.OtherPerplexity -= a.Other
		c.LargestChange = max(c.LargestChange, a.Worst)
		c.Flips += len(a.Flips)
		for _, f := range a.Flips {
			c.LargestMargin = max(c.LargestMargin, f.Margin)
		}
		if a.Same {
			c.SameText++
		}
		if done != nil {
			done(a)
		}
	}
	n := float64(max(c.Tokens, 1))
	c.MeanChange /= n
	c.MeanSize /= n
	c.MeanKL /= n
	c.BasePerplexity, c.OtherPerplexity = math.Exp(c.BasePerplexity/n), math.Exp(c.OtherPerplexity/n)
	return c, nil
}

// compare is the comparison on one prompt; size is the sum of the changes without sign.
func compare(ctx context.Context, base, other *Subject, p Prompt, most int) (a Answer, size float64, err error) {
	a = Answer{Prompt: p.Name, Flips: []Flip{}}
	var answer []int32
	var rows [][]float32
	err = base.steps(ctx, p.IDs, func(logits []float32) (int32, bool) {
		id := Best(logits)
		answer, rows = append(answer, id), append(rows, slices.Clone(logits))
		return id, len(answer) < most && !p.Stops[id]
	})
	if err != nil {
		return a, 0, err
	}
	// The other runs the tokens one by one too: a state in BF16 is rounded at every step of generation.
	err = other.steps(ctx, p.IDs, func(logits []float32) (int32, bool) {
		i := a.Tokens
		a.Tokens++
		id, row := answer[i], rows[i]
		mine, theirs := LogSum(row), LogSum(logits)
		x, y := float64(row[id])-mine, float64(logits[id])-theirs
		a.Base += x
		a.Other += y
		size += math.Abs(y - x)
		a.Worst = max(a.Worst, math.Abs(y-x))
		for j, v := range row {
			a.KL += math.Exp(float64(v)-mine) * (float64(v) - mine - float64(logits[j]) + theirs)
		}
		if pick := Best(logits); pick != id {
			a.Flips = append(a.Flips, Flip{p.Name, i, id, pick, float64(row[id]) - float64(row[pick])})
		}
		return id, a.Tokens < len(answer)
	})
	if err != nil {
		return a, 0, err
	}
	a.KL = max(a.KL, 0) // less than nothing by rounding only
	free, err := other.Continue(ctx, p.IDs, most, p.Stops)
	if err != nil {
		return a, 0, err
	}
	if a.Same = slices.Equal(answer, free); !a.Same {
		for a.Differs < min(len(answer), len(free)) && answer[a.Differs] == free[a.Differs] {
			a.Differs++
		}
	}
	return a, size, nil
}
