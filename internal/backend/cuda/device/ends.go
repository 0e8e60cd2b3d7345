package device

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
	tuned "ninfer/internal/backend/cuda/kernels"
)

func (s *step) preparePLEJoin(c *driver.Context, op backend.PLEJoin) (func(*pass) error, error) {
	l := &loader{s: s, c: c}
	w, d := op.W, s.d
	in := s.injection(op.X, false)
	width := s.program.Bufs[op.X.X].Width
	h, wide := w.Value.N, s.program.Bufs[op.In].Width
	in.H, in.S = uint32(h), uint32(width/h)
	gate := kernels.PleGateParams{
		Key: l.rows("n-gram key", 2*width), Value: l.rows("n-gram value", 2*h), X: in.X,
		NormKey: l.vector(w.NormKey), NormQuery: l.vector(w.NormQuery), NormConv: l.vector(w.NormConv),
		V: l.rows("gated value", 4*width), Vn: l.rows("gated norm", 2*width), H: in.H, S: in.S, Eps: float32(w.Eps),
	}
	joins := !d.opt.Plain && h <= 3072 && h%4 == 0 // one kernel takes the injection along
	if joins {
		gate.Y, gate.Inject = in.Y, in.Inject
	}
	parts := []kernels.Part{part(l.matrix(w.Key), gate.Key, width, 0, 0), part(l.matrix(w.Value), gate.Value, h, 0, 0)}
	conv := kernels.ConvParams{
		Lanes: s.lanes, X: gate.Vn, W: l.vector(w.Conv), Window: d.states[op.Window].at, Records: d.states[op.Window].records,
		V: gate.V, Streams: in.X, C: uint32(width), Taps: uint32(w.Taps), Dilation: uint32(w.Dilation), Verify: uint32(d.opt.Verify),
	}
	convolve, channels, far := kernels.Conv, 256, w.Taps == 4 && w.Dilation == 3
	if !d.opt.Plain && far && s.program.Pass.Kind == backend.Verify && d.opt.Verify <= 8 {
		convolve, channels = kernels.ConvRows, 128
	}
	join := kernels.PleJoinParams{Gate: gate}
	// FP8 times a factor is BF16 times a factor, which the streaming kernels multiply; the factor follows.
	whole := joins && s.table != nil && kernels.Format(s.table.k.Format) != kernels.U4
	if whole {
		key, value := l.rows("n-gram key in FP32", 4*width), l.rows("n-gram value in FP32", 4*h)
		join.Key, join.Value, join.Factor = key, value, s.table.k.Multiplier
		parts[0].Out, parts[0].Flags, parts[1].Out, parts[1].Flags = key, kernels.PartF32, value, kernels.PartF32
	}
	alone := joins && far && s.program.Pass.Kind == backend.Decode // lanes have a row each, so that it does the convolution too
	if alone {
		join.Conv = conv
	}
	l.check(s.table != nil && s.table.k.Out == s.bufs[op.In], "no rows of the n-gram table for it")
	s.brings(op.Window, s.folder(conv))
	s.history = true
	element := 4
	if whole {
		element = 2
	}
	return func(p *pass) error {
		if err := s.table.decode(p, whole); err != nil {
			return err
		}
		if in.Y != 0 && !joins {
			if err := start(p, kernels.Inject, int(in.S), len(p.rows), 1, 0, &in); err != nil {
				return err
			}
		}
		if err := p.gemv(s.bufs[op.In], element, wide, len(p.rows), parts...); err != nil {
			return err
		}
		var err error
		if joins {
			err = start(p, kernels.PleJoin, int(in.S), len(p.rows), 1, 0, &join)
		} else {
			err = start(p, kernels.PleGate, int(in.S), len(p.rows), 1, 0, &gate)
		}
		if err != nil || alone {
			return err
		}
		return start(p, convolve, tiles(width, channels), len(p.lanes), 1, 0, &conv)
	}, l.err
}

