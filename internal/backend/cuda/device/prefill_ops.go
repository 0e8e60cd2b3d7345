package device

import (
	"fmt"
	"math"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/chunk"
	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/gemm"
	"ninfer/internal/num"
)

// wideMix is a hyper-connection site. The streams stay where they are.
func (s *step) wideMix(l *loader, op backend.Mix) func(*pass) error {
	w := op.W
	h, width := s.program.Bufs[op.Out].Width, s.program.Bufs[op.X.X].Width
	if width != 4*h || w.Norm.T.Format != num.BF16 || w.Inject.Present() && w.Inject.T.Format != num.BF16 {
		return nil
	}
	down, ok1 := product(l.matrix(w.Down))
	up, ok2 := product(l.matrix(w.Up))
	norm, inject := l.matrix(w.Norm), l.matrix(w.Inject)
	if !ok1 || !ok2 || l.err != nil {
		return nil
	}
	site := gemm.Site{Hidden: h, Rank: w.Down.N, Eps: float32(w.Eps), Norm: rowOf(norm), Down: down, Up: up}
	if w.Inject.Present() {
		site.InjectW = rowOf(inject)
	}
	r := &rooms{s: s}
	work := r.take(site.Bytes(s.program.Pass.Rows))
	key := operand{s.program.Pass.Rows, width}
	s.products[key] = append(s.products[key], site.Products()...)
	in := s.injection(op.X, false)
	x, injected, out := s.bufs[op.X.X], s.bufs[op.X.Inject], s.bufs[op.Out]
	last := s.last(op)
	return func(p *pass) error {
		first, n := 0, len(p.rows)
		if last {
			if len(p.wanted) == 0 {
				return nil
			}
			first = int(p.wanted[0])
			n -= first
		}
		at, y := driver.Ptr(first), in.Y
		if y != 0 {
			y += at * driver.Ptr(2*h)
		}
		return p.s.d.wide.gemm.Mix(p.c, p.s.d.stream, site, x+at*driver.Ptr(2*width), y, injected+at*16, n, out+at*driver.Ptr(2*h), p.space(work))
	}
}

// last says that only the head needs what a site puts out, and nobody its streams: then rows that the head does not want are left out.
func (s *step) last(op backend.Mix) bool {
	ops := s.program.Ops
	if n := len(ops) - 2; n >= 0 {
		mix, ok := ops[n].(backend.Mix)
		head, ends := ops[n+1].(backend.Head)
		return ok && ends && mix == op && head.In == op.Out
	}
	return false
}

// rowOf is where a stored BF16 weight begins.
func rowOf(m kernels.Mat) driver.Ptr { return m.Codes + driver.Ptr(m.First)*driver.Ptr(m.Stride) }

// widePLEJoin gathers the table's rows while the GPU works on the layers before, and sends them in one copy.
func (s *step) widePLEJoin(l *loader, op backend.PLEJoin) func(*pass) error {
	w, d := op.W, s.d
	width, wide := s.program.Bufs[op.X.X].Width, s.program.Bufs[op.In].Width
	h := w.Value.N
	if s.table == nil || s.table.k.Out != s.bufs[op.In] {
		return nil
	}
	rows := s.program.Pass.Rows
	r := &rooms{s: s}
	raw := r.rows(s.table.heads * w.Table.RowBytes)
	operand := r.rows(2 * wide)
	key, value := r.rows(2*width), r.rows(2*h)
	v, vn := r.rows(4*width), r.rows(2*width)
	if wide > maxZeros {
		return nil
	}
	conv := chunk.ConvRows{Rows: rows, C: width, Taps: w.Taps, Dilation: w.Dilation, W: l.vector(w.Conv)}
	q := s.multiplies(l)
	q.into(w.Key, key, width, 0, false)
	q.into(w.Value, value, h, 0, false)
	project := q.done(r, s.program.Pass.Rows, wide)
	gate := kernels.PleGateParams{
		NormKey: l.vector(w.NormKey), NormQuery: l.vector(w.NormQuery), NormConv: l.vector(w.NormConv), H: uint32(h), S: uint32(width / h), Eps: float32(w.Eps),
	}
	if project == nil || l.err != nil {
		return nil
	}
	if s.table.spare, l.err = s.pinned(l.c, len(s.table.staged)); l.err != nil {
		return nil
	}
	in := s.injection(op.X, false)
	in.H, in.S = uint32(h), uint32(width/h)
	gate.X = in.X
	s.history = true
	return func(p *pass) error {
		slot, n, _ := p.lane()
		staged, err := p.staged()
		if err != nil {
			return err
		}
		if err := p.c.ToDevice(d.stream, p.ptr(raw), staged[:n*s.table.heads*w.Table.RowBytes]); err != nil {
			return err
		}
		t := s.table.k
		t.Raw, t.Ready, t.N = p.ptr(raw), t.Number, uint32(n*s.table.heads)
		if err := decode(p, &t); err != nil {
			return err
		}
		if err := p.round(t.Out, p.ptr(operand), n, wide); err != nil {
			return err
		}
		if in.Y != 0 {
			if err := start(p, kernels.Inject, int(in.S), n, 1, 0, &in); err != nil {
				return err
			}
		}
		if err := project(p, p.ptr(operand), n); err != nil {
			return err
		}
		g := gate
		g.Key, g.Value, g.V, g.Vn = p.ptr(key), p.ptr(value), p.ptr(v), p.ptr(vn)
		if err := start(p, kernels.PleGate, int(g.S), n, 1, 0, &g); err != nil {
			return err
		}
		c := conv
		c.Rows, c.X, c.V, c.Streams, c.Window = n, g.Vn, g.V, g.X, p.place(op.Window, slot)
		return d.wide.chunk.ConvRows(p.c, d.stream, &c)
	}
}

