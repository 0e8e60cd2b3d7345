package engine

import (
	"cmp"
	"math"
	"slices"
)

// roundCost learns what a round costs from rounds that ran: time = base + perRow*rows + perTurn*turns + perPass*passes, where rows are those
// of the verifying pass, which goes through the weights once for turnRows of them at most, and passes the draft passes before it. No part is
// negative, so that what is expected of rounds unlike those seen makes sense. It is a least-squares fit of relative errors, in which a round
// that was slow for some other reason counts for little, with forgetting, so that it follows a machine that warms up or a context that grows. The
// zero value knows nothing; all lanes of an engine share one.
type roundCost struct {
	theta [4]float64    // base, perRow, perTurn, perPass
	a     [4][4]float64 // weighted sums of products of parts
	b     [4]float64    // and of parts and times
	n     int
	least float64 // the shortest time of a round, old ones forgotten
}

// turnRows is how many rows a GPU's kernels multiply with weights that they read once. Where there is no such step, perTurn comes out as nothing.
const turnRows = 8

// parts of a round that cost time.
func partsOf(rows, passes int) [4]float64 {
	return [4]float64{1, float64(rows), float64((rows + turnRows - 1) / turnRows), float64(passes)}
}

const (
	costForget = 0.999
	costTrust  = 2 // most that a round's time is believed to differ from what was expected
)

// observe notes a round's time.
func (c *roundCost) observe(rows, passes int, seconds float64) {
	if c.n++; c.n == 1 || seconds < c.least {
		c.least = seconds
	}
	c.least /= costForget
	x := partsOf(rows, passes)
	if predicted := c.of(rows, passes); c.n > 10 { // a machine that did something else meanwhile is no reason to forget what is known
		seconds = max(predicted/costTrust, min(seconds, costTrust*predicted))
	}
	weight := 1 / max(seconds*seconds, 1e-18)
	for i := range x {
		for j := range x {
			c.a[i][j] = c.a[i][j]*costForget + weight*x[i]*x[j]
		}
		c.b[i] = c.b[i]*costForget + weight*x[i]*seconds
	}
	c.fit()
}

// fit finds the parts that are not negative and fit best: of each choice of parts that are not zero, the best ones, if they are what they should be.
func (c *roundCost) fit() {
	best := math.Inf(1)
	for set := 1; set < 1<<len(c.b); set++ {
		var m [4][5]float64 // equations of the parts in the set; the others are zero
		for i := range m {
			if m[i][i] = 1; set>>i&1 == 0 {
				continue
			}
			for j := range c.b {
				if set>>j&1 == 1 {
					m[i][j] = c.a[i][j]
				}
			}
			m[i][i] += 1e-6 * c.a[i][i] // parts that always grow together share what they cost
			m[i][4] = c.b[i]
		}
		var theta [4]float64
		solved := true
		for i := range m { // positive definite: no pivots
			for k := i + 1; k < len(m); k++ {
				f := m[k][i] / m[i][i]
				for j := i; j < 5; j++ {
					m[k][j] -= f * m[i][j]
				}
			}
		}
		for i := len(m) - 1; i >= 0; i-- {
			theta[i] = m[i][4]
			for j := i + 1; j < len(m); j++ {
				theta[i] -= m[i][j] * theta[j]
			}
			theta[i] /= m[i][i]
			solved = solved && theta[i] >= 0
		}
		if !solved {
			continue
		}
		loss := 0.0
		for i, t := range theta {
			loss -= 2 * c.b[i] * t
			for j, u := range theta {
				loss += c.a[i][j] * t * u
			}
		}
		if loss < best {
			best, c.theta = loss, theta
		}
	}
}

// of is the expected time of a round.
func (c *roundCost) of(rows, passes int) float64 {
	t := 0.0
	for i, x := range partsOf(rows, passes) {
		t += c.theta[i] * x
	}
	return max(t, c.least/2, 1e-9)
}

// acceptance counts, by position in a round, drafts that were reached and those of them that stood, older ones less.
type acceptance struct {
	tries, hits []float64
	forget      float64 // what an older count is multiplied with
}

// newAcceptance believes that drafts stand with the given probabilities, as strongly as if so many had been seen.
func newAcceptance(stand []float64, weight, forget float64) *acceptance {
	a := &acceptance{forget: forget}
	for _, p := range stand {
		a.tries, a.hits = append(a.tries, weight), append(a.hits, weight*p)
	}
	return a
}

// observe notes a round of k drafts of which the first accepted stood.
func (a *acceptance) observe(k, accepted int) {
	for i := range min(k, len(a.tries)) {
		if i > accepted {
			break // not reached: nothing is known of it
		}
		a.tries[i] = a.tries[i]*a.forget + 1
		a.hits[i] *= a.forget
		if i < accepted {
			a.hits[i]++
		}
	}
}

// stand is how likely a draft at each position is to stand if it is reached. A position hardly ever reached is taken to be like the one
// before, or worse.
func (a *acceptance) stand() []float64 {
	p := make([]float64, len(a.tries))
	for i := range p {
		p[i] = a.hits[i] / a.tries[i]
		if i > 0 && a.tries[i] < 4 {
			p[i] = min(p[i], p[i-1])
		}
	}
	return p
}

