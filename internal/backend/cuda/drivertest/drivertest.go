// Package drivertest is a driver with one GPU that computes nothing, for what the host does: which kernels it launches, in which graphs, what
// that costs it, and whether that GPU would take them. Device memory is addresses without anything behind them, and what is copied to the host
// stays as it was.
package drivertest

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"slices"
	"strings"
	"unsafe"

	"ninfer/internal/backend/cuda/code"
	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
)

// Card is what a GPU has. Sizes are bytes.
type Card struct {
	Major, Minor, SMs           int32
	SharedPerBlock, SharedPerSM int32
	L2                          int32
	Memory                      uint64
}

// The GPUs that there is machine code for: the data-centre one, and the workstation's, RTX PRO 6000 Blackwell.
var (
	H200    = Card{9, 0, 132, 227 << 10, 228 << 10, 50 << 20, 140 << 30}
	RTX6000 = Card{12, 0, 188, 99 << 10, 100 << 10, 128 << 20, 96 << 30}
)

// Resources are what one kernel takes.
type Resources struct {
	Registers uint32 // of a thread
	Shared    uint32 // static, bytes of a block
}

// GPU is a dynlib.Loader. Its kernels do three things only: sizes tells what Layouts say, begin takes a launch's number along, and report
// brings it back.
type GPU struct {
	Layouts [][]uintptr // of the folders of kernels that are loaded: each as long as no other
	// Launched are the kernels launched since it was emptied, replayed ones too; Graphs counts replays.
	Launched []string
	Graphs   int
	// CalledOff counts beginnings that waited for a launch and were told that it does not come.
	CalledOff int
	// Tired makes beginnings give up at once that wait for a launch.
	Tired bool
	// Fail, if set, is asked at every call of the driver; what it returns other than Success is the call's result, and nothing else happens.
	Fail func(call string) driver.Result

	card      Card
	resources map[string]Resources
	allowed   map[string]uint32 // dynamic shared memory above 48 KB
	refused   []byte            // why a call failed, for cuGetErrorString

	names   []string // of functions, by handle less 1
	kernels []string
	graphs  [][]launch
	inside  []launch // of the capture that is going on
	capture bool
	next    uintptr // device memory: the next address, what is allocated, and how much of it there is
	memory  map[uintptr]uint64
	used    uint64
	host    [][]byte
	sizes   map[uintptr][]byte
	numbers map[driver.Ptr]uint32     // of launches, by control block
	awaited map[driver.Ptr]driver.Ptr // control blocks on the GPU of launches whose number the host had not written, and where it will
	clock   float64                   // microseconds: kernels take Takes each
	events  []float64                 // when they were recorded, by handle less 1
}

// Takes is how many microseconds a kernel takes by the card's events.
func Takes(kernel string) float64 { return 1 + float64(len(kernel)%7) }

type launch struct {
	kernel string
	params []byte
}

// New is a driver of a card for kernels with these layouts.
func New(card Card, layouts ...[]uintptr) (*driver.Driver, *GPU, error) {
	g := &GPU{
		Layouts: layouts, card: card, next: 1 << 40, sizes: map[uintptr][]byte{}, numbers: map[driver.Ptr]uint32{}, awaited: map[driver.Ptr]driver.Ptr{}, resources: map[string]Resources{},
		allowed: map[string]uint32{}, memory: map[uintptr]uint64{},
	}
	d, err := driver.OpenWith(g)
	return d, g, err
}

// Compiled reads a report of kernelgen: then a launch fails that takes more registers or shared memory than a block can have.
func (g *GPU) Compiled(report io.Reader) error {
	target := fmt.Sprintf("sm_%d%da", g.card.Major, g.card.Minor)
	for lines := bufio.NewScanner(report); lines.Scan(); {
		f := strings.Fields(lines.Text()) // source, kernel, target, registers, shared, stack, spills
		if len(f) < 5 || f[2] != target {
			continue
		}
		var r Resources
		if _, err := fmt.Sscan(f[3]+" "+f[4], &r.Registers, &r.Shared); err != nil {
			return fmt.Errorf("drivertest: %q: %w", lines.Text(), err)
		}
		old := g.resources[f[1]] // folders have kernels of the same name
		g.resources[f[1]] = Resources{max(old.Registers, r.Registers), max(old.Shared, r.Shared)}
	}
	if len(g.resources) == 0 {
		return fmt.Errorf("drivertest: a report without kernels for %s", target)
	}
	return nil
}

// config is the beginning of CUlaunchConfig.
type config struct {
	grid, block [3]uint32
	shared      uint32
}

// fits says why the card would not launch a kernel.
func (g *GPU) fits(kernel string, c *config) error {
	r := g.resources[kernel]
	threads := c.block[0] * c.block[1] * c.block[2]
	most := max(48<<10-r.Shared, g.allowed[kernel])
	switch {
	case min(c.grid[0], c.grid[1], c.grid[2], threads) == 0 || max(c.grid[1], c.grid[2]) > 65535 || threads > 1024:
		return fmt.Errorf("%s: grid %v, block %v", kernel, c.grid, c.block)
	case c.shared > most || c.shared+r.Shared > uint32(g.card.SharedPerBlock):
		return fmt.Errorf("%s: %d bytes of shared memory and %d static ones, allowed are %d", kernel, c.shared, r.Shared, most)
	case (r.Registers+7)/8*8*((threads+31)/32*32) > 64<<10:
		return fmt.Errorf("%s: %d registers in %d threads", kernel, r.Registers, threads)
	}
	return nil
}

// Open implements dynlib.Loader.
func (g *GPU) Open(...string) (uintptr, error) { return 1, nil }

// Symbol implements dynlib.Loader: whatever is asked for is there.
func (g *GPU) Symbol(_ uintptr, name string) uintptr {
	g.names = append(g.names, name)
	return uintptr(len(g.names))
}

