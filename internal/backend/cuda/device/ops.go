package device

import (
	"fmt"
	"math"
	"slices"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
)

// prepare uploads what an operation needs and returns what launches it; nil if that is nothing.
func (s *step) prepare(c *driver.Context, op backend.Op) (func(*pass) error, error) {
	if s.few != nil {
		if run, err := s.prepareWide(c, op); run != nil || err != nil {
			return run, err
		}
	}
	switch op := op.(type) {
	case backend.Embed:
		return s.prepareEmbed(c, op)
	case backend.PLEStart:
		return s.preparePLEStart(c, op)
	case backend.PLEJoin:
		return s.preparePLEJoin(c, op)
	case backend.Mix:
		return s.prepareMix(c, op)
	case backend.Defer:
		s.pending[op.X.X] = op.Y + 1
		return nil, nil
	case backend.GDN:
		return s.prepareGDN(c, op)
	case backend.QSA:
		return s.prepareQSA(c, op)
	case backend.MoE:
		return s.prepareMoE(c, op)
	case backend.Stem:
		return s.prepareStem(c, op)
	case backend.Carry:
		return s.prepareCarry(c, op)
	case backend.Head:
		return s.prepareHead(c, op)
	case backend.Tap:
		return s.prepareTap(c, op)
	}
	return nil, fmt.Errorf("unknown operation %T", op)
}

// loader collects the weights of an operation; the first error stays.
type loader struct {
	s   *step
	c   *driver.Context
	err error
}

func (l *loader) matrix(w backend.Weight) kernels.Mat { return load(l, l.s.d.matrix, w) }
func (l *loader) vector(w backend.Weight) driver.Ptr  { return load(l, l.s.d.vector, w) }
func (l *loader) rotary(r backend.Rotary) driver.Ptr  { return load(l, l.s.d.rotary, r) }

func load[T, W any](l *loader, f func(*driver.Context, W) (T, error), w W) (v T) {
	if l.err == nil {
		v, l.err = f(l.c, w)
	}
	return v
}

// rows reserves memory for a row of so many bytes for each row of the pass. Operations run one after the other, and so do steps: those of the
// same name and size share it.
func (l *loader) rows(name string, bytes int) driver.Ptr {
	if l.err != nil {
		return 0
	}
	key, n := scratchKey{name, bytes}, l.s.program.Pass.Rows
	room, ok := l.s.d.scratch[key]
	if !ok || room.rows < n { // steps compiled before keep the smaller one
		room.rows = n
		if room.at, l.err = l.s.alloc(l.c, name, n*bytes); l.err == nil {
			l.s.d.scratch[key] = room
		}
	}
	return room.at
}

// zeros reserves bytes that begin as zero.
func (l *loader) zeros(name string, bytes int) driver.Ptr {
	if l.err != nil {
		return 0
	}
	var p driver.Ptr
	if p, l.err = l.s.alloc(l.c, name, bytes); l.err == nil {
		l.err = l.c.Set(l.s.d.stream, p, 0, uint64(bytes))
	}
	return p
}

func (l *loader) check(ok bool, format string, args ...any) {
	if l.err == nil && !ok {
		l.err = fmt.Errorf(format, args...)
	}
}

type scratchKey struct {
	name  string
	bytes int
}

// scratch is room for so many rows, which lasts as long as the device.
type scratch struct {
	at   driver.Ptr
	rows int
}

func tiles(n, size int) int { return (n + size - 1) / size }

// gemv multiplies matrices with rows of x, eight rows a launch. element is 4 for FP32 rows and 2 for BF16.
func (p *pass) gemv(x driver.Ptr, element, ld, rows int, parts ...kernels.Part) error {
	g := kernels.GemvParams{XLd: uint32(ld), Parts: uint32(len(parts))}
	if element == 4 {
		g.XF32 = 1
	}
	if element == 4 {
		if ok, err := p.project(multiplicand{x: x, f32: true, dim: 1}, ld, rows, parts, kernels.Shift{}); ok || err != nil {
			return err
		}
	}
	for r := 0; r < rows; r += kernels.MaxRows {
		some := slices.Clone(parts)
		for i := range some {
			size := 2
			if some[i].Flags&kernels.PartF32 != 0 {
				size = 4
			}
			some[i].Out += driver.Ptr(r * int(some[i].OutLd) * size)
		}
		g.X, g.R = x+driver.Ptr(r*ld*element), uint32(min(kernels.MaxRows, rows-r))
		if element == 2 {
			if ok, err := p.tunedGemv(g.X, ld, int(g.R), some); err != nil {
				return err
			} else if ok {
				continue
			}
		}
		copy(g.Part[:], some)
		if err := start(p, kernels.Gemv, tiles(rowsOf(parts), 8), 1, 1, 0, &g); err != nil {
			return err
		}
	}
	return nil
}

