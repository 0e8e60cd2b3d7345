package device_test

import (
	"flag"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/model"
)

var sequencesFlag = flag.Int("sequences", 20, "random sequences of rounds")

// Random drafting, verifying, keeping, cancelling, saving and restoring leave what plain decoding of the kept tokens leaves: delta-net
// matrices within 1e-5, the same next token and the same drafts, but for logits a rounding step apart.
func TestRandomSequences(t *testing.T) {
	m := subject(t)
	const room, most = 160, 6
	d := open(t, device.Options{States: m.States, Lanes: 3, Saved: 2, Tokens: room, Verify: most, Carry: room, Few: allFew}) // prompts like single tokens
	defer d.Close()
	r := model.NewRunner(m, d, 32)
	var kept []backend.StateID
	for id, s := range m.States {
		if s.Kind == backend.Fixed && s.Store != backend.StoreInt {
			kept = append(kept, backend.StateID(id))
		}
	}
	fixed := func(i backend.Image) (out [][]float32) {
		for _, id := range kept {
			v, err := d.Values(i, id)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, v)
		}
		return out
	}
	token := func(rng *rand.Rand) int32 {
		if rng.IntN(12) == 0 {
			return 6 // resets the n-gram history
		}
		return int32(rng.IntN(480))
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var state, window float64
	var rounds, cancels, moves, near int
	for seed := range uint64(*sequencesFlag) {
		rng := rand.New(rand.NewPCG(seed, 5))
		lane := int(seed % 2)
		must(d.Reset(backend.Lane(lane)))
		ids := make([]int32, 1+rng.IntN(24))
		for i := range ids {
			ids[i] = token(rng)
		}
		_, err := r.Prompt(backend.LaneRows{Lane: lane, Tokens: ids})
		must(err)
		var saved []int32
		for range 4 + rng.IntN(8) {
			if len(ids) > room-3*most {
				break
			}
			switch rng.IntN(7) {
			case 0:
				must(d.Move(backend.Saved(lane), backend.Lane(lane)))
				saved = slices.Clone(ids)
				moves++
			case 1:
				if saved != nil {
					must(d.Move(backend.Lane(lane), backend.Saved(lane)))
					ids = slices.Clone(saved)
					moves++
				}
			default:
				k := rng.IntN(most)
				round := make([]int32, k+1)
				for i := range round {
					round[i] = token(rng)
				}
				at := d.Lengths(backend.Lane(lane))
				following := slices.Concat(ids[at.Drafter+1:], round[:1])
				if k > 0 {
					_, _, err = r.Draft(lane, following, k, backend.WantLast)
				} else {
					err = r.Seed(lane, following)
				}
				must(err)
				_, err = r.Launch(backend.Verify, &backend.Control{Lanes: []backend.LaneRows{
					{Lane: lane, Tokens: round, Positions: model.Positions(len(ids), k+1), Want: backend.WantAll},
				}})
				must(err)
				n := 1 + rng.IntN(k+1)
				rounds++
				must(d.Commit(lane, n))
				ids = append(ids, round[:n]...)
				if rng.IntN(8) == 0 { // cancelled in the middle of a round without drafts
					_, err = r.Launch(backend.Verify, &backend.Control{Lanes: []backend.LaneRows{
						{Lane: lane, Tokens: round, Positions: model.Positions(len(ids), k+1), Want: backend.WantAll},
					}})
					must(err)
					must(d.Commit(lane, 0))
					cancels++
				}
			}
		}
		// The same tokens one by one.
		must(d.Reset(backend.Lane(2)))
		for i := range ids {
			must(r.Seed(2, ids[i:i+1]))
			_, err = r.Prompt(backend.LaneRows{Lane: 2, Tokens: ids[i : i+1]})
			must(err)
		}
		got, want := fixed(backend.Lane(lane)), fixed(backend.Lane(2))
		for i := range want {
			e := off(got[i], want[i])
			if m.States[kept[i]].Store != backend.StoreMatrix {
				window = max(window, e)
				continue
			}
			state = max(state, e)
			if !(e <= 1e-5) {
				t.Errorf("sequence %d: %s is off by %.2g", seed, m.States[kept[i]].Name, e)
			}
		}
		next := []int32{token(rng), token(rng)}
		at := d.Lengths(backend.Lane(lane))
		must(r.Seed(lane, slices.Concat(ids[at.Drafter+1:], next[:1])))
		must(r.Seed(2, next[:1]))
		after := func(lane int) ([]float32, [][]float32) {
			res, err := r.Prompt(backend.LaneRows{Lane: lane, Tokens: next[:1], Want: backend.WantLogits})
			must(err)
			line := slices.Clone(res.Logits[0])
			_, drafts, err := r.Draft(lane, next[1:], 2, backend.WantLogits)
			must(err)
			return line, drafts
		}
		gotLine, gotDrafts := after(lane)
		wantLine, wantDrafts := after(2)
		for i, pair := range [][2][]float32{{gotLine, wantLine}, {gotDrafts[0], wantDrafts[0]}} {
			if a, b := best(pair[0]), best(pair[1]); a != b {
				gap := float64(pair[1][b] - pair[1][a])
				near++
				if gap > math.Abs(float64(pair[1][b]))/64 {
					t.Errorf("sequence %d: logits %d have %d as the best and not %d, which is better by %g", seed, i, a, b, gap)
				}
			}
		}
	}
	t.Logf("%d sequences of %d rounds, %d cancels, %d moves: matrices within %.2g, windows within %.2g, %d ids a rounding step apart",
		*sequencesFlag, rounds, cancels, moves, state, window, near)
	if *sequencesFlag >= 20 && (cancels == 0 || moves == 0) {
		t.Error("nothing was cancelled or moved")
	}
}

