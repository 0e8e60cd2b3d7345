package device

import (
	"errors"

	"ninfer/internal/backend/cuda/driver"
)

// OpTime is how long the GPU worked on one operation of a launch, with the gap to the next one.
type OpTime struct {
	Op           string
	Microseconds float64
}

// profile collects events between the operations of a launch.
type profile struct {
	names  []string
	events []driver.Event
}

// Profile runs f, which launches steps and waits for them, and returns the time of every operation in order. Steps run kernel by kernel
// meanwhile: where the host launches too slowly, its time shows instead.
func (d *Device) Profile(f func() error) ([]OpTime, error) {
	d.profile = &profile{}
	p := d.profile
	ferr := f()
	d.profile = nil
	var list []OpTime
	err := d.do("profile", func(c *driver.Context) error {
		err := c.Synchronize()
		for i, e := range p.events {
			if err == nil && i+1 < len(p.events) && p.names[i] != "" {
				var us float64
				if us, err = c.Elapsed(e, p.events[i+1]); err == nil {
					list = append(list, OpTime{p.names[i], us})
				}
			}
		}
		for _, e := range p.events {
			err = errors.Join(err, c.DestroyEvent(e))
		}
		return err
	})
	return list, errors.Join(ferr, err)
}

// stamp notes when the GPU arrives at an operation, if somebody asked.
func (d *Device) stamp(c *driver.Context, name string) error {
	if d.profile == nil {
		return nil
	}
	e, err := c.NewEvent(true)
	if err != nil {
		return err
	}
	d.profile.names = append(d.profile.names, name)
	d.profile.events = append(d.profile.events, e)
	return c.Record(e, d.stream)
}