// embed is what a step knows of its tokens' embedding.
type embed struct{ vocab, width int }

func (s *step) prepareEmbed(c *driver.Context, op backend.Embed) (func(*pass) error, error) {
	l := &loader{s: s, c: c}
	h := op.W.Cols()
	s.embed = &embed{op.W.N, h}
	e := kernels.EmbedParams{
		Rows: s.rows, X: s.bufs[op.X.X], W: l.matrix(op.W), Media: l.rows("media", 4*h), H: uint32(h), S: uint32(s.program.Bufs[op.X.X].Width / h),
	}
	if l.err != nil {
		return nil, l.err
	}
	s.pending[op.X.X] = 0
	var staged []byte
	s.uploads = append(s.uploads, func(p *pass) error {
		n := 0
		for i := range p.in {
			for j, row := range p.in[i].Media {
				if row == nil {
					continue
				}
				if staged == nil {
					var err error
					if staged, err = s.pinned(p.c, 4*h*s.program.Pass.Rows); err != nil {
						return err
					}
				}
				copy(staged[4*h*n:], bytesIn(row))
				n++
				p.rows[int(p.lanes[i].First)+j].Media = uint32(n)
			}
		}
		return p.c.ToDevice(s.d.stream, e.Media, staged[:4*h*n])
	})
	return func(p *pass) error { return start(p, kernels.Embed, tiles(int(e.H), 256), len(p.rows), 1, 0, &e) }, nil
}

// injection returns the parameters that add the pending injection to streams x, and forgets it; y is 0 if nothing is pending.
func (s *step) injection(x backend.Streams, keep bool) kernels.InjectParams {
	i := kernels.InjectParams{X: s.bufs[x.X], Inject: s.bufs[x.Inject]}
	streams := s.program.Bufs[x.Inject].Width
	i.S, i.H = uint32(streams), uint32(s.program.Bufs[x.X].Width/streams)
	if y := s.pending[x.X]; y > 0 {
		i.Y = s.bufs[y-1]
	}
	if !keep {
		s.pending[x.X] = 0
	}
	return i
}

func (s *step) prepareMix(c *driver.Context, op backend.Mix) (func(*pass) error, error) {
	l := &loader{s: s, c: c}
	if run := s.tunedMix(l, op); run != nil || l.err != nil {
		return run, l.err
	}
	in := s.injection(op.X, false)
	h := s.program.Bufs[op.Out].Width
	width := s.program.Bufs[op.X.X].Width
	streams, low := width/h, op.W.Down.N
	in.H, in.S, in.Eps = uint32(h), uint32(streams), float32(op.W.Eps)
	in.Norm, in.N = l.vector(op.W.Norm), l.rows("norm", 4*width)
	lows := l.rows("low", 4*low)
	parts := []kernels.Part{part(l.matrix(op.W.Down), lows, low, kernels.PartF32|kernels.PartSilu, 1/float32(streams))}
	if op.W.Inject.Present() {
		parts = append(parts, part(l.matrix(op.W.Inject), s.bufs[op.X.Inject], streams, kernels.PartF32|kernels.PartSigmoid2, 1/float32(streams)))
	}
	up := kernels.HcUpParams{Up: l.matrix(op.W.Up), H: uint32(h), S: uint32(streams), L: uint32(low)}
	return func(p *pass) error {
		if err := start(p, kernels.Inject, streams, len(p.rows), 1, 0, &in); err != nil {
			return err
		}
		if err := p.gemv(in.N, 4, width, len(p.rows), parts...); err != nil {
			return err
		}
		for r := 0; r < len(p.rows); r += kernels.MaxRows {
			u := up
			u.R = uint32(min(kernels.MaxRows, len(p.rows)-r))
			u.Low, u.N, u.Out = lows+driver.Ptr(4*r*low), in.N+driver.Ptr(4*r*width), s.bufs[op.Out]+driver.Ptr(2*r*h)
			if err := start(p, kernels.HcUp, tiles(h, 8), 1, 1, 0, &u); err != nil {
				return err
			}
		}
		return nil
	}, l.err
}

