package modeltest

import (
	"math/rand/v2"
	"slices"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/model"
)

// PoolOptions are what a test of pages asks of a device; the members mean what they do for cpu.Options. Results must not depend on
// chunks or company in a single bit.
type PoolOptions struct {
	States                                     []backend.State
	Lanes, Saved, Tokens, Verify, Carry, Pages int
	KV                                         backend.Cache
}

// PagesShared checks a device whose results are exact: images that share pages go on independently: random prompts, rounds, cuts, saves, restores and resets over several pages, on a pool
// that they fill, give what sequences give alone, and hold as few pages as their tokens and what they share allow.
func PagesShared(t *testing.T, m *model.Model, open func(testing.TB, PoolOptions) backend.Device) {
	const lanes, saved, most, chunk = 2, 3, 300, 96
	perImage := (most + backend.PageTokens - 1) / backend.PageTokens
	for seed := range uint64(3) {
		rng := rand.New(rand.NewPCG(seed, 31))
		dev := open(t, PoolOptions{States: m.States, Lanes: lanes, Saved: saved, Tokens: most, Verify: 6, Carry: chunk + 6, KV: backend.Cache(seed % 3)})
		alone := open(t, PoolOptions{States: m.States, Lanes: 1, Tokens: most, Verify: 6, Carry: most, KV: backend.Cache(seed % 3)})
		r, plain := model.NewRunner(m, dev, chunk), model.NewRunner(m, alone, most)
		images := map[backend.Image][]int32{}
		tokens := func(n int) []int32 {
			ids := make([]int32, n)
			for i := range ids {
				ids[i] = int32(rng.IntN(480))
			}
			return ids
		}
		following := func(lane int, next []int32) []int32 { // the tokens after each row that the drafter has not seen
			at := dev.Lengths(backend.Lane(lane))
			return slices.Concat(images[backend.Lane(lane)], next)[at.Drafter+1 : at.Target+1]
		}
		extend := func(lane int, ids []int32) []float32 {
			t.Helper()
			if len(images[backend.Lane(lane)]) > 0 {
				if err := r.Seed(lane, following(lane, ids)); err != nil {
					t.Fatal(err)
				}
			}
			res, err := r.Prompt(backend.LaneRows{Lane: lane, Tokens: ids, Want: backend.WantLogits})
			if err != nil {
				t.Fatal(err)
			}
			images[backend.Lane(lane)] = append(slices.Clone(images[backend.Lane(lane)]), ids...)
			return res.Logits[len(res.Logits)-1]
		}
		image := func(i int) backend.Image {
			if i < lanes {
				return backend.Lane(i)
			}
			return backend.Saved(i - lanes)
		}
		for range 60 {
			lane := rng.IntN(lanes)
			have := len(images[backend.Lane(lane)])
			switch rng.IntN(5) {
			case 0:
				if err := dev.Reset(backend.Lane(lane)); err != nil {
					t.Fatal(err)
				}
				delete(images, backend.Lane(lane))
			case 1, 2:
				dst, src := image(rng.IntN(lanes+saved)), image(rng.IntN(lanes+saved))
				if err := dev.Move(dst, src); err != nil {
					t.Fatal(err)
				}
				images[dst] = images[src]
			case 3:
				n := 1 + rng.IntN(150)
				if rng.IntN(2) == 0 { // to the end of a page, where the drafter's rows are still missing
					n = backend.PageTokens - have%backend.PageTokens
				}
				if have+n+6 <= most {
					extend(lane, tokens(n))
				}
			default: // a round that is cut
				if have == 0 || have+6 > most {
					continue
				}
				next := tokens(1 + rng.IntN(6))
				if _, _, err := r.Draft(lane, following(lane, next), 1+rng.IntN(5), backend.WantLast); err != nil {
					t.Fatal(err)
				}
				if _, err := r.Launch(backend.Verify, &backend.Control{Lanes: []backend.LaneRows{
					{Lane: lane, Tokens: next, Positions: model.Positions(have, len(next)), Want: backend.WantAll},
				}}); err != nil {
					t.Fatal(err)
				}
				n := 1 + rng.IntN(len(next))
				if err := dev.Commit(lane, n); err != nil {
					t.Fatal(err)
				}
				images[backend.Lane(lane)] = append(slices.Clone(images[backend.Lane(lane)]), next[:n]...)
			}
			used, all := dev.(backend.Paged).Pages()
			if all != (lanes+saved)*perImage || used > all {
				t.Fatalf("%d of %d pages", used, all)
			}
		}
		// What every image has become: its continuation, and its drafts, are those of the sequence alone.
		for i := range lanes + saved {
			ids := images[image(i)]
			if len(ids) == 0 || len(ids)+6 > most {
				continue
			}
			if err := dev.Move(backend.Lane(0), image(i)); err != nil {
				t.Fatal(err)
			}
			images[backend.Lane(0)] = ids
			next := tokens(3)
			got := extend(0, next)
			gotDrafts, gotLogits, err := r.Draft(0, next[:1], 3, backend.WantLogits)
			if err != nil {
				t.Fatal(err)
			}
			if err := alone.Reset(backend.Lane(0)); err != nil {
				t.Fatal(err)
			}
			res, err := plain.Prompt(backend.LaneRows{Tokens: slices.Concat(ids, next), Want: backend.WantLogits})
			if err != nil {
				t.Fatal(err)
			}
			wantDrafts, wantLogits, err := plain.Draft(0, next[:1], 3, backend.WantLogits)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got, res.Logits[0]) || !slices.Equal(gotDrafts, wantDrafts) || !slices.EqualFunc(gotLogits, wantLogits, slices.Equal[[]float32]) {
				t.Errorf("seed %d: image %d of %d tokens: not the bits of the sequence alone", seed, i, len(ids))
			}
		}
		for i := range lanes + saved {
			if err := dev.Reset(image(i)); err != nil {
				t.Fatal(err)
			}
		}
		if used, _ := dev.(backend.Paged).Pages(); used != 0 {
			t.Errorf("seed %d: %d pages are held by empty images", seed, used)
		}
		dev.Close()
		alone.Close()
	}
}