// round writes rows of FP32 as BF16: nothing, with a convolution of zero taps, plus what it is given.
func (p *pass) round(from, to driver.Ptr, rows, width int) error {
	d := p.s.d
	if err := p.c.Set(d.stream, to, 0, uint64(2*rows*width)); err != nil {
		return err
	}
	return d.wide.chunk.ConvRows(p.c, d.stream, &chunk.ConvRows{Rows: rows, C: width, Taps: 1, Dilation: 1, X: to, W: d.wide.zeros, Window: d.wide.zeros, V: from, Streams: to})
}

func (s *step) wideGDN(l *loader, op backend.GDN) func(*pass) error {
	w, d := op.W, s.d
	h := s.program.Bufs[op.In].Width
	kd, vd := w.KeyHeads*w.Dim, w.ValueHeads*w.Dim
	width := 2*kd + vd
	shape := chunk.DeltaShape{KeyHeads: w.KeyHeads, Heads: w.ValueHeads, Dim: w.Dim, Taps: w.Taps}
	if shape.Fits() != nil {
		return nil
	}
	r := &rooms{s: s}
	ld := width + vd + 64                // the padding keeps rows from lying a power of two apart
	second := (w.ValueHeads + 7) / 8 * 8 // column of b beside a
	raw, ab := r.rows(2*ld), r.rows(4*second)
	work := r.take(shape.Workspace(s.program.Pass.Rows))
	q := s.multiplies(l)
	q.into(w.Query, raw, ld, 0, false)
	q.into(w.Key, raw, ld, kd, false)
	q.into(w.Value, raw, ld, 2*kd, false)
	q.into(w.Z, raw, ld, width, false)
	q.into(w.A, ab, 2*second, 0, false)
	q.into(w.B, ab, 2*second, second, false)
	in := q.done(r, s.program.Pass.Rows, h)
	o := s.multiplies(l)
	o.to(w.Out, s.bufs[op.Out], w.Out.N)
	out := o.done(r, s.program.Pass.Rows, ld)
	delta := chunk.Delta{
		DeltaShape: shape, XLd: ld, ZLd: ld, ALd: 2 * second, OutLd: ld, Conv: l.vector(w.Conv), Alog: l.vector(w.ALog), Dt: l.vector(w.DtBias), Norm: l.vector(w.Norm),
		Eps: float32(w.Eps), HalfState: d.opt.BF16State,
	}
	if in == nil || out == nil || l.err != nil {
		return nil
	}
	x := s.bufs[op.In]
	return func(p *pass) error {
		slot, n, _ := p.lane()
		if err := in(p, x, n); err != nil {
			return err
		}
		q := delta
		q.Rows, q.X, q.A, q.Work = n, p.ptr(raw), p.ptr(ab), p.ptr(work)
		q.Z, q.B = q.X+driver.Ptr(2*width), q.A+driver.Ptr(2*second)
		q.Out, q.Window, q.State = q.Z, p.place(op.Window, slot), p.place(op.Matrix, slot)
		if err := d.wide.chunk.Delta(p.c, d.stream, &q); err != nil {
			return err
		}
		return out(p, q.Out, n)
	}
}