func (s *step) prepareGDN(c *driver.Context, op backend.GDN) (func(*pass) error, error) {
	l := &loader{s: s, c: c}
	w, d := op.W, s.d
	h := s.program.Bufs[op.In].Width
	kd, vd := w.KeyHeads*w.Dim, w.ValueHeads*w.Dim
	width := 2*kd + vd
	l.check(w.Dim <= 128, "heads of %d, at most 128", w.Dim)
	raw, z := l.rows("conv inputs", 2*width), l.rows("z", 2*vd)
	a, b := l.rows("a", 2*w.ValueHeads), l.rows("b", 2*w.ValueHeads)
	convolved, gated := l.rows("convolved", 4*width), l.rows("gated", 4*vd)
	parts := []kernels.Part{
		part(l.matrix(w.Query), raw, width, 0, 0), part(l.matrix(w.Key), raw+driver.Ptr(2*kd), width, 0, 0),
		part(l.matrix(w.Value), raw+driver.Ptr(4*kd), width, 0, 0), part(l.matrix(w.Z), z, vd, 0, 0),
		part(l.matrix(w.A), a, w.ValueHeads, 0, 0), part(l.matrix(w.B), b, w.ValueHeads, 0, 0),
	}
	s.inputs(parts)
	out := part(l.matrix(w.Out), s.bufs[op.Out], w.Out.N, 0, 0)
	conv := kernels.ConvParams{
		Lanes: s.lanes, X: raw, W: l.vector(w.Conv), Window: d.states[op.Window].at, Records: d.states[op.Window].records, Out: convolved,
		C: uint32(width), Taps: uint32(w.Taps), Dilation: 1, Verify: uint32(d.opt.Verify),
	}
	half := uint32(0)
	if d.opt.BF16State {
		half = 1
	}
	delta := kernels.DeltaParams{
		Lanes: s.lanes, Qkv: convolved, Z: z, A: a, B: b, Alog: l.vector(w.ALog), Dt: l.vector(w.DtBias), Norm: l.vector(w.Norm),
		State: d.states[op.Matrix].at, Records: d.states[op.Matrix].records, Out: gated,
		HalfState: half, KeyHeads: uint32(w.KeyHeads), Heads: uint32(w.ValueHeads), Dim: uint32(w.Dim), Verify: uint32(d.opt.Verify), Ring: uint32(d.recordRing()), Eps: float32(w.Eps),
		Turn: d.turn(op.Matrix),
	}
	quarters := w.Dim == 128 && w.Taps == 4 && !d.opt.Plain && l.err == nil && projects(d, vd, []kernels.Part{out})
	if quarters {
		delta.X, delta.Conv, delta.Window, delta.Inputs = raw, conv.W, conv.Window, conv.Records
		delta.Gated, delta.Squares = l.rows("gated halves", 2*vd), l.rows("squares of heads", 16*w.ValueHeads)
	}
	shared := uint32(4 * (w.Dim*w.Dim + 7*w.Dim))
	s.brings(op.Window, s.folder(conv))
	s.brings(op.Matrix, s.folderDelta(w.ValueHeads, shared, delta))
	return func(p *pass) error {
		if err := p.gemv(s.bufs[op.In], 2, h, len(p.rows), parts...); err != nil {
			return err
		}
		if quarters {
			if err := p.quarters(w.ValueHeads, delta); err != nil {
				return err
			}
			shift := kernels.Shift{
				Lanes: s.lanes, X: raw, Window: conv.Window, Records: conv.Records, Count: uint32(len(p.lanes)), C: conv.C, Depth: conv.Taps - 1, Verify: conv.Verify,
			}
			_, err := p.project(multiplicand{x: delta.Gated, squares: delta.Squares, dim: w.Dim, eps: w.Eps, lanes: p.s.program.Pass.Kind == backend.Decode}, vd, len(p.rows), []kernels.Part{out}, shift)
			return err
		}
		if err := start(p, kernels.Conv, tiles(width, 256), len(p.lanes), 1, 0, &conv); err != nil {
			return err
		}
		if err := start(p, kernels.Delta, w.ValueHeads, len(p.lanes), 1, shared, &delta); err != nil {
			return err
		}
		return p.gemv(gated, 4, vd, len(p.rows), out)
	}, l.err
}

