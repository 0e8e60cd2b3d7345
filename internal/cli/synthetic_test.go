package cli

import (
	"strings"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/bench"
	"ninfer/internal/model"
)

// The full-size model without a file: what a GPU has to hold is the published accounting (artifact.md 4.1.5; 4.2.1: 70.01 GiB), and what a
// step moves is the sum over the kernels of a step as they were planned. That has no column for mixed, which moves between the two: its projections
// of attention and delta net take 36 * 57.7 + 12 * 49.8 MB less than in 16 bits.
func TestSyntheticOfficial(t *testing.T) {
	for _, c := range []struct {
		v        variantFlags
		resident int64
		moved    float64 // MB a step at 8K, one lane
	}{
		{variantFlags{SourceProfile: "radixark"}, 77_843_522_050, 10_239},
		{variantFlags{SourceProfile: "radixark", ProjectionFormat: "fp8_e4m3fn_row_bf16"}, 73_682_516_098, 6_078},
		{variantFlags{SourceProfile: "mixed"}, 75_172_939_520, 7_569},
	} {
		l, err := synthetic("official", c.v, false)
		if err != nil {
			t.Fatal(err)
		}
		defer l.close()
		m, err := l.bind(model.Options{})
		if err != nil {
			t.Fatal(err)
		}
		d := l.store.File.Directory()
		if c.v.SourceProfile == "mixed" { // published: all tensors but the table and its constants, and the drafter's banks
			n := bench.Resident(d, true)
			for _, o := range d.Objects {
				if strings.HasPrefix(o.ID, "vision/") {
					n += o.Bytes
				}
			}
			if n != 76_251_938_528+1_415_581_696 {
				t.Errorf("mixed with vision and drafter: %d bytes", n)
			}
		}
		if n := bench.Resident(d, false); n != c.resident {
			t.Errorf("%+v: %d bytes on a GPU, want %d, diff %d", c.v, n, c.resident, n-c.resident)
		}
		p, err := m.Program(backend.Pass{Kind: backend.Decode, Lanes: 1, Rows: 1}, false)
		if err != nil {
			t.Fatal(err)
		}
		if mb := bench.Moved(p, m.States, bench.Formats{}, 1, 8192, 10).Total() / 1e6; mb < 0.99*c.moved || mb > 1.01*c.moved {
			t.Errorf("%+v: a step moves %.0f MB, want %.0f: %+v", c.v, mb, c.moved, bench.Moved(p, m.States, bench.Formats{}, 1, 8192, 10))
		}
	}
}
