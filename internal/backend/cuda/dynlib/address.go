package dynlib

import "unsafe"

// Address is the address of memory handed to a library; the caller keeps v alive across the call. It puts v on the heap: a goroutine's
// stack may move between taking the address and the call.
func Address[T any](v *T) uintptr { return uintptr(escape(unsafe.Pointer(v))) }

var never bool

//lint:ignore U1000 being written is its use
var sink unsafe.Pointer

//go:noinline
func escape(p unsafe.Pointer) unsafe.Pointer {
	if never {
		sink = p
	}
	return p
}