// quarters launches the delta rule with four blocks a head, fewer where more lanes have a row each, whose blocks find room on the SMs all the same: what a block does
// once, or for every channel of its query and key, counts less often then. One lane's only row and its several rows have kernels of their own.
func (p *pass) quarters(heads int, params kernels.DeltaParams) error {
	kernel, blocks, shared := kernels.DeltaQuarters, 4, uint32(0)
	switch rows, lanes := len(p.rows), len(p.lanes); {
	case lanes == 1 && rows > 1:
		kernel = kernels.DeltaRows
		params.Trigger = 1 // it takes long enough that the next kernel's weights are better asked for behind its own loads
	case p.s.program.Pass.Kind != backend.Decode || lanes == 1:
	case lanes > 5:
		kernel, blocks, shared = kernels.DeltaHeads, 1, kernels.DeltaHeadsShared
	case lanes > 3:
		kernel, blocks = kernels.DeltaHalves, 2
	default:
		kernel = kernels.DeltaOne
	}
	return start(p, kernel, heads, len(p.lanes), blocks, shared, &params)
}

// brings notes that the program brings a Fixed state forward, and how to fold it outside a pass.
func (s *step) brings(id backend.StateID, fold func(*Device, *driver.Context, driver.Ptr) error) {
	s.fixed = append(s.fixed, id)
	s.d.folders[id] = fold
}

// folder folds a convolution's window: the kernel with a lane of no rows.
func (s *step) folder(params kernels.ConvParams) func(*Device, *driver.Context, driver.Ptr) error {
	return func(d *Device, c *driver.Context, lane driver.Ptr) error {
		q := params
		q.Lanes = lane
		return d.set.Run(c, d.stream, kernels.Conv, [3]uint32{(q.C + 255) / 256, 1, 1}, 0, &q, true)
	}
}

func (s *step) folderDelta(heads int, shared uint32, params kernels.DeltaParams) func(*Device, *driver.Context, driver.Ptr) error {
	return func(d *Device, c *driver.Context, lane driver.Ptr) error {
		q := params
		q.Lanes = lane
		return d.set.Run(c, d.stream, kernels.Delta, [3]uint32{uint32(heads), 1, 1}, shared, &q, true)
	}
}

// splits is how many blocks share a row's attention in each head.
const splits = 24

// Where a block works for all queries of a key head, it has attendPair of the tokens that a row attends to, of which there are mostPairs at most.
const (
	attendPair = 64
	mostPairs  = 36
)

