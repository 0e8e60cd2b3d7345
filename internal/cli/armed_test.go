package cli

import (
	"runtime"
	"testing"
	"time"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/drivertest"
	"ninfer/internal/model"
)

// The third of some decoding steps of the same lanes finds its beginning on the GPU, and so do those that follow. Whatever else is wanted there comes
// behind its being called off, and so does sleep; the card of drivertest ends a call that would wait for ever.
func TestArmed(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4)) // with fewer nobody looks out for the GPU
	l := madeUp(t, "../../testdata/micro-radixark/checkpoint/config.json", variantFlags{SourceProfile: "radixark"})
	gpu, m, d := opened(t, l, drivertest.H200, false, 2048, 512)
	must := orFatal(t)
	var steps []backend.Step
	for lanes := 1; lanes <= 2; lanes++ {
		program, err := m.Program(backend.Pass{Kind: backend.Decode, Lanes: lanes, Rows: lanes}, false)
		must(err)
		step, err := d.Compile(program)
		must(err)
		must(d.Fill(backend.Lane(lanes-1), 300))
		steps = append(steps, step)
	}
	length := 300
	run := func(lanes, n int) {
		t.Helper()
		for range n {
			ctl := &backend.Control{}
			for lane := range lanes {
				ctl.Lanes = append(ctl.Lanes, backend.LaneRows{Lane: lane, Tokens: make([]int32, 1), Positions: model.Positions(length, 1), Want: backend.WantLast})
			}
			length++
			q, err := d.Launch(steps[lanes-1], ctl)
			must(err)
			_, err = d.Wait(q)
			must(err)
		}
	}
	begins := func(what string, plain, armed, off int) {
		t.Helper()
		if p, a := gpu.Count("begin"), gpu.Count("begin_armed"); p != plain || a != armed || gpu.CalledOff != off {
			t.Errorf("%s: %d plain beginnings, %d armed, %d called off, want %d, %d, %d", what, p, a, gpu.CalledOff, plain, armed, off)
		}
		gpu.Launched, gpu.CalledOff = nil, 0
	}
	run(2, 10) // the first is launched kernel by kernel, behind the second a graph is captured and the third armed
	begins("ten steps", 2, 9, 0)
	must(d.Fill(backend.Lane(0), 300))
	run(2, 16)
	begins("behind another call", 16, 0, 1)
	run(2, 4)
	begins("some steps later", 1, 4, 0)
	run(1, 1)
	begins("another shape", 1, 0, 1)
	run(2, 30)
	gpu.Launched, gpu.CalledOff = nil, 0
	time.Sleep(50 * time.Millisecond)
	run(2, 1)
	begins("behind a pause", 1, 0, 1)
	run(2, 30)
	gpu.Launched, gpu.CalledOff, gpu.Tired = nil, 0, true
	run(2, 6) // the first finds the last beginning that waits, what is behind it has given up
	begins("giving up", 5, 1, 0)
	gpu.Tired = false
	run(2, 30)
	must(d.Close())
}