// PagesCount checks what sharing counts: of 1,000 tokens without a drafter 15 pages are shared and one is copied; a pool that is used up
// refuses without changing anything, and gives when pages come back.
func PagesCount(t *testing.T, f Folder, open func(testing.TB, PoolOptions) backend.Device) {
	c, ck := OpenCheckpoint(t, f.Dir+"/checkpoint")
	m, err := model.Bind(c, ck, model.Options{IDs: f.IDs})
	if err != nil {
		t.Fatal(err)
	}
	dev := open(t, PoolOptions{States: m.States, Lanes: 2, Saved: 2, Tokens: 1024, Verify: 2, Pages: 18})
	defer dev.Close()
	r := model.NewRunner(m, dev, 512)
	held := func(want int) {
		t.Helper()
		if used, all := dev.(backend.Paged).Pages(); used != want || all != 18 {
			t.Errorf("%d of %d pages, want %d of 18", used, all, want)
		}
	}
	feed := func(lane, n int) error {
		ids := make([]int32, n)
		for i := range ids {
			ids[i] = int32(i*i%400 + 20)
		}
		_, err := r.Prompt(backend.LaneRows{Lane: lane, Tokens: ids})
		return err
	}
	if err := feed(0, 1000); err != nil {
		t.Fatal(err)
	}
	held(16)
	if err := dev.Move(backend.Saved(0), backend.Lane(0)); err != nil {
		t.Fatal(err)
	}
	held(17)
	if err := dev.Move(backend.Saved(1), backend.Saved(0)); err != nil {
		t.Fatal(err)
	}
	held(18)
	if err := feed(1, 1); err == nil {
		t.Error("a page beyond the pool")
	}
	if err := dev.Move(backend.Lane(1), backend.Saved(0)); err == nil {
		t.Error("a copied page beyond the pool")
	}
	if n := dev.Lengths(backend.Lane(1)).Target; n != 0 {
		t.Errorf("%d tokens after refusals", n)
	}
	held(18)
	if err := feed(0, 24); err != nil { // in pages it has
		t.Error(err)
	}
	if err := dev.Reset(backend.Saved(1)); err != nil {
		t.Fatal(err)
	}
	held(17)
	if err := dev.Move(backend.Lane(1), backend.Saved(0)); err != nil {
		t.Error(err)
	}
	held(18)
	for _, i := range []backend.Image{backend.Lane(0), backend.Saved(0), backend.Lane(1)} {
		if err := dev.Reset(i); err != nil {
			t.Fatal(err)
		}
	}
	held(0)
}

// PagesPart checks that images may part: at the end of a page the drafter's last row is still missing, and it depends on the token after it: images that part there do not
// share the page.
func PagesPart(t *testing.T, m *model.Model, open func(testing.TB, PoolOptions) backend.Device) {
	dev := open(t, PoolOptions{States: m.States, Lanes: 3, Tokens: 256, Verify: 2, Carry: 256})
	defer dev.Close()
	r := model.NewRunner(m, dev, 256)
	ids := make([]int32, 128)
	for i := range ids {
		ids[i] = int32(i*i%400 + 20)
	}
	feed := func(lane int, ids ...int32) {
		t.Helper()
		if _, err := r.Prompt(backend.LaneRows{Lane: lane, Tokens: ids}); err != nil {
			t.Fatal(err)
		}
	}
	feed(0, ids...)
	if err := dev.Move(backend.Lane(1), backend.Lane(0)); err != nil {
		t.Fatal(err)
	}
	if used, _ := dev.(backend.Paged).Pages(); used != 3 {
		t.Errorf("two images of 128 tokens, the last one not drafted, hold %d pages, want 3", used)
	}
	feed(0, 7, 8, 9)
	feed(1, 300, 8, 9)
	_, got, err := r.Draft(0, []int32{5}, 2, backend.WantLogits)
	if err != nil {
		t.Fatal(err)
	}
	feed(2, slices.Concat(ids, []int32{7, 8, 9})...)
	_, want, err := r.Draft(2, []int32{5}, 2, backend.WantLogits)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.EqualFunc(got, want, slices.Equal[[]float32]) {
		t.Error("an image's drafts depend on what another made of the same beginning")
	}
}
