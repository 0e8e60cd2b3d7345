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

// Windows has no such advice on a view, and its read-ahead does not follow random faults.
func random([]byte) error { return nil }

// reserve maps a temporary sparse file, which goes when the mapping does: memory of the process would be charged against the page file at
// once.
func reserve(n int) ([]byte, error) {
	f, err := os.CreateTemp("", "ninfer-reserve-*")
	if err != nil {
		return nil, err
	}
	f.Close()
	name, err := windows.UTF16PtrFromString(f.Name())
	if err != nil {
		return nil, err
	}
	h, err := windows.CreateFile(name, windows.GENERIC_READ|windows.GENERIC_WRITE, windows.FILE_SHARE_DELETE, nil, windows.OPEN_EXISTING,
		windows.FILE_ATTRIBUTE_TEMPORARY|windows.FILE_FLAG_DELETE_ON_CLOSE, 0)
	if err != nil {
		return nil, os.NewSyscallError("CreateFile", err)
	}
	defer windows.CloseHandle(h) // the mapping keeps it
	var ignored uint32
	if err := windows.DeviceIoControl(h, windows.FSCTL_SET_SPARSE, nil, 0, nil, 0, &ignored, nil); err != nil {
		return nil, os.NewSyscallError("FSCTL_SET_SPARSE", err)
	}
	m, err := windows.CreateFileMapping(h, nil, windows.PAGE_READWRITE, uint32(uint64(n)>>32), uint32(n), nil)
	if err != nil {
		return nil, os.NewSyscallError("CreateFileMapping", err)
	}
	defer windows.CloseHandle(m)
	addr, err := windows.MapViewOfFile(m, windows.FILE_MAP_WRITE, 0, 0, uintptr(n))
	if err != nil {
		return nil, os.NewSyscallError("MapViewOfFile", err)
	}
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&addr)), n), nil
}
