package code

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"unsafe"

	"ninfer/internal/backend/cuda/driver"
)

// fake is a driver with one GPU of compute capability major.minor. Functions named in fails return that result, all others succeed; sizes is
// what the kernel of that name writes.
type fake struct {
	major, minor int32
	fails        map[string]driver.Result
	sizes        []uint32
	names        []string
	called       map[string]int
	code         []string // that was loaded, a module's number less 1
	grid, block  [3]uint32
	shared       map[uintptr]uintptr // dynamic shared memory allowed to a function
}

func (f *fake) Open(...string) (uintptr, error) { return 1, nil }

func (f *fake) Symbol(_ uintptr, name string) uintptr {
	f.names = append(f.names, name)
	return uintptr(len(f.names))
}

// at is what an argument points to.
func at[T any](a []uintptr, i int) *T { return *(**T)(unsafe.Pointer(&a[i])) }

func (f *fake) Call(fn uintptr, a []uintptr) uintptr {
	name := f.names[fn-1]
	f.called[name]++
	switch name {
	case "cuDriverGetVersion":
		*at[int32](a, 0) = 13000
	case "cuDeviceGetCount":
		*at[int32](a, 0) = 1
	case "cuDeviceGetAttribute":
		*at[int32](a, 0) = map[uintptr]int32{75: f.major, 76: f.minor, 16: 132, 97: 1000}[a[1]]
	case "cuLibraryLoadData":
		f.code = append(f.code, string(unsafe.Slice(at[byte](a, 1), 4)))
		*at[uintptr](a, 0) = uintptr(len(f.code))
	case "cuLibraryGetKernel":
		*at[uintptr](a, 0) = 100*a[1] + uintptr(*at[byte](a, 2)) - 'a'
	case "cuKernelGetFunction":
		*at[uintptr](a, 0) = a[1]
	case "cuFuncGetAttribute":
		*at[int32](a, 0) = map[uintptr]int32{1: 24}[a[1]]
	case "cuFuncSetAttribute":
		if a[1] == 8 {
			f.shared[a[0]] = a[2]
		}
	case "cuLaunchKernelEx":
		f.grid, f.block = at[[2][3]uint32](a, 0)[0], at[[2][3]uint32](a, 0)[1]
	case "cuMemcpyDtoHAsync_v2":
		to := unsafe.Slice(at[byte](a, 0), a[2])
		for i := range a[2] / 4 {
			binary.LittleEndian.PutUint32(to[4*i:], f.sizes[i])
		}
	}
	return uintptr(f.fails[name])
}

type id int

type params struct{ a, b uint64 }

var good = Table[id]{
	Archs:   []string{"sm_90a", "sm_120a"},
	Sources: []string{"one", "two"},
	Kernels: []Kernel{{"a", "one", 128}, {"b", "two", 96}, {"c", "two", 32}},
	Layout:  []uintptr{16, 0, 8},
	Sizes:   2,
	Files:   fstest.MapFS{"fatbin/one.fatbin": {Data: []byte("ONE!")}, "fatbin/two.fatbin": {Data: []byte("TWO!")}},
}

// on runs do with a loaded set, or gives the error of loading it.
func on(t *testing.T, f *fake, table Table[id], roomy []id, do func(*driver.Context, *Set[id]) error) error {
	t.Helper()
	f.called, f.shared = map[string]int{}, map[uintptr]uintptr{}
	if f.sizes == nil {
		f.sizes = []uint32{16, 0, 8}
	}
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
		s, err := Load(c, &table, nil, roomy)
		if err != nil {
			return err
		}
		if do != nil {
			err = do(c, s)
		}
		return errors.Join(err, s.Unload(c))
	})
}

// A GPU the kernels were not compiled for is refused before anything is loaded, in one line that says what it is and what is needed.
func TestWrongArchitecture(t *testing.T) {
	for _, v := range [][2]int32{{8, 0}, {8, 9}, {10, 0}, {12, 1}} {
		f := &fake{major: v[0], minor: v[1]}
		err := on(t, f, good, nil, nil)
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
		if err := on(t, &fake{major: v[0], minor: v[1]}, good, nil, nil); err != nil {
			t.Errorf("%v: %v", v, err)
		}
	}
}

