package device_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/model"
	"ninfer/internal/num"
)

// bf16 is a weight with the given values, rounded.
func bf16(t *testing.T, rows, cols int, value func(r, c int) float64) backend.Weight {
	data := make([]byte, 2*rows*cols)
	for r := range rows {
		for c := range cols {
			binary.LittleEndian.PutUint16(data[2*(r*cols+c):], num.ToBF16(float32(value(r, c))))
		}
	}
	x, err := num.NewTensor(num.BF16, num.Contiguous, []int{rows, cols}, data)
	if err != nil {
		t.Fatal(err)
	}
	return backend.Whole(x)
}

// One token far back holds the answer: a model of one attention layer over random tokens, in which the index key of one block is the best
// for the last token's query by far, its key draws all attention, and its value decides what wins. Without the token something else
// wins. The last token is a step of decoding, or the last row of a prompt's chunk.
func TestPlantedKey(t *testing.T) {
	const (
		h, vocab     = 256, 400
		planted, ask = 7, 9 // tokens, and their coordinates
		blank        = 5    // a token of zeros
		heads, kv    = 4, 2
		hd, id       = 256, 128
		blocks       = 512
	)
	r := rand.New(rand.NewPCG(3, 1))
	noise := func(size float64) func(int, int) float64 {
		return func(int, int) float64 { return size * r.NormFloat64() }
	}
	// Tokens are random directions, the two are axes.
	embed := bf16(t, vocab, h, func(tok, c int) float64 {
		switch {
		case tok == planted || tok == ask:
			return map[bool]float64{true: 1}[c == tok]
		case c == planted || c == ask || tok == blank:
			return 0
		}
		return r.NormFloat64()
	})
	zero := func(rows, cols int) backend.Weight { return bf16(t, rows, cols, func(int, int) float64 { return 0 }) }
	hc := &backend.HyperConnection{Norm: zero(4, h), Down: zero(64, 4*h), Up: zero(4*h, 64), Eps: 1e-6}
	index := make([]float64, id) // beyond the rotated values
	for i := 64; i < id; i++ {
		index[i] = r.NormFloat64()
	}
	key := make([]float64, hd)
	for i := 64; i < hd; i++ {
		key[i] = 3 * r.NormFloat64()
	}
	// axis gives columns of the two tokens and noise elsewhere.
	axis := func(size float64, at int, v func(row int) float64) func(int, int) float64 {
		return func(row, c int) float64 {
			if c == at {
				return v(row)
			}
			return size * r.NormFloat64()
		}
	}
	value := make([]float64, kv*hd)
	for i := range value {
		value[i] = r.NormFloat64()
	}
	qsa := &backend.QSAWeights{
		QueryGate: bf16(t, heads*2*hd, h, axis(0.05, ask, func(row int) float64 {
			if row%(2*hd) < hd {
				return key[row%(2*hd)]
			}
			return 0
		})),
		Key:       bf16(t, kv*hd, h, axis(0.05, planted, func(row int) float64 { return key[row%hd] })),
		Value:     bf16(t, kv*hd, h, axis(0.02, planted, func(row int) float64 { return value[row] })),
		Out:       bf16(t, h, heads*hd, noise(1/math.Sqrt(heads*hd))),
		QueryNorm: bf16(t, 1, hd, func(int, int) float64 { return 1 }), KeyNorm: zero(1, hd),
		Index: bf16(t, 5*id, h, func(row, c int) float64 {
			if row < 4*id && c == ask || row >= 4*id && c == planted {
				return 10 * index[row%id]
			}
			return 0.05 * r.NormFloat64()
		}),
		IndexQueryNorm: zero(1, id), IndexKeyNorm: zero(1, id),
		Heads: heads, KVHeads: kv, HeadDim: hd, IndexHeads: 4, IndexDim: id, Blocks: blocks, Ratio: 4, Eps: 1e-6,
		Rotary: backend.Rotary{Dim: 64, Theta: 1e7, Sections: [3]int{11, 11, 10}},
	}
	head := bf16(t, vocab, h, noise(1))
	// The answer: all attention on the planted value, gates at a half.
	scale := 0.5 * math.Sqrt(h) // what the mix makes of an axis
	mixed := make([]float64, h)
	for c := range mixed {
		row := make([]float64, heads*hd)
		qsa.Out.Decode(row, c)
		for i, w := range row {
			v := value[i/hd/(heads/kv)*hd+i%hd]
			mixed[c] += w * 0.5 * scale * v
		}
	}
	answer, best := -1, math.Inf(-1)
	for tok := range vocab {
		row, sum := make([]float64, h), 0.0
		head.Decode(row, tok)
		for c, w := range row {
			sum += w * mixed[c]
		}
		if sum > best {
			answer, best = tok, sum
		}
	}

	states := []backend.State{
		{Name: "keys", Kind: backend.PerToken, Store: backend.StoreKV, Width: kv * hd, Group: hd},
		{Name: "values", Kind: backend.PerToken, Store: backend.StoreKV, Width: kv * hd, Group: hd},
		{Name: "raw", Kind: backend.PerToken, Store: backend.StoreIndex, Width: id},
		{Name: "index", Kind: backend.PerBlock, Store: backend.StoreIndex, Width: id, Ratio: 4},
		{Name: "positions", Kind: backend.PerToken, Store: backend.StoreInt, Width: 3},
	}
	program := func(p backend.Pass, fill bool) *backend.Program {
		x := backend.Streams{X: 0, Inject: 1}
		ops := []backend.Op{
			backend.Embed{W: embed, X: x},
			backend.Mix{W: hc, X: x, Out: 2},
			backend.QSA{W: qsa, In: 2, Out: 3, Keys: 0, Values: 1, RawIndex: 2, IndexKeys: 3, Positions: 4, AppendOnly: fill},
		}
		if !fill {
			ops = append(ops, backend.Head{W: &backend.HeadWeights{W: head, IDs: vocab}, In: 3})
		}
		return &backend.Program{Pass: p, Ops: ops, Bufs: []backend.BufSpec{
			{Name: "streams", Width: 4 * h}, {Name: "inject", Width: 4}, {Name: "mix", Width: h}, {Name: "out", Width: h},
		}}
	}
	for _, n := range []int{31_000, 200_000} {
		for _, at := range []int{-1, 4*blocks + 50, n / 2, n - 5000} {
			for _, way := range []struct {
				rows int // of the last chunk
				kv   backend.Cache
			}{{1, backend.CacheBF16}, {300, backend.CacheBF16}, {300, backend.CacheFP8}} {
				t.Run(fmt.Sprintf("%d at %d, %d rows, %v", n, at, way.rows, way.kv), func(t *testing.T) {
					d := scattered(t, device.Options{States: states, Lanes: 1, Tokens: n + 8, KV: way.kv})
					defer d.Close()
					const rows = 512
					fill := compiled(t, d, program(backend.Pass{Kind: backend.Prefill, Lanes: 1, Rows: rows}, true))
					pass := backend.Pass{Kind: backend.Decode, Lanes: 1, Rows: 1}
					if way.rows > 1 {
						pass = backend.Pass{Kind: backend.Prefill, Lanes: 1, Rows: way.rows}
					}
					last := compiled(t, d, program(pass, false))
					if slow, ok := d.Slow(last); way.rows > 1 && (!ok || slices.Contains(slow, "qsa 0")) {
						t.Fatalf("on the kernels of decoding: %v", slow)
					}
					tokens := make([]int32, n+1)
					for i := range tokens {
						tokens[i] = int32(10 + r.IntN(vocab-10))
					}
					if at >= 0 {
						tokens[at] = planted
					}
					tokens[n] = ask
					first := n + 1 - way.rows
					for p := 0; p < first; p += rows {
						m := min(rows, first-p)
						launched(t, d, fill, backend.LaneRows{Tokens: tokens[p : p+m], Positions: model.Positions(p, m)})
					}
					trace := &backend.Trace{}
					got := launched(t, d, last, backend.LaneRows{Tokens: tokens[first:], Positions: model.Positions(first, way.rows), Want: backend.WantLogits, Trace: trace}).Lanes[0]
					line := trace.Selected[0][way.rows-1]
					selected := 0
					for _, on := range line {
						if on {
							selected++
						}
					}
					if want := 4*blocks + (n+1)%4; selected != want || len(line) != n+1 {
						t.Errorf("%d tokens of %d are selected, want %d", selected, len(line), want)
					}
					pick := got.Picks[len(got.Picks)-1]
					if at < 0 {
						if int(pick) == answer {
							t.Error("the answer comes without its token")
						}
						return
					}
					if !line[at] {
						t.Error("the block is not selected")
					}
					if int(pick) != answer {
						logits := got.Logits[len(got.Logits)-1]
						t.Errorf("token %d wins with %g, want %d, which has %g", pick, logits[pick], answer, logits[answer])
					}
				})
			}
		}
	}

	// Where there is room for few tokens one kernel makes queries, scores and selections, elsewhere two: the same bits, whatever a lane's length and company.
	for _, way := range []struct {
		lengths []int
		kv      backend.Cache
	}{{[]int{2300}, backend.CacheBF16}, {[]int{8190, 30, 2046, 5001}, backend.CacheFP8}, {[]int{2050, 11000, 2051, 4097, 8192, 2047, 3000, 6666}, backend.CacheBF16}} {
		t.Run(fmt.Sprintf("lanes of %v tokens, %v", way.lengths, way.kv), func(t *testing.T) {
			var want [][]float32
			for _, room := range []int{20_000, 11_500} {
				d := scattered(t, device.Options{States: states, Lanes: len(way.lengths), Tokens: room, KV: way.kv})
				fill := compiled(t, d, program(backend.Pass{Kind: backend.Prefill, Lanes: 1, Rows: 512}, true))
				last := compiled(t, d, program(backend.Pass{Kind: backend.Decode, Lanes: len(way.lengths), Rows: len(way.lengths)}, false))
				token := func(lane, at int) int32 {
					if lane%4 == 1 && at%9 != 0 {
						return blank // most scores are zero then
					}
					return int32(10 + (at*at*7+at*13+lane*101)%(vocab-10))
				}
				for lane, n := range way.lengths {
					for p := 0; p < n; p += 512 {
						tokens := make([]int32, min(512, n-p))
						for i := range tokens {
							tokens[i] = token(lane, p+i)
						}
						launched(t, d, fill, backend.LaneRows{Lane: lane, Tokens: tokens, Positions: model.Positions(p, len(tokens))})
					}
				}
				for step := range 6 {
					var in []backend.LaneRows
					for lane, n := range way.lengths {
						in = append(in, backend.LaneRows{Lane: lane, Tokens: []int32{token(lane, n+step)}, Positions: model.Positions(n+step, 1), Want: backend.WantLogits})
					}
					for lane, res := range launched(t, d, last, in...).Lanes {
						if room == 20_000 {
							want = append(want, slices.Clone(res.Logits[0]))
						} else if at := step*len(way.lengths) + lane; !slices.Equal(res.Logits[0], want[at]) {
							t.Errorf("step %d, lane %d: other bits with less room", step, lane)
						}
					}
				}
				d.Close()
			}
		})
	}
}
