package cpu

import (
	"fmt"
	"math"
	"unsafe"

	"ninfer/internal/backend"
)

type qsaWeights struct {
	queryGate, key, value, index, out              matrix
	queryNorm, keyNorm, indexQueryNorm, indexKNorm []float32
}

// qsaOp is the sparse attention block. Attention runs in pieces of splitTokens selected tokens, in the order of the selection; a
// head's result is the pieces merged one after the other. With few rows the pieces are units of work, with many a whole row is: the
// roundings are the same.
type qsaOp struct {
	f   *fast
	op  backend.QSA
	w   *qsaWeights
	dot *[3]dotFunc // nil: plain Go

	p                    *pass[float32]
	keys, values, blocks *plane[float32]
	raw, positions       *plane[float32]
	stage                int
	key, val, index      []float32
	queryGate, q, iq     []float32
	attended             []float32
	kw, iw, qw, group    int
	freqs                []float32 // cos, sin of each row
	inverse              []float32
	scores               []float32 // [rows of a batch][scoreLine]
	scoreLine            int
	batchFirst, batchEnd int
	selected             []int32 // token lists of the rows, one after the other
	lists                []selection
	splits               int       // pieces of every row that have room in partial, 0 if rows are units
	partial              []float32 // [row][kv head][piece][head of the group]: largest score, sum, HeadDim values
}

// selection is where a row's tokens are; blocks is set if they must be chosen by score.
type selection struct {
	first, n, blocks int
	forced           []bool
}

const (
	splitTokens = 128
	splitRows   = 8    // most rows whose pieces are units
	scoreBlocks = 1024 // block keys a unit scores
	scoreRun    = 64   // of them that are unpacked at a time
	scoreFloats = 4 << 20
)

// The stages of qsaOp.do.
const (
	qsaPrepare = iota
	qsaBlockKeys
	qsaScore
	qsaSelect
	qsaPiece
	qsaMerge
	qsaRow
)

func newQSA(f *fast, op backend.QSA) *qsaOp {
	w := op.W
	o := &qsaOp{
		f: f, op: op, kw: w.KVHeads * w.HeadDim, iw: (w.IndexHeads + 1) * w.IndexDim, qw: w.Heads * w.HeadDim, group: w.Heads / w.KVHeads,
		inverse: f.inverseFrequencies(w.Rotary),
		w: prepared(f, w, func() *qsaWeights {
			return &qsaWeights{
				queryGate: f.matrix(w.QueryGate), key: f.matrix(w.Key), value: f.matrix(w.Value), index: f.matrix(w.Index), out: f.matrix(w.Out),
				queryNorm: vector(w.QueryNorm, 1), keyNorm: vector(w.KeyNorm, 1),
				indexQueryNorm: vector(w.IndexQueryNorm, 1), indexKNorm: vector(w.IndexKeyNorm, 1),
			}
		}),
	}
	if f.kernels != nil && w.HeadDim%16 == 0 && w.IndexDim%16 == 0 {
		o.dot = &f.kernels.dot
	}
	return o
}

// inverseFrequencies are those of backend.Rotary.Angle.
func (f *fast) inverseFrequencies(r backend.Rotary) []float32 {
	if v, ok := f.inverse[r]; ok {
		return v
	}
	v := make([]float32, r.Dim/2)
	for i := range v {
		v[i] = float32(r.Angle(i, 1))
	}
	f.inverse[r] = v
	return v
}

// angles are the cosines and sines of the rows of a launch, which all layers share.
type angles struct {
	seq    backend.Seq
	rotary backend.Rotary
	table  []float32
}

// turn writes cosines, then sines, of the angles at a position.
func turn(dst []float32, r *backend.Rotary, inverse []float32, position [3]int32) {
	for i, v := range inverse {
		sin, cos := math.Sincos(float64(float32(position[r.Axis(i)]) * v))
		dst[i], dst[len(inverse)+i] = float32(cos), float32(sin)
	}
}

