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
	"math/bits"

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

// Segment is how many ids a block of Likely looks at, and Candidates how many the last one can choose among.
const (
	Segment    = 4096
	Candidates = 8192
)

// SelectMost is how many blocks of tokens can be selected from.
const SelectMost = selectShare * 8192

const (
	selectShare = 8 // blocks of a cluster of SelectShared
	selectRows  = 8 // for so many rows all clusters find room at once
)

// Selector is the kernel that selects from so many blocks of tokens for each of so many rows, and how many blocks of it a row takes.
func Selector(blocks, rows int) (ID, int) {
	if rows > selectRows && blocks <= Segment {
		return SelectBlocks, 1
	}
	return SelectShared, selectShare
}

// PrepScore scores PrepKeys keys at a time, for which a block asks for PrepTile of shared memory, and once more if it has several tiles, where blocks are of
// four tokens.
const (
	PrepKeys = 128
	PrepTile = PrepKeys * 256
)

// What PrepSelect takes: blocks of four tokens, a row's units and rows.
const (
	prepSelectBlocks = 3 << 10
	prepSelectUnits  = selectShare * 4
	prepSelectStatic = 24 << 10 // shared memory of a block, at most, beside the index keys
)

// Selects says whether PrepSelect selects from so many blocks of four tokens for rows of so many units, a cluster of blocks each and one for the units: how
// many blocks that are a row, and the shared memory that each asks for, of as much as a block of the GPU can have.
func Selects(blocks, units, rows, most int) (x int, shared uint32, ok bool) {
	keys := up(blocks, 16*selectShare) * 16 * 256
	return 2 * selectShare, uint32(keys), blocks <= prepSelectBlocks && units <= prepSelectUnits && rows <= selectRows && keys+prepSelectStatic <= most
}

// attendTile is the keys or the values of BF16 that a block of AttendPairs has in shared memory.
const attendTile = 64 * 512

// Attender is the kernel in which a block attends for all queries of a key head, and the shared memory that it asks for: keys and values, of a cache in FP8
// the values alone.
func Attender(fp8 bool) (ID, uint32) {
	if fp8 {
		return AttendPairsFp8, attendTile
	}
	return AttendPairs, 2 * attendTile
}

// DeltaHeadsShared is the shared memory of a block of delta_heads: half of a head's state, records, channels.
const DeltaHeadsShared = 54 << 10

// LikelyIDs is how many ids Likely finds.
const LikelyIDs = 128

// StemColumns is how many columns of the streams a block of a StemProject kernel makes.
const StemColumns = 24

// ProjectTile is how many weight rows a block of a Project kernel works on at a time.
const ProjectTile = 24

// ProjectRows is how many activation rows a Project kernel takes at most.
const ProjectRows = 8

// Projector is one of the Project kernels. Those of a format all make the same sums.
type Projector struct {
	Kernel      ID
	E4M3        bool
	Least, Most int // activation rows
	Cluster     int // blocks that share K
	depth       int // runs of 64 bytes of each weight row that a warp has on their way, 128 where x stays BF16; 0: all of a block's weights
}

// Projectors are the Project kernels, the best first.
var Projectors = []Projector{
	{ProjectWholeLanes, true, 3, ProjectRows, 2, 0},
	{ProjectWhole, true, 1, 2, 1, 0},
	{ProjectWholeRows, true, 2, ProjectRows, 2, 0},
	{ProjectE4m3, true, 1, ProjectRows, 1, 4},
	{ProjectBf16Rows, false, 3, ProjectRows, 4, 5},
	{ProjectBf16Deep, false, 1, ProjectRows, 1, 4},
	{ProjectBf16, false, 1, ProjectRows, 1, 4},
}

// Projection is what a Project kernel is to do on so many blocks: r activation rows of k values times n weight rows, and pieces of the windows of some lanes. The
// rows are FP32 or BF16, with a factor for each Dim values or, if that is 1, without.
type Projection struct {
	R, K, N, Dim, Pieces, Lanes, Blocks int
	F32                                 bool
}

// Shares says how many of n weight rows each of so many blocks has, and 65,536 times how many blocks have one more. It is a parameter of the kernel.
func Shares(n, blocks int) uint32 { return uint32(n/blocks | n%blocks<<16) }

