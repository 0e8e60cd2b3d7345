package device

import (
	"fmt"
	"math"
	"slices"

	"ninfer/internal/backend"
	plain "ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/kernels"
	"ninfer/internal/num"
)

// The tuned matrix kernels take the shapes and formats of real artifacts; whatever they do not take runs on the plain ones.

// tunedRun launches a tuned kernel, which may begin before the one ahead of it has ended.
func tunedRun[P any](p *pass, plan kernels.Plan, params *P) error {
	return tunedLaunch(p, plan, params, true)
}

// tunedLaunch launches a tuned kernel; with early it may begin before the one ahead of it has ended.
func tunedLaunch[P any](p *pass, plan kernels.Plan, params *P, early bool) error {
	if w := p.s.d.watch; w != nil && !w.passes(plan.Kernel.Name()) {
		return nil
	}
	return p.s.d.tuned.Run(p.c, p.s.d.stream, plan, params, early)
}

// stored is a matrix as the tuned kernels see it.
type stored struct {
	format kernels.Format
	w      driver.Ptr
	scale  driver.Ptr
	flags  uint32
}

func tunedMatrix(m plain.Mat) (stored, bool) {
	s := stored{w: m.Codes + driver.Ptr(m.First)*driver.Ptr(m.Stride)}
	scales := m.Scales + driver.Ptr(m.First)*driver.Ptr(m.ScaleStride)
	switch plain.Format(m.Format) {
	case plain.BF16:
		s.format = kernels.FormatBF16
	case plain.FP8RowBF16:
		s.format, s.scale = kernels.FormatE4M3, scales
	case plain.FP8RowFP32:
		s.format, s.scale, s.flags = kernels.FormatE4M3, scales, kernels.PartScaleF32
	case plain.Q4:
		s.format, s.scale = kernels.FormatQ4, scales
	default:
		return s, false
	}
	return s, s.w%16 == 0 && m.Rows > 0
}

// streams plans the product of up to eight BF16 rows on the tuned kernels, if they can do it.
func (d *Device) streams(ld, rows int, parts []plain.Part) (format kernels.Format, plan kernels.Plan, g kernels.GemvParams, ok bool) {
	if d.tuned == nil || len(parts) == 0 || uint32(ld) != parts[0].M.K {
		return format, plan, g, false
	}
	var own, rest []kernels.Part
	for _, q := range parts {
		s, fits := tunedMatrix(q.M)
		if !fits || q.Flags&^plain.PartF32 != 0 {
			return format, plan, g, false
		}
		t := kernels.Part{W: s.w, Scale: s.scale, Out: q.Out, Rows: q.M.Rows, OutLd: q.OutLd, Flags: s.flags}
		if q.Flags&plain.PartF32 != 0 {
			t.Flags |= kernels.PartOutF32
		}
		switch {
		case s.format == kernels.FormatBF16:
			rest = append(rest, t)
		case len(own) > 0 && s.format != format:
			return format, plan, g, false
		default:
			format = s.format
			own = append(own, t)
		}
	}
	from := len(own)
	if from == 0 {
		from = len(rest)
	}
	plan, g, err := d.tuned.Limits.Gemv(format, uint32(rows), parts[0].M.K, append(own, rest...), from, kernels.Tuning{})
	return format, plan, g, err == nil
}

// tunedGemv multiplies up to eight BF16 rows of x if the tuned kernels can; ok says whether they could.
func (p *pass) tunedGemv(x driver.Ptr, ld, rows int, parts []plain.Part) (ok bool, err error) {
	_, plan, g, ok := p.s.d.streams(ld, rows, parts)
	if !ok {
		return false, nil
	}
	g.X, g.XLd = x, uint32(ld)
	return true, tunedRun(p, plan, &g)
}

// aheadBytes is what is brought into L2 of each block's share of the next matrix, aheadRows that of one in 8 bits with more than four rows: what the
// next kernels read waits behind it.
const aheadBytes, aheadRows = 48 << 10, 32 << 10

// inputs notes the matrices that a mixer's input is multiplied with first: those of the mixture before may bring some of them into L2.
func (s *step) inputs(parts []plain.Part) { s.ahead = append(s.ahead, parts) }

