package cli

import (
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/model"
	"ninfer/internal/server"
)

// open returns a device, which on a GPU with --kv-capacity auto has yet to be given its pool, and the most rows of a prompt's pass on it: lanes with room for the context, a round's rows, and a prompt's chunk
// waiting for the drafter. Without --device it is the GPU if there is one.
func (f *modelFlags) open(e *environment, m *model.Model, lanes int) (backend.Device, int, error) {
	if f.Device != "cpu" {
		chunk := f.chunk()
		d, err := device.Open(device.Options{
			States: m.States, Lanes: lanes, Tokens: f.MaxContext, Verify: f.round(), Carry: f.carry(), Ordinal: f.ordinal(), NoGraph: f.NoCUDAGraph,
			Made: f.made, KV: f.cache(), BF16State: f.GDNStateDtype == "bf16", Reserve: uint64(f.reserve), Pages: device.Unstocked,
			Loaded: f.loading(e, time.Now),
		})
		if err == nil {
			if f.pages() > 0 { // auto waits for the weights
				if err := f.stock(d, lanes); err != nil {
					d.Close()
					return nil, 0, err
				}
			}
			f.milestone(e, "running on %s", d.Name())
			return d, chunk, nil
		}
		if !device.Absent(err) {
			return nil, 0, err
		}
		if f.Device != "" {
			return nil, 0, hintedError{err, "this needs an NVIDIA GPU; without --device, run and serve go on with the CPU"}
		}
		f.milestone(e, "no usable GPU, running on the CPU: %v", err)
	}
	opt := cpu.Options{
		States: m.States, Lanes: lanes, Tokens: f.MaxContext, Verify: f.round(), Carry: f.carry(), KV: f.cache(), BF16State: f.GDNStateDtype == "bf16",
		Commit: f.reserve > 0, // what is promised to others is not taken from them later
	}
	available, known := cpu.Available()
	var err error
	if f.pool, err = f.share(opt, available, known); err != nil {
		return nil, 0, err
	}
	opt.Lanes, opt.Pages = f.pool.lanes, f.pool.pages
	return cpu.NewFast(opt), f.chunk(), nil
}

// loading returns what tells, every other second, how far the weights are on their way to a GPU.
func (f *modelFlags) loading(e *environment, now func() time.Time) func(uint64) {
	start := now()
	last := start
	return func(n uint64) {
		t := now()
		if t.Sub(last) < 2*time.Second {
			return
		}
		last = t
		rate := float64(n) / t.Sub(start).Seconds()
		of, left := "", ""
		if all := float64(f.weights); all >= float64(n) && n > 0 {
			of = fmt.Sprintf(" of %s, %.0f %%", inUnits(f.weights), 100*float64(n)/all)
			left = fmt.Sprintf(", %.0f s left", (all-float64(n))/rate)
		}
		f.milestone(e, "weights: %s%s, %s/s%s", inUnits(int64(n)), of, inUnits(int64(rate)), left)
	}
}

// stock gives a GPU its pool: what --kv-capacity says, if weights fit beside it, or with auto what is left once they are there.
func (f *modelFlags) stock(d *device.Device, lanes int) error {
	room, err := d.Room()
	if err != nil {
		return err
	}
	p := pool{lanes: lanes, page: int64(d.PageBytes()), fixed: int64(d.Bytes() - d.Stored()), known: true, gpu: true, weights: int64(d.Stored())}
	p.available = int64(room) + f.reserve + p.fixed + p.weights
	if f.pages() > 0 && p.weights == 0 {
		p.weights = f.weights
	}
	if err := f.divide(&p); err != nil {
		return err
	}
	f.pool = p
	return d.Stock(p.pages)
}

// cache is what keys and values are kept in.
func (f *modelFlags) cache() backend.Cache {
	if f.KVDtype == "fp8" {
		return backend.CacheFP8
	}
	return backend.CacheBF16
}

// ordinal is the number of the GPU that --device names: "cuda" and none are the first.
func (f *modelFlags) ordinal() int {
	n, _ := strconv.Atoi(f.Device)
	return n
}

// milestone says a step of the start, which --log-level warning and above leave out.
func (f *modelFlags) milestone(e *environment, format string, args ...any) {
	if level, _ := server.ParseLevel(f.LogLevel); level <= slog.LevelInfo {
		e.say(format, args...)
	}
}

// deviceName is what a report calls a device.
func deviceName(dev backend.Device) string {
	if g, ok := dev.(*device.Device); ok {
		return g.Name()
	}
	return "cpu"
}
