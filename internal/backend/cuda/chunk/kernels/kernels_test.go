package kernels

import (
	"testing"

	"ninfer/internal/backend/cuda/kernels/digest"
)

// The committed machine code belongs to the sources beside it, and its kernels spill no registers but where it says so.
func TestFresh(t *testing.T) {
	for _, line := range digest.Stale(".", &table,
		"delta_prepare on sm_90a spills 4+4 bytes", "delta_prepare on sm_120a spills 16+28 bytes", "delta_pair on sm_90a spills 16+16 bytes",
		"delta_run on sm_90a spills 188+284 bytes", "delta_run on sm_120a spills 8+8 bytes") {
		t.Error(line)
	}
}