// aheadOf is what a kernel brings into L2 of the inputs of the n-th mixer, for so many rows: no more than half of it.
func (s *step) aheadOf(n, rows int) kernels.Ahead {
	if n >= len(s.ahead) {
		return kernels.Ahead{}
	}
	format, _, g, ok := s.d.streams(int(s.ahead[n][0].M.K), rows, s.ahead[n])
	if !ok {
		return kernels.Ahead{}
	}
	bytes := uint32(aheadBytes)
	if format == kernels.FormatE4M3 && rows > 4 {
		bytes = aheadRows
	}
	a := g.Ahead(format, bytes)
	if uint64(a.N)*uint64(a.Bytes) > uint64(s.d.owner.Device().L2/2) {
		return kernels.Ahead{}
	}
	return a
}

// tunedBest finds the best row of a head for each of n rows of x without writing logits; of as many as one launch takes the report tells them from its
// blocks' keys.
func (p *pass) tunedBest(hd *head, x driver.Ptr, n int) error {
	valid := uint32(hd.w.IDs)
	if hd.ids != 0 {
		valid = hd.mat.Rows
	}
	for r := 0; r < n; r += kernels.MaxRows {
		rows := min(kernels.MaxRows, n-r)
		plan, g, err := hd.plan(rows)
		if err != nil {
			return err
		}
		g.X, g.XLd, g.Best, g.ValidRows = x+driver.Ptr(2*r*hd.h), uint32(hd.h), hd.best, valid
		if err := tunedRun(p, plan, &g); err != nil {
			return err
		}
		if n <= kernels.MaxRows {
			p.keys = plan.Grid
			return nil
		}
		merge := kernels.BestParams{Best: hd.best, Ids: hd.ids, Out: hd.picked + driver.Ptr(4*r), N: plan.Grid, R: uint32(rows)}
		if err := tunedRun(p, kernels.Plan{Kernel: kernels.BestMerge, Grid: uint32(rows)}, &merge); err != nil {
			return err
		}
	}
	return nil
}

// multiplicand is what project multiplies: rows of ld values at x, in FP32 or BF16; with squares BF16 times a factor for each dim values.
type multiplicand struct {
	x, squares driver.Ptr
	f32        bool
	dim        int
	eps        float64
	lanes      bool // the rows are those of a decoding step's lanes
}

// project multiplies rows of x if there is a kernel for the parts. It does shift on the side.
func (p *pass) project(x multiplicand, ld, rows int, parts []plain.Part, shift plain.Shift) (ok bool, err error) {
	d := p.s.d
	if d.opt.Plain || !projects(d, ld, parts) {
		return false, nil
	}
	q := plain.ProjectParams{XLd: uint32(ld), K: uint32(ld), Dim: uint32(x.dim), Parts: uint32(len(parts)), Eps: float32(x.eps), Shift: shift}
	width := 2
	if x.f32 {
		q.XF32, width = 1, 4
	}
	for r := 0; r < rows; {
		n := rows - r
		kernel, grid, shared := projector(d, &n, x, ld, parts, q.Shift)
		if n == 0 {
			return false, fmt.Errorf("no room for a row of %d", ld)
		}
		q.R, q.X, q.Shares = uint32(n), x.x+driver.Ptr(r*ld*width), plain.Shares(rowsOf(parts), grid)
		if x.squares != 0 {
			q.Squares = x.squares + driver.Ptr(r*(ld/x.dim)*16)
		}
		for i, w := range parts {
			s, _ := tunedMatrix(w.M)
			q.Part[i] = plain.ProjectPart{W: s.w, Scale: s.scale, Out: w.Out + driver.Ptr(2*r*int(w.OutLd)), Rows: w.M.Rows, OutLd: w.OutLd}
			if s.flags&kernels.PartScaleF32 != 0 {
				q.Part[i].ScaleF32 = 1
			}
		}
		if x.lanes {
			q.Part[0].Paced = plain.Paced(plain.Format(parts[0].M.Format) != plain.BF16, x.squares != 0, n)
		}
		if err := start(p, kernel, grid, 1, 1, uint32(shared), &q); err != nil {
			return false, err
		}
		q.Shift.Count = 0 // once
		r += n
	}
	return true, nil
}

