package engine

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// reference is filter written the long way: sort everything, then cut.
func reference(s Sampling, counts map[int32]int, logits []float32, ids int) map[int32]float64 {
	type entry struct {
		id int32
		v  float64
	}
	var all []entry
	for i := range ids {
		bits := math.Float32bits(logits[i])
		bits = (bits + 0x7fff + bits>>16&1) &^ 0xffff // BF16
		v := float64(math.Float32frombits(bits))
		if n := counts[int32(i)]; n > 0 {
			v = v - s.Presence - s.Frequency*float64(n)
		}
		all = append(all, entry{int32(i), v})
	}
	slices.SortStableFunc(all, func(a, b entry) int {
		switch {
		case a.v > b.v:
			return -1
		case a.v < b.v:
			return 1
		}
		return 0
	})
	k := s.TopK
	if k == 0 {
		k = 20
	}
	all = all[:min(k, len(all))]
	var w []float64
	for _, e := range all {
		x := math.Exp((e.v - all[0].v) / s.Temperature)
		if x >= s.MinP {
			w = append(w, x)
		}
	}
	var total float64
	for _, x := range w {
		total += x
	}
	p := s.TopP
	if p == 0 {
		p = 1
	}
	out, sum := map[int32]float64{}, 0.0
	for i, x := range w {
		out[all[i].id] = x
		if sum += x; p < 1 && sum >= p*total {
			break
		}
	}
	total = 0
	for _, x := range out {
		total += x
	}
	for id := range out {
		out[id] /= total
	}
	return out
}

func TestFilter(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 3))
	for range 300 {
		logits := make([]float32, 60)
		for i := range logits {
			logits[i] = float32(rng.NormFloat64() * 3)
			switch rng.IntN(8) {
			case 0, 1:
				logits[i] = 2 // ties
			case 2: // in BF16 too: half a step and less below and above
				logits[i] = 2 + float32(rng.IntN(9)-4)*0x1p-10
			}
		}
		s := Sampling{Temperature: 0.3 + 2*rng.Float64(), TopP: float64(rng.IntN(5)) / 4, TopK: rng.IntN(21), MinP: float64(rng.IntN(3)) / 10, Presence: float64(rng.IntN(3)), Frequency: rng.Float64()}
		sm := newSampler(s, 50)
		for range 10 {
			sm.count(int32(rng.IntN(50)))
		}
		want := reference(s, sm.counts, logits, 50)
		got := sm.filter(logits)
		if len(got) != len(want) {
			t.Fatalf("%+v: %d candidates, want %d", s, len(got), len(want))
		}
		for _, c := range got {
			if p := probability(got, c.id); math.Abs(p-want[c.id]) > 1e-12 {
				t.Errorf("%+v: id %d has %g, want %g", s, c.id, p, want[c.id])
			}
		}
	}
}

// A list of the most likely ids gives the candidates of all logits, or says that it does not.
func TestAmong(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 3))
	const ids = 200
	told, untold := 0, 0
	for i := range 2000 {
		logits := make([]float32, ids)
		for j := range logits {
			logits[j] = num.FromBF16(num.ToBF16(float32(rng.NormFloat64() * 3)))
			if rng.IntN(3) == 0 {
				logits[j] = float32(rng.IntN(12)) / 2 // ties
			}
		}
		s := Sampling{Temperature: 1, TopK: rng.IntN(21), TopP: 0.95, Presence: float64(rng.IntN(4)), Frequency: rng.Float64()}
		if i%10 == 0 {
			s.Presence, s.Frequency = -float64(i%20)/10, -0.5
		}
		sm := newSampler(s, ids)
		for range rng.IntN(40) {
			sm.count(int32(rng.IntN(ids)))
		}
		order := make([]int32, ids)
		for j := range order {
			order[j] = int32(j)
		}
		slices.SortStableFunc(order, func(a, b int32) int { return cmp.Compare(logits[b], logits[a]) })
		most := order[:[]int{24, 30, 60, ids}[rng.IntN(4)]]
		slices.Sort(most)
		var likely []backend.Likely
		for _, id := range most {
			likely = append(likely, backend.Likely{Value: logits[id], ID: id})
		}
		got, ok := sm.among(likely)
		got = slices.Clone(got)
		if !ok {
			untold++
			if len(most) == ids && s.Presence >= 0 && s.Frequency >= 0 {
				t.Fatal("all ids do not tell")
			}
			continue
		}
		told++
		if s.Presence < 0 || s.Frequency < 0 {
			t.Fatal("ids that penalties raise are in no list")
		}
		if want := sm.filter(logits); !slices.Equal(got, want) {
			t.Fatalf("%+v, %d of %d ids: %v, want %v", s, len(most), ids, got, want)
		}
	}
	if told < 500 || untold < 200 {
		t.Errorf("%d lists told, %d did not: the test sees too little", told, untold)
	}
}

