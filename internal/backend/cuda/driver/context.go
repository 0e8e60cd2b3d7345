package driver

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"ninfer/internal/backend/cuda/dynlib"
)

// Context is a GPU's primary context on the owner's thread.
type Context struct {
	Device Device
	// Reserve is how many bytes Alloc leaves free on the device, whoever uses the rest.
	Reserve uint64

	d     *Driver
	dev   int32
	arena *arena
}

// arena is the memory the driver reads and writes during a call. It is one heap object, so it never moves, and reusing it keeps hot
// calls free of allocations.
type arena struct {
	args   [16]uintptr
	out    [4]uint64
	config launchConfig
	attr   launchAttr
	params [1]uintptr
	buf    [2048 / 8]uint64
}

// launchConfig is CUlaunchConfig, 64-bit.
type launchConfig struct {
	grid, block [3]uint32
	shared      uint32
	_           uint32
	stream      uintptr
	attrs       uintptr
	attrCount   uint32
	_           uint32
}

// launchAttr is CUlaunchAttribute: an id, padding to eight bytes, 64 bytes of value.
type launchAttr struct {
	id    uint32
	_     uint32
	value [16]uint32
}

const attrProgrammatic = 6

func newContext(d *Driver, ordinal int) (*Context, error) {
	list, err := d.Devices()
	if err != nil {
		return nil, err
	}
	if ordinal < 0 || ordinal >= len(list) {
		return nil, &NoDeviceError{Ordinal: ordinal, Count: len(list)}
	}
	c := &Context{Device: list[ordinal], d: d, arena: new(arena)}
	v, h := new(int32), new(uintptr)
	if err := d.call(fDeviceGet, dynlib.Address(v), uintptr(ordinal)); err != nil {
		return nil, err
	}
	c.dev = *v
	if err := d.call(fPrimaryCtxRetain, dynlib.Address(h), uintptr(c.dev)); err != nil {
		return nil, err
	}
	if err := d.call(fCtxSetCurrent, *h); err != nil {
		return nil, err
	}
	runtime.KeepAlive(v)
	runtime.KeepAlive(h)
	return c, nil
}

func (c *Context) release() { _ = c.d.call(fPrimaryCtxRelease, uintptr(c.dev)) }

// hot calls f with the first n arena arguments.
func (c *Context) hot(f, n int) error {
	r := Result(c.d.ld.Call(c.d.fn[f], c.arena.args[:n]))
	runtime.KeepAlive(c)
	if r != Success {
		return c.d.check(f, r)
	}
	return nil
}

// Synchronize waits for everything on the device.
func (c *Context) Synchronize() error { return c.hot(fCtxSynchronize, 0) }

// ---- kernels ----

// Load loads machine code from memory. The bytes are read during the call only.
func (c *Context) Load(image []byte) (Module, error) {
	if len(image) == 0 {
		return 0, errors.New("cuda: machine code of no bytes")
	}
	aligned := make([]uint64, (len(image)+15)/8) // embedded bytes may start anywhere
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&aligned[0])), len(image)), image)
	h := new(uintptr)
	err := c.d.call(fLibraryLoadData, dynlib.Address(h), dynlib.Address(&aligned[0]), 0, 0, 0, 0, 0, 0)
	runtime.KeepAlive(aligned)
	return Module(*h), err
}

// Unload frees a module; its functions must no longer be used.
func (c *Context) Unload(m Module) error { return c.d.call(fLibraryUnload, uintptr(m)) }

// Function finds a kernel and makes the driver load it now, because a first use inside a capture can fail.
func (c *Context) Function(m Module, name string) (Func, error) {
	s := append([]byte(name), 0)
	h := new(uintptr)
	err := c.d.call(fLibraryGetKernel, dynlib.Address(h), uintptr(m), dynlib.Address(&s[0]))
	if err == nil {
		err = c.d.call(fKernelGetFunction, dynlib.Address(h), *h)
	}
	if err == nil {
		err = c.d.call(fFuncLoad, *h)
	}
	runtime.KeepAlive(s)
	return Func(*h), err
}

// Global is the address and size of a module's variable.
func (c *Context) Global(m Module, name string) (Ptr, uint64, error) {
	s := append([]byte(name), 0)
	p, n := new(Ptr), new(uint64)
	err := c.d.call(fLibraryGetGlobal, dynlib.Address(p), dynlib.Address(n), uintptr(m), dynlib.Address(&s[0]))
	runtime.KeepAlive(s)
	return *p, *n, err
}

// Shared is the static shared memory of a kernel in bytes.
func (c *Context) Shared(f Func) (int, error) {
	v := new(int32)
	err := c.d.call(fFuncGetAttribute, dynlib.Address(v), 1, uintptr(f))
	runtime.KeepAlive(v)
	return int(*v), err
}

