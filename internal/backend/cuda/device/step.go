package device

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/gemm"
)

// step is a compiled program: what launches each operation, and memory for activations and for a launch.
type step struct {
	d       *Device
	program *backend.Program
	run     []func(*pass) error
	names   []string // what each of run is
	bufs    []driver.Ptr
	taken   []driver.Ptr // device memory to free
	bytes   uint64       // of it
	host    [][]byte     // pinned memory to free
	uploads []func(*pass) error
	pending []backend.Buf // of each streams buffer: 1 + the block output whose injection waits, 0 for none; while compiling

	fixed   []backend.StateID // Fixed states on the device that the program brings forward
	history bool              // it advances the n-gram history
	carries bool
	late    func() (func(*pass) error, error) // makes what keeps carried rows behind the mix that follows; while compiling
	stem    bool
	inspect bool // it has a tap: never captured

	few      *step // of a step for many rows: the same for few; nil otherwise
	slow     []string
	products map[operand][]gemm.Product

	ahead    [][]kernels.Part // of each mixer: what its input is multiplied with
	distinct driver.Ptr       // of each mixture: how many experts its rows chose last
	mixtures int
	mixed    driver.Ptr // what the last tuned hyper-connection site put out; while compiling

	// The control block: the launch's number, rows, lanes, wanted rows. control is its pinned twin, which the first kernel of a launch copies.
	control []byte
	block   driver.Ptr
	table   *table // nil without an n-gram table
	rows    driver.Ptr
	lanes   driver.Ptr
	want    driver.Ptr

	report []byte // pinned: picks, each with the number of its launch behind it; without picks that number alone, where it would be behind the first
	told   int    // picks of the last launch there
	slots  []slot // control and report of the passes of a chain; nil before the first launch
	depth  int    // of the last launch in a chain

	reports []byte       // pinned: of a step that drafts, the reports of all passes of a chain
	behind  *step        // the chain of drafts that the launch in progress verifies; nil otherwise
	drafts  [][]int32    // its picks, once they are known
	end     driver.Event // of that chain

	head   *head
	embed  *embed
	graphs map[shape]*graph
	other  map[backend.Buf]driver.Ptr // where tuned mixing moves streams to; while compiling
	pass   pass
	seq    backend.Seq
}

// shape is what a captured graph depends on.
type shape struct {
	rows, lanes, wanted int
	depth               int
	behind              *step
	logits, likely      bool
}

// graph is a captured launch list; until the second launch of its shape there is none.
type graph struct {
	exec  driver.Exec
	nodes int

	head, next driver.Exec // its beginning, which waits, and the rest of it with the beginning of the next one behind it; 0 before it is armed
	whole      bool        // it cannot be had in two parts
}

// pass is a launch in progress.
type pass struct {
	s      *step
	c      *driver.Context
	in     []backend.LaneRows
	rows   []kernels.Row
	lanes  []kernels.Lane
	wanted []uint32
	held   []int32    // base lengths of the lanes
	logits bool       // some lane needs them
	likely bool       // some lane wants likely ids, and none logits
	plain  bool       // nothing looks inside or forces: fit for a graph
	arming bool       // while what is armed is captured
	bring  driver.Ptr // what that brings into L2 while it waits, on the device; 0 for nothing
	begun  bool       // what was armed is the beginning of this launch
	keys   uint32     // of each wanted row, among which its pick is still to be found; 0 where picks are there
	from   int        // the first row that what follows is computed of; those before it were only to be in the caches
}

// Pass is the shape the step was compiled for.
func (s *step) Pass() backend.Pass { return s.program.Pass }

// alloc reserves device memory for n values of so many bytes for each row of the pass.
func (s *step) alloc(c *driver.Context, what string, bytes int) (driver.Ptr, error) {
	if s.few != nil {
		return s.d.wide.share(s.d, c, what, bytes)
	}
	p, err := s.d.alloc(c, what, uint64(bytes))
	if err == nil {
		s.taken = append(s.taken, p)
		s.bytes += uint64(bytes)
	}
	return p, err
}

func (s *step) pinned(c *driver.Context, bytes int) ([]byte, error) {
	b, err := c.AllocHost(max(bytes, 16), false)
	if err == nil {
		s.host = append(s.host, b)
	}
	return b, err
}

