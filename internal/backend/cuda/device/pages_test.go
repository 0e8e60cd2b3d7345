package device_test

import (
	"math/rand/v2"
	"strings"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

// scattered opens a device whose pool gives pages in random order, as one that has served for a while.
func scattered(t testing.TB, o device.Options) *device.Device {
	t.Helper()
	d := open(t, o)
	_, all := d.Pages()
	d.Scatter(rand.New(rand.NewPCG(uint64(all), 6)).Perm(all))
	return d
}

func TestPages(t *testing.T) {
	open(t, device.Options{}).Close()
	m, _ := folder.Model(t)
	plain := func(t testing.TB, o modeltest.PoolOptions) backend.Device {
		kv := o.KV
		if kv == backend.CacheFull { // what a GPU has instead
			kv = backend.CacheBF16
		}
		return open(t, device.Options{
			States: o.States, Lanes: o.Lanes, Saved: o.Saved, Tokens: o.Tokens, Verify: o.Verify, Carry: o.Carry, Pages: o.Pages, KV: kv, Plain: true,
		})
	}
	t.Run("shared", func(t *testing.T) { modeltest.PagesShared(t, m, plain) })
	t.Run("counted", func(t *testing.T) { modeltest.PagesCount(t, folder, plain) })
	t.Run("parted", func(t *testing.T) { modeltest.PagesPart(t, m, plain) })
}

// A device without a pool compiles, refuses to launch, and gives the bits of one with a pool once it has one.
func TestStock(t *testing.T) {
	open(t, device.Options{}).Close()
	m, _ := folder.Model(t)
	var rows [2][]float32
	for i, pages := range []int{0, device.Unstocked} {
		d := open(t, device.Options{States: m.States, Lanes: 1, Tokens: 200, Verify: 6, Carry: 200, Pages: pages})
		r := model.NewRunner(m, d, 200)
		in := backend.LaneRows{Want: backend.WantLogits}
		for k := range 150 {
			in.Tokens = append(in.Tokens, int32(20+k*k%400))
		}
		if pages == device.Unstocked {
			if _, err := r.Prompt(in); err == nil || !strings.Contains(err.Error(), "3 pages are needed and 0 of 0 are free") {
				t.Errorf("a launch without a pool: %v", err)
			}
			before := d.Bytes()
			room, err := d.Room()
			if err != nil {
				t.Fatal(err)
			}
			if err := d.Stock(int(room/d.PageBytes()) + 1); err == nil || !strings.Contains(err.Error(), "out of GPU memory") {
				t.Errorf("a pool larger than the GPU: %v", err)
			}
			if err := d.Stock(4); err != nil {
				t.Fatal(err)
			}
			if got := d.Bytes() - before; got < 4*d.PageBytes() || got > 4*d.PageBytes()+256*2*uint64(len(m.States)) {
				t.Errorf("4 pages of %d bytes take %d", d.PageBytes(), got)
			}
			if err := d.Stock(4); err == nil {
				t.Error("a second pool")
			}
			if l := d.Ledger(); l.Sequences < 4*d.PageBytes() || d.SequenceBytes(65)-d.SequenceBytes(64) != d.PageBytes() {
				t.Errorf("%+v, a page of %d", l, d.PageBytes())
			}
		}
		res, err := r.Prompt(in)
		if err != nil {
			t.Fatal(err)
		}
		rows[i] = append([]float32(nil), res.Logits[0]...)
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	for i, v := range rows[0] {
		if v != rows[1][i] {
			t.Fatal("a pool taken later gives other bits")
		}
	}
}
