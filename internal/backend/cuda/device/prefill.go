package device

import (
	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/chunk"
	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/gemm"
)

// Prompts: a pass over many rows of one lane multiplies matrices with all of them at once and runs what is a sequence in chunks. Such a step
// has another one beside it for few rows, on the kernels of decoding, and takes it where those are faster. Both read the same weights and
// leave the same image. An operation whose shape or format the kernels for many rows do not take runs on those of decoding, eight rows at a
// time.
//
// The operations of wide passes run one after the other, so all their scratch, that of every step, is the same memory.

// FewRows is the most rows that go the way of decoding unless Options.Few says otherwise: measured (docs/ladders.md).
const FewRows = 12

// maxZeros is the widest row of an n-gram embedding.
const maxZeros = 1 << 14

// wide is what a device has for passes of many rows.
type wide struct {
	gemm   *gemm.Set
	chunk  *chunk.Set
	at     driver.Ptr // scratch
	bytes  uint64
	need   uint64     // by the steps compiled so far
	common uint64     // bytes of shared
	zeros  driver.Ptr // maxZeros FP32
	shared map[scratchKey]driver.Ptr
}

// few is the most rows of a pass that takes the kernels of decoding.
func (d *Device) few() int {
	if d.opt.Few != 0 {
		return max(0, d.opt.Few)
	}
	return FewRows
}

// widens says whether a program is one for many rows.
func (d *Device) widens(p *backend.Program) bool {
	k := p.Pass.Kind
	return !d.opt.Plain && (k == backend.Prefill && p.Pass.Lanes == 1 || k == backend.Seed) && p.Pass.Rows > d.few()
}

// compileWide compiles a step for many rows with the one for few beside it.
func (s *step) compileWide(c *driver.Context) error {
	d := s.d
	if err := d.loadWide(c); err != nil {
		return err
	}
	program := *s.program
	program.Pass.Rows = max(1, d.few(), program.Pass.Lanes*d.opt.Verify) // rows of several lanes are those of a round
	s.few = d.newStep(&program)
	d.steps = append(d.steps, s.few)
	if err := s.few.compile(c); err != nil {
		return err
	}
	if err := s.compile(c); err != nil {
		return err
	}
	w := d.wide
	if w.need > w.bytes {
		if err := c.SyncStream(d.stream); err != nil {
			return err
		}
		if err := free(c, w.at); err != nil {
			return err
		}
		d.bytes -= w.bytes
		w.at, w.bytes = 0, 0
		var err error
		if w.at, err = d.alloc(c, "scratch of prompts", w.need); err != nil {
			return err
		}
		w.bytes = w.need
	}
	for x, list := range s.products {
		w.gemm.Prepare(x.rows, x.ld, list)
	}
	return nil
}

// loadWide loads the kernels for many rows.
func (d *Device) loadWide(c *driver.Context) error {
	if d.wide != nil {
		return nil
	}
	w := &wide{shared: map[scratchKey]driver.Ptr{}}
	var err error
	if w.gemm, err = gemm.Load(c, gemm.Options{Library: d.opt.Library, Code: d.opt.Gemm}); err != nil {
		return err
	}
	if w.chunk, err = chunk.Load(c, d.opt.Chunk); err != nil {
		_ = w.gemm.Close(c)
		return err
	}
	d.wide = w
	if w.zeros, err = d.alloc(c, "zeros", 4*maxZeros); err != nil {
		return err
	}
	return c.Set(d.stream, w.zeros, 0, 4*maxZeros)
}

// close gives back what is there for many rows; without it, nothing.
func (w *wide) close(c *driver.Context) (errs []error) {
	if w == nil {
		return nil
	}
	errs = append(errs, free(c, w.at), free(c, w.zeros), w.gemm.Close(c), w.chunk.Unload(c))
	for _, p := range w.shared {
		errs = append(errs, free(c, p))
	}
	return errs
}

