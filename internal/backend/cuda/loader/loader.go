// Package loader copies file ranges to device memory through a ring of pinned host memory.
//
// Pinned memory is dear to allocate (1.6 GB/s was measured) and copies from it run at the bus's rate, so there is one ring of a few slots,
// whatever the amount: readers fill slots in parallel with positioned reads, the goroutine that owns the GPU hands each full slot to the
// copy engine, and an event per slot says when it may be filled again. Nothing is mapped, locked or kept: the page cache stays in charge of
// the file. Load is called on the owner's goroutine and returns when everything is on the device or the first error is known; either way no
// reader runs any more and no copy uses the ring.
package loader

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"ninfer/internal/backend/cuda/driver"
)

// Item is a range of a file and where it goes.
type Item struct {
	Name   string // for errors and progress
	Source io.ReaderAt
	Offset int64
	Bytes  int64
	Dst    driver.Ptr
}

// Options sizes the ring; zero fields mean 32 slots of 8 MiB and 16 readers.
type Options struct {
	Slots     int
	SlotBytes int
	Readers   int
	// Progress is told how many bytes have been handed to the copy engine, on the owner's goroutine. May be nil.
	Progress func(done, total int64)
}

// piece is a part of an item that fits in a slot.
type piece struct {
	item *Item
	off  int64 // within the item
	n    int
	slot int
	err  error
}

// Load copies all items on stream s of c. It fails with the first reader's or driver's error, naming the item.
func Load(ctx context.Context, c *driver.Context, s driver.Stream, items []Item, o Options) (err error) {
	if o.Slots <= 0 {
		o.Slots = 32
	}
	if o.SlotBytes <= 0 {
		o.SlotBytes = 8 << 20
	}
	if o.Readers <= 0 {
		o.Readers = 16
	}
	ring, err := c.AllocHost(o.Slots*o.SlotBytes, false)
	if err != nil {
		return fmt.Errorf("load: pinned ring of %d bytes: %w", o.Slots*o.SlotBytes, err)
	}
	events := make([]driver.Event, o.Slots)
	for i := range events {
		if events[i], err = c.NewEvent(false); err != nil {
			return err
		}
	}
	defer func() {
		err = errors.Join(err, c.SyncStream(s)) // copies still read the ring
		for _, e := range events {
			err = errors.Join(err, c.DestroyEvent(e))
		}
		err = errors.Join(err, c.FreeHost(ring))
	}()

	var total, done int64
	for i := range items {
		total += items[i].Bytes
	}
	ctx, cancel := context.WithCancel(ctx)
	work, full := make(chan piece), make(chan piece, o.Slots)
	var readers sync.WaitGroup
	for range o.Readers {
		readers.Go(func() {
			for p := range work {
				buf := ring[p.slot*o.SlotBytes:][:p.n]
				if n, err := p.item.Source.ReadAt(buf, p.item.Offset+p.off); n < p.n {
					if err == nil || err == io.EOF {
						err = io.ErrUnexpectedEOF
					}
					p.err = fmt.Errorf("load %s: byte %d: %w", p.item.Name, p.item.Offset+p.off+int64(n), err)
				}
				full <- p // never blocks: a slot is in use once
			}
		})
	}
	defer func() {
		cancel()
		close(work)
		readers.Wait()
	}()

	// free holds slots nobody uses; copying those whose event has not been seen yet, oldest first.
	free := make([]int, o.Slots)
	for i := range free {
		free[i] = i
	}
	var copying []int
	next, at, reading := 0, int64(0), 0
	for {
		for next < len(items) && at >= items[next].Bytes {
			next, at = next+1, 0
		}
		if next == len(items) && reading == 0 {
			return nil
		}
		// a finished copy gives its slot back; wait for one only when there is nothing else to do
		for len(copying) > 0 {
			ok, err := c.Done(events[copying[0]])
			if err != nil {
				return err
			}
			if !ok && (len(free) > 0 || reading > 0 || next == len(items)) {
				break
			}
			if !ok {
				if err := c.Sync(events[copying[0]]); err != nil {
					return err
				}
			}
			free, copying = append(free, copying[0]), copying[1:]
		}
		var give chan piece
		var p piece
		if next < len(items) && len(free) > 0 {
			p = piece{item: &items[next], off: at, n: int(min(int64(o.SlotBytes), items[next].Bytes-at)), slot: free[len(free)-1]}
			give = work
		}
		select {
		case give <- p:
			free = free[:len(free)-1]
			at += int64(p.n)
			reading++
		case p := <-full:
			reading--
			if p.err != nil {
				return p.err
			}
			if err := c.ToDevice(s, p.item.Dst+driver.Ptr(p.off), ring[p.slot*o.SlotBytes:][:p.n]); err != nil {
				return fmt.Errorf("load %s: %w", p.item.Name, err)
			}
			if err := c.Record(events[p.slot], s); err != nil {
				return err
			}
			copying = append(copying, p.slot)
			done += int64(p.n)
			if o.Progress != nil {
				o.Progress(done, total)
			}
		case <-ctx.Done():
			return fmt.Errorf("load: %w", ctx.Err())
		}
	}
}
