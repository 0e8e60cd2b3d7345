package device

import (
	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/nvml"
)

// Ledger is what a device's memory went to, in bytes.
type Ledger struct {
	Total     uint64 // of the GPU
	Weights   uint64
	Sequences uint64 // room for all images, with the pool of their pages
	Workspace uint64 // activations and control blocks of the compiled steps, scratch
}

// Ledger tells what the memory that the device has allocated is for.
func (d *Device) Ledger() Ledger {
	l := Ledger{Total: d.owner.Device().Memory, Sequences: d.reserved}
	for _, s := range d.steps {
		l.Workspace += s.bytes
	}
	if d.wide != nil {
		l.Workspace += d.wide.bytes + d.wide.common
	}
	l.Weights = d.bytes - l.Sequences - l.Workspace
	return l
}

// SequenceBytes is what an image of so many tokens takes: its pages, and what does not grow.
func (d *Device) SequenceBytes(tokens int) (n uint64) {
	for id, s := range d.opt.States {
		if p := &d.states[id]; p.at != 0 && !grows(s) {
			n += p.values * p.element
		}
	}
	return n + uint64(backend.PagesOf(tokens))*d.PageBytes()
}

// Versions are those of the driver, empty where the machine has no management library, and of CUDA as the driver supports it.
func (d *Device) Versions() (driver, cuda string) {
	if l, err := nvml.Open(); err == nil {
		driver = l.DriverVersion()
	}
	return driver, d.cuda
}
