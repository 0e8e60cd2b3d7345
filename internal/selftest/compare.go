package selftest

import (
	"fmt"
	"math"

	"ninfer/internal/num"
)

// distance is the relative L2 distance of got from want; NaN anywhere makes it infinite.
func distance[T float32 | float64](got []T, want []float32) float64 {
	if len(got) != len(want) {
		return math.Inf(1)
	}
	var d, n float64
	for i, w := range want {
		e := float64(got[i]) - float64(w)
		d += e * e
		n += float64(w) * float64(w)
	}
	if r := math.Sqrt(d / n); r >= 0 {
		return r
	}
	return math.Inf(1)
}

// worst is the largest distance of corresponding rows.
func worst[T float32 | float64](got [][]T, want [][]float32) (float64, error) {
	if len(got) != len(want) {
		return 0, fmt.Errorf("%d rows, recorded are %d", len(got), len(want))
	}
	var w float64
	for r := range want {
		w = max(w, distance(got[r], want[r]))
	}
	return w, nil
}

// bf16Step is the distance of neighbouring BF16 values at the size of v.
func bf16Step(v float32) float64 {
	if v == 0 {
		return 0
	}
	_, e := math.Frexp(math.Abs(float64(v)))
	return math.Ldexp(1, e-8)
}

// greedy is the id that wins a row of logits: the largest rounded to BF16 among the first ids, the lowest id on ties.
func greedy(logits []float32, ids int) (int32, float32) {
	best := 0
	for i := 1; i < ids; i++ {
		if num.RoundBF16(float64(logits[i])) > num.RoundBF16(float64(logits[best])) {
			best = i
		}
	}
	return int32(best), logits[best]
}

// forced reports whether the recorded margin decides the id: it exceeds one BF16 step at the size of the best logit.
func forced(margin float64, best float32) bool { return margin > bf16Step(best) }
