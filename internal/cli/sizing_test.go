package cli

import (
	"errors"
	"strings"
	"testing"
	"time"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
)

// The pool of the CPU: what --kv-capacity says, and auto by the arithmetic of docs/serving.md, Memory, with numbers that can be checked by hand.
func TestShare(t *testing.T) {
	// A token of 16 values in FP32: a page of 4,096 bytes. A lane has 1,000 bytes of state, 80 of carried rows and 3 records of 40 bytes.
	states := []backend.State{
		{Kind: backend.PerToken, Store: backend.StoreStream, Width: 16},
		{Kind: backend.Fixed, Store: backend.StoreWindow, Width: 10, Rows: 25},
		{Kind: backend.Carried, Width: 2},
	}
	const page, lane = 4096, 1000 + 80 + 120
	for _, c := range []struct {
		name         string
		flags        modelFlags
		lanes        int
		available    int64
		pages, after int    // after clamping the lanes
		fails        string // part of the message
	}{
		{"default", modelFlags{MaxContext: 1000}, 3, 1 << 20, 16, 3, ""},
		{"number, to a whole page", modelFlags{MaxContext: 1000, KVCapacity: "1025"}, 3, 1 << 20, 17, 3, ""},
		{"number that does not fit", modelFlags{MaxContext: 1000, KVCapacity: "2000"}, 2, 32*page + 2*lane - 1, 0, 0, "memory: 1 bytes short"},
		{"number that just fits", modelFlags{MaxContext: 1000, KVCapacity: "2000"}, 2, 32*page + 2*lane, 32, 2, ""},
		{"number beside a reserve", modelFlags{MaxContext: 1000, KVCapacity: "2000", reserve: 500}, 2, 32*page + 2*lane + 499, 0, 0, "memory: 1 bytes short"},
		{"weights do not count for a number", modelFlags{MaxContext: 1000, KVCapacity: "2000", weights: 1 << 30, slack: 1 << 30}, 2, 32*page + 2*lane, 32, 2, ""},
		{"auto, all that lanes can use", modelFlags{MaxContext: 1000, KVCapacity: "auto"}, 3, 1 << 30, 48, 3, ""},
		{"auto, what is left", modelFlags{MaxContext: 1000, KVCapacity: "auto", reserve: 100, slack: 200, weights: 300}, 3, 20*page + 3*lane + 600, 20, 3, ""},
		{"auto, not quite", modelFlags{MaxContext: 1000, KVCapacity: "auto", reserve: 100, slack: 200, weights: 300}, 3, 20*page + 3*lane + 599, 19, 3, ""},
		{"auto, the least", modelFlags{MaxContext: 1000, KVCapacity: "auto", slack: 200}, 3, 16*page + 3*lane + 200, 16, 3, ""},
		{"auto, less than the least", modelFlags{MaxContext: 1000, KVCapacity: "auto", slack: 200}, 3, 16*page + 3*lane + 150, 0, 0, "memory: 50 bytes short"},
		{"auto, a page a lane", modelFlags{MaxContext: 64, KVCapacity: "auto"}, 8, 8*page + 8*lane - 1, 0, 0, "memory: 1 bytes short"},
		{"auto, unknown memory", modelFlags{MaxContext: 1000, KVCapacity: "auto"}, 2, -1, 32, 2, ""},
		{"clamped", modelFlags{MaxContext: 1000, KVCapacity: "2100", clamp: true}, 8, 1 << 20, 33, 2, ""},
		{"clamped to one", modelFlags{MaxContext: 1000, clamp: true}, 8, 1 << 20, 16, 1, ""},
	} {
		p, err := c.flags.share(cpu.Options{States: states, Lanes: c.lanes, Verify: 3, Carry: 10}, max(c.available, 0), c.available >= 0)
		switch {
		case c.fails != "":
			if err == nil || !strings.Contains(err.Error(), c.fails) {
				t.Errorf("%s: %+v, %v", c.name, p, err)
			}
		case err != nil || p.pages != c.pages || p.lanes != c.after:
			t.Errorf("%s: %d pages, %d lanes, %v, want %d and %d", c.name, p.pages, p.lanes, err, c.pages, c.after)
		}
	}
}

// The pool of a GPU: weights are there already, or must fit whatever the pool is, and the hint does not send anyone to the CPU's ways out.
func TestDivideGPU(t *testing.T) {
	const page = 1 << 20
	for _, c := range []struct {
		name      string
		flags     modelFlags
		available int64
		pages     int
		fails     string
	}{
		{"number beside weights", modelFlags{MaxContext: 640, KVCapacity: "1280"}, 20*page + 700, 20, ""},
		{"number and weights too large", modelFlags{MaxContext: 640, KVCapacity: "1280"}, 20*page + 699, 0, "1 bytes short"},
		{"default", modelFlags{MaxContext: 640}, 10*page + 700, 10, ""},
		{"auto", modelFlags{MaxContext: 640, KVCapacity: "auto", slack: 100, reserve: 50}, 15*page + 850, 15, ""},
		{"auto, too little", modelFlags{MaxContext: 640, KVCapacity: "auto", slack: 100, reserve: 50}, 10*page + 849, 0, "1 bytes short"},
	} {
		p := pool{lanes: 2, page: page, fixed: 200, weights: 500, available: c.available, known: true, gpu: true}
		err := c.flags.divide(&p)
		var hinted hintedError
		switch {
		case c.fails != "":
			if err == nil || !strings.Contains(err.Error(), c.fails) || !errors.As(err, &hinted) || strings.Contains(hinted.hint, "weights to stay in memory") {
				t.Errorf("%s: %+v, %v, hint %q", c.name, p, err, hinted.hint)
			}
		case err != nil || p.pages != c.pages || p.reserve != c.flags.reserve:
			t.Errorf("%s: %+v, %v, want %d pages", c.name, p, err, c.pages)
		}
	}
}

// Loading is told every other second, with what is left where the end is known.
func TestLoading(t *testing.T) {
	at := time.Unix(100, 0)
	for _, c := range []struct {
		weights int64
		want    string
	}{
		{8 << 30, "ninfer: weights: 2.0 GiB of 8.0 GiB, 25 %, 1.0 GiB/s, 6 s left\nninfer: weights: 6.0 GiB of 8.0 GiB, 75 %, 1.5 GiB/s, 1 s left\n"},
		{0, "ninfer: weights: 2.0 GiB, 1.0 GiB/s\nninfer: weights: 6.0 GiB, 1.5 GiB/s\n"},
	} {
		var out strings.Builder
		f := modelFlags{weights: c.weights, LogLevel: "info"}
		now := at
		told := f.loading(&environment{err: &out}, func() time.Time { return now })
		for _, step := range []struct {
			seconds time.Duration
			bytes   uint64
		}{{1, 1 << 30}, {2, 2 << 30}, {3, 5 << 30}, {4, 6 << 30}} {
			now = at.Add(step.seconds * time.Second)
			told(step.bytes)
		}
		if out.String() != c.want {
			t.Errorf("%q, want %q", out.String(), c.want)
		}
	}
}

func TestInUnits(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 3 << 20: "3.0 MiB", 5<<30 + 1<<29: "5.5 GiB", 2 << 40: "2.0 TiB",
	} {
		if got := inUnits(n); got != want {
			t.Errorf("%d is %q, want %q", n, got, want)
		}
	}
}