// off is the relative L2 distance.
func off(got, want []float32) float64 {
	var d, n float64
	for i, v := range want {
		e := float64(got[i]) - float64(v)
		d += e * e
		n += float64(v) * float64(v)
	}
	if d == 0 {
		return 0
	}
	return math.Sqrt(d / n)
}

// best is the index of the largest value.
func best(line []float32) int {
	b := 0
	for i, v := range line {
		if v > line[b] {
			b = i
		}
	}
	return b
}

// A chain of drafts gives what its passes give one by one, launched directly and replayed, and so does a verifying pass behind it. A lane alone, whose
// first pass computes its last row only, drafts what it drafts beside others.
func TestChain(t *testing.T) {
	m := subject(t)
	lengths, more, rounds := []int{40, 3, 77}, 4, 4
	const oneByOne, chained, behind = 0, 1, 2
	company, ways := [][]int{{1}, {0, 1, 2}}, []int{chained, behind}
	if testing.Short() { // for tools that slow a GPU down
		lengths, more, rounds, company, ways = []int{8, 3, 5}, 1, 1, company[1:], ways[1:]
	}
	run := func(which []int, way int) (out [][]int32) {
		d := open(t, device.Options{States: m.States, Lanes: 3, Tokens: 192, Verify: 6, Carry: 192})
		defer d.Close()
		r := model.NewRunner(m, d, 128)
		p, err := m.Program(backend.Pass{Kind: backend.Draft, Lanes: 3, Rows: 24}, false)
		if err != nil {
			t.Fatal(err)
		}
		st := compiled(t, d, p)
		if p, err = m.Program(backend.Pass{Kind: backend.Verify, Lanes: 3, Rows: 24}, false); err != nil {
			t.Fatal(err)
		}
		judge := compiled(t, d, p)
		for _, l := range which {
			tokens := make([]int32, lengths[l])
			for i := range tokens {
				tokens[i] = int32(20 + (37*i+91*l)%400)
			}
			if _, err := r.Prompt(backend.LaneRows{Lane: l, Tokens: tokens}); err != nil {
				t.Fatal(err)
			}
		}
		next := make([]int32, 3)
		for round := range rounds {
			first := &backend.Control{}
			var verify backend.Control
			for _, l := range which {
				at := d.Lengths(backend.Lane(l))
				following := make([]int32, at.Target-at.Drafter)
				for i := range following {
					following[i] = int32(30 + (17*i+round)%300)
				}
				next[l] = following[len(following)-1]
				first.Lanes = append(first.Lanes, backend.LaneRows{Lane: l, Tokens: following, Want: backend.WantLast})
			}
			picks := make([][]int32, len(which))
			switch way {
			case behind:
				if _, err := d.Chain(st, first, more); err != nil {
					t.Fatal(err)
				}
			case chained:
				q, err := d.Chain(st, first, more)
				if err != nil {
					t.Fatal(err)
				}
				res, err := d.Wait(q)
				if err != nil {
					t.Fatal(err)
				}
				for i := range which {
					picks[i] = res.Lanes[i].Picks
				}
			default:
				for range more + 1 {
					res := launched(t, d, st, first.Lanes...)
					first = &backend.Control{}
					for i, l := range which {
						id := res.Lanes[i].Picks[0]
						picks[i] = append(picks[i], id)
						first.Lanes = append(first.Lanes, backend.LaneRows{Lane: l, Tokens: []int32{id}, Want: backend.WantLast, Chain: true})
					}
				}
			}
			for i, l := range which {
				at := d.Lengths(backend.Lane(l)).Target
				verify.Lanes = append(verify.Lanes, backend.LaneRows{
					Lane: l, Tokens: slices.Concat(next[l:l+1], picks[i]), Positions: model.Positions(at, more+2), Want: backend.WantAll,
				})
			}
			var res backend.Result
			if way == behind {
				var q backend.Seq
				if picks, q, err = d.Behind(judge, &verify); err != nil {
					t.Fatal(err)
				}
				res, err = d.Wait(q)
			} else {
				res, err = r.Launch(backend.Verify, &verify)
			}
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, picks...)
			for i := range which {
				out = append(out, slices.Clone(res.Lanes[i].Picks))
			}
			for _, l := range which {
				if err := d.Commit(l, 1+(round+l)%(more+2)); err != nil {
					t.Fatal(err)
				}
			}
		}
		return out
	}
	var alone [][]int32
	for _, which := range company {
		want := run(which, oneByOne)
		if alone == nil {
			alone = want
		} else {
			for i, ids := range alone {
				if got := want[3*i+1]; !slices.Equal(got, ids) {
					t.Errorf("lane 1 alone has %v, beside others %v", ids, got)
				}
			}
		}
		for _, way := range ways {
			if got := run(which, way); !slices.EqualFunc(got, want, slices.Equal[[]int32]) {
				t.Errorf("lanes %v, way %d: %v, passes one by one %v", which, way, got, want)
			}
		}
		if len(want[0]) != more+1 || len(want[len(which)]) != more+2 {
			t.Errorf("%d drafts, %d rows", len(want[0]), len(want[len(which)]))
		}
	}
}
