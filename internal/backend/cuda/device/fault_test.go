package device_test

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/dynlib"
	"ninfer/internal/model"
)

// failing is the system's dynamic linker, except that a driver's function answers with a code from the after-th call on, and all others
// with the same: so do a GPU that is gone and a context that a fault has ended.
type failing struct {
	dynlib.System
	name  string
	code  uintptr
	after atomic.Int32
	named map[uintptr]string
}

func (f *failing) Symbol(h uintptr, name string) uintptr {
	a := f.System.Symbol(h, name)
	f.named[a] = name
	return a
}

func (f *failing) Call(fn uintptr, args []uintptr) uintptr {
	switch name := f.named[fn]; {
	case name == "cuGetErrorString":
	case f.after.Load() <= 0:
		return f.code
	case name == f.name && f.after.Add(-1) == 0:
		return f.code
	}
	return f.System.Call(fn, args)
}

// within fails the test if f takes longer than anything here may.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatalf("%s hangs", what)
	}
}

// dead checks that a device which has failed says so, at once, from then on, and that it can be closed.
func dead(t *testing.T, d *device.Device, r *model.Runner, token int32, why string) {
	t.Helper()
	within(t, "a launch after the failure", func() {
		in := backend.LaneRows{Tokens: []int32{token}, Positions: model.Positions(3, 1), Want: backend.WantLast}
		_, err := r.Launch(backend.Decode, &backend.Control{Lanes: []backend.LaneRows{in}})
		if err == nil || !strings.Contains(err.Error(), "the device has failed") || !strings.Contains(err.Error(), why) {
			t.Errorf("launch after the failure: %v", err)
		}
	})
	within(t, "reset after the failure", func() {
		if err := d.Reset(backend.Lane(0)); err == nil {
			t.Error("reset after the failure succeeds")
		}
	})
	within(t, "close", func() {
		if err := d.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
}

// trap is a kernel that stops the GPU.
const trap = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry stop() { trap; ret; }\n\x00"

// A kernel that traps in the middle of a step, launched directly and inside a graph: the step fails with the driver's words, nothing hangs.
func TestTrap(t *testing.T) {
	open(t, device.Options{}).Close()
	if os.Getenv("NINFER_TRAP") == "" { // the fault ends the GPU for its process: each in one of its own
		for _, how := range []string{"direct", "graph"} {
			cmd := exec.Command(os.Args[0], append(os.Args[1:], "-test.run=^TestTrap$", "-test.v")...)
			cmd.Env = append(os.Environ(), "NINFER_TRAP="+how)
			out, err := cmd.CombinedOutput()
			t.Logf("%s:\n%s", how, out)
			if err != nil {
				t.Errorf("%s: %v", how, err)
			}
		}
		return
	}
	m, _ := folder.Model(t)
	for _, noGraph := range []bool{os.Getenv("NINFER_TRAP") == "direct"} {
		d := open(t, device.Options{States: m.States, Lanes: 1, Tokens: 32, Verify: 6, Carry: 32, NoGraph: noGraph})
		r := model.NewRunner(m, d, 4)
		step := func(token int32, at int) error {
			if err := r.Seed(0, []int32{token}); err != nil {
				return err
			}
			in := backend.LaneRows{Tokens: []int32{token}, Positions: model.Positions(at, 1), Want: backend.WantLast}
			_, err := r.Launch(backend.Decode, &backend.Control{Lanes: []backend.LaneRows{in}})
			return err
		}
		var stop driver.Func    // loaded in the first step: a capture allows no loading
		armed, left := false, 1 // the second launch is a direct one, and captured after it
		if !noGraph {
			left = 2
		}
		d.Interrupt(func(op string, c *driver.Context, s driver.Stream) {
			var err error
			switch {
			case stop == 0:
				var mod driver.Module
				if mod, err = c.Load([]byte(trap)); err == nil {
					stop, err = c.Function(mod, "stop")
				}
			case op == "moe 1" && armed && left > 0:
				if left--; left > 0 {
					return
				}
				var none uint64
				l := driver.Launch{Func: stop, Grid: [3]uint32{1, 1, 1}, Block: [3]uint32{1, 1, 1}}
				err = c.Launch(s, &l, unsafe.Pointer(&none), unsafe.Sizeof(none))
			}
			if err != nil {
				t.Error(err)
			}
		})
		if err := step(20, 0); err != nil {
			t.Fatal(err)
		}
		armed = true
		at := 1
		if !noGraph {
			if err := step(21, at); err != nil {
				t.Fatal(err)
			}
			at++
		}
		within(t, "the step", func() {
			err := step(21, at)
			var code *driver.Error
			if left > 0 || err == nil || !errors.As(err, &code) || code.Text == "" {
				t.Errorf("graph %v: a step with a trap: %v (%d to go)", !noGraph, err, left)
			}
			t.Log(err)
		})
		d.Interrupt(nil)
		dead(t, d, r, 22, "cuda: ")
	}
}

// Codes of a lost GPU and of a driver that has been reset, at every call of a step: the error names call and code, nothing hangs.
func TestLost(t *testing.T) {
	open(t, device.Options{}).Close()
	m, _ := folder.Model(t)
	for _, code := range []uintptr{719, 46, 999, 4, 101} { // launch failure, GPU unavailable, unknown, deinitialized (reset), invalid device
		for _, call := range []string{"cuLaunchKernelEx", "cuGraphLaunch", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"} {
			ld := &failing{name: call, code: code, named: map[uintptr]string{}}
			ld.after.Store(1 << 30)
			drv, err := driver.OpenWith(ld)
			if err != nil {
				t.Fatal(err)
			}
			d := open(t, device.Options{States: m.States, Lanes: 1, Tokens: 32, Verify: 6, Carry: 32, Driver: drv})
			r := model.NewRunner(m, d, 4)
			var failure error
			within(t, call, func() {
				for i := range 4 {
					if i == 3 { // a graph by now
						ld.after.Store(1)
					}
					if failure = r.Seed(0, []int32{20}); failure != nil {
						return
					}
					in := backend.LaneRows{Tokens: []int32{20}, Positions: model.Positions(i, 1), Want: backend.WantLogits}
					if _, failure = r.Launch(backend.Decode, &backend.Control{Lanes: []backend.LaneRows{in}}); failure != nil {
						return
					}
				}
			})
			var said *driver.Error
			if !errors.As(failure, &said) || said.Code != driver.Result(code) || said.Call != call {
				t.Errorf("%s with %d: %v", call, code, failure)
			}
			dead(t, d, r, 22, call)
		}
	}
}

// More than the GPU has: an error at the start that says what for, how much, and what is free.
func TestMemory(t *testing.T) {
	open(t, device.Options{}).Close()
	m, _ := folder.Model(t)
	within(t, "open", func() {
		d, err := device.Open(device.Options{States: m.States, Lanes: 4096, Tokens: 262144, Carry: 1})
		var mem *driver.MemoryError
		if !errors.As(err, &mem) || mem.Total == 0 || !strings.Contains(err.Error(), "out of GPU memory") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v, %v", d, err)
		}
		t.Log(err)
	})
	// What was taken has been given back.
	d := open(t, device.Options{States: m.States, Lanes: 1, Tokens: 262144, Carry: 1})
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}