// refused is CUDA_ERROR_INVALID_VALUE.
const refused = 1

// at is what an argument points to.
func at[T any](a []uintptr, i int) *T { return *(**T)(unsafe.Pointer(&a[i])) }

// Call implements dynlib.Loader.
func (g *GPU) Call(fn uintptr, a []uintptr) uintptr {
	if g.Fail != nil {
		if r := g.Fail(g.names[fn-1]); r != driver.Success {
			return uintptr(r)
		}
	}
	if name := g.names[fn-1]; slices.Contains(waiting, name) && !g.capture && !g.settled() {
		panic("drivertest: " + name + " behind a beginning whose launch has neither come nor been called off")
	}
	switch g.names[fn-1] {
	case "cuLaunchKernelEx":
		l := launch{kernel: g.kernels[a[1]-1]}
		if err := g.fits(l.kernel, at[config](a, 0)); err != nil {
			g.refused = append([]byte(err.Error()), 0)
			return refused
		}
		if p := *at[*[64]byte](a, 2); slices.Contains(reading, l.kernel) {
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
	case "cuGetErrorString":
		*at[*byte](a, 1) = unsafe.SliceData(g.refused)
	case "cuFuncGetAttribute": // of two, the static shared memory
		*at[int32](a, 0) = int32(g.resources[g.kernels[a[2]-1]].Shared)
	case "cuFuncSetAttribute":
		if a[1] == 8 { // the dynamic one that it may have
			g.allowed[g.kernels[a[0]-1]] = uint32(a[2])
		}
	case "cuMemAlloc_v2":
		if g.used+uint64(a[1]) > g.card.Memory {
			return uintptr(driver.ErrorOutOfMemory)
		}
		*at[uintptr](a, 0) = g.next
		g.memory[g.next] = uint64(a[1])
		g.used += uint64(a[1])
		g.next += (a[1] + 511) &^ 255
	case "cuMemFree_v2":
		g.used -= g.memory[a[0]]
		delete(g.memory, a[0])
	case "cuDevicePrimaryCtxRelease_v2": // with everything in it
		clear(g.memory)
		g.used = 0
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
		*at[int32](a, 0) = map[uintptr]int32{
			75: g.card.Major, 76: g.card.Minor, 16: g.card.SMs, 97: g.card.SharedPerBlock, 81: g.card.SharedPerSM, 38: g.card.L2,
		}[a[1]]
	case "cuDeviceTotalMem_v2":
		*at[uint64](a, 0) = g.card.Memory
	case "cuMemGetInfo_v2":
		*at[uint64](a, 0), *at[uint64](a, 1) = g.card.Memory-g.used, g.card.Memory
	case "cuEventCreate":
		g.events = append(g.events, 0)
		*at[uintptr](a, 0) = uintptr(len(g.events))
	case "cuEventRecord":
		g.events[a[0]-1] = g.clock
	case "cuEventElapsedTime": // milliseconds
		*at[float32](a, 0) = float32((g.events[a[2]-1] - g.events[a[1]-1]) / 1000)
	case "cuLibraryLoadData", "cuStreamCreate", "cuDevicePrimaryCtxRetain":
		*at[uintptr](a, 0) = 1
	}
	return uintptr(driver.Success)
}

// reading are the kernels whose parameters run looks at.
var reading = []string{"sizes", "begin", "begin_armed", "begin_chained", "report", "report_best"}

func (g *GPU) run(l launch) {
	g.Launched = append(g.Launched, l.kernel)
	g.clock += Takes(l.kernel)
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
	case "begin_armed":
		q := (*kernels.GatherParams)(p)
		g.awaited[q.Out] = q.List
		if number := g.numbers[q.Out] + 1; g.Tired {
			words := (*[4]uint32)(pointer(q.List))
			words[2], words[3] = number, ^number
		}
	case "begin_chained":
		q := (*kernels.GatherParams)(p)
		g.numbers[q.Out] = *(*uint32)(pointer(q.List))
	case "report":
		q := (*kernels.ReportParams)(p)
		g.report(q.Done, q.Number, q.N)
	case "report_best":
		q := (*kernels.ReportBestParams)(p)
		g.report(q.Done, q.Number, q.R)
	}
}

// report puts a launch's number behind each of its n picks, or where it would be behind the first.
func (g *GPU) report(done, block driver.Ptr, n uint32) {
	for i := range driver.Ptr(max(n, 1)) {
		*(*uint32)(pointer(done + 8*i)) = g.numbers[block]
	}
}

// waiting are calls that wait for the stream or are queued on it.
var waiting = []string{
	"cuLaunchKernelEx", "cuGraphLaunch", "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuEventRecord", "cuMemFree_v2", "cuMemFreeHost",
	"cuLibraryUnload", "cuDevicePrimaryCtxRelease_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemsetD8Async",
}

// settled says whether no kernel waits for the host any more, and takes the numbers of launches that have come.
func (g *GPU) settled() bool {
	for block, host := range g.awaited {
		word, number := (*[4]uint32)(pointer(host)), g.numbers[block]+1
		switch {
		case word[1] == number: // called off
			g.CalledOff++
		case word[2] == number && word[3] == ^number: // given up
		case word[0] == number:
			g.numbers[block] = number
		default:
			return false
		}
		delete(g.awaited, block)
	}
	return true
}

// pointer is host memory that a kernel sees.
func pointer(p driver.Ptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&p)) }

// Allocated is how much device memory is taken.
func (g *GPU) Allocated() uint64 { return g.used }

// Count is how often a kernel was launched.
func (g *GPU) Count(kernel string) (n int) {
	for _, k := range g.Launched {
		if k == kernel {
			n++
		}
	}
	return n
}