// chiSquare returns the p-value of counts against probabilities, by the Wilson-Hilferty approximation.
func chiSquare(counts map[int32]int, p map[int32]float64, n int) float64 {
	var x float64
	df := -1.0
	for id, q := range p {
		e := q * float64(n)
		d := float64(counts[id]) - e
		x += d * d / e
		df++
	}
	if df < 1 {
		return 1
	}
	z := (math.Cbrt(x/df) - (1 - 2/(9*df))) / math.Sqrt(2/(9*df))
	return 0.5 * math.Erfc(z/math.Sqrt2)
}

var draws = map[string]Sampling{
	"thinking": {Temperature: 1, TopP: 0.95, TopK: 20},
	"plain":    {Temperature: 0.7, TopP: 0.8, TopK: 20, Presence: 1.5},
	"wide":     {Temperature: 1.7, MinP: 0.02},
}

func someLogits() []float32 {
	rng := rand.New(rand.NewPCG(9, 9))
	logits := make([]float32, 100)
	for i := range logits {
		logits[i] = float32(rng.NormFloat64() * 1.5)
	}
	return logits
}

// 20,000 positions draw from the filtered distribution.
func TestDrawDistribution(t *testing.T) {
	logits := someLogits()
	for name, s := range draws {
		s.Seed = 77
		sm := newSampler(s, 100)
		sm.count(3, 5, 5)
		want := reference(s, sm.counts, logits, 100)
		counts := map[int32]int{}
		const n = 20000
		for i := range n {
			counts[sm.next(sm.filter(logits), i, drawDecode)]++
		}
		if p := chiSquare(counts, want, n); !(p > 0.01) {
			t.Errorf("%s: p = %g", name, p)
		}
	}
}

// A draft that is judged, whichever it is, leaves the token at its place with the plain distribution.
func TestJudgeDistribution(t *testing.T) {
	logits := someLogits()
	for name, s := range draws {
		s.Seed = 78
		sm := newSampler(s, 100)
		want := reference(s, sm.counts, logits, 100)
		best := sm.filter(logits)[0].id
		second := sm.filter(logits)[min(1, len(sm.filter(logits))-1)].id
		for _, draft := range []int32{best, second, 99} {
			counts := map[int32]int{}
			const n = 20000
			for i := range n {
				ok, id := sm.judge(sm.filter(logits), draft, i)
				if ok {
					id = draft
				}
				counts[id]++
			}
			if p := chiSquare(counts, want, n); !(p > 0.01) {
				t.Errorf("%s, draft %d: p = %g", name, draft, p)
			}
		}
	}
}

func TestUniform(t *testing.T) {
	if uniform(1, 2, drawDecode) != uniform(1, 2, drawDecode) {
		t.Error("not a function of its arguments")
	}
	seen := map[float64]bool{}
	bins := make([]int, 64)
	n := 0
	for seed := range uint64(8) {
		for pos := range 1000 {
			for p := drawFirst; p <= drawBonus; p++ {
				u := uniform(seed, pos, p)
				if u < 0 || u >= 1 || seen[u] {
					t.Fatalf("seed %d position %d purpose %d: %g", seed, pos, p, u)
				}
				seen[u] = true
				bins[int(u*64)]++
				n++
			}
		}
	}
	var x float64
	for _, b := range bins {
		d := float64(b) - float64(n)/64
		x += d * d / (float64(n) / 64)
	}
	if x > 110 || x < 30 { // 63 degrees of freedom: far beyond 99.9 % on either side
		t.Errorf("chi-square %g over 64 bins", x)
	}
}
