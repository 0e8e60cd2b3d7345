package device_test

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/optest"
	"ninfer/internal/model"
	"ninfer/internal/num"
)

// Lists of likely ids are what sorting the logits of the same rows gives, over one segment of ids and over many, with ties; picks are
// theirs too, and logits can be recalled until the next launch.
func TestLikely(t *testing.T) {
	open(t, device.Options{}).Close()
	const h, rows = 256, 3
	for _, v := range []struct{ vocab, ids int }{{300, 290}, {kernels.LikelyIDs, kernels.LikelyIDs}, {5000, 4999}, {100_000, 99_000}} {
		r := rand.New(rand.NewPCG(uint64(v.vocab), 2))
		embed := optest.Weight(r, num.BF16, 300, h)
		head := bf16(t, v.vocab, h, func(row, c int) float64 { // rows come twice, far apart: their logits tie
			z := uint64(row%(v.vocab/2)*h+c+1) * 0x9E3779B97F4A7C15
			z = (z ^ z>>29) * 0xBF58476D1CE4E5B9
			return float64(z>>40)/(1<<23) - 1
		})
		hc := &backend.HyperConnection{Norm: optest.Weight(r, num.BF16, 4, h), Down: optest.Weight(r, num.BF16, 64, 4*h), Up: optest.Weight(r, num.BF16, 4*h, 64), Eps: 1e-6}
		x := backend.Streams{X: 0, Inject: 1}
		program := &backend.Program{
			Pass: backend.Pass{Kind: backend.Verify, Lanes: 2, Rows: 2 * rows},
			Bufs: []backend.BufSpec{{Name: "streams", Width: 4 * h}, {Name: "inject", Width: 4}, {Name: "mix", Width: h}},
			Ops:  []backend.Op{backend.Embed{W: embed, X: x}, backend.Mix{W: hc, X: x, Out: 2}, backend.Head{W: &backend.HeadWeights{W: head, IDs: v.ids}, In: 2}},
		}
		for _, plain := range []bool{true, false} {
			d := open(t, device.Options{Lanes: 2, Tokens: 64, Verify: rows, Plain: plain})
			st := compiled(t, d, program)
			launch := func(wants ...backend.Want) []backend.LaneResult {
				var lanes []backend.LaneRows
				for l, w := range wants {
					in := backend.LaneRows{Lane: l, Positions: model.Positions(0, rows), Want: w}
					for i := range rows {
						in.Tokens = append(in.Tokens, int32(7+40*l+i))
					}
					if err := d.Reset(backend.Lane(l)); err != nil {
						t.Fatal(err)
					}
					lanes = append(lanes, in)
				}
				return launched(t, d, st, lanes...).Lanes
			}
			var logits [2][][]float32
			var picks [2][]int32
			for l, res := range launch(backend.WantLogitsAll, backend.WantLogitsAll) {
				picks[l] = slices.Clone(res.Picks)
				for _, row := range res.Logits {
					logits[l] = append(logits[l], slices.Clone(row))
				}
			}
			for turn := range 4 { // captured from the second one on
				res := launch(backend.WantLikelyAll, []backend.Want{backend.WantAll, backend.WantLikely}[turn%2])
				if !slices.Equal(res[0].Picks, picks[0]) || turn%2 == 0 && !slices.Equal(res[1].Picks, picks[1]) || len(res[0].Logits) > 0 || len(res[0].Likely) != rows {
					t.Fatalf("%d ids, plain %v: picks %v and %v, want %v", v.ids, plain, res[0].Picks, res[1].Picks, picks)
				}
				for i, list := range res[0].Likely {
					var want []backend.Likely
					for id, x := range logits[0][i][:v.ids] {
						want = append(want, backend.Likely{Value: num.FromBF16(num.ToBF16(x)), ID: int32(id)})
					}
					slices.SortStableFunc(want, func(a, b backend.Likely) int { return cmp.Compare(b.Value, a.Value) })
					want = want[:min(len(want), kernels.LikelyIDs)]
					slices.SortFunc(want, func(a, b backend.Likely) int { return cmp.Compare(a.ID, b.ID) })
					if !slices.Equal(list, want) {
						t.Fatalf("%d ids, plain %v, row %d: %v, want %v", v.ids, plain, i, list, want)
					}
				}
				if turn%2 == 1 {
					if got, err := res[1].Recall(0); err != nil || !slices.Equal(got, logits[1][rows-1]) {
						t.Errorf("%d ids, plain %v: recalled logits differ: %v", v.ids, plain, err)
					}
				}
				recall := res[0].Recall
				if got, err := recall(1); err != nil || !slices.Equal(got, logits[0][1]) {
					t.Errorf("%d ids, plain %v: recalled logits differ: %v", v.ids, plain, err)
				}
				if turn == 3 {
					launch(backend.WantAll)
					if _, err := recall(1); err == nil {
						t.Error("logits of a launch before the last")
					}
				}
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}
