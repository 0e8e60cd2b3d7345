package model_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"ninfer/internal/arch"
	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

func oracleRunner(m *model.Model, chunk int) *model.Runner {
	return model.NewRunner(m, cpu.NewOracle(cpu.Options{States: m.States, Lanes: 2, Saved: 1, Tokens: 256, Verify: 6, Carry: 128}), chunk)
}

func randomTokens(rng *rand.Rand, n int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(rng.IntN(480))
		if rng.IntN(12) == 0 {
			ids[i] = 6 // resets the n-gram history
		}
	}
	return ids
}

func prompt(t testing.TB, r *model.Runner, lane int, ids []int32) []float32 {
	t.Helper()
	res, err := r.Prompt(backend.LaneRows{Lane: lane, Tokens: ids, Want: backend.WantLogits})
	if err != nil {
		t.Fatal(err)
	}
	return res.Logits[0]
}

// drafts is what the drafter says after the lane's last token and next: it reads everything that an image holds for it.
func drafts(t testing.TB, r *model.Runner, lane int, next int32) [][]float32 {
	t.Helper()
	_, logits, err := r.Draft(lane, []int32{next}, 3, backend.WantLogits)
	if err != nil {
		t.Fatal(err)
	}
	return logits
}

// A prompt gives the same bits whatever the chunks, and decoding gives what a prompt gives.
func TestChunks(t *testing.T) {
	m := modeltest.Micro(t)
	ids := randomTokens(rand.New(rand.NewPCG(1, 1)), 90)
	whole := oracleRunner(m, len(ids))
	want := prompt(t, whole, 0, ids)
	wantDrafts := drafts(t, whole, 0, 77)
	for _, chunk := range []int{1, 3, 64} {
		r := oracleRunner(m, chunk)
		if got := prompt(t, r, 0, ids); !slices.Equal(got, want) {
			t.Errorf("chunk %d: logits differ from one chunk's", chunk)
		}
		if got := drafts(t, r, 0, 77); !slices.EqualFunc(got, wantDrafts, slices.Equal[[]float32]) {
			t.Errorf("chunk %d: drafts differ from one chunk's", chunk)
		}
	}
	r := oracleRunner(m, 64)
	prompt(t, r, 0, ids[:10])
	var last backend.LaneResult
	for _, id := range ids[10:] {
		if err := r.Seed(0, []int32{id}); err != nil {
			t.Fatal(err)
		}
		var err error
		if last, err = r.Prompt(backend.LaneRows{Tokens: []int32{id}, Want: backend.WantLogits}); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(last.Logits[0], want) {
		t.Error("decoding token by token differs from the prompt")
	}
	if got := drafts(t, r, 0, 77); !slices.EqualFunc(got, wantDrafts, slices.Equal[[]float32]) {
		t.Error("drafts after decoding differ from the prompt's")
	}
}

// Random rounds of drafting, verifying, cutting, saving and restoring leave exactly the state of a plain prompt.
func TestRounds(t *testing.T) {
	m := modeltest.Micro(t)
	for seed := range uint64(4) {
		rng := rand.New(rand.NewPCG(seed, 2))
		r := oracleRunner(m, 16)
		ids := randomTokens(rng, 5+rng.IntN(20))
		prompt(t, r, 0, ids)
		var saved []int32
		for range 12 {
			switch rng.IntN(5) {
			case 0: // save the image
				if err := r.Dev.Move(backend.Saved(0), backend.Lane(0)); err != nil {
					t.Fatal(err)
				}
				saved = slices.Clone(ids)
			case 1: // go back, by way of the other lane
				if saved == nil {
					continue
				}
				if err := r.Dev.Move(backend.Lane(1), backend.Saved(0)); err != nil {
					t.Fatal(err)
				}
				if err := r.Dev.Move(backend.Lane(0), backend.Lane(1)); err != nil {
					t.Fatal(err)
				}
				ids = slices.Clone(saved)
			default:
				k := 1 + rng.IntN(5)
				round := randomTokens(rng, k+1)
				at := r.Dev.Lengths(backend.Lane(0))
				following := slices.Concat(ids[at.Drafter+1:], round[:1])
				if _, _, err := r.Draft(0, following, k, backend.WantLast); err != nil {
					t.Fatal(err)
				}
				_, err := r.Launch(backend.Verify, &backend.Control{Lanes: []backend.LaneRows{
					{Tokens: round, Positions: model.Positions(len(ids), k+1), Want: backend.WantAll},
				}})
				if err != nil {
					t.Fatal(err)
				}
				n := 1 + rng.IntN(k+1)
				if err := r.Dev.Commit(0, n); err != nil {
					t.Fatal(err)
				}
				ids = append(ids, round[:n]...)
			}
		}
		next := randomTokens(rng, 2)
		plain := oracleRunner(m, 128)
		want := prompt(t, plain, 0, append(slices.Clone(ids), next[0]))
		wantDrafts := drafts(t, plain, 0, next[1])
		at := r.Dev.Lengths(backend.Lane(0))
		if at.Target != len(ids) {
			t.Fatalf("seed %d: length %d after committing %d tokens", seed, at.Target, len(ids))
		}
		if err := r.Seed(0, slices.Concat(ids[at.Drafter+1:], next[:1])); err != nil {
			t.Fatal(err)
		}
		got, err := r.Prompt(backend.LaneRows{Tokens: next[:1], Want: backend.WantLogits})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got.Logits[0], want) {
			t.Errorf("seed %d: logits differ from the plain prompt's", seed)
		}
		if got := drafts(t, r, 0, next[1]); !slices.EqualFunc(got, wantDrafts, slices.Equal[[]float32]) {
			t.Errorf("seed %d: drafts differ from the plain prompt's", seed)
		}
	}
}