// rotate32 turns a head by the angles that turn wrote.
func rotate32(x, t []float32) {
	half := len(t) / 2
	for i, cos := range t[:half] {
		sin := t[half+i]
		a, b := x[i], x[half+i]
		x[i], x[half+i] = float32(a*cos)-float32(b*sin), float32(b*cos)+float32(a*sin)
	}
}

func (o *qsaOp) run(p *pass[float32]) error {
	f, w, op, rows := o.f, o.w, o.op.W, len(p.rows)
	f.arena.reset()
	o.p = p
	o.keys, o.values, o.blocks = p.m.planes[o.op.Keys], p.m.planes[o.op.Values], p.m.planes[o.op.IndexKeys]
	o.raw, o.positions = p.m.planes[o.op.RawIndex], p.m.planes[o.op.Positions]
	in, h := p.buf(o.op.In)
	o.key, o.val, o.index = f.arena.take(rows*o.kw), f.arena.take(rows*o.kw), f.arena.take(rows*o.iw)
	x := newOperand(in, h, h, rows)
	f.job.add(&w.key, &x, o.key, o.kw)
	f.job.add(&w.value, &x, o.val, o.kw)
	f.job.add(&w.index, &x, o.index, o.iw)
	if !o.op.AppendOnly {
		o.queryGate, o.q = f.arena.take(rows*2*o.qw), f.arena.take(rows*o.qw)
		o.iq = f.arena.take(rows * op.IndexHeads * op.IndexDim)
		f.job.add(&w.queryGate, &x, o.queryGate, 2*o.qw)
	}
	f.job.run()

	if a := &f.angles; a.seq != p.m.seq || a.rotary != op.Rotary {
		a.seq, a.rotary, a.table = p.m.seq, op.Rotary, grow(a.table, rows*op.Rotary.Dim)
		for r, row := range p.rows {
			turn(a.table[r*op.Rotary.Dim:][:op.Rotary.Dim], &op.Rotary, o.inverse, row.position)
		}
	}
	o.freqs = f.angles.table
	o.stage = qsaPrepare
	f.each(o, rows, 4*rows*(o.kw+o.qw))
	o.stage = qsaBlockKeys
	f.each(o, rows, 8*rows*op.IndexDim)
	if o.op.AppendOnly {
		return nil
	}
	if err := o.choose(); err != nil {
		return err
	}
	o.trace()

	o.attended = f.arena.take(rows * o.qw)
	o.splits = 0
	capacity := min(p.m.opt.Tokens, op.Blocks*op.Ratio+op.Ratio)
	work := 2 * len(o.selected) * o.qw
	if room := (capacity + splitTokens - 1) / splitTokens; rows <= splitRows && o.longest() <= room*splitTokens {
		o.splits = room
		o.partial = f.arena.take(rows * op.KVHeads * room * o.group * (op.HeadDim + 2))
		o.stage = qsaPiece
		f.each(o, rows*op.KVHeads*((o.longest()+splitTokens-1)/splitTokens), work)
		o.stage = qsaMerge
		f.each(o, rows*op.KVHeads, 2*rows*o.qw)
	} else {
		o.stage = qsaRow
		f.each(o, rows*op.KVHeads, work)
	}
	out, _ := p.buf(o.op.Out)
	x = newOperand(o.attended, o.qw, o.qw, rows)
	f.job.add(&w.out, &x, out, h)
	f.job.run()
	return nil
}

// longest is the largest number of tokens that a row attends to.
func (o *qsaOp) longest() int {
	n := 0
	for i := range o.lists {
		n = max(n, o.lists[i].n)
	}
	return n
}