// Paced is how many clocks lie between what a block of a Project kernel asks for in front of its wait, so that what the delta rule of so many lanes, or their
// attention, still reads and writes does not wait behind all of the weights: 12 KB of E4M3, of BF16 rows that stay as they are 128 bytes of each weight row
// and share of k. 0: all at once.
func Paced(e4m3, delta bool, lanes int) uint32 {
	switch {
	case !delta && !e4m3:
		return 0
	case !delta && lanes < 3:
		return 900
	case !delta:
		return 300
	case e4m3 && (lanes < 3 || lanes > 5):
		return 300
	case e4m3:
		return 150
	case lanes < 3:
		return 1000
	case lanes < 6:
		return 700
	}
	return 0
}

// exact says whether BF16 rows stay as they are, beside BF16 weights: a head has whole runs of 128 bytes of them, or there are no factors.
func (p Projection) exact() bool {
	return !p.F32 && (p.Dim == 1 || p.Dim%64 == 0 && p.Dim&(p.Dim-1) == 0)
}

// Shared is the shared memory of a block; ok is false where the kernel cannot do it.
func (j Projector) Shared(p Projection) (size int, ok bool) {
	const passRows, pieces, warps = ProjectTile, 96, 12 // kPass, kPieces and kWarps of project.cu
	const held = 512                                    // values of a row, which a warp makes at most
	operands, pad, run := 2, 64, 32                     // run: values in what a row has on its way at once
	depth, bytes := j.depth, 64                         // bytes: of a run
	exact := !j.E4M3 && p.exact()
	switch {
	case j.E4M3:
		operands, pad, run = 1, 16, 64
	case exact:
		operands, run, bytes = 1, 64, 128
		if j.Kernel == ProjectBf16 {
			depth = 2
		}
	case j.Kernel != ProjectBf16:
		return 0, false
	}
	share := up(p.K/run, warps) * run // the largest of a warp
	values := share * warps / j.Cluster
	most := up(p.N, p.Blocks)
	passes := max(1, up(most, passRows))
	tile := up(most, passes)
	ok = j.Least <= p.R && p.R <= j.Most && p.K%run == 0
	piece := 64
	if p.R > p.Lanes {
		piece += 16 * (p.R - p.Lanes + 1)
	}
	size = 640 + min(passes, 2)*128*warps*p.R + piece*min(up(p.Pieces, p.Blocks), pieces) + operands*p.R*(2*values+pad) + 128
	if depth > 0 {
		size += warps * depth * bytes * tile
	} else {
		size += j.Cluster * tile * (up(64*values/run, 128)*128 + 64)
		ok = ok && passes == 1
	}
	if exact {
		if ok = ok && share <= held; p.Dim > 1 { // factors
			size += warps / j.Cluster * (share/p.Dim + 2) * 32
		}
	} else if depth == 0 { // factors a lane
		heads := share/p.Dim + 2
		if share%p.Dim == 0 && p.K/run%warps == 0 {
			heads = share / p.Dim
		}
		ok = ok && !p.F32 && share <= held && p.Dim&(p.Dim-1) == 0 && (p.Dim == 1 || up(p.R, j.Cluster)<<bits.Len(uint(heads-1)) <= 32)
	}
	return size, ok
}

func up(n, by int) int { return (n + by - 1) / by }

// MaxRows is how many activation rows Gemv and HcUp take.
const MaxRows = 8

// Set is the loaded kernels of one context.
type Set = code.Set[ID]

// Load loads the machine code into c: the committed one, or that of files. It fails with *driver.ArchError on a GPU there is no code for.
func Load(c *driver.Context, files fs.FS) (*Set, error) {
	return code.Load(c, &table, files, []ID{
		Delta, DeltaHeads, ProjectBf16, ProjectBf16Deep, ProjectBf16Rows, ProjectE4m3, ProjectWhole, ProjectWholeRows, ProjectWholeLanes,
		// where an SM had been divided for attention's kernels, the product that comes next could not start beside them
		PrepScore, PrepSelect, SelectBlocks, SelectShared, AttendPairs, AttendPairsFp8, MergePairs,
	})
}

// Layout is the size of every parameter struct followed by the offsets of its fields.
func Layout() []uintptr { return layout }
