//go:build !windows

package dynlib

import (
	"errors"

	"github.com/ebitengine/purego"
)

// Open implements Loader.
func (System) Open(names ...string) (uintptr, error) {
	err := errors.New("no library name given")
	for _, name := range names {
		var h uintptr
		if h, err = purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_LOCAL); err == nil {
			return h, nil
		}
	}
	return 0, err
}

// Symbol implements Loader.
func (System) Symbol(handle uintptr, name string) uintptr {
	p, err := purego.Dlsym(handle, name)
	if err != nil {
		return 0
	}
	return p
}