// Library says which library multiplies the matrices of prompts, or why none does: empty before a step for prompts is compiled.
func (d *Device) Library() string {
	if d.wide == nil {
		return ""
	}
	return d.wide.gemm.Library()
}

// share reserves memory that all wide steps have in common.
func (w *wide) share(d *Device, c *driver.Context, what string, bytes int) (driver.Ptr, error) {
	key := scratchKey{what, bytes}
	if p, ok := w.shared[key]; ok {
		return p, nil
	}
	p, err := d.alloc(c, what, uint64(bytes))
	if err == nil {
		w.shared[key] = p
		w.common += uint64(bytes)
	}
	return p, err
}

// chosen is the step to launch for so many rows.
func (s *step) chosen(ctl *backend.Control) *step {
	if s.few == nil || len(ctl.Lanes) != 1 || len(ctl.Lanes[0].Tokens) > s.d.few() {
		return s
	}
	return s.few
}

// room is a piece of the scratch of wide passes.
type room struct{ at, bytes uint64 }

// rooms shares out scratch for one operation of a step.
type rooms struct {
	s    *step
	next uint64
}

func (r *rooms) take(bytes uint64) room {
	m := room{r.next, bytes}
	r.next += (bytes + 255) / 256 * 256
	r.s.d.wide.need = max(r.s.d.wide.need, r.next)
	return m
}

// rows takes so many bytes for each row of the pass.
func (r *rooms) rows(bytes int) room { return r.take(uint64(r.s.program.Pass.Rows) * uint64(bytes)) }

// ptr is where a piece lies; only once all steps have been compiled.
func (p *pass) ptr(m room) driver.Ptr { return p.s.d.wide.at + driver.Ptr(m.at) }

func (p *pass) space(m room) gemm.Workspace { return gemm.Workspace{At: p.ptr(m), Bytes: m.bytes} }

// product describes a matrix for many rows; ok is false where its format needs the kernels of decoding.
func product(m kernels.Mat) (w gemm.Matrix, ok bool) {
	w = gemm.Matrix{Data: m.Codes + driver.Ptr(m.First)*driver.Ptr(m.Stride), N: int(m.Rows), K: int(m.K)}
	size := 1
	switch kernels.Format(m.Format) {
	case kernels.BF16:
		size = 2
	case kernels.FP8RowBF16, kernels.FP8RowFP32:
		w.Format, w.Scale = gemm.E4M3, m.Scales+driver.Ptr(m.First)*driver.Ptr(m.ScaleStride)
		w.ScaleF32 = kernels.Format(m.Format) == kernels.FP8RowFP32
	default:
		return w, false
	}
	return w, m.Rows > 0 && int(m.Stride) == size*w.K && w.K%16 == 0 && w.Data%16 == 0
}

// output is a product whose place in the scratch is found when it runs.
type output struct {
	gemm.Product
	at     driver.Ptr
	room   room
	offset int // bytes into the room; at is the place itself where there is no room
}

// products collects the products of an operation over one operand; matrices that follow each other in memory and in the result become one.
type products struct {
	s    *step
	l    *loader
	list []output
	ok   bool
}

func (s *step) multiplies(l *loader) *products { return &products{s: s, l: l, ok: true} }

// into adds a product that goes to a piece of scratch, rows of ld values, from a column on.
func (q *products) into(w backend.Weight, m room, ld, column int, f32 bool) {
	size := 2
	if f32 {
		size = 4
	}
	q.add(w, output{Product: gemm.Product{OutLd: ld, OutF32: f32}, room: m, offset: size * column})
}

// to adds a product that goes to memory of its own.
func (q *products) to(w backend.Weight, at driver.Ptr, ld int) {
	q.add(w, output{Product: gemm.Product{OutLd: ld}, at: at})
}