func (s *step) prepareQSA(c *driver.Context, op backend.QSA) (func(*pass) error, error) {
	l := &loader{s: s, c: c}
	w, d := op.W, s.d
	h := s.program.Bufs[op.In].Width
	blocks := (d.opt.Tokens/w.Ratio + 3) / 4 * 4 // four scores at a time
	l.check(w.HeadDim <= 256 && w.IndexDim <= 256, "heads of %d and %d, at most 256", w.HeadDim, w.IndexDim)
	fp8 := d.opt.KV == backend.CacheFP8
	l.check(!fp8 || w.HeadDim&(w.HeadDim-1) == 0, "a cache in fp8 needs heads of a power of two values, these have %d", w.HeadDim)
	l.check(!fp8 || d.opt.States[op.Keys].Group == w.HeadDim && d.opt.States[op.Values].Group == w.HeadDim,
		"a cache in fp8 needs states that share a scale among the %d values of a head", w.HeadDim)
	kw, qw, iw := w.KVHeads*w.HeadDim, w.Heads*w.HeadDim, (w.IndexHeads+1)*w.IndexDim
	key, value, index := l.rows("key", 2*kw), l.rows("value", 2*kw), l.rows("index", 2*iw)
	prep := kernels.PrepParams{
		Rows: s.rows, Key: key, Value: value, Index: index, KNorm: l.vector(w.KeyNorm), Inverse: l.rotary(w.Rotary), Pages: d.tables, PagesLd: uint32(d.tablePages()),
		Heads: uint32(w.Heads), Kv: uint32(w.KVHeads), Hd: uint32(w.HeadDim), Ih: uint32(w.IndexHeads), Id: uint32(w.IndexDim),
		Rot: uint32(w.Rotary.Dim), Eps: float32(w.Eps), IkNorm: l.vector(w.IndexKeyNorm), Ratio: uint32(w.Ratio),
	}
	d.bind(func() {
		k, v := &d.states[op.Keys], &d.states[op.Values]
		prep.Keys, prep.Values, prep.KeyScales, prep.ValueScales = k.at, v.at, k.scales, v.scales
		prep.Raw, prep.Positions, prep.BlockKeys = d.states[op.RawIndex].at, d.states[op.Positions].at, d.states[op.IndexKeys].at
	})
	parts := []kernels.Part{
		part(l.matrix(w.Key), key, kw, 0, 0), part(l.matrix(w.Value), value, kw, 0, 0), part(l.matrix(w.Index), index, iw, 0, 0),
	}
	units := 2*w.KVHeads + 1
	fill := func(p *pass) error { return p.gemv(s.bufs[op.In], 2, h, len(p.rows), parts...) }
	if op.AppendOnly {
		return func(p *pass) error {
			if err := fill(p); err != nil {
				return err
			}
			return start(p, kernels.Prep, units, len(p.rows), 1, 0, &prep)
		}, l.err
	}
	units += w.Heads
	longest := (w.Blocks*w.Ratio + w.Ratio - 1 + 3) / 4 * 4
	prep.Qg, prep.QNorm, prep.IqNorm = l.rows("query and gate", 4*qw), l.vector(w.QueryNorm), l.vector(w.IndexQueryNorm)
	prep.Q, prep.Iq = l.rows("query", 2*qw), l.rows("index query", 2*w.IndexHeads*w.IndexDim)
	parts = append(parts, part(l.matrix(w.QueryGate), prep.Qg, 2*qw, 0, 0))
	s.inputs(parts)
	score := kernels.ScoreParams{
		Rows: s.rows, Iq: prep.Iq, Pages: prep.Pages, PagesLd: prep.PagesLd, Scores: l.rows("scores", 4*max(blocks, 1)),
		Ih: prep.Ih, Id: prep.Id, Ratio: prep.Ratio, Blocks: uint32(blocks), Most: uint32(w.Blocks),
	}
	choose := kernels.SelectParams{
		Rows: s.rows, Pages: prep.Pages, PagesLd: prep.PagesLd, Scores: score.Scores, List: l.rows("selection", 4*longest), Count: l.rows("selected", 4),
		Ratio: prep.Ratio, Blocks: score.Blocks, Most: score.Most, ListLd: uint32(longest),
	}
	l.check(blocks <= kernels.SelectMost, "selection from %d blocks, %d at most", blocks, kernels.SelectMost)
	attend := kernels.AttendParams{
		Q: prep.Q, List: choose.List, Count: choose.Count,
		Heads: prep.Heads, Kv: prep.Kv, Hd: prep.Hd, ListLd: choose.ListLd, Splits: splits,
	}
	merge := kernels.MergeParams{Qg: prep.Qg, Out: l.rows("attended", 2*qw), Heads: prep.Heads, Hd: prep.Hd, Splits: splits}
	out := part(l.matrix(w.Out), s.bufs[op.Out], w.Out.N, 0, 0)
	scores := blocks > w.Blocks // some rows choose among their blocks
	beside := scores && !d.opt.Plain && w.IndexDim == 128 && w.IndexHeads == 4 && w.HeadDim == 256 && w.Rotary.Dim == 64
	pairs := tiles(longest, attendPair)
	grouped := !d.opt.Plain && w.HeadDim == 256 && w.Heads/w.KVHeads <= 16 && pairs <= mostPairs
	attender, attenderShared := kernels.Attender(fp8)
	var group kernels.AttendGroupParams
	var join kernels.MergeGroupParams
	if grouped {
		group = kernels.AttendGroupParams{
			Q: prep.Q, List: choose.List, Count: choose.Count, Heads: prep.Heads, Kv: prep.Kv,
			ListLd: choose.ListLd, Pairs: uint32(pairs), Partial: l.rows("attention pairs", 4*w.Heads*pairs*256), Sums: l.rows("attention sums", 8*w.Heads*pairs),
		}
		join = kernels.MergeGroupParams{
			Partial: group.Partial, Sums: group.Sums, Count: group.Count, Qg: prep.Qg, Out: merge.Out, Heads: prep.Heads, Pairs: group.Pairs,
		}
	} else {
		attend.Partial = l.rows("attention parts", 4*w.Heads*splits*(w.HeadDim+2))
		merge.Partial = attend.Partial
	}
	d.bind(func() {
		score.Keys = prep.BlockKeys
		attend.Keys, attend.Values, attend.KeyScales, attend.ValueScales = prep.Keys, prep.Values, prep.KeyScales, prep.ValueScales
		group.Keys, group.Values, group.KeyScales, group.ValueScales = prep.Keys, prep.Values, prep.KeyScales, prep.ValueScales
	})
	return func(p *pass) error {
		if err := fill(p); err != nil {
			return err
		}
		// A decoding step's lanes have a row each, which one kernel can score and select for where there is room for few tokens.
		width, shared, selects := kernels.Selects(blocks, units, len(p.rows), d.owner.Device().SharedPerBlock)
		selects = selects && beside && w.Ratio == 4 && p.s.program.Pass.Kind == backend.Decode
		if selects {
			all := kernels.PrepSelectParams{Prep: prep, Select: choose}
			if err := start(p, kernels.PrepSelect, width, len(p.rows), 1, shared, &all); err != nil {
				return err
			}
		} else if beside {
			unitBlocks := tiles(units, 8)
			both := kernels.PrepScoreParams{Prep: prep, Score: score, Units: uint32(unitBlocks)}
			keys := tiles(blocks, kernels.PrepKeys)
			scorers := max(1, min(2*d.owner.Device().SMs/len(p.rows)-unitBlocks-1, keys)) // so that all blocks stand on the GPU at once
			shared := uint32(0)
			if w.Ratio == 4 {
				shared = kernels.PrepTile * uint32(min(2, tiles(keys, scorers)))
			}
			if err := start(p, kernels.PrepScore, unitBlocks+1+scorers, len(p.rows), 1, shared, &both); err != nil {
				return err
			}
		} else {
			if err := start(p, kernels.Prep, units+w.IndexHeads, len(p.rows), 1, 0, &prep); err != nil {
				return err
			}
			if scores {
				if err := start(p, kernels.Score, max(1, min(64, tiles(blocks, 8))), len(p.rows), 1, 0, &score); err != nil {
					return err
				}
			}
		}
		p.narrow()
		at, rows := driver.Ptr(p.from), len(p.rows)-p.from
		chosen, group, join, attend, merge, out := choose, group, join, attend, merge, out
		chosen.Rows += at * driver.Ptr(sizeOfRow)
		chosen.Scores += at * driver.Ptr(4*max(blocks, 1))
		group.Q += at * driver.Ptr(2*qw)
		attend.Q += at * driver.Ptr(2*qw)
		join.Qg += at * driver.Ptr(4*qw)
		merge.Qg += at * driver.Ptr(4*qw)
		out.Out += at * driver.Ptr(2*w.Out.N)
		if selects {
			group.Late = 1
		} else {
			selector, selectors := kernels.Selector(blocks, rows)
			if err := start(p, selector, selectors, rows, 1, 0, &chosen); err != nil {
				return err
			}
		}
		if !p.plain {
			if err := p.lookSelection(op.Layer, &choose); err != nil {
				return err
			}
		}
		if grouped {
			if err := start(p, attender, w.KVHeads, rows, pairs, attenderShared, &group); err != nil {
				return err
			}
			if err := start(p, kernels.MergePairs, w.Heads, rows, 2, 0, &join); err != nil {
				return err
			}
			return p.attended(join.Out, qw, rows, out)
		}
		if err := start(p, kernels.Attend, w.Heads, rows, splits, 0, &attend); err != nil {
			return err
		}
		if err := start(p, kernels.Merge, w.Heads, rows, 1, 0, &merge); err != nil {
			return err
		}
		return p.attended(merge.Out, qw, rows, out)
	}, l.err
}