// Whatever fails, the error names it and what to do, and what was loaded by then is given back.
func TestFailures(t *testing.T) {
	without := good
	without.Files = fstest.MapFS{"fatbin/one.fatbin": {Data: []byte("ONE!")}}
	empty := good
	empty.Files = fstest.MapFS{"fatbin/one.fatbin": {Data: []byte("ONE!")}, "fatbin/two.fatbin": {}}
	for _, c := range []struct {
		table  Table[id]
		call   string
		result driver.Result
		sizes  []uint32
		loaded int
		want   string
	}{
		{without, "", 0, nil, 1, "kernels of two.cu are not compiled"},
		{empty, "", 0, nil, 1, "load kernels of two.cu"},
		{good, "cuLibraryLoadData", driver.ErrorNoBinary, nil, 0, "load kernels of one.cu"},
		// drivers say that the target is missing only when a kernel is asked for
		{good, "cuLibraryGetKernel", driver.ErrorNoBinary, nil, 2, "the kernels of one.cu hold no machine code for "},
		{good, "cuKernelGetFunction", 719, nil, 2, "kernel a: "},
		{good, "cuFuncSetAttribute", 719, nil, 2, "kernel a: "},
		{good, "cuLaunchKernelEx", 719, nil, 2, "kernel c: "},
		{good, "cuMemAlloc_v2", driver.ErrorOutOfMemory, nil, 2, "struct sizes"},
		{good, "", 0, []uint32{16, 0, 4}, 2, "at entry 2: 4, want 8: run tools/kernelgen"},
		{good, "", 0, []uint32{16 + 1<<24, 0, 8}, 2, "at entry 0"},
	} {
		f := &fake{major: 9, fails: map[string]driver.Result{c.call: c.result}, sizes: c.sizes}
		err := on(t, f, c.table, nil, nil)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s %d: %v, want %q", c.call, c.result, err, c.want)
		}
		if f.called["cuLibraryUnload"] != c.loaded {
			t.Errorf("%v: %d modules were unloaded, %d loaded", err, f.called["cuLibraryUnload"], c.loaded)
		}
	}
}

// Every kernel comes from its source, those that are roomy get what a block can have beside their static shared memory, a launch has the
// kernel's threads, costs no allocation, and an error of it names the kernel.
func TestRun(t *testing.T) {
	for _, c := range []struct {
		roomy []id
		want  []uintptr
	}{{nil, []uintptr{100, 201, 202}}, {[]id{1}, []uintptr{201}}, {[]id{}, nil}} {
		f := &fake{major: 9, fails: map[string]driver.Result{}}
		err := on(t, f, good, c.roomy, func(ctx *driver.Context, s *Set[id]) error {
			if got := slices.Sorted(maps.Keys(f.shared)); !slices.Equal(got, c.want) || len(got) > 0 && f.shared[got[0]] != 1000-24 {
				t.Errorf("roomy %v: %v", c.roomy, f.shared)
			}
			if !slices.Equal(f.code, []string{"ONE!", "TWO!"}) {
				t.Errorf("code %q", f.code)
			}
			p := params{1, 2}
			if n := testing.AllocsPerRun(100, func() { _ = s.Run(ctx, 0, 1, [3]uint32{5, 6, 7}, 64, &p, true) }); n != 0 {
				t.Errorf("a launch allocates %v times", n)
			}
			if f.grid != [3]uint32{5, 6, 7} || f.block != [3]uint32{96, 1, 1} {
				t.Errorf("%v blocks of %v threads", f.grid, f.block)
			}
			f.fails["cuLaunchKernelEx"] = 719
			if err := s.Run(ctx, 0, 1, [3]uint32{1, 1, 1}, 0, &p, false); err == nil || !strings.Contains(err.Error(), "kernel b: ") {
				return fmt.Errorf("a failed launch: %w", err)
			}
			return nil
		})
		if err != nil || f.called["cuLibraryUnload"] != 2 {
			t.Errorf("%v, %d modules unloaded", err, f.called["cuLibraryUnload"])
		}
	}
}
