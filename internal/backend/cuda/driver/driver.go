// Package driver binds the part of the CUDA driver API that the backend uses, without cgo.
//
// Open loads libcuda.so.1 (nvcuda.dll on Windows) and checks its version; it is the only thing that can say "this machine cannot".
// StartOwner starts the one goroutine that owns a GPU: it locks its OS thread, because the driver's current context belongs to a
// thread, and runs every function given to Owner.Do there. Everything on Context must be called inside such a function and is not
// safe for other goroutines.
//
// Addresses on the device are Ptr; they are not Go pointers and nothing collects them: what is allocated must be freed, or dies with
// the process. Host memory the driver reads after a call returns (asynchronous copies) must be pinned memory from AllocHost, never Go
// memory. Kernel parameters are copied by the driver during the launch call. The calls of a running step (Launch, GraphLaunch, Record,
// Done, copies) allocate nothing.
package driver

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"ninfer/internal/backend/cuda/dynlib"
)

// Ptr is an address in device memory.
type Ptr uint64

// Handles of the driver.
type (
	Func   uintptr
	Stream uintptr
	Event  uintptr
	Exec   uintptr
	Module uintptr
)

// function indices; the order is that of names.
const (
	fInit = iota
	fDriverGetVersion
	fGetErrorString
	fDeviceGetCount
	fDeviceGet
	fDeviceGetName
	fDeviceGetAttribute
	fDeviceTotalMem
	fDeviceGetPCIBusId
	fPrimaryCtxRetain
	fPrimaryCtxRelease
	fCtxSetCurrent
	fCtxSynchronize
	fLibraryLoadData
	fLibraryUnload
	fLibraryGetKernel
	fLibraryGetGlobal
	fKernelGetFunction
	fFuncLoad
	fFuncGetAttribute
	fFuncSetAttribute
	fMemGetInfo
	fMemAlloc
	fMemFree
	fMemHostAlloc
	fMemFreeHost
	fMemcpyHtoDAsync
	fMemcpyDtoHAsync
	fMemcpyDtoDAsync
	fMemsetD8Async
	fStreamCreate
	fStreamDestroy
	fStreamSynchronize
	fEventCreate
	fEventDestroy
	fEventRecord
	fEventQuery
	fEventSynchronize
	fEventElapsedTime
	fStreamBeginCapture
	fStreamEndCapture
	fGraphInstantiate
	fGraphUpload
	fGraphLaunch
	fGraphExecDestroy
	fGraphDestroy
	fGraphGetNodes
	fLaunchKernelEx
	nFuncs
)

// The versioned names are the current ABI; several unversioned ones are older and incompatible.
var names = [nFuncs]string{
	"cuInit", "cuDriverGetVersion", "cuGetErrorString", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute",
	"cuDeviceTotalMem_v2", "cuDeviceGetPCIBusId", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2", "cuCtxSetCurrent",
	"cuCtxSynchronize", "cuLibraryLoadData", "cuLibraryUnload", "cuLibraryGetKernel", "cuLibraryGetGlobal", "cuKernelGetFunction", "cuFuncLoad",
	"cuFuncGetAttribute", "cuFuncSetAttribute", "cuMemGetInfo_v2", "cuMemAlloc_v2", "cuMemFree_v2", "cuMemHostAlloc", "cuMemFreeHost",
	"cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemsetD8Async", "cuStreamCreate", "cuStreamDestroy_v2",
	"cuStreamSynchronize", "cuEventCreate", "cuEventDestroy_v2", "cuEventRecord", "cuEventQuery",
	"cuEventSynchronize", "cuEventElapsedTime", "cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags",
	"cuGraphUpload", "cuGraphLaunch", "cuGraphExecDestroy", "cuGraphDestroy", "cuGraphGetNodes", "cuLaunchKernelEx",
}

// Driver is the loaded and initialised driver library.
type Driver struct {
	ld      dynlib.Loader
	fn      [nFuncs]uintptr
	version Version
}

// Open loads the system's driver library. It fails with *NoDriverError or *OldDriverError.
func Open() (*Driver, error) { return OpenWith(dynlib.System{}) }

