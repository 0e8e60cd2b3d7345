// Package kernels holds plain CUDA kernels for every operation of a program: sources, compiled machine code, generated parameter
// structs. They are written for correctness and take any shape and format; the tuned matrix kernels live in cuda/kernels.
//
// tools/kernelgen -dir internal/backend/cuda/device/kernels compiles them; the machine code is committed, and this package's tests fail
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

// Format is a stored format as the kernels number it.
type Format uint32

// The formats; the numbers are those of common.cuh.
const (
	BF16 Format = iota
	FP32
	FP8RowBF16
	FP8RowFP32
	NVFP4
	Q4
	Q5
	Q6
	Q8
	FP8 // tables only
	U4  // tables only
)

// Flags of a Part.
const (
	PartF32      = 1 // out is FP32
	PartSilu     = 2 // silu(scale*v)
	PartSigmoid2 = 4 // 2*sigmoid(scale*v)
)

// Segment is how many blocks of tokens a block of SelectBlocks looks at, and Candidates how many the last one can choose among.
const (
	Segment    = 4096
	Candidates = 8192
)

// LikelyIDs is how many ids Likely finds.
const LikelyIDs = 128

// ProjectRows is how many activation rows a Project kernel takes at most.
const ProjectRows = 8

// ProjectDeep and ProjectShallow are how many runs of 64 bytes of a tile's rows the Project kernels have on their way, a warp.
const (
	ProjectDeep    = 24
	ProjectShallow = 16
)

// ProjectShared is the shared memory of a Project kernel's block, one of so many that share n weight rows of k, for r activation rows.
func ProjectShared(e4m3 bool, depth, r, k, n, blocks int) int {
	operands := 2
	if e4m3 {
		operands = 1
	}
	tile := 0 // of the block with the largest
	for _, rows := range []int{n / blocks, (n + blocks - 1) / blocks} {
		if tiles := (rows + 15) / 16; tiles > 0 {
			tile = max(tile, (rows+tiles-1)/tiles)
		}
	}
	return 1024*r + operands*r*(2*k+32) + 128 + 8*depth*64*tile
}

// MaxRows is how many activation rows Gemv and HcUp take.
const MaxRows = 8

// Set is the loaded kernels of one context.
type Set struct {
	funcs [kernelCount]driver.Func
	mods  []driver.Module
}

// Load loads the committed machine code into c. It fails with *driver.ArchError on a GPU there is no code for.
func Load(c *driver.Context) (*Set, error) { return LoadFrom(c, fatbins) }

// LoadFrom is Load with machine code from another place: a folder with a subfolder fatbin that kernelgen has just written.
func LoadFrom(c *driver.Context, code fs.FS) (*Set, error) {
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
		s.funcs[i] = f
		if !slices.Contains([]ID{Delta, ProjectBf16, ProjectBf16Deep, ProjectE4m3, ProjectE4m3Deep}, ID(i)) {
			continue
		}
		info, err := c.Info(f)
		if err == nil {
			err = c.AllowShared(f, int(c.Device.SharedPerBlock)-info.Shared)
		}
		if err != nil {
			return nil, fmt.Errorf("cuda: kernel %s: %w", k.name, err)
		}
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
	if err := Run(s, c, 0, Sizes, [3]uint32{1, 1, 1}, 0, &SizesParams{Out: p, N: uint32(len(layout))}, false); err != nil {
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

// Run launches a kernel on a stream. params is the kernel's struct; pdl lets it start before its predecessor has ended.
func Run[P any](s *Set, c *driver.Context, st driver.Stream, k ID, grid [3]uint32, shared uint32, params *P, pdl bool) error {
	l := driver.Launch{Func: s.funcs[k], Grid: grid, Block: [3]uint32{table[k].threads, 1, 1}, Shared: shared, PDL: pdl}
	err := c.Launch(st, &l, unsafe.Pointer(params), unsafe.Sizeof(*params))
	runtime.KeepAlive(params)
	if err != nil {
		return fmt.Errorf("cuda: kernel %s: %w", table[k].name, err)
	}
	return nil
}
