package driver

import (
	"errors"
	"strings"
	"testing"
	"unsafe"
)

// fake is a driver library made of Go functions, so that every way of failing can be taken without a GPU. A function that is not in the
// map does not exist; results are CUresult numbers.
type fake struct {
	none  error
	funcs map[string]func(a []uintptr) Result
	names []string
}

func (f *fake) Open(...string) (uintptr, error) { return 1, f.none }

func (f *fake) Symbol(_ uintptr, name string) uintptr {
	if f.funcs[name] == nil {
		return 0
	}
	f.names = append(f.names, name)
	return uintptr(len(f.names))
}

func (f *fake) Call(fn uintptr, a []uintptr) uintptr { return uintptr(f.funcs[f.names[fn-1]](a)) }

// put stores a value where the driver was told to.
func put[T any](at uintptr, v T) { *(*T)(*(*unsafe.Pointer)(unsafe.Pointer(&at))) = v }

// working is a driver with one H200 that succeeds at everything.
func working(version int32) *fake {
	f := &fake{funcs: map[string]func(a []uintptr) Result{}}
	for _, n := range names {
		f.funcs[n] = func([]uintptr) Result { return Success }
	}
	f.funcs["cuDriverGetVersion"] = func(a []uintptr) Result { put(a[0], version); return Success }
	f.funcs["cuDeviceGetCount"] = func(a []uintptr) Result { put(a[0], int32(1)); return Success }
	f.funcs["cuDeviceGetName"] = func(a []uintptr) Result { put(a[0], [7]byte{'T', 'e', 's', 't', 'G', 'P', 'U'}); return Success }
	f.funcs["cuDeviceGetAttribute"] = func(a []uintptr) Result {
		put(a[0], map[uintptr]int32{75: 9, 76: 0, 16: 132}[a[1]])
		return Success
	}
	f.funcs["cuMemGetInfo_v2"] = func(a []uintptr) Result { put(a[0], uint64(3<<30)); put(a[1], uint64(140<<30)); return Success }
	text := append([]byte("out of pencils"), 0)
	f.funcs["cuGetErrorString"] = func(a []uintptr) Result { put(a[1], uintptr(unsafe.Pointer(&text[0]))); return Success }
	return f
}

func TestNoDriver(t *testing.T) {
	f := &fake{none: errors.New("no such file")}
	_, err := OpenWith(f)
	var e *NoDriverError
	if !errors.As(err, &e) || !strings.Contains(err.Error(), "no NVIDIA driver") || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("got %v", err)
	}
	// As Linux' loader and Windows say it.
	for _, says := range []string{"libcuda.so.1: cannot open shared object file", "cannot open shared object file"} {
		if got := (&NoDriverError{"libcuda.so.1", errors.New(says)}).Error(); got != "cuda: no NVIDIA driver: libcuda.so.1: cannot open shared object file" {
			t.Errorf("got %q", got)
		}
	}
	f = &fake{funcs: map[string]func([]uintptr) Result{}}
	if _, err := OpenWith(f); !errors.As(err, &e) {
		t.Errorf("a library that is no driver: %v", err)
	}
	f = working(13000)
	f.funcs["cuInit"] = func([]uintptr) Result { return 999 }
	if _, err := OpenWith(f); !errors.As(err, &e) || !strings.Contains(err.Error(), "out of pencils") {
		t.Errorf("cuInit fails: %v", err)
	}
}

func TestOldDriver(t *testing.T) {
	_, err := OpenWith(working(12040))
	var e *OldDriverError
	if !errors.As(err, &e) || e.Have != 12040 || e.Need != NeedVersion {
		t.Fatalf("got %v", err)
	}
	if s := err.Error(); !strings.Contains(s, "CUDA 12.4") || !strings.Contains(s, "CUDA 13.0 or newer is needed") {
		t.Errorf("message %q says not what there is and what is needed", s)
	}
	f := working(13000)
	delete(f.funcs, "cuLaunchKernelEx")
	if _, err := OpenWith(f); !errors.As(err, &e) || !strings.Contains(err.Error(), "cuLaunchKernelEx") {
		t.Errorf("missing function: %v", err)
	}
	f = working(13000)
	f.funcs["cuInit"] = func([]uintptr) Result { return 803 }
	if _, err := OpenWith(f); !errors.As(err, &e) {
		t.Errorf("driver and kernel module differ: %v", err)
	}
}

