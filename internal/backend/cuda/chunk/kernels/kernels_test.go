package kernels

import (
	"testing"

	"ninfer/internal/backend/cuda/kernels/digest"
)

// The committed machine code belongs to the sources beside it.
func TestFresh(t *testing.T) {
	for _, line := range digest.Stale(".", table.Archs, table.Sources) {
		t.Error(line)
	}
}
