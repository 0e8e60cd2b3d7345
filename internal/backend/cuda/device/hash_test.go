package device

import (
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"

	"ninfer/internal/backend"
)

// The hash against its formula in unbounded integers: products wrap to 64 bits, the remainder is never negative, and
// tokens before a reset do not count.
func TestHash(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		w := &backend.PLEWeights{HeadsPerNgram: 2, Reset: 3}
		for range 3 {
			w.Multipliers = append(w.Multipliers, int64(r.Uint64()))
		}
		for range 4 {
			w.Sizes, w.Offsets = append(w.Sizes, 2+r.Int64N(1<<40)), append(w.Offsets, r.Int64N(1<<40))
		}
		tokens := []int32{r.Int32N(5), r.Int32N(5), r.Int32N(300000)} // oldest first; resets are frequent
		got := make([]int64, 4)
		hash(w, tokens[:2], tokens[2], got)
		if tokens[1] == w.Reset {
			tokens[0] = w.Reset
		}
		wrap := new(big.Int).Lsh(big.NewInt(1), 64)
		word := func(i int) uint64 { // token i back times its multiplier, as 64 bits
			v := new(big.Int).Mul(big.NewInt(int64(tokens[2-i])), big.NewInt(w.Multipliers[i]))
			return v.Mod(v, wrap).Uint64()
		}
		var want []int64
		for j := range w.Sizes {
			mixed := word(0) ^ word(1)
			if j >= 2 {
				mixed ^= word(2)
			}
			m := new(big.Int).Mod(big.NewInt(int64(mixed)), big.NewInt(w.Sizes[j])) // Euclidean
			want = append(want, w.Offsets[j]+m.Int64())
		}
		if !slices.Equal(got, want) {
			t.Fatalf("tokens %v give rows %v, want %v", tokens, got, want)
		}
	}
}