// OpenWith is Open with another dynamic linker: tests inject failures through it.
func OpenWith(ld dynlib.Loader) (*Driver, error) {
	lib := "libcuda.so.1"
	if runtime.GOOS == "windows" {
		lib = "nvcuda.dll"
	}
	h, err := ld.Open(lib)
	if err != nil {
		return nil, &NoDriverError{Library: lib, Err: err}
	}
	d := &Driver{ld: ld}
	d.fn[fDriverGetVersion] = ld.Symbol(h, names[fDriverGetVersion])
	d.fn[fInit] = ld.Symbol(h, names[fInit])
	if d.fn[fDriverGetVersion] == 0 || d.fn[fInit] == 0 {
		return nil, &NoDriverError{Library: lib, Err: errors.New("not a CUDA driver library")}
	}
	out := new(int32)
	if r := d.raw(fDriverGetVersion, dynlib.Address(out)); r != Success {
		return nil, &NoDriverError{Library: lib, Err: fmt.Errorf("cuDriverGetVersion: error %d", r)}
	}
	d.version = Version(*out)
	runtime.KeepAlive(out)
	if d.version < NeedVersion {
		return nil, &OldDriverError{Have: d.version, Need: NeedVersion}
	}
	for i, name := range names {
		if d.fn[i] = ld.Symbol(h, name); d.fn[i] == 0 {
			return nil, &OldDriverError{Have: d.version, Need: NeedVersion, Missing: name}
		}
	}
	if r := d.raw(fInit, 0); r != Success {
		if r == errorInsufficient {
			return nil, &OldDriverError{Have: d.version, Need: NeedVersion}
		}
		if r == ErrorNoDevice {
			return nil, &NoDeviceError{}
		}
		return nil, &NoDriverError{Library: lib, Err: d.check(fInit, r)}
	}
	return d, nil
}

// Version is the newest CUDA version the driver supports.
func (d *Driver) Version() Version { return d.version }

// raw is for calls outside the hot path: its arguments escape.
func (d *Driver) raw(f int, args ...uintptr) Result { return Result(d.ld.Call(d.fn[f], args)) }

func (d *Driver) check(f int, r Result) error {
	if r == Success {
		return nil
	}
	e := &Error{Call: names[f], Code: r}
	if d.fn[fGetErrorString] != 0 {
		out := new(uintptr)
		if d.raw(fGetErrorString, uintptr(r), dynlib.Address(out)) == Success && *out != 0 {
			e.Text = cString(*out)
		}
		runtime.KeepAlive(out)
	}
	return e
}

func (d *Driver) call(f int, args ...uintptr) error { return d.check(f, d.raw(f, args...)) }

// cString copies a NUL-terminated string owned by the library.
func cString(p uintptr) string {
	b := *(*unsafe.Pointer)(unsafe.Pointer(&p)) // the address is C memory, which vet cannot know
	n := 0
	for n < 4096 && *(*byte)(unsafe.Add(b, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(b), n))
}

// Device describes a GPU.
type Device struct {
	Name           string
	Bus            string // PCI bus id, which NVML knows it by
	Major, Minor   int    // compute capability
	SMs            int
	SharedPerBlock int // bytes, with the opt-in maximum
	SharedPerSM    int // bytes
	L2             int // bytes
	Memory         uint64
}

// Arch is the architecture's name as compilers spell it, without the "a".
func (d Device) Arch() string { return fmt.Sprintf("sm_%d%d", d.Major, d.Minor) }

// Devices lists the GPUs the driver sees.
func (d *Driver) Devices() ([]Device, error) {
	v := new(int32)
	defer runtime.KeepAlive(v)
	if err := d.call(fDeviceGetCount, dynlib.Address(v)); err != nil {
		var e *Error
		if errors.As(err, &e) && e.Code == ErrorNoDevice {
			return nil, nil
		}
		return nil, err
	}
	list := make([]Device, *v)
	for i := range list {
		dev := new(int32)
		if err := d.call(fDeviceGet, dynlib.Address(dev), uintptr(i)); err != nil {
			return nil, err
		}
		buf, total := new([256]byte), new(uint64)
		if err := d.call(fDeviceGetName, dynlib.Address(buf), uintptr(len(buf)), uintptr(*dev)); err != nil {
			return nil, err
		}
		list[i] = Device{Name: text(buf[:])}
		if err := d.call(fDeviceGetPCIBusId, dynlib.Address(buf), uintptr(len(buf)), uintptr(*dev)); err != nil {
			return nil, err
		}
		list[i].Bus = text(buf[:])
		if err := d.call(fDeviceTotalMem, dynlib.Address(total), uintptr(*dev)); err != nil {
			return nil, err
		}
		list[i].Memory = *total
		for _, a := range []struct {
			id  uintptr
			out *int
		}{
			{75, &list[i].Major},
			{76, &list[i].Minor},
			{16, &list[i].SMs},
			{97, &list[i].SharedPerBlock},
			{81, &list[i].SharedPerSM},
			{38, &list[i].L2},
		} {
			if err := d.call(fDeviceGetAttribute, dynlib.Address(v), a.id, uintptr(*dev)); err != nil {
				return nil, err
			}
			*a.out = int(*v)
		}
		runtime.KeepAlive(dev)
		runtime.KeepAlive(buf)
		runtime.KeepAlive(total)
	}
	return list, nil
}

// text is what comes before a zero byte.
func text(b []byte) string {
	t, _, _ := bytes.Cut(b, []byte{0})
	return string(t)
}
