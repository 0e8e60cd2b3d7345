package loader

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"unsafe"

	"ninfer/internal/backend/cuda/driver"
)

// fake is a driver whose device memory is a Go slice; copies happen when their event is asked for, as late as allowed, so a slot that is
// filled again too early shows as wrong bytes.
type fake struct {
	names   []string
	device  []byte
	host    [][]byte
	pending []func()
	marks   map[uintptr]int // event -> pending copies before it
	asked   int
}

func (f *fake) Open(...string) (uintptr, error) { return 1, nil }
func (f *fake) Symbol(_ uintptr, name string) uintptr {
	f.names = append(f.names, name)
	return uintptr(len(f.names))
}

func ptr(a uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&a)) }

func (f *fake) finish(n int) {
	for _, c := range f.pending[:n] {
		c()
	}
	f.pending = f.pending[n:]
	for e := range f.marks {
		f.marks[e] = max(0, f.marks[e]-n)
	}
}

func (f *fake) Call(fn uintptr, a []uintptr) uintptr {
	switch f.names[fn-1] {
	case "cuDriverGetVersion":
		*(*int32)(ptr(a[0])) = 13000
	case "cuDeviceGetCount":
		*(*int32)(ptr(a[0])) = 1
	case "cuMemHostAlloc":
		b := make([]byte, a[1])
		f.host = append(f.host, b)
		*(*uintptr)(ptr(a[0])) = uintptr(unsafe.Pointer(&b[0]))
	case "cuEventCreate":
		f.asked++
		*(*uintptr)(ptr(a[0])) = uintptr(f.asked)
	case "cuMemcpyHtoDAsync_v2":
		dst, src := a[0]-4096, unsafe.Slice((*byte)(ptr(a[1])), a[2])
		f.pending = append(f.pending, func() { copy(f.device[dst:], src) })
	case "cuEventRecord":
		f.marks[a[0]] = len(f.pending)
	case "cuEventQuery":
		if f.marks[a[0]] > 0 {
			return uintptr(driver.ErrorNotReady)
		}
	case "cuEventSynchronize":
		f.finish(f.marks[a[0]])
	case "cuStreamSynchronize":
		f.finish(len(f.pending))
	}
	return 0
}

func TestLoad(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	file := make([]byte, 100_000)
	for i := range file {
		file[i] = byte(rng.Uint32())
	}
	for _, o := range []Options{{Slots: 1, SlotBytes: 1000, Readers: 1}, {Slots: 3, SlotBytes: 777, Readers: 8}, {Slots: 8, SlotBytes: 1 << 16, Readers: 2}} {
		f := &fake{device: make([]byte, len(file)), marks: map[uintptr]int{}}
		d, err := driver.OpenWith(f)
		if err != nil {
			t.Fatal(err)
		}
		owner, err := driver.StartOwner(d, 0)
		if err != nil {
			t.Fatal(err)
		}
		want := make([]byte, len(file))
		var items []Item
		at := 0
		for _, n := range []int{0, 1, 5000, 777, 30_000, 1554} {
			off := rng.IntN(len(file) - n)
			items = append(items, Item{Name: "x", Source: bytes.NewReader(file), Offset: int64(off), Bytes: int64(n), Dst: driver.Ptr(4096 + at)})
			copy(want[at:], file[off:off+n])
			at += n + 3
		}
		var last, total int64
		o.Progress = func(done, all int64) { last, total = done, all }
		err = owner.Do(func(c *driver.Context) error {
			r, err := NewRing(c, o)
			if err != nil {
				return err
			}
			for range 2 { // a ring is used again
				clear(f.device)
				if err := r.Load(context.Background(), c, 1, items); err != nil {
					return err
				}
			}
			return r.Close(c)
		})
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(f.device, want) {
			t.Errorf("%+v: wrong bytes on the device", o)
		}
		if last != total || total != 37_332 {
			t.Errorf("%+v: progress ended at %d of %d", o, last, total)
		}
		owner.Close()
	}
}

type broken struct{ at int64 }

func (b broken) ReadAt(p []byte, off int64) (int, error) {
	if off+int64(len(p)) > b.at {
		return 0, errors.New("disk on fire")
	}
	return len(p), nil
}

func TestLoadFails(t *testing.T) {
	f := &fake{device: make([]byte, 1<<20), marks: map[uintptr]int{}}
	d, err := driver.OpenWith(f)
	if err != nil {
		t.Fatal(err)
	}
	owner, err := driver.StartOwner(d, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer owner.Close()
	load := func(ctx context.Context, i Item) error {
		return owner.Do(func(c *driver.Context) error {
			return Load(ctx, c, 1, []Item{i}, Options{Slots: 4, SlotBytes: 1000, Readers: 3})
		})
	}
	bg := context.Background()
	if err := load(bg, Item{Name: "w", Source: broken{5000}, Bytes: 100_000, Dst: 4096}); err == nil || !strings.Contains(err.Error(), "load w: ") || !strings.Contains(err.Error(), "disk on fire") {
		t.Errorf("got %v", err)
	}
	if err := load(bg, Item{Name: "w", Source: bytes.NewReader(make([]byte, 100)), Bytes: 200, Dst: 4096}); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("short file: %v", err)
	}
	ctx, cancel := context.WithCancel(bg)
	cancel()
	if err := load(ctx, Item{Name: "w", Source: broken{1 << 40}, Bytes: 1 << 20, Dst: 4096}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}