func (q *products) add(w backend.Weight, o output) {
	m, ok := product(q.l.matrix(w))
	if q.ok = q.ok && ok && q.l.err == nil; !q.ok {
		return
	}
	o.W = m
	if n := len(q.list); n > 0 {
		p := &q.list[n-1]
		wide, size := 1, 2
		if m.Format == gemm.BF16 {
			wide = 2
		}
		if o.OutF32 {
			size = 4
		}
		scale := 2
		if m.ScaleF32 {
			scale = 4
		}
		next := m.Format == p.W.Format && m.ScaleF32 == p.W.ScaleF32 && m.K == p.W.K && m.Data == p.W.Data+driver.Ptr(wide*p.W.N*p.W.K) &&
			(m.Scale == 0 || m.Scale == p.W.Scale+driver.Ptr(scale*p.W.N))
		if next && o.room == p.room && o.at == 0 && p.at == 0 && o.OutLd == p.OutLd && o.OutF32 == p.OutF32 && o.offset == p.offset+size*p.W.N {
			p.W.N += m.N
			return
		}
	}
	q.list = append(q.list, o)
}

// operand is how many rows there are at most for a product, and how far apart they begin.
type operand struct{ rows, ld int }

// done takes the room that the products with at most so many rows need, ld values apart, and returns what launches them; nil if one cannot be had.
func (q *products) done(r *rooms, most, ld int) func(p *pass, x driver.Ptr, rows int) error {
	if !q.ok {
		return nil
	}
	var plain []gemm.Product
	for _, o := range q.list {
		plain = append(plain, o.Product)
	}
	x := operand{most, ld}
	q.s.products[x] = append(q.s.products[x], plain...)
	work := r.take(gemm.Bytes(most, plain))
	return func(p *pass, x driver.Ptr, rows int) error {
		w := p.s.d.wide.gemm
		for _, o := range q.list {
			if o.Out = o.at; o.at == 0 {
				o.Out = p.ptr(o.room) + driver.Ptr(o.offset)
			}
			if err := w.Multiply(p.c, p.s.d.stream, x, ld, rows, o.Product, p.space(work)); err != nil {
				return err
			}
		}
		return nil
	}
}

// prepareWide prepares an operation for many rows; nil where the kernels of decoding do it.
func (s *step) prepareWide(c *driver.Context, op backend.Op) (func(*pass) error, error) {
	l := &loader{s: s, c: c}
	var run func(*pass) error
	switch op := op.(type) {
	case backend.PLEJoin:
		if run = s.widePLEJoin(l, op); run == nil && l.err == nil { // nobody has gathered the rows before the launch
			s.slow = append(s.slow, op.String())
			few, err := s.preparePLEJoin(c, op)
			return func(p *pass) error {
				if err := p.gather(uint32(s.d.seq)); err != nil {
					return err
				}
				return few(p)
			}, err
		}
	case backend.Mix:
		run = s.wideMix(l, op)
	case backend.GDN:
		run = s.wideGDN(l, op)
	case backend.QSA:
		run = s.wideQSA(l, op)
	case backend.MoE:
		run = s.wideMoE(l, op)
	case backend.Stem:
		run = s.wideStem(l, op)
	default:
		return nil, nil
	}
	if run == nil && l.err == nil {
		s.slow = append(s.slow, op.String())
	}
	return run, l.err
}

// lane is where a wide pass works: an image, its rows, and its length before them.
func (p *pass) lane() (slot, rows, base int) {
	return int(p.lanes[0].Slot), len(p.rows), int(p.held[0])
}

// place is a Fixed state of an image.
func (p *pass) place(id backend.StateID, slot int) driver.Ptr {
	return p.s.d.states[id].at + driver.Ptr(uint64(slot)*p.s.d.slotBytes(id))
}

// pagesOf is a lane's table of pages.
func (d *Device) pagesOf(lane int) driver.Ptr { return d.tables + driver.Ptr(4*lane*d.tablePages()) }
