package optest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"ninfer/internal/backend"
)

// chunks: a prompt gives the same whatever the chunks, and decoding and verifying give what a prompt gives.
func chunks(t *testing.T, dev Backend) {
	for _, s := range dev.shapes() {
		for i, f := range dev.formats(s, 3) {
			t.Run(fmt.Sprintf("%s/%v", s.Name, f), func(t *testing.T) {
				m := NewModel(s, f, uint64(i)+40)
				ids := m.tokens(rand.New(rand.NewPCG(uint64(i), 9)), 67)
				r := dev.runner(t, m, nil)
				want := r.prompt(0, len(ids), ids)
				wantDrafts := r.drafts(0, 3, 5)
				sizes := []int{3}
				if i == 0 {
					sizes = []int{1, 3, 64}
				}
				for _, chunk := range sizes {
					r := dev.runner(t, m, nil)
					dev.same(t, fmt.Sprintf("chunks of %d", chunk), r.prompt(1, chunk, ids), want)
					dev.same(t, fmt.Sprintf("drafts after chunks of %d", chunk), r.drafts(1, 3, 5), wantDrafts)
				}
				// Decode some, then verify the rest in passes of 1 to 6 rows.
				r = dev.runner(t, m, nil)
				got := r.prompt(2, 30, ids[:30])
				for _, id := range ids[30:46] {
					r.seed(2, []int32{id})
					got = append(got, r.launch(backend.Decode, r.text(2, backend.WantLogits, id))[0].Logits...)
				}
				rest := ids[46:]
				for n := 1; len(rest) > 0; n++ {
					part := rest[:min(n, len(rest))]
					r.seed(2, part[:1])
					got = append(got, r.launch(backend.Verify, r.text(2, backend.WantLogitsAll, part...))[0].Logits...)
					r.seed(2, part[1:])
					rest = rest[len(part):]
				}
				dev.same(t, "decoding and verifying", got, want)
				dev.same(t, "drafts after them", r.drafts(2, 3, 5), wantDrafts)
			})
		}
	}
}

// lanes: what a lane gets does not depend on its company.
func lanes(t *testing.T, dev Backend) {
	for _, s := range dev.shapes() {
		f := dev.formats(s, 1)[0]
		t.Run(s.Name, func(t *testing.T) {
			m := NewModel(s, f, 60)
			rng := rand.New(rand.NewPCG(60, 10))
			var ids [3][]int32
			var want [3][][]float32
			alone := dev.runner(t, m, nil)
			for l := range ids {
				ids[l] = m.tokens(rng, 20+7*l)
				want[l] = alone.prompt(l, 64, ids[l])
			}
			r := dev.runner(t, m, nil)
			together := func(kind backend.Kind, want backend.Want, order []int, ns ...int) (out [3][][]float32) {
				var rows []backend.LaneRows
				for i, l := range order {
					at := r.dev.Lengths(backend.Lane(l)).Target
					rows = append(rows, r.text(l, want, ids[l][at:at+ns[i]]...))
				}
				for i, res := range r.launch(kind, rows...) {
					out[order[i]] = res.Logits
				}
				return out
			}
			var got [3][][]float32
			note := func(part [3][][]float32) {
				for l := range part {
					got[l] = append(got[l], part[l]...)
				}
			}
			note(together(backend.Prefill, backend.WantLogitsAll, []int{2, 0, 1}, 13, 5, 8))
			for range 4 {
				note(together(backend.Decode, backend.WantLogits, []int{0, 1, 2}, 1, 1, 1))
			}
			note(together(backend.Verify, backend.WantLogitsAll, []int{1, 2}, 6, 2))
			note(together(backend.Verify, backend.WantLogitsAll, []int{0, 1, 2}, 3, 1, 5))
			for l := range got {
				dev.same(t, fmt.Sprintf("lane %d", l), got[l], want[l][:len(got[l])])
			}
		})
	}
}

