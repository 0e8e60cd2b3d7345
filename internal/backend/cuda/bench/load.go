package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"ninfer/internal/backend/cuda/loader"
)

// load writes a file of gib GiB, so that it lies in the page cache, and times copying it to the device beside the rate of copies from
// pinned memory alone.
func (b *bench) load(dir string, gib int) {
	total := int64(gib) << 30
	f, err := os.CreateTemp(dir, "ninfer-load-*")
	must(err)
	defer func() { _ = f.Close(); _ = os.Remove(f.Name()) }()
	block := make([]byte, 64<<20)
	rng := rand.New(rand.NewPCG(1, 1))
	for i := 0; i < len(block); i += 8 {
		v := rng.Uint64()
		for j := range 8 {
			block[i+j] = byte(v >> (8 * j))
		}
	}
	var wg sync.WaitGroup
	const writers = 8
	for w := range writers {
		wg.Go(func() {
			for off := int64(w) * int64(len(block)); off < total; off += writers * int64(len(block)) {
				if _, err := f.WriteAt(block, off); err != nil {
					panic(err)
				}
			}
		})
	}
	wg.Wait()
	dst := b.alloc(uint64(total))

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
	for _, o := range []loader.Options{{}, {Slots: 64, SlotBytes: 4 << 20, Readers: 16}} {
		start := time.Now()
		must(loader.Load(context.Background(), b.c, b.s, []loader.Item{{Name: f.Name(), Source: f, Bytes: total, Dst: dst}}, o))
		us := float64(time.Since(start).Microseconds())
		gbps := float64(total) / us / 1000
		fmt.Fprintf(os.Stderr, "load %d GiB: %.2f GB/s, pinned copies %.2f GB/s, ratio %.3f %+v\n", gib, gbps, rate, gbps/rate, o)
		if o.Slots == 0 {
			b.rows = append(b.rows, row{
				What: "load", Name: "page_cache", Variant: "bf16", Batch: 1, Us: us, Bytes: uint64(total), FloorMs: float64(total) / rate / 1e6,
				Ratio: gbps / rate, ReadGbps: rate, Commit: b.commit, Command: b.command,
			})
		}
	}
	b.reset()
}
