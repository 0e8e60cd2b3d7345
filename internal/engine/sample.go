package engine

import (
	"math"
	"slices"

	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// TopKLimit is the most candidates a draw considers.
const TopKLimit = 20

// Sampling says how a token is drawn from logits. The zero value is greedy.
type Sampling struct {
	Temperature float64 // 0 is greedy: everything else is ignored
	TopP        float64 // 0 counts as 1
	TopK        int     // 0 counts as TopKLimit
	MinP        float64
	Presence    float64 // subtracted from tokens that were generated
	Frequency   float64 // subtracted once for each time
	Seed        uint64
}

// Greedy reports whether the largest logit wins.
func (s Sampling) Greedy() bool { return s.Temperature == 0 }

// purpose separates the draws at one position.
type purpose uint64

const (
	drawFirst purpose = iota + 1
	drawDecode
	drawAccept
	drawCorrection
	drawBonus
)

// uniform is a number in [0, 1) that depends on nothing but its arguments: two rounds of the SplitMix64 output
// function over the counter, keyed by the seed.
func uniform(seed uint64, position int, p purpose) float64 {
	z := mix(seed + 0x9E3779B97F4A7C15*(8*uint64(position)+uint64(p)))
	return float64(mix(z^seed)>>11) / (1 << 53)
}

func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// candidate is a token that may be drawn, with its weight.
type candidate struct {
	id     int32
	value  float64 // adjusted logit
	weight float64
}

// sampler filters logits of one request.
type sampler struct {
	Sampling
	ids    int           // ids at or above it never win
	counts map[int32]int // how often each token was generated
	list   []candidate   // reused
}

func newSampler(s Sampling, ids int) *sampler {
	return &sampler{Sampling: s, ids: ids, counts: map[int32]int{}, list: make([]candidate, 0, TopKLimit+1)}
}

// limit is the most candidates of a draw.
func (s *sampler) limit() int {
	if s.TopK <= 0 || s.TopK > TopKLimit {
		return TopKLimit
	}
	return s.TopK
}

// adjusted is the value of an id's logit, rounded to BF16 as a device stores it, after penalties.
func (s *sampler) adjusted(id int32, logit float32) float64 {
	v := num.RoundBF16(float64(logit))
	if n := s.counts[id]; n > 0 {
		v -= s.Presence + s.Frequency*float64(n)
	}
	return v
}

// among returns what filter does where the most likely ids tell: an id outside of the list has at most the least value in it, and
// penalties make nothing larger.
func (s *sampler) among(likely []backend.Likely) (list []candidate, ok bool) {
	if s.Presence < 0 || s.Frequency < 0 {
		return nil, false
	}
	limit, least := s.limit(), math.Inf(1)
	list = s.list[:0]
	for _, l := range likely {
		least = min(least, float64(l.Value))
		list = insert(list, limit, candidate{id: l.ID, value: s.adjusted(l.ID, l.Value)})
	}
	s.list = list
	if len(likely) < s.ids && (len(list) < limit || !(list[limit-1].value > least)) {
		return nil, false
	}
	return s.cut(list), true
}

// filter returns the distribution that is drawn from, best first. The result is valid until the next call.
func (s *sampler) filter(logits []float32) []candidate {
	limit := s.limit()
	logits = logits[:min(s.ids, len(logits))]
	list := s.list[:0]
	// Tokens that were generated have values of their own; among the many others only what may exceed the last of a full list is looked at.
	for id, n := range s.counts {
		if n > 0 && int(id) < len(logits) {
			list = insert(list, limit, candidate{id: id, value: s.adjusted(id, logits[id])})
		}
	}
	floor := floorOf(list, limit)
	for first := 0; first < len(logits); first += 8 {
		if first+8 <= len(logits) {
			l := (*[8]float32)(logits[first:])
			if l[0] <= floor && l[1] <= floor && l[2] <= floor && l[3] <= floor && l[4] <= floor && l[5] <= floor && l[6] <= floor && l[7] <= floor {
				continue
			}
		}
		for i, v := range logits[first:min(first+8, len(logits))] {
			if id := int32(first + i); v > floor && s.counts[id] <= 0 {
				list = insert(list, limit, candidate{id: id, value: num.RoundBF16(float64(v))})
				floor = floorOf(list, limit)
			}
		}
	}
	s.list = list
	return s.cut(list)
}

// cut gives the candidates weights and drops those that min-p and top-p leave out.
func (s *sampler) cut(list []candidate) []candidate {
	var total float64
	keep := 0
	for i := range list {
		list[i].weight = math.Exp((list[i].value - list[0].value) / s.Temperature)
		if list[i].weight < s.MinP {
			break
		}
		total += list[i].weight
		keep++
	}
	list = list[:keep]
	if s.TopP > 0 && s.TopP < 1 {
		var sum float64
		for i := range list {
			if sum += list[i].weight; sum >= s.TopP*total {
				list = list[:i+1]
				break
			}
		}
	}
	return list
}

// insert keeps the best candidates in order: the larger value, then the lower id. A value that is no number is none.
func insert(list []candidate, limit int, c candidate) []candidate {
	at := len(list)
	for at > 0 && (c.value > list[at-1].value || c.value == list[at-1].value && c.id < list[at-1].id) {
		at--
	}
	if at == limit || math.IsNaN(c.value) {
		return list
	}
	if len(list) == limit {
		list = list[:limit-1]
	}
	return slices.Insert(list, at, c)
}

// floorOf is a bound that a logit must exceed to get into the list: rounded it is not above the last one's value otherwise, nor a tie.
func floorOf(list []candidate, limit int) float32 {
	if len(list) < limit {
		return float32(math.Inf(-1))
	}
	last := float32(list[limit-1].value)
	return last - max(float32(math.Abs(float64(last)))/64, 0x1p-120) // more than the distance to the BF16 value below
}

// draw takes one of the candidates, except the given id, with probability proportional to weight. u is uniform in [0, 1).
func draw(list []candidate, except int32, u float64) int32 {
	var total float64
	last := int32(-1)
	for _, c := range list {
		if c.id != except {
			total += c.weight
			last = c.id
		}
	}
	u *= total
	for _, c := range list {
		if c.id == except {
			continue
		}
		if u -= c.weight; u < 0 {
			return c.id
		}
	}
	return last
}

// probability of an id under the candidates.
func probability(list []candidate, id int32) float64 {
	var total, p float64
	for _, c := range list {
		total += c.weight
		if c.id == id {
			p = c.weight
		}
	}
	return p / total
}

// next draws the token at an output position.
func (s *sampler) next(list []candidate, position int, p purpose) int32 {
	return draw(list, -1, uniform(s.Seed, position, p))
}

// judge decides one draft: whether it stands, and the token drawn in its place if not. A draft is what a
// deterministic drafter said, so keeping it with its own probability, and else drawing from the rest, keeps the distribution.
func (s *sampler) judge(list []candidate, draft int32, position int) (ok bool, instead int32) {
	if uniform(s.Seed, position, drawAccept) < probability(list, draft) {
		return true, 0
	}
	return false, draw(list, draft, uniform(s.Seed, position, drawCorrection))
}

func (s *sampler) count(ids ...int32) {
	for _, id := range ids {
		s.counts[id]++
	}
}

func (s *sampler) uncount(ids ...int32) {
	for _, id := range ids {
		s.counts[id]--
	}
}
