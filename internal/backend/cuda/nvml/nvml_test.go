package nvml

import (
	"errors"
	"testing"
	"unsafe"
)

type fake struct {
	none    error
	missing string
	init    uintptr
	names   []string
}

func (f *fake) Open(...string) (uintptr, error) { return 1, f.none }

func (f *fake) Symbol(_ uintptr, name string) uintptr {
	if name == f.missing {
		return 0
	}
	f.names = append(f.names, name)
	return uintptr(len(f.names))
}

func (f *fake) Call(fn uintptr, a []uintptr) uintptr {
	put := func(at uintptr, v uint32) { *(*uint32)(*(*unsafe.Pointer)(unsafe.Pointer(&at))) = v }
	switch f.names[fn-1] {
	case "nvmlInit_v2":
		return f.init
	case "nvmlSystemGetDriverVersion":
		*(*[8]byte)(*(*unsafe.Pointer)(unsafe.Pointer(&a[0]))) = [8]byte{'5', '8', '0', '.', '9', '5'}
	case "nvmlDeviceGetPowerUsage":
		put(a[1], 345600)
	case "nvmlDeviceGetEnforcedPowerLimit":
		return 3 // not supported
	case "nvmlDeviceGetClockInfo":
		put(a[2], map[uintptr]uint32{1: 1980, 2: 3201}[a[1]])
	}
	return 0
}

func TestRead(t *testing.T) {
	l, err := OpenWith(&fake{})
	if err != nil {
		t.Fatal(err)
	}
	d, err := l.Device("00000000:01:00.0")
	if err != nil {
		t.Fatal(err)
	}
	if s := d.Read(); s != (Status{PowerWatts: 345.6, SMClockMHz: 1980, MemoryMHz: 3201}) {
		t.Errorf("status %+v", s)
	}
	if v := l.DriverVersion(); v != "580.95" {
		t.Errorf("driver %q", v)
	}
	if l, err := OpenWith(&fake{missing: "nvmlSystemGetDriverVersion"}); err != nil || l.DriverVersion() != "" {
		t.Errorf("a library that does not tell the driver's version: %v", err)
	}
}

func TestOpenFails(t *testing.T) {
	for _, f := range []*fake{{none: errors.New("no such file")}, {missing: "nvmlDeviceGetClockInfo"}, {init: 9}} {
		if _, err := OpenWith(f); err == nil {
			t.Errorf("%+v: no error", f)
		}
	}
}
