package cpu_test

import (
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/backend/optest"
	"ninfer/internal/num"
)

func options(o optest.Options) cpu.Options {
	return cpu.Options{States: o.States, Lanes: o.Lanes, Saved: o.Saved, Tokens: o.Tokens, Verify: o.Verify, Carry: o.Carry}
}

var oracle = optest.Backend{
	Open:  func(_ testing.TB, o optest.Options) backend.Device { return cpu.NewOracle(options(o)) },
	Bound: func(string) float64 { return 0 },
	Exact: true,
}

func fast(l cpu.Level, threads int) optest.Backend {
	return optest.Backend{
		Open: func(_ testing.TB, o optest.Options) backend.Device {
			opt := options(o)
			opt.Level, opt.Threads = l, threads
			return cpu.NewFast(opt)
		},
		// float32 throughout: a sum of n terms is off by about sqrt(n) * 2^-25 of its size, and terms cancel by a factor of a few.
		Bound: func(string) float64 { return 1e-5 },
		Exact: true,
	}
}

func TestConformance(t *testing.T) {
	for _, l := range cpu.Levels() {
		t.Run(l.String(), func(t *testing.T) {
			b := fast(l, 0)
			if l == cpu.Plain { // slow, and the same for all formats
				b.Shapes, b.Formats = []optest.Shape{optest.Odd, optest.Real}, []num.Format{num.FP8RowFP32, num.Q5G64}
			}
			optest.Run(t, oracle, b)
		})
	}
}

// Caches and states in fewer bytes: the oracle rounds them at the same points. A value beside a rounding point may fall to the other
// side in float32, which moves it by 2^-8 in BF16 and by up to 2^-3 in FP8; and a state that is rounded once a pass depends on the rows
// of passes. Results do not depend on company, chunks or drafts otherwise, in a single bit.
func TestConformancePacked(t *testing.T) {
	for _, c := range []struct {
		name   string
		kv     backend.Cache
		state  bool
		bound  float64
		shapes []optest.Shape
	}{
		{"kv bf16", backend.CacheBF16, false, 2e-3, []optest.Shape{optest.Real}},
		{"kv fp8", backend.CacheFP8, false, 1e-2, []optest.Shape{optest.Real, optest.Wide}},
		{"state bf16", backend.CacheFull, true, 3e-3, []optest.Shape{optest.Real}},
	} {
		t.Run(c.name, func(t *testing.T) {
			open := func(o optest.Options, make func(cpu.Options) backend.Device) backend.Device {
				opt := options(o)
				opt.KV, opt.BF16State = c.kv, c.state
				return make(opt)
			}
			ref, dev := oracle, fast(cpu.Best, 0)
			ref.Open = func(_ testing.TB, o optest.Options) backend.Device { return open(o, cpu.NewOracle) }
			dev.Open = func(_ testing.TB, o optest.Options) backend.Device { return open(o, cpu.NewFast) }
			dev.Shapes, dev.Formats = c.shapes, []num.Format{num.FP8RowFP32}
			dev.Exact = !c.state
			dev.Bound = func(op string) float64 {
				if op == "qsa" && c.kv != backend.CacheFull || op == "gdn" && c.state || op == "model" {
					return c.bound
				}
				return 1e-5
			}
			optest.Run(t, ref, dev)
		})
	}
}