func (s *step) free(c *driver.Context) (err error) {
	s.forget()
	err = s.freeGraphs(c)
	if s.end != 0 {
		err = errors.Join(err, c.DestroyEvent(s.end))
	}
	for _, p := range s.taken {
		err = errors.Join(err, c.Free(p))
	}
	for _, b := range s.host {
		err = errors.Join(err, c.FreeHost(b))
	}
	return err
}

// freeGraphs forgets what was captured: the next launches of a shape are those of a step that has just been compiled.
func (s *step) freeGraphs(c *driver.Context) (err error) {
	for _, g := range s.graphs {
		err = errors.Join(err, g.free(c))
	}
	clear(s.graphs)
	return err
}

func (g *graph) free(c *driver.Context) (err error) {
	for _, e := range []driver.Exec{g.exec, g.head, g.next} {
		if e != 0 {
			err = errors.Join(err, c.DestroyExec(e))
		}
	}
	*g = graph{}
	return err
}

func (d *Device) newStep(p *backend.Program) *step {
	s := &step{
		d: d, program: p, pending: make([]backend.Buf, len(p.Bufs)), graphs: map[shape]*graph{}, other: map[backend.Buf]driver.Ptr{},
		products: map[operand][]gemm.Product{},
	}
	s.pass.s = s
	return s
}

// Compile uploads a program's weights, reserves its memory and prepares its launches.
func (d *Device) Compile(p *backend.Program) (backend.Step, error) {
	if p.Pass.Rows < 1 || p.Pass.Lanes < 1 {
		return nil, fmt.Errorf("cuda: compile %v: no rows", p.Pass.Kind)
	}
	s := d.newStep(p)
	err := d.do(fmt.Sprintf("compile %v", p.Pass.Kind), func(c *driver.Context) error {
		d.steps = append(d.steps, s)
		if d.widens(p) {
			return errors.Join(s.compileWide(c), d.unring(c))
		}
		return errors.Join(s.compile(c), d.unring(c))
	})
	if err != nil {
		return nil, err
	}
	if drafting := p.Pass.Kind == backend.Draft || p.Pass.Kind == backend.Seed; drafting != s.stem {
		return nil, fmt.Errorf("cuda: compile %v: a drafter's pass has a stem and no other has", p.Pass.Kind)
	}
	return s, nil
}

const (
	sizeOfRow = int(unsafe.Sizeof(kernels.Row{}))
	laneBytes = int(unsafe.Sizeof(kernels.Lane{}))
	header    = 16 // bytes of the control block before its rows
)

func (s *step) compile(c *driver.Context) (err error) {
	shape := s.program.Pass
	size := (header + shape.Rows*(sizeOfRow+4) + shape.Lanes*laneBytes + 15) / 16 * 16
	if s.control, err = s.pinned(c, size); err != nil {
		return err
	}
	if s.block, err = s.alloc(c, "control block", size); err != nil {
		return err
	}
	passes := 1
	if shape.Kind == backend.Draft {
		passes = mostChained
	}
	if s.reports, err = s.pinned(c, passes*8*shape.Rows); err != nil {
		return err
	}
	s.report = s.reports[:8*shape.Rows]
	s.rows = s.block + header
	s.lanes = s.rows + driver.Ptr(shape.Rows*sizeOfRow)
	s.want = s.lanes + driver.Ptr(shape.Lanes*laneBytes)
	inject := map[backend.Buf]bool{} // FP32 buffers: injection weights, and what the n-gram table gives
	for _, op := range s.program.Ops {
		switch op := op.(type) {
		case backend.Mix:
			inject[op.X.Inject] = true
		case backend.PLEStart:
			inject[op.Out] = true
		}
	}
	for i, b := range s.program.Bufs {
		element := 2
		if inject[backend.Buf(i)] {
			element = 4
		}
		p, err := s.alloc(c, b.Name, element*shape.Rows*b.Width)
		if err != nil {
			return err
		}
		s.bufs = append(s.bufs, p)
	}
	var carried backend.Op
	for _, op := range s.program.Ops {
		run, err := s.prepare(c, op)
		if err != nil {
			return fmt.Errorf("%v: %w", op, err)
		}
		s.add(op, run)
		if carried != nil && s.late != nil {
			run, err := s.late()
			if s.late = nil; err != nil {
				return fmt.Errorf("%v: %w", carried, err)
			}
			s.add(carried, run)
		}
		if carried = nil; s.late != nil {
			carried = op
		}
	}
	return c.SyncStream(s.d.stream)
}

