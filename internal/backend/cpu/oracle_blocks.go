package cpu

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"ninfer/internal/backend"
)

// convolve returns the depthwise causal convolution of one row: out[c] = sum over taps j of w[j][c]*x[(taps-1-j)*dilation rows ago][c].
// window holds the (taps-1)*dilation previous rows, oldest first; next receives the window that ends with x and may be window itself.
func convolve(w backend.Weight, dilation int, window, next, x []float64) []float64 {
	width := len(x)
	out := make([]float64, width)
	line := make([]float64, width)
	for j := range w.N {
		src := x
		if j < w.N-1 {
			src = window[j*dilation*width:]
		}
		w.Decode(line, j)
		for c := range width {
			out[c] += line[c] * src[c]
		}
	}
	copy(next, window[width:])
	copy(next[len(window)-width:], x)
	return out
}

// gdn is the gated delta net. For value head v with key head v/(ValueHeads/KeyHeads):
//
//	q, k, v = silu(conv);  q = q/|q|/sqrt(Dim);  k = k/|k|;  beta = sigmoid(b);  g = -exp(ALog)*softplus(a + DtBias)
//	S = e^g S;  d = beta*(v - S'k);  S = S + k d';  o = S'q;  out = Out·(norm(o)*w*sigmoid(z))
func (o *oracle) gdn(p *pass[float64], op backend.GDN) {
	w := op.W
	in, _ := p.buf(op.In)
	out, h := p.buf(op.Out)
	q, k, v, z := o.project(w.Query, in), o.project(w.Key, in), o.project(w.Value, in), o.project(w.Z, in)
	a, b := o.project(w.A, in), o.project(w.B, in)
	aLog, dtBias, nw := w.ALog.Vector(), w.DtBias.Vector(), w.Norm.Vector()
	kd, vd, group := w.KeyHeads*w.Dim, w.ValueHeads*w.Dim, w.ValueHeads/w.KeyHeads
	gated := make([]float64, len(p.rows)*vd)
	for r, row := range p.rows {
		before, after := o.fixed(p, op.Window, row)
		x := slices.Concat(q[r*kd:(r+1)*kd], k[r*kd:(r+1)*kd], v[r*vd:(r+1)*vd])
		x = convolve(w.Conv, 1, before, after, x)
		for i := range x {
			x[i] = silu(x[i])
		}
		for g := 0; g < 2*kd; g += w.Dim {
			head := x[g : g+w.Dim]
			s := 1 / math.Sqrt(dot(head, head)+1e-6)
			if g < kd {
				s /= math.Sqrt(float64(w.Dim))
			}
			for i := range head {
				head[i] *= s
			}
		}
		before, after = o.fixed(p, op.Matrix, row)
		parallel(w.ValueHeads, func(first, end int) {
			for head := first; head < end; head++ {
				qh := x[head/group*w.Dim:][:w.Dim]
				kh := x[kd+head/group*w.Dim:][:w.Dim]
				vh := x[2*kd+head*w.Dim:][:w.Dim]
				decay := math.Exp(-math.Exp(aLog[head]) * softplus(a[r*w.ValueHeads+head]+dtBias[head]))
				beta := sigmoid(b[r*w.ValueHeads+head])
				s0 := before[head*w.Dim*w.Dim:][:w.Dim*w.Dim]
				s1 := after[head*w.Dim*w.Dim:][:w.Dim*w.Dim]
				res := make([]float64, w.Dim)
				delta(s1, s0, qh, kh, vh, decay, beta, res)
				ss := 1 / math.Sqrt(dot(res, res)/float64(w.Dim)+w.Eps)
				for i := range res {
					at := r*vd + head*w.Dim + i
					gated[at] = o.round(res[i]*nw[i]*sigmoid(z[at])) * ss
				}
			}
		})
	}
	for _, l := range p.lanes {
		if p.kind != backend.Verify {
			o.putAway(l.img.states[op.Matrix])
		}
	}
	matmul(w.Out, gated, out[:len(p.rows)*h])
	o.roundAll(out)
}