func (s *step) wideQSA(l *loader, op backend.QSA) func(*pass) error {
	w, d := op.W, s.d
	h := s.program.Bufs[op.In].Width
	shape := chunk.AttentionShape{
		Heads: w.Heads, KVHeads: w.KVHeads, HeadDim: w.HeadDim, IndexHeads: w.IndexHeads, IndexDim: w.IndexDim, Rotary: w.Rotary.Dim, Ratio: w.Ratio, Blocks: w.Blocks,
	}
	if shape.Fits() != nil {
		return nil
	}
	kw, qw, iw := w.KVHeads*w.HeadDim, w.Heads*w.HeadDim, (w.IndexHeads+1)*w.IndexDim
	r := &rooms{s: s}
	ld := 2 * kw
	var query, indexQuery, attended, work room
	if !op.AppendOnly {
		ld += 2 * qw
		query, indexQuery, attended = r.rows(2*qw), r.rows(2*w.IndexHeads*w.IndexDim), r.rows(2*qw)
		work = r.take(shape.Workspace(s.program.Pass.Rows, d.opt.Tokens))
	}
	projected, index := r.rows(2*ld), r.rows(2*iw) // queries and gates, keys, values; index queries and key
	q := s.multiplies(l)
	if !op.AppendOnly {
		q.into(w.QueryGate, projected, ld, 0, false)
	}
	q.into(w.Key, projected, ld, ld-2*kw, false)
	q.into(w.Value, projected, ld, ld-kw, false)
	q.into(w.Index, index, iw, 0, false)
	in := q.done(r, s.program.Pass.Rows, h)
	prep := chunk.Prep{
		AttentionShape: shape, KeyLd: ld, ValueLd: ld, IndexLd: iw, KeyNorm: l.vector(w.KeyNorm), IndexKeyNorm: l.vector(w.IndexKeyNorm),
		Inverse: l.rotary(w.Rotary), Eps: float32(w.Eps), RowTable: s.rows,
	}
	out := func(*pass, driver.Ptr, int) error { return nil }
	if !op.AppendOnly {
		prep.QgLd, prep.QueryNorm, prep.IndexQueryNorm = ld, l.vector(w.QueryNorm), l.vector(w.IndexQueryNorm)
		o := s.multiplies(l)
		o.to(w.Out, s.bufs[op.Out], w.Out.N)
		out = o.done(r, s.program.Pass.Rows, qw)
	}
	if in == nil || out == nil || l.err != nil {
		return nil
	}
	x := s.bufs[op.In]
	return func(p *pass) error {
		slot, n, base := p.lane()
		if err := in(p, x, n); err != nil {
			return err
		}
		at := func(id backend.StateID) driver.Ptr { return d.states[id].at }
		q := prep
		q.Cache = chunk.Cache{
			Keys: at(op.Keys), Values: at(op.Values), KeyScales: d.states[op.Keys].scales, ValueScales: d.states[op.Values].scales,
			Raw: at(op.RawIndex), Positions: at(op.Positions), BlockKeys: at(op.IndexKeys), Pages: d.pagesOf(slot),
		}
		q.Rows, q.Base, q.Index = n, base, p.ptr(index)
		q.Key, q.Value = p.ptr(projected)+driver.Ptr(2*(ld-2*kw)), p.ptr(projected)+driver.Ptr(2*(ld-kw))
		if !op.AppendOnly {
			q.Qg, q.Q, q.Iq = p.ptr(projected), p.ptr(query), p.ptr(indexQuery)
		}
		if err := d.wide.chunk.Prep(p.c, d.stream, &q); err != nil || op.AppendOnly {
			return err
		}
		attend := chunk.Attend{
			AttentionShape: shape, Cache: q.Cache, Rows: n, Base: base, Q: q.Q, Iq: q.Iq, Qg: q.Qg, QgLd: q.QgLd, Out: p.ptr(attended), OutLd: qw, Work: p.ptr(work),
		}
		if err := p.attend(op, &attend); err != nil {
			return err
		}
		return out(p, attend.Out, n)
	}
}

