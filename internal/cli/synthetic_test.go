package cli

import (
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/backend"
	sequences "ninfer/internal/backend/cuda/chunk/kernels"
	"ninfer/internal/backend/cuda/device"
	plain "ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/drivertest"
	products "ninfer/internal/backend/cuda/gemm/kernels"
	tuned "ninfer/internal/backend/cuda/kernels"
	"ninfer/internal/bench"
	"ninfer/internal/model"
)

// The full-size model without a file: what a GPU has to hold is the published accounting (docs/format.md 4.1.5; 4.2.1: 70.01 GiB), and what a
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
		l := madeUp(t, "official", c.v)
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
		// 36 layers of 48 heads of 128 x 128 FP32 are written in every fourth step; the others leave a record of 257 FP32 a head, of which a step reads 1.5.
		less := 36 * 48 * 4 * (128*128*0.75 - 257*(0.75+1.5)) / 1e6
		all, behind := bench.Moved(p, m.States, bench.Formats{}, 1, 8192, 10), bench.Moved(p, m.States, bench.Formats{Behind: device.StepsBehind}, 1, 8192, 10)
		if mb := (all.Total() - behind.Total()) / 1e6; math.Abs(mb-less) > 1e-6 {
			t.Errorf("%+v: steps behind save %.3f MB, want %.3f", c.v, mb, less)
		}
		if !testing.Short() {
			for name, card := range map[string]drivertest.Card{"H200": drivertest.H200, "RTX PRO 6000": drivertest.RTX6000} {
				for _, small := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s %s on %s, small formats %v", c.v.SourceProfile, c.v.ProjectionFormat, name, small), func(t *testing.T) { launches(t, l, card, small) })
				}
			}
		}
	}
}

// madeUp is a model that synthetic makes up for a GPU. It is closed with the test.
func madeUp(t *testing.T, config string, v variantFlags) *loaded {
	t.Helper()
	l, err := synthetic(config, v, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.close)
	return l
}

// orFatal is what ends a test at an error.
func orFatal(t *testing.T) func(error) {
	return func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
}

// opened is a device with eight lanes on a GPU that computes nothing, but refuses what a card has not the room for, for so many tokens a lane and
// carried rows; small takes the small formats of cache and state. It is closed with the test.
func opened(t *testing.T, l *loaded, card drivertest.Card, small bool, tokens, carry int) (*drivertest.GPU, *model.Model, *device.Device) {
	t.Helper()
	must := orFatal(t)
	drv, gpu, err := drivertest.New(card, plain.Layout(), tuned.Layout(), products.Layout(), sequences.Layout())
	must(err)
	for _, folder := range []string{"device/kernels", "kernels", "gemm/kernels", "chunk/kernels"} {
		report, err := os.Open("../backend/cuda/" + folder + "/resources.txt")
		must(err)
		must(gpu.Compiled(report))
		report.Close()
	}
	m, err := l.bind(model.Options{Drafter: true})
	must(err)
	o := device.Options{States: m.States, Lanes: 8, Tokens: tokens, Verify: 6, Carry: carry, Driver: drv, Made: l.made, Library: "none"}
	if small {
		o.KV, o.BF16State = backend.CacheFP8, true
	}
	d, err := device.Open(o)
	must(err)
	t.Cleanup(func() { must(d.Close()) })
	return gpu, m, d
}

