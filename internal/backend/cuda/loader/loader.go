// Package loader copies file ranges to device memory through a ring of pinned host memory.
//
// Pinned memory is dear to allocate (1.6 GB/s was measured) and copies from it run at the bus's rate, so there is one ring of a few slots,
// whatever the amount: readers fill slots in parallel with positioned reads, the goroutine that owns the GPU hands each full slot to the
// copy engine, and an event per slot says when it may be filled again. Nothing is mapped, locked or kept: the page cache stays in charge of
// the file. A load is done on the owner's goroutine and returns when everything is on the device or the first error is known; either way no
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

// Options sizes the ring; zero fields mean 64 slots of 4 MiB and 16 readers.
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

// Ring is pinned memory that loads go through, one load at a time. It lives on the owner's goroutine.
type Ring struct {
	o      Options
	memory []byte
	events []driver.Event
}

// NewRing takes the pinned memory. Progress of o is told by every load.
func NewRing(c *driver.Context, o Options) (*Ring, error) {
	if o.Slots <= 0 {
		o.Slots = 64
	}
	if o.SlotBytes <= 0 {
		o.SlotBytes = 4 << 20
	}
	if o.Readers <= 0 {
		o.Readers = 16
	}
	memory, err := c.AllocHost(o.Slots*o.SlotBytes, false)
	if err != nil {
		return nil, fmt.Errorf("load: pinned ring of %d bytes: %w", o.Slots*o.SlotBytes, err)
	}
	r := &Ring{o: o, memory: memory}
	for range o.Slots {
		e, err := c.NewEvent(false)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("load: %w", err), r.Close(c))
		}
		r.events = append(r.events, e)
	}
	return r, nil
}

// Close gives the memory back.
func (r *Ring) Close(c *driver.Context) (err error) {
	for _, e := range r.events {
		err = errors.Join(err, c.DestroyEvent(e))
	}
	return errors.Join(err, c.FreeHost(r.memory))
}

// Load copies all items through a ring of their own.
func Load(ctx context.Context, c *driver.Context, s driver.Stream, items []Item, o Options) error {
	r, err := NewRing(c, o)
	if err != nil {
		return err
	}
	return errors.Join(r.Load(ctx, c, s, items), r.Close(c))
}

// Load copies all items on stream s of c. It fails with the first reader's or driver's error, naming the item.
func (r *Ring) Load(ctx context.Context, c *driver.Context, s driver.Stream, items []Item) (err error) {
	o, ring, events := r.o, r.memory, r.events
	defer func() { err = errors.Join(err, c.SyncStream(s)) }() // copies still read the ring
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
