package cpu

import (
	"math"

	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// pleStartOp hashes, fetches and decodes the table rows of a pass, all rows in one request.
type pleStartOp struct {
	f  *fast
	op backend.PLEStart

	ids   []int64
	raw   []byte
	out   []float32
	width int
}

func newPLEStart(f *fast, op backend.PLEStart) *pleStartOp { return &pleStartOp{f: f, op: op} }

func (o *pleStartOp) run(p *pass[float32]) error {
	w := o.op.W
	o.out, o.width = p.buf(o.op.Out)
	heads, n := len(w.Sizes), len(w.Multipliers)-1
	o.ids, o.raw = grow(o.ids, len(p.rows)*heads), grow(o.raw, len(p.rows)*heads*w.Table.RowBytes)
	for r, row := range p.rows {
		// The history of later rows of a lane is its earlier rows: PLEStart does not advance the state.
		l := &p.lanes[row.lane]
		ids := o.ids[r*heads : (r+1)*heads]
		mixed := int64(row.token) * w.Multipliers[0]
		reset := false
		for i := 1; i <= n; i++ {
			var previous int32
			if i <= row.index {
				previous = l.in.Tokens[row.index-i]
			} else {
				previous = int32(l.img.states[o.op.History][n+row.index-i])
			}
			if reset = reset || previous == w.Reset; reset {
				previous = w.Reset
			}
			mixed ^= int64(previous) * w.Multipliers[i]
			for j := (i - 1) * w.HeadsPerNgram; j < i*w.HeadsPerNgram; j++ {
				m := mixed % w.Sizes[j]
				if m < 0 {
					m += w.Sizes[j]
				}
				ids[j] = w.Offsets[j] + m
			}
		}
	}
	if err := w.Table.Source.Rows(o.ids, o.raw); err != nil {
		return err
	}
	o.f.each(o, len(p.rows), 4*len(o.out))
	return nil
}

func (o *pleStartOp) do(_, r int) {
	t := &o.op.W.Table
	heads := len(o.op.W.Sizes)
	for j := range heads {
		raw := o.raw[(r*heads+j)*t.RowBytes:][:t.RowBytes]
		dst := o.out[r*o.width+j*t.Width:][:t.Width]
		num.DecodeRowBytes32(t.Format, dst, raw[:codeBytes(t)], nil, raw[codeBytes(t):])
		if t.Format == num.FP8 {
			o.f.level.scale(dst, dst, float32(t.Multiplier))
		}
	}
}

type pleWeights struct {
	key, value                         matrix
	normKey, normQuery, normConv, conv []float32
}

type pleJoinOp struct {
	f  *fast
	op backend.PLEJoin
	w  *pleWeights

	p                   *pass[float32]
	stage               int
	x, key, value, v, n []float32
	width, h            int
	tokens              []float32
}

func newPLEJoin(f *fast, op backend.PLEJoin) *pleJoinOp {
	w := op.W
	return &pleJoinOp{f: f, op: op, w: prepared(f, w, func() *pleWeights {
		return &pleWeights{
			key: f.matrix(w.Key), value: f.matrix(w.Value),
			normKey: vector(w.NormKey, 1), normQuery: vector(w.NormQuery, 1), normConv: vector(w.NormConv, 1), conv: vector(w.Conv, 0),
		}
	})}
}

func (o *pleJoinOp) run(p *pass[float32]) error {
	f, w, rows := o.f, o.w, len(p.rows)
	f.inject(p, o.op.X)
	f.arena.reset()
	o.p = p
	e, ew := p.buf(o.op.In)
	o.x, o.width = p.buf(o.op.X.X)
	o.h = w.value.n
	o.key, o.value = f.arena.take(rows*o.width), f.arena.take(rows*o.h)
	o.v, o.n = f.arena.take(rows*o.width), f.arena.take(rows*o.width)
	in := newOperand(e, ew, ew, rows)
	f.job.add(&w.key, &in, o.key, o.width)
	f.job.add(&w.value, &in, o.value, o.h)
	f.job.run()
	streams := o.width / o.h
	o.stage = 0
	f.each(o, rows*streams, 8*len(o.x))
	o.stage = 1
	f.each(o, rows*streams, 8*len(o.x))
	for i := range p.lanes {
		l := &p.lanes[i]
		n := len(l.in.Tokens)
		o.tokens = grow(o.tokens, n)
		for j, t := range l.in.Tokens {
			o.tokens[j] = float32(t)
		}
		appended := o.n[l.first*o.width:][:n*o.width]
		if p.kind == backend.Verify {
			copy(l.img.records[o.op.Window], appended)
			copy(l.img.records[o.op.History], o.tokens)
		} else {
			shift(l.img.states[o.op.Window], appended)
			shift(l.img.states[o.op.History], o.tokens)
		}
	}
	return nil
}

// do works on one stream of one row.
func (o *pleJoinOp) do(worker, unit int) {
	f, w, op := o.f, o.w, o.op.W
	streams := o.width / o.h
	r, s := unit/streams, unit%streams
	at, ch := unit*o.h, s*o.h
	x, v, n := o.x[at:][:o.h], o.v[at:][:o.h], o.n[at:][:o.h]
	if o.stage == 0 {
		key := o.key[at:][:o.h]
		f.norm(key, key, w.normKey[ch:][:o.h], op.Eps)
		f.norm(n, x, w.normQuery[ch:][:o.h], op.Eps)
		g := float64(f.level.inner(key, n)) / math.Sqrt(float64(o.h))
		root := math.Sqrt(max(math.Abs(g), 1e-6))
		switch {
		case g < 0:
			root = -root
		case g == 0:
			root = 0
		}
		f.level.scale(v, o.value[r*o.h:][:o.h], float32(sigmoid(root)))
		f.norm(n, v, w.normConv[ch:][:o.h], op.Eps)
		return
	}
	row := o.p.rows[r]
	l := &o.p.lanes[row.lane]
	t := f.scratch(worker, o.h)
	f.convolve(t, w.conv, op.Taps, op.Dilation, o.width, ch, l.img.states[o.op.Window], o.n[l.first*o.width:], row.index)
	for i := range x {
		x[i] = x[i] + v[i] + t[i]
	}
}
