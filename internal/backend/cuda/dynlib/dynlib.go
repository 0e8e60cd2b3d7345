// Package dynlib opens a shared library at run time and calls its C functions without cgo.
//
// It is the only place below internal/backend/cuda that touches purego. A Library is found, never required: a machine without the
// NVIDIA driver gets an error from Open and nothing else happens. Calls pass integers and addresses only; whatever memory an
// address points to must stay where it is and stay alive until the library has stopped reading it, which is the caller's business.
package dynlib

import "github.com/ebitengine/purego"

// Loader is what driver and nvml need from a dynamic linker. Tests replace it with a table of Go functions, so every path can be
// taken without a GPU.
type Loader interface {
	// Open loads the first of names that exists and returns a handle.
	Open(names ...string) (uintptr, error)
	// Symbol returns the address of a function, or 0 when the library has none of that name.
	Symbol(handle uintptr, name string) uintptr
	// Call calls the function at fn with integer arguments (at most 32) and returns its integer result. It does not allocate and
	// does not keep args.
	Call(fn uintptr, args []uintptr) uintptr
}

// System is the operating system's dynamic linker.
type System struct{}

// Call implements Loader.
func (System) Call(fn uintptr, args []uintptr) uintptr {
	r, _, _ := purego.SyscallN(fn, args...)
	return r
}