// add puts an operation's launches, if there are any, behind those of the others.
func (s *step) add(op backend.Op, run func(*pass) error) {
	if run == nil {
		return
	}
	s.names = append(s.names, op.String())
	s.run = append(s.run, func(p *pass) error {
		if err := run(p); err != nil {
			return fmt.Errorf("%v: %w", op, err)
		}
		return nil
	})
}

// start launches a kernel, which may begin before the one ahead of it has ended.
func start[P any](p *pass, k kernels.ID, x, y, z int, shared uint32, params *P) error {
	return launch(p, k, [3]int{x, y, z}, shared, params, true)
}

// launch launches a kernel; with early it may begin before the one ahead of it has ended.
func launch[P any](p *pass, k kernels.ID, grid [3]int, shared uint32, params *P, early bool) error {
	if w := p.s.d.watch; w != nil && !w.passes(k.Name()) {
		return nil
	}
	return p.s.d.set.Run(p.c, p.s.d.stream, k, [3]uint32{uint32(grid[0]), uint32(grid[1]), uint32(grid[2])}, shared, params, early)
}

// Launch queues a step.
func (d *Device) Launch(st backend.Step, ctl *backend.Control) (backend.Seq, error) {
	s, ok := st.(*step)
	if !ok || s.d != d || d.closed {
		return 0, fmt.Errorf("cuda: launch: step of another device, or device closed")
	}
	return d.queue(s.chosen(ctl), ctl, 0)
}

// queue queues a step, alone or at a depth of a chain.
func (d *Device) queue(s *step, ctl *backend.Control, depth int) (backend.Seq, error) {
	p := &s.pass
	d.seq++
	if err := p.begin(ctl); err != nil {
		return 0, fmt.Errorf("cuda: launch %v: %w", s.program.Pass.Kind, err)
	}
	p.begun = d.begun(p, depth)
	err := d.run(s.program.Pass.Kind.String(), func(c *driver.Context) error {
		p.c = c
		if err := p.launch(depth); err != nil {
			return err
		}
		return p.arm()
	})
	if err != nil {
		return 0, err
	}
	p.end()
	s.seq, s.told, d.last = d.seq, p.tells(), s
	if s.few != nil {
		s.foresee(ctl.Lanes[0].Lane, ctl.Lanes[0].Ahead)
	}
	return d.seq, nil
}

