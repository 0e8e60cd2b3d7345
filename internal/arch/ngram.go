package arch

import "math"

// Ngram holds what the hash of one PLE module needs (transformers, Qwen4ExpTextNGramEmbedding; docs/format.md 5.4).
//
// A token t with predecessors p1, p2 (ResetID where there is none) has the mixed values b = t*m0 ^ p1*m1 for pairs and
// b ^ p2*m2 for triples, in wrapping 64-bit arithmetic; head j reads table row Offsets[j] + floorMod(mixed, Sizes[j]).
type Ngram struct {
	Multipliers []int64 // ngram_size odd multipliers
	Sizes       []int64 // one prime a head: heads of the shortest n-gram first
	Offsets     []int64 // prefix sums of Sizes
	Rows        int64   // rows of the table: the sum of Sizes padded to the configured divisor
	HeadWidth   int     // values of one row
}

// PLEHeads is the number of table look-ups for one token.
func (t *Text) PLEHeads() int { return (t.NgramSize - 1) * t.HeadsPerNgram }

// Ngram derives the hash constants of PLE module k (zero-based).
func (t *Text) Ngram(k int) Ngram {
	heads := t.PLEHeads()
	n := Ngram{HeadWidth: t.PLEEmbedDim / heads}
	const gamma = 0x9E3779B97F4A7C15
	bound := max(1, uint64(math.MaxInt64)/uint64(t.VocabSize)/2)
	seed := t.Seed + 10007*uint64(k)
	for i := range t.NgramSize {
		n.Multipliers = append(n.Multipliers, int64(2*(splitMix64(seed+gamma*uint64(i+2))%bound)+1))
	}
	prime := int64(t.NgramVocabBase) - 1
	for range k * heads {
		prime = nextPrime(prime)
	}
	var total int64
	for range heads {
		prime = nextPrime(prime)
		n.Sizes, n.Offsets = append(n.Sizes, prime), append(n.Offsets, total)
		total += prime
	}
	d := int64(t.NgramDivisor)
	n.Rows = (total + d - 1) / d * d
	return n
}

// splitMix64 is the output function of the SplitMix64 generator.
func splitMix64(z uint64) uint64 {
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// nextPrime returns the smallest prime above n.
func nextPrime(n int64) int64 {
	for n++; !isPrime(n); n++ {
	}
	return n
}

func isPrime(n int64) bool {
	if n < 4 {
		return n > 1
	}
	if n%2 == 0 {
		return false
	}
	for d := int64(3); d*d <= n; d += 2 {
		if n%d == 0 {
			return false
		}
	}
	return true
}
