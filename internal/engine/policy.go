package engine

// roundCost learns what a round costs from rounds that ran: time = base + perRow*rows + perPass*passes, where rows are those of the
// verifying pass and passes the draft passes before it. It is recursive least squares with forgetting, so that it follows a machine that
// warms up or a context that grows. The zero value knows nothing; all lanes of an engine share one.
type roundCost struct {
	theta [3]float64    // base, perRow, perPass
	p     [3][3]float64 // inverse of the weighted normal matrix
	n     int
}

const costForget = 0.997

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

// of is the expected time of a round; it grows with rows and passes whatever noise was learned.
func (c *roundCost) of(rows, passes int) float64 {
	base, perRow, perPass := max(c.theta[0], 0), max(c.theta[1], 0), max(c.theta[2], 0)
	t := base + perRow*float64(rows) + perPass*float64(passes)
	return max(t, 1e-9)
}

// draftPolicy chooses the number of drafts of a lane's next round from its own acceptance (product.md 9.2.9). Only speed depends on it:
// whatever it chooses, the output's distribution is the target's.
type draftPolicy struct {
	most  int
	tries []float64 // decayed counts by position: reached, and accepted there
	hits  []float64
	cost  *roundCost
	round int
}

const acceptForget = 0.97

func newDraftPolicy(most int, cost *roundCost) *draftPolicy {
	p := &draftPolicy{most: most, tries: make([]float64, most), hits: make([]float64, most), cost: cost}
	for i := range p.tries { // a mild belief that drafts are good, worth two rounds
		p.tries[i], p.hits[i] = 2, 1.5
	}
	return p
}

// observe notes a round of k drafts of which the first accepted stood.
func (p *draftPolicy) observe(k, accepted int) {
	for i := range min(k, p.most) {
		if i > accepted {
			break // not reached: nothing is known of it
		}
		p.tries[i] *= acceptForget
		p.hits[i] *= acceptForget
		p.tries[i]++
		if i < accepted {
			p.hits[i]++
		}
	}
}

// choose returns the number of drafts, 1 to limit, that yields the most tokens a second, in a round where other lanes bring otherRows
// rows and otherPasses draft passes anyway.
func (p *draftPolicy) choose(limit, otherRows, otherPasses int) int {
	limit = min(limit, p.most)
	if p.cost.n < 2*p.most { // see every length before believing a cost
		return max(1, min(limit, 1+p.cost.n%p.most))
	}
	best, bestRate := 1, 0.0
	expected, reach, last := 1.0, 1.0, 1.0
	for k := 1; k <= limit; k++ {
		a := p.hits[k-1] / p.tries[k-1]
		if p.tries[k-1] < 4 { // a position hardly ever reached is taken to be like the one before
			a = min(a, last)
		}
		last = a
		reach *= a
		expected += reach
		if rate := expected / p.cost.of(otherRows+k+1, max(otherPasses, k)); rate > bestRate {
			best, bestRate = k, rate
		}
	}
	// A length that is never tried is never learned: now and then take a neighbour.
	if p.round++; p.round%exploreEvery == 0 {
		best += 1 - 2*(p.round/exploreEvery%2)
	}
	return max(1, min(best, limit))
}

const exploreEvery = 24
