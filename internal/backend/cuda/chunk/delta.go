package chunk

import (
	"errors"
	"fmt"

	"ninfer/internal/backend/cuda/chunk/kernels"
	"ninfer/internal/backend/cuda/driver"
)

// DeltaShape is the size of a gated delta net: KeyHeads query and key heads and Heads value heads of Dim values, and a convolution of Taps.
type DeltaShape struct{ KeyHeads, Heads, Dim, Taps int }

// Fits says whether there are kernels for the shape.
func (d DeltaShape) Fits() error {
	if d.Dim != 128 || d.Taps != 4 {
		return fmt.Errorf("chunk: delta net with heads of %d and %d taps: only 128 and 4", d.Dim, d.Taps)
	}
	if d.KeyHeads < 1 || d.Heads < d.KeyHeads || d.Heads%d.KeyHeads != 0 {
		return fmt.Errorf("chunk: delta net with %d value heads and %d key heads: needs a multiple", d.Heads, d.KeyHeads)
	}
	return nil
}

const chunkRows = 64

// deltaScratch is the workspace of a pass: keys and queries of every chunk and key head, inverse, scores, decays and scales of the outputs of every chunk and head, outputs before their norm.
func (d DeltaShape) scratch(at driver.Ptr, rows int) (keys, queries, inverse, scores, decay, scales, o driver.Ptr, size uint64) {
	s := scratch{at: at}
	n := tiles(rows, chunkRows)
	keys = s.take(n * d.KeyHeads * chunkRows * d.Dim * 2)
	queries = s.take(n * d.KeyHeads * chunkRows * d.Dim * 2)
	inverse = s.take(n * d.Heads * chunkRows * chunkRows * 2)
	scores = s.take(n * d.Heads * chunkRows * chunkRows * 2)
	decay = s.take(n * d.Heads * 2 * chunkRows * 4)
	scales = s.take(n * d.Heads * d.Dim * 4)
	o = s.take(rows * d.Heads * d.Dim * 2)
	return keys, queries, inverse, scores, decay, scales, o, s.size
}

// Workspace is the bytes that Delta needs for so many rows.
func (d DeltaShape) Workspace(rows int) uint64 {
	_, _, _, _, _, _, _, size := d.scratch(0, rows)
	return size
}

// Delta is the gated delta rule (Qwen4ExpTextGatedDeltaNet of transformers) over the rows of a pass: convolution, gates, norms, recurrence, gated norm.
type Delta struct {
	DeltaShape
	Rows int
	X    driver.Ptr // BF16 [Rows][XLd]: queries, keys, values before the convolution
	XLd  int
	Z    driver.Ptr // BF16 [Rows][ZLd]
	ZLd  int
	A, B driver.Ptr // BF16 [Rows][ALd], any pitch
	ALd  int

	Conv, Alog, Dt, Norm driver.Ptr // FP32 [Taps][channels], [Heads], [Heads], [Dim]
	Eps                  float32

	Window    driver.Ptr // BF16 [Taps-1][channels] of the lane, updated
	State     driver.Ptr // [Heads][Dim][Dim] of the lane, key by value, updated: FP32, or BF16 rounded once at the end
	HalfState bool

	Out   driver.Ptr // BF16 [Rows][OutLd]: o/rms(o)*norm*sigmoid(z); may be Z
	OutLd int
	Work  driver.Ptr // Workspace(Rows) bytes
	Plain bool       // use the kernels that every GPU has
}

const (
	deltaPrepareShared = 2*64*128*2 + 3*64*16*4 + 2*3*64*4 + 64*4
	deltaStage         = 2*64*128*2 + 2*64*64*2 + 2*64*4 + 68*128
	deltaWide          = 226816                                     // of the kernel on the tensor instructions of four warps: three stages of its own
	deltaExchange      = 4 * (8*512 + 4*512 + 8*512 + 32*8 + 32*16) // what pairs of warps hand each other
)

// Delta launches d.
func (s *Set) Delta(c *driver.Context, st driver.Stream, d *Delta) error {
	width := (2*d.KeyHeads + d.Heads) * d.Dim
	if err := errors.Join(d.Fits(), checkRows(d.Rows), checkPiece("inputs", d.X, d.XLd), checkPiece("gates", d.Z, d.ZLd), checkPiece("outputs", d.Out, d.OutLd)); err != nil {
		return err
	}
	kernel, exchange := kernels.DeltaPair, deltaExchange
	switch {
	case s.wide && !d.Plain && s.shared-1024 >= deltaWide:
		kernel, exchange = kernels.DeltaWide, deltaWide-3*deltaStage
	case s.shared-1024-exchange < 2*deltaStage:
		kernel, exchange = kernels.DeltaRun, 0
	}
	stages := min(3, (s.shared-1024-exchange)/deltaStage)
	if stages < 1 {
		return fmt.Errorf("chunk: the delta rule needs %d bytes of shared memory a block, the GPU has %d", deltaStage+1024, s.shared)
	}
	keys, queries, inverse, scores, decay, scales, o, _ := d.scratch(d.Work, d.Rows)
	prepare := kernels.DeltaPrepareParams{
		X: d.X, Window: d.Window, A: d.A, B: d.B, Conv: d.Conv, Alog: d.Alog, Dt: d.Dt, Keys: keys, Queries: queries, Inverse: inverse, Scores: scores, Decay: decay,
		Rows: uint32(d.Rows), XLd: uint32(d.XLd), ALd: uint32(d.ALd), KeyHeads: uint32(d.KeyHeads), Heads: uint32(d.Heads),
	}
	if err := run(s, c, st, kernels.DeltaPrepare, tiles(d.Rows, chunkRows), d.KeyHeads, deltaPrepareShared, &prepare); err != nil {
		return err
	}
	step := kernels.DeltaRunParams{
		X: d.X, Window: d.Window, Conv: d.Conv, Keys: keys, Queries: queries, Inverse: inverse, Scores: scores, Decay: decay, State: d.State, Out: o, Scales: scales,
		Rows: uint32(d.Rows), XLd: uint32(d.XLd), KeyHeads: uint32(d.KeyHeads), Heads: uint32(d.Heads), Stages: uint32(stages),
	}
	if d.HalfState {
		step.HalfState = 1
	}
	if err := run(s, c, st, kernel, 2*d.Heads, 1, stages*deltaStage+exchange, &step); err != nil {
		return err
	}
	finish := kernels.DeltaFinishParams{
		X: d.X, Z: d.Z, Norm: d.Norm, Scales: scales, O: o, Window: d.Window, Out: d.Out, Rows: uint32(d.Rows), XLd: uint32(d.XLd), ZLd: uint32(d.ZLd), OutLd: uint32(d.OutLd),
		Heads: uint32(d.Heads), C: uint32(width), Eps: d.Eps,
	}
	return run(s, c, st, kernels.DeltaFinish, tiles(tiles(d.Rows, 8)*d.Heads, 8), 1, 0, &finish)
}
