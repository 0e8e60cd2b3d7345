package cli

import (
	"testing"

	"ninfer/internal/backend"
)

func TestStateBytes(t *testing.T) {
	states := []backend.State{
		{Kind: backend.PerToken, Width: 3},
		{Kind: backend.PerBlock, Width: 5, Ratio: 4},
		{Kind: backend.Fixed, Width: 7, Rows: 2},
		{Kind: backend.Carried, Width: 11},
	}
	// 10 tokens are 2 whole blocks.
	if got, want := stateBytes(states, 10, 6), int64(4*(10*3+2*5+2*7+6*11)); got != want {
		t.Errorf("%d bytes, want %d", got, want)
	}
}

func TestInUnits(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 3 << 20: "3.0 MiB", 5<<30 + 1<<29: "5.5 GiB", 2 << 40: "2.0 TiB",
	} {
		if got := inUnits(n); got != want {
			t.Errorf("%d is %q, want %q", n, got, want)
		}
	}
}
