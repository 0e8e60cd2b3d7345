package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/loader"
)

// load times copying files to the device beside the rate of copies from pinned memory alone. Each file is read once before, so that it lies in
// the page cache.
func (b *bench) load(paths []string) {
	var items []loader.Item
	var total int64
	for _, path := range paths {
		f, err := os.Open(path)
		must(err)
		defer func() { _ = f.Close() }()
		info, err := f.Stat()
		must(err)
		items = append(items, loader.Item{Name: path, Source: f, Bytes: info.Size()})
		total += info.Size()
	}
	dst := b.alloc(uint64(total))
	at := dst
	for i := range items {
		items[i].Dst = at
		at += driver.Ptr(items[i].Bytes)
	}
	must(loader.Load(context.Background(), b.c, b.s, items, loader.Options{}))

	const pinned = 1 << 30
	host, err := b.c.AllocHost(pinned, false)
	must(err)
	copied := func() float64 {
		must(b.c.Record(b.from, b.s))
		for range 8 {
			must(b.c.ToDevice(b.s, dst, host))
		}
		must(b.c.Record(b.to, b.s))
		must(b.c.Sync(b.to))
		us, err := b.c.Elapsed(b.from, b.to)
		must(err)
		return 8 * pinned / us / 1000 // GB/s
	}
	copied()
	rate := copied()
	must(b.c.FreeHost(host))
	for i, o := range []loader.Options{{}, {Slots: 32, SlotBytes: 8 << 20}, {Slots: 128, SlotBytes: 2 << 20}, {Readers: 32}} {
		start := time.Now()
		must(loader.Load(context.Background(), b.c, b.s, items, o))
		us := float64(time.Since(start).Microseconds())
		gbps := float64(total) / us / 1000
		fmt.Fprintf(os.Stderr, "load %.2f GB: %.2f GB/s, pinned copies %.2f GB/s, ratio %.3f %+v\n", float64(total)/1e9, gbps, rate, gbps/rate, o)
		if i == 0 {
			b.rows = append(b.rows, row{
				What: "load", Name: "page_cache", Variant: "bf16", Batch: 1, Us: us, Bytes: uint64(total), FloorMs: float64(total) / rate / 1e6,
				Ratio: gbps / rate, ReadGbps: rate, Commit: b.commit, Command: b.command,
			})
		}
	}
	b.reset()
}