// projector chooses a Project kernel for rows of x, fewer of them if it has not the room for all; for none if there is no room for one.
func projector(d *Device, rows *int, x multiplicand, k int, parts []plain.Part, shift plain.Shift) (kernel plain.ID, grid, shared int) {
	gpu, e4m3 := d.owner.Device(), plain.Format(parts[0].M.Format) != plain.BF16
	q := plain.Projection{K: k, N: rowsOf(parts), Dim: x.dim, Pieces: int(shift.Count * shift.C / 8), Lanes: int(shift.Count), F32: x.f32}
	for *rows = min(*rows, plain.ProjectRows); *rows > 0; *rows-- {
		for _, j := range plain.Projectors {
			for blocks := 1; blocks <= 4 && j.E4M3 == e4m3; blocks++ { // of an SM, one after the other: where shared memory is small each has fewer weight rows
				if q.R, q.Blocks = *rows, gpu.SMs/j.Cluster*j.Cluster*blocks; q.Blocks == 0 || j.Cluster > 1 && blocks > 1 {
					continue
				}
				if j.Kernel == plain.ProjectWholeLanes {
					if !x.lanes {
						continue
					}
					// SMs that get no room before others need not be waited for: a tile's instructions are for 24 weight rows anyway.
					if n := (q.N + plain.ProjectTile - 1) / plain.ProjectTile; *rows > 5 && n < q.Blocks {
						q.Blocks = (n + 1) / 2 * 2
					}
				}
				if j.Kernel == plain.ProjectBf16Rows {
					q.Blocks = gpu.SMs * 10 / 11 / j.Cluster * j.Cluster // of more clusters the last find no SM for each block
				}
				if size, ok := j.Shared(q); ok && size <= gpu.SharedPerBlock {
					return j.Kernel, q.Blocks, size
				}
			}
		}
	}
	return 0, 0, 0
}

func rowsOf(parts []plain.Part) (n int) {
	for _, q := range parts {
		n += int(q.M.Rows)
	}
	return n
}

// projects says whether the Project kernels take the parts: one format, whole rows of k, BF16 results.
func projects(d *Device, k int, parts []plain.Part) bool {
	format := func(m plain.Mat) int {
		switch plain.Format(m.Format) {
		case plain.BF16:
			return 1
		case plain.FP8RowBF16, plain.FP8RowFP32:
			return 2
		}
		return 0
	}
	if len(parts) == 0 || len(parts) > 4 || k%64 != 0 {
		return false
	}
	f := format(parts[0].M)
	for _, q := range parts {
		if _, ok := tunedMatrix(q.M); !ok || f == 0 || format(q.M) != f || q.Flags != 0 || int(q.M.K) != k || int(q.M.Stride)*f != 2*k {
			return false
		}
	}
	rows := 1
	projector(d, &rows, multiplicand{f32: true, dim: 1}, k, parts, plain.Shift{})
	return rows > 0
}