// AllowShared raises a kernel's dynamic shared memory limit to bytes and prefers shared memory over L1 on its SMs.
func (c *Context) AllowShared(f Func, bytes int) error {
	if err := c.d.call(fFuncSetAttribute, uintptr(f), 8, uintptr(bytes)); err != nil {
		return err
	}
	return c.d.call(fFuncSetAttribute, uintptr(f), 9, 100)
}

// Launch is how a kernel is started.
type Launch struct {
	Func        Func
	Grid, Block [3]uint32
	Shared      uint32 // dynamic shared memory, bytes
	PDL         bool   // may start before its predecessor has ended
}

// Launch starts a kernel on s with the parameter struct of size bytes at params, which is copied.
func (c *Context) Launch(s Stream, l *Launch, params unsafe.Pointer, size uintptr) error {
	a := c.arena
	if size > unsafe.Sizeof(a.buf) {
		return fmt.Errorf("cuda: %d bytes of parameters, room for %d", size, unsafe.Sizeof(a.buf))
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&a.buf)), size), unsafe.Slice((*byte)(params), size))
	a.config = launchConfig{grid: l.Grid, block: l.Block, shared: l.Shared, stream: uintptr(s)}
	if l.PDL {
		a.attr = launchAttr{id: attrProgrammatic, value: [16]uint32{1}}
		a.config.attrs, a.config.attrCount = uintptr(unsafe.Pointer(&a.attr)), 1
	}
	a.params[0] = uintptr(unsafe.Pointer(&a.buf))
	a.args[0], a.args[1], a.args[2], a.args[3] = uintptr(unsafe.Pointer(&a.config)), uintptr(l.Func), uintptr(unsafe.Pointer(&a.params)), 0
	return c.hot(fLaunchKernelEx, 4)
}

// ---- memory ----

// MemInfo is free and total device memory in bytes.
func (c *Context) MemInfo() (free, total uint64, err error) {
	o := &c.arena.out
	c.arena.args[0], c.arena.args[1] = dynlib.Address(&o[0]), dynlib.Address(&o[1])
	err = c.hot(fMemGetInfo, 2)
	return o[0], o[1], err
}

// Alloc reserves device memory; what names its use in the error.
func (c *Context) Alloc(what string, bytes uint64) (Ptr, error) {
	if c.Reserve > 0 {
		free, total, err := c.MemInfo()
		if err != nil {
			return 0, err
		}
		if free < c.Reserve || free-c.Reserve < bytes {
			return 0, &MemoryError{What: what, Need: bytes, Free: free, Total: total, Reserve: c.Reserve}
		}
	}
	o := &c.arena.out
	c.arena.args[0], c.arena.args[1] = dynlib.Address(&o[0]), uintptr(max(bytes, 16))
	if r := Result(c.d.ld.Call(c.d.fn[fMemAlloc], c.arena.args[:2])); r == ErrorOutOfMemory {
		e := &MemoryError{What: what, Need: bytes}
		e.Free, e.Total, _ = c.MemInfo()
		return 0, e
	} else if r != Success {
		return 0, c.d.check(fMemAlloc, r)
	}
	return Ptr(o[0]), nil
}

// Free returns device memory.
func (c *Context) Free(p Ptr) error { return c.d.call(fMemFree, uintptr(p)) }

// AllocHost reserves pinned host memory, visible to the device at the same address. It is not Go memory: free it with FreeHost.
// write says that the host only writes it (write-combined: faster for the device, very slow to read).
func (c *Context) AllocHost(bytes int, write bool) ([]byte, error) {
	flags := uintptr(1 | 2) // portable, mapped
	if write {
		flags |= 4
	}
	h := new(unsafe.Pointer)
	if err := c.d.call(fMemHostAlloc, dynlib.Address(h), uintptr(bytes), flags); err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(*h), bytes), nil
}

// FreeHost returns memory of AllocHost.
func (c *Context) FreeHost(b []byte) error { return c.d.call(fMemFreeHost, dynlib.Address(&b[0])) }

// ToDevice copies src to dst on s. src must be pinned, or the call returns only when it has been read.
func (c *Context) ToDevice(s Stream, dst Ptr, src []byte) error {
	if len(src) == 0 {
		return nil
	}
	a := &c.arena.args
	a[0], a[1], a[2], a[3] = uintptr(dst), dynlib.Address(&src[0]), uintptr(len(src)), uintptr(s)
	err := c.hot(fMemcpyHtoDAsync, 4)
	runtime.KeepAlive(src)
	return err
}

// ToHost copies device memory to dst on s; dst must be pinned, or the call returns only when it is written.
func (c *Context) ToHost(s Stream, dst []byte, src Ptr) error {
	if len(dst) == 0 {
		return nil
	}
	a := &c.arena.args
	a[0], a[1], a[2], a[3] = dynlib.Address(&dst[0]), uintptr(src), uintptr(len(dst)), uintptr(s)
	err := c.hot(fMemcpyDtoHAsync, 4)
	runtime.KeepAlive(dst)
	return err
}