// draftPolicy chooses the numbers of drafts of the lanes' next rounds from measured times and from how many of a request's drafts stood.
// Only speed depends on it: whatever it chooses, the output's distribution is the target's.
type draftPolicy struct {
	most int
	cost roundCost
	all  *acceptance // of all requests: what a new one begins with
	last int         // rounds since something else than the best was tried
	idle int         // as many are let pass before the next time while no lane drafts
	turn int         // times that something else was tried
}

func newDraftPolicy(most int) *draftPolicy {
	stand := make([]float64, most)
	for i := range stand { // a mild belief that drafts are good
		stand[i] = 0.75
	}
	return &draftPolicy{most: most, all: newAcceptance(stand, 4, 0.995)}
}

// request is what is known of a request's drafts before the first one.
func (p *draftPolicy) request() *acceptance { return newAcceptance(p.all.stand(), 6, 0.97) }

// observe notes that of a request's k drafts the first accepted stood.
func (p *draftPolicy) observe(a *acceptance, k, accepted int) {
	a.observe(k, accepted)
	p.all.observe(k, accepted)
}

// drafting is a lane of the next round: at most limit drafts.
type drafting struct {
	limit int
	seen  *acceptance // nil only if limit is 0
}

// choose returns the numbers of drafts that yield the most tokens a second in a round of these lanes: none where plain steps do, as they
// may where many lanes fill a pass anyway. full is how many lanes there will be when those that are still at their prompts have come: if a
// round of so many is expected to be the better way to tokens, a round of fewer only takes what costs no more than there.
//
// With a given number of draft passes, each further row goes to the draft that is most likely to be reached and to stand, as long as the round
// yields more with it.
func (p *draftPolicy) choose(lanes []drafting, full int) []int {
	k := make([]int, len(lanes))
	// See every length before believing a cost: of one lane, and short ones of all, since a pass with many rows is long.
	if n := p.cost.n; n < 2*(p.most+1) {
		length := (1 + n/2) % (p.most + 1)
		for i, l := range lanes {
			if n%2 == 0 && length <= 2 || n/2%len(lanes) == i {
				k[i] = min(l.limit, length)
			}
		}
		return k
	}
	type draft struct {
		lane, at int
		gain     float64 // tokens: how likely it is to be reached and to stand
	}
	var all, drafts []draft
	for i, l := range lanes {
		if l.limit == 0 {
			continue
		}
		reach := 1.0
		for at, q := range l.seen.stand()[:min(l.limit, p.most)] {
			reach *= q
			all = append(all, draft{i, at, reach})
		}
	}
	slices.SortStableFunc(all, func(a, b draft) int { return cmp.Compare(b.gain, a.gain) }) // a lane's stay in order: none is likelier than the one before
	// What a second is worth: tokens of the best round, of these lanes or of all.
	worth := 0.0
	if full > len(lanes) {
		tokens, reach := 1.0, 1.0
		for i, q := range p.all.stand() {
			worth = max(worth, float64(full)*tokens/p.cost.of(full*(i+1), i))
			reach *= q
			tokens += reach
		}
		worth = max(worth, float64(full)*tokens/p.cost.of(full*(p.most+1), p.most))
	}
	best, most := 0.0, math.Inf(-1)
	rich := make([]int, len(lanes)) // the best where seconds are worth more than this round yields
	try := make([]int, len(lanes))
	for passes := range p.most + 1 {
		drafts = slices.DeleteFunc(append(drafts[:0], all...), func(d draft) bool { return d.at >= passes })
		clear(try)
		tokens, longest := float64(len(lanes)), 0
		for n := range len(drafts) + 1 {
			if n > 0 {
				d := drafts[n-1]
				try[d.lane]++
				tokens += d.gain
				longest = max(longest, try[d.lane])
			}
			seconds := p.cost.of(len(lanes)+n, longest)
			if rate := tokens / seconds; rate > best {
				best = rate
				copy(k, try)
			}
			if left := tokens - worth*seconds; left > most {
				most = left
				copy(rich, try)
			}
		}
	}
	if worth > best {
		k = rich
	}
	return p.explore(lanes, k)
}

// A length that is never tried is never learned: now and then a lane takes a neighbour, or one draft if none has any, which happens less often the
// longer none has been worth it, and takes a hundredth of the time at most: of one lane only, since the drafter may have many of its rows to run
// first.
func (p *draftPolicy) explore(lanes []drafting, k []int) []int {
	const often, seldom = 24, 96
	none := slices.Max(k) == 0
	if !none {
		p.idle = often
	}
	if p.last++; p.last < max(often, p.idle) {
		return k
	}
	p.last = 0
	if p.turn++; none {
		plain := p.cost.of(len(lanes), 0)
		p.idle = max(min(seldom, 2*max(often, p.idle)), min(seldom*seldom, int(100*(p.cost.of(len(lanes)+1, 1)/plain-1))))
		i := p.turn % len(lanes)
		k[i] = min(1, lanes[i].limit)
		return k
	}
	i := p.turn % len(lanes)
	k[i] = max(0, min(lanes[i].limit, p.most, k[i]+1-2*(p.turn%2)))
	return k
}
