// Package code loads the machine code of a folder of kernels, checks it and launches it.
//
// tools/kernelgen compiles such a folder and writes its Table. Load refuses a GPU that there is no code for, and code whose parameter structs
// are laid out otherwise than this program's; after that a Set is read-only. All calls belong on the goroutine that owns the GPU.
package code

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"runtime"
	"slices"
	"unsafe"

	"ninfer/internal/backend/cuda/driver"
)

// Kernel is an entry of a table.
type Kernel struct {
	Name, Source string // Source is the file without its suffix
	Threads      uint32 // of a block
}

// Table is a folder of kernels, which K numbers.
type Table[K ~int] struct {
	Archs   []string // targets of the machine code, such as sm_90a
	Sources []string // files without their suffix
	Kernels []Kernel
	Layout  []uintptr // size of every parameter struct followed by the offsets of its fields
	Sizes   K         // the kernel that writes Layout as the CUDA compiler has it; its parameters are SizesParams
	Files   fs.FS     // holds fatbin/SOURCE.fatbin
}

// SizesParams are the parameters of the kernel sizes.
type SizesParams struct {
	Out         driver.Ptr // uint32 [N]
	N, Reserved uint32
}

// Set is the kernels of a folder, loaded in one context.
type Set[K ~int] struct {
	kernels []Kernel
	funcs   []driver.Func
	mods    map[string]driver.Module // by source
}

// Load loads the machine code of a table into c; files, where they are not nil, stand in for the table's own: a folder that kernelgen has
// just written. The kernels in roomy, all if it is nil, may have all the shared memory of a block, which costs them the L1 cache. It fails with
// *driver.ArchError on a GPU there is no code for.
func Load[K ~int](c *driver.Context, t *Table[K], files fs.FS, roomy []K) (s *Set[K], err error) {
	if !slices.Contains(t.Archs, c.Device.Arch()+"a") {
		return nil, &driver.ArchError{Device: c.Device.Name, Have: c.Device.Arch(), Need: t.Archs}
	}
	if files == nil {
		files = t.Files
	}
	s = &Set[K]{kernels: t.Kernels, mods: map[string]driver.Module{}}
	defer func() {
		if err != nil {
			_ = s.Unload(c)
			s = nil
		}
	}()
	for _, src := range t.Sources {
		image, err := fs.ReadFile(files, "fatbin/"+src+".fatbin")
		if err != nil {
			return s, fmt.Errorf("cuda: kernels of %s.cu are not compiled: %w", src, err)
		}
		m, err := c.Load(image)
		if err != nil {
			return s, fmt.Errorf("cuda: load kernels of %s.cu: %w", src, err)
		}
		s.mods[src] = m
	}
	for i, k := range t.Kernels {
		f, err := c.Function(s.mods[k.Source], k.Name)
		if e := (*driver.Error)(nil); errors.As(err, &e) && e.Code == driver.ErrorNoBinary {
			return s, fmt.Errorf("cuda: the kernels of %s.cu hold no machine code for %s (%s): run tools/kernelgen", k.Source, c.Device.Name, c.Device.Arch())
		}
		if err == nil && (roomy == nil || slices.Contains(roomy, K(i))) {
			var static int
			if static, err = c.Shared(f); err == nil {
				err = c.AllowShared(f, c.Device.SharedPerBlock-static)
			}
		}
		if err != nil {
			return s, fmt.Errorf("cuda: kernel %s: %w", k.Name, err)
		}
		s.funcs = append(s.funcs, f)
	}
	return s, s.compare(c, t)
}

// compare compares the parameter structs of the two compilers.
func (s *Set[K]) compare(c *driver.Context, t *Table[K]) error {
	got := make([]byte, 4*len(t.Layout))
	p, err := c.Alloc("struct sizes", uint64(len(got)))
	if err != nil {
		return err
	}
	defer func() { _ = c.Free(p) }()
	if err := s.Run(c, 0, t.Sizes, [3]uint32{1, 1, 1}, 0, &SizesParams{Out: p, N: uint32(len(t.Layout))}, false); err != nil {
		return err
	}
	if err := c.ToHost(0, got, p); err != nil {
		return err
	}
	if err := c.Synchronize(); err != nil {
		return err
	}
	for i, want := range t.Layout {
		if v := uintptr(binary.LittleEndian.Uint32(got[4*i:])); v != want {
			return fmt.Errorf("cuda: parameter structs differ between the compilers at entry %d: %d, want %d: run tools/kernelgen", i, v, want)
		}
	}
	return nil
}

// Unload frees the machine code.
func (s *Set[K]) Unload(c *driver.Context) error {
	var errs []error
	for _, m := range s.mods {
		errs = append(errs, c.Unload(m))
	}
	return errors.Join(errs...)
}

// Global finds a variable of a source's machine code: debug builds have some.
func (s *Set[K]) Global(c *driver.Context, source, name string) (driver.Ptr, uint64, error) {
	return c.Global(s.mods[source], name)
}

// Run launches a kernel on a stream with grid blocks and so many bytes of dynamic shared memory. params is the kernel's struct; pdl lets it
// start before its predecessor has ended. It does not allocate.
func (s *Set[K]) Run[P any](c *driver.Context, st driver.Stream, k K, grid [3]uint32, shared uint32, params *P, pdl bool) error {
	l := driver.Launch{Func: s.funcs[k], Grid: grid, Block: [3]uint32{s.kernels[k].Threads, 1, 1}, Shared: shared, PDL: pdl}
	err := c.Launch(st, &l, unsafe.Pointer(params), unsafe.Sizeof(*params))
	runtime.KeepAlive(params)
	if err != nil {
		return fmt.Errorf("cuda: kernel %s: %w", s.kernels[k].Name, err)
	}
	return nil
}
