package device

import "ninfer/internal/backend/cuda/driver"

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