// attended multiplies rows that attention has left.
func (p *pass) attended(x driver.Ptr, width, rows int, out kernels.Part) error {
	if ok, err := p.project(multiplicand{x: x, dim: 1, lanes: p.s.program.Pass.Kind == backend.Decode}, width, rows, []kernels.Part{out}, kernels.Shift{}); ok || err != nil {
		return err
	}
	return p.gemv(x, 2, width, rows, out)
}

// lookSelection replaces forced selections and traces what is attended to, row by row.
func (p *pass) lookSelection(layer int, sel *kernels.SelectParams) error {
	c, st := p.c, p.s.d.stream
	for r, row := range p.rows {
		in, img := &p.in[row.Lane], &p.s.d.images[row.Slot]
		list, count := sel.List+driver.Ptr(4*r*int(sel.ListLd)), sel.Count+driver.Ptr(4*r)
		visible := int(row.At) + 1
		if f := in.Force; f != nil && f.Selected[layer] != nil {
			if len(f.Selected[layer]) <= int(row.Index) || len(f.Selected[layer][row.Index]) < visible {
				return fmt.Errorf("forced selection lacks row %d", row.Index)
			}
			var ids []uint32
			for t, on := range f.Selected[layer][row.Index][:visible] {
				if on {
					ids = append(ids, img.row(t))
				}
			}
			if len(ids) > int(sel.ListLd) {
				return fmt.Errorf("forced selection of %d tokens, room for %d", len(ids), sel.ListLd)
			}
			n := []uint32{uint32(len(ids))}
			if err := c.ToDevice(st, list, bytesIn(ids)); err != nil {
				return err
			}
			if err := c.ToDevice(st, count, bytesIn(n)); err != nil {
				return err
			}
			if err := c.SyncStream(st); err != nil {
				return err
			}
		}
		if t := in.Trace; t != nil {
			n := make([]uint32, 1)
			if err := p.read(bytesIn(n), count); err != nil {
				return err
			}
			if int(n[0]) > int(sel.ListLd) {
				return fmt.Errorf("row %d selects %d tokens, room for %d", r, n[0], sel.ListLd)
			}
			ids := make([]uint32, n[0])
			if err := p.read(bytesIn(ids), list); err != nil {
				return err
			}
			line := make([]bool, visible)
			for _, id := range ids {
				t := img.tokenOf(id)
				if t < 0 || t >= visible {
					return fmt.Errorf("row %d selects token %d of %d", r, t, visible)
				}
				line[t] = true
			}
			if t.Selected == nil {
				t.Selected = map[int][][]bool{}
			}
			t.Selected[layer] = append(t.Selected[layer], line)
		}
	}
	return nil
}

