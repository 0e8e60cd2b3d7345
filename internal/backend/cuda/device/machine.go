package device

import (
	"io/fs"

	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
	tuned "ninfer/internal/backend/cuda/kernels"
)

// Machine is machine code that a device can run instead of what it was opened with. Two devices are no comparison: the same code takes up to 2 % more or less
// of a step where buffers lie at other addresses.
type Machine struct {
	set   *kernels.Set
	tuned *tuned.Set
}

// Machine loads machine code, of Options.Code and Options.Tuned; nil is what was built in. Both must have parameters as the built-in code has them. It
// stays loaded until the device is closed.
func (d *Device) Machine(code, own fs.FS) (m Machine, err error) {
	err = d.do("machine code", func(c *driver.Context) (err error) {
		if m, err = d.load(c, code, own); err != nil {
			return &hostError{err}
		}
		return nil
	})
	return m, err
}

// load loads machine code: with Options.Plain none of the tuned kernels.
func (d *Device) load(c *driver.Context, code, own fs.FS) (m Machine, err error) {
	if m.set, err = kernels.Load(c, code); err == nil && !d.opt.Plain {
		m.tuned, err = tuned.Load(c, own)
	}
	return m, err
}

// Use makes all steps run machine code of this device from now on, from the first launch on as if they had just been compiled. Fill begins anew with its
// random data, so that sequences that it makes are those that other code gets.
func (d *Device) Use(m Machine) error {
	return d.do("machine code", func(c *driver.Context) error {
		if err := c.Synchronize(); err != nil {
			return err
		}
		for _, s := range d.steps {
			if err := s.freeGraphs(c); err != nil {
				return err
			}
		}
		d.set, d.tuned, d.like, d.reluctant, d.seed = m.set, m.tuned, armed{}, 0, 0
		return nil
	})
}