// choose fills selected: a query attends to the tokens of the best complete blocks before it and to those after the last one.
func (o *qsaOp) choose() error {
	op, p := o.op.W, o.p
	o.lists = grow(o.lists, len(p.rows))
	total, most := 0, 0
	for r, row := range p.rows {
		visible := row.at + 1
		s := selection{first: total, n: visible}
		blocks := visible / op.Ratio
		if force := p.lanes[row.lane].in.Force; force != nil && force.Selected[o.op.Layer] != nil {
			lists := force.Selected[o.op.Layer]
			if len(lists) <= row.index || len(lists[row.index]) < visible {
				return fmt.Errorf("forced selection lacks row %d", row.index)
			}
			s.forced, s.n = lists[row.index][:visible], 0
			for _, on := range s.forced {
				if on {
					s.n++
				}
			}
			if s.n == 0 {
				return fmt.Errorf("forced selection of row %d is empty", row.index)
			}
		} else if blocks > op.Blocks {
			s.blocks = blocks
			s.n = op.Blocks*op.Ratio + visible%op.Ratio
			most = max(most, blocks)
		}
		o.lists[r] = s
		total += s.n
	}
	if cap(o.selected) < total { // as much as these rows can ever need, so that it grows once
		o.selected = make([]int32, max(total, len(p.rows)*min(p.m.opt.Tokens, op.Blocks*op.Ratio+op.Ratio)))
	}
	o.selected = o.selected[:total]
	batch := len(p.rows)
	if most > 0 {
		o.scoreLine = p.m.opt.Tokens / op.Ratio
		batch = max(1, min(batch, scoreFloats/o.scoreLine))
		o.scores = o.f.arena.take(batch * o.scoreLine)
	}
	for o.batchFirst = 0; o.batchFirst < len(p.rows); o.batchFirst = o.batchEnd {
		o.batchEnd = min(len(p.rows), o.batchFirst+batch)
		n := o.batchEnd - o.batchFirst
		if most > 0 {
			o.stage = qsaScore
			o.f.each(o, n*((most+scoreBlocks-1)/scoreBlocks), n*most*op.IndexHeads*op.IndexDim)
		}
		o.stage = qsaSelect
		o.f.each(o, n, n*most)
	}
	return nil
}

func (o *qsaOp) trace() {
	for r, row := range o.p.rows {
		t := o.p.lanes[row.lane].in.Trace
		if t == nil {
			continue
		}
		if t.Selected == nil {
			t.Selected = map[int][][]bool{}
		}
		line := make([]bool, row.at+1)
		for _, i := range o.tokens(r) {
			line[i] = true
		}
		t.Selected[o.op.Layer] = append(t.Selected[o.op.Layer], line)
	}
}

func (o *qsaOp) tokens(r int) []int32 { return o.selected[o.lists[r].first:][:o.lists[r].n] }

func (o *qsaOp) do(worker, unit int) {
	op := o.op.W
	switch o.stage {
	case qsaPrepare:
		o.prepare(unit)
	case qsaBlockKeys:
		if row := o.p.rows[unit]; (row.at+1)%op.Ratio == 0 {
			o.blockKey(worker, row)
		}
	case qsaScore:
		n := o.batchEnd - o.batchFirst
		o.score(worker, o.batchFirst+unit%n, unit/n*scoreBlocks)
	case qsaSelect:
		o.selectTokens(worker, o.batchFirst+unit)
	case qsaPiece:
		n := len(o.p.rows) * op.KVHeads
		r, kv, piece := unit%n/op.KVHeads, unit%op.KVHeads, unit/n
		t := o.tokens(r)
		if piece*splitTokens < len(t) {
			o.piece(worker, r, kv, t[piece*splitTokens:min(len(t), (piece+1)*splitTokens)], o.partialOf(r, kv, piece))
		}
	case qsaMerge:
		r, kv := unit/op.KVHeads, unit%op.KVHeads
		total := o.partialOf(r, kv, 0)
		for piece := 1; piece*splitTokens < o.lists[r].n; piece++ {
			o.merge(total, o.partialOf(r, kv, piece))
		}
		o.finish(r, kv, total)
	case qsaRow:
		r, kv := unit/op.KVHeads, unit%op.KVHeads
		t := o.tokens(r)
		size := o.group * (op.HeadDim + 2)
		mem := o.f.scratch(worker, o.rowScratch())[o.pieceScratch():]
		o.piece(worker, r, kv, t[:min(len(t), splitTokens)], mem[:size])
		for first := splitTokens; first < len(t); first += splitTokens {
			o.piece(worker, r, kv, t[first:min(len(t), first+splitTokens)], mem[size:])
			o.merge(mem[:size], mem[size:])
		}
		o.finish(r, kv, mem[:size])
	}
}

