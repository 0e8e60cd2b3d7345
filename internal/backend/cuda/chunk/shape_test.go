package chunk

import (
	"math/rand/v2"
	"testing"
)

// A workspace for the longest pass is enough for every shorter one.
func TestWorkspace(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, a := range []AttentionShape{
		{Heads: 24, KVHeads: 2, HeadDim: 256, IndexHeads: 4, IndexDim: 128, Rotary: 64, Ratio: 4, Blocks: 512},
		{Heads: 2, KVHeads: 1, HeadDim: 256, IndexHeads: 4, IndexDim: 128, Rotary: 64, Ratio: 4, Blocks: 4},
		{Heads: 16, KVHeads: 1, HeadDim: 256, IndexHeads: 4, IndexDim: 128, Rotary: 64, Ratio: 4, Blocks: 512},
	} {
		if err := a.Fits(); err != nil {
			t.Fatal(err)
		}
		if a.tile(false)*a.Heads/a.KVHeads > 48 || a.tile(true)*a.Heads/a.KVHeads > 128 || max(a.tile(false), a.tile(true)) > 15 {
			t.Errorf("%d/%d heads: tiles of %d and %d", a.Heads, a.KVHeads, a.tile(false), a.tile(true))
		}
		for range 2000 {
			rows, context := 1+r.IntN(MaxRows), 1+r.IntN(1<<r.IntN(19))
			room := a.Workspace(rows, context)
			less, shorter := 1+r.IntN(rows), 1+r.IntN(context)
			tile := a.tile(less%2 == 0)
			v := a.selection(0, less, shorter, tile)
			if v.bytes > room {
				t.Fatalf("%d rows of %d tokens need %d bytes, a workspace for %d of %d has %d", less, shorter, v.bytes, rows, context, room)
			}
			if v.ld < (shorter+3)/4 || v.words*32 < (shorter+3)/4 || v.rows%tile != 0 {
				t.Fatalf("%d rows of %d tokens: %+v", less, shorter, v)
			}
		}
	}
	d := DeltaShape{KeyHeads: 16, Heads: 48, Dim: 128, Taps: 4}
	if got, want := d.Workspace(8192), uint64(2*128*16*64*128*2+2*128*48*64*64*2+128*48*2*64*4+128*48*128*4+8192*6144*2); got != want {
		t.Errorf("delta workspace of %d bytes, want %d", got, want)
	}
}

// Shapes without kernels are told before anything is launched.
func TestFits(t *testing.T) {
	for _, d := range []DeltaShape{{1, 3, 64, 4}, {2, 4, 24, 3}, {2, 3, 128, 4}, {0, 3, 128, 4}, {1, 3, 128, 3}} {
		if d.Fits() == nil {
			t.Errorf("%+v fits", d)
		}
	}
	good := AttentionShape{Heads: 24, KVHeads: 2, HeadDim: 256, IndexHeads: 4, IndexDim: 128, Rotary: 64, Ratio: 4, Blocks: 512}
	for i, change := range []func(*AttentionShape){
		func(a *AttentionShape) { a.Heads = 36 }, func(a *AttentionShape) { a.Heads = 25 }, func(a *AttentionShape) { a.HeadDim = 128 }, func(a *AttentionShape) { a.IndexHeads = 2 },
		func(a *AttentionShape) { a.IndexDim = 64 }, func(a *AttentionShape) { a.Rotary = 32 }, func(a *AttentionShape) { a.Ratio = 5 }, func(a *AttentionShape) { a.Blocks = 0 },
		func(a *AttentionShape) { a.KVHeads = 0 },
	} {
		a := good
		change(&a)
		if a.Fits() == nil {
			t.Errorf("change %d: %+v fits", i, a)
		}
	}
}