// rounds: random rounds of drafting, verifying, cutting, saving, restoring and resetting leave the state of a plain prompt. Every n from
// none to all of the rows is kept.
func rounds(t *testing.T, dev Backend) {
	for _, s := range dev.shapes() {
		for seed := range uint64(6) {
			all := dev.formats(s, 9)
			f := all[int(seed)%len(all)]
			t.Run(fmt.Sprintf("%s/%d", s.Name, seed), func(t *testing.T) {
				m := NewModel(s, f, seed+80)
				rng := rand.New(rand.NewPCG(seed, 11))
				r := dev.runner(t, m, nil)
				ids := m.tokens(rng, 3+rng.IntN(20))
				r.prompt(0, 7, ids)
				lane := 0
				var saved [2][]int32
				for range 14 {
					if len(ids) > 70 {
						break
					}
					slot := rng.IntN(2)
					switch rng.IntN(6) {
					case 0:
						r.move(backend.Saved(slot), backend.Lane(lane))
						saved[slot] = slices.Clone(ids)
					case 1: // go back, on another lane, which holds something else
						if saved[slot] == nil {
							continue
						}
						lane = (lane + 1) % 3
						r.move(backend.Lane(lane), backend.Saved(slot))
						ids = slices.Clone(saved[slot])
					case 2: // begin anew
						if rng.IntN(3) > 0 {
							continue
						}
						if err := r.dev.Reset(backend.Lane(lane)); err != nil {
							t.Fatal(err)
						}
						ids = m.tokens(rng, 1+rng.IntN(9))
						r.prompt(lane, 4, ids)
					default:
						k := rng.IntN(6)
						round := m.tokens(rng, k+1)
						n := rng.IntN(k + 2)
						if rng.IntN(3) > 0 {
							// Drafting takes the round's first token as given: at least that one is kept.
							at := r.dev.Lengths(backend.Lane(lane))
							following := slices.Concat(ids[at.Drafter+1:], round[:1])
							if k > 0 {
								r.drafts(lane, k, following...)
							} else {
								r.seed(lane, following)
							}
							n = max(1, n)
						}
						r.launch(backend.Verify, r.text(lane, backend.WantAll, round...))
						if err := r.dev.Commit(lane, n); err != nil {
							t.Fatal(err)
						}
						ids = append(ids, round[:n]...)
					}
				}
				at := r.dev.Lengths(backend.Lane(lane))
				if at.Target != len(ids) {
					t.Fatalf("length %d after committing %d tokens", at.Target, len(ids))
				}
				last := m.tokens(rng, 1)
				plain := dev.runner(t, m, nil)
				all := append(slices.Clone(ids), last...)
				want := plain.prompt(0, 100, all)
				r.seed(lane, slices.Concat(ids[at.Drafter+1:], last))
				dev.same(t, "next token", r.launch(backend.Decode, r.text(lane, backend.WantLogits, last...))[0].Logits, want[len(want)-1:])
				dev.same(t, "drafts", r.drafts(lane, 3, 4), plain.drafts(0, 3, 4))
			})
		}
	}
}

func (r *runner) move(dst, src backend.Image) {
	r.t.Helper()
	if err := r.dev.Move(dst, src); err != nil {
		r.t.Fatal(err)
	}
}

// refuses: what does not fit is an error, and the device goes on where nothing was launched.
func refuses(t *testing.T, dev Backend) {
	m := NewModel(dev.shapes()[0], dev.formats(dev.shapes()[0], 1)[0], 1)
	r := dev.runner(t, m, nil)
	r.prompt(0, 10, []int32{1, 2, 3, 4, 5})
	bad := func(name string, kind backend.Kind, lanes ...backend.LaneRows) {
		t.Helper()
		if _, err := r.try(kind, lanes...); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	row := func(lane int) backend.LaneRows { return r.text(lane, backend.WantLast, 1) }
	bad("lane outside", backend.Decode, backend.LaneRows{Lane: 3, Tokens: []int32{1}, Positions: make([][3]int32, 1)})
	bad("lane twice", backend.Decode, row(0), row(0))
	bad("no positions", backend.Decode, backend.LaneRows{Tokens: []int32{1}})
	bad("more rows to verify than made for", backend.Verify, r.text(0, backend.WantLast, 1, 2, 3, 4, 5, 6, 7))
	bad("more tokens than an image has", backend.Prefill, r.text(0, backend.WantNone, make([]int32, 96)...))
	bad("no such token", backend.Decode, r.text(0, backend.WantNone, int32(m.Shape.Vocab)))
	bad("negative token", backend.Decode, r.text(0, backend.WantNone, -1))
	media := r.text(0, backend.WantNone, 1)
	media.Media = [][]float32{make([]float32, m.Shape.H+1)}
	bad("media row too long", backend.Decode, media)
	bad("chain without a draft", backend.Draft, backend.LaneRows{Lane: 1, Tokens: []int32{1}, Chain: true})
	bad("drafts without carried rows", backend.Draft, backend.LaneRows{Lane: 1, Tokens: []int32{1}})
	if err := r.dev.Commit(0, 1); err == nil {
		t.Error("commit without a verify pass: accepted")
	}
	if err := r.dev.Commit(7, 0); err == nil {
		t.Error("commit of no lane: accepted")
	}
	if err := r.dev.Move(backend.Saved(2), backend.Lane(0)); err == nil {
		t.Error("move to no image: accepted")
	}
	if err := r.dev.Reset(backend.Saved(9)); err == nil {
		t.Error("reset of no image: accepted")
	}
	if _, err := r.dev.Wait(1 << 40); err == nil {
		t.Error("wait for no launch: accepted")
	}
	r.launch(backend.Verify, r.text(0, backend.WantLast, 1, 2, 3))
	if err := r.dev.Commit(0, 4); err == nil {
		t.Error("commit of more rows than verified: accepted")
	}
	if err := r.dev.Commit(0, 2); err != nil {
		t.Error(err)
	}
	if err := r.dev.Commit(0, 3); err == nil {
		t.Error("commit raised: accepted")
	}
	if at := r.dev.Lengths(backend.Lane(0)); at.Target != 7 {
		t.Errorf("length %d after 5 tokens and 2 of 3 verified", at.Target)
	}
}