func (o *qsaOp) partialOf(r, kv, piece int) []float32 {
	size := o.group * (o.op.W.HeadDim + 2)
	return o.partial[((r*o.op.W.KVHeads+kv)*o.splits+piece)*size:][:size]
}

// prepare appends a row to the planes and makes its queries.
func (o *qsaOp) prepare(r int) {
	op, w, f, row := o.op.W, o.w, o.f, o.p.rows[r]
	t := o.freqs[r*op.Rotary.Dim:][:op.Rotary.Dim]
	table := o.p.table(row)
	turned := o.keys.form == backend.CacheFP8
	k := o.key[r*o.kw:][:o.kw]
	for h := 0; h < o.kw; h += op.HeadDim {
		head := k[h : h+op.HeadDim]
		f.norm(head, head, w.keyNorm, op.Eps)
		rotate32(head, t)
		if turned {
			hadamard(head)
		}
	}
	f.keep(o.keys, table, row.at, k)
	f.keep(o.values, table, row.at, o.val[r*o.kw:][:o.kw])
	index := o.index[r*o.iw:][:o.iw]
	f.keep(o.raw, table, row.at, index[op.IndexHeads*op.IndexDim:])
	positions := o.positions.row(table, row.at)
	for a, v := range row.position {
		positions[a] = float32(v)
	}
	if o.op.AppendOnly {
		return
	}
	for h := range op.Heads {
		q := o.q[r*o.qw+h*op.HeadDim:][:op.HeadDim]
		f.norm(q, o.queryGate[(r*op.Heads+h)*2*op.HeadDim:][:op.HeadDim], w.queryNorm, op.Eps)
		rotate32(q, t)
		if turned {
			hadamard(q)
		}
	}
	for h := range op.IndexHeads {
		q := o.iq[(r*op.IndexHeads+h)*op.IndexDim:][:op.IndexDim]
		f.norm(q, index[h*op.IndexDim:][:op.IndexDim], w.indexQueryNorm, op.Eps)
		rotate32(q, t)
	}
}

// blockKey makes the index key of the block that a row completes: mean of the raw keys, norm, rotation at its first token.
func (o *qsaOp) blockKey(worker int, row row) {
	op := o.op.W
	first := row.at + 1 - op.Ratio
	mem := o.f.scratch(worker, 2*op.IndexDim+op.Rotary.Dim)
	mean, key, t := mem[:op.IndexDim], mem[op.IndexDim:2*op.IndexDim], mem[2*op.IndexDim:]
	table := o.p.table(row)
	for i := range op.Ratio {
		raw, _ := o.f.read(o.raw, o.raw.at(table, first+i), 1, 0, op.IndexDim, key)
		if i == 0 {
			copy(mean, raw)
		} else {
			o.f.level.axpy(mean, raw, 1)
		}
	}
	o.f.level.scale(mean, mean, 1/float32(op.Ratio))
	o.f.norm(key, mean, o.w.indexKNorm, op.Eps)
	at := o.positions.row(table, first)
	turn(t, &op.Rotary, o.inverse, [3]int32{int32(at[0]), int32(at[1]), int32(at[2])})
	rotate32(key, t)
	o.f.keep(o.blocks, table, first/op.Ratio, key)
}

