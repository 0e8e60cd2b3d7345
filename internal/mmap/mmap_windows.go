package mmap

import (
	"os"
	"unsafe"

	"golang.org/x/sys/windows"
)

func mapFile(f *os.File, size int) ([]byte, error) {
	h, err := windows.CreateFileMapping(windows.Handle(f.Fd()), nil, windows.PAGE_READONLY, 0, 0, nil)
	if err != nil {
		return nil, os.NewSyscallError("CreateFileMapping", err)
	}
	defer windows.CloseHandle(h) // the view keeps the mapping alive
	addr, err := windows.MapViewOfFile(h, windows.FILE_MAP_READ, 0, 0, uintptr(size))
	if err != nil {
		return nil, os.NewSyscallError("MapViewOfFile", err)
	}
	// The address comes from the system as an integer and is not Go memory;
	// reading it through a pointer to addr is the form that vet accepts.
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&addr)), size), nil
}

func unmapFile(data []byte) error {
	return os.NewSyscallError("UnmapViewOfFile", windows.UnmapViewOfFile(uintptr(unsafe.Pointer(unsafe.SliceData(data)))))
}

var prefetchVirtualMemory = windows.NewLazySystemDLL("kernel32.dll").NewProc("PrefetchVirtualMemory")

// advise prefetches for WillNeed. Windows knows no other advice on a view, and
// read-ahead there does not follow random faults.
func advise(data []byte, a Advice) error {
	if a != WillNeed || prefetchVirtualMemory.Find() != nil {
		return nil
	}
	// WIN32_MEMORY_RANGE_ENTRY
	entry := struct {
		addr unsafe.Pointer
		n    uintptr
	}{unsafe.Pointer(unsafe.SliceData(data)), uintptr(len(data))}
	ok, _, err := prefetchVirtualMemory.Call(uintptr(windows.CurrentProcess()), 1, uintptr(unsafe.Pointer(&entry)), 0)
	if ok == 0 {
		return os.NewSyscallError("PrefetchVirtualMemory", err)
	}
	return nil
}
