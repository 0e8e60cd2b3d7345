package quality

import (
	"context"
	"math"

	"ninfer/internal/backend"
	"ninfer/internal/model"
	"ninfer/internal/num"
)

// Subject is a model on a device of one lane.
type Subject struct {
	Runner *model.Runner
	IDs    int // of the tokenizer; logits of higher ids are padding
}

// logitBytes bounds the logits that one pass returns: a vocabulary of 250,000 ids takes a megabyte a row.
const logitBytes = 64 << 20

// Rows runs tokens from an empty sequence and calls f for every row from first on: at is the row's place, and logits what the model
// predicts for the token after it. They are valid during the call only. first may be len(tokens): then everything runs and f is not
// called.
func (s *Subject) Rows(ctx context.Context, tokens []int32, first int, f func(at int, logits []float32) error) error {
	r := s.Runner
	if err := r.Dev.Reset(backend.Lane(0)); err != nil {
		return err
	}
	most := max(1, logitBytes/(4*r.Model.Config.Text.VocabSize))
	for at := 0; at < len(tokens); {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, want := min(r.Chunk, len(tokens)-at), backend.WantLogitsAll
		if at < first {
			n, want = min(n, first-at), backend.WantNone
		} else {
			n = min(n, most)
		}
		res, err := r.Prompt(backend.LaneRows{Tokens: tokens[at : at+n], Want: want})
		if err != nil {
			return err
		}
		for i, row := range res.Logits {
			if err := f(at+i, row[:s.IDs]); err != nil {
				return err
			}
		}
		at += n
	}
	return nil
}

// Continue runs a prompt and then greedily generates up to most tokens, the last of which may be one of stops.
func (s *Subject) Continue(ctx context.Context, prompt []int32, most int, stops map[int32]bool) ([]int32, error) {
	var out []int32
	err := s.steps(ctx, prompt, func(logits []float32) (int32, bool) {
		id := Best(logits)
		out = append(out, id)
		return id, len(out) < most && !stops[id]
	})
	return out, err
}

// steps runs a prompt and then tokens one by one, as generation does. choose gets the logits of the last row, valid during the call only,
// and says which token follows, and whether it is to run too.
func (s *Subject) steps(ctx context.Context, prompt []int32, choose func(logits []float32) (id int32, more bool)) error {
	var id int32
	more := false
	err := s.Rows(ctx, prompt, len(prompt)-1, func(_ int, logits []float32) error {
		id, more = choose(logits)
		return nil
	})
	for err == nil && more {
		if err = ctx.Err(); err != nil {
			break
		}
		var res backend.LaneResult
		if res, err = s.Runner.Prompt(backend.LaneRows{Tokens: []int32{id}, Want: backend.WantLogits}); err == nil {
			id, more = choose(res.Logits[0][:s.IDs])
		}
	}
	return err
}

// LogSum is the logarithm of the sum of the exponentials of logits.
func LogSum(logits []float32) float64 {
	most := math.Inf(-1)
	for _, v := range logits {
		most = max(most, float64(v))
	}
	var sum float64
	for _, v := range logits {
		sum += math.Exp(float64(v) - most)
	}
	return most + math.Log(sum)
}

// Best is the id that greedy decoding picks: the largest logit rounded to BF16, the lowest id on ties.
func Best(logits []float32) int32 {
	best := 0
	for i := 1; i < len(logits); i++ {
		if logits[i] > logits[best] && num.RoundBF16(float64(logits[i])) > num.RoundBF16(float64(logits[best])) {
			best = i
		}
	}
	return int32(best)
}
