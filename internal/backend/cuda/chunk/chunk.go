// Package chunk computes what a wide pass of one lane needs besides products with weights: the gated delta rule in chunks, attention over
// selected blocks with its indexer, the n-gram embedding's convolution. A pass has up to MaxRows rows at consecutive positions.
//
// Calls only launch: nothing is allocated, read back or waited for, and every kernel waits for the one before it, so that a pass is a chain of
// dependent launches. Matrices are row-major, leading dimensions (Ld) count elements. Kernels are in the folder below; shapes that they do
// not take are told by Fits before anything is launched.
package chunk

import (
	"fmt"
	"io/fs"

	"ninfer/internal/backend/cuda/chunk/kernels"
	"ninfer/internal/backend/cuda/driver"
)

// MaxRows is the most rows of a pass.
const MaxRows = 8192

// Set is the loaded kernels of one context.
type Set struct {
	k      *kernels.Set
	shared int // bytes of shared memory a block can have
	sms    int
	wide   bool // the GPU has the instructions of attend_wide
}

// Load loads the committed machine code, or that of another folder.
func Load(c *driver.Context, code fs.FS) (*Set, error) {
	k, err := kernels.Load(c, code)
	if err != nil {
		return nil, err
	}
	return &Set{k: k, shared: c.Device.SharedPerBlock, sms: c.Device.SMs, wide: c.Device.Major == 9}, nil
}

// Unload frees the machine code.
func (s *Set) Unload(c *driver.Context) error { return s.k.Unload(c) }

func run[P any](s *Set, c *driver.Context, st driver.Stream, k kernels.ID, x, y, shared int, params *P) error {
	return s.k.Run(c, st, k, [3]uint32{uint32(x), uint32(y), 1}, uint32(shared), params, true)
}

func tiles(n, size int) int { return (n + size - 1) / size }

// scratch hands out aligned pieces of a workspace.
type scratch struct {
	at   driver.Ptr
	size uint64
}

func (s *scratch) take(bytes int) driver.Ptr {
	p := s.at + driver.Ptr(s.size)
	s.size += (uint64(bytes) + 255) / 256 * 256
	return p
}

func checkRows(rows int) error {
	if rows < 1 || rows > MaxRows {
		return fmt.Errorf("chunk: %d rows, 1 to %d can be done at once", rows, MaxRows)
	}
	return nil
}

// checkPiece wants rows that can be read sixteen bytes at a time.
func checkPiece(what string, p driver.Ptr, ld int) error {
	if p%16 != 0 || ld%8 != 0 {
		return fmt.Errorf("chunk: %s at %#x with a pitch of %d values: needs multiples of 16 bytes", what, uint64(p), ld)
	}
	return nil
}