func TestNoDevice(t *testing.T) {
	f := working(13000)
	f.funcs["cuDeviceGetCount"] = func([]uintptr) Result { return ErrorNoDevice }
	d, err := OpenWith(f)
	if err != nil {
		t.Fatal(err)
	}
	_, err = StartOwner(d, 0)
	var e *NoDeviceError
	if !errors.As(err, &e) || e.Count != 0 {
		t.Errorf("got %v", err)
	}
	f.funcs["cuInit"] = func([]uintptr) Result { return ErrorNoDevice }
	if _, err := OpenWith(f); !errors.As(err, &e) || !strings.Contains(err.Error(), "sees no GPU") {
		t.Errorf("got %v", err)
	}
}

func start(t *testing.T, f *fake) *Owner {
	t.Helper()
	d, err := OpenWith(f)
	if err != nil {
		t.Fatal(err)
	}
	o, err := StartOwner(d, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(o.Close)
	return o
}

func TestOutOfMemory(t *testing.T) {
	f := working(13000)
	f.funcs["cuMemAlloc_v2"] = func([]uintptr) Result { return ErrorOutOfMemory }
	err := start(t, f).Do(func(c *Context) error {
		_, err := c.Alloc("weights", 100<<30)
		return err
	})
	var e *MemoryError
	if !errors.As(err, &e) || e.Need != 100<<30 || e.Free != 3<<30 {
		t.Fatalf("got %v", err)
	}
	if s := err.Error(); s != "cuda: out of GPU memory: weights needs 100.0 GiB, 3072.0 MiB of 140.0 GiB are free" {
		t.Errorf("message %q", s)
	}
}

// What is promised to others stays free: a whole allocation fits or fails, to the byte, whoever took the rest.
func TestReserve(t *testing.T) {
	f := working(13000)
	free := uint64(3 << 30)
	f.funcs["cuMemGetInfo_v2"] = func(a []uintptr) Result { put(a[0], free); put(a[1], uint64(140<<30)); return Success }
	err := start(t, f).Do(func(c *Context) error {
		c.Reserve = 2 << 30
		if _, err := c.Alloc("weights", 1<<30); err != nil {
			return err
		}
		var e *MemoryError
		if _, err := c.Alloc("weights", 1<<30+1); !errors.As(err, &e) || e.Reserve != 2<<30 || !strings.HasSuffix(err.Error(), "3072.0 MiB of 140.0 GiB are free and 2048.0 MiB of them are to stay so") {
			t.Errorf("a byte more: %v", err)
		}
		free = 1 << 30 // another program
		if _, err := c.Alloc("control", 16); !errors.As(err, &e) {
			t.Errorf("with less free than promised: %v", err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestFailedCall(t *testing.T) {
	f := working(13000)
	f.funcs["cuStreamSynchronize"] = func([]uintptr) Result { return 719 }
	err := start(t, f).Do(func(c *Context) error { return c.SyncStream(7) })
	var e *Error
	if !errors.As(err, &e) || e.Code != 719 || e.Call != "cuStreamSynchronize" || e.Text != "out of pencils" {
		t.Errorf("got %v", err)
	}
}

// A launch hands the driver its configuration: offsets are those of CUlaunchConfig and CUlaunchAttribute.
func TestLaunchLayout(t *testing.T) {
	f := working(13000)
	type params struct {
		a uint64
		b uint32
	}
	var got struct {
		grid, block [3]uint32
		shared      uint32
		stream      uintptr
		id, value   uint32
		attrs       uint32
		p           params
		fn          uintptr
	}
	f.funcs["cuLaunchKernelEx"] = func(a []uintptr) Result {
		at := func(p uintptr, off uintptr) unsafe.Pointer {
			return unsafe.Add(*(*unsafe.Pointer)(unsafe.Pointer(&p)), off)
		}
		got.grid, got.block = *(*[3]uint32)(at(a[0], 0)), *(*[3]uint32)(at(a[0], 12))
		got.shared, got.stream = *(*uint32)(at(a[0], 24)), *(*uintptr)(at(a[0], 32))
		attr := *(*uintptr)(at(a[0], 40))
		got.attrs = *(*uint32)(at(a[0], 48))
		got.id, got.value = *(*uint32)(at(attr, 0)), *(*uint32)(at(attr, 8))
		got.fn = a[1]
		first := *(*uintptr)(at(a[2], 0))
		got.p = *(*params)(at(first, 0))
		return Success
	}
	err := start(t, f).Do(func(c *Context) error {
		p := params{1 << 40, 77}
		return c.Launch(5, &Launch{Func: 9, Grid: [3]uint32{132, 1, 1}, Block: [3]uint32{256, 1, 1}, Shared: 4096, PDL: true}, unsafe.Pointer(&p), unsafe.Sizeof(p))
	})
	if err != nil {
		t.Fatal(err)
	}
	if got.grid != [3]uint32{132, 1, 1} || got.block != [3]uint32{256, 1, 1} || got.shared != 4096 || got.stream != 5 || got.fn != 9 {
		t.Errorf("config %+v", got)
	}
	if got.attrs != 1 || got.id != 6 || got.value != 1 {
		t.Errorf("attribute %+v", got)
	}
	if got.p != (params{1 << 40, 77}) {
		t.Errorf("parameters %+v", got.p)
	}
}

// Parameters that are more than there is room for are refused, not cut off.
func TestLaunchTooMuch(t *testing.T) {
	var p [2049]byte
	for size, ok := range map[uintptr]bool{2048: true, 2049: false} {
		f := working(13000)
		launched := false
		f.funcs["cuLaunchKernelEx"] = func([]uintptr) Result { launched = true; return Success }
		err := start(t, f).Do(func(c *Context) error { return c.Launch(0, &Launch{}, unsafe.Pointer(&p), size) })
		if launched != ok || (err == nil) != ok {
			t.Errorf("%d bytes: launched %v, %v", size, launched, err)
		}
	}
}

func TestHotCallsDoNotAllocate(t *testing.T) {
	f := working(13000)
	err := start(t, f).Do(func(c *Context) error {
		l := Launch{Func: 1, Grid: [3]uint32{1, 1, 1}, Block: [3]uint32{32, 1, 1}, PDL: true}
		var p struct{ a, b uint64 }
		host := make([]byte, 64)
		n := testing.AllocsPerRun(100, func() {
			_ = c.Launch(1, &l, unsafe.Pointer(&p), unsafe.Sizeof(p))
			_ = c.GraphLaunch(1, 1)
			_ = c.Record(1, 1)
			_, _ = c.Done(1)
			_ = c.ToHost(1, host, 1)
			_ = c.ToDevice(1, 1, host)
		})
		if n != 0 {
			t.Errorf("hot calls allocate %v times", n)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestOwner(t *testing.T) {
	f := working(13000)
	released := false
	f.funcs["cuDevicePrimaryCtxRelease_v2"] = func([]uintptr) Result { released = true; return Success }
	d, err := OpenWith(f)
	if err != nil {
		t.Fatal(err)
	}
	o, err := StartOwner(d, 0)
	if err != nil {
		t.Fatal(err)
	}
	if o.Device().Name != "TestGPU" || o.Device().Arch() != "sm_90" || o.Device().SMs != 132 {
		t.Errorf("device %+v", o.Device())
	}
	want := errors.New("mine")
	if err := o.Do(func(*Context) error { return want }); err != want {
		t.Errorf("error of the function is lost: %v", err)
	}
	func() {
		defer func() {
			if recover() != "boom" {
				t.Error("a panic did not reach the caller")
			}
		}()
		_ = o.Do(func(*Context) error { panic("boom") })
	}()
	if err := o.Do(func(*Context) error { return nil }); err != nil {
		t.Errorf("after a panic: %v", err)
	}
	if err := o.Try(func(*Context) { panic(want) }); err != want {
		t.Errorf("a panic with an error: %v", err)
	}
	if err := o.Try(func(*Context) {}); err != nil {
		t.Errorf("no panic: %v", err)
	}
	func() {
		defer func() {
			if recover() != "boom" {
				t.Error("a panic without an error did not reach the caller")
			}
		}()
		_ = o.Try(func(*Context) { panic("boom") })
	}()
	o.Close()
	o.Close()
	if err := o.Do(func(*Context) error { return nil }); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	if !released {
		t.Error("the context was not released")
	}
	if _, err := StartOwner(d, 1); err == nil {
		t.Error("GPU 1 of 1 was found")
	}
}
