// Package kernels holds CUDA kernels for every operation of a program: sources, compiled machine code, generated parameter structs. The
// plain ones are written for correctness and take any shape and format. Beside them are fast ones for the shapes of real models: delta rule,
// attention, products with more than BF16. The tuned matrix kernels live in cuda/kernels.
//
// tools/kernelgen -dir internal/backend/cuda/device/kernels compiles them; the machine code is committed, and this package's tests fail
// when a source has changed and the code has not.
package kernels

import (
	"embed"
	"io/fs"

	"ninfer/internal/backend/cuda/code"
	"ninfer/internal/backend/cuda/driver"
)

//go:embed fatbin/*.fatbin
var fatbins embed.FS

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
	return 128 + 1024*r + operands*r*(2*k+32) + 128 + 8*depth*64*tile
}

// MaxRows is how many activation rows Gemv and HcUp take.
const MaxRows = 8

// Set is the loaded kernels of one context.
type Set = code.Set[ID]

// Load loads the machine code into c: the committed one, or that of files. It fails with *driver.ArchError on a GPU there is no code for.
func Load(c *driver.Context, files fs.FS) (*Set, error) {
	return code.Load(c, &table, files, []ID{Delta, ProjectBf16, ProjectBf16Deep, ProjectE4m3, ProjectE4m3Deep})
}

// Layout is the size of every parameter struct followed by the offsets of its fields.
func Layout() []uintptr { return layout }
