package kernels

import (
	"bytes"
	"flag"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"ninfer/internal/backend/cuda/driver"
)

var replays = flag.Int("replays", 2000, "graph replays of TestReplay")

// chain is a few layers of everything the kernels do, each reading what the one before wrote: hyper-connection, a matrix of two formats,
// router, experts. The streams and the last outputs are its result.
type chain struct {
	g      *gpu
	launch []func(pdl bool)
	reset  func()
	result func() []byte
}

func newChain(g *gpu, rng *rand.Rand, r, h, low, experts, topk, inner, layers int, fp8 bool) *chain {
	f := FormatBF16
	if fp8 {
		f = FormatE4M3
	}
	ch := &chain{g: g}
	xw, _ := activations(rng, 4*r, h)
	x := [2]driver.Ptr{g.Upload(xw), g.Poisoned(8 * r * h)}
	first := g.Upload(xw)
	inject := [2]driver.Ptr{g.Upload(make([]float32, 4*r)), g.Poisoned(16 * r)}
	y, mix := g.Upload(make([]uint16, r*h)), g.Poisoned(2*r*h)
	partial, square := g.Poisoned(4*HyperParts*r*(low+4)), g.Poisoned(4*HyperParts*r)
	wide := g.Poisoned(2 * r * (h + 48))
	logits, hs, sl, hid := g.Poisoned(4*r*experts), g.Poisoned(2*r*inner), g.Poisoned(4*r), g.Poisoned(2*r*topk*inner)
	R, H, L, E, K, I := uint32(r), uint32(h), uint32(low), uint32(experts), uint32(topk), uint32(inner)
	add := func(f func(pdl bool)) { ch.launch = append(ch.launch, f) }
	for l := range layers {
		norm := make([]uint16, 4*h)
		for i := range norm {
			norm[i] = bf16(0.1 * rng.NormFloat64())
		}
		down, up := randomMatrix(rng, f, low, 4*h, false).part(g, 0, 0, 0), randomMatrix(rng, f, 4*h, low, false).part(g, 0, 0, 0)
		injW := randomMatrix(rng, FormatBF16, 4, 4*h, false).part(g, 0, 0, 0)
		dn := g.Upload(norm)
		dPlan, dp, err := g.set.Limits.HcDown(fp8, R, H, L)
		g.Check(err)
		dp.X, dp.XOut, dp.Y, dp.Inject, dp.Norm, dp.Down, dp.DownScale, dp.InjW = x[l%2], x[1-l%2], y, inject[l%2], dn, down.W, down.Scale, injW.W
		dp.Partial, dp.Square = partial, square
		add(func(pdl bool) { run(g, dPlan, &dp, pdl) })
		uPlan, up2, err := g.set.Limits.HcUp(fp8, R, H, L)
		g.Check(err)
		up2.X, up2.Norm, up2.Partial, up2.Square, up2.Up, up2.UpScale, up2.Mix, up2.Inject = x[1-l%2], dn, partial, square, up.W, up.Scale, mix, inject[1-l%2]
		add(func(pdl bool) { run(g, uPlan, &up2, pdl) })

		parts := []Part{randomMatrix(rng, f, h, h, false).part(g, wide, h, 0), randomMatrix(rng, FormatBF16, 48, h, false).part(g, wide+driver.Ptr(2*r*h), 48, 0)}
		bf16From := 2
		if fp8 {
			bf16From = 1
		}
		gPlan, gp, err := g.set.Limits.Gemv(f, R, H, parts, bf16From, Tuning{})
		g.Check(err)
		gp.X, gp.XLd = mix, H
		add(func(pdl bool) { run(g, gPlan, &gp, pdl) })

		router, gate, upW := randomMatrix(rng, f, experts, h, false).part(g, 0, 0, 0), randomMatrix(rng, f, inner, h, false).part(g, 0, 0, 0), randomMatrix(rng, f, inner, h, false).part(g, 0, 0, 0)
		rPlan, rp, err := g.set.Limits.Router(fp8, R, H, E, I)
		g.Check(err)
		rp.X, rp.Router, rp.RouterScale, rp.Gate, rp.GateScale, rp.Up, rp.UpScale = wide, router.W, router.Scale, gate.W, gate.Scale, upW.W, upW.Scale
		rp.Shared, rp.Logits, rp.Hidden, rp.SharedLogit = randomMatrix(rng, FormatBF16, 1, h, false).part(g, 0, 0, 0).W, logits, hs, sl
		add(func(pdl bool) { run(g, rPlan, &rp, pdl) })
		upB, downB := randomBank(rng, experts, 2*inner, h), randomBank(rng, experts, h, inner)
		ePlan, ep, err := g.set.Limits.ExpertUp(R, H, E, K, I, Tuning{})
		g.Check(err)
		ep.X, ep.Logits, ep.Bank, ep.Divisor, ep.Hidden = wide, logits, upB.pack(g, true), g.Upload(upB.divisor), hid
		ep.SharedW, ep.SharedHidden, ep.SharedLogit, ep.SharedOut = randomMatrix(rng, FormatBF16, h, inner, false).part(g, 0, 0, 0).W, hs, sl, g.Poisoned(4*r*h)
		add(func(pdl bool) { run(g, ePlan, &ep, pdl) })
		// without programmatic edges every kernel starts after its predecessor has ended, so reading early is right there too
		oPlan, op, err := g.set.Limits.ExpertDown(R, H, E, K, I, true)
		g.Check(err)
		op.Logits, op.Hidden, op.Bank, op.Divisor = logits, hid, downB.pack(g, false), g.Upload(downB.divisor)
		op.SharedW, op.SharedHidden, op.SharedLogit, op.SharedOut, op.Out = ep.SharedW, hs, sl, ep.SharedOut, y
		add(func(pdl bool) { run(g, oPlan, &op, pdl) })
	}
	ch.reset = func() {
		g.Check(g.C.Copy(g.S, x[0], first, uint64(8*r*h)))
		for _, p := range []driver.Ptr{x[1], wide, mix, hid} {
			g.Check(g.C.Set(g.S, p, 0xff, uint64(2*r*h)))
		}
		g.Check(g.C.Set(g.S, y, 0, uint64(2*r*h)))
		g.Check(g.C.Set(g.S, inject[0], 0, uint64(16*r)))
	}
	ch.result = func() []byte {
		return slices.Concat(g.Download[byte](y, 2*r*h), g.Download[byte](x[0], 8*r*h), g.Download[byte](x[1], 8*r*h), g.Download[byte](logits, 4*r*experts))
	}
	return ch
}

