// Package cpu runs programs on the processor.
//
// It holds the oracle: for every operation a version so plain that reading it convinces, in float64, either exact (no
// intermediate rounding) or stored (values rounded to BF16 exactly where a kernel stores them). Every faster implementation,
// here and on the GPU, is compared with it.
//
// A device belongs to one goroutine; inside a launch it uses all cores. Results do not depend on their number: every output
// element is computed by one goroutine in a fixed order.
package cpu

import (
	"fmt"

	"ninfer/internal/backend"
)

// Options size a device.
type Options struct {
	States []backend.State // the image, as the model declares it
	Lanes  int
	Saved  int // saved images
	Tokens int // most tokens of an image
	Verify int // most rows of one lane in a Verify pass
	Carry  int // most rows a launch can leave carried: at least the largest prefill chunk when a drafter runs
	Stored bool
	// Wide, with Stored: prompts of more rows in a pass store more of what they compute in BF16, as a GPU's kernels for many rows do: normalised
	// streams, low-rank values and each routed expert's result. 0 for none.
	Wide int

	// Pages is the size of the pool that images take their rows from, backend.PageTokens tokens at a time; 0 is enough for all images.
	Pages int
	// Commit takes all memory of the pool at the start. Without it a page takes its memory when it is first written.
	Commit bool
	// KV is what keys, values and index keys are kept in: by the fast device truly, by the oracle as rounding.
	KV backend.Cache
	// BF16State keeps delta-net matrices in BF16: rounded once a pass, when it puts them away. Results then depend on how many rows a
	// pass has.
	BF16State bool

	// Threads is the number of workers of a fast device, 0 for one a processor that Go may use.
	Threads int
	// Level is the instruction set of a fast device.
	Level Level
}

// value is the element type of an implementation: the oracle computes in float64, the fast path in float32.
type value interface{ float32 | float64 }

// operations is one implementation of the operations on a machine.
type operations[T value] interface {
	// prepare returns what runs op in the passes of a step.
	prepare(s *step[T], op backend.Op) (func(*pass[T]) error, error)
	// recorded is the number of values that a Verify pass leaves for one row of a Fixed state.
	recorded(s backend.State) int
	// fold brings a Fixed state from before the recorded rows to after them; there is at least one.
	fold(s backend.State, img *image[T], id backend.StateID, records []T)
	// packed reports whether caches and states are kept in the bytes that their formats take.
	packed() bool
	weightBytes() int64
	close()
}

// machine is the part of a device that all implementations share: images, records, the walk through a program.
type machine[T value] struct {
	opt    Options
	ops    operations[T]
	lanes  []*image[T]
	saved  []*image[T]
	pages  backend.Pool
	planes []*plane[T] // by state, nil of Fixed and Carried ones
	seq    backend.Seq
	result backend.Result
	closed bool
}

// image is one sequence's state at its committed length, and the records of a pass that may still be cut.
type image[T value] struct {
	length  int        // tokens committed by the target
	carried int        // rows waiting for the drafter
	table   []int32    // pages, as many as its rows need
	states  [][]T      // Fixed and Carried ones
	halves  [][]uint16 // those kept in BF16 instead

	// A Verify pass leaves the Fixed states alone and puts what it takes to bring them forward into records[state], row after row.
	records  [][]T
	keep     int         // recorded rows that the commit keeps and the next pass folds
	chained  int         // draft rows appended beyond the drafter's length since the last target pass
	chain    []T         // the streams after the last draft row
	stood    [3]int32    // and the position of that row
	launched backend.Seq // the last launch that used this lane, to find one given twice
}

func newMachine[T value](opt Options, ops operations[T]) *machine[T] {
	m := &machine[T]{opt: opt, ops: ops}
	pages := opt.Pages
	if pages == 0 {
		pages = (opt.Lanes + opt.Saved) * backend.PagesOf(opt.Tokens)
	}
	m.pages = backend.NewPool(pages)
	for _, s := range opt.States {
		var p *plane[T]
		if s.Kind == backend.PerToken || s.Kind == backend.PerBlock {
			p = newPlane[T](s, opt.KV, pages, ops.packed())
			if opt.Commit {
				p.commit()
			}
		}
		m.planes = append(m.planes, p)
	}
	for range opt.Lanes {
		m.lanes = append(m.lanes, m.newImage(true))
	}
	for range opt.Saved {
		m.saved = append(m.saved, m.newImage(false))
	}
	return m
}