// read copies device memory to the host and waits for it.
func (p *pass) read(dst []byte, src driver.Ptr) error {
	if err := p.c.SyncStream(p.s.d.stream); err != nil {
		return err
	}
	if err := p.c.ToHost(p.s.d.stream, dst, src); err != nil {
		return err
	}
	return p.c.SyncStream(p.s.d.stream)
}

func (s *step) prepareMoE(c *driver.Context, op backend.MoE) (func(*pass) error, error) {
	l := &loader{s: s, c: c}
	w := op.W
	if run := s.tunedMoE(l, op); run != nil || l.err != nil {
		return run, l.err
	}
	if run := s.bf16MoE(l, op); run != nil || l.err != nil {
		return run, l.err
	}
	h := s.program.Bufs[op.In].Width
	logits, gate := l.rows("router logits", 4*w.Experts), l.rows("shared logit", 4)
	parts := []kernels.Part{
		part(l.matrix(w.Router), logits, w.Experts, kernels.PartF32, 0), part(l.matrix(w.SharedVector), gate, 1, kernels.PartF32, 0),
	}
	forced := l.rows("forced experts", 4*w.TopK)
	route := kernels.RouteParams{
		Logits: logits, Chosen: l.rows("experts", 4*w.TopK), Weight: l.rows("expert weights", 4*w.TopK),
		Experts: uint32(w.Experts), Topk: uint32(w.TopK),
	}
	if w.Normalize {
		route.Normalize = 1
	}
	up := kernels.ExpertUpParams{
		X: s.bufs[op.In], Chosen: route.Chosen, Hidden: l.rows("expert hidden", 2*w.TopK*w.Inter), Shared: l.rows("shared hidden", 2*w.SharedInter),
		Bank: l.matrix(w.GateUp), Gate: l.matrix(w.SharedGate), Up: l.matrix(w.SharedUp),
		Topk: route.Topk, Inter: uint32(w.Inter), SharedInter: uint32(w.SharedInter), H: uint32(h),
	}
	down := kernels.ExpertDownParams{
		Chosen: route.Chosen, Weight: route.Weight, Gate: gate, Hidden: up.Hidden, Shared: up.Shared, Out: s.bufs[op.Out],
		Bank: l.matrix(w.Down), Down: l.matrix(w.SharedDown), Topk: route.Topk, Inter: up.Inter, SharedInter: up.SharedInter, H: up.H,
	}
	widest := max(w.Inter, w.SharedInter)
	return func(p *pass) error {
		if err := p.gemv(s.bufs[op.In], 2, h, len(p.rows), parts...); err != nil {
			return err
		}
		if err := p.route(op, kernels.Route, len(p.rows), route, forced); err != nil {
			return err
		}
		if err := start(p, kernels.ExpertUp, tiles(widest, 8), w.TopK+1, len(p.rows), 0, &up); err != nil {
			return err
		}
		return start(p, kernels.ExpertDown, tiles(h, 8), len(p.rows), 1, 0, &down)
	}, l.err
}