func (s *step) prepareStem(c *driver.Context, op backend.Stem) (func(*pass) error, error) {
	l := &loader{s: s, c: c}
	w, d := op.W, s.d
	h, width := w.Embed.Cols(), s.program.Bufs[op.X.X].Width
	s.stem, s.embed = true, &embed{w.Embed.N, h}
	s.pending[op.X.X] = 0
	norm := kernels.StemParams{
		Rows: s.rows, Lanes: s.lanes, Carried: d.states[op.Carry].at, Chain: d.chain, NormEmbed: l.vector(w.NormEmbed), NormHidden: l.vector(w.NormHidden),
		E: l.rows("stem embedding", 2*h), Hidden: l.rows("stem hidden", 2*width), W: l.matrix(w.Embed),
		H: uint32(h), S: uint32(width / h), Carry: uint32(d.opt.Carry), Eps: float32(w.Eps),
	}
	l.check(width == d.chained, "streams of %d, carried rows of %d", width, d.chained)
	e, hidden := l.rows("projected embedding", 2*h), l.rows("projected hidden", 2*width)
	pe, ph := part(l.matrix(w.ProjEmbed), e, h, 0, 0), part(l.matrix(w.ProjHidden), hidden, h, 0, 0)
	add := kernels.StemAddParams{Hidden: hidden, E: e, X: s.bufs[op.X.X], H: norm.H, S: norm.S}
	normer, blocks := kernels.StemNorm, 2
	if !d.opt.Plain && h <= 4096 && h%8 == 0 {
		normer, blocks = kernels.StemWide, 1+width/h
	}
	join, ok := d.stemJoin(pe.M, ph.M, width)
	return func(p *pass) error {
		if err := start(p, normer, blocks, len(p.rows), 1, 0, &norm); err != nil {
			return err
		}
		if ok {
			g := kernels.GemvParams{X: norm.Hidden, R: uint32(len(p.rows) * width / h), XLd: uint32(h), Parts: 2}
			g.Part[0], g.Part[1] = ph, pe
			g.Part[0].Out, g.Part[1].Out = add.X, norm.E
			return start(p, join, tiles(h, kernels.StemColumns), 1, 1, 0, &g)
		}
		if err := p.gemv(norm.E, 2, h, len(p.rows), pe); err != nil {
			return err
		}
		if err := p.gemv(norm.Hidden, 2, h, len(p.rows)*(width/h), ph); err != nil {
			return err
		}
		q := add
		q.R = uint32(len(p.rows))
		return start(p, kernels.StemAdd, tiles(len(p.rows)*width, 256), 1, 1, 0, &q)
	}, l.err
}

// stemJoin is the kernel that multiplies and adds what a stem of that width consists of, if there is one for these matrices.
func (d *Device) stemJoin(embed, hidden kernels.Mat, width int) (kernels.ID, bool) {
	a, ok := tunedMatrix(embed)
	b, fits := tunedMatrix(hidden)
	k := int(embed.K)
	if d.opt.Plain || !ok || !fits || a.format != b.format || a.flags != b.flags || k%16 != 0 || k > 2560 || width != 4*k ||
		int(embed.Rows) != k || int(hidden.Rows) != k || int(hidden.K) != k || embed.Stride%16 != 0 || hidden.Stride%16 != 0 {
		return 0, false
	}
	switch a.format {
	case tuned.FormatBF16:
		return kernels.StemProjectBf16, true
	case tuned.FormatE4M3:
		return kernels.StemProjectE4m3, true
	}
	return 0, false
}

// prepareCarry keeps streams for the drafter. Where a mix follows, that adds the injection that is pending, and the rows are kept behind it.
func (s *step) prepareCarry(_ *driver.Context, op backend.Carry) (func(*pass) error, error) {
	s.carries = true
	if i := slices.Index(s.program.Ops, backend.Op(op)); s.few == nil && i+1 < len(s.program.Ops) {
		if next, ok := s.program.Ops[i+1].(backend.Mix); ok && next.X == op.X {
			s.late = func() (func(*pass) error, error) { return s.carry(op, kernels.InjectParams{X: s.bufs[op.X.X]}) }
			return nil, nil
		}
	}
	return s.carry(op, s.injection(op.X, false))
}

