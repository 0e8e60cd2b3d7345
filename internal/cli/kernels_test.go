package cli

import (
	"math"
	"strings"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/drivertest"
	"ninfer/internal/model"
)

// On a card where nothing overlaps a kind of kernel costs what its launches take, counted either way, and all kinds make up the step.
func TestKernelTimes(t *testing.T) {
	l := madeUp(t, "../../testdata/micro-radixark/checkpoint/config.json", variantFlags{SourceProfile: "radixark"})
	gpu, m, d := opened(t, l, drivertest.H200, false, 2048, 512)
	for _, pass := range []backend.Pass{{Kind: backend.Decode, Lanes: 2, Rows: 2}, {Kind: backend.Verify, Lanes: 1, Rows: 4}} {
		program, err := m.Program(pass, false)
		if err != nil {
			t.Fatal(err)
		}
		step, err := d.Compile(program)
		if err != nil {
			t.Fatal(err)
		}
		ctl := &backend.Control{}
		for lane := range pass.Lanes {
			if err := d.Fill(backend.Lane(lane), 300); err != nil {
				t.Fatal(err)
			}
			n := pass.Rows / pass.Lanes
			ctl.Lanes = append(ctl.Lanes, backend.LaneRows{Lane: lane, Tokens: make([]int32, n), Positions: model.Positions(300, n), Want: backend.WantAll})
		}
		gpu.Launched = nil
		list, whole, err := d.Kernels(step, ctl, 3, true)
		if err != nil {
			t.Fatal(err)
		}
		sum, launches := 0.0, 0
		for _, k := range list {
			want := float64(k.Launches) * drivertest.Takes(k.Name[strings.LastIndex(k.Name, " ")+1:])
			if math.Abs(k.Microseconds-want) > 0.01 || math.Abs(k.Without-want) > 0.01 {
				t.Errorf("%v: %s: %d launches take %v, a step without them %v less, want %v", pass.Kind, k.Name, k.Launches, k.Microseconds, k.Without, want)
			}
			sum, launches = sum+k.Microseconds, launches+k.Launches
		}
		if math.Abs(sum-whole) > 0.01 || launches < 50 {
			t.Errorf("%v: %d kernels take %v, all of it %v", pass.Kind, launches, sum, whole)
		}
	}
}
