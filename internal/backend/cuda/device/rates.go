package device

import (
	"fmt"
	"math"
	"slices"

	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/gemm"
	tuned "ninfer/internal/backend/cuda/kernels"
)

// median is how long the GPU works on a call of f, in microseconds: the median of so many runs of each calls, after two that are not counted.
func (d *Device) median(c *driver.Context, runs, each int, f func() error) (float64, error) {
	var from, to driver.Event
	for _, e := range []*driver.Event{&from, &to} {
		var err error
		if *e, err = c.NewEvent(true); err != nil {
			return 0, err
		}
		defer func() { _ = c.DestroyEvent(*e) }()
	}
	var times []float64
	for i := range runs + 2 {
		if err := c.Record(from, d.stream); err != nil {
			return 0, err
		}
		for range each {
			if err := f(); err != nil {
				return 0, err
			}
		}
		if err := c.Record(to, d.stream); err != nil {
			return 0, err
		}
		if err := c.Sync(to); err != nil {
			return 0, err
		}
		us, err := c.Elapsed(from, to)
		if err != nil {
			return 0, err
		}
		if i >= 2 {
			times = append(times, us/float64(each))
		}
	}
	slices.Sort(times)
	return times[len(times)/2], nil
}

// ReadRate measures how fast the GPU reads memory, in bytes a second: a stream of copies into shared memory, the best of some shapes, each
// the median of several runs. It needs some GiB of free memory for a moment.
func (d *Device) ReadRate() (rate float64, err error) {
	if d.tuned == nil {
		return 0, fmt.Errorf("cuda: read rate: not with plain kernels")
	}
	err = d.do("read rate", func(c *driver.Context) error {
		const size = 2 << 30
		src, err := c.Alloc("the read stream", size)
		if err != nil {
			return &hostError{err}
		}
		defer func() { _ = c.Free(src) }()
		sink, err := c.Alloc("the read stream", 64)
		if err != nil {
			return &hostError{err}
		}
		defer func() { _ = c.Free(sink) }()
		if err := d.words(c, src, kernels.WordsParams{Bytes: size, Kind: 8, Mask: math.MaxUint64}); err != nil {
			return err
		}
		sms := uint32(d.owner.Device().SMs)
		for _, v := range []struct{ blocks, stages, bytes uint32 }{{1, 8, 16 << 10}, {1, 12, 16 << 10}, {2, 6, 8 << 10}, {1, 6, 32 << 10}} {
			plan := tuned.Plan{Kernel: tuned.ReadBulk, Grid: v.blocks * sms, Shared: v.stages*v.bytes + 128}
			q := tuned.ReadParams{Src: src, Bytes: size, Sink: sink, Stages: v.stages, StageBytes: v.bytes}
			if int(plan.Shared) > d.owner.Device().SharedPerBlock {
				continue
			}
			us, err := d.median(c, 9, 3, func() error { return d.tuned.Run(c, d.stream, plan, &q, true) })
			if err != nil {
				return err
			}
			rate = max(rate, size/us*1e6)
		}
		return nil
	})
	return rate, err
}

// ProductRate measures how fast the GPU multiplies BF16 matrices of the size that prompts have, by the library if there is one: in
// floating-point operations a second. It needs a step for many rows, and some memory for a moment.
func (d *Device) ProductRate() (rate float64, err error) {
	const rows, n, k = 8192, 16384, 2560
	if d.wide == nil {
		return 0, fmt.Errorf("cuda: product rate: no step for many rows has been compiled")
	}
	err = d.do("product rate", func(c *driver.Context) error {
		var at [4]driver.Ptr
		p := gemm.Product{W: gemm.Matrix{N: n, K: k}, OutLd: n}
		work := gemm.Bytes(rows, []gemm.Product{p})
		for i, bytes := range []uint64{2 * rows * k, 2 * n * k, 2 * rows * n, work} {
			p, err := c.Alloc("products to measure", max(bytes, 256))
			if err != nil {
				return &hostError{err}
			}
			defer func() { _ = c.Free(p) }()
			at[i] = p
			if i < 2 {
				if err := d.words(c, p, kernels.WordsParams{Bytes: bytes, Kind: 2, Deviation: 1}); err != nil {
					return err
				}
			}
		}
		p.W.Data, p.Out = at[1], at[2]
		us, err := d.median(c, 9, 4, func() error {
			return d.wide.gemm.Multiply(c, d.stream, at[0], k, rows, p, gemm.Workspace{At: at[3], Bytes: max(work, 256)})
		})
		if err == nil {
			rate = 2 * rows * n * k / us * 1e6
		}
		return err
	})
	return rate, err
}