// attend runs a wide pass's attention with forced selections, and traces what is attended to.
func (p *pass) attend(op backend.QSA, q *chunk.Attend) error {
	d, in := p.s.d, &p.in[0]
	if p.plain || in.Trace == nil && (in.Force == nil || in.Force.Selected[op.Layer] == nil) {
		return d.wide.chunk.Attend(p.c, d.stream, q)
	}
	ld := op.W.Blocks*op.W.Ratio + op.W.Ratio
	lists := make([]uint32, q.Rows*(ld+1))
	counts := lists[q.Rows*ld:]
	for r := range counts {
		counts[r] = math.MaxUint32
	}
	if f := in.Force; f != nil && f.Selected[op.Layer] != nil {
		for r := range counts {
			visible := q.Base + r + 1
			if len(f.Selected[op.Layer]) <= r || len(f.Selected[op.Layer][r]) < visible {
				return fmt.Errorf("forced selection lacks row %d", r)
			}
			counts[r] = 0
			for t, on := range f.Selected[op.Layer][r][:visible] {
				if !on {
					continue
				}
				if int(counts[r]) == ld {
					return fmt.Errorf("forced selection of more than %d tokens", ld)
				}
				lists[r*ld+int(counts[r])] = uint32(t)
				counts[r]++
			}
		}
	}
	at, err := p.c.Alloc("looking at selections", uint64(8*len(lists)))
	if err != nil {
		return err
	}
	defer func() { _ = p.c.Free(at) }()
	if err := p.c.ToDevice(d.stream, at, bytesIn(lists)); err != nil {
		return err
	}
	if in.Force != nil && in.Force.Selected[op.Layer] != nil {
		q.Forced, q.ForcedCount, q.ForcedLd = at, at+driver.Ptr(4*q.Rows*ld), ld
	}
	seen := at + driver.Ptr(4*len(lists))
	q.Seen, q.SeenCount, q.SeenLd = seen, seen+driver.Ptr(4*q.Rows*ld), ld
	if err := d.wide.chunk.Attend(p.c, d.stream, q); err != nil {
		return err
	}
	if err := p.read(bytesIn(lists), seen); err != nil || in.Trace == nil {
		return err
	}
	if in.Trace.Selected == nil {
		in.Trace.Selected = map[int][][]bool{}
	}
	for r, n := range counts {
		line := make([]bool, q.Base+r+1)
		if int(n) > ld {
			return fmt.Errorf("row %d selects %d tokens, room for %d", r, n, ld)
		}
		for _, id := range lists[r*ld : r*ld+int(n)] {
			if int(id) >= len(line) {
				return fmt.Errorf("row %d selects token %d of %d", r, id, len(line))
			}
			line[id] = true
		}
		in.Trace.Selected[op.Layer] = append(in.Trace.Selected[op.Layer], line)
	}
	return nil
}

// banked is an expert bank as decoding keeps it; paired is the one of gates and ups.
func (d *Device) banked(l *loader, w backend.Weight, rows int, paired bool) (gemm.Bank, bool) {
	g := w.T.Geometry()
	if w.First != 0 || w.N != w.T.Rows() {
		return gemm.Bank{}, false
	}
	if b, ok := d.banks[&w.T.Data[0]]; ok {
		return gemm.Bank{Data: b.tiles, Divisors: b.divisors, Layout: map[bool]gemm.Layout{true: gemm.Tiles16, false: gemm.Tiles8}[paired]}, true
	}
	m := l.matrix(w)
	switch w.T.Format {
	case num.NVFP4:
		return gemm.Bank{Data: m.Codes, Scales: m.Scales, Divisors: m.Divisors, Layout: gemm.Stored}, g.ExpertRows == rows
	case num.BF16:
		return gemm.Bank{Data: m.Codes, Layout: gemm.Plain16}, int(m.Stride) == 2*g.Cols
	}
	return gemm.Bank{}, false
}

