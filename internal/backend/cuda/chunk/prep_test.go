package chunk_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"ninfer/internal/backend/cuda/chunk"
	"ninfer/internal/backend/cuda/chunk/kernels"
	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/num"
)

// head norms a head (times 1+w), rotates its first 64 values at a position whose angles are products in FP32, and turns it by a normalised
// Hadamard matrix if asked.
func head(x, w []float64, inverse []float32, axis []uint32, pos [3]uint32, turned bool) []float64 {
	var square float64
	for _, v := range x {
		square += v * v
	}
	s := 1 / math.Sqrt(square/float64(len(x))+1e-6)
	y := make([]float64, len(x))
	for i := range x {
		y[i] = x[i] * s * (1 + w[i])
	}
	if inverse != nil {
		for i := range 32 {
			sin, cos := math.Sincos(float64(float32(int32(pos[axis[i]])) * inverse[i]))
			y[i], y[i+32] = y[i]*cos-y[i+32]*sin, y[i+32]*cos+y[i]*sin
		}
	}
	if !turned {
		return y
	}
	z := make([]float64, len(y))
	for i := range z {
		for j, v := range y {
			bits := 0
			for b := i & j; b > 0; b &= b - 1 {
				bits++
			}
			if bits%2 == 1 {
				v = -v
			}
			z[i] += v / math.Sqrt(float64(len(y)))
		}
	}
	return z
}

func TestPrep(t *testing.T) {
	withGPU(t, func(g *gpu) {
		for i, c := range []struct {
			shape      chunk.AttentionShape
			base, rows int
			fp8        bool
			appendOnly bool
		}{
			{microAttention, 0, 1, false, false},
			{microAttention, 0, 9, true, false},
			{microAttention, 62, 7, false, true},
			{officialAttention, 0, 3, false, false},
			{officialAttention, 1, 2, false, false},
			{officialAttention, 61, 70, false, false},
			{officialAttention, 130, 11, true, false},
			{officialAttention, 130, 11, true, true},
		} {
			r := rand.New(rand.NewPCG(uint64(i), 4))
			s := c.shape
			tokens := c.base + c.rows
			p := makePages(r, tokens)
			inverse, axis := make([]float32, 32), make([]uint32, 32)
			for i := range inverse {
				inverse[i], axis[i] = float32(math.Pow(1e7, -float64(i)/32)), uint32(r.IntN(3))
			}
			table := append([]float32(nil), inverse...)
			for _, a := range axis {
				table = append(table, math.Float32frombits(a))
			}
			// What older tokens left.
			raws, raw := words(normal(r, tokens*128, 1))
			positions := make([]uint32, tokens*3)
			for i := range positions {
				positions[i] = uint32(i/3 + r.IntN(3)*50_000)
			}
			rawPool, posPool := make([]uint16, p.pages*64*128), make([]uint32, p.pages*64*3)
			for tok := range c.base {
				copy(rawPool[p.row(tok)*128:], raws[tok*128:][:128])
				copy(posPool[p.row(tok)*3:], positions[tok*3:][:3])
			}
			rows := make([]kernels.Row, c.rows)
			for i := range rows {
				copy(rows[i].Pos[:], positions[(c.base+i)*3:])
			}
			qgw, qg := words(normal(r, c.rows*s.Heads*512, 2))
			kw, k := words(normal(r, c.rows*s.KVHeads*256, 2))
			vw, v := words(normal(r, c.rows*s.KVHeads*256, 2))
			iw, index := words(normal(r, c.rows*640, 2))
			for i := range c.rows { // the raw keys of this pass
				copy(raw[(c.base+i)*128:], index[i*640+512:][:128])
				copy(raws[(c.base+i)*128:], iw[i*640+512:][:128])
			}
			qn, kn, iqn, ikn := asFloat32(normal(r, 256, .3)), asFloat32(normal(r, 256, .3)), asFloat32(normal(r, 128, .3)), asFloat32(normal(r, 128, .3))
			heads := p.pages * 64 * s.KVHeads
			size := 2
			if c.fp8 {
				size = 1
			}
			a := chunk.Prep{
				AttentionShape: s, Rows: c.rows, Base: c.base, RowTable: g.Upload(rows), Key: g.Upload(kw), Value: g.Upload(vw), Index: g.Upload(iw),
				KeyLd: s.KVHeads * 256, ValueLd: s.KVHeads * 256, IndexLd: 640, QueryNorm: g.Upload(floats(qn)), KeyNorm: g.Upload(floats(kn)), IndexQueryNorm: g.Upload(floats(iqn)),
				IndexKeyNorm: g.Upload(floats(ikn)), Inverse: g.Upload(table), Eps: 1e-6, Q: g.Poisoned(2 * c.rows * s.Heads * 256), Iq: g.Poisoned(2 * c.rows * 512),
				Cache: chunk.Cache{
					Keys: g.Poisoned(size * heads * 256), Values: g.Poisoned(size * heads * 256), Raw: g.Upload(rawPool), Positions: g.Upload(posPool),
					BlockKeys: g.Poisoned(2 * p.pages * 16 * 128), Pages: g.Upload(p.table),
				},
			}
			if c.fp8 {
				a.KeyScales, a.ValueScales = g.Poisoned(2*heads), g.Poisoned(2*heads)
			}
			if !c.appendOnly {
				a.Qg, a.QgLd = g.Upload(qgw), s.Heads*512
			}
			g.Check(g.set.Prep(g.C, g.S, &a))
			what := fmt.Sprintf("%d/%d heads, %d rows at %d, fp8 %v", s.Heads, s.KVHeads, c.rows, c.base, c.fp8)
			compare := func(name string, bound float64, got, want []float64) {
				if d := distance(got, want); !(d <= bound) {
					g.T.Errorf("%s: %s %.2g off", what, name, d)
				}
			}
			if !c.appendOnly {
				q, iq := fromWords(g.Download[uint16](a.Q, c.rows*s.Heads*256)), fromWords(g.Download[uint16](a.Iq, c.rows*512))
				for r := range c.rows {
					for h := range s.Heads {
						compare("query", 3e-3, q[(r*s.Heads+h)*256:][:256], head(qg[(r*s.Heads+h)*512:][:256], qn, inverse, axis, rows[r].Pos, c.fp8))
					}
					for h := range 4 {
						compare("index query", 3e-3, iq[(r*4+h)*128:][:128], head(index[r*640+h*128:][:128], iqn, inverse, axis, rows[r].Pos, false))
					}
				}
			}
			kept := func(at, scales driver.Ptr) []float64 {
				if !c.fp8 {
					return fromWords(g.Download[uint16](at, heads*256))
				}
				codes, sc := g.Download[byte](at, heads*256), fromWords(g.Download[uint16](scales, heads))
				x := make([]float64, len(codes))
				for i, code := range codes {
					x[i] = float64(num.FromE4M3(code)) * sc[i/256]
				}
				return x
			}
			bound := 3e-3
			if c.fp8 {
				bound = 4e-2
			}
			keys, values := kept(a.Keys, a.KeyScales), kept(a.Values, a.ValueScales)
			gotRaw, gotPos := g.Download[uint16](a.Raw, len(rawPool)), g.Download[uint32](a.Positions, len(posPool))
			blocks := fromWords(g.Download[uint16](a.BlockKeys, p.pages*16*128))
			written := 0
			for i := range keys {
				if keys[i] == keys[i] {
					written++
				}
			}
			if written != c.rows*s.KVHeads*256 {
				g.T.Errorf("%s: %d key values written, want %d", what, written, c.rows*s.KVHeads*256)
			}
			for r := range c.rows {
				tok := c.base + r
				for h := range s.KVHeads {
					at := (p.row(tok)*s.KVHeads + h) * 256
					compare("key", bound, keys[at:][:256], head(k[(r*s.KVHeads+h)*256:][:256], kn, inverse, axis, rows[r].Pos, c.fp8))
					compare("value", bound, values[at:][:256], v[(r*s.KVHeads+h)*256:][:256])
				}
				if tok%4 == 3 {
					mean := make([]float64, 128)
					for i := range mean {
						for j := range 4 {
							mean[i] += raw[(tok-j)*128+i] / 4
						}
						mean[i] = num.RoundBF16(mean[i])
					}
					want := head(mean, ikn, inverse, axis, [3]uint32(positions[(tok-3)*3:]), false)
					compare("block key", 3e-3, blocks[(int(p.table[tok/64])*16+tok%64/4)*128:][:128], want)
				}
			}
			for tok := range tokens {
				for i := range 128 {
					if gotRaw[p.row(tok)*128+i] != raws[tok*128+i] {
						panic(fmt.Errorf("%s: raw key of token %d differs", what, tok))
					}
				}
				for i := range 3 {
					if gotPos[p.row(tok)*3+i] != positions[tok*3+i] {
						panic(fmt.Errorf("%s: position of token %d differs", what, tok))
					}
				}
			}
			g.Free(0)
		}
	})
}

