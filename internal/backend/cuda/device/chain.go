package device

import (
	"fmt"
	"slices"
	"unsafe"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
)

// A chain of drafts is queued at once: every pass but the first takes its tokens from the picks of the pass before, where they lie on the GPU, and
// has pinned memory of its own, since the host writes them all before the first has run. What verifies them is queued behind it and takes their
// picks from that memory: the host needs them only for the rows of the n-gram table, which the second layer wants.

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
		size := len(s.report)
		s.slots = append(s.slots, slot{control, s.reports[len(s.slots)*size:][:size]})
	}
	s.depth, s.control, s.report = depth, s.slots[depth].control, s.slots[depth].report
	return nil
}

// start brings the control block to the GPU and gives the rows of a chained pass the picks of the pass before, and those of a pass behind a chain the
// picks of its passes.
func (p *pass) start() error {
	host, n := driver.Ptr(uintptr(unsafe.Pointer(&p.s.control[0]))), uint32(len(p.s.control)/16)
	if p.s.depth > 0 {
		q := kernels.GatherParams{List: host, X: p.s.head.picked, Out: p.s.block, Width: n, N: uint32(len(p.rows))}
		return start(p, kernels.BeginChained, 1, 1, 1, 0, &q)
	}
	if p.arming {
		blocks := 1
		if p.bring != 0 {
			blocks = int(p.s.d.owner.Device().SMs)
		}
		return start(p, kernels.BeginArmed, blocks, 1, 1, 0, &kernels.GatherParams{List: host, X: p.bring, Out: p.s.block, Width: n})
	}
	if err := start(p, kernels.Begin, 1, 1, 1, 0, &kernels.BeginParams{Host: host, Device: p.s.block, N: n}); err != nil {
		return err
	}
	if c := p.s.behind; c != nil {
		picks := driver.Ptr(uintptr(unsafe.Pointer(&c.reports[0])))
		q := kernels.GatherParams{X: picks, Out: p.s.rows, Width: uint32(len(c.report) / 4), N: uint32(len(p.rows))}
		return start(p, kernels.DraftedTokens, 1, 1, 1, 0, &q)
	}
	return nil
}

// narrow leaves the rows of a first draft pass that are there for their keys and values only: from here on its last row is computed alone. The rows of
// several lanes do not end side by side.
func (p *pass) narrow() {
	if n := len(p.rows); p.plain && p.s.program.Pass.Kind == backend.Draft && len(p.lanes) == 1 && len(p.wanted) == 1 && int(p.wanted[0]) == n-1 {
		p.from = n - 1
	}
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
	n := s.depth + 1
	picks := make([]int32, n*len(s.head.lanes))
	for i := range s.head.lanes {
		l := backend.LaneResult{Picks: picks[i*n : i*n : i*n+n]}
		for _, one := range s.slots[:s.depth+1] {
			l.Picks = append(l.Picks, pick(one.report, i))
		}
		res.Lanes = append(res.Lanes, l)
	}
	return res
}

// Behind is of backend.Chainer.
func (d *Device) Behind(st backend.Step, ctl *backend.Control) ([][]int32, backend.Seq, error) {
	s, ok := st.(*step)
	if !ok || s.d != d || d.closed || s.program.Pass.Kind != backend.Verify {
		return nil, 0, fmt.Errorf("cuda: behind a chain: not a step of this device that verifies, or device closed")
	}
	chain := d.last
	if chain == nil || chain.program.Pass.Kind != backend.Draft || len(chain.pass.lanes) > len(ctl.Lanes) || chain.head == nil {
		return nil, 0, fmt.Errorf("cuda: behind a chain: the last launch was none of at most %d lanes", len(ctl.Lanes))
	}
	with := &backend.Control{Lanes: slices.Clone(ctl.Lanes)}
	for i := range chain.pass.lanes {
		in := &with.Lanes[i]
		if more := len(in.Positions) - 1; len(in.Tokens) != 1 || more < 0 || more > chain.depth+1 || int(chain.pass.lanes[i].Slot) != in.Lane {
			return nil, 0, fmt.Errorf("cuda: behind a chain: lane %d: %d tokens and %d positions, or lanes in another order", in.Lane, len(in.Tokens), len(in.Positions))
		}
		in.Tokens = append(in.Tokens[:1:1], make([]int32, len(in.Positions)-1)...) // drafted fills them in
	}
	s.behind = chain
	_, err := d.queue(s, with, 0)
	s.behind = nil
	if err != nil {
		return nil, 0, err
	}
	return s.drafts, d.seq, nil
}

// drafted waits for the picks of a pass of the chain that the launch is behind and makes them tokens of its lanes.
func (p *pass) drafted(depth int) error {
	chain := p.s.behind
	report := chain.slots[depth].report
	if !soon(report, uint32(chain.seq)-uint32(chain.depth-depth), chain.told) {
		if err := p.c.Sync(p.s.end); err != nil {
			return err
		}
	}
	for i := range chain.pass.lanes {
		id := pick(report, i)
		p.s.drafts[i] = append(p.s.drafts[i], id)
		if depth+1 < len(p.in[i].Tokens) {
			p.in[i].Tokens[depth+1] = id
		}
	}
	return nil
}

// follows is gather behind a chain: each row of a lane is looked up as soon as the pass that drafted it is over.
func (p *pass) follows(number uint32) error {
	t, chain := p.s.table, p.s.behind
	p.s.drafts = make([][]int32, len(chain.pass.lanes))
	var before [][]int32
	if t != nil {
		for i := range p.lanes {
			img := &p.s.d.images[p.lanes[i].Slot]
			history := slices.Clone(img.history)
			if img.keep > 0 {
				history = img.folded(history)
			}
			before = append(before, history)
		}
	}
	var err error
	for j := range chain.depth + 2 {
		if j > 0 {
			if err = p.drafted(j - 1); err != nil {
				break
			}
		}
		for i := range before {
			if j >= len(p.in[i].Tokens) {
				continue
			}
			token, at := p.in[i].Tokens[j], int(p.lanes[i].First)+j
			ids := t.ids[at*t.heads : (at+1)*t.heads]
			hash(t.w, before[i], token, ids)
			before[i] = append(before[i], token)
			if e := p.s.d.rows(&t.w.Table, ids, t.staged[ahead+at*t.heads*t.w.Table.RowBytes:]); err == nil {
				err = e
			}
		}
	}
	if t != nil {
		t.ready(number)
	}
	return err
}