func (s *step) carry(op backend.Carry, in kernels.InjectParams) (func(*pass) error, error) {
	carry := kernels.CarryParams{
		Rows: s.rows, Lanes: s.lanes, X: in.X, Carried: s.d.states[op.Out].at, Chain: s.d.chain,
		Width: uint32(s.program.Bufs[op.X.X].Width), Carry: uint32(s.d.opt.Carry),
	}
	if s.program.Pass.Kind == backend.Draft || s.program.Pass.Kind == backend.Seed {
		carry.Draft = 1
	}
	if int(carry.Width) != s.d.chained {
		return nil, fmt.Errorf("streams of %d, carried rows of %d", carry.Width, s.d.chained)
	}
	return func(p *pass) error {
		at, rows := driver.Ptr(p.from), len(p.rows)-p.from
		in, carry := in, carry
		in.X += at * driver.Ptr(2*carry.Width)
		carry.X += at * driver.Ptr(2*carry.Width)
		carry.Rows += at * driver.Ptr(sizeOfRow)
		if in.Y != 0 {
			in.Y += at * driver.Ptr(2*in.H)
			in.Inject += at * driver.Ptr(4*in.S)
			if err := start(p, kernels.Inject, int(in.S), rows, 1, 0, &in); err != nil {
				return err
			}
		}
		if !s.d.opt.Plain && carry.Width%8 == 0 {
			return start(p, kernels.CarryWide, tiles(int(carry.Width), 2048), rows, 1, 0, &carry)
		}
		return start(p, kernels.Carry, rows, 1, 1, 0, &carry)
	}, nil
}

// head is a step's output head and what it brings back.
type head struct {
	s      *step
	w      *backend.HeadWeights
	mat    kernels.Mat
	ids    driver.Ptr // the id of each row, 0 if they are the same
	in     driver.Ptr
	h      int
	packed driver.Ptr // wanted rows
	picked driver.Ptr
	logits driver.Ptr // [room][rows of the matrix]
	room   int
	best   driver.Ptr // keys of the tuned kernels' blocks; 0 if they do not take the head
	likely kernels.LikelyParams
	lists  []byte // pinned: what the kernel of that name finds; nil if it does not take the head

	lines  []byte // pinned
	lanes  []wants
	raised bool        // the last launch brings logits back
	listed bool        // the last launch brings lists back
	kept   [][]float32 // those of a launch with more rows than there is room for at a time
}

// slice is the most rows whose logits lie on the device at a time.
const slice = 128

type wants struct {
	n      int
	logits bool
	likely bool
}

// drawn is the most rows of a launch that lists of likely ids are made for, beyond which logits are brought back.
const drawn = 64

func (s *step) prepareHead(c *driver.Context, op backend.Head) (func(*pass) error, error) {
	if s.head != nil {
		return nil, errors.New("a second head")
	}
	l := &loader{s: s, c: c}
	hd := &head{s: s, w: op.W, mat: l.matrix(op.W.W), in: s.bufs[op.In], h: s.program.Bufs[op.In].Width}
	hd.packed, hd.picked = l.rows("wanted rows", 2*hd.h), l.rows("picks", 4)
	if l.err != nil {
		return nil, l.err
	}
	var err error
	if op.W.Map != nil {
		if hd.ids, err = s.d.upload(c, bytesIn(op.W.Map)); err != nil {
			return nil, err
		}
		s.taken = append(s.taken, hd.ids)
	}
	if s.d.tuned != nil && slices.IsSorted(op.W.Map) && hd.tuned(min(tuned.MaxRows, s.program.Pass.Rows)) { // ties go to the lower row
		hd.best = l.rows("best keys", 16*int(s.d.tuned.Limits.SMs))
	}
	if l.err != nil {
		return nil, l.err
	}
	s.head = hd
	if err := hd.prepareLikely(l); err != nil {
		return nil, err
	}
	return func(p *pass) error {
		n := len(p.wanted)
		if n == 0 {
			return nil
		}
		x := hd.in + driver.Ptr(2*hd.h*p.from)
		if n < len(p.rows)-p.from { // all of them are in order
			x = hd.packed
			if err := start(p, kernels.Gather, n, 1, 1, 0, &kernels.GatherParams{List: s.want, X: hd.in, Out: x, Width: uint32(hd.h), N: uint32(n)}); err != nil {
				return err
			}
		}
		if !p.logits && !p.likely && hd.best != 0 {
			return p.tunedBest(hd, x, n)
		}
		if n > slice {
			return hd.slices(p, x, n)
		}
		if err := p.gemv(x, 2, hd.h, n, part(hd.mat, hd.logits, hd.w.W.N, kernels.PartF32, 0)); err != nil {
			return err
		}
		if p.likely {
			q := hd.likely
			q.Logits = hd.logits
			return start(p, kernels.Likely, tiles(int(q.Ids), kernels.Segment), n, 1, 0, &q)
		}
		return start(p, kernels.Pick, n, 1, 1, 0, &kernels.PickParams{Logits: hd.logits, Map: hd.ids, Out: hd.picked, Rows: uint32(hd.w.W.N), Ids: uint32(hd.w.IDs)})
	}, nil
}