// begin checks the control block, lays out rows and lanes and gives the lanes pages for them.
func (p *pass) begin(ctl *backend.Control) error {
	s, d := p.s, p.s.d
	shape := s.program.Pass
	if len(ctl.Lanes) == 0 || len(ctl.Lanes) > shape.Lanes {
		return fmt.Errorf("%d lanes for a step of %d", len(ctl.Lanes), shape.Lanes)
	}
	p.in, p.rows, p.lanes, p.wanted, p.held = ctl.Lanes, p.rows[:0], p.lanes[:0], p.wanted[:0], p.held[:0]
	p.plain, p.logits, p.likely, p.begun = !s.inspect, false, false, false
	for i := range ctl.Lanes {
		in := &ctl.Lanes[i]
		n := len(in.Tokens)
		if in.Lane < 0 || in.Lane >= d.opt.Lanes || d.images[in.Lane].launched == d.seq {
			return fmt.Errorf("lane %d given twice or outside 0..%d", in.Lane, d.opt.Lanes-1)
		}
		img := &d.images[in.Lane]
		img.launched = d.seq
		if n == 0 || !s.stem && len(in.Positions) != n || len(p.rows)+n > shape.Rows {
			return fmt.Errorf("lane %d: %d tokens, %d positions, room for %d rows", in.Lane, n, len(in.Positions), shape.Rows-len(p.rows))
		}
		if shape.Kind == backend.Verify && n > d.opt.Verify {
			return fmt.Errorf("lane %d: %d rows to verify, room for %d", in.Lane, n, d.opt.Verify)
		}
		if shape.Kind == backend.Decode && n != 1 {
			return fmt.Errorf("lane %d: %d rows to decode, need one", in.Lane, n)
		}
		l := kernels.Lane{First: uint32(len(p.rows)), Rows: uint32(n), Slot: uint32(in.Lane)}
		base := img.length
		if s.stem {
			base = img.length - img.carried + img.chained
			switch {
			case in.Chain && (n != 1 || !img.drafted):
				return fmt.Errorf("lane %d: a chained draft has one row and follows a draft", in.Lane)
			case !in.Chain && n > img.carried:
				return fmt.Errorf("lane %d: %d rows, %d carried", in.Lane, n, img.carried)
			}
			l.Carry = uint32(img.first)
			if in.Chain {
				l.Chain = 1
			}
		} else {
			if s.carries && img.carried+n > d.opt.Carry {
				return fmt.Errorf("lane %d: %d rows on top of %d carried, room for %d", in.Lane, n, img.carried, d.opt.Carry)
			}
			l.Fold, l.From = img.behind(shape.Kind)
			if shape.Kind == backend.Verify {
				l.Record = 1
			}
		}
		if base+n > d.opt.Tokens {
			return fmt.Errorf("lane %d: %d tokens do not fit an image of %d", in.Lane, base+n, d.opt.Tokens)
		}
		var err error
		if img.table, err = d.pages.Grow(img.table, base+n); err != nil {
			return fmt.Errorf("lane %d: %w", in.Lane, err)
		}
		for j, t := range in.Tokens {
			if s.embed != nil && (t < 0 || int(t) >= s.embed.vocab) {
				return fmt.Errorf("lane %d: token %d of %d", in.Lane, t, s.embed.vocab)
			}
			r := kernels.Row{Lane: uint32(i), Index: uint32(j), At: uint32(base + j), Token: uint32(t), Slot: uint32(in.Lane)}
			at := [3]int32{}
			switch {
			case !s.stem:
				at = in.Positions[j]
			case in.Chain:
				at = [3]int32{img.stood[0] + 1, img.stood[1] + 1, img.stood[2] + 1}
			default:
				at = img.positions[j]
			}
			for a, v := range at {
				r.Pos[a] = uint32(v)
			}
			p.rows = append(p.rows, r)
		}
		for j, row := range in.Media {
			if row != nil && (s.embed == nil || len(row) != s.embed.width) || j >= n {
				return fmt.Errorf("lane %d: media row %d of %d values does not fit", in.Lane, j, len(row))
			}
		}
		switch {
		case in.Want.All():
			for j := range n {
				p.wanted = append(p.wanted, l.First+uint32(j))
			}
		case in.Want != backend.WantNone:
			p.wanted = append(p.wanted, l.First+uint32(n)-1)
		}
		p.logits = p.logits || in.Want.Logits() && !in.Want.Likely()
		p.likely = p.likely || in.Want.Likely()
		if in.Force != nil || in.Trace != nil {
			p.plain = false
		}
		p.lanes = append(p.lanes, l)
		p.held = append(p.held, int32(base))
	}
	if p.likely && (p.logits || s.head == nil || s.head.lists == nil || len(p.wanted) > drawn) {
		p.logits, p.likely = true, false
	}
	return nil
}

// prepare makes room in the images and sends media.
func (p *pass) prepare() error {
	s, d, c := p.s, p.s.d, p.c
	if !s.stem {
		for i := range p.lanes {
			l := &p.lanes[i]
			img := &d.images[l.Slot]
			if img.keep+img.steps > 0 && (s.few != nil || !slices.Equal(img.verify.fixed, s.fixed)) {
				if err := d.flush(c, int(l.Slot)); err != nil {
					return err
				}
				l.Fold, l.From = img.behind(s.program.Pass.Kind)
			}
			if s.carries {
				if img.first+img.carried+int(l.Rows) > d.opt.Carry {
					if err := d.compact(c, int(l.Slot)); err != nil {
						return err
					}
				}
				l.Carry = uint32(img.first + img.carried)
			}
		}
	}
	for _, up := range s.uploads {
		if err := up(p); err != nil {
			return err
		}
	}
	return nil
}

// write writes the control block, the launch's number last: the GPU may wait for it.
func (p *pass) write() {
	s := p.s
	copy(s.control[header:], bytesIn(p.rows))
	copy(s.control[s.lanes-s.block:], bytesIn(p.lanes))
	copy(s.control[s.want-s.block:], bytesIn(p.wanted))
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&s.control[0])), uint32(s.d.seq))
}