func (m *machine[T]) newImage(lane bool) *image[T] {
	img := &image[T]{table: make([]int32, 0, backend.PagesOf(m.opt.Tokens))}
	for _, s := range m.opt.States {
		var state, records []T
		var half []uint16
		switch {
		case s.Kind == backend.Carried:
			state = make([]T, m.opt.Carry*s.Width)
		case s.Kind == backend.Fixed && m.half(s):
			half = make([]uint16, s.Rows*s.Width)
		case s.Kind == backend.Fixed:
			state = make([]T, s.Rows*s.Width)
		}
		if lane && s.Kind == backend.Fixed {
			records = make([]T, m.opt.Verify*m.ops.recorded(s))
		}
		img.states, img.halves, img.records = append(img.states, state), append(img.halves, half), append(img.records, records)
	}
	m.empty(img)
	return img
}

// half reports whether a Fixed state is kept in BF16.
func (m *machine[T]) half(s backend.State) bool {
	return m.opt.BF16State && s.Store == backend.StoreMatrix && m.ops.packed()
}

// live is the number of values of a Fixed or Carried state that mean something.
func (m *machine[T]) live(img *image[T], s backend.State) int {
	if s.Kind == backend.Carried {
		return img.carried * s.Width
	}
	return s.Rows * s.Width
}

// flush folds the kept records into the image and forgets drafts.
func (m *machine[T]) flush(img *image[T]) {
	if img.keep > 0 {
		for id, s := range m.opt.States {
			if s.Kind == backend.Fixed {
				m.ops.fold(s, img, backend.StateID(id), img.records[id][:img.keep*m.ops.recorded(s)])
			}
		}
	}
	img.keep, img.chained, img.chain = 0, 0, img.chain[:0]
}

// step is a compiled program: what runs each operation, and room for activations and for a launch.
type step[T value] struct {
	program *backend.Program
	run     []func(*pass[T]) error
	bufs    [][]T
	carries bool            // some operation leaves carried rows
	stem    backend.StateID // positions of the carried rows, for a drafter's pass
	vocab   int             // ids there are embeddings for
	hidden  int             // values of an embedding
	pass    pass[T]
}

func (s *step[T]) Pass() backend.Pass { return s.program.Pass }

func (m *machine[T]) Compile(p *backend.Program) (backend.Step, error) {
	if p.Pass.Rows < 1 || p.Pass.Lanes < 1 {
		return nil, fmt.Errorf("cpu: compile %v: no rows", p.Pass.Kind)
	}
	s := &step[T]{program: p}
	for _, b := range p.Bufs {
		s.bufs = append(s.bufs, make([]T, p.Pass.Rows*b.Width))
	}
	stem := false
	for _, op := range p.Ops {
		run, err := m.ops.prepare(s, op)
		if err != nil {
			return nil, fmt.Errorf("cpu: compile %v: %v: %w", p.Pass.Kind, op, err)
		}
		s.run = append(s.run, run)
		switch op := op.(type) {
		case backend.Carry:
			s.carries = true
		case backend.QSA:
			if err := m.fits(op); err != nil {
				return nil, fmt.Errorf("cpu: compile %v: %v: %w", p.Pass.Kind, op, err)
			}
		case backend.Embed:
			s.vocab, s.hidden = op.W.N, op.W.Cols()
		case backend.Stem:
			s.stem, stem = op.Positions, true
			s.vocab, s.hidden = op.W.Embed.N, op.W.Embed.Cols()
		}
	}
	if drafting := p.Pass.Kind == backend.Draft || p.Pass.Kind == backend.Seed; drafting != stem {
		return nil, fmt.Errorf("cpu: compile %v: a drafter's pass has a stem and no other has", p.Pass.Kind)
	}
	s.pass = pass[T]{
		m: m, step: s, kind: p.Pass.Kind,
		lanes:   make([]lane[T], 0, p.Pass.Lanes),
		rows:    make([]row, 0, p.Pass.Rows),
		pending: make([]backend.Buf, len(p.Bufs)),
		result:  backend.Result{Lanes: make([]backend.LaneResult, 0, p.Pass.Lanes)},
	}
	return s, nil
}

