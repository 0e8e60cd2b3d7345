package cli

import (
	"slices"
	"strings"
	"testing"

	"ninfer/internal/backend"
	sequences "ninfer/internal/backend/cuda/chunk/kernels"
	"ninfer/internal/backend/cuda/device"
	plain "ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/drivertest"
	products "ninfer/internal/backend/cuda/gemm/kernels"
	tuned "ninfer/internal/backend/cuda/kernels"
	"ninfer/internal/model"
)

// A driver's call that fails, once for want of memory or for good because the GPU is lost, is one line of an error, whichever call it is, from
// opening to closing; nothing panics or waits for ever, and no memory stays behind.
func TestDriverFailures(t *testing.T) {
	l := madeUp(t, "../../testdata/nano/checkpoint/config.json", variantFlags{SourceProfile: "radixark"})
	m, err := l.bind(model.Options{Drafter: true})
	if err != nil {
		t.Fatal(err)
	}
	calls := 0
	// run opens a device, reads a prompt, decodes three rounds, moves, empties and closes. Call number at and, of a lost GPU, all after it fail.
	run := func(at int, lost bool) (failed string, left uint64, err error) {
		drv, gpu, err := drivertest.New(drivertest.H200, plain.Layout(), tuned.Layout(), products.Layout(), sequences.Layout())
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		gpu.Fail = func(call string) driver.Result {
			if call == "cuGetErrorString" {
				return driver.Success
			}
			n++
			calls = max(calls, n)
			switch {
			case n == at:
				failed = call
			case n < at || !lost:
				return driver.Success
			}
			if lost {
				return 719 // CUDA_ERROR_LAUNCH_FAILED
			}
			return driver.ErrorOutOfMemory
		}
		d, err := device.Open(device.Options{States: m.States, Lanes: 2, Saved: 1, Tokens: 1024, Verify: 6, Carry: 128, Driver: drv, Made: l.made, Library: "none"})
		if err != nil {
			return failed, gpu.Allocated(), err
		}
		err = func() error {
			r := model.NewRunner(m, d, 128)
			if _, err := r.Prompt(backend.LaneRows{Tokens: make([]int32, 150), Want: backend.WantLikely}); err != nil {
				return err
			}
			for range 3 {
				at := d.Lengths(backend.Lane(0))
				if _, err := r.Drafts(&backend.Control{Lanes: []backend.LaneRows{{Tokens: make([]int32, at.Target-at.Drafter), Want: backend.WantLast}}}, 2); err != nil {
					return err
				}
				rows := backend.LaneRows{Tokens: make([]int32, 4), Positions: model.Positions(at.Target, 4), Want: backend.WantAll}
				if _, err := r.Launch(backend.Verify, &backend.Control{Lanes: []backend.LaneRows{rows}}); err != nil {
					return err
				}
				if err := d.Commit(0, 2); err != nil {
					return err
				}
			}
			if err := d.Move(backend.Image{Saved: true}, backend.Lane(0)); err != nil {
				return err
			}
			return d.Reset(backend.Lane(0))
		}()
		if closing := d.Close(); err == nil {
			err = closing
		}
		return failed, gpu.Allocated(), err
	}
	if _, left, err := run(0, false); err != nil || left != 0 {
		t.Fatalf("without a failure: %v, %d bytes stay", err, left)
	}
	if calls < 1000 {
		t.Fatalf("only %d calls", calls)
	}
	tidying := []string{"cuDevicePrimaryCtxRelease_v2", "cuGraphDestroy", "cuMemFree_v2"} // that nothing can be done about
	stride := 29
	if testing.Short() {
		stride = 293
	}
	for at := 1; at <= calls; at += stride {
		for _, lost := range []bool{false, true} {
			failed, left, err := run(at, lost)
			if err == nil && failed != "" && !slices.Contains(tidying, failed) || err != nil && (strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), "cuda")) {
				t.Errorf("call %d, %s, fails, for good %v: %v", at, failed, lost, err)
			}
			if left != 0 && failed != "cuDevicePrimaryCtxRelease_v2" && !lost {
				t.Errorf("call %d, %s, fails: %d bytes stay", at, failed, left)
			}
		}
	}
}
