package device_test

import (
	"fmt"
	"slices"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/model"
)

// Decoding steps that leave records instead of delta-net matrices leave what steps do whose records are folded at once: the same bits of matrices, windows and
// logits, after any number of steps, behind and before a verify pass, one lane or more than the GPU has room for.
func TestStepsBehind(t *testing.T) {
	m := subject(t)
	const steps, others, few, many = 9, 3, 1, 36
	for _, c := range []struct {
		lanes       int
		plain, half bool
	}{{few, false, false}, {few, false, true}, {others, true, false}, {others, true, true}, {others, false, false}, {many, false, false}, {many, false, true}} {
		t.Run(fmt.Sprintf("%d lanes, plain %v, bf16 %v", c.lanes, c.plain, c.half), func(t *testing.T) {
			d := open(t, device.Options{States: m.States, Lanes: 2 * c.lanes, Tokens: 64, Verify: 3, Carry: 64, Few: allFew, Plain: c.plain, BF16State: c.half})
			defer d.Close()
			r := model.NewRunner(m, d, 32)
			at := make([]int, 2*c.lanes)
			// pass runs rows of the even lanes or of the odd ones, which are given the same tokens.
			pass := func(kind backend.Kind, odd, rows, kept int) (lines [][]float32) {
				ctl := &backend.Control{}
				for l := odd; l < len(at); l += 2 {
					tokens := make([]int32, rows)
					for i := range tokens {
						tokens[i] = int32(20 + (37*(at[l]+i)+91*(l/2))%400)
					}
					ctl.Lanes = append(ctl.Lanes, backend.LaneRows{Lane: l, Tokens: tokens, Positions: model.Positions(at[l], rows), Want: backend.WantLogits})
				}
				res, err := r.Launch(kind, ctl)
				if err != nil {
					t.Fatal(err)
				}
				for i := range ctl.Lanes {
					l := ctl.Lanes[i].Lane
					lines = append(lines, slices.Clone(res.Lanes[i].Logits[0]))
					if at[l] += kept; kind == backend.Verify {
						if err := d.Commit(l, kept); err != nil {
							t.Fatal(err)
						}
					}
				}
				return lines
			}
			fixed := func(l int) (out [][]float32) {
				for id, s := range m.States {
					if s.Kind == backend.Fixed && s.Store != backend.StoreInt {
						v, err := d.Values(backend.Lane(l), backend.StateID(id))
						if err != nil {
							t.Fatal(err)
						}
						out = append(out, slices.Clone(v))
					}
				}
				return out
			}
			same := func(what string, even, odd [][]float32) {
				t.Helper()
				if !slices.EqualFunc(even, odd, slices.Equal[[]float32]) {
					t.Fatalf("%s: other bits, off by %.2g", what, worst(distances(t, even, odd)))
				}
			}
			first, most := 1, steps
			switch {
			case testing.Short(): // for tools that slow a GPU down
				first, most = 4, 4
			case c.lanes == many:
				most = 5
			}
			for n := first; n <= most; n++ {
				for l := range at {
					if at[l] = 0; d.Reset(backend.Lane(l)) != nil {
						t.Fatal("reset")
					}
				}
				for _, p := range []struct {
					kind              backend.Kind
					times, rows, kept int
				}{{backend.Decode, n, 1, 1}, {backend.Verify, 1, 3, 1 + n%3}, {backend.Decode, 1 + n%4, 1, 1}, {backend.Prefill, 1, 2, 2}, {backend.Decode, n, 1, 1}} {
					for i := range p.times {
						even, odd := pass(p.kind, 0, p.rows, p.kept), pass(p.kind, 1, p.rows, p.kept)
						same(fmt.Sprintf("%v %d of %d", p.kind, i, p.times), even, odd)
						for l := 1; l < len(at) && p.kind == backend.Decode; l += 2 {
							if err := d.Move(backend.Lane(l), backend.Lane(l)); err != nil { // folds
								t.Fatal(err)
							}
						}
					}
				}
				for l := 0; l < len(at); l += 2 {
					same(fmt.Sprintf("%d steps, lane %d", n, l/2), fixed(l), fixed(l+1))
				}
			}
		})
	}
}

// A lane's steps have the same bits alone and beside any number of others, whose delta rule has kernels of its own.
func TestStepsTogether(t *testing.T) {
	m := subject(t)
	for _, half := range []bool{false, true} {
		for _, n := range []int{2, 3, 5, 6, 8} {
			t.Run(fmt.Sprintf("%d lanes, bf16 %v", n, half), func(t *testing.T) {
				d := open(t, device.Options{States: m.States, Lanes: 2 * n, Tokens: 64, Verify: 3, Carry: 64, Few: allFew, BF16State: half})
				defer d.Close()
				r := model.NewRunner(m, d, 32)
				step := func(at int, which ...int) (lines [][]float32) {
					ctl := &backend.Control{}
					for _, l := range which {
						ctl.Lanes = append(ctl.Lanes, backend.LaneRows{
							Lane: l, Tokens: []int32{int32(20 + (37*at+91*(l%n))%400)}, Positions: model.Positions(at, 1), Want: backend.WantLogits,
						})
					}
					res, err := r.Launch(backend.Decode, ctl)
					if err != nil {
						t.Fatal(err)
					}
					for i := range which {
						lines = append(lines, slices.Clone(res.Lanes[i].Logits[0]))
					}
					return lines
				}
				all := make([]int, n)
				for l := range all {
					all[l] = l
				}
				for at := range 6 {
					together := step(at, all...)
					for l := range n {
						if alone := step(at, n+l)[0]; !slices.Equal(together[l], alone) {
							t.Fatalf("step %d, lane %d: other bits than alone, off by %.2g", at, l, worst(distances(t, together[l:l+1], [][]float32{alone})))
						}
					}
				}
				for l := range n {
					for id, s := range m.States {
						if s.Kind != backend.Fixed || s.Store == backend.StoreInt {
							continue
						}
						a, err := d.Values(backend.Lane(l), backend.StateID(id))
						if err != nil {
							t.Fatal(err)
						}
						a = slices.Clone(a)
						b, err := d.Values(backend.Lane(n+l), backend.StateID(id))
						if err != nil {
							t.Fatal(err)
						}
						if !slices.Equal(a, b) {
							t.Fatalf("lane %d: state %d has other bits than alone", l, id)
						}
					}
				}
			})
		}
	}
}
