package device

import (
	"fmt"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/driver"
)

// pageRows is the number of rows that a page has of a state that grows.
func pageRows(s backend.State) int {
	if s.Kind == backend.PerBlock {
		return (backend.PageTokens-1)/s.Ratio + 1
	}
	return backend.PageTokens
}

// grows says that a state's rows lie in pages.
func grows(s backend.State) bool { return s.Kind == backend.PerToken || s.Kind == backend.PerBlock }

// aligned is n rounded up to what a plane begins at.
func aligned(n uint64) uint64 { return (n + 255) &^ 255 }

// pageBytes is what a page takes in a plane, and what the scales of its values take.
func (p *plane) pageBytes() (values, scales uint64) {
	if p.group > 0 {
		scales = p.values / p.group * 2
	}
	return p.values * p.element, scales
}

// PageBytes is what a page of the pool takes, in all states.
func (d *Device) PageBytes() (n uint64) {
	for id, s := range d.opt.States {
		if grows(s) {
			values, scales := d.states[id].pageBytes()
			n += values + scales
		}
	}
	return n
}

// Room is how many bytes of the GPU's memory could be allocated now.
func (d *Device) Room() (n uint64, err error) {
	err = d.do("room", func(c *driver.Context) error {
		free, _, err := c.MemInfo()
		n = free - min(free, c.Reserve)
		return err
	})
	return n, err
}

// Stock takes the memory of the pool of a device that was opened without one. Programs may have been compiled before.
func (d *Device) Stock(pages int) error {
	if d.pool != 0 || pages < 1 {
		return fmt.Errorf("cuda: a pool of %d pages: a device takes one pool, of at least one page", pages)
	}
	return d.do("pool", func(c *driver.Context) error {
		before := d.bytes
		if err := d.stock(c, pages); err != nil {
			return &hostError{err}
		}
		d.reserved += d.bytes - before
		return nil
	})
}

// stock allocates the pool in one piece, plane after plane, and tells it to the programs.
func (d *Device) stock(c *driver.Context, pages int) (err error) {
	var size uint64
	for id, s := range d.opt.States {
		if grows(s) {
			values, scales := d.states[id].pageBytes()
			size += aligned(uint64(pages)*values) + aligned(uint64(pages)*scales)
		}
	}
	if d.pool, err = d.alloc(c, fmt.Sprintf("pool of %d pages", pages), size); err != nil {
		return err
	}
	at := d.pool
	for id, s := range d.opt.States {
		if !grows(s) {
			continue
		}
		p := &d.states[id]
		values, scales := p.pageBytes()
		p.at = at
		at += driver.Ptr(aligned(uint64(pages) * values))
		if scales > 0 {
			p.scales = at
			at += driver.Ptr(aligned(uint64(pages) * scales))
		}
	}
	d.pages = backend.NewPool(pages)
	for _, bind := range d.binds {
		bind()
	}
	d.binds = nil
	return nil
}

// bind calls f when the planes of states that grow have their addresses: now, or once there is a pool.
func (d *Device) bind(f func()) {
	if d.pool != 0 {
		f()
		return
	}
	d.binds = append(d.binds, f)
}

// Pages tells how many pages images hold, shared ones once, and how many there are.
func (d *Device) Pages() (used, all int) { return d.pages.Pages() }

// tellPages sends what is new of a lane's table. The driver has copied it when this returns.
func (d *Device) tellPages(c *driver.Context, lane int) error {
	img := &d.images[lane]
	if img.told == len(img.table) {
		return nil
	}
	at := d.tables + driver.Ptr(4*(lane*d.tablePages()+img.told))
	if err := c.ToDevice(d.stream, at, bytesIn(img.table[img.told:])); err != nil {
		return err
	}
	img.told = len(img.table)
	return nil
}

// tablePages is the most pages of an image.
func (d *Device) tablePages() int { return backend.PagesOf(d.opt.Tokens) }

// row is where token t of an image lies among the rows of a PerToken plane.
func (img *image) row(t int) uint32 {
	return uint32(img.table[t/backend.PageTokens])*backend.PageTokens + uint32(t%backend.PageTokens)
}

// tokenOf is the inverse of row, -1 of a row in no page of the image.
func (img *image) tokenOf(row uint32) int {
	for i, page := range img.table {
		if uint32(page) == row/backend.PageTokens {
			return i*backend.PageTokens + int(row%backend.PageTokens)
		}
	}
	return -1
}

// copyPages makes an image's pages those of a copy of another: whole pages that both clocks of the other have left behind are shared, the
// rest copied.
func (d *Device) copyPages(c *driver.Context, to, from *image) (err error) {
	var shared int
	if to.table, shared, err = d.pages.Copy(to.table, from.table, from.length-from.carried, from.length); err != nil {
		return &hostError{err}
	}
	to.told = 0
	for i := shared; i < len(to.table); i++ {
		dst, src := uint64(to.table[i]), uint64(from.table[i])
		for id, s := range d.opt.States {
			if !grows(s) {
				continue
			}
			p := &d.states[id]
			values, scales := p.pageBytes()
			if err := c.Copy(d.stream, p.at+driver.Ptr(dst*values), p.at+driver.Ptr(src*values), values); err != nil {
				return err
			}
			if scales == 0 {
				continue
			}
			if err := c.Copy(d.stream, p.scales+driver.Ptr(dst*scales), p.scales+driver.Ptr(src*scales), scales); err != nil {
				return err
			}
		}
	}
	return nil
}
