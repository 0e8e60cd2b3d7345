// Package kernels holds the CUDA kernels: sources, compiled machine code, generated parameter structs, and the launch plans that
// belong to each kernel.
//
// The machine code is compiled by tools/kernelgen and committed; manifest.json ties it to the sources, and this package's tests fail
// when a source has changed and the code has not. Load checks that the GPU is one the code was made for and that both compilers
// agree about every parameter struct; after that a Set is read-only.
//
// A plan function (Gemv, HcDown, ...) turns an operation's sizes and addresses into a launch: grid, shared memory, parameters. Plans
// depend on the GPU only through Limits, so they can be tested without one. All matrix plans promise that results do not depend on
// anything but the inputs and the plan: reductions have a fixed order.
package kernels

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"runtime"
	"slices"
	"unsafe"

	"ninfer/internal/backend/cuda/driver"
)

//go:embed fatbin/*.fatbin
var fatbins embed.FS

type kernelInfo struct {
	name, source string
	threads      uint32
}

func sizeOf[T any]() uintptr { var v T; return unsafe.Sizeof(v) }

func offset[T, F any](f func(*T) *F) uintptr {
	v := new(T)
	return uintptr(unsafe.Pointer(f(v))) - uintptr(unsafe.Pointer(v))
}

// Limits is what a plan needs to know about a GPU.
type Limits struct {
	SMs            uint32
	SharedPerBlock uint32 // bytes a block may have
	SharedPerSM    uint32 // bytes
}

// LimitsOf reads a device's limits.
func LimitsOf(d driver.Device) Limits {
	return Limits{SMs: uint32(d.SMs), SharedPerBlock: uint32(d.SharedPerBlock), SharedPerSM: uint32(d.SharedPerSM)}
}

// Half is the shared memory a block may use so that two kernels fit on an SM (rule R5); 1 KB a block belongs to the system.
func (l Limits) Half() uint32 { return l.SharedPerSM/2 - 1024 }

// Set is the loaded kernels of one context.
type Set struct {
	Limits Limits
	funcs  [kernelCount]driver.Func
	mods   map[string]driver.Module // by source
}

// Load loads the committed machine code into c. It fails with *driver.ArchError on a GPU there is no code for.
func Load(c *driver.Context) (*Set, error) { return LoadFrom(c, fatbins) }

// LoadFrom is Load with machine code from another place: a folder with a subfolder fatbin that kernelgen has just written.
func LoadFrom(c *driver.Context, code fs.FS) (*Set, error) {
	if !slices.Contains(archs, c.Device.Arch()+"a") {
		return nil, &driver.ArchError{Device: c.Device.Name, Have: c.Device.Arch(), Need: archs}
	}
	s := &Set{Limits: LimitsOf(c.Device), mods: map[string]driver.Module{}}
	for _, src := range sources {
		image, err := fs.ReadFile(code, "fatbin/"+src+".fatbin")
		if err != nil {
			return nil, fmt.Errorf("cuda: kernels of %s.cu are not compiled: %w", src, err)
		}
		m, err := c.Load(image)
		if err != nil {
			return nil, fmt.Errorf("cuda: load kernels of %s.cu: %w", src, err)
		}
		s.mods[src] = m
	}
	for i, k := range table {
		f, err := c.Function(s.mods[k.source], k.name)
		if e := (*driver.Error)(nil); errors.As(err, &e) && e.Code == driver.ErrorNoBinary {
			return nil, fmt.Errorf("cuda: the kernels of %s.cu hold no machine code for %s (%s): run tools/kernelgen", k.source, c.Device.Name, c.Device.Arch())
		}
		if err != nil {
			return nil, fmt.Errorf("cuda: kernel %s: %w", k.name, err)
		}
		info, err := c.Info(f)
		if err != nil {
			return nil, fmt.Errorf("cuda: kernel %s: %w", k.name, err)
		}
		if err := c.AllowShared(f, int(s.Limits.SharedPerBlock)-info.Shared); err != nil {
			return nil, fmt.Errorf("cuda: kernel %s: %w", k.name, err)
		}
		s.funcs[i] = f
	}
	return s, s.checkLayout(c)
}

// checkLayout compares the parameter structs of the two compilers.
func (s *Set) checkLayout(c *driver.Context) error {
	p, err := c.Alloc("struct sizes", uint64(4*len(layout)))
	if err != nil {
		return err
	}
	defer func() { _ = c.Free(p) }()
	if err := Run(s, c, 0, Plan{Kernel: Sizes, Grid: 1}, &SizesParams{Out: p, N: uint32(len(layout))}, false); err != nil {
		return err
	}
	got := make([]byte, 4*len(layout))
	if err := c.ToHost(0, got, p); err != nil {
		return err
	}
	if err := c.Synchronize(); err != nil {
		return err
	}
	for i, want := range layout {
		if v := uintptr(got[4*i]) | uintptr(got[4*i+1])<<8 | uintptr(got[4*i+2])<<16; v != want {
			return fmt.Errorf("cuda: parameter structs differ between the compilers at entry %d: %d, want %d: run tools/kernelgen", i, v, want)
		}
	}
	return nil
}

// Unload frees the machine code.
func (s *Set) Unload(c *driver.Context) error {
	for _, m := range s.mods {
		if err := c.Unload(m); err != nil {
			return err
		}
	}
	return nil
}

// Global finds a variable of a source's machine code: debug builds have some.
func (s *Set) Global(c *driver.Context, source, name string) (driver.Ptr, uint64, error) {
	return c.Global(s.mods[source], name)
}

// Plan is how a kernel is launched.
type Plan struct {
	Kernel ID
	Grid   uint32
	GridY  uint32 // 0 is 1
	Shared uint32 // dynamic shared memory, bytes
}

// Name is the kernel's name.
func (k ID) Name() string { return table[k].name }

// Run launches a plan on a stream. params is the kernel's struct; pdl lets it start before its predecessor has ended.
func Run[P any](s *Set, c *driver.Context, st driver.Stream, plan Plan, params *P, pdl bool) error {
	l := driver.Launch{
		Func: s.funcs[plan.Kernel], Grid: [3]uint32{plan.Grid, max(1, plan.GridY), 1}, Block: [3]uint32{table[plan.Kernel].threads, 1, 1},
		Shared: plan.Shared, PDL: pdl,
	}
	err := c.Launch(st, &l, unsafe.Pointer(params), unsafe.Sizeof(*params))
	runtime.KeepAlive(params)
	if err != nil {
		return fmt.Errorf("cuda: kernel %s: %w", table[plan.Kernel].name, err)
	}
	return nil
}