// launch makes room in the images, sends the control block and whatever else the host provides, and launches the kernels.
func (p *pass) launch(depth int) error {
	s, d, c := p.s, p.s.d, p.c
	if !p.begun {
		d.disarm()
		if depth == 0 && !s.over() { // the last launch may still read its control block, media or rows of the table
			if err := c.SyncStream(d.stream); err != nil {
				return err
			}
		}
		if err := s.use(c, depth); err != nil {
			return err
		}
		if err := p.prepare(); err != nil {
			return err
		}
		p.write()
	}
	for i := range p.lanes {
		if err := d.tellPages(c, int(p.lanes[i].Slot)); err != nil {
			return err
		}
	}
	if s.behind != nil {
		if s.end == 0 {
			var err error
			if s.end, err = c.NewEvent(false); err != nil {
				return err
			}
		}
		if err := c.Record(s.end, d.stream); err != nil {
			return err
		}
	}
	if s.head != nil {
		if err := s.head.reserve(p); err != nil {
			return err
		}
	}
	exec, fresh := p.graph()
	if p.begun {
		exec = s.graphs[p.shape()].next
	}
	number := uint32(d.seq)
	// A graph takes one call, so the GPU works on the first layer while the host gathers the table's rows, for which a kernel waits. Kernel by
	// kernel the queue could fill up behind that one.
	if exec == 0 {
		if s.few == nil {
			if err := p.gather(number); errors.As(err, new(*driver.Error)) {
				return err
			} else if err != nil {
				return &hostError{err}
			}
		}
		if err := p.direct(); err != nil {
			return err
		}
	} else {
		if err := c.GraphLaunch(exec, d.stream); err != nil {
			return err
		}
		if p.begun {
			p.hold()
		}
		if err := p.gather(number); err != nil {
			return err
		}
	}
	if s.head != nil {
		if err := s.head.fetch(p); err != nil {
			return err
		}
	}
	if fresh != nil { // capturing takes as long as launching: the GPU works meanwhile
		var err error
		fresh.exec, fresh.nodes, err = c.Capture(d.stream, p.direct)
		return err
	}
	return nil
}

func (p *pass) shape() shape {
	return shape{len(p.rows), len(p.lanes), len(p.wanted), p.s.depth, p.s.behind, p.logits, p.likely}
}

// graph is the captured launch list, or 0 where the kernels are launched directly: the first two times a shape occurs, for prompts, and when
// tests look inside. The second time there is fresh to capture it for.
func (p *pass) graph() (exec driver.Exec, fresh *graph) {
	s := p.s
	kind := s.program.Pass.Kind
	if !p.plain || s.d.opt.NoGraph || s.d.profile != nil || kind == backend.Prefill || kind == backend.Seed {
		return 0, nil
	}
	key := p.shape()
	g, seen := s.graphs[key]
	if !seen {
		s.graphs[key] = &graph{}
		return 0, nil
	}
	if g.exec == 0 {
		return 0, g
	}
	return g.exec, nil
}

func (p *pass) direct() error {
	if err := p.start(); err != nil {
		return err
	}
	p.from, p.keys = 0, 0
	for i, run := range p.s.run {
		if w := p.s.d.watch; w != nil {
			w.enter(p.s.names[i])
		}
		if err := p.s.d.stamp(p.c, p.s.names[i]); err != nil {
			return err
		}
		if err := run(p); err != nil {
			return err
		}
	}
	if err := p.s.d.stamp(p.c, ""); err != nil {
		return err
	}
	return p.tell()
}

// tells is how many picks a launch reports.
func (p *pass) tells() int {
	if p.s.head == nil || p.likely {
		return 0
	}
	return len(p.wanted)
}

// tell reports the picks and the launch's number to the host.
func (p *pass) tell() error {
	s := p.s
	at := driver.Ptr(uintptr(unsafe.Pointer(&s.report[0])))
	if p.keys > 0 {
		q := kernels.ReportBestParams{
			Best: s.head.best, Ids: s.head.ids, Picked: s.head.picked, Host: at, Done: at + 4, Number: s.block, N: p.keys, R: uint32(len(p.wanted)),
		}
		return start(p, kernels.ReportBest, 1, 1, 1, 0, &q)
	}
	q := kernels.ReportParams{Host: at, Done: at + 4, Number: s.block, N: uint32(p.tells())}
	if q.N > 0 {
		q.Picked = s.head.picked
	}
	return start(p, kernels.Report, 1, 1, 1, 0, &q)
}

