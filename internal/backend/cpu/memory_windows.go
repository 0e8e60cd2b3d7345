package cpu

import (
	"unsafe"

	"golang.org/x/sys/windows"
)

var globalMemoryStatusEx = windows.NewLazySystemDLL("kernel32.dll").NewProc("GlobalMemoryStatusEx")

// memoryStatusEx is MEMORYSTATUSEX of sysinfoapi.h.
type memoryStatusEx struct {
	length, load                                      uint32
	totalPhysical, availablePhysical                  uint64
	totalPageFile, availablePageFile                  uint64
	totalVirtual, availableVirtual, availableExtended uint64
}

// Available is how many bytes of memory programs can still take, mapped files counting as free; ok is false where it is unknown.
func Available() (bytes int64, ok bool) {
	s := memoryStatusEx{}
	s.length = uint32(unsafe.Sizeof(s))
	if r, _, _ := globalMemoryStatusEx.Call(uintptr(unsafe.Pointer(&s))); r == 0 {
		return 0, false
	}
	return int64(min(s.availablePhysical, s.availablePageFile)), true
}