// fits tells why an attention's heads cannot be kept in the cache's format.
func (m *machine[T]) fits(op backend.QSA) error {
	n := op.W.HeadDim
	switch {
	case m.opt.KV != backend.CacheFP8:
		return nil
	case n&(n-1) != 0:
		return fmt.Errorf("a cache in fp8 needs heads of a power of two values, these have %d", n)
	case m.opt.States[op.Keys].Group != n || m.opt.States[op.Values].Group != n:
		return fmt.Errorf("a cache in fp8 needs states that share a scale among the %d values of a head", n)
	}
	return nil
}

// row is one row of a launch: which lane's, which token, where in its sequence.
type row struct {
	lane     int // index into pass.lanes
	index    int // among the lane's rows
	at       int // index in its sequence, on the clock of the pass
	token    int32
	position [3]int32
}

// lane is one lane's part of a launch.
type lane[T value] struct {
	img   *image[T]
	in    *backend.LaneRows
	first int // its first row
	base  int // length before the launch, on the clock of the pass
}

// pass is a launch in progress.
type pass[T value] struct {
	m       *machine[T]
	step    *step[T]
	kind    backend.Kind
	lanes   []lane[T]
	rows    []row
	pending []backend.Buf // of each streams buffer: 1 + the block output whose injection waits, 0 for none
	result  backend.Result
}

// buf returns the activation b of the rows of the pass, and its width.
func (p *pass[T]) buf(b backend.Buf) ([]T, int) {
	w := p.step.program.Bufs[b].Width
	return p.step.bufs[b][:len(p.rows)*w], w
}

// pend leaves y as the pending injection of streams x.
func (p *pass[T]) pend(x, y backend.Buf) { p.pending[x] = y + 1 }

// drop forgets the pending injection of streams x.
func (p *pass[T]) drop(x backend.Buf) { p.pending[x] = 0 }

// injection returns the pending injection of streams x.
func (p *pass[T]) injection(x backend.Buf) (y backend.Buf, ok bool) {
	if p.pending[x] == 0 {
		return 0, false
	}
	return p.pending[x] - 1, true
}

// drafting reports whether the rows are the drafter's.
func (p *pass[T]) drafting() bool { return p.kind == backend.Draft || p.kind == backend.Seed }

// table returns the pages of row r's lane.
func (p *pass[T]) table(r row) []int32 { return p.lanes[r.lane].img.table }

func (m *machine[T]) Launch(st backend.Step, c *backend.Control) (backend.Seq, error) {
	s, ok := st.(*step[T])
	if !ok || m.closed || s.pass.m != m {
		return 0, fmt.Errorf("cpu: launch: step of another device, or device closed")
	}
	p := &s.pass
	m.seq++
	if err := p.begin(c); err != nil {
		return 0, fmt.Errorf("cpu: launch %v: %w", p.kind, err)
	}
	for i, run := range s.run {
		if err := run(p); err != nil {
			return 0, fmt.Errorf("cpu: %v: %v: %w", p.kind, s.program.Ops[i], err)
		}
	}
	p.end()
	m.result = p.result
	return m.seq, nil
}

