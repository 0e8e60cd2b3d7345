// Package kernels holds the CUDA kernels that multiply many rows: sources, compiled machine code, generated parameter structs.
//
// tools/kernelgen -dir internal/backend/cuda/gemm/kernels compiles them; the machine code is committed, and this package's tests fail
// when a source has changed and the code has not.
package kernels

import (
	"embed"
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

// Geometry of the kernels' tiles.
const (
	TileRows  = 128 // activation rows of a tile; 64 in the kernels named so
	TileCols  = 128 // weight rows
	TileK     = 64
	stages    = 3
	WideRows  = 192 // activation rows of a tile of packed experts on sm_90
	RunRows   = 256 // activation rows of a run of the counting sort
	MaxTop    = 16
	MaxExpert = 512
)

// TileShared is the shared memory of a block with a tile of rows activation rows, in bytes.
func TileShared(rows int) uint32 { return uint32(stages * (rows + TileCols) * 2 * TileK) }

// WideShared is the shared memory of a block of packed experts on sm_90.
const WideShared = 6*(WideRows*2*TileK+8*640) + WideRows*2*TileCols

// Set is the loaded kernels of one context.
type Set struct {
	funcs [kernelCount]driver.Func
	mods  []driver.Module
}

// Load loads the machine code into c: the committed one, or from a folder with a subfolder fatbin that kernelgen has just written. It fails
// with *driver.ArchError on a GPU there is no code for.
func Load(c *driver.Context, code fs.FS) (*Set, error) {
	if code == nil {
		code = fatbins
	}
	if !slices.Contains(archs, c.Device.Arch()+"a") {
		return nil, &driver.ArchError{Device: c.Device.Name, Have: c.Device.Arch(), Need: archs}
	}
	s := &Set{}
	mods := map[string]driver.Module{}
	for _, src := range sources {
		image, err := fs.ReadFile(code, "fatbin/"+src+".fatbin")
		if err != nil {
			return nil, fmt.Errorf("cuda: kernels of %s.cu are not compiled: %w", src, err)
		}
		if mods[src], err = c.Load(image); err != nil {
			return nil, fmt.Errorf("cuda: load kernels of %s.cu: %w", src, err)
		}
		s.mods = append(s.mods, mods[src])
	}
	for i, k := range table {
		f, err := c.Function(mods[k.source], k.name)
		if err != nil {
			return nil, fmt.Errorf("cuda: kernel %s: %w", k.name, err)
		}
		info, err := c.Info(f)
		if err == nil && info.MaxThreads >= 256 {
			err = c.AllowShared(f, c.Device.SharedPerBlock-info.Shared)
		}
		if err != nil {
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
	if err := Run(s, c, 0, Sizes, [3]uint32{1, 1, 1}, 0, &SizesParams{Out: p, N: uint32(len(layout))}); err != nil {
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

// Name is the kernel's name.
func (k ID) Name() string { return table[k].name }

// Run launches a kernel on a stream after everything before it. params is the kernel's struct.
func Run[P any](s *Set, c *driver.Context, st driver.Stream, k ID, grid [3]uint32, shared uint32, params *P) error {
	l := driver.Launch{Func: s.funcs[k], Grid: grid, Block: [3]uint32{table[k].threads, 1, 1}, Shared: shared}
	err := c.Launch(st, &l, unsafe.Pointer(params), unsafe.Sizeof(*params))
	runtime.KeepAlive(params)
	if err != nil {
		return fmt.Errorf("cuda: kernel %s: %w", table[k].name, err)
	}
	return nil
}