// tunedMix prepares a hyper-connection site on the tuned kernels; nil if they do not take it. The streams move to another buffer.
func (s *step) tunedMix(l *loader, op backend.Mix) func(*pass) error {
	d, w := s.d, op.W
	h := s.program.Bufs[op.Out].Width
	width, low := s.program.Bufs[op.X.X].Width, w.Down.N
	if d.tuned == nil || width != 4*h || w.Eps != float64(float32(1e-6)) && w.Eps != 1e-6 || w.Norm.T.Format != num.BF16 {
		return nil
	}
	if w.Inject.Present() && w.Inject.T.Format != num.BF16 {
		return nil
	}
	down, ok1 := tunedMatrix(l.matrix(w.Down))
	up, ok2 := tunedMatrix(l.matrix(w.Up))
	if !ok1 || !ok2 || down.format != up.format || down.flags != up.flags || down.format == kernels.FormatQ4 {
		return nil
	}
	fp8 := down.format == kernels.FormatE4M3
	type half struct {
		downPlan, upPlan kernels.Plan
		down             kernels.HcDownParams
		up               kernels.HcUpParams
	}
	var plans [kernels.MaxRows + 1]half
	most := 0 // rows that a launch takes
	for r := 1; r <= min(kernels.MaxRows, s.program.Pass.Rows); r++ {
		q := &plans[r]
		var err error
		if q.downPlan, q.down, err = d.tuned.Limits.HcDown(fp8, uint32(r), uint32(h), uint32(low)); err != nil {
			break
		}
		if q.upPlan, q.up, err = d.tuned.Limits.HcUp(fp8, uint32(r), uint32(h), uint32(low)); err != nil {
			break
		}
		most = r
	}
	if most == 0 {
		return nil
	}
	inj, _ := tunedMatrix(l.matrix(w.Inject))
	norm, _ := tunedMatrix(l.matrix(w.Norm))
	other, ok := s.other[op.X.X]
	if !ok {
		other = l.rows(fmt.Sprint("other streams ", op.X.X), 2*width)
	}
	in := s.injection(op.X, false)
	partial, square := l.rows("partial sums", 4*kernels.HyperParts*(low+4)), l.rows("squares", 4*kernels.HyperParts)
	x, xOut, inject, out := s.bufs[op.X.X], other, s.bufs[op.X.Inject], s.bufs[op.Out]
	s.bufs[op.X.X], s.other[op.X.X] = other, x
	// hc_down reads streams and injection weights early, which is for a block between two sites to allow; a site whose result is injected by the next has none.
	early := in.Y == 0 || in.Y != s.mixed
	s.mixed = out
	scale := down.flags & kernels.PartScaleF32 / kernels.PartScaleF32
	if w.Inject.Present() { // before a router too, whose weights would delay what hc_down of several rows reads
		plans[1].up.Trigger = 0
	}
	if w.Inject.Present() && len(s.ahead) == s.mixtures {
		for r := range plans { // a mixer's first matrix comes next, which has much to ask for
			plans[r].up.Trigger = 0
		}
	}
	return func(p *pass) error {
		for r := p.from; r < len(p.rows); r += most {
			at := driver.Ptr(r)
			q := plans[min(most, len(p.rows)-r)]
			q.down.X, q.down.XOut = x+at*driver.Ptr(2*width), xOut+at*driver.Ptr(2*width)
			if in.Y != 0 {
				q.down.Y, q.down.Inject = in.Y+at*driver.Ptr(2*h), inject+at*16
			}
			q.down.Norm, q.down.Down, q.down.DownScale, q.down.ScaleF32 = norm.w, down.w, down.scale, scale
			q.down.Partial, q.down.Square = partial+at*driver.Ptr(4*kernels.HyperParts*(low+4)), square+at*4*kernels.HyperParts
			q.up.X, q.up.Norm, q.up.Partial, q.up.Square = q.down.XOut, norm.w, q.down.Partial, q.down.Square
			q.up.Up, q.up.UpScale, q.up.ScaleF32, q.up.Mix = up.w, up.scale, scale, out+at*driver.Ptr(2*h)
			if w.Inject.Present() {
				q.down.InjW, q.up.Inject = inj.w, inject+at*16
			}
			if err := tunedLaunch(p, q.downPlan, &q.down, early); err != nil {
				return err
			}
			if err := tunedRun(p, q.upPlan, &q.up); err != nil {
				return err
			}
		}
		return nil
	}
}

// bank is an expert bank in the tuned kernels' order.
type bank struct{ tiles, divisors driver.Ptr }