// prepareLikely makes room for lists of likely ids, and for the logits that they come from, in steps whose tokens may be drawn.
func (hd *head) prepareLikely(l *loader) (err error) {
	s := hd.s
	rows, ids := min(s.program.Pass.Rows, drawn), min(hd.w.IDs, hd.w.W.N)
	segments := tiles(ids, kernels.Segment)
	if s.stem || hd.w.Map != nil || segments*kernels.LikelyIDs > kernels.Candidates && segments > 1 {
		return nil
	}
	hd.likely = kernels.LikelyParams{Arrived: l.zeros("arrivals of lists", 4*rows), Rows: uint32(hd.w.W.N), Ids: uint32(ids)}
	if l.err != nil {
		return l.err
	}
	if hd.likely.Best, err = s.alloc(l.c, "likely ids of segments", 8*rows*segments*kernels.LikelyIDs); err != nil {
		return err
	}
	if hd.lists, err = s.pinned(l.c, 8*rows*kernels.LikelyIDs); err != nil {
		return err
	}
	hd.likely.Host = driver.Ptr(uintptr(unsafe.Pointer(&hd.lists[0])))
	if hd.room = rows; s.program.Pass.Kind == backend.Prefill {
		hd.room = s.program.Pass.Lanes
	}
	hd.logits, err = s.alloc(l.c, "logits", 4*hd.room*hd.w.W.N)
	return err
}

// tuned says whether the tuned kernels find the best of up to so many rows.
func (hd *head) tuned(rows int) bool {
	for r := 1; r <= rows; r++ {
		if _, _, err := hd.plan(r); err != nil {
			return false
		}
	}
	return true
}

// plan is a launch of the tuned kernels over the whole head.
func (hd *head) plan(rows int) (tuned.Plan, tuned.GemvParams, error) {
	m, ok := tunedMatrix(hd.mat)
	if !ok {
		return tuned.Plan{}, tuned.GemvParams{}, errors.New("no tuned kernel for the head")
	}
	parts := []tuned.Part{{W: m.w, Scale: m.scale, Rows: hd.mat.Rows, OutLd: hd.mat.Rows, Flags: m.flags}}
	return hd.s.d.tuned.Limits.Gemv(m.format, uint32(rows), hd.mat.K, parts, 1, tuned.Tuning{})
}

// reserve makes room for the logits of the wanted rows. Captured graphs know the old place: they are dropped.
func (hd *head) reserve(p *pass) error {
	n := min(len(p.wanted), slice)
	if n <= hd.room || !p.logits && !p.likely && hd.best != 0 {
		return nil
	}
	if err := p.c.SyncStream(hd.s.d.stream); err != nil {
		return err
	}
	for key, g := range hd.s.graphs {
		if err := g.free(p.c); err != nil {
			return err
		}
		delete(hd.s.graphs, key)
	}
	var err error
	if hd.logits, err = hd.s.alloc(p.c, "logits", 4*n*hd.w.W.N); err != nil { // the old place is freed with the step
		return err
	}
	hd.room = n
	return nil
}