// delta is one step of the delta rule on S [key][value].
func delta(next, s, q, k, v []float64, decay, beta float64, out []float64) {
	n := len(q)
	d := make([]float64, n)
	for i := range n {
		for j := range n {
			next[i*n+j] = s[i*n+j] * decay
			d[j] += next[i*n+j] * k[i]
		}
	}
	for j := range n {
		d[j] = beta * (v[j] - d[j])
	}
	for i := range n {
		for j := range n {
			next[i*n+j] += k[i] * d[j]
			out[j] += next[i*n+j] * q[i]
		}
	}
}

// qsa is the sparse attention. A query attends to the tokens of the best complete blocks before it, by index score,
// and to the tokens after the last complete block.
func (o *oracle) qsa(p *pass[float64], op backend.QSA) error {
	w := op.W
	in, _ := p.buf(op.In)
	key, val, index := o.project(w.Key, in), o.project(w.Value, in), o.project(w.Index, in)
	kn, ikn := w.KeyNorm.Vector(), w.IndexKeyNorm.Vector()
	kw, iw := w.KVHeads*w.HeadDim, (w.IndexHeads+1)*w.IndexDim
	keys, values, rawKeys, blocks, positions := p.m.planes[op.Keys], p.m.planes[op.Values], p.m.planes[op.RawIndex], p.m.planes[op.IndexKeys], p.m.planes[op.Positions]
	turned := keys.form == backend.CacheFP8
	k, block := make([]float64, kw), make([]float64, w.IndexDim)
	for r, row := range p.rows {
		table := p.table(row)
		groupNormShared(k, key[r*kw:(r+1)*kw], kn, w.Eps)
		for h := 0; h < kw; h += w.HeadDim {
			rotate(k[h:h+w.HeadDim], w.Rotary, row.position)
			if turned {
				hadamard(k[h : h+w.HeadDim])
			}
		}
		o.keep(keys, table, row.at, k)
		o.keep(values, table, row.at, val[r*kw:(r+1)*kw])
		o.keep(rawKeys, table, row.at, index[r*iw+w.IndexHeads*w.IndexDim:(r+1)*iw])
		for a, v := range row.position {
			positions.row(table, row.at)[a] = float64(v)
		}
		if (row.at+1)%w.Ratio == 0 {
			first := row.at + 1 - w.Ratio
			var raw []float64
			for t := first; t <= row.at; t++ {
				raw = append(raw, rawKeys.row(table, t)...)
			}
			o.blockKey(block, raw, ikn, w, positions.row(table, first))
			o.keep(blocks, table, first/w.Ratio, block)
		}
	}
	if op.AppendOnly {
		return nil
	}
	out, h := p.buf(op.Out)
	queryGate := o.project(w.QueryGate, in)
	qn, iqn := w.QueryNorm.Vector(), w.IndexQueryNorm.Vector()
	qw := w.Heads * w.HeadDim
	attended := make([]float64, len(p.rows)*qw)
	selected := make([][]int, len(p.rows))
	for r, row := range p.rows {
		sel, err := o.choose(p, op, row, index[r*iw:(r+1)*iw], iqn)
		if err != nil {
			return err
		}
		selected[r] = sel
	}
	parallel(len(p.rows), func(first, end int) {
		q := make([]float64, w.HeadDim)
		for r := first; r < end; r++ {
			row := p.rows[r]
			table := p.table(row)
			for head := range w.Heads {
				qg := queryGate[(r*w.Heads+head)*2*w.HeadDim:][:2*w.HeadDim]
				norm(q, qg[:w.HeadDim], qn, w.Eps)
				rotate(q, w.Rotary, row.position)
				o.roundAll(q)
				if turned {
					hadamard(q)
				}
				kv := head / (w.Heads / w.KVHeads) * w.HeadDim
				res := attended[r*qw+head*w.HeadDim:][:w.HeadDim]
				attend(res, q, keys, values, table, kv, selected[r])
				for i := range res {
					res[i] = o.round(res[i] * sigmoid(qg[w.HeadDim+i]))
				}
			}
		}
	})
	matmul(w.Out, attended, out[:len(p.rows)*h])
	o.roundAll(out)
	return nil
}

