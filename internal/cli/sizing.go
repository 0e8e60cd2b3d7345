package cli

import (
	"fmt"
	"strconv"

	"ninfer/internal/backend"
)

// pages is the number of pages of the pool that so many sequences share.
func (f *modelFlags) pages(lanes int) int {
	if n, err := strconv.Atoi(f.KVCapacity); err == nil {
		return pagesOf(n)
	}
	return lanes * pagesOf(f.MaxContext)
}

// chunk is the most prompt rows of a pass.
func (f *modelFlags) chunk() int { return min(f.PrefillChunk, f.MaxContext) }

// round is the most rows of a sequence in a decoding round.
func (f *modelFlags) round() int { return f.DraftTokens + 1 }

// carry is the most rows that can wait for the drafter.
func (f *modelFlags) carry() int { return f.chunk() + f.round() }

// stateBytes is the memory that the image of one sequence takes on the CPU, which keeps every value in four bytes: tokens of them, and so
// many rows that wait for the drafter.
func stateBytes(states []backend.State, tokens, carry int) int64 {
	values := int64(0)
	for _, s := range states {
		rows := s.Rows
		switch s.Kind {
		case backend.PerToken:
			rows = tokens
		case backend.PerBlock:
			rows = tokens / s.Ratio
		case backend.Carried:
			rows = carry
		}
		values += int64(rows) * int64(s.Width)
	}
	return 4 * values
}

// inUnits writes a number of bytes with a binary unit, to a tenth.
func inUnits(n int64) string {
	for _, u := range []struct {
		shift uint
		name  string
	}{{40, "TiB"}, {30, "GiB"}, {20, "MiB"}, {10, "KiB"}} {
		if n >= 1<<u.shift {
			return fmt.Sprintf("%.1f %s", float64(n)/float64(int64(1)<<u.shift), u.name)
		}
	}
	return fmt.Sprintf("%d B", n)
}
