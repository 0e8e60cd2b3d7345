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

// Decode is a measurement of decoding steps on a GPU at a given length, whose sequences were not read but filled with random data
// (device.Fill). It launches steps itself, one after the other, each with the picks of the one before.
type Decode struct {
	Context     int
	Batch       int // sequences at a time, all of that length
	Steps       int // of a repetition
	Repetitions int
	Warmup      int
	Kernels     bool // also say where the time goes
	Formats     Formats
}

// Roofline says what a step moved and how long that takes at best.
type Roofline struct {
	Traffic  Traffic `json:"bytes_of"`
	Bytes    float64 `json:"bytes"` // all of Traffic
	ReadGBps float64 `json:"read_gbps"`
	FloorMs  float64 `json:"floor_ms"` // bytes at that rate
	Ratio    float64 `json:"ratio"`    // floor by time
	Distinct float64 `json:"distinct_experts"`
	// Readings at the end of the last repetition; zero without a management library.
	PowerWatts float64 `json:"power_watts"`
	LimitWatts float64 `json:"power_limit_watts"`
	SMClock    int     `json:"sm_clock_mhz"`
	MemClock   int     `json:"memory_clock_mhz"`
}

// DecodeRow is the result of a Decode.
type DecodeRow struct {
	Context      int       `json:"context"`
	Batch        int       `json:"batch"`
	Microseconds float64   `json:"us"`     // of a step: median of the repetitions
	Runs         []float64 `json:"us_run"` // of each repetition
	// GPU is the time of a replayed step without the host.
	GPU  float64 `json:"us_gpu"`
	Rate float64 `json:"tokens_per_s"` // of all sequences
	// Rows of n-gram tables that the measured steps asked for, and how many of them seem not to have been in memory.
	TableRows   uint64              `json:"table_rows"`
	TableMissed uint64              `json:"table_rows_missed"`
	Roof        Roofline            `json:"roofline"`
	Engine      EngineRow           `json:"engine,omitzero"`
	Kernels     []device.KernelTime `json:"kernels,omitzero"`
}

// EngineRow is what a round of as many sequences takes through the engine, if that was asked for.
type EngineRow struct {
	Greedy ThroughRow `json:"greedy"`
	Drawn  ThroughRow `json:"drawn"`
}

// Measure runs a Decode on a device with room for it. readRate is the rate of the read stream in this run, in bytes a second; it is
// measured if it is zero.
func (t Decode) Measure(ctx context.Context, m *model.Model, dev *device.Device, readRate *float64, corpus []int32) (DecodeRow, error) {
	row := DecodeRow{Context: t.Context, Batch: t.Batch}
	program, err := m.Program(backend.Pass{Kind: backend.Decode, Lanes: t.Batch, Rows: t.Batch}, false)
	if err != nil {
		return row, err
	}
	step, err := dev.Compile(program)
	if err != nil {
		return row, err
	}
	if *readRate == 0 {
		if *readRate, err = dev.ReadRate(); err != nil {
			return row, err
		}
	}
	ctl := &backend.Control{Lanes: make([]backend.LaneRows, t.Batch)}
	fill := func() error {
		for i := range ctl.Lanes {
			if err := dev.Fill(backend.Lane(i), t.Context); err != nil {
				return err
			}
			ctl.Lanes[i] = backend.LaneRows{Lane: i, Tokens: []int32{corpus[i%len(corpus)]}, Positions: make([][3]int32, 1), Want: backend.WantLast}
		}
		return nil
	}
	place := func(n int) {
		for i := range ctl.Lanes {
			v := int32(t.Context + n)
			ctl.Lanes[i].Positions[0] = [3]int32{v, v, v}
		}
	}
	one := func(n int) error {
		place(n)
		q, err := dev.Launch(step, ctl)
		if err != nil {
			return err
		}
		res, err := dev.Wait(q)
		if err != nil {
			return err
		}
		for i := range ctl.Lanes {
			ctl.Lanes[i].Tokens[0] = res.Lanes[i].Picks[0]
		}
		return nil
	}
	var rows, missed uint64
	for r := range t.Warmup + t.Repetitions {
		if r == t.Warmup {
			rows, missed = dev.Gathered()
		}
		if err := fill(); err != nil {
			return row, err
		}
		if err := ctx.Err(); err != nil {
			return row, err
		}
		start := time.Now()
		for n := range t.Steps {
			if err := one(n); err != nil {
				return row, err
			}
		}
		if us := float64(time.Since(start).Nanoseconds()) / 1000 / float64(t.Steps); r >= t.Warmup {
			row.Runs = append(row.Runs, us)
		}
	}
	row.TableRows, row.TableMissed = dev.Gathered()
	row.TableRows, row.TableMissed = row.TableRows-rows, row.TableMissed-missed
	if s, ok := dev.Status(); ok {
		row.Roof.PowerWatts, row.Roof.LimitWatts, row.Roof.SMClock, row.Roof.MemClock = s.PowerWatts, s.LimitWatts, s.SMClockMHz, s.MemoryMHz
	}
	// Outside of the time: which experts the steps choose.
	const looks = 16
	mixtures := 0
	for n := range looks {
		if err := one(t.Steps + n); err != nil {
			return row, err
		}
		list, err := dev.Distinct(step)
		if err != nil {
			return row, err
		}
		for _, d := range list {
			row.Roof.Distinct += float64(d)
			mixtures++
		}
	}
	if mixtures == 0 {
		return row, fmt.Errorf("bench: the device does not count experts: plain kernels")
	}
	row.Roof.Distinct /= float64(mixtures)
	slices.Sort(row.Runs)
	row.Microseconds = row.Runs[len(row.Runs)/2]
	row.Rate = float64(t.Batch) / row.Microseconds * 1e6
	row.Roof.Traffic = Moved(program, m.States, t.Formats, t.Batch, t.Context+t.Steps/2, row.Roof.Distinct)
	row.Roof.Bytes = row.Roof.Traffic.Total()
	row.Roof.ReadGBps = *readRate / 1e9
	row.Roof.FloorMs = row.Roof.Bytes / *readRate * 1e3
	row.Roof.Ratio = row.Roof.FloorMs * 1e3 / row.Microseconds
	place(t.Steps + looks)
	replays := 5
	list, whole, err := dev.Kernels(step, ctl, replays, t.Kernels)
	row.GPU, row.Kernels = whole, list
	return row, err
}