// groupNormShared is groupNorm with one weight vector for all groups.
func groupNormShared(dst, x, w []float64, eps float64) {
	for g := 0; g < len(x); g += len(w) {
		norm(dst[g:g+len(w)], x[g:g+len(w)], w, eps)
	}
}

// blockKey makes the index key of a complete block: mean of the raw keys, norm, rotation at the position of its first token.
func (o *oracle) blockKey(dst, raw, kn []float64, w *backend.QSAWeights, position []float64) {
	mean := make([]float64, w.IndexDim)
	for i, v := range raw {
		mean[i%w.IndexDim] += v
	}
	for i := range mean {
		mean[i] = o.round(mean[i] / float64(w.Ratio))
	}
	norm(dst, mean, kn, w.Eps)
	rotate(dst, w.Rotary, [3]int32{int32(position[0]), int32(position[1]), int32(position[2])})
}

// choose returns the tokens a row attends to, ascending. score of block b = sum over heads of relu(q·key_b) / sqrt(IndexDim).
func (o *oracle) choose(p *pass[float64], op backend.QSA, row row, index, iqn []float64) ([]int, error) {
	w, l := op.W, p.lanes[row.lane]
	visible := row.at + 1
	var tokens []int
	if f := l.in.Force; f != nil && f.Selected[op.Layer] != nil {
		if len(f.Selected[op.Layer]) <= row.index || len(f.Selected[op.Layer][row.index]) < visible {
			return nil, fmt.Errorf("forced selection lacks row %d", row.index)
		}
		for t, on := range f.Selected[op.Layer][row.index][:visible] {
			if on {
				tokens = append(tokens, t)
			}
		}
	} else {
		blocks := visible / w.Ratio
		keep := make([]int, blocks)
		for b := range keep {
			keep[b] = b
		}
		if blocks > w.Blocks {
			score := make([]float64, blocks)
			keys, table := p.m.planes[op.IndexKeys], p.table(row)
			q := make([]float64, w.IndexDim)
			for h := range w.IndexHeads {
				norm(q, index[h*w.IndexDim:(h+1)*w.IndexDim], iqn, w.Eps)
				rotate(q, w.Rotary, row.position)
				o.roundAll(q)
				for b := range score {
					score[b] += max(0, dot(q, keys.row(table, b))) / math.Sqrt(float64(w.IndexDim))
				}
			}
			slices.SortStableFunc(keep, func(a, b int) int { return cmp.Compare(score[b], score[a]) })
			keep = keep[:w.Blocks]
			slices.Sort(keep)
		}
		for _, b := range keep {
			for t := range w.Ratio {
				tokens = append(tokens, b*w.Ratio+t)
			}
		}
		for t := blocks * w.Ratio; t < visible; t++ {
			tokens = append(tokens, t)
		}
	}
	if t := l.in.Trace; t != nil {
		if t.Selected == nil {
			t.Selected = map[int][][]bool{}
		}
		line := make([]bool, visible)
		for _, i := range tokens {
			line[i] = true
		}
		t.Selected[op.Layer] = append(t.Selected[op.Layer], line)
	}
	return tokens, nil
}

// attend is soft-max attention of one query over the given tokens; the head's values are those from first on.
func attend(dst, q []float64, keys, values *plane[float64], table []int32, first int, tokens []int) {
	scale := 1 / math.Sqrt(float64(len(q)))
	score := make([]float64, len(tokens))
	most := math.Inf(-1)
	for i, t := range tokens {
		score[i] = dot(q, keys.row(table, t)[first:][:len(q)]) * scale
		most = max(most, score[i])
	}
	var sum float64
	for i, t := range tokens {
		e := math.Exp(score[i] - most)
		sum += e
		for c, v := range values.row(table, t)[first:][:len(q)] {
			dst[c] += e * v
		}
	}
	for c := range dst {
		dst[c] /= sum
	}
}

