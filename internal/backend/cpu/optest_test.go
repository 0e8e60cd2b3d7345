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