// begin checks the control block and lays out the rows.
func (p *pass[T]) begin(c *backend.Control) error {
	if len(c.Lanes) == 0 || len(c.Lanes) > p.step.program.Pass.Lanes {
		return fmt.Errorf("%d lanes for a step of %d", len(c.Lanes), p.step.program.Pass.Lanes)
	}
	p.lanes, p.rows = p.lanes[:0], p.rows[:0]
	clear(p.pending)
	drafting := p.drafting()
	for i := range c.Lanes {
		in := &c.Lanes[i]
		n := len(in.Tokens)
		if in.Lane < 0 || in.Lane >= len(p.m.lanes) || p.m.lanes[in.Lane].launched == p.m.seq {
			return fmt.Errorf("lane %d given twice or outside 0..%d", in.Lane, len(p.m.lanes)-1)
		}
		img := p.m.lanes[in.Lane]
		img.launched = p.m.seq
		if n == 0 || !drafting && len(in.Positions) != n || len(p.rows)+n > p.step.program.Pass.Rows {
			return fmt.Errorf("lane %d: %d tokens, %d positions, room for %d rows", in.Lane, n, len(in.Positions), p.step.program.Pass.Rows-len(p.rows))
		}
		if p.kind == backend.Verify && n > p.m.opt.Verify {
			return fmt.Errorf("lane %d: %d rows to verify, room for %d", in.Lane, n, p.m.opt.Verify)
		}
		if p.kind == backend.Decode && n != 1 {
			return fmt.Errorf("lane %d: %d rows to decode, need one", in.Lane, n)
		}
		for j, t := range in.Tokens {
			if t < 0 || int(t) >= p.step.vocab {
				return fmt.Errorf("lane %d: token %d is not in a vocabulary of %d", in.Lane, t, p.step.vocab)
			}
			if in.Media != nil && (len(in.Media) != n || in.Media[j] != nil && len(in.Media[j]) != p.step.hidden) {
				return fmt.Errorf("lane %d: media rows do not match %d tokens of %d values", in.Lane, n, p.step.hidden)
			}
		}
		base := img.length
		if drafting {
			base = img.length - img.carried + img.chained
			switch {
			case in.Chain && (n != 1 || len(img.chain) == 0):
				return fmt.Errorf("lane %d: a chained draft has one row and follows a draft", in.Lane)
			case !in.Chain && n > img.carried:
				return fmt.Errorf("lane %d: %d rows, %d carried", in.Lane, n, img.carried)
			}
		} else {
			p.m.flush(img)
			if p.step.carries && img.carried+n > p.m.opt.Carry {
				return fmt.Errorf("lane %d: %d rows on top of %d carried, room for %d", in.Lane, n, img.carried, p.m.opt.Carry)
			}
		}
		if base+n > p.m.opt.Tokens {
			return fmt.Errorf("lane %d: %d tokens do not fit an image of %d", in.Lane, base+n, p.m.opt.Tokens)
		}
		var err error
		if img.table, err = p.m.pages.Grow(img.table, base+n); err != nil {
			return fmt.Errorf("lane %d: %w", in.Lane, err)
		}
		p.lanes = append(p.lanes, lane[T]{img: img, in: in, first: len(p.rows), base: base})
		for j, t := range in.Tokens {
			r := row{lane: i, index: j, at: base + j, token: t}
			switch {
			case !drafting:
				r.position = in.Positions[j]
			case in.Chain:
				r.position = [3]int32{img.stood[0] + 1, img.stood[1] + 1, img.stood[2] + 1}
			default:
				for a := range r.position {
					r.position[a] = int32(img.states[p.step.stem][3*j+a])
				}
			}
			p.rows = append(p.rows, r)
		}
	}
	return nil
}

// end moves the lengths.
func (p *pass[T]) end() {
	for i := range p.lanes {
		img, n := p.lanes[i].img, len(p.lanes[i].in.Tokens)
		if !p.drafting() {
			img.length += n
			if p.step.carries {
				img.carried += n
			}
			if p.kind == backend.Verify {
				img.keep = n
			}
			continue
		}
		img.stood = p.rows[p.lanes[i].first+n-1].position
		if p.lanes[i].in.Chain {
			img.chained++
			continue
		}
		for id, s := range p.m.opt.States {
			if s.Kind == backend.Carried {
				copy(img.states[id], img.states[id][n*s.Width:img.carried*s.Width])
			}
		}
		img.carried -= n
	}
}

