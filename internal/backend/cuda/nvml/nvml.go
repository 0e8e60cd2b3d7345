// Package nvml reads a GPU's power and clocks through NVIDIA's management library. Everything here is optional: a machine
// without the library gets an error from Open, and the callers do without the numbers. It changes nothing on the device.
package nvml

import (
	"bytes"
	"fmt"
	"runtime"

	"ninfer/internal/backend/cuda/dynlib"
)

// Library is the loaded management library. Its methods may be called from any goroutine.
type Library struct {
	ld                         dynlib.Loader
	byBus, power, limit, clock uintptr
	driver                     uintptr // 0 where the library does not tell
}

// Device is a GPU as the library knows it.
type Device struct {
	l *Library
	h uintptr
}

// Open loads the library of the system.
func Open() (*Library, error) { return OpenWith(dynlib.System{}) }

// OpenWith is Open with another dynamic linker.
func OpenWith(ld dynlib.Loader) (*Library, error) {
	names := []string{"libnvidia-ml.so.1"}
	if runtime.GOOS == "windows" {
		names = []string{"nvml.dll", `C:\Program Files\NVIDIA Corporation\NVSMI\nvml.dll`}
	}
	h, err := ld.Open(names...)
	if err != nil {
		return nil, fmt.Errorf("nvml: %s: %w", names[0], err)
	}
	l := &Library{ld: ld}
	var start uintptr
	for _, f := range []struct {
		name string
		p    *uintptr
	}{
		{"nvmlInit_v2", &start},
		{"nvmlDeviceGetHandleByPciBusId_v2", &l.byBus},
		{"nvmlDeviceGetPowerUsage", &l.power},
		{"nvmlDeviceGetEnforcedPowerLimit", &l.limit},
		{"nvmlDeviceGetClockInfo", &l.clock},
	} {
		if *f.p = ld.Symbol(h, f.name); *f.p == 0 {
			return nil, fmt.Errorf("nvml: %s has no %s", names[0], f.name)
		}
	}
	l.driver = ld.Symbol(h, "nvmlSystemGetDriverVersion")
	if r := ld.Call(start, nil); uint32(r) != 0 {
		return nil, fmt.Errorf("nvml: nvmlInit_v2: error %d", uint32(r))
	}
	return l, nil
}

// DriverVersion is the version of the installed driver, empty if the library does not tell.
func (l *Library) DriverVersion() string {
	b := make([]byte, 80)
	if l.driver == 0 || uint32(l.ld.Call(l.driver, []uintptr{dynlib.Address(&b[0]), uintptr(len(b))})) != 0 {
		return ""
	}
	text, _, _ := bytes.Cut(b, []byte{0})
	return string(text)
}

// Device finds a GPU by its PCI bus id, the only name CUDA and NVML share.
func (l *Library) Device(bus string) (*Device, error) {
	b := append([]byte(bus), 0)
	d := &Device{l: l}
	r := uint32(l.ld.Call(l.byBus, []uintptr{dynlib.Address(&b[0]), dynlib.Address(&d.h)}))
	runtime.KeepAlive(b)
	if r != 0 {
		return nil, fmt.Errorf("nvml: device %s: error %d", bus, r)
	}
	return d, nil
}

// Status is a reading.
type Status struct {
	PowerWatts, LimitWatts float64
	SMClockMHz, MemoryMHz  int
}

// Read takes a reading. It costs tens of microseconds; values the device does not report stay 0.
func (d *Device) Read() Status {
	var s Status
	v := new(uint32)
	at := dynlib.Address(v)
	if uint32(d.l.ld.Call(d.l.power, []uintptr{d.h, at})) == 0 {
		s.PowerWatts = float64(*v) / 1000
	}
	if uint32(d.l.ld.Call(d.l.limit, []uintptr{d.h, at})) == 0 {
		s.LimitWatts = float64(*v) / 1000
	}
	if uint32(d.l.ld.Call(d.l.clock, []uintptr{d.h, 1, at})) == 0 {
		s.SMClockMHz = int(*v)
	}
	if uint32(d.l.ld.Call(d.l.clock, []uintptr{d.h, 2, at})) == 0 {
		s.MemoryMHz = int(*v)
	}
	runtime.KeepAlive(v)
	return s
}