// products computes out[r*ldo+i] for rows of x and n keys that lie stride values apart.
func (o *qsaOp) products(x *activations, out []float32, ldo int, keys []float32, stride, n int, scratch []float32) {
	if o.dot != nil {
		dots(o.dot, x, out, ldo, unsafe.SliceData(keys), 4*stride, x.ld, n, scratch)
		return
	}
	for r := range x.rows {
		for i := range n {
			out[r*ldo+i] = o.f.level.inner(x.row(r), keys[i*stride:][:x.ld])
		}
	}
}

// score: of block b, the sum over heads of relu(q·key_b) / sqrt(IndexDim). NaN counts as zero.
func (o *qsaOp) score(worker, r, first int) {
	op, s := o.op.W, &o.lists[r]
	n := min(scoreBlocks, s.blocks-first)
	if n <= 0 {
		return
	}
	mem := o.f.scratch(worker, 16+op.IndexHeads*scoreBlocks+scoreRun*op.IndexDim)
	x := activations{data: o.iq[r*op.IndexHeads*op.IndexDim:], ld: op.IndexDim, rows: op.IndexHeads}
	parts, tmp := mem[16:16+op.IndexHeads*scoreBlocks], mem[16+op.IndexHeads*scoreBlocks:]
	table, most := o.p.table(o.p.rows[r]), n
	if o.blocks.full == nil {
		most = scoreRun
	}
	for i := 0; i < n; {
		at, c := o.blocks.run(table, first+i, min(n-i, most))
		keys, stride := o.f.read(o.blocks, at, c, 0, op.IndexDim, tmp)
		o.products(&x, parts[i:], scoreBlocks, keys, stride, c, mem[:16])
		i += c
	}
	scale := float32(1 / math.Sqrt(float64(op.IndexDim)))
	dst := o.scores[(r-o.batchFirst)*o.scoreLine+first:][:n]
	clear(dst)
	for h := range op.IndexHeads {
		for i, v := range parts[h*scoreBlocks:][:n] {
			if v > 0 {
				dst[i] += v * scale
			}
		}
	}
}

// selectTokens lists the tokens of a row, ascending.
func (o *qsaOp) selectTokens(worker, r int) {
	op, s := o.op.W, &o.lists[r]
	dst := o.tokens(r)
	if s.forced != nil {
		n := 0
		for t, on := range s.forced {
			if on {
				dst[n] = int32(t)
				n++
			}
		}
		return
	}
	if s.blocks == 0 {
		for i := range dst {
			dst[i] = int32(i)
		}
		return
	}
	scores := o.scores[(r-o.batchFirst)*o.scoreLine:][:s.blocks]
	// Scores are not negative: their bits are in their order. Three passes find the bits of the last one that is kept.
	counts := o.f.scratch(worker, 1<<11)
	var prefix, mask uint32
	left := op.Blocks
	for _, digit := range [3]struct{ shift, bits int }{{21, 11}, {10, 11}, {0, 10}} {
		n := 1 << digit.bits
		clear(counts)
		for _, v := range scores {
			if b := math.Float32bits(v); b&mask == prefix {
				counts[b>>digit.shift&uint32(n-1)]++
			}
		}
		d := n - 1
		for ; d > 0 && int(counts[d]) < left; d-- {
			left -= int(counts[d])
		}
		prefix |= uint32(d) << digit.shift
		mask |= uint32(n-1) << digit.shift
	}
	// left of those with exactly these bits are kept, the first ones.
	at := 0
	for b, v := range scores {
		bits := math.Float32bits(v)
		if bits < prefix {
			continue
		}
		if bits == prefix {
			if left == 0 {
				continue
			}
			left--
		}
		for i := range op.Ratio {
			dst[at] = int32(b*op.Ratio + i)
			at++
		}
	}
	for t := s.blocks * op.Ratio; at < len(dst); t++ {
		dst[at] = int32(t)
		at++
	}
}

