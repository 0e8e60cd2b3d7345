// Package kernels holds the CUDA kernels that multiply many rows: sources, compiled machine code, generated parameter structs.
//
// tools/kernelgen -dir internal/backend/cuda/gemm/kernels compiles them; the machine code is committed, and this package's tests fail
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

// Geometry of the kernels' tiles.
const (
	TileRows  = 128 // activation rows of a tile; 64 in the kernels named so
	TileCols  = 128 // weight rows
	TileK     = 64
	stages    = 3
	WideRows  = 192  // activation rows of a tile of packed experts on sm_90
	SomeRows  = 96   // the same where experts get fewer
	FewRows   = 40   // and where they get few
	WideAlign = 8    // where the pairs of an expert begin in panels
	RunRows   = 256  // activation rows of a run of the counting sort
	SmallRows = 1024 // rows that sort_small does
	MaxTop    = 16
	MaxExpert = 512
)

// TileShared is the shared memory of a block with a tile of rows activation rows, in bytes.
func TileShared(rows int) uint32 { return uint32(stages * (rows + TileCols) * 2 * TileK) }

// SortShared is the shared memory of sort_small, in bytes.
const SortShared = SmallRows/32*MaxExpert*6 + 4*MaxExpert

// WideShared is the shared memory of a block of packed experts on sm_90 with items of up to rows rows: WideRows, SomeRows or FewRows.
func WideShared(rows int) uint32 {
	stages, ring := 6, 3
	if rows < WideRows {
		stages, ring = 4, 4
	}
	return uint32(stages*rows*2*TileK + 8*ring*1152 + rows*2*TileCols + 128)
}

// Set is the loaded kernels of one context.
type Set = code.Set[ID]

// Load loads the machine code into c: the committed one, or that of files. It fails with *driver.ArchError on a GPU there is no code for.
func Load(c *driver.Context, files fs.FS) (*Set, error) { return code.Load(c, &table, files, nil) }

// Layout is the size of every parameter struct followed by the offsets of its fields.
func Layout() []uintptr { return layout }