func (s *step) wideMoE(l *loader, op backend.MoE) func(*pass) error {
	w, d := op.W, s.d
	h := s.program.Bufs[op.In].Width
	up, ok1 := d.banked(l, w.GateUp, 2*w.Inter, true)
	down, ok2 := d.banked(l, w.Down, h, false)
	mix := gemm.Mixture{Experts: w.Experts, TopK: w.TopK, Hidden: h, Inter: w.Inter, GateUp: up, Down: down, Normalize: w.Normalize}
	if !ok1 || !ok2 || mix.Fits() != nil {
		return nil
	}
	r := &rooms{s: s}
	logits, sharedLogit, chosen, weight := r.rows(4*w.Experts), r.rows(4), r.rows(4*w.TopK), r.rows(4*w.TopK)
	both, hidden, shared := r.rows(8*w.SharedInter), r.rows(2*w.SharedInter), r.rows(4*h)
	forced := r.rows(4 * w.TopK)
	work := r.take(mix.Bytes(s.program.Pass.Rows))
	q := s.multiplies(l)
	q.into(w.Router, logits, w.Experts, 0, true)
	q.into(w.SharedVector, sharedLogit, 1, 0, true)
	q.into(w.SharedGate, both, 2*w.SharedInter, 0, true)
	q.into(w.SharedUp, both, 2*w.SharedInter, w.SharedInter, true)
	first := q.done(r, s.program.Pass.Rows, h)
	o := s.multiplies(l)
	o.into(w.SharedDown, shared, h, 0, true)
	second := o.done(r, s.program.Pass.Rows, w.SharedInter)
	if first == nil || second == nil || l.err != nil {
		return nil
	}
	route := kernels.RouteParams{Experts: uint32(w.Experts), Topk: uint32(w.TopK)}
	if w.Normalize {
		route.Normalize = 1
	}
	x, y := s.bufs[op.In], s.bufs[op.Out]
	return func(p *pass) error {
		g, n := d.wide.gemm, len(p.rows)
		if err := first(p, x, n); err != nil {
			return err
		}
		if err := g.Route(p.c, d.stream, mix, p.ptr(logits), n, p.ptr(chosen), p.ptr(weight)); err != nil {
			return err
		}
		if !p.plain {
			on, err := p.forceExperts(op, p.ptr(forced))
			if err != nil {
				return err
			}
			if on {
				q := route
				q.Logits, q.Forced, q.Chosen, q.Weight = p.ptr(logits), p.ptr(forced), p.ptr(chosen), p.ptr(weight)
				if err := start(p, kernels.Route, n, 1, 1, 0, &q); err != nil {
					return err
				}
			}
			if err := p.traceExperts(op, p.ptr(chosen)); err != nil {
				return err
			}
		}
		up := p.ptr(both) + driver.Ptr(4*w.SharedInter)
		if err := g.Gate(p.c, d.stream, p.ptr(both), up, 2*w.SharedInter, w.SharedInter, n, p.ptr(hidden)); err != nil {
			return err
		}
		if err := second(p, p.ptr(hidden), n); err != nil {
			return err
		}
		return g.Experts(p.c, d.stream, mix, x, n, p.ptr(chosen), p.ptr(weight), p.ptr(shared), p.ptr(sharedLogit), y, p.space(work))
	}
}

func (s *step) wideStem(l *loader, op backend.Stem) func(*pass) error {
	w, d := op.W, s.d
	h, width := w.Embed.Cols(), s.program.Bufs[op.X.X].Width
	if width != d.chained || width%h != 0 {
		return nil
	}
	streams := width / h
	r := &rooms{s: s}
	e, hidden, pe, ph := r.rows(2*h), r.rows(2*width), r.rows(2*h), r.rows(2*width)
	qe, qh := s.multiplies(l), s.multiplies(l)
	qe.into(w.ProjEmbed, pe, h, 0, false)
	qh.into(w.ProjHidden, ph, h, 0, false)
	embedded, projected := qe.done(r, s.program.Pass.Rows, h), qh.done(r, s.program.Pass.Rows*streams, h)
	norm := kernels.StemParams{
		Rows: s.rows, Lanes: s.lanes, NormEmbed: l.vector(w.NormEmbed), NormHidden: l.vector(w.NormHidden), W: l.matrix(w.Embed),
		H: uint32(h), S: uint32(streams), Carry: uint32(d.opt.Carry), Eps: float32(w.Eps),
	}
	if embedded == nil || projected == nil || l.err != nil {
		return nil
	}
	s.stem, s.embed = true, &embed{w.Embed.N, h}
	s.pending[op.X.X] = 0
	x := s.bufs[op.X.X]
	return func(p *pass) error {
		n := len(p.rows)
		q := norm
		q.Carried, q.Chain, q.E, q.Hidden = d.states[op.Carry].at, d.chain, p.ptr(e), p.ptr(hidden)
		if err := start(p, kernels.StemNorm, 2, n, 1, 0, &q); err != nil {
			return err
		}
		if err := embedded(p, q.E, n); err != nil {
			return err
		}
		if err := projected(p, q.Hidden, n*streams); err != nil {
			return err
		}
		add := kernels.StemAddParams{Hidden: p.ptr(ph), E: p.ptr(pe), X: x, H: uint32(h), S: uint32(streams), R: uint32(n)}
		return start(p, kernels.StemAdd, tiles(n*width, 256), 1, 1, 0, &add)
	}
}
