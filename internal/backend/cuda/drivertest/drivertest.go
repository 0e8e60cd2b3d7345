// Package drivertest is a driver with one H200 that computes nothing, for what the host does: which kernels it launches, in which graphs, what
// that costs it. Device memory is addresses without anything behind them, and what is copied to the host stays as it was.
package drivertest

import (
	"encoding/binary"
	"slices"
	"unsafe"

	"ninfer/internal/backend/cuda/code"
	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
)

// GPU is a dynlib.Loader. Its kernels do three things only: sizes tells what Layouts say, begin takes a launch's number along, and report
// brings it back.
type GPU struct {
	Layouts [][]uintptr // of the folders of kernels that are loaded: each as long as no other
	// Launched are the kernels launched since it was emptied, replayed ones too; Graphs counts replays.
	Launched []string
	Graphs   int

	names   []string // of functions, by handle less 1
	kernels []string
	graphs  [][]launch
	inside  []launch // of the capture that is going on
	capture bool
	next    uintptr // device memory
	host    [][]byte
	sizes   map[uintptr][]byte
	numbers map[driver.Ptr]uint32 // of launches, by control block
}

type launch struct {
	kernel string
	params []byte
}

// New is a driver for kernels with these layouts.
func New(layouts ...[]uintptr) (*driver.Driver, *GPU, error) {
	g := &GPU{Layouts: layouts, next: 1 << 40, sizes: map[uintptr][]byte{}, numbers: map[driver.Ptr]uint32{}}
	d, err := driver.OpenWith(g)
	return d, g, err
}

// Open implements dynlib.Loader.
func (g *GPU) Open(...string) (uintptr, error) { return 1, nil }

// Symbol implements dynlib.Loader: whatever is asked for is there.
func (g *GPU) Symbol(_ uintptr, name string) uintptr {
	g.names = append(g.names, name)
	return uintptr(len(g.names))
}

// at is what an argument points to.
func at[T any](a []uintptr, i int) *T { return *(**T)(unsafe.Pointer(&a[i])) }

// attributes of an H200 that the driver is asked for.
var attributes = map[uintptr]int32{75: 9, 76: 0, 16: 132, 97: 227 << 10, 81: 228 << 10, 38: 50 << 20}

const memory = 140 << 30

// Call implements dynlib.Loader.
func (g *GPU) Call(fn uintptr, a []uintptr) uintptr {
	switch g.names[fn-1] {
	case "cuLaunchKernelEx":
		l := launch{kernel: g.kernels[a[1]-1]}
		if p := *at[*[64]byte](a, 2); l.kernel == "begin" || l.kernel == "report" || l.kernel == "sizes" {
			l.params = slices.Clone(p[:])
		}
		if g.capture {
			g.inside = append(g.inside, l)
		} else {
			g.run(l)
		}
	case "cuGraphLaunch":
		g.Graphs++
		for _, l := range g.graphs[a[0]-1] {
			g.run(l)
		}
	case "cuStreamBeginCapture_v2":
		g.capture, g.inside = true, nil
	case "cuStreamEndCapture":
		g.capture = false
		g.graphs = append(g.graphs, g.inside)
		*at[uintptr](a, 1) = uintptr(len(g.graphs))
	case "cuGraphInstantiateWithFlags":
		*at[uintptr](a, 0) = a[1]
	case "cuGraphGetNodes":
		*at[uint64](a, 2) = uint64(len(g.graphs[a[0]-1]))
	case "cuMemAlloc_v2":
		*at[uintptr](a, 0) = g.next
		g.next += (a[1] + 511) &^ 255
	case "cuMemHostAlloc":
		b := make([]byte, a[1]+15)
		g.host = append(g.host, b)
		*at[*byte](a, 0) = &b[-uintptr(unsafe.Pointer(&b[0]))&15]
	case "cuMemcpyDtoHAsync_v2":
		if b, ok := g.sizes[a[1]]; ok {
			copy(unsafe.Slice(at[byte](a, 0), a[2]), b)
		}
	case "cuLibraryGetKernel":
		var name []byte
		for p := unsafe.Pointer(at[byte](a, 2)); *(*byte)(p) != 0; p = unsafe.Add(p, 1) {
			name = append(name, *(*byte)(p))
		}
		g.kernels = append(g.kernels, string(name))
		*at[uintptr](a, 0) = uintptr(len(g.kernels))
	case "cuKernelGetFunction":
		*at[uintptr](a, 0) = a[1]
	case "cuDriverGetVersion":
		*at[int32](a, 0) = int32(driver.NeedVersion)
	case "cuDeviceGetCount":
		*at[int32](a, 0) = 1
	case "cuDeviceGetAttribute":
		*at[int32](a, 0) = attributes[a[1]]
	case "cuDeviceTotalMem_v2":
		*at[uint64](a, 0) = memory
	case "cuMemGetInfo_v2":
		*at[uint64](a, 0), *at[uint64](a, 1) = memory-uint64(g.next-1<<40), memory
	case "cuEventElapsedTime":
		*at[float32](a, 0) = 1
	case "cuLibraryLoadData", "cuStreamCreate", "cuEventCreate", "cuDevicePrimaryCtxRetain":
		*at[uintptr](a, 0) = 1
	}
	return uintptr(driver.Success)
}

func (g *GPU) run(l launch) {
	g.Launched = append(g.Launched, l.kernel)
	if l.params == nil {
		return
	}
	p := unsafe.Pointer(&l.params[0])
	switch l.kernel {
	case "sizes":
		q := (*code.SizesParams)(p)
		var b []byte
		for _, layout := range g.Layouts {
			if len(layout) == int(q.N) {
				for _, n := range layout {
					b = binary.LittleEndian.AppendUint32(b, uint32(n))
				}
			}
		}
		g.sizes[uintptr(q.Out)] = b
	case "begin":
		q := (*kernels.BeginParams)(p)
		g.numbers[q.Device] = *(*uint32)(pointer(q.Host))
	case "report":
		q := (*kernels.ReportParams)(p)
		*(*uint32)(pointer(q.Done)) = g.numbers[q.Number]
	}
}

// pointer is host memory that a kernel sees.
func pointer(p driver.Ptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&p)) }

// Count is how often a kernel was launched.
func (g *GPU) Count(kernel string) (n int) {
	for _, k := range g.Launched {
		if k == kernel {
			n++
		}
	}
	return n
}
