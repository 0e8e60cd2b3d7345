package cli

import (
	"fmt"
	"strconv"

	"ninfer/internal/backend/cpu"
	"ninfer/internal/engine"
)

// reserveFlags are options of serve about the memory that is left to others.
type reserveFlags struct {
	ClampConcurrencyToPool bool   `help:"Serve no more sequences at a time than the pool holds full contexts."`
	DesktopReserveGiB      *int64 `name:"desktop-reserve-gib" placeholder:"N" help:"Memory of the device left to other programs."`
	DesktopReserveMiB      *int64 `name:"desktop-reserve-mib" placeholder:"N" help:"The same in MiB."`
	KVSlackFloorMiB        int64  `name:"kv-slack-floor-mib" default:"1024" placeholder:"N" help:"Memory that --kv-capacity auto leaves."`
}

// apply checks the options and hands them to the model's.
func (f *reserveFlags) apply(m *modelFlags) error {
	gib, mib := f.DesktopReserveGiB, f.DesktopReserveMiB
	const most = 1 << 20 // GiB
	switch {
	case gib != nil && mib != nil:
		return usagef("--desktop-reserve-gib excludes --desktop-reserve-mib")
	case gib != nil && (*gib < 0 || *gib > most):
		return usagef("--desktop-reserve-gib is %d, need 0 to %d", *gib, most)
	case mib != nil && (*mib < 0 || *mib > most<<10):
		return usagef("--desktop-reserve-mib is %d, need 0 to %d", *mib, most<<10)
	case f.KVSlackFloorMiB < 0 || f.KVSlackFloorMiB > most<<10:
		return usagef("--kv-slack-floor-mib is %d, need 0 to %d", f.KVSlackFloorMiB, most<<10)
	case gib != nil:
		m.reserve = *gib << 30
	case mib != nil:
		m.reserve = *mib << 20
	}
	m.slack, m.clamp = f.KVSlackFloorMiB<<20, f.ClampConcurrencyToPool
	return nil
}

// pool is how a device's memory is shared out: so many pages among so many lanes.
type pool struct {
	pages, lanes int

	page, fixed                        int64 // bytes of a page; of what sequences, on a GPU activations too, have beside pages
	available, reserve, slack, weights int64 // known is false where nobody knows what is available
	known, gpu                         bool  // gpu: weights are there, or must fit
}

// pages are those that --kv-capacity asks for, 0 of auto.
func (f *modelFlags) pages() int {
	switch n, err := strconv.Atoi(f.KVCapacity); {
	case err == nil:
		return pagesOf(n)
	case f.KVCapacity == "":
		return pagesOf(f.MaxContext)
	}
	return 0
}

// clamped is how many of the lanes a pool of so many pages keeps.
func (f *modelFlags) clamped(lanes, pages int) int {
	if f.clamp {
		return max(1, min(lanes, pages/pagesOf(f.MaxContext)))
	}
	return lanes
}

// share decides on a pool in the memory of the CPU (docs/serving.md, Memory).
func (f *modelFlags) share(opt cpu.Options, available int64, known bool) (pool, error) {
	s := opt.Sizes()
	p := pool{lanes: opt.Lanes, page: s.Page, fixed: int64(opt.Lanes)*(s.Image+s.Lane) + int64(opt.Saved)*s.Image, available: available, known: known}
	if f.pages() == 0 && known {
		p.weights = f.weights
	}
	err := f.divide(&p)
	return p, err
}

// divide decides on the pages and lanes of a pool in the memory that it tells of.
func (f *modelFlags) divide(p *pool) error {
	p.pages, p.reserve = f.pages(), f.reserve
	full := pagesOf(f.MaxContext)
	least, most := max(full, p.lanes), p.lanes*full
	auto := p.pages == 0
	switch {
	case auto && !p.known:
		p.pages = most
	case auto:
		p.slack = f.slack
		p.pages = int(min(int64(most), (p.available-p.reserve-p.slack-p.weights-p.fixed)/p.page))
	default:
		least = p.pages
	}
	if need := p.reserve + p.slack + p.weights + p.fixed + int64(least)*p.page; p.known && need > p.available {
		hint := "a smaller --max-context or --max-concurrency, --kv-dtype fp8, --gdn-state-dtype bf16"
		switch {
		case !auto && least > full:
			hint = "a smaller --kv-capacity, or auto; " + hint
		case auto:
			hint += ", a smaller --kv-slack-floor-mib"
			if !p.gpu {
				hint += ", or a number for --kv-capacity, which does not ask for weights to stay in memory"
			}
		}
		if p.reserve > 0 {
			hint += "; a smaller --desktop-reserve-mib"
		}
		return hintedError{fmt.Errorf("memory: %d bytes short: a pool of %d pages takes %s and sequences %s beside it, %s go to weights, %s stay free, %s are available",
			need-p.available, least, inUnits(int64(least)*p.page), inUnits(p.fixed), inUnits(p.weights), inUnits(p.reserve+p.slack), inUnits(p.available)), hint}
	}
	p.lanes = f.clamped(p.lanes, p.pages)
	return nil
}

// report is the ledger as a log line has it.
func (p pool) report() []any {
	out := []any{"pages", p.pages, "tokens", p.pages * engine.PageTokens}
	out = append(out, "a page", inUnits(p.page), "pool", inUnits(int64(p.pages)*p.page), "sequences beside it", inUnits(p.fixed))
	if p.known {
		out = append(out, "available", inUnits(p.available), "left to others", inUnits(p.reserve))
	}
	if p.slack+p.weights > 0 {
		out = append(out, "slack", inUnits(p.slack), "weights", inUnits(p.weights))
	}
	return out
}

// weightBytes is what the model's weights take in memory: all of the artifact but the n-gram table, which is read where rows are needed.
func (l *loaded) weightBytes() int64 {
	return l.store.File.FileBytes() - l.store.TableBytes()
}

// chunk is the most prompt rows of a pass.
func (f *modelFlags) chunk() int { return min(f.PrefillChunk, f.MaxContext) }

// round is the most rows of a sequence in a decoding round.
func (f *modelFlags) round() int { return f.DraftTokens + 1 }

// carry is the most rows that can wait for the drafter.
func (f *modelFlags) carry() int { return f.chunk() + f.round() }

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
