package driver

import (
	"fmt"
	"strings"
)

// Version is a CUDA version as the driver reports it: 1000 * major + 10 * minor.
type Version int

func (v Version) String() string { return fmt.Sprintf("%d.%d", int(v)/1000, int(v)%1000/10) }

// NeedVersion is the oldest CUDA version a driver must support to load the shipped kernels.
const NeedVersion Version = 13000

// NoDriverError says that the machine has no usable NVIDIA driver library.
type NoDriverError struct {
	Library string // what was looked for
	Err     error  // why it could not be used
}

func (e *NoDriverError) Error() string {
	// Linux' loader names the library itself.
	return fmt.Sprintf("cuda: no NVIDIA driver: %s: %s", e.Library, strings.TrimPrefix(e.Err.Error(), e.Library+": "))
}

func (e *NoDriverError) Unwrap() error { return e.Err }

// OldDriverError says that the driver is older than the shipped kernels need.
type OldDriverError struct {
	Have, Need Version
	Missing    string // a function the driver lacks, or empty
}

func (e *OldDriverError) Error() string {
	s := fmt.Sprintf("cuda: the NVIDIA driver supports CUDA %v, CUDA %v or newer is needed (driver 580 or newer)", e.Have, e.Need)
	if e.Missing != "" {
		s += ": it has no " + e.Missing
	}
	return s
}

// NoDeviceError says that there is a driver but no such GPU.
type NoDeviceError struct{ Ordinal, Count int }

func (e *NoDeviceError) Error() string {
	if e.Count == 0 {
		return "cuda: the NVIDIA driver sees no GPU (CUDA_VISIBLE_DEVICES may hide one)"
	}
	return fmt.Sprintf("cuda: no GPU %d: the driver sees %d", e.Ordinal, e.Count)
}

// ArchError says that the kernels hold no machine code for the GPU.
type ArchError struct {
	Device string   // the GPU's name
	Have   string   // its architecture, "sm_89"
	Need   []string // what the kernels were compiled for
}

func (e *ArchError) Error() string {
	return fmt.Sprintf("cuda: %s is %s, the kernels are compiled for %s", e.Device, e.Have, strings.Join(e.Need, " and "))
}

// MemoryError says that the GPU has too little memory.
type MemoryError struct {
	What        string // what it was for
	Need        uint64 // bytes asked for
	Free, Total uint64 // bytes on the device at that moment
	Reserve     uint64 // of the free ones, promised to others
}

func (e *MemoryError) Error() string {
	text := fmt.Sprintf("cuda: out of GPU memory: %s needs %s, %s of %s are free", e.What, size(e.Need), size(e.Free), size(e.Total))
	if e.Reserve > 0 {
		text += fmt.Sprintf(" and %s of them are to stay so", size(e.Reserve))
	}
	return text
}

func size(n uint64) string {
	switch {
	case n >= 10<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 10<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%d bytes", n)
}

// Result is a CUresult.
type Result uint32

// Results callers act on.
const (
	Success           Result = 0
	ErrorOutOfMemory  Result = 2
	ErrorNoDevice     Result = 100
	ErrorNoBinary     Result = 209
	ErrorNotReady     Result = 600
	errorInsufficient Result = 803 // system driver mismatch
)

// Error is a failed driver call.
type Error struct {
	Call string
	Code Result
	Text string // the driver's own words
}

func (e *Error) Error() string {
	if e.Text == "" {
		return fmt.Sprintf("cuda: %s: error %d", e.Call, e.Code)
	}
	return fmt.Sprintf("cuda: %s: %s (error %d)", e.Call, e.Text, e.Code)
}
