package engine

// roundCost learns what a round costs from rounds that ran: time = base + perRow*rows + perPass*passes, where rows are those of the
// verifying pass and passes the draft passes before it. It is recursive least squares with forgetting, so that it follows a machine that
// warms up or a context that grows. The zero value knows nothing; all lanes of an engine share one.
type roundCost struct {
	theta [3]float64    // base, perRow, perPass
	p     [3][3]float64 // inverse of the weighted normal matrix
	n     int
}

const (
	costForget = 0.999
	costTrust  = 2 // most that a round's time is believed to differ from what was expected
)

// observe notes a round's time.
func (c *roundCost) observe(rows, passes int, seconds float64) {
	if c.n == 0 {
		for i := range c.p {
			c.p[i][i] = 1e4
		}
		c.theta = [3]float64{seconds, 0, 0}
	}
	c.n++
	x := [3]float64{1, float64(rows), float64(passes)}
	var px [3]float64
	for i := range px {
		for j := range x {
			px[i] += c.p[i][j] * x[j]
		}
	}
	denominator, predicted := costForget, 0.0
	for i := range x {
		denominator += x[i] * px[i]
		predicted += x[i] * c.theta[i]
	}
	if c.n > 10 { // a machine that did something else meanwhile is no reason to forget what is known
		seconds = max(predicted/costTrust, min(seconds, costTrust*predicted))
	}
	trace := 0.0
	for i := range x {
		c.theta[i] += px[i] / denominator * (seconds - predicted)
		for j := range x {
			c.p[i][j] = (c.p[i][j] - px[i]*px[j]/denominator) / costForget
		}
		trace += c.p[i][i]
	}
	if trace > 1e5 { // directions that never occur must not blow up while they are forgotten
		for i := range c.p {
			for j := range c.p {
				c.p[i][j] *= 1e5 / trace
			}
		}
	}
}

// parts are what was learned, without what noise may have made of it: no part is negative.
func (c *roundCost) parts() (base, perRow, perPass float64) {
	return max(c.theta[0], 0), max(c.theta[1], 0), max(c.theta[2], 0)
}

// of is the expected time of a round.
func (c *roundCost) of(rows, passes int) float64 {
	base, perRow, perPass := c.parts()
	t := base + perRow*float64(rows) + perPass*float64(passes)
	return max(t, 1e-9)
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

// draftPolicy chooses the numbers of drafts of the lanes' next rounds from measured times and from how many of a request's drafts stood
// (product.md 9.2.9). Only speed depends on it: whatever it chooses, the output's distribution is the target's.
type draftPolicy struct {
	most  int
	cost  roundCost
	all   *acceptance // of all requests: what a new one begins with
	round int
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

// drafting is a lane of the next round: at most limit drafts, at least one if limit is not 0.
type drafting struct {
	limit int
	seen  *acceptance // nil only if limit is 0
}

// choose returns the numbers of drafts that yield the most tokens a second in a round of these lanes.
//
// A round with p draft passes takes base + perPass*p + perRow*rows. For each p it is best to give a lane the k <= p that maximises its
// tokens minus rate*perRow*k, where rate is that of the whole round: a few steps find it.
func (p *draftPolicy) choose(lanes []drafting) []int {
	p.round++
	k := make([]int, len(lanes))
	if p.cost.n < 2*p.most { // see every length before believing a cost
		for i, l := range lanes {
			k[i] = min(l.limit, 1+p.cost.n%p.most)
		}
		return k
	}
	expected := make([][]float64, len(lanes)) // tokens of a lane's round by its drafts
	for i, l := range lanes {
		tokens, reach := 1.0, 1.0
		expected[i] = append(expected[i], tokens)
		if l.limit > 0 {
			stand := l.seen.stand()
			for _, q := range stand[:min(l.limit, p.most)] {
				reach *= q
				tokens += reach
				expected[i] = append(expected[i], tokens)
			}
		}
	}
	best := 0.0
	try := make([]int, len(lanes))
	_, perRow, _ := p.cost.parts()
	for passes := 1; passes <= p.most; passes++ {
		rate := 0.0
		for range 4 {
			tokens, rows, longest := 0.0, 0, 0
			for i, e := range expected {
				d := min(1, len(e)-1)
				for d < min(len(e)-1, passes) && e[d+1]-e[d] > rate*perRow {
					d++
				}
				try[i] = d
				tokens += e[d]
				rows += d + 1
				longest = max(longest, d)
			}
			rate = tokens / p.cost.of(rows, longest)
		}
		if rate > best {
			best = rate
			copy(k, try)
		}
	}
	// A length that is never tried is never learned: now and then a lane takes a neighbour.
	if p.round%exploreEvery == 0 {
		i := p.round / exploreEvery % len(lanes)
		if most := len(expected[i]) - 1; most > 0 {
			k[i] = max(1, min(most, k[i]+1-2*(p.round/exploreEvery%2)))
		}
	}
	return k
}

const exploreEvery = 24
