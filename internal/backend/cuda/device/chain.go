package device

import (
	"fmt"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
)

// A chain of drafts is queued at once: every pass but the first takes its tokens from the picks of the pass before, where they lie on the GPU, and
// has pinned memory of its own, since the host writes them all before the first has run.

// mostChained is the most passes of a chain.
const mostChained = 8

// slot is the pinned memory of one pass of a chain.
type slot struct{ control, report []byte }

// use makes the step's launches those of a depth in a chain, 0 for a launch alone.
func (s *step) use(c *driver.Context, depth int) error {
	if s.slots == nil {
		s.slots = []slot{{s.control, s.report}}
	}
	for len(s.slots) <= depth {
		control, err := s.pinned(c, len(s.control))
		if err != nil {
			return err
		}
		report, err := s.pinned(c, len(s.report))
		if err != nil {
			return err
		}
		s.slots = append(s.slots, slot{control, report})
	}
	if depth > 0 && s.zero == 0 {
		l := &loader{s: s, c: c}
		s.zero = l.zeros("zero", 16)
		if l.err != nil {
			return l.err
		}
		if err := c.SyncStream(s.d.stream); err != nil {
			return err
		}
	}
	s.depth, s.control, s.report = depth, s.slots[depth].control, s.slots[depth].report
	return nil
}

// follow gives the rows of a chained pass the picks of the pass before.
func (p *pass) follow() error {
	if p.s.depth == 0 {
		return nil
	}
	for i := range p.rows {
		token := p.s.rows + driver.Ptr(i*sizeOfRow) + tokenOffset
		q := kernels.GatherParams{List: p.s.zero, X: p.s.head.picked + driver.Ptr(4*i), Out: token, Width: 2, N: 1} // a token is as large as two BF16
		if err := start(p, kernels.Gather, 1, 1, 1, 0, &q); err != nil {
			return err
		}
	}
	return nil
}

// Chain is of backend.Chainer.
func (d *Device) Chain(st backend.Step, ctl *backend.Control, more int) (backend.Seq, error) {
	s, ok := st.(*step)
	if !ok || s.d != d || d.closed || s.program.Pass.Kind != backend.Draft || s.head == nil || !s.carries {
		return 0, fmt.Errorf("cuda: chain: not a step of this device that drafts, or device closed")
	}
	if more < 0 || more >= mostChained {
		return 0, fmt.Errorf("cuda: chain: %d passes after the first, at most %d", more, mostChained-1)
	}
	next := &backend.Control{}
	for i := range ctl.Lanes {
		in := &ctl.Lanes[i]
		if in.Want != backend.WantLast || in.Force != nil || in.Trace != nil {
			return 0, fmt.Errorf("cuda: chain: lane %d wants more than the last row's pick", in.Lane)
		}
		next.Lanes = append(next.Lanes, backend.LaneRows{Lane: in.Lane, Tokens: []int32{0}, Want: backend.WantLast, Chain: true})
		img := &d.images[max(0, min(in.Lane, d.opt.Lanes-1))]
		if base := img.length - img.carried; base+len(in.Tokens)+more > d.opt.Tokens {
			return 0, fmt.Errorf("cuda: chain: lane %d: %d tokens do not fit an image of %d", in.Lane, base+len(in.Tokens)+more, d.opt.Tokens)
		}
	}
	if _, err := d.queue(s, ctl, 0); err != nil {
		return 0, err
	}
	for depth := 1; depth <= more; depth++ {
		if _, err := d.queue(s, next, depth); err != nil {
			return 0, err
		}
	}
	return d.seq, nil
}

// chained are the picks of all passes of a chain, a lane's one after the other.
func (s *step) chained() (res backend.Result) {
	for i := range s.head.lanes {
		var l backend.LaneResult
		for _, one := range s.slots[:s.depth+1] {
			id := make([]int32, 1)
			copy(bytesIn(id), one.report[4+4*i:])
			l.Picks = append(l.Picks, id[0])
		}
		res.Lanes = append(res.Lanes, l)
	}
	return res
}