// Copy copies within the device.
func (c *Context) Copy(s Stream, dst, src Ptr, bytes uint64) error {
	a := &c.arena.args
	a[0], a[1], a[2], a[3] = uintptr(dst), uintptr(src), uintptr(bytes), uintptr(s)
	return c.hot(fMemcpyDtoDAsync, 4)
}

// Set fills device memory with a byte.
func (c *Context) Set(s Stream, dst Ptr, value byte, bytes uint64) error {
	a := &c.arena.args
	a[0], a[1], a[2], a[3] = uintptr(dst), uintptr(value), uintptr(bytes), uintptr(s)
	return c.hot(fMemsetD8Async, 4)
}

// ---- streams, events ----

// NewStream makes a stream that does not wait for the default stream.
func (c *Context) NewStream() (Stream, error) {
	h := new(uintptr)
	err := c.d.call(fStreamCreate, dynlib.Address(h), 1)
	return Stream(*h), err
}

// DestroyStream frees a stream.
func (c *Context) DestroyStream(s Stream) error { return c.d.call(fStreamDestroy, uintptr(s)) }

// SyncStream waits until s is idle.
func (c *Context) SyncStream(s Stream) error {
	c.arena.args[0] = uintptr(s)
	return c.hot(fStreamSynchronize, 1)
}

// NewEvent makes an event; timing events can be used with Elapsed, others let a waiting thread sleep.
func (c *Context) NewEvent(timing bool) (Event, error) {
	flags := uintptr(1 | 2) // blocking sync, no timing
	if timing {
		flags = 0
	}
	h := new(uintptr)
	err := c.d.call(fEventCreate, dynlib.Address(h), flags)
	return Event(*h), err
}

// DestroyEvent frees an event.
func (c *Context) DestroyEvent(e Event) error { return c.d.call(fEventDestroy, uintptr(e)) }

// Record marks the current end of s.
func (c *Context) Record(e Event, s Stream) error {
	c.arena.args[0], c.arena.args[1] = uintptr(e), uintptr(s)
	return c.hot(fEventRecord, 2)
}

// Done says whether e has happened.
func (c *Context) Done(e Event) (bool, error) {
	c.arena.args[0] = uintptr(e)
	switch r := Result(c.d.ld.Call(c.d.fn[fEventQuery], c.arena.args[:1])); r {
	case Success:
		return true, nil
	case ErrorNotReady:
		return false, nil
	default:
		return false, c.d.check(fEventQuery, r)
	}
}

// Sync waits for e.
func (c *Context) Sync(e Event) error {
	c.arena.args[0] = uintptr(e)
	return c.hot(fEventSynchronize, 1)
}

// Elapsed is the time between two recorded events in microseconds.
func (c *Context) Elapsed(from, to Event) (float64, error) {
	a := c.arena
	a.args[0], a.args[1], a.args[2] = dynlib.Address(&a.out[0]), uintptr(from), uintptr(to)
	err := c.hot(fEventElapsedTime, 3)
	return float64(*(*float32)(unsafe.Pointer(&a.out[0]))) * 1000, err
}

// ---- graphs ----

// Capture records what f puts on s into an executable graph, in thread-local mode so that other threads cannot break it, and uploads it.
// nodes is the number of nodes captured.
func (c *Context) Capture(s Stream, f func() error) (e Exec, nodes int, err error) {
	if err := c.d.call(fStreamBeginCapture, uintptr(s), 1); err != nil {
		return 0, 0, err
	}
	ferr := f()
	g, n, h := new(uintptr), new(uint64), new(uintptr)
	err = c.d.call(fStreamEndCapture, uintptr(s), dynlib.Address(g))
	if ferr != nil {
		err = ferr
	}
	if *g != 0 {
		defer func() { _ = c.d.call(fGraphDestroy, *g) }()
	}
	if err != nil {
		return 0, 0, err
	}
	if err := c.d.call(fGraphGetNodes, *g, 0, dynlib.Address(n)); err != nil {
		return 0, 0, err
	}
	if err := c.d.call(fGraphInstantiate, dynlib.Address(h), *g, 0); err != nil {
		return 0, 0, err
	}
	if err := c.d.call(fGraphUpload, *h, uintptr(s)); err != nil {
		return 0, 0, err
	}
	runtime.KeepAlive(g)
	runtime.KeepAlive(n)
	return Exec(*h), int(*n), nil
}

// GraphLaunch replays a graph on s.
func (c *Context) GraphLaunch(e Exec, s Stream) error {
	c.arena.args[0], c.arena.args[1] = uintptr(e), uintptr(s)
	return c.hot(fGraphLaunch, 2)
}

// DestroyExec frees a graph.
func (c *Context) DestroyExec(e Exec) error { return c.d.call(fGraphExecDestroy, uintptr(e)) }