// Every state of the image is declared once and used, and every state that an operation uses is declared: a device moves what is
// declared, so nothing can be kept beside the image.
func TestImageIsComplete(t *testing.T) {
	m := modeltest.Micro(t)
	used := map[backend.StateID]bool{}
	for _, kind := range []backend.Kind{backend.Prefill, backend.Draft} {
		p, err := m.Program(backend.Pass{Kind: kind, Lanes: 1, Rows: 1}, false)
		if err != nil {
			t.Fatal(err)
		}
		for _, op := range p.Ops {
			switch op := op.(type) {
			case backend.GDN:
				used[op.Matrix], used[op.Window] = true, true
			case backend.QSA:
				for _, s := range []backend.StateID{op.Keys, op.Values, op.RawIndex, op.IndexKeys, op.Positions} {
					used[s] = true
				}
			case backend.PLEStart:
				used[op.History] = true
			case backend.PLEJoin:
				used[op.History], used[op.Window] = true, true
			case backend.Stem:
				used[op.Carry], used[op.Positions] = true, true
			case backend.Carry:
				used[op.Out], used[op.Positions] = true, true
			}
		}
	}
	if len(used) != len(m.States) {
		t.Errorf("%d states declared, %d used", len(m.States), len(used))
	}
	for id := range used {
		if int(id) >= len(m.States) {
			t.Errorf("state %d used but not declared", id)
		}
	}
}

func TestBindRefuses(t *testing.T) {
	c, ck := modeltest.OpenCheckpoint(t, modeltest.Folders[0].Dir+"/checkpoint")
	if _, err := model.Bind(c, ck, model.Options{IDs: 513}); err == nil {
		t.Error("more ids than rows accepted")
	}
	if _, err := model.Bind(c, ck, model.Options{Drafter: true, Proposal: true}); err == nil {
		t.Error("missing proposal head accepted")
	}
	gone := arch.LayerPrefix(2) + "linear_attn.in_proj_z.weight"
	z := ck.Tensors[gone]
	delete(ck.Tensors, gone)
	if _, err := model.Bind(c, ck, model.Options{}); err == nil {
		t.Error("missing tensor accepted")
	}
	z.Shape, z.Data = []int{1, 128}, z.Data[:256]
	ck.Tensors[gone] = z
	if _, err := model.Bind(c, ck, model.Options{}); err == nil {
		t.Error("wrong shape accepted")
	}
}
