package dynlib

import (
	"errors"
	"syscall"
)

// Open implements Loader.
func (System) Open(names ...string) (uintptr, error) {
	err := errors.New("no library name given")
	for _, name := range names {
		var h syscall.Handle
		if h, err = syscall.LoadLibrary(name); err == nil {
			return uintptr(h), nil
		}
	}
	return 0, err
}

// Symbol implements Loader.
func (System) Symbol(handle uintptr, name string) uintptr {
	p, err := syscall.GetProcAddress(syscall.Handle(handle), name)
	if err != nil {
		return 0
	}
	return p
}
