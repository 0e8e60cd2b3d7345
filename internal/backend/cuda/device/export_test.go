package device

import (
	"bytes"
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
	p := kernels.ProjectParams{R: uint32(q.R), XLd: uint32(q.K), K: uint32(q.K), Dim: uint32(q.Dim), Parts: 1, Eps: 1e-6, Shares: kernels.Shares(q.N, q.Blocks)}
	if q.F32 {
		p.XF32 = 1
	}
	part := &p.Part[0]
	part.Rows, part.OutLd, part.Paced = uint32(q.N), uint32(q.N), kernels.Paced(j.E4M3, true, q.R)
	err = d.placed("project", map[*driver.Ptr][]byte{&p.X: x, &p.Squares: squares, &part.W: w, &part.Scale: scale, &part.Out: out}, &part.Out, out, func(c *driver.Context) error {
		return d.set.Run(c, d.stream, j.Kernel, [3]uint32{uint32(q.Blocks), 1, 1}, uint32(shared), &p, true)
	})
	return out, true, err
}

// placed puts data where the parameters of a kernel want it, runs f and brings out back from at.
func (d *Device) placed(what string, data map[*driver.Ptr][]byte, at *driver.Ptr, out []byte, f func(*driver.Context) error) error {
	return d.do(what, func(c *driver.Context) error {
		var all []driver.Ptr
		defer func() {
			for _, at := range all {
				_ = c.Free(at)
			}
		}()
		for at, b := range data {
			if len(b) == 0 {
				continue
			}
			var err error
			if *at, err = c.Alloc("test", uint64(len(b))); err != nil {
				return err
			}
			all = append(all, *at)
			if err := c.ToDevice(d.stream, *at, b); err != nil {
				return err
			}
			if err := c.SyncStream(d.stream); err != nil {
				return err
			}
		}
		if err := f(c); err != nil {
			return err
		}
		if err := c.ToHost(d.stream, out, *at); err != nil {
			return err
		}
		return c.SyncStream(d.stream)
	})
}

// Attention is what the attention of few rows works on: keys and values of heads of 256 values in BF16, or E4M3 with scales.
type Attention struct {
	Rows, Heads, KV, Ld                          int
	Q, Gates, Keys, Values, KeyScales, ValScales []byte
	List, Count                                  []uint32
}

// Attended is what rows attend to, by a block for each pair of units of their tokens.
func (d *Device) Attended(a Attention) ([]byte, error) {
	pairs := tiles(a.Ld, attendPair)
	p := kernels.AttendGroupParams{Heads: uint32(a.Heads), Kv: uint32(a.KV), ListLd: uint32(a.Ld), Pairs: uint32(pairs)}
	m := kernels.MergeGroupParams{Heads: p.Heads, Pairs: p.Pairs}
	attend, shared := kernels.Attender(a.KeyScales != nil)
	out := make([]byte, 2*a.Rows*a.Heads*256)
	err := d.placed("attend", map[*driver.Ptr][]byte{
		&p.Q: a.Q, &m.Qg: a.Gates, &p.Keys: a.Keys, &p.Values: a.Values, &p.KeyScales: a.KeyScales, &p.ValueScales: a.ValScales, &p.List: bytesIn(a.List),
		&p.Count: bytesIn(a.Count), &m.Out: out, &p.Partial: bytes.Repeat([]byte{0xff}, 4*a.Rows*a.Heads*pairs*256), &p.Sums: bytes.Repeat([]byte{0xff}, 8*a.Rows*a.Heads*pairs),
	}, &m.Out, out, func(c *driver.Context) error {
		m.Partial, m.Sums, m.Count = p.Partial, p.Sums, p.Count
		if err := d.set.Run(c, d.stream, attend, [3]uint32{p.Kv, uint32(a.Rows), uint32(pairs)}, shared, &p, true); err != nil {
			return err
		}
		return d.set.Run(c, d.stream, kernels.MergePairs, [3]uint32{p.Heads, uint32(a.Rows), 2}, 0, &m, true)
	})
	return out, err
}

// Selected is what a row with so many tokens before it selects by its scores, as one of so many rows does: rows of tokens. Its pages are pages.
func (d *Device) Selected(scores []float32, pages []uint32, at, ratio, most, rows int) ([]uint32, error) {
	row := kernels.Row{At: uint32(at)}
	ld := (most*ratio + ratio - 1 + 3) / 4 * 4
	selector, selectors := kernels.Selector(len(scores), rows)
	p := kernels.SelectParams{Ratio: uint32(ratio), Blocks: uint32(len(scores)), Most: uint32(most), ListLd: uint32(ld), PagesLd: uint32(len(pages))}
	out := make([]byte, 4*ld)
	count := make([]byte, 4)
	err := d.placed("select", map[*driver.Ptr][]byte{
		&p.Rows: bytesIn([]kernels.Row{row}), &p.Pages: bytesIn(pages), &p.Scores: bytesIn(scores), &p.List: out, &p.Count: count,
	}, &p.List, out, func(c *driver.Context) error {
		if err := d.set.Run(c, d.stream, selector, [3]uint32{uint32(selectors), 1, 1}, 0, &p, true); err != nil {
			return err
		}
		if err := c.ToHost(d.stream, count, p.Count); err != nil {
			return err
		}
		return c.SyncStream(d.stream)
	})
	if err != nil {
		return nil, err
	}
	list := make([]uint32, min(uint32(ld), binary.LittleEndian.Uint32(count)))
	for i := range list {
		list[i] = binary.LittleEndian.Uint32(out[4*i:])
	}
	return list, nil
}

// Armed says whether the beginning of a launch waits on the GPU.
func (d *Device) Armed() (yes bool) {
	_ = d.run("armed", func(*driver.Context) error { yes = d.armed.step != nil; return nil })
	return yes
}

// Sleepless leaves a launch armed however long none comes.
func (d *Device) Sleepless() { d.owner.Idle(func() {}) }
