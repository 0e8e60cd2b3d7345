package cpu

import (
	"fmt"
	"math"

	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// NewOracle returns a device that computes every operation in float64, in the order of its formula. With Options.Stored values are
// rounded to BF16 where a kernel stores them in BF16 (round is called there); otherwise nothing is rounded but what
// Options.KV and Options.BF16State say.
func NewOracle(opt Options) backend.Device {
	o := &oracle{round: func(v float64) float64 { return v }, halfState: opt.BF16State, wide: opt.Wide}
	if opt.Stored {
		o.round = num.RoundBF16
	}
	return newMachine(opt, o)
}

// oracle is the plain implementation. round is applied to what is stored.
type oracle struct {
	round     func(float64) float64
	halfState bool
	wide      int
}

// roundWide rounds what passes of many rows store and others do not.
func (o *oracle) roundWide(p *pass[float64], v []float64) {
	if o.wide > 0 && p.kind == backend.Prefill && len(p.rows) > o.wide {
		o.roundAll(v)
	}
}

func (o *oracle) prepare(_ *step[float64], op backend.Op) (func(*pass[float64]) error, error) {
	return func(p *pass[float64]) error { return o.run(p, op) }, nil
}

// A record is the whole state after its row.
func (o *oracle) recorded(s backend.State) int { return s.Rows * s.Width }

func (o *oracle) fold(s backend.State, img *image[float64], id backend.StateID, records []float64) {
	state := img.states[id]
	copy(state, records[len(records)-len(state):])
	if s.Store == backend.StoreMatrix {
		o.putAway(state)
	}
}

// putAway rounds a delta-net matrix as keeping it does.
func (o *oracle) putAway(matrix []float64) {
	if o.halfState {
		for i, v := range matrix {
			matrix[i] = num.RoundBF16(v)
		}
	}
}

func (o *oracle) packed() bool { return false }

func (o *oracle) weightBytes() int64 { return 0 }

// keep writes row i of an image. Keys in FP8 are turned before.
func (o *oracle) keep(p *plane[float64], table []int32, i int, x []float64) {
	dst := p.row(table, i)
	switch p.form {
	case backend.CacheFull:
		copy(dst, x)
		o.roundAll(dst)
	case backend.CacheBF16:
		for c, v := range x {
			dst[c] = num.RoundBF16(v)
		}
	case backend.CacheFP8:
		for g := 0; g < len(x); g += p.group {
			scale := num.FromBF16(fp8Scale(x[g : g+p.group]))
			for c, v := range x[g : g+p.group] {
				dst[g+c] = float64(num.FromE4M3(fp8Code(v, scale))) * float64(scale)
			}
		}
	}
}

func (o *oracle) close() {}

// fixed returns a Fixed state before and after row r of its lane. Outside a Verify pass both are the same memory.
func (o *oracle) fixed(p *pass[float64], id backend.StateID, r row) (before, after []float64) {
	img := p.lanes[r.lane].img
	before = img.states[id]
	if p.kind != backend.Verify {
		return before, before
	}
	n := len(before)
	if r.index > 0 {
		before = img.records[id][(r.index-1)*n : r.index*n]
	}
	return before, img.records[id][r.index*n : (r.index+1)*n]
}

func (o *oracle) run(p *pass[float64], op backend.Op) error {
	switch op := op.(type) {
	case backend.Embed:
		o.embed(p, op)
	case backend.PLEStart:
		return o.pleStart(p, op)
	case backend.PLEJoin:
		o.pleJoin(p, op)
	case backend.Mix:
		o.mix(p, op)
	case backend.Defer:
		p.pend(op.X.X, op.Y)
	case backend.GDN:
		o.gdn(p, op)
	case backend.QSA:
		return o.qsa(p, op)
	case backend.MoE:
		return o.moe(p, op)
	case backend.Stem:
		o.stem(p, op)
	case backend.Carry:
		o.inject(p, op.X)
		p.carry(op)
	case backend.Head:
		o.head(p, op)
	case backend.Tap:
		o.tap(p, op)
	default:
		return fmt.Errorf("unknown operation %T", op)
	}
	return nil
}

// matmul computes out[r][n] = sum over k of w[n][k]*in[r][k] for all rows r.
func matmul(w backend.Weight, in, out []float64) {
	k := w.Cols()
	rows := len(in) / k
	parallel(w.N, func(first, end int) {
		line := make([]float64, k)
		for n := first; n < end; n++ {
			w.Decode(line, n)
			for r := range rows {
				out[r*w.N+n] = dot(line, in[r*k:(r+1)*k])
			}
		}
	})
}

func dot(a, b []float64) float64 {
	var s float64
	for i, v := range a {
		s += v * b[i]
	}
	return s
}

func (o *oracle) roundAll(v []float64) {
	for i := range v {
		v[i] = o.round(v[i])
	}
}

// project is matmul with its output stored.
func (o *oracle) project(w backend.Weight, in []float64) []float64 {
	out := make([]float64, len(in)/w.Cols()*w.N)
	matmul(w, in, out)
	o.roundAll(out)
	return out
}

func sigmoid(x float64) float64 { return 1 / (1 + math.Exp(-x)) }
func silu(x float64) float64    { return x * sigmoid(x) }

func softplus(x float64) float64 {
	if x > 20 { // as torch: exact to float32
		return x
	}
	return math.Log1p(math.Exp(x))
}

// rms divides x by its root mean square.
func rms(dst, x []float64, eps float64) {
	s := 1 / math.Sqrt(dot(x, x)/float64(len(x))+eps)
	for i, v := range x {
		dst[i] = v * s
	}
}

// norm is rms times (1 + w).
func norm(dst, x, w []float64, eps float64) {
	rms(dst, x, eps)
	for i := range dst[:len(x)] {
		dst[i] *= 1 + w[i]
	}
}

// groupNorm is norm over each of len(x)/width groups.
func groupNorm(dst, x, w []float64, width int, eps float64) {
	for g := 0; g < len(x); g += width {
		norm(dst[g:g+width], x[g:g+width], w[g:g+width], eps)
	}
}

// rotate turns the first r.Dim values of a head: value i pairs with value i + Dim/2.
func rotate(x []float64, r backend.Rotary, position [3]int32) {
	half := r.Dim / 2
	for i := range half {
		sin, cos := math.Sincos(r.Angle(i, position[r.Axis(i)]))
		a, b := x[i], x[i+half]
		x[i], x[i+half] = a*cos-b*sin, b*cos+a*sin
	}
}

func (o *oracle) embed(p *pass[float64], op backend.Embed) {
	x, width := p.buf(op.X.X)
	h := op.W.Cols()
	for r, row := range p.rows {
		dst := x[r*width : (r+1)*width]
		in := p.lanes[row.lane].in
		if in.Media != nil && in.Media[row.index] != nil {
			for i, v := range in.Media[row.index] {
				dst[i] = o.round(float64(v))
			}
		} else {
			op.W.Decode(dst[:h], int(row.token))
			o.roundAll(dst[:h])
		}
		for s := h; s < width; s += h {
			copy(dst[s:s+h], dst[:h])
		}
	}
	p.drop(op.X.X)
}

// inject adds a pending injection to the streams: X[s] += inject[s] * y.
func (o *oracle) inject(p *pass[float64], s backend.Streams) {
	y, ok := p.injection(s.X)
	if !ok {
		return
	}
	o.injected(p, s, y, func(i int, v float64) {
		x, _ := p.buf(s.X)
		x[i] = v
	})
	p.drop(s.X)
}

func (o *oracle) injected(p *pass[float64], s backend.Streams, y backend.Buf, put func(int, float64)) {
	x, width := p.buf(s.X)
	in, streams := p.buf(s.Inject)
	out, h := p.buf(y)
	for r := range p.rows {
		for c := range width {
			put(r*width+c, o.round(x[r*width+c]+in[r*streams+c/h]*out[r*h+c%h]))
		}
	}
}

// mix is a hyper-connection site:
//
//	N = norm of each stream;  low = silu(Down·N / S);  gate = sigmoid(Up·low)
//	out[c] = mean over streams of gate[s][c]*N[s][c];  inject = 2*sigmoid(Inject·N / S)
func (o *oracle) mix(p *pass[float64], op backend.Mix) {
	o.inject(p, op.X)
	x, width := p.buf(op.X.X)
	out, h := p.buf(op.Out)
	streams := float64(width / h)
	n := make([]float64, len(x))
	w := op.W.Norm.Vector()
	for r := range p.rows {
		groupNorm(n[r*width:(r+1)*width], x[r*width:(r+1)*width], w, h, op.W.Eps)
	}
	o.roundWide(p, n)
	low := make([]float64, len(p.rows)*op.W.Down.N)
	matmul(op.W.Down, n, low)
	for i := range low {
		low[i] = silu(low[i] / streams)
	}
	o.roundWide(p, low)
	gate := make([]float64, len(x))
	matmul(op.W.Up, low, gate)
	for r := range p.rows {
		for c := range h {
			var sum float64
			for s := r*width + c; s < (r+1)*width; s += h {
				sum += sigmoid(gate[s]) * n[s]
			}
			out[r*h+c] = o.round(sum / streams)
		}
	}
	if op.W.Inject.Present() {
		in, _ := p.buf(op.X.Inject)
		matmul(op.W.Inject, n, in)
		for i := range in {
			in[i] = 2 * sigmoid(in[i]/streams)
		}
	}
}

// stem is the entry of the MTP head: E = ProjEmbed·norm(embedding), and each stream is ProjHidden·(its part of the norm of all
// carried streams) + E.
func (o *oracle) stem(p *pass[float64], op backend.Stem) {
	x, width := p.buf(op.X.X)
	h := op.W.Embed.Cols()
	we, wh := op.W.NormEmbed.Vector(), op.W.NormHidden.Vector()
	e := make([]float64, len(p.rows)*h)
	hidden := make([]float64, len(p.rows)*width)
	line := make([]float64, h)
	for r, row := range p.rows {
		l := p.lanes[row.lane]
		op.W.Embed.Decode(line, int(row.token))
		norm(e[r*h:(r+1)*h], line, we, op.W.Eps)
		carried := l.img.chain
		if !l.in.Chain {
			carried = l.img.states[op.Carry][row.index*width:]
		}
		norm(hidden[r*width:(r+1)*width], carried[:width], wh, op.W.Eps)
	}
	o.roundAll(e)
	o.roundAll(hidden)
	e = o.project(op.W.ProjEmbed, e)
	hidden = o.project(op.W.ProjHidden, hidden) // streams are rows of their own here
	for i := range x {
		x[i] = o.round(hidden[i] + e[i/width*h+i%h])
	}
	p.drop(op.X.X)
}

func (o *oracle) tap(p *pass[float64], op backend.Tap) {
	x, width := p.buf(op.X.X)
	x = append([]float64(nil), x...)
	if y, ok := p.injection(op.X.X); ok {
		o.injected(p, op.X, y, func(i int, v float64) { x[i] = v })
	}
	for r, row := range p.rows {
		if t := p.lanes[row.lane].in.Trace; t != nil {
			if t.Streams == nil {
				t.Streams = map[string][][]float64{}
			}
			t.Streams[op.Name] = append(t.Streams[op.Name], x[r*width:(r+1)*width])
		}
	}
}

// head computes logits[n] = w[n]·x. A pick is the largest logit rounded to BF16 among the real ids, the lowest id on ties.
func (o *oracle) head(p *pass[float64], op backend.Head) {
	in, h := p.buf(op.In)
	p.result = backend.Result{}
	for _, l := range p.lanes {
		var res backend.LaneResult
		first, n := l.first, len(l.in.Tokens)
		if !l.in.Want.All() {
			first, n = first+n-1, 1
		}
		if l.in.Want != backend.WantNone {
			logits := make([]float64, n*op.W.W.N)
			matmul(op.W.W, in[first*h:(first+n)*h], logits)
			for r := range n {
				line := logits[r*op.W.W.N : (r+1)*op.W.W.N]
				res.Picks = append(res.Picks, pick(line, op.W))
				if l.in.Want.Logits() {
					out := make([]float32, len(line))
					for i, v := range line {
						out[i] = float32(v)
					}
					res.Logits = append(res.Logits, out)
				}
			}
		}
		p.result.Lanes = append(p.result.Lanes, res)
	}
}

// pick returns the id of the winner, -1 if no row has a real id. NaN never wins over a number.
func pick[T value](logits []T, w *backend.HeadWeights) int32 {
	best, id := math.Inf(-1), int32(-1)
	for i, v := range logits {
		t := int32(i)
		if w.Map != nil {
			t = w.Map[i]
		}
		b := num.RoundBF16(float64(v))
		if int(t) < w.IDs && (b > best || b == best && t < id || id < 0) {
			id = t
			if b == b {
				best = b
			}
		}
	}
	return id
}
