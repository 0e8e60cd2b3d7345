package cpu

import (
	"math"

	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// hash returns the table rows of a token: history is oldest first, reset marks where it starts anew.
func hash(w *backend.PLEWeights, history []float64, token int32) []int64 {
	ids := make([]int64, len(w.Sizes))
	mixed := int64(token) * w.Multipliers[0]
	reset := false
	for n := 1; n < len(w.Multipliers); n++ {
		previous := int32(history[len(history)-n])
		reset = reset || previous == w.Reset
		if reset {
			previous = w.Reset
		}
		mixed ^= int64(previous) * w.Multipliers[n]
		for j := (n - 1) * w.HeadsPerNgram; j < n*w.HeadsPerNgram; j++ {
			m := mixed % w.Sizes[j]
			if m < 0 {
				m += w.Sizes[j]
			}
			ids[j] = w.Offsets[j] + m
		}
	}
	return ids
}

// dequantize writes the values of one encoded table row.
func dequantize[T value](t *backend.Table, row []byte, dst []T) {
	v := make([]float32, t.Width)
	num.DecodeRowBytes32(t.Format, v, row[:codeBytes(t)], nil, row[codeBytes(t):])
	for i, x := range v {
		if t.Format == num.FP8 {
			dst[i] = T(float64(x) * t.Multiplier)
		} else {
			dst[i] = T(x)
		}
	}
}

// codeBytes is the part of a row before its scales.
func codeBytes(t *backend.Table) int {
	if t.Format == num.U4Z8G16 {
		return t.Width / 2
	}
	return t.RowBytes
}

func (o *oracle) pleStart(p *pass[float64], op backend.PLEStart) error {
	out, width := p.buf(op.Out)
	t := &op.W.Table
	raw := make([]byte, len(op.W.Sizes)*t.RowBytes)
	n := len(op.W.Multipliers) - 1
	for r, row := range p.rows {
		// The history of later rows of a lane is its earlier rows: PLEStart does not advance the state.
		history := make([]float64, 0, n+row.index)
		history = append(history, p.lanes[row.lane].img.states[op.History]...)
		for _, id := range p.lanes[row.lane].in.Tokens[:row.index] {
			history = append(history, float64(id))
		}
		if err := t.Source.Rows(hash(op.W, history, row.token), raw); err != nil {
			return err
		}
		for j := range op.W.Sizes {
			dequantize(t, raw[j*t.RowBytes:(j+1)*t.RowBytes], out[r*width+j*t.Width:][:t.Width])
		}
	}
	return nil
}

// pleJoin adds the per-layer embedding to the streams:
//
//	gate[s] = sum(norm(Key·e)[s]*norm(X)[s]) / sqrt(H);  gate = sign*sqrt(max(|gate|, 1e-6))
//	v[s] = sigmoid(gate[s])*(Value·e);  X += v + silu(conv(norm(v)))
func (o *oracle) pleJoin(p *pass[float64], op backend.PLEJoin) {
	o.inject(p, op.X)
	w := op.W
	e, _ := p.buf(op.In)
	x, width := p.buf(op.X.X)
	key, value := o.project(w.Key, e), o.project(w.Value, e)
	h := w.Value.N
	nk, nq, nc := w.NormKey.Vector(), w.NormQuery.Vector(), w.NormConv.Vector()
	kn, qn, vn, v := make([]float64, width), make([]float64, width), make([]float64, width), make([]float64, width)
	for r, row := range p.rows {
		line := x[r*width : (r+1)*width]
		groupNorm(kn, key[r*width:(r+1)*width], nk, h, w.Eps)
		groupNorm(qn, line, nq, h, w.Eps)
		for s := 0; s < width; s += h {
			g := dot(kn[s:s+h], qn[s:s+h]) / math.Sqrt(float64(h))
			root := math.Sqrt(max(math.Abs(g), 1e-6))
			switch {
			case g < 0:
				root = -root
			case g == 0:
				root = 0
			}
			g = sigmoid(root)
			for c := range h {
				v[s+c] = g * value[r*h+c]
			}
		}
		groupNorm(vn, v, nc, h, w.Eps)
		o.roundAll(vn)
		before, after := o.fixed(p, op.Window, row)
		for i, c := range convolve(w.Conv, w.Dilation, before, after, vn) {
			line[i] = o.round(line[i] + v[i] + silu(c))
		}
		before, after = o.fixed(p, op.History, row)
		copy(after, before[1:])
		after[len(after)-1] = float64(row.token)
	}
}
