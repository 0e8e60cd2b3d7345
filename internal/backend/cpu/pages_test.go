package cpu_test

import (
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/model/modeltest"
)

func TestPages(t *testing.T) {
	f := modeltest.Folder{Dir: micro.dir, IDs: micro.ids}
	m, _ := f.Model(t)
	open := func(_ testing.TB, o modeltest.PoolOptions) backend.Device {
		return cpu.NewFast(cpu.Options{
			States: o.States, Lanes: o.Lanes, Saved: o.Saved, Tokens: o.Tokens, Verify: o.Verify, Carry: o.Carry, Pages: o.Pages, KV: o.KV, Threads: 1,
		})
	}
	t.Run("shared", func(t *testing.T) { modeltest.PagesShared(t, m, open) })
	t.Run("counted", func(t *testing.T) { modeltest.PagesCount(t, f, open) })
	t.Run("parted", func(t *testing.T) { modeltest.PagesPart(t, m, open) })
}
