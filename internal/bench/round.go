package bench

import (
	"context"
	"fmt"
	"slices"
	"time"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/model"
)

// Round is a measurement of drafting rounds on a GPU at a given length, like Decode: of each lane a draft pass over the rows that the round
// before kept, further drafts one after the other, a pass that verifies all of them, and a commit. Made-up drafts are never right, so it is
// the measurement that says how many rows stand: 1, 2, ... and all of them in turn.
type Round struct {
	Context     int
	Batch       int // sequences at a time, all of that length
	Drafts      int // of a round
	Rounds      int // of a repetition
	Repetitions int
	Warmup      int
	Kernels     bool // also say where the time of both kinds of pass goes
	Formats     Formats
}

// RoundRow is the result of a Round.
type RoundRow struct {
	Context      int       `json:"context"`
	Batch        int       `json:"batch"`
	Drafts       int       `json:"drafts"`
	Microseconds float64   `json:"us"`     // of a round: median of the repetitions
	Runs         []float64 `json:"us_run"` // of each repetition
	Verify       float64   `json:"us_verify"`
	Drafting     float64   `json:"us_drafting"` // all draft passes of a round
	// Distinct experts of the verify pass and of draft passes.
	Distinct      float64 `json:"distinct_experts"`
	DraftDistinct float64 `json:"draft_distinct_experts"`
	VerifyBytes   float64 `json:"verify_bytes"`
	DraftBytes    float64 `json:"draft_bytes"` // of one draft
	Bytes         float64 `json:"bytes"`
	ReadGBps      float64 `json:"read_gbps"`
	FloorMs       float64 `json:"floor_ms"`
	Ratio         float64 `json:"ratio"`
	// Replays of the verify pass and of a draft pass of one row, in microseconds of the GPU, and what their kernels take.
	VerifyGPU     float64             `json:"us_verify_gpu"`
	DraftGPU      float64             `json:"us_draft_gpu"`
	VerifyKernels []device.KernelTime `json:"verify_kernels,omitzero"`
	DraftKernels  []device.KernelTime `json:"draft_kernels,omitzero"`
}

