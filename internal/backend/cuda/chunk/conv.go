package chunk

import (
	"fmt"

	"ninfer/internal/backend/cuda/chunk/kernels"
	"ninfer/internal/backend/cuda/driver"
)

// ConvRows is the depthwise causal convolution of the n-gram embedding over the rows of a pass, added to the streams:
// Streams += V + silu(conv).
type ConvRows struct {
	Rows, C, Taps, Dilation int
	X                       driver.Ptr // BF16 [Rows][C]
	W                       driver.Ptr // FP32 [Taps][C]
	Window                  driver.Ptr // BF16 [(Taps-1)*Dilation][C] of the lane, oldest first, updated
	V                       driver.Ptr // FP32 [Rows][C]
	Streams                 driver.Ptr // BF16 [Rows][C], updated
}

// ConvRows launches v.
func (s *Set) ConvRows(c *driver.Context, st driver.Stream, v *ConvRows) error {
	if err := checkRows(v.Rows); err != nil {
		return err
	}
	if v.Taps < 1 || v.Taps > 8 || v.Dilation < 1 {
		return fmt.Errorf("chunk: convolution of %d taps %d apart: at most 8 taps", v.Taps, v.Dilation)
	}
	p := kernels.ConvRowsParams{
		X: v.X, W: v.W, Window: v.Window, V: v.V, Streams: v.Streams, Rows: uint32(v.Rows), C: uint32(v.C), Taps: uint32(v.Taps), Dilation: uint32(v.Dilation),
	}
	if err := run(s, c, st, kernels.ConvRows, tiles(v.C, 256), tiles(v.Rows, 64), 0, &p); err != nil {
		return err
	}
	return run(s, c, st, kernels.ConvWindow, tiles(v.C, 256), 1, 0, &p)
}
