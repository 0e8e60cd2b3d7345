package cpu

import (
	"testing"
	"testing/fstest"

	"ninfer/internal/backend"
)

// Sizes are those of the memory that a device has: a head of 256 values takes 1,024 bytes a token in BF16, key
// and value together, and 516 in FP8.
func TestSizes(t *testing.T) {
	const tokens, heads = backend.PageTokens, 2
	kv := []backend.State{
		{Kind: backend.PerToken, Store: backend.StoreKV, Width: heads * 256, Group: 256},
		{Kind: backend.PerToken, Store: backend.StoreKV, Width: heads * 256, Group: 256},
	}
	for form, want := range map[backend.Cache]int64{backend.CacheFull: 2048, backend.CacheBF16: 1024, backend.CacheFP8: 516} {
		if got := (Options{States: kv, KV: form}).Sizes().Page; got != want*heads*tokens {
			t.Errorf("%v: a page of %d bytes, want %d a token and head", form, got, want)
		}
	}
	all := append(
		[]backend.State{
			{Kind: backend.PerToken, Store: backend.StoreIndex, Width: 128},
			{Kind: backend.PerBlock, Store: backend.StoreIndex, Width: 128, Ratio: 4},
			{Kind: backend.PerBlock, Store: backend.StoreIndex, Width: 12, Ratio: 5},
			{Kind: backend.PerToken, Store: backend.StoreInt, Width: 3},
			{Kind: backend.Fixed, Store: backend.StoreMatrix, Width: 16, Rows: 48},
			{Kind: backend.Fixed, Store: backend.StoreWindow, Width: 40, Rows: 3},
			{Kind: backend.Carried, Store: backend.StoreStream, Width: 20},
		}, kv...)
	for _, opt := range []Options{{}, {KV: backend.CacheBF16}, {KV: backend.CacheFP8, BF16State: true}, {KV: backend.CacheBF16, Commit: true}} {
		opt.States, opt.Lanes, opt.Saved, opt.Tokens, opt.Verify, opt.Carry, opt.Pages, opt.Threads = all, 2, 1, 200, 4, 7, 5, 1
		m := NewFast(opt).(*machine[float32])
		var pages, images, records int
		for _, p := range m.planes {
			if p != nil {
				pages += 4*len(p.full) + 2*len(p.half) + len(p.codes) + 2*len(p.scales)
			}
		}
		for _, img := range append(m.lanes, m.saved...) {
			for i := range img.states {
				images += 4*len(img.states[i]) + 2*len(img.halves[i])
				records += 4 * len(img.records[i])
			}
		}
		s := opt.Sizes()
		if int64(pages) != 5*s.Page || int64(images) != 3*s.Image || int64(records) != 2*s.Lane {
			t.Errorf("%v: %+v, but 5 pages take %d bytes, 3 images %d, records of 2 lanes %d", opt.KV, s, pages, images, records)
		}
		m.Close()
	}
}

func TestAvailable(t *testing.T) {
	file := func(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s)} }
	meminfo := file("MemTotal:       16000000 kB\nMemFree:  100 kB\nMemAvailable:    8000000 kB\n")
	group := fstest.MapFS{
		"proc/meminfo": meminfo, "proc/self/cgroup": file("0::/a/b\n"),
		"sys/fs/cgroup/a/b/memory.max": file("max\n"), "sys/fs/cgroup/a/b/memory.current": file("5\n"),
		"sys/fs/cgroup/a/memory.max": file("3000000\n"), "sys/fs/cgroup/a/memory.current": file("2000000\n"),
		"sys/fs/cgroup/a/memory.stat": file("anon 7\nactive_file 300\ninactive_file 4000\n"),
	}
	for name, c := range map[string]struct {
		root fstest.MapFS
		want int64
		ok   bool
	}{
		"kernel's estimate": {fstest.MapFS{"proc/meminfo": meminfo}, 8000000 << 10, true},
		"limit of a group":  {group, 1000000 + 4300, true},
		"container": {fstest.MapFS{
			"proc/meminfo": meminfo, "sys/fs/cgroup/memory.max": file("100\n"), "sys/fs/cgroup/memory.current": file("300\n"),
		}, 0, true},
		"none": {fstest.MapFS{"proc/meminfo": file("MemTotal: 5 kB\n")}, 0, false},
		"no":   {fstest.MapFS{}, 0, false},
	} {
		if got, ok := availableIn(c.root); got != c.want || ok != c.ok {
			t.Errorf("%s: %d, %v, want %d, %v", name, got, ok, c.want, c.ok)
		}
	}
}