// moe is the mixture of experts:
//
//	out = sum over the TopK experts e of p_e*Down_e·(silu(gate_e)*up_e) + sigmoid(SharedVector·x)*SharedDown·(silu(gate)*up)
//
// with p the soft-max of the router's logits, normalised over the chosen ones; equal logits choose the lower expert.
func (o *oracle) moe(p *pass[float64], op backend.MoE) error {
	w := op.W
	in, h := p.buf(op.In)
	out, _ := p.buf(op.Out)
	logits := make([]float64, len(p.rows)*w.Experts)
	matmul(w.Router, in, logits)
	chosen := make([][]int32, len(p.rows))
	weight := make([][]float64, len(p.rows))
	for r, row := range p.rows {
		line := logits[r*w.Experts : (r+1)*w.Experts]
		l := p.lanes[row.lane]
		if f := l.in.Force; f != nil && f.Experts[op.Layer] != nil {
			if len(f.Experts[op.Layer]) <= row.index {
				return fmt.Errorf("forced routing lacks row %d", row.index)
			}
			chosen[r] = f.Experts[op.Layer][row.index]
		} else {
			order := make([]int32, w.Experts)
			for i := range order {
				order[i] = int32(i)
			}
			slices.SortStableFunc(order, func(a, b int32) int { return cmp.Compare(line[b], line[a]) })
			chosen[r] = order[:w.TopK]
		}
		weight[r] = route(line, chosen[r], w.Normalize)
		if t := l.in.Trace; t != nil {
			if t.Experts == nil {
				t.Experts = map[int][][]int32{}
			}
			t.Experts[op.Layer] = append(t.Experts[op.Layer], slices.Sorted(slices.Values(chosen[r])))
		}
	}
	// Rows that chose an expert, in order; each expert's output is kept by (row, rank) so that a row sums in rank order.
	type use struct{ row, rank int }
	users := make([][]use, w.Experts)
	for r, c := range chosen {
		for rank, e := range c {
			if int(e) >= w.Experts || e < 0 {
				return fmt.Errorf("expert %d of %d", e, w.Experts)
			}
			users[e] = append(users[e], use{r, rank})
		}
	}
	parts := make([][][]float64, len(p.rows))
	for r := range parts {
		parts[r] = make([][]float64, len(chosen[r]))
	}
	for e, us := range users {
		if len(us) == 0 {
			continue
		}
		x := make([]float64, len(us)*h)
		for i, u := range us {
			copy(x[i*h:], in[u.row*h:(u.row+1)*h])
		}
		y := o.gated(w.GateUp.Rows(e*2*w.Inter, w.Inter), w.GateUp.Rows(e*2*w.Inter+w.Inter, w.Inter), w.Down.Rows(e*h, h), x)
		o.roundWide(p, y)
		for i, u := range us {
			parts[u.row][u.rank] = y[i*h : (i+1)*h]
		}
	}
	shared := o.gated(w.SharedGate, w.SharedUp, w.SharedDown, in)
	gate := make([]float64, len(p.rows))
	matmul(w.SharedVector, in, gate)
	for r := range p.rows {
		for c := range h {
			var sum float64
			for rank, y := range parts[r] {
				sum += weight[r][rank] * y[c]
			}
			out[r*h+c] = o.round(sum + sigmoid(gate[r])*shared[r*h+c])
		}
	}
	return nil
}

// route returns the weights of the chosen experts.
func route(logits []float64, chosen []int32, normalize bool) []float64 {
	most := slices.Max(logits)
	var all, sum float64
	for _, v := range logits {
		all += math.Exp(v - most)
	}
	w := make([]float64, len(chosen))
	for i, e := range chosen {
		w[i] = math.Exp(logits[e]-most) / all
		sum += w[i]
	}
	if normalize {
		for i := range w {
			w[i] /= sum
		}
	}
	return w
}

// gated is down·(silu(gate·x)*(up·x)); the product is stored.
func (o *oracle) gated(gate, up, down backend.Weight, x []float64) []float64 {
	rows := len(x) / gate.Cols()
	g, u := make([]float64, rows*gate.N), make([]float64, rows*gate.N)
	matmul(gate, x, g)
	matmul(up, x, u)
	for i := range g {
		g[i] = o.round(silu(g[i]) * u[i])
	}
	y := make([]float64, rows*down.N)
	matmul(down, g, y)
	return y
}