// A graph's replay equals direct launches, with and without programmatic edges, bit for bit, and goes on doing so for many replays while the
// garbage collector runs as often as it can.
func TestReplay(t *testing.T) {
	withGPU(t, func(g *gpu) {
		rng := rand.New(rand.NewPCG(11, 12))
		for _, sh := range []struct {
			r, h, low, experts, topk, inner, layers int
			fp8                                     bool
			replays                                 int
		}{
			{1, 2560, 320, 32, 10, 640, 3, false, *replays},
			{1, 2560, 320, 32, 10, 640, 3, true, *replays},
			{5, 256, 64, 16, 4, 128, 4, true, *replays / 10},
			{8, 128, 64, 8, 2, 128, 2, false, *replays / 10},
		} {
			ch := newChain(g, rng, sh.r, sh.h, sh.low, sh.experts, sh.topk, sh.inner, sh.layers, sh.fp8)
			all := func(pdl bool) {
				for _, f := range ch.launch {
					f(pdl)
				}
			}
			ch.reset()
			all(false)
			want := ch.result()
			for i := range want[:2*sh.r*sh.h] {
				if i%2 == 1 && want[i]&0x7f == 0x7f && want[i-1]&0x80 != 0 {
					t.Errorf("R %d H %d: the chain makes NaN or infinity", sh.r, sh.h)
					break
				}
			}
			ch.reset()
			all(true)
			if !bytes.Equal(ch.result(), want) {
				t.Errorf("R %d H %d fp8 %v: launches with programmatic edges differ", sh.r, sh.h, sh.fp8)
			}
			// the reset is part of the graph's input, not of the graph: a replay goes on from the streams it left, so it is checked
			// against the same number of direct rounds
			e, nodes, err := g.C.Capture(g.S, func() error { all(true); return nil })
			g.Check(err)
			if nodes != len(ch.launch) {
				t.Errorf("%d nodes captured for %d launches", nodes, len(ch.launch))
			}
			ch.reset()
			g.Check(g.C.GraphLaunch(e, g.S))
			if !bytes.Equal(ch.result(), want) {
				t.Errorf("R %d H %d fp8 %v: a graph's replay differs", sh.r, sh.h, sh.fp8)
			}
			stop, done := make(chan struct{}), make(chan struct{})
			go func() { // garbage-collection stress
				defer close(done)
				var keep [][]byte
				for {
					select {
					case <-stop:
						return
					default:
					}
					keep = append(keep, make([]byte, 1<<16))
					if len(keep) > 200 {
						keep = nil
						runtime.GC()
					}
				}
			}()
			bad := 0
			for i := range sh.replays {
				ch.reset()
				g.Check(g.C.GraphLaunch(e, g.S))
				if i%97 == 0 || i == sh.replays-1 {
					if !bytes.Equal(ch.result(), want) {
						bad++
					}
				}
			}
			close(stop)
			<-done
			if bad > 0 {
				t.Errorf("R %d H %d fp8 %v: %d of %d looks at %d replays differ", sh.r, sh.h, sh.fp8, bad, sh.replays/97+1, sh.replays)
			}
			t.Logf("R %d H %d fp8 %v: %d replays of %d kernels", sh.r, sh.h, sh.fp8, sh.replays, nodes)
			g.Check(g.C.DestroyExec(e))
		}
	})
}

// Every kernel once on micro shapes, small enough for compute-sanitizer's tools.
func TestMicroChain(t *testing.T) {
	withGPU(t, func(g *gpu) {
		rng := rand.New(rand.NewPCG(13, 14))
		for _, r := range []int{1, 3} {
			for _, fp8 := range []bool{false, true} {
				ch := newChain(g, rng, r, 128, 64, 8, 2, 128, 2, fp8)
				var results [2][]byte
				for i := range results {
					ch.reset()
					for _, f := range ch.launch {
						f(i == 1)
					}
					results[i] = ch.result()
				}
				if !bytes.Equal(results[0], results[1]) {
					t.Errorf("R %d fp8 %v: launches with programmatic edges differ", r, fp8)
				}
			}
		}
	})
}