// slices computes the logits and picks of many rows, and brings the logits to the host while it does.
func (hd *head) slices(p *pass, x driver.Ptr, n int) error {
	width := 4 * hd.w.W.N
	if len(hd.lines) < width*slice {
		var err error
		if hd.lines, err = hd.s.pinned(p.c, width*slice); err != nil {
			return err
		}
	}
	hd.kept = nil
	pick := kernels.PickParams{Logits: hd.logits, Map: hd.ids, Rows: uint32(hd.w.W.N), Ids: uint32(hd.w.IDs)}
	for first := 0; first < n; first += slice {
		rows := min(slice, n-first)
		if err := p.gemv(x+driver.Ptr(2*first*hd.h), 2, hd.h, rows, part(hd.mat, hd.logits, hd.w.W.N, kernels.PartF32, 0)); err != nil {
			return err
		}
		pick.Out = hd.picked + driver.Ptr(4*first)
		if err := start(p, kernels.Pick, rows, 1, 1, 0, &pick); err != nil {
			return err
		}
		if err := p.read(hd.lines[:width*rows], hd.logits); err != nil {
			return err
		}
		for r := range rows {
			line := make([]float32, hd.w.W.N)
			copy(bytesIn(line), hd.lines[width*r:])
			hd.kept = append(hd.kept, line)
		}
	}
	return nil
}

// fetch queues the copies of what a launch brings back.
func (hd *head) fetch(p *pass) error {
	hd.lanes = hd.lanes[:0]
	hd.raised, hd.listed = p.logits, p.likely
	for i := range p.in {
		w := wants{logits: p.logits && p.in[i].Want.Logits(), likely: p.likely && p.in[i].Want.Likely()}
		switch {
		case p.in[i].Want.All():
			w.n = len(p.in[i].Tokens)
		case p.in[i].Want != backend.WantNone:
			w.n = 1
		}
		hd.lanes = append(hd.lanes, w)
	}
	n := len(p.wanted)
	if !hd.raised || n > slice {
		return nil
	}
	hd.kept = nil
	if size := 4 * n * hd.w.W.N; len(hd.lines) < size {
		var err error
		if hd.lines, err = hd.s.pinned(p.c, size); err != nil {
			return err
		}
	}
	return p.c.ToHost(hd.s.d.stream, hd.lines[:4*n*hd.w.W.N], hd.logits)
}

func (hd *head) results() backend.Result {
	res := backend.Result{Lanes: make([]backend.LaneResult, 0, len(hd.lanes))}
	at, width := 0, 4*hd.w.W.N
	picks := make([]int32, len(hd.s.pass.wanted))
	for _, w := range hd.lanes {
		l := backend.LaneResult{Picks: picks[at : at : at+w.n]}
		if w.likely {
			l.Recall = hd.recall(at)
		}
		for range w.n {
			if hd.listed {
				list := hd.list(at)
				l.Picks = append(l.Picks, mostLikely(list))
				if w.likely {
					l.Likely = append(l.Likely, list)
				}
				at++
				continue
			}
			l.Picks = append(l.Picks, pick(hd.s.report, at))
			if w.logits {
				if hd.kept != nil {
					l.Logits = append(l.Logits, hd.kept[at])
				} else { // no copy: the next launch writes there
					l.Logits = append(l.Logits, unsafe.Slice((*float32)(unsafe.Pointer(&hd.lines[width*at])), hd.w.W.N))
				}
			}
			at++
		}
		res.Lanes = append(res.Lanes, l)
	}
	return res
}

// list is the list of a wanted row.
func (hd *head) list(row int) []backend.Likely {
	return unsafe.Slice((*backend.Likely)(unsafe.Pointer(&hd.lists[8*kernels.LikelyIDs*row])), min(kernels.LikelyIDs, int(hd.likely.Ids)))
}

// mostLikely is the id of the largest value of a list in order of ids, the lowest one on ties.
func mostLikely(list []backend.Likely) int32 {
	best := list[0]
	for _, c := range list[1:] {
		if c.Value > best.Value || best.Value != best.Value && c.Value == c.Value {
			best = c
		}
	}
	return best.ID
}

// recall is LaneResult.Recall for the wanted rows from first on of the launch that has just ended.
func (hd *head) recall(first int) func(int) ([]float32, error) {
	d, seq := hd.s.d, hd.s.seq
	return func(row int) ([]float32, error) {
		if hd.s.seq != seq {
			return nil, errors.New("cuda: recall: the step has been launched again")
		}
		logits := make([]float32, hd.w.W.N)
		err := d.do("recall", func(c *driver.Context) error {
			if err := c.ToHost(d.stream, bytesIn(logits), hd.logits+driver.Ptr(4*(first+row)*hd.w.W.N)); err != nil {
				return err
			}
			return c.SyncStream(d.stream)
		})
		return logits, err
	}
}
