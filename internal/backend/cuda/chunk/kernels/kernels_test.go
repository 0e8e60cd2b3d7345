package kernels

import (
	"testing"

	"ninfer/internal/backend/cuda/kernels/digest"
)

// The committed machine code belongs to the sources beside it, and its kernels spill no registers but those named.
func TestFresh(t *testing.T) {
	for _, line := range digest.Stale(".", &table, "delta_prepare", "delta_pair", "delta_run") {
		t.Error(line)
	}
}