// route runs a kernel that chooses the experts of each of so many rows, or takes those that a test forces, and notes them where they are traced.
func (p *pass) route(op backend.MoE, kernel kernels.ID, rows int, q kernels.RouteParams, forced driver.Ptr) error {
	if !p.plain {
		on, err := p.forceExperts(op, forced)
		if err != nil {
			return err
		}
		if on {
			q.Forced = forced
		}
	}
	if err := start(p, kernel, rows, 1, 1, 0, &q); err != nil {
		return err
	}
	if p.plain {
		return nil
	}
	return p.traceExperts(op, q.Chosen)
}

// forceExperts sends the forced experts of the rows that have some.
func (p *pass) forceExperts(op backend.MoE, forced driver.Ptr) (on bool, err error) {
	k := op.W.TopK
	ids := make([]uint32, len(p.rows)*k)
	for r, row := range p.rows {
		line := ids[r*k : (r+1)*k]
		line[0] = math.MaxUint32
		f := p.in[row.Lane].Force
		if f == nil || f.Experts[op.Layer] == nil {
			continue
		}
		if len(f.Experts[op.Layer]) <= int(row.Index) {
			return false, fmt.Errorf("forced routing lacks row %d", row.Index)
		}
		chosen := f.Experts[op.Layer][row.Index]
		if len(chosen) != k {
			return false, fmt.Errorf("forced routing of %d experts, need %d", len(chosen), k)
		}
		for i, e := range chosen {
			if e < 0 || int(e) >= op.W.Experts {
				return false, fmt.Errorf("expert %d of %d", e, op.W.Experts)
			}
			line[i] = uint32(e)
		}
		on = true
	}
	if !on {
		return false, nil
	}
	if err := p.c.ToDevice(p.s.d.stream, forced, bytesIn(ids)); err != nil {
		return false, err
	}
	return true, p.c.SyncStream(p.s.d.stream)
}

func (p *pass) traceExperts(op backend.MoE, chosen driver.Ptr) error {
	if !slices.ContainsFunc(p.in, func(in backend.LaneRows) bool { return in.Trace != nil }) {
		return nil
	}
	k := op.W.TopK
	ids := make([]int32, len(p.rows)*k)
	if err := p.read(bytesIn(ids), chosen); err != nil {
		return err
	}
	for r, row := range p.rows {
		if t := p.in[row.Lane].Trace; t != nil {
			if t.Experts == nil {
				t.Experts = map[int][][]int32{}
			}
			t.Experts[op.Layer] = append(t.Experts[op.Layer], slices.Sorted(slices.Values(ids[r*k:(r+1)*k])))
		}
	}
	return nil
}

func (s *step) prepareTap(_ *driver.Context, op backend.Tap) (func(*pass) error, error) {
	s.inspect = true
	in := s.injection(op.X, true)
	width := s.program.Bufs[op.X.X].Width
	return func(p *pass) error {
		if !slices.ContainsFunc(p.in, func(in backend.LaneRows) bool { return in.Trace != nil }) {
			return nil
		}
		var err error
		if in.Copy, err = p.c.Alloc("trace", uint64(4*len(p.rows)*width)); err != nil {
			return err
		}
		defer func() { _ = p.c.Free(in.Copy) }()
		if err := start(p, kernels.Inject, int(in.S), len(p.rows), 1, 0, &in); err != nil {
			return err
		}
		x := make([]float32, len(p.rows)*width)
		if err := p.read(bytesIn(x), in.Copy); err != nil {
			return err
		}
		for r, row := range p.rows {
			t := p.in[row.Lane].Trace
			if t == nil {
				continue
			}
			line := make([]float64, width)
			for i := range line {
				line[i] = float64(x[r*width+i])
			}
			if t.Streams == nil {
				t.Streams = map[string][][]float64{}
			}
			t.Streams[op.Name] = append(t.Streams[op.Name], line)
		}
		return nil
	}, nil
}
