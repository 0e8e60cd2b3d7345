package kernels

import (
	"testing"

	"ninfer/internal/backend/cuda/kernels/digest"
)

// The committed machine code belongs to the sources beside it, and its kernels spill no registers.
func TestFresh(t *testing.T) {
	for _, line := range digest.Stale(".", &table) {
		t.Error(line)
	}
}

// A tile's shared memory fits in a block of either target.
func TestTiles(t *testing.T) {
	for _, rows := range []int{64, 128} {
		if n := TileShared(rows); n > 99<<10 {
			t.Errorf("tiles of %d rows need %d bytes", rows, n)
		}
	}
}