// carry copies the streams, already materialised, into the carried rows; of a drafter's pass only the last row, apart from them.
func (p *pass[T]) carry(op backend.Carry) {
	x, width := p.buf(op.X.X)
	for r, row := range p.rows {
		img := p.lanes[row.lane].img
		src := x[r*width : (r+1)*width]
		if p.drafting() {
			img.chain = append(img.chain[:0], src...)
			continue
		}
		at := img.carried + row.index
		copy(img.states[op.Out][at*width:], src)
		for a, v := range row.position {
			img.states[op.Positions][at*3+a] = T(v)
		}
	}
}

func (m *machine[T]) Wait(s backend.Seq) (backend.Result, error) {
	if s != m.seq {
		return backend.Result{}, fmt.Errorf("cpu: wait for launch %d, last is %d", s, m.seq)
	}
	return m.result, nil
}

func (m *machine[T]) Commit(lane, n int) error {
	if lane < 0 || lane >= len(m.lanes) {
		return fmt.Errorf("cpu: commit: no lane %d", lane)
	}
	img := m.lanes[lane]
	if n < 0 || n > img.keep {
		return fmt.Errorf("cpu: commit %d rows of lane %d: %d are pending", n, lane, img.keep)
	}
	cut := img.keep - n
	img.length -= cut
	img.carried = max(0, img.carried-cut)
	img.keep = n
	return nil
}

func (m *machine[T]) find(i backend.Image) (*image[T], error) {
	set := m.lanes
	if i.Saved {
		set = m.saved
	}
	if i.Index < 0 || i.Index >= len(set) {
		return nil, fmt.Errorf("cpu: no image %+v", i)
	}
	return set[i.Index], nil
}

func (m *machine[T]) Reset(i backend.Image) error {
	img, err := m.find(i)
	if err != nil {
		return err
	}
	m.empty(img)
	return nil
}

// empty takes an image's rows and gives the Fixed states their initial values.
func (m *machine[T]) empty(img *image[T]) {
	img.length, img.carried, img.keep, img.chained, img.chain = 0, 0, 0, 0, img.chain[:0]
	img.table = m.pages.Shrink(img.table, 0)
	for id, s := range m.opt.States {
		if s.Kind != backend.Fixed {
			continue
		}
		for i := range img.states[id] {
			img.states[id][i] = T(s.Initial)
		}
		clear(img.halves[id])
	}
}

func (m *machine[T]) Move(dst, src backend.Image) error {
	d, err := m.find(dst)
	if err != nil {
		return err
	}
	s, err := m.find(src)
	if err != nil {
		return err
	}
	m.flush(s)
	if d == s {
		return nil
	}
	// Pages whose rows both clocks have left behind are shared, the others copied.
	var shared int
	if d.table, shared, err = m.pages.Copy(d.table, s.table, s.length-s.carried, s.length); err != nil {
		m.empty(d)
		return fmt.Errorf("cpu: move %+v to %+v: %w", src, dst, err)
	}
	for i := shared; i < len(d.table); i++ {
		for _, p := range m.planes {
			if p != nil {
				p.copy(d.table[i], s.table[i])
			}
		}
	}
	d.length, d.carried = s.length, s.carried
	d.keep, d.chained, d.chain = 0, 0, d.chain[:0]
	for id, state := range m.opt.States {
		if state.Kind == backend.Fixed || state.Kind == backend.Carried {
			copy(d.states[id][:min(m.live(s, state), len(d.states[id]))], s.states[id])
			copy(d.halves[id], s.halves[id])
		}
	}
	return nil
}

// Pages tells how many pages images hold, shared ones once, and how many there are.
func (m *machine[T]) Pages() (used, all int) { return m.pages.Pages() }

// WeightBytes is how many bytes of weights a fast device has read for products so far: a matrix, of experts those that were chosen, once
// a pass however many rows use it. The oracle does not count.
func (m *machine[T]) WeightBytes() int64 { return m.ops.weightBytes() }

func (m *machine[T]) Lengths(i backend.Image) backend.Lengths {
	img, err := m.find(i)
	if err != nil {
		return backend.Lengths{}
	}
	return backend.Lengths{Target: img.length, Drafter: img.length - img.carried}
}

func (m *machine[T]) Close() error {
	if !m.closed {
		m.ops.close()
	}
	m.closed, m.lanes, m.saved = true, nil, nil
	return nil
}