// launches runs a prompt and some steps on a GPU that computes nothing, but refuses what a card has not the room for: all that the model consists
// of has its kernel for many rows and its fast one for a step, and a step is replayed as one graph.
func launches(t *testing.T, l *loaded, card drivertest.Card, small bool) {
	t.Helper()
	must := orFatal(t)
	gpu, m, d := opened(t, l, card, small, 16384, 1024)
	r := model.NewRunner(m, d, 512)
	hopper := card == drivertest.H200
	// Not fast on a GPU with little shared memory: attention's output projection of eight rows of 6,144.
	slow := []string{"gemv"}
	none := func(what string, kernels ...string) {
		t.Helper()
		for _, k := range kernels {
			if n := gpu.Count(k); n > 0 && (hopper || what == "a prompt" || what == "a step" || !slices.Contains(slow, k)) {
				t.Errorf("%s launches %s %d times", what, k, n)
			}
		}
	}
	_, err := r.Prompt(backend.LaneRows{Tokens: make([]int32, 512)})
	must(err)
	none("a prompt", "gemv", "hc_down", "hc_up", "expert_gate_up", "expert_up", "delta", "delta_quarters", "delta_rows", "attend", "attend_pairs",
		"project_bf16_deep", "project_e4m3", "project_bf16_rows", "project_whole", "project_whole_rows")
	// 48 layers, every fourth with attention; two hyper-connections a layer and one behind; the drafter has a pass of its own
	attend := "attend_wide"
	if !hopper { // it has Hopper's instructions
		attend = "attend_rows"
	}
	if small {
		attend += "_fp8"
	}
	for kernel, want := range map[string]int{"site": 97, "route": 48, attend: 12, "report": 2} {
		if n := gpu.Count(kernel); n != want {
			t.Errorf("a prompt launches %s %d times, want %d", kernel, n, want)
		}
	}
	passes := func() int { return gpu.Count("report") + gpu.Count("report_best") }
	step := func(what string, graphs int, in ...backend.LaneRows) {
		t.Helper()
		gpu.Launched, gpu.Graphs = gpu.Launched[:0], 0
		_, err = r.Launch(backend.Verify, &backend.Control{Lanes: in})
		must(err)
		for _, l := range in {
			must(d.Commit(l.Lane, 1))
		}
		none(what, "gemv", "hc_up", "expert_up", "delta", "attend", "merge", "score", "pick", "route")
		if gpu.Graphs != graphs || passes() != 1 {
			t.Errorf("%s: %d graphs, want %d, %d launches in all", what, gpu.Graphs, graphs, len(gpu.Launched))
		}
	}
	for i, graphs := range []int{0, 0, 1, 1} { // captured behind the second launch
		row := backend.LaneRows{Tokens: []int32{1}, Positions: model.Positions(512+i, 1), Want: backend.WantLast}
		step("a step", graphs, row)
	}
	// What a step allocates on the host: its result, and what the GPU's goroutine is asked to do. The least of some counts, which are the process's:
	// on a busy machine other goroutines, or a wait that lasted, add to one of them.
	next := &backend.Control{Lanes: []backend.LaneRows{{Tokens: []int32{1}, Positions: model.Positions(516, 1), Want: backend.WantLast}}}
	n := math.Inf(1)
	for range 5 {
		n = min(n, testing.AllocsPerRun(50, func() {
			gpu.Launched = gpu.Launched[:0]
			_, err := r.Launch(backend.Verify, next)
			must(err)
			must(d.Commit(0, 1))
		}))
	}
	if n > 5 {
		t.Errorf("a step allocates %v times", n)
	}
	var all []backend.LaneRows
	for lane := range 8 {
		must(d.Fill(backend.Lane(lane), 9000))
		all = append(all, backend.LaneRows{Lane: lane, Tokens: []int32{1}, Positions: model.Positions(9000, 1), Want: backend.WantLast})
	}
	step("a step of eight lanes", 0, all...)
	if n := gpu.Count("project_whole_rows") + gpu.Count("project_bf16_rows"); hopper && n < 36 {
		t.Errorf("a step of eight lanes multiplies %d times in clusters", n)
	}
	step("drafts in three lanes", 0, backend.LaneRows{Lane: 0, Tokens: []int32{1, 2, 3, 4}, Positions: model.Positions(9001, 4), Want: backend.WantAll},
		backend.LaneRows{Lane: 1, Tokens: []int32{1}, Positions: model.Positions(9001, 1), Want: backend.WantAll},
		backend.LaneRows{Lane: 2, Tokens: []int32{1, 2, 3}, Positions: model.Positions(9001, 3), Want: backend.WantAll})
	none("drafts in three lanes", "delta_rows")
	step("drafts in one lane", 0, backend.LaneRows{Lane: 3, Tokens: []int32{1, 2, 3, 4}, Positions: model.Positions(9001, 4), Want: backend.WantAll})
	if n, m := gpu.Count("delta_rows"), gpu.Count("delta_quarters"); n != 36 || m != 0 {
		t.Errorf("drafts in one lane launch delta_rows %d times and delta_quarters %d times, want 36 and 0", n, m)
	}
	gpu.Launched = gpu.Launched[:0]
	all = nil
	for lane := range 3 {
		at := d.Lengths(backend.Lane(lane))
		all = append(all, backend.LaneRows{Lane: lane, Tokens: make([]int32, at.Target-at.Drafter), Want: backend.WantLast})
	}
	_, err = r.Drafts(&backend.Control{Lanes: all}, 4)
	must(err)
	none("drafts", "expert_up", "attend", "merge", "score", "pick", "route")
	// Of the rows that a lane alone has kept only the last goes further than the caches.
	four := backend.LaneRows{Lane: 0, Tokens: []int32{1, 2, 3, 4}, Positions: model.Positions(d.Lengths(backend.Lane(0)).Target, 4), Want: backend.WantAll}
	_, err = r.Launch(backend.Verify, &backend.Control{Lanes: []backend.LaneRows{four}})
	must(err)
	must(d.Commit(0, 3))
	gpu.Launched = gpu.Launched[:0]
	_, err = r.Drafts(&backend.Control{Lanes: []backend.LaneRows{{Lane: 0, Tokens: make([]int32, 3), Want: backend.WantLast}}}, 2)
	must(err)
	none("drafts of a lane", "expert_gate_up_rows", "expert_down_rows", "gather", "inject", "stem_add")
	if n := passes(); n != 3 {
		t.Errorf("drafts of a lane: %d passes, want 3", n)
	}
}