// repack uploads a bank, orders it and forgets the stored form.
func (d *Device) repack(c *driver.Context, w backend.Weight, paired bool) (bank, error) {
	key := &w.T.Data[0]
	if b, ok := d.banks[key]; ok {
		return b, nil
	}
	g := w.T.Geometry()
	raw, err := c.Alloc("stored experts", uint64(len(w.T.Data)))
	if err != nil {
		return bank{}, err
	}
	defer func() { _ = c.Free(raw) }()
	var b bank
	size := uint64(g.Rows) * uint64(g.Cols) / 16 * 9
	if b.tiles, err = d.alloc(c, "experts", size); err != nil {
		return bank{}, err
	}
	d.banks[key] = b
	if err := d.put(c, raw, w.T.Data); err != nil {
		return bank{}, err
	}
	// A launch takes so many experts that its grid stays in range.
	const most = 64
	for first := 0; first < g.Experts; first += most {
		p := kernels.RepackParams{
			Codes: raw, Scales: raw + driver.Ptr(g.Scales.Off), Bank: b.tiles, N: uint32(g.ExpertRows), K: uint32(g.Cols),
			FirstExpert: uint32(first), Count: uint32(min(most, g.Experts-first)),
		}
		if paired {
			p.Paired = 1
		}
		if err := d.tuned.Run(c, d.stream, kernels.Repack(p.N, p.K, p.Count), &p, false); err != nil {
			return bank{}, err
		}
	}
	if b.divisors, err = d.alloc(c, "divisors", uint64(g.Divisors.Len)); err != nil {
		return bank{}, err
	}
	if err := c.Copy(d.stream, b.divisors, raw+driver.Ptr(g.Divisors.Off), uint64(g.Divisors.Len)); err != nil {
		return bank{}, err
	}
	if err := c.SyncStream(d.stream); err != nil { // the stored form goes now
		return bank{}, err
	}
	d.banks[key] = b
	return b, nil
}

// routerMatrices are the router and the shared expert's first half, which one kernel multiplies: of one format, and not Q4; ok tells whether it takes them.
func routerMatrices(l *loader, w *backend.MoEWeights) (router, gate, up stored, ok bool) {
	router, ok1 := tunedMatrix(l.matrix(w.Router))
	gate, ok2 := tunedMatrix(l.matrix(w.SharedGate))
	up, ok3 := tunedMatrix(l.matrix(w.SharedUp))
	same := gate.format == router.format && up.format == router.format && gate.flags == router.flags && up.flags == router.flags
	return router, gate, up, ok1 && ok2 && ok3 && same && router.format != kernels.FormatQ4
}