// Measure runs a Round on a device with room for it; readRate is as in Decode.
func (t Round) Measure(ctx context.Context, m *model.Model, dev *device.Device, readRate *float64, corpus []int32) (RoundRow, error) {
	row := RoundRow{Context: t.Context, Batch: t.Batch, Drafts: t.Drafts}
	rows := t.Batch * (t.Drafts + 1)
	var steps [3]backend.Step
	var programs [3]*backend.Program
	for i, p := range []backend.Pass{
		{Kind: backend.Verify, Lanes: t.Batch, Rows: rows}, {Kind: backend.Draft, Lanes: t.Batch, Rows: rows}, {Kind: backend.Decode, Lanes: t.Batch, Rows: t.Batch},
	} {
		var err error
		if programs[i], err = m.Program(p, false); err != nil {
			return row, err
		}
		if steps[i], err = dev.Compile(programs[i]); err != nil {
			return row, err
		}
	}
	if *readRate == 0 {
		var err error
		if *readRate, err = dev.ReadRate(); err != nil {
			return row, err
		}
	}
	launch := func(s backend.Step, lanes []backend.LaneRows) (backend.Result, error) {
		q, err := dev.Launch(s, &backend.Control{Lanes: lanes})
		if err != nil {
			return backend.Result{}, err
		}
		return dev.Wait(q)
	}
	verify, first := make([]backend.LaneRows, t.Batch), make([]backend.LaneRows, t.Batch)
	fill := func() error {
		for i := range verify {
			if err := dev.Fill(backend.Lane(i), t.Context); err != nil {
				return err
			}
			verify[i] = backend.LaneRows{Lane: i, Tokens: corpus[i%len(corpus):][:1], Positions: model.Positions(t.Context, 1), Want: backend.WantLast}
		}
		_, err := launch(steps[2], verify) // leaves a row for the drafter
		return err
	}
	var drafting, verifying time.Duration
	place := func() {
		for i := range first {
			at := dev.Lengths(backend.Lane(i))
			tokens := make([]int32, at.Target-at.Drafter)
			for j := range tokens {
				tokens[j] = corpus[(at.Drafter+j+31*i)%len(corpus)]
			}
			first[i] = backend.LaneRows{Lane: i, Tokens: tokens, Want: backend.WantLast}
			verify[i] = backend.LaneRows{Lane: i, Tokens: tokens[len(tokens)-1:], Positions: model.Positions(at.Target, t.Drafts+1), Want: backend.WantAll}
		}
	}
	one := func(keep func(lane int) int) error {
		start := time.Now()
		place()
		if _, err := dev.Chain(steps[1], &backend.Control{Lanes: first}, t.Drafts-1); err != nil {
			return err
		}
		picks, q, err := dev.Behind(steps[0], &backend.Control{Lanes: verify})
		if err != nil {
			return err
		}
		middle := time.Now()
		if _, err := dev.Wait(q); err != nil {
			return err
		}
		for i := range verify {
			verify[i].Tokens = slices.Concat(verify[i].Tokens, picks[i])
		}
		for i := range verify {
			if err := dev.Commit(i, keep(i)); err != nil {
				return err
			}
		}
		drafting += middle.Sub(start)
		verifying += time.Since(middle)
		return nil
	}
	inTurn := func(n int) func(int) int { return func(lane int) int { return 1 + (n+lane)%(t.Drafts+1) } }
	for r := range t.Warmup + t.Repetitions {
		if err := fill(); err != nil {
			return row, err
		}
		if err := ctx.Err(); err != nil {
			return row, err
		}
		if r == t.Warmup {
			drafting, verifying = 0, 0
		}
		start := time.Now()
		for n := range t.Rounds {
			if err := one(inTurn(n)); err != nil {
				return row, err
			}
		}
		if us := float64(time.Since(start).Nanoseconds()) / 1000 / float64(t.Rounds); r >= t.Warmup {
			row.Runs = append(row.Runs, us)
		}
	}
	each := 1000 * float64(t.Rounds*t.Repetitions)
	row.Drafting, row.Verify = float64(drafting.Nanoseconds())/each, float64(verifying.Nanoseconds())/each
	// Outside of the time: which experts the passes choose.
	const looks = 8
	var mixtures [2]int
	for n := range looks {
		if err := one(inTurn(n)); err != nil {
			return row, err
		}
		for i, sum := range []*float64{&row.Distinct, &row.DraftDistinct} {
			list, err := dev.Distinct(steps[i])
			if err != nil {
				return row, err
			}
			for _, d := range list {
				*sum += float64(d)
			}
			mixtures[i] += len(list)
		}
	}
	if mixtures[0] == 0 {
		return row, fmt.Errorf("bench: the device does not count experts: plain kernels")
	}
	row.Distinct /= float64(mixtures[0])
	if row.DraftDistinct /= float64(max(1, mixtures[1])); mixtures[1] == 0 { // the drafter's experts run on plain kernels
		for _, op := range programs[1].Ops {
			if moe, ok := op.(backend.MoE); ok {
				row.DraftDistinct = float64(moe.W.TopK * t.Batch)
			}
		}
	}
	slices.Sort(row.Runs)
	row.Microseconds = row.Runs[len(row.Runs)/2]
	at := t.Context + t.Rounds*(t.Drafts+2)/4
	row.VerifyBytes = Moved(programs[0], m.States, t.Formats, t.Batch, at, row.Distinct).Total()
	row.DraftBytes = Moved(programs[1], m.States, t.Formats, t.Batch, at, row.DraftDistinct).Total()
	row.Bytes = row.VerifyBytes + float64(t.Drafts)*row.DraftBytes
	row.ReadGBps = *readRate / 1e9
	row.FloorMs = row.Bytes / *readRate * 1e3
	row.Ratio = row.FloorMs * 1e3 / row.Microseconds
	if err := one(func(int) int { return 1 }); err != nil { // so that draft passes have one row
		return row, err
	}
	place()
	const replays = 5
	var err error
	if row.DraftKernels, row.DraftGPU, err = dev.Kernels(steps[1], &backend.Control{Lanes: first}, replays, t.Kernels); err != nil {
		return row, err
	}
	for i := range verify {
		verify[i].Tokens = make([]int32, t.Drafts+1)
		for j := range verify[i].Tokens {
			verify[i].Tokens[j] = corpus[(97*j+31*i)%len(corpus)]
		}
	}
	row.VerifyKernels, row.VerifyGPU, err = dev.Kernels(steps[0], &backend.Control{Lanes: verify}, replays, t.Kernels)
	return row, err
}
