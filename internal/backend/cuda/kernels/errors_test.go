package kernels

import (
	"errors"
	"strings"
	"testing"
	"testing/fstest"
	"unsafe"

	"ninfer/internal/backend/cuda/driver"
)

// fake is a driver with one GPU of compute capability major.minor; functions named in fails return that result, all others succeed.
type fake struct {
	major, minor int32
	fails        map[string]driver.Result
	names        []string
	called       map[string]int
}

func (f *fake) Open(...string) (uintptr, error) { return 1, nil }

func (f *fake) Symbol(_ uintptr, name string) uintptr {
	f.names = append(f.names, name)
	return uintptr(len(f.names))
}

func (f *fake) Call(fn uintptr, a []uintptr) uintptr {
	name := f.names[fn-1]
	f.called[name]++
	put := func(i int, v int32) { *(*int32)(*(*unsafe.Pointer)(unsafe.Pointer(&a[i]))) = v }
	switch name {
	case "cuDriverGetVersion":
		put(0, 13000)
	case "cuDeviceGetCount":
		put(0, 1)
	case "cuDeviceGetAttribute":
		put(0, map[uintptr]int32{75: f.major, 76: f.minor, 16: 132}[a[1]])
	}
	return uintptr(f.fails[name])
}

func loadOn(t *testing.T, f *fake) error {
	t.Helper()
	f.called = map[string]int{}
	d, err := driver.OpenWith(f)
	if err != nil {
		t.Fatal(err)
	}
	o, err := driver.StartOwner(d, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	return o.Do(func(c *driver.Context) error {
		_, err := Load(c)
		return err
	})
}

// A GPU the kernels were not compiled for is refused before anything is loaded, in one line that says what it is and what is needed.
func TestWrongArchitecture(t *testing.T) {
	for _, v := range [][2]int32{{8, 0}, {8, 9}, {10, 0}, {12, 1}} {
		f := &fake{major: v[0], minor: v[1]}
		err := loadOn(t, f)
		var e *driver.ArchError
		if !errors.As(err, &e) {
			t.Errorf("%v: got %v", v, err)
			continue
		}
		s := err.Error()
		if strings.Contains(s, "\n") || !strings.Contains(s, e.Have) || !strings.Contains(s, "sm_90a and sm_120a") {
			t.Errorf("message %q", s)
		}
		if f.called["cuLibraryLoadData"] != 0 {
			t.Errorf("%v: code was loaded", v)
		}
	}
	for _, v := range [][2]int32{{9, 0}, {12, 0}} {
		var e *driver.ArchError
		if err := loadOn(t, &fake{major: v[0], minor: v[1], fails: map[string]driver.Result{"cuLibraryLoadData": driver.ErrorNoBinary}}); errors.As(err, &e) || err == nil ||
			!strings.Contains(err.Error(), "load kernels of expert.cu") {
			t.Errorf("%v: code the driver refuses: %v", v, err)
		}
	}
}

// Machine code that lacks the device's target is named, with what to do; drivers say so only when a kernel is asked for.
func TestCodeForAnotherTarget(t *testing.T) {
	err := loadOn(t, &fake{major: 9, fails: map[string]driver.Result{"cuLibraryGetKernel": driver.ErrorNoBinary}})
	if err == nil || !strings.Contains(err.Error(), "no machine code for ") || !strings.Contains(err.Error(), "(sm_90): run tools/kernelgen") {
		t.Errorf("got %v", err)
	}
}

// Missing or empty machine code is an error that names the source.
func TestNoCode(t *testing.T) {
	f := &fake{major: 9, called: map[string]int{}}
	d, err := driver.OpenWith(f)
	if err != nil {
		t.Fatal(err)
	}
	o, err := driver.StartOwner(d, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	for _, code := range []fstest.MapFS{{}, {"fatbin/expert.fatbin": {}}} {
		err := o.Do(func(c *driver.Context) error {
			_, err := LoadFrom(c, code)
			return err
		})
		if err == nil || !strings.Contains(err.Error(), "expert.cu") {
			t.Errorf("%d files: %v", len(code), err)
		}
	}
}
