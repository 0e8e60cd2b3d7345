package cpu

import (
	"math"

	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// rootMeanSquare returns 1/sqrt(mean of squares + eps).
func (f *fast) rootMeanSquare(x []float32, eps float64) float32 {
	return float32(1 / math.Sqrt(float64(f.level.inner(x, x))/float64(len(x))+eps))
}

// norm: dst = x divided by its root mean square, times w (which has its offset).
func (f *fast) norm(dst, x, w []float32, eps float64) {
	f.level.scaleMul(dst, x, w, f.rootMeanSquare(x, eps))
}

type embedOp struct {
	f     *fast
	op    backend.Embed
	p     *pass[float32]
	x     []float32
	width int
}

func (o *embedOp) run(p *pass[float32]) error {
	o.p = p
	o.x, o.width = p.buf(o.op.X.X)
	o.f.each(o, len(p.rows), len(o.x))
	p.drop(o.op.X.X)
	return nil
}

func (o *embedOp) do(_, r int) {
	row := o.p.rows[r]
	h := o.op.W.Cols()
	dst := o.x[r*o.width : (r+1)*o.width]
	in := o.p.lanes[row.lane].in
	if in.Media != nil && in.Media[row.index] != nil {
		copy(dst[:h], in.Media[row.index])
	} else {
		o.op.W.Decode32(dst[:h], int(row.token))
	}
	for s := h; s < o.width; s += h {
		copy(dst[s:s+h], dst[:h])
	}
}

// injector adds pending injections: X[s] += inject[s]*y.
type injector struct {
	f          *fast
	x, in, y   []float32
	streams, h int
}

// pending prepares an injection and forgets that it was pending.
func (o *injector) pending(p *pass[float32], s backend.Streams) bool {
	y, ok := p.injection(s.X)
	if !ok {
		return false
	}
	o.x, _ = p.buf(s.X)
	o.in, o.streams = p.buf(s.Inject)
	o.y, o.h = p.buf(y)
	p.drop(s.X)
	return true
}

// do adds to one stream of one row.
func (o *injector) do(_, unit int) {
	r := unit / o.streams
	o.f.level.axpy(o.x[unit*o.h:(unit+1)*o.h], o.y[r*o.h:(r+1)*o.h], o.in[unit])
}

func (f *fast) inject(p *pass[float32], s backend.Streams) {
	if f.injector.pending(p, s) {
		f.each(&f.injector, len(f.injector.in), len(f.injector.x))
	}
}

func (f *fast) tap(p *pass[float32], op backend.Tap) error {
	x, width := p.buf(op.X.X)
	x = append([]float32(nil), x...)
	if y, ok := p.injection(op.X.X); ok { // without changing the streams: what follows must not depend on taps
		t := f.injector
		t.pending(p, op.X)
		p.pend(op.X.X, y)
		t.x = x
		for u := range t.in {
			t.do(0, u)
		}
	}
	for r, row := range p.rows {
		if t := p.lanes[row.lane].in.Trace; t != nil {
			if t.Streams == nil {
				t.Streams = map[string][][]float64{}
			}
			line := make([]float64, width)
			for i, v := range x[r*width : (r+1)*width] {
				line[i] = float64(v)
			}
			t.Streams[op.Name] = append(t.Streams[op.Name], line)
		}
	}
	return nil
}

type mixWeights struct {
	norm             []float32
	down, up, inject matrix
}

type mixOp struct {
	f  *fast
	op backend.Mix
	w  *mixWeights

	stage             int
	injecting         bool
	x, n, gate, out   []float32
	width, h, streams int
}

func newMix(f *fast, op backend.Mix) *mixOp {
	return &mixOp{f: f, op: op, w: prepared(f, op.W, func() *mixWeights {
		return &mixWeights{norm: vector(op.W.Norm, 1), down: f.matrix(op.W.Down), up: f.matrix(op.W.Up), inject: f.matrix(op.W.Inject)}
	})}
}

// mixColumns are the columns of the mix that a unit computes.
const mixColumns = 512

func (o *mixOp) run(p *pass[float32]) error {
	f, w, rows := o.f, o.w, len(p.rows)
	f.arena.reset()
	o.x, o.width = p.buf(o.op.X.X)
	o.out, o.h = p.buf(o.op.Out)
	o.streams = o.width / o.h
	o.n, o.gate = f.arena.take(len(o.x)), f.arena.take(len(o.x))
	low := f.arena.take(rows * w.down.n)
	o.injecting = f.injector.pending(p, o.op.X)
	o.stage = 0
	f.each(o, rows*o.streams, 2*len(o.x))

	x := newOperand(o.n, o.width, o.width, rows)
	f.job.add(&w.down, &x, low, w.down.n)
	var in []float32
	if w.inject.n > 0 {
		in, _ = p.buf(o.op.X.Inject)
		f.job.add(&w.inject, &x, in, w.inject.n)
	}
	f.job.run()
	f.level.silu(low, low, 1/float32(o.streams))
	for i, v := range in {
		in[i] = 2 * sigmoid32(v/float32(o.streams))
	}
	x = newOperand(low, w.down.n, w.down.n, rows)
	f.job.add(&w.up, &x, o.gate, o.width)
	f.job.run()
	o.stage = 1
	f.each(o, rows*((o.h+mixColumns-1)/mixColumns), 8*len(o.x))
	return nil
}

func (o *mixOp) do(worker, unit int) {
	l := o.f.level
	if o.stage == 0 { // one stream of one row
		if o.injecting {
			o.f.injector.do(worker, unit)
		}
		s := unit % o.streams
		o.f.norm(o.n[unit*o.h:(unit+1)*o.h], o.x[unit*o.h:(unit+1)*o.h], o.w.norm[s*o.h:(s+1)*o.h], o.op.W.Eps)
		return
	}
	parts := (o.h + mixColumns - 1) / mixColumns
	r, first := unit/parts, unit%parts*mixColumns
	end := min(o.h, first+mixColumns)
	out := o.out[r*o.h+first : r*o.h+end]
	for s := range o.streams {
		at := r*o.width + s*o.h
		n, g := o.n[at+first:at+end], o.gate[at+first:at+end]
		if s == 0 {
			l.sigmoidMul(out, n, g, 1)
		} else {
			l.sigmoidMulAdd(out, n, g)
		}
	}
	l.scale(out, out, 1/float32(o.streams))
}

type stemWeights struct {
	normEmbed, normHidden []float32
	embed, hidden         matrix
}

type stemOp struct {
	f     *fast
	op    backend.Stem
	w     *stemWeights
	p     *pass[float32]
	stage int

	x, e, hidden, pe, ph []float32
	width, h             int
}

func newStem(f *fast, op backend.Stem) *stemOp {
	return &stemOp{f: f, op: op, w: prepared(f, op.W, func() *stemWeights {
		return &stemWeights{
			normEmbed: vector(op.W.NormEmbed, 1), normHidden: vector(op.W.NormHidden, 1),
			embed: f.matrix(op.W.ProjEmbed), hidden: f.matrix(op.W.ProjHidden),
		}
	})}
}

func (o *stemOp) run(p *pass[float32]) error {
	f, rows := o.f, len(p.rows)
	f.arena.reset()
	o.p = p
	o.x, o.width = p.buf(o.op.X.X)
	o.h = o.op.W.Embed.Cols()
	o.e, o.pe = f.arena.take(rows*o.h), f.arena.take(rows*o.h)
	o.hidden, o.ph = f.arena.take(len(o.x)), f.arena.take(len(o.x))
	o.stage = 0
	f.each(o, rows, 2*len(o.x))
	e, hidden := newOperand(o.e, o.h, o.h, rows), newOperand(o.hidden, o.h, o.h, len(o.x)/o.h) // streams are rows of their own here
	f.job.add(&o.w.embed, &e, o.pe, o.h)
	f.job.add(&o.w.hidden, &hidden, o.ph, o.h)
	f.job.run()
	o.stage = 1
	f.each(o, rows, len(o.x))
	p.drop(o.op.X.X)
	return nil
}

func (o *stemOp) do(_, r int) {
	x := o.x[r*o.width : (r+1)*o.width]
	if o.stage == 1 {
		e := o.pe[r*o.h : (r+1)*o.h]
		for i, v := range o.ph[r*o.width : (r+1)*o.width] {
			x[i] = v + e[i%o.h]
		}
		return
	}
	row := o.p.rows[r]
	l := o.p.lanes[row.lane]
	e := o.e[r*o.h : (r+1)*o.h]
	o.op.W.Embed.Decode32(e, int(row.token))
	o.f.norm(e, e, o.w.normEmbed, o.op.W.Eps)
	carried := l.img.chain
	if !l.in.Chain {
		carried = l.img.states[o.op.Carry][row.index*o.width:]
	}
	o.f.norm(o.hidden[r*o.width:(r+1)*o.width], carried[:o.width], o.w.normHidden, o.op.W.Eps)
}

// headOp computes logits and picks.
type headOp struct {
	f  *fast
	op backend.Head
	m  *matrix

	logits []float32   // of the wanted rows
	own    []float32   // memory for them that the next launch may overwrite
	rows   int         // wanted
	bests  []best32    // of each row and block
	picks  []int32     // results
	lines  [][]float32 // results
}

// best32 is the best of some logits: its BF16 value and its id.
type best32 struct {
	value float32
	id    int32
}

// pickBlock is the number of logits of a unit.
const pickBlock = 8192

func newHead(f *fast, op backend.Head) *headOp {
	return &headOp{f: f, op: op, m: prepared(f, op.W, func() *matrix { m := f.matrix(op.W.W); return &m })}
}

// wanted is the run of a lane's rows that its head works on.
func wanted(l *lane[float32]) (first, n int) {
	n = len(l.in.Tokens)
	switch {
	case l.in.Want == backend.WantNone:
		return 0, 0
	case l.in.Want.All():
		return l.first, n
	}
	return l.first + n - 1, 1
}

func grow[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}

func (o *headOp) run(p *pass[float32]) error {
	f := o.f
	f.arena.reset()
	in, h := p.buf(o.op.In)
	o.rows = 0
	kept := false
	for i := range p.lanes {
		_, n := wanted(&p.lanes[i])
		o.rows += n
		kept = kept || p.lanes[i].in.Want.Logits()
	}
	x := f.arena.take(o.rows * h)
	at := 0
	for i := range p.lanes {
		first, n := wanted(&p.lanes[i])
		at += copy(x[at:], in[first*h:(first+n)*h])
	}
	n := o.m.n
	// Callers gather the logits of prompts and of chained drafts over several launches, those of a round they use at once.
	reuse := p.kind == backend.Decode || p.kind == backend.Verify || !kept
	if reuse {
		o.own = grow(o.own, o.rows*n)
		o.logits = o.own
	} else {
		o.logits, o.lines = make([]float32, o.rows*n), nil
	}
	operand := newOperand(x, h, h, o.rows)
	f.job.add(o.m, &operand, o.logits, n)
	f.job.run()

	blocks := (n + pickBlock - 1) / pickBlock
	o.bests, o.picks, o.lines = grow(o.bests, o.rows*blocks), grow(o.picks, o.rows), grow(o.lines, o.rows)
	f.each(o, o.rows*blocks, len(o.logits))
	for r := range o.rows {
		best := best32{id: -1}
		for _, b := range o.bests[r*blocks : (r+1)*blocks] {
			if b.beats(best) {
				best = b
			}
		}
		o.picks[r], o.lines[r] = best.id, o.logits[r*n:(r+1)*n]
	}
	p.result.Lanes = p.result.Lanes[:0]
	at = 0
	for i := range p.lanes {
		_, n := wanted(&p.lanes[i])
		res := backend.LaneResult{Picks: o.picks[at : at+n : at+n]}
		if p.lanes[i].in.Want.Logits() {
			res.Logits = o.lines[at : at+n : at+n]
		}
		p.result.Lanes = append(p.result.Lanes, res)
		at += n
	}
	return nil
}

// beats: larger value, then lower id. No id loses, and so does NaN.
func (b best32) beats(c best32) bool {
	if b.id < 0 || c.id < 0 {
		return b.id >= 0
	}
	if c.value != c.value || b.value != b.value {
		return b.value == b.value || c.value != c.value && b.id < c.id
	}
	return b.value > c.value || b.value == c.value && b.id < c.id
}

func (o *headOp) do(_, unit int) {
	n := o.m.n
	blocks := (n + pickBlock - 1) / pickBlock
	r, first := unit/blocks, unit%blocks*pickBlock
	line := o.logits[r*n:][first:min(n, first+pickBlock)]
	best := best32{id: -1}
	ids := o.op.W.Map
	if ids == nil {
		line = line[:max(0, min(len(line), o.op.W.IDs-first))]
	}
	for i, v := range line {
		id := int32(first + i)
		if ids != nil {
			if id = ids[first+i]; int(id) >= o.op.W.IDs {
				continue
			}
		} else if v <= best.value && best.id >= 0 {
			continue // rounding keeps the order, and lower ids came first
		}
		if b := (best32{num.FromBF16(num.ToBF16(v)), id}); b.beats(best) {
			best = b
		}
	}
	o.bests[unit] = best
}
