package gputest

import (
	"fmt"
	"math"
	"testing"
)

// said is a test that notes its errors.
type said struct {
	testing.TB
	errors []string
}

func (s *said) Helper() {}
func (s *said) Errorf(format string, args ...any) {
	s.errors = append(s.errors, fmt.Sprintf(format, args...))
}

// A comparison tells elements that are off, rows that are off in all, and numbers that are none; BF16's own rounding is allowed for.
func TestComparison(t *testing.T) {
	for _, c := range []struct {
		name                string
		got, want           []float64
		units, slack, bound float64
		ok                  bool
		worst               float64
	}{
		{"equal", []float64{3, 4}, []float64{3, 4}, 0, 0, 0, true, 0},
		{"an element by a unit", []float64{1 + 1./128, 4}, []float64{1, 4}, 1, 0, 1, true, 1. / 128 / math.Sqrt(17)},
		{"an element by more", []float64{1 + 1.1/128, 4}, []float64{1, 4}, 1, 0, 1, false, 1.1 / 128 / math.Sqrt(17)},
		{"within the slack", []float64{0.5}, []float64{0}, 0, 0.5, math.Inf(1), true, 0.5e150},
		{"the row", []float64{3, 4.5}, []float64{3, 4}, 100, 0, 0.09, false, 0.1},
		{"rounding", []float64{1}, []float64{1 + 1./256}, 1, 0, 3e-3, true, 1. / 257},
		{"rounding of FP32", []float64{1}, []float64{1 + 1./256}, 1, 0, 1e-4, false, 1. / 257},
		{"NaN", []float64{math.NaN(), 4}, []float64{3, 4}, 1e9, 1e9, 1e9, false, math.NaN()},
	} {
		var s said
		var all Comparison
		for range 2 { // series do not mix
			s.errors = nil
			for i := range c.got {
				all.Add("", c.got[i], c.want[i], c.units, c.slack)
			}
			all.End(&s, c.name, c.bound)
			same := math.Abs(all.Worst-c.worst) <= 1e-6*c.worst || math.IsNaN(all.Worst) && math.IsNaN(c.worst)
			if (len(s.errors) == 0) != c.ok || !same {
				t.Errorf("%s: %q, worst %g, want %g", c.name, s.errors, all.Worst, c.worst)
			}
		}
	}
}
