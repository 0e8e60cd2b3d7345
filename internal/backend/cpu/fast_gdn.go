package cpu

import (
	"math"

	"ninfer/internal/backend"
)

type gdnWeights struct {
	query, key, value, z, a, b, out matrix
	conv                            []float32 // [taps][channels]
	rate                            []float64 // exp(ALog)
	dtBias, norm                    []float32
}

// gdnOp is the gated delta net. A unit is one value head of one lane with all its rows: convolution of its three slices, the delta
// rule, norm and gate. A Verify pass works on a copy of the head's matrix and leaves (decay, key, correction) of each row.
type gdnOp struct {
	f  *fast
	op backend.GDN
	w  *gdnWeights

	p                       *pass[float32]
	mixed, z, a, b, gated   []float32
	keyWidth, vals, channel int
}

func newGDN(f *fast, op backend.GDN) *gdnOp {
	w := op.W
	return &gdnOp{
		f: f, op: op,
		keyWidth: w.KeyHeads * w.Dim, vals: w.ValueHeads * w.Dim, channel: 2*w.KeyHeads*w.Dim + w.ValueHeads*w.Dim,
		w: prepared(f, w, func() *gdnWeights {
			g := &gdnWeights{
				query: f.matrix(w.Query), key: f.matrix(w.Key), value: f.matrix(w.Value), z: f.matrix(w.Z), a: f.matrix(w.A), b: f.matrix(w.B),
				out: f.matrix(w.Out), conv: vector(w.Conv, 0), dtBias: vector(w.DtBias, 0), norm: vector(w.Norm, 0),
			}
			for _, v := range w.ALog.Vector() {
				g.rate = append(g.rate, math.Exp(v))
			}
			return g
		}),
	}
}

func (o *gdnOp) run(p *pass[float32]) error {
	f, w, rows := o.f, o.w, len(p.rows)
	f.arena.reset()
	o.p = p
	in, h := p.buf(o.op.In)
	out, _ := p.buf(o.op.Out)
	heads := o.op.W.ValueHeads
	o.mixed, o.z, o.gated = f.arena.take(rows*o.channel), f.arena.take(rows*o.vals), f.arena.take(rows*o.vals)
	o.a, o.b = f.arena.take(rows*heads), f.arena.take(rows*heads)
	x := newOperand(in, h, h, rows)
	f.job.add(&w.query, &x, o.mixed, o.channel)
	f.job.add(&w.key, &x, o.mixed[o.keyWidth:], o.channel)
	f.job.add(&w.value, &x, o.mixed[2*o.keyWidth:], o.channel)
	f.job.add(&w.z, &x, o.z, o.vals)
	f.job.add(&w.a, &x, o.a, heads)
	f.job.add(&w.b, &x, o.b, heads)
	f.job.run()
	f.each(o, len(p.lanes)*heads, 4*rows*o.vals*o.op.W.Dim)
	for i := range p.lanes {
		l := &p.lanes[i]
		appended := o.mixed[l.first*o.channel:][:len(l.in.Tokens)*o.channel]
		if p.kind == backend.Verify {
			copy(l.img.records[o.op.Window], appended)
		} else {
			shift(l.img.states[o.op.Window], appended)
		}
	}
	x = newOperand(o.gated, o.vals, o.vals, rows)
	f.job.add(&w.out, &x, out, h)
	f.job.run()
	return nil
}

// convolve: dst = silu of the convolution of channels [ch, ch+len(dst)) at row i of a lane. Taps go oldest first.
func (f *fast) convolve(dst, taps []float32, n, dilation, channels, ch int, window, rows []float32, i int) {
	kept := (n - 1) * dilation
	for j := range n {
		at := i - (n-1-j)*dilation
		src := rows
		if at < 0 {
			src, at = window, kept+at
		}
		x, w := src[at*channels+ch:][:len(dst)], taps[j*channels+ch:][:len(dst)]
		if j == 0 {
			f.level.mul(dst, x, w)
		} else {
			f.level.mulAdd(dst, x, w)
		}
	}
	f.level.silu(dst, dst, 1)
}

func (o *gdnOp) do(worker, unit int) {
	f, w, op := o.f, o.w, o.op.W
	l := &o.p.lanes[unit/op.ValueHeads]
	head := unit % op.ValueHeads
	d := op.Dim
	size := d * d
	mem := f.scratch(worker, size+7*d)
	q, k, v := mem[size:][:d], mem[size+d:][:d], mem[size+2*d:][:d]
	u, delta, res, t := mem[size+3*d:][:d], mem[size+4*d:][:d], mem[size+5*d:][:d], mem[size+6*d:][:d]
	var s, records []float32
	var half []uint16
	if all := l.img.halves[o.op.Matrix]; all != nil {
		half = all[head*size:][:size]
		s = mem[:size]
		f.level.expandBF16(s, half)
	} else {
		s = l.img.states[o.op.Matrix][head*size:][:size]
	}
	if o.p.kind == backend.Verify {
		if half == nil {
			copy(mem[:size], s)
			s = mem[:size]
		}
		records = l.img.records[o.op.Matrix]
	}
	window, rows := l.img.states[o.op.Window], o.mixed[l.first*o.channel:]
	keyAt := head / (op.ValueHeads / op.KeyHeads) * d
	for i := range len(l.in.Tokens) {
		r := l.first + i
		f.convolve(q, w.conv, op.Taps, 1, o.channel, keyAt, window, rows, i)
		f.convolve(k, w.conv, op.Taps, 1, o.channel, o.keyWidth+keyAt, window, rows, i)
		f.convolve(v, w.conv, op.Taps, 1, o.channel, 2*o.keyWidth+head*d, window, rows, i)
		f.level.scale(q, q, float32(1/math.Sqrt((float64(f.level.inner(q, q))+1e-6)*float64(d))))
		f.level.scale(k, k, float32(1/math.Sqrt(float64(f.level.inner(k, k))+1e-6)))
		decay := float32(math.Exp(-w.rate[head] * softplus(float64(o.a[r*op.ValueHeads+head])+float64(w.dtBias[head]))))
		beta := sigmoid32(o.b[r*op.ValueHeads+head])

		f.level.deltaRead(u, s, k)
		for j := range delta {
			delta[j] = beta * (v[j] - float32(decay*u[j]))
		}
		f.level.deltaWrite(res, s, k, q, delta, decay)
		if records != nil {
			rec := records[(i*op.ValueHeads+head)*(1+2*d):][:1+2*d]
			rec[0] = decay
			copy(rec[1:], k)
			copy(rec[1+d:], delta)
		}
		at := r*o.vals + head*d
		f.norm(t, res, w.norm, op.Eps)
		f.level.sigmoidMul(o.gated[at:at+d], t, o.z[at:at+d], 1)
	}
	if half != nil && records == nil {
		f.level.shrinkBF16(half, s)
	}
}