// tunedMoE prepares a mixture of experts on the tuned kernels; nil if they do not take it.
func (s *step) tunedMoE(l *loader, op backend.MoE) func(*pass) error {
	d, w := s.d, op.W
	h := s.program.Bufs[op.In].Width
	whole := func(b backend.Weight, rows int) bool {
		return b.T.Format == num.NVFP4 && b.First == 0 && b.N == b.T.Rows() && b.T.Geometry().ExpertRows == rows
	}
	if d.tuned == nil || !w.Normalize || w.Inter != w.SharedInter || !whole(w.GateUp, 2*w.Inter) || !whole(w.Down, h) || w.SharedDown.T.Format != num.BF16 ||
		w.SharedVector.T.Format != num.BF16 {
		return nil
	}
	router, gate, up, ok := routerMatrices(l, w)
	if !ok {
		return nil
	}
	type plans struct {
		router, up, down kernels.Plan
		r                kernels.RouterParams
		u                kernels.ExpertUpParams
		d                kernels.ExpertDownParams
	}
	var all [kernels.MaxRows + 1]plans
	for r := 1; r <= min(kernels.MaxRows, s.program.Pass.Rows); r++ {
		q := &all[r]
		var err [3]error
		n, k, e, t, i := uint32(r), uint32(h), uint32(w.Experts), uint32(w.TopK), uint32(w.Inter)
		q.router, q.r, err[0] = d.tuned.Limits.Router(router.format == kernels.FormatE4M3, n, k, e, i)
		q.up, q.u, err[1] = d.tuned.Limits.ExpertUp(n, k, e, t, i, kernels.Tuning{})
		q.down, q.d, err[2] = d.tuned.Limits.ExpertDown(n, k, e, t, i, true)
		if err != [3]error{} {
			return nil
		}
	}
	if l.err != nil {
		return nil
	}
	var upBank, downBank bank
	if upBank, l.err = d.repack(l.c, w.GateUp, true); l.err == nil {
		downBank, l.err = d.repack(l.c, w.Down, false)
	}
	vector, _ := tunedMatrix(l.matrix(w.SharedVector))
	down, _ := tunedMatrix(l.matrix(w.SharedDown))
	logits, sharedLogit := l.rows("router logits", 4*w.Experts), l.rows("shared logit", 4)
	hidden, shared, sharedOut := l.rows("expert hidden", 2*w.TopK*w.Inter), l.rows("shared hidden", 2*w.Inter), l.rows("shared expert", 4*h)
	route := plain.RouteParams{
		Logits: logits, Chosen: l.rows("experts", 4*w.TopK), Weight: l.rows("expert weights", 4*w.TopK), Experts: uint32(w.Experts), Topk: uint32(w.TopK), Normalize: 1,
	}
	in, out := s.bufs[op.In], s.bufs[op.Out]
	if l.err == nil && s.distinct == 0 {
		s.distinct, l.err = s.alloc(l.c, "distinct experts", 4*len(s.program.Ops))
	}
	distinct := s.distinct + driver.Ptr(4*s.mixtures)
	s.mixtures++
	later := len(s.ahead)
	return func(p *pass) error {
		for r := p.from; r < len(p.rows); r += kernels.MaxRows {
			at := driver.Ptr(r)
			q := all[min(kernels.MaxRows, len(p.rows)-r)]
			x := in + at*driver.Ptr(2*h)
			lg, sl := logits+at*driver.Ptr(4*w.Experts), sharedLogit+at*4
			hid, sh := hidden+at*driver.Ptr(2*w.TopK*w.Inter), shared+at*driver.Ptr(2*w.Inter)
			q.r.X, q.r.Router, q.r.RouterScale, q.r.Gate, q.r.GateScale = x, router.w, router.scale, gate.w, gate.scale
			q.r.Up, q.r.UpScale, q.r.Shared, q.r.Logits, q.r.Hidden, q.r.SharedLogit = up.w, up.scale, vector.w, lg, sh, sl
			q.r.ScaleF32 = router.flags & kernels.PartScaleF32 / kernels.PartScaleF32
			q.r.Ahead = s.aheadOf(later, int(q.r.R))
			q.u.X, q.u.Logits, q.u.Bank, q.u.Divisor, q.u.Hidden = x, lg, upBank.tiles, upBank.divisors, hid
			q.u.SharedW, q.u.SharedHidden, q.u.SharedLogit, q.u.SharedOut = down.w, sh, sl, sharedOut+at*driver.Ptr(4*h)
			q.d.Logits, q.d.Hidden, q.d.Bank, q.d.Divisor, q.d.SharedW = lg, hid, downBank.tiles, downBank.divisors, down.w
			q.d.SharedHidden, q.d.SharedLogit, q.d.SharedOut, q.d.Out, q.d.Distinct = sh, sl, q.u.SharedOut, out+at*driver.Ptr(2*h), distinct
			if err := tunedRun(p, q.router, &q.r); err != nil {
				return err
			}
			if !p.plain {
				if err := p.maskExperts(op, lg, r, int(q.r.R)); err != nil {
					return err
				}
			}
			if err := tunedRun(p, q.up, &q.u); err != nil {
				return err
			}
			if err := tunedRun(p, q.down, &q.d); err != nil {
				return err
			}
		}
		if p.plain {
			return nil
		}
		if err := start(p, plain.Route, len(p.rows), 1, 1, 0, &route); err != nil {
			return err
		}
		return p.traceExperts(op, route.Chosen)
	}
}

// maskExperts makes forced experts the best by taking all others out of the logits: weights are normalised over the chosen ones.
func (p *pass) maskExperts(op backend.MoE, logits driver.Ptr, first, n int) error {
	for r := first; r < first+n; r++ {
		row := p.rows[r]
		f := p.in[row.Lane].Force
		if f == nil || f.Experts[op.Layer] == nil {
			continue
		}
		at := logits + driver.Ptr(4*(r-first)*op.W.Experts)
		line := make([]float32, op.W.Experts)
		if err := p.read(bytesIn(line), at); err != nil {
			return err
		}
		for e := range line {
			if !slices.Contains(f.Experts[op.Layer][row.Index], int32(e)) {
				line[e] = float32(math.Inf(-1))
			}
		}
		if err := p.c.ToDevice(p.s.d.stream, at, bytesIn(line)); err != nil {
			return err
		}
		if err := p.c.SyncStream(p.s.d.stream); err != nil {
			return err
		}
	}
	return nil
}
