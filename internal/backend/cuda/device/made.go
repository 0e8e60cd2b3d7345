package device

import (
	"bytes"
	"context"
	"fmt"
	"slices"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
	files "ninfer/internal/backend/cuda/loader"
	"ninfer/internal/backend/cuda/nvml"
)

// Plane is a run of random words of a tensor; bytes in no plane are zero.
type Plane struct {
	Offset, Bytes int64
	// Width 2 and 4 are BF16 and FP32 words with Mean and Deviation, close to a normal distribution; 8 are random bits under Mask and the
	// Fixed ones.
	Width           int
	Mean, Deviation float64
	Mask, Fixed     uint64
}

// put brings a tensor's bytes to device memory, or makes them there, and waits for it: data may be a mapping.
func (d *Device) put(c *driver.Context, dst driver.Ptr, data []byte) error {
	d.stored += uint64(len(data))
	if d.opt.Loaded != nil {
		defer func() { d.opt.Loaded(d.stored) }()
	}
	if d.opt.Made != nil {
		if planes, ok := d.opt.Made(data); ok {
			return d.make(c, dst, len(data), planes)
		}
	}
	// A copy from memory that is not pinned goes through the driver's own small buffer, a page fault at a time: what is large is read by
	// several goroutines into a ring, which goes when the program is compiled. Without room for one it is the slower way.
	const large = 4 << 20
	if len(data) >= large && d.ring == nil {
		d.ring, _ = files.NewRing(c, files.Options{})
	}
	if len(data) >= large && d.ring != nil {
		item := files.Item{Name: "a tensor", Source: bytes.NewReader(data), Bytes: int64(len(data)), Dst: dst}
		return d.ring.Load(context.Background(), c, d.stream, []files.Item{item})
	}
	if err := c.ToDevice(d.stream, dst, data); err != nil {
		return err
	}
	return c.SyncStream(d.stream)
}

// unring gives the ring of put back.
func (d *Device) unring(c *driver.Context) error {
	r := d.ring
	d.ring = nil
	if r == nil {
		return nil
	}
	return r.Close(c)
}

func (d *Device) make(c *driver.Context, dst driver.Ptr, bytes int, planes []Plane) error {
	if err := c.Set(d.stream, dst, 0, uint64(bytes)); err != nil {
		return err
	}
	for _, p := range planes {
		if p.Offset < 0 || p.Bytes < 0 || p.Offset+p.Bytes > int64(bytes) || !slices.Contains([]int{2, 4, 8}, p.Width) {
			return fmt.Errorf("words of %d bytes at %d in a tensor of %d", p.Width, p.Offset, bytes)
		}
		err := d.words(c, dst+driver.Ptr(p.Offset), kernels.WordsParams{
			Bytes: uint64(p.Bytes), Mask: p.Mask, Fixed: p.Fixed, Mean: float32(p.Mean), Deviation: float32(p.Deviation), Kind: uint32(p.Width),
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// words fills device memory; every call makes others.
func (d *Device) words(c *driver.Context, dst driver.Ptr, p kernels.WordsParams) error {
	if p.Bytes == 0 {
		return nil
	}
	d.seed++
	p.Dst, p.Seed = dst, d.seed
	blocks := min(uint64(8*d.owner.Device().SMs), (p.Bytes+2047)/2048)
	return d.set.Run(c, d.stream, kernels.Words, [3]uint32{uint32(blocks), 1, 1}, 0, &p, false)
}

// Fill makes an image of so many tokens of random data, as if a text of that length had been read: for measuring speed at lengths that
// would take too long to read. The drafter is as far as the target.
func (d *Device) Fill(i backend.Image, tokens int) error {
	slot, err := d.find(i)
	if err != nil {
		return err
	}
	if tokens < 0 || tokens > d.opt.Tokens {
		return fmt.Errorf("cuda: fill %d tokens: an image has room for %d", tokens, d.opt.Tokens)
	}
	return d.do("fill", func(c *driver.Context) error {
		if err := d.empty(c, slot); err != nil {
			return err
		}
		img := &d.images[slot]
		if img.table, err = d.pages.Grow(img.table, tokens); err != nil {
			return &hostError{err}
		}
		for id, s := range d.opt.States {
			if s.Kind != backend.Fixed || hosted(s) {
				continue
			}
			n := d.slotBytes(backend.StateID(id))
			w := kernels.WordsParams{Kind: uint32(d.states[id].element), Deviation: 1, Bytes: n}
			if s.Store == backend.StoreMatrix {
				w.Deviation = 0.05
			}
			if err := d.words(c, d.states[id].at+driver.Ptr(uint64(slot)*n), w); err != nil {
				return err
			}
		}
		for first, n := 0, 0; first < len(img.table); first += n { // pages that follow each other at once
			for n = 1; first+n < len(img.table) && img.table[first+n] == img.table[first]+int32(n); n++ {
			}
			if err := d.fillPages(c, first, uint64(img.table[first]), uint64(n)); err != nil {
				return err
			}
		}
		img.length = tokens
		return c.SyncStream(d.stream)
	})
}

// fillPages makes n pages of random data, the first of which is the first-th of a sequence.
func (d *Device) fillPages(c *driver.Context, first int, page, n uint64) error {
	var positions []uint32
	for id, s := range d.opt.States {
		if !grows(s) {
			continue
		}
		p := &d.states[id]
		values, scales := p.pageBytes()
		at := p.at + driver.Ptr(page*values)
		w := kernels.WordsParams{Kind: uint32(p.element), Deviation: 1, Bytes: n * values}
		switch {
		case s.Store == backend.StoreInt:
			if positions == nil {
				for t := range int(n) * backend.PageTokens {
					v := uint32(first*backend.PageTokens + t)
					positions = append(positions, v, v, v)
				}
			}
			if err := c.ToDevice(d.stream, at, bytesIn(positions)); err != nil {
				return err
			}
			continue
		case scales > 0: // magnitudes of 1/8 to 15/8 times a scale near one
			w = kernels.WordsParams{Kind: 8, Mask: 0x9f9f9f9f9f9f9f9f, Fixed: 0x2020202020202020, Bytes: n * values}
			one := kernels.WordsParams{Kind: 8, Fixed: 0x3f803f803f803f80, Bytes: n * scales}
			if err := d.words(c, p.scales+driver.Ptr(page*scales), one); err != nil {
				return err
			}
		}
		if err := d.words(c, at, w); err != nil {
			return err
		}
	}
	return nil
}

// Distinct is how many different experts the rows of a step's last launch chose in each mixture, where the tuned kernels ran it.
func (d *Device) Distinct(st backend.Step) ([]int, error) {
	s, ok := st.(*step)
	if !ok || s.d != d || d.closed {
		return nil, fmt.Errorf("cuda: distinct experts: step of another device, or device closed")
	}
	n := make([]uint32, s.mixtures)
	err := d.do("distinct experts", func(c *driver.Context) error {
		if err := c.SyncStream(d.stream); err != nil {
			return err
		}
		if err := c.ToHost(d.stream, bytesIn(n), s.distinct); err != nil {
			return err
		}
		return c.SyncStream(d.stream)
	})
	list := make([]int, len(n))
	for i, v := range n {
		list[i] = int(v)
	}
	return list, err
}

// Status reads power and clocks; ok is false where the machine has no management library.
func (d *Device) Status() (s nvml.Status, ok bool) {
	l, err := nvml.Open()
	if err != nil {
		return s, false
	}
	g, err := l.Device(d.owner.Device().Bus)
	if err != nil {
		return s, false
	}
	return g.Read(), true
}
