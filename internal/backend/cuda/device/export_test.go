package device

import (
	"ninfer/internal/backend"
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