// pieceScratch is what piece needs of a worker's scratch.
func (o *qsaOp) pieceScratch() int { return 16 + o.group*splitTokens }

// rowScratch is what a row needs of it: for piece, for two pieces' results, and to unpack keys or values of a piece.
func (o *qsaOp) rowScratch() int {
	n := o.pieceScratch() + 2*o.group*(o.op.W.HeadDim+2)
	if o.keys.full == nil {
		n += splitTokens * o.op.W.HeadDim
	}
	return n
}

// piece is the soft-max attention of the heads of a group over some tokens: into dst, for each head, the largest score, the sum of
// exponentials relative to it, and the weighted values.
func (o *qsaOp) piece(worker, r, kv int, tokens []int32, dst []float32) {
	op, l := o.op.W, o.f.level
	d, n := op.HeadDim, len(tokens)
	mem := o.f.scratch(worker, o.rowScratch())
	score, tmp := mem[16:o.pieceScratch()], mem[o.pieceScratch()+2*o.group*(d+2):]
	table := o.p.table(o.p.rows[r])
	x := activations{data: o.q[r*o.qw+kv*o.group*d:], ld: d, rows: o.group}
	for i := 0; i < n; {
		at, c := o.keys.run(table, int(tokens[i]), consecutive(tokens[i:]))
		keys, stride := o.f.read(o.keys, at, c, kv*d, d, tmp)
		o.products(&x, score[i:], splitTokens, keys, stride, c, mem[:16])
		i += c
	}
	scale := float32(1 / math.Sqrt(float64(d)))
	for g := range o.group {
		s := score[g*splitTokens:][:n]
		l.scale(s, s, scale)
		most := s[0]
		for _, v := range s[1:] {
			if v > most {
				most = v
			}
		}
		l.expShift(s, s, most)
		var a, b float32
		for i := 0; i+1 < n; i += 2 {
			a += s[i]
			b += s[i+1]
		}
		if n%2 == 1 {
			a += s[n-1]
		}
		head := dst[g*(d+2):][:d+2]
		head[0], head[1] = most, a+b
		clear(head[2:])
	}
	for i := 0; i < n; {
		at, c := o.values.run(table, int(tokens[i]), consecutive(tokens[i:]))
		values, stride := o.f.read(o.values, at, c, kv*d, d, tmp)
		for g := range o.group {
			l.weighRows(dst[g*(d+2)+2:][:d], score[g*splitTokens+i:][:c], values, stride)
		}
		i += c
	}
}

// consecutive is the length of the run of tokens that follow each other at the beginning of a list.
func consecutive(tokens []int32) int {
	n := 1
	for n < len(tokens) && tokens[n] == tokens[0]+int32(n) {
		n++
	}
	return n
}

// merge adds a piece to the pieces before it.
func (o *qsaOp) merge(total, piece []float32) {
	l, size := o.f.level, o.op.W.HeadDim+2
	for at := 0; at < len(total); at += size {
		t, p := total[at:at+size], piece[at:at+size]
		most := max(t[0], p[0])
		a, b := exp32(t[0]-most), exp32(p[0]-most)
		t[0], t[1] = most, float32(t[1]*a)+float32(p[1]*b)
		l.scale(t[2:], t[2:], a)
		l.axpy(t[2:], p[2:], b)
	}
}

// finish divides by the sums and applies the output gate.
func (o *qsaOp) finish(r, kv int, total []float32) {
	op, l := o.op.W, o.f.level
	d := op.HeadDim
	for g := range o.group {
		head := kv*o.group + g
		t := total[g*(d+2):][:d+2]
		l.scale(t[2:], t[2:], 1/t[1])
		gate := o.queryGate[(r*op.Heads+head)*2*d+d:][:d]
		l.sigmoidMul(o.attended[r*o.qw+head*d:][:d], t[2:], gate, 1)
	}
}