func TestConvRows(t *testing.T) {
	withGPU(t, func(g *gpu) {
		for i, calls := range [][]int{{1}, {2, 9, 1, 10}, {64}, {200, 3}} {
			const width, taps, dilation, depth = 300, 4, 3, 9
			r := rand.New(rand.NewPCG(uint64(i), 5))
			rows := 0
			for _, n := range calls {
				rows += n
			}
			xw, x := words(normal(r, rows*width, 1))
			sw, streams := words(normal(r, rows*width, 1))
			ww, window := words(normal(r, depth*width, 1))
			w, v := asFloat32(normal(r, taps*width, .5)), asFloat32(normal(r, rows*width, 1))
			c := chunk.ConvRows{C: width, Taps: taps, Dilation: dilation, W: g.Upload(floats(w)), Window: g.Upload(ww)}
			xd, sd, vd := g.Upload(xw), g.Upload(sw), g.Upload(floats(v))
			at := driver.Ptr(0)
			for _, n := range calls {
				c.Rows, c.X, c.V, c.Streams = n, xd+2*at*width, vd+4*at*width, sd+2*at*width
				g.Check(g.set.ConvRows(g.C, g.S, &c))
				at += driver.Ptr(n)
			}
			all := append(append([]float64(nil), window...), x...)
			for i := range streams {
				var sum float64
				for j := range taps {
					sum += w[j*width+i%width] * all[(i/width+j*dilation)*width+i%width]
				}
				streams[i] += v[i] + silu(sum)
			}
			if d := distance(fromWords(g.Download[uint16](sd, rows*width)), streams); !(d <= 3e-3) {
				t.Errorf("calls %v: streams %.2g off", calls, d)
			}
			if d := distance(fromWords(g.Download[uint16](c.Window, depth*width)), all[rows*width:]); d != 0 {
				t.Errorf("calls %v: window %.2g off", calls, d)
			}
			g.Free(0)
		}
	})
}