// compact moves an image's carried rows to the front of their planes.
func (d *Device) compact(c *driver.Context, slot int) error {
	img := &d.images[slot]
	for id, s := range d.opt.States {
		if s.Kind != backend.Carried || hosted(s) {
			continue
		}
		row := uint64(s.Width) * d.states[id].element
		n := uint64(img.carried) * row
		if n == 0 {
			continue
		}
		base := d.states[id].at + driver.Ptr(uint64(slot)*d.slotBytes(backend.StateID(id)))
		if err := c.Copy(d.stream, d.temp, base+driver.Ptr(uint64(img.first)*row), n); err != nil {
			return err
		}
		if err := c.Copy(d.stream, base, d.temp, n); err != nil {
			return err
		}
	}
	img.first = 0
	return nil
}

// end moves the lengths.
func (p *pass) end() {
	s, d := p.s, p.s.d
	for i := range p.lanes {
		in, l := &p.in[i], &p.lanes[i]
		img, n := &d.images[l.Slot], len(in.Tokens)
		if s.stem {
			last := p.rows[int(l.First)+n-1].Pos
			img.stood = [3]int32{int32(last[0]), int32(last[1]), int32(last[2])}
			img.drafted = img.drafted || s.program.Pass.Kind == backend.Draft && s.carries
			if in.Chain {
				img.chained++
				continue
			}
			img.first += n
			img.carried -= n
			img.positions = slices.Delete(img.positions, 0, n)
			if img.carried == 0 {
				img.first = 0
			}
			continue
		}
		// The kept records are folded now, and drafts are forgotten.
		if img.keep > 0 {
			img.history = img.folded(img.history)
		}
		if img.leaves(s.program.Pass.Kind) {
			img.from = (img.from + 1) % d.recordRing()
			if img.steps++; img.steps == 2*StepsBehind {
				img.steps = StepsBehind
			}
			img.verify = s
		} else {
			img.from = (img.from + img.keep) % d.recordRing()
			img.keep, img.steps, img.verify = 0, 0, nil
		}
		img.recorded = img.recorded[:0]
		img.chained, img.drafted = 0, false
		img.length += n
		if s.carries {
			img.carried += n
			for j := range n {
				img.positions = append(img.positions, in.Positions[j])
			}
		}
		if s.program.Pass.Kind == backend.Verify {
			img.keep, img.verify = n, s
			if s.history {
				img.recorded = append(img.recorded, in.Tokens...)
			}
		} else if s.history {
			img.history = after(img.history, in.Tokens)
		}
	}
	p.in = nil
	runtime.KeepAlive(p)
}

// over says whether the last launch has reported, if there was one.
func (s *step) over() bool {
	return s.seq == 0 || there(s.report, uint32(s.seq), s.told)
}

// word is the i-th word of a report: a pick, and a launch's number in the upper half.
func word(report []byte, i int) uint64 {
	return atomic.LoadUint64((*uint64)(unsafe.Pointer(&report[8*i])))
}

// pick is the i-th id of a report.
func pick(report []byte, i int) int32 { return int32(uint32(word(report, i))) }

// there says whether n picks of a launch have come, or that it is over if it has none.
func there(report []byte, number uint32, n int) bool {
	for i := range max(n, 1) {
		if uint32(word(report, i)>>32) != number {
			return false
		}
	}
	return true
}

// soon looks for a launch's number in a report for as long as a step may take: a thread that sleeps until then, or asks the driver on
// another thread, is late by tens of microseconds and more. Where processors are few it does not look at all.
func soon(report []byte, number uint32, n int) bool {
	for end := time.Now().Add(20 * time.Millisecond); runtime.GOMAXPROCS(0) > 2 && time.Now().Before(end); {
		for range 64 {
			if there(report, number, n) {
				return true
			}
		}
	}
	return false
}

// Wait returns the result of a launch.
func (d *Device) Wait(q backend.Seq) (backend.Result, error) {
	if d.last == nil || q != d.seq || d.last.seq != q {
		return backend.Result{}, fmt.Errorf("cuda: wait for launch %d, last is %d", q, d.seq)
	}
	s := d.last
	if !soon(s.report, uint32(q), s.told) || s.head != nil && s.head.raised {
		if err := d.do("wait", func(c *driver.Context) error { return c.SyncStream(d.stream) }); err != nil {
			return backend.Result{}, err
		}
	}
	if s.head == nil {
		return backend.Result{}, nil
	}
	if s.depth > 0 {
		return s.chained(), nil
	}
	return s.head.results(), nil
}
