package bench

import (
	"math"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/model"
)

// Memory is what a kind of memory has room for, holds at the end of the tests and held at most, in bytes.
type Memory struct {
	Capacity int64 `json:"capacity"`
	Used     int64 `json:"used"`
	Peak     int64 `json:"peak"`
}

// Ledger is where a GPU's memory went. Weights and workspace are reserved whole; of the room for sequences tests use what their tokens need.
type Ledger struct {
	Total     int64  `json:"total"`
	Weights   Memory `json:"weights"`
	Sequence  Memory `json:"sequence"`
	Workspace Memory `json:"workspace"`
}

// LedgerOf is a device's ledger after the given tests.
func LedgerOf(d *device.Device, tests []Test) Ledger {
	whole := func(n uint64) Memory { return Memory{int64(n), int64(n), int64(n)} }
	l := d.Ledger()
	out := Ledger{Total: int64(l.Total), Weights: whole(l.Weights), Sequence: Memory{Capacity: int64(l.Sequences)}, Workspace: whole(l.Workspace)}
	for _, t := range tests {
		out.Sequence.Used = int64(d.SequenceBytes(t.Tokens() - 1)) // the last token is not read again
		out.Sequence.Peak = max(out.Sequence.Peak, out.Sequence.Used)
	}
	return out
}

// Roof sets a test's rates against the bytes that had to move: for generated tokens those of a step at the middle length, for a prompt
// everything once, with the experts that so many independent rows choose. Rounds with drafts have no such floor. A GPU's readings are
// those of now.
func (r *Row) Roof(m *model.Model, d *device.Device, f Formats, readRate float64) error {
	program, err := m.Program(backend.Pass{Kind: backend.Decode, Lanes: 1, Rows: 1}, false)
	if err != nil {
		return err
	}
	experts, chosen := 0.0, 0.0
	for _, op := range program.Ops {
		if moe, ok := op.(backend.MoE); ok {
			experts, chosen = float64(moe.W.Experts), float64(moe.W.TopK)
		}
	}
	roof := func(length int, distinct, seconds float64) *Roofline {
		q := &Roofline{Traffic: Moved(program, m.States, f, 1, length, distinct), ReadGBps: readRate / 1e9, Distinct: distinct}
		q.Bytes = q.Traffic.Total()
		q.FloorMs = q.Bytes / readRate * 1e3
		q.Ratio = q.FloorMs / 1e3 / seconds
		if s, ok := d.Status(); ok {
			q.PowerWatts, q.LimitWatts, q.SMClock, q.MemClock = s.PowerWatts, s.LimitWatts, s.SMClockMHz, s.MemoryMHz
		}
		return q
	}
	if r.Decode != nil && !r.Speculation.Enabled {
		r.DecodeRoof = roof(max(r.Prompt, 1)+r.Gen/2, chosen, 1/r.Decode.Mean)
	}
	if r.Prefill != nil {
		distinct := experts
		if experts > 0 {
			distinct *= 1 - math.Pow(1-chosen/experts, float64(r.Prompt))
		}
		r.PrefillRoof = roof(r.Prompt, distinct, float64(r.Prompt)/r.Prefill.Mean)
	}
	return nil
}
