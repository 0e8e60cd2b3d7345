package device

import (
	"encoding/binary"
	"math"
	"slices"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
)

// Scatter makes the pool of an empty device give its pages in the given order, the last one first.
func (d *Device) Scatter(order []int) {
	_, all := d.pages.Pages()
	table, err := d.pages.Grow(nil, all*backend.PageTokens)
	if err != nil {
		panic(err)
	}
	for _, i := range order {
		d.pages.Shrink(table[i:i+1], 0)
	}
}

// Interrupt calls f where an operation of the next launches begins, on the owner's goroutine, with the stream they run on. Nil ends it.
func (d *Device) Interrupt(f func(op string, c *driver.Context, s driver.Stream)) {
	d.watch = nil
	if f == nil {
		return
	}
	d.watch = &watch{counts: map[string]int{}}
	d.watch.inside = func(op string) {
		for _, s := range d.steps {
			if s.pass.c != nil {
				f(op, s.pass.c, d.stream)
				return
			}
		}
	}
}

// Values are what an image holds of a state on the device, kept records folded: all of a Fixed one, of others the rows that count.
func (d *Device) Values(i backend.Image, id backend.StateID) ([]float32, error) {
	slot, err := d.find(i)
	if err != nil {
		return nil, err
	}
	s, p, img := d.opt.States[id], &d.states[id], &d.images[slot]
	n := img.length
	if s.Clock == backend.Drafter {
		n -= img.carried
	}
	var raw []byte
	take := func(c *driver.Context, at driver.Ptr, bytes uint64) error {
		old := len(raw)
		raw = append(raw, make([]byte, bytes)...)
		if err := c.ToHost(d.stream, raw[old:], at); err != nil {
			return err
		}
		return c.SyncStream(d.stream)
	}
	err = d.do("values", func(c *driver.Context) error {
		if err := d.flush(c, slot); err != nil {
			return err
		}
		if !grows(s) {
			return take(c, p.at+driver.Ptr(uint64(slot)*d.slotBytes(id)), d.slotBytes(id))
		}
		bytes, _ := p.pageBytes()
		for _, page := range img.table {
			if err := take(c, p.at+driver.Ptr(uint64(page)*bytes), bytes); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	out := make([]float32, len(raw)/int(p.element))
	for j := range out {
		switch {
		case s.Store == backend.StoreInt:
			out[j] = float32(int32(binary.LittleEndian.Uint32(raw[4*j:])))
		case p.element == 4:
			out[j] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*j:]))
		case p.element == 2:
			out[j] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(raw[2*j:])) << 16)
		}
	}
	switch s.Kind {
	case backend.PerToken:
		return out[:n*s.Width], nil
	case backend.PerBlock:
		return out[:n/s.Ratio*s.Width], nil
	case backend.Carried:
		return out[img.first*s.Width : (img.first+img.carried)*s.Width], nil
	}
	return out, nil
}

// Slow are the operations of a step for many rows that run on the kernels of decoding; not ok for a step of few rows.
func (d *Device) Slow(st backend.Step) (ops []string, ok bool) {
	s, ok := st.(*step)
	if !ok || s.few == nil {
		return nil, false
	}
	return slices.Clone(s.slow), true
}

// Projected is what a Project kernel makes of rows of x, FP32 or BF16, and the matrix w with its scales, with factors from squares if there are
// any. Not ok if the kernel does not do it.
func (d *Device) Projected(j kernels.Projector, q kernels.Projection, w, scale, x, squares []byte) (out []byte, ok bool, err error) {
	gpu := d.owner.Device()
	if q.Blocks = gpu.SMs / j.Cluster * j.Cluster; q.Blocks == 0 {
		return nil, false, nil
	}
	shared, ok := j.Shared(q)
	if !ok || shared > gpu.SharedPerBlock {
		return nil, false, nil
	}
	out = make([]byte, 2*q.R*q.N)
	err = d.do("project", func(c *driver.Context) error {
		p := kernels.ProjectParams{R: uint32(q.R), XLd: uint32(q.K), K: uint32(q.K), Dim: uint32(q.Dim), Parts: 1, Eps: 1e-6}
		if q.F32 {
			p.XF32 = 1
		}
		p.Part[0] = kernels.ProjectPart{Rows: uint32(q.N), OutLd: uint32(q.N)}
		var all []driver.Ptr
		defer func() {
			for _, at := range all {
				_ = c.Free(at)
			}
		}()
		for _, b := range []struct {
			at   *driver.Ptr
			data []byte
		}{{&p.X, x}, {&p.Squares, squares}, {&p.Part[0].W, w}, {&p.Part[0].Scale, scale}, {&p.Part[0].Out, out}} {
			if len(b.data) == 0 {
				continue
			}
			var err error
			if *b.at, err = c.Alloc("test", uint64(len(b.data))); err != nil {
				return err
			}
			all = append(all, *b.at)
			if err := c.ToDevice(d.stream, *b.at, b.data); err != nil {
				return err
			}
			if err := c.SyncStream(d.stream); err != nil {
				return err
			}
		}
		if err := d.set.Run(c, d.stream, j.Kernel, [3]uint32{uint32(q.Blocks), 1, 1}, uint32(shared), &p, true); err != nil {
			return err
		}
		if err := c.ToHost(d.stream, out, p.Part[0].Out); err != nil {
			return err
		}
		return c.SyncStream(d.stream)
	})
	return out, true, err
}
