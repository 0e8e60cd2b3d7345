package device_test

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/model"
)

// Decoding steps whose beginning waited on the GPU pick what steps do that are launched kernel by kernel, and leave the same bits, whatever comes between
// them: other lanes, other passes, pauses, resets and looks at states, each of which calls a beginning off.
func TestArmed(t *testing.T) {
	if runtime.GOMAXPROCS(0) <= 2 {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	}
	m := subject(t)
	const lanes, room = 4, 1024
	rounds, least, most := 400, 1, 40 // steps at a time
	if testing.Short() {              // for tools that slow a GPU down
		rounds, least, most = 5, 6, 6
	}
	var devices [2]*device.Device
	var runners [2]*model.Runner
	for i := range devices {
		devices[i] = open(t, device.Options{States: m.States, Lanes: lanes, Tokens: room, Verify: 3, Carry: room, Few: allFew, NoGraph: i == 1})
		defer devices[i].Close()
		runners[i] = model.NewRunner(m, devices[i], 32)
	}
	r := rand.New(rand.NewPCG(1, 2))
	var at [lanes]int
	var token [lanes]int32
	both := func(f func(i int) error) {
		t.Helper()
		for i := range devices {
			if err := f(i); err != nil {
				t.Fatal(err)
			}
		}
	}
	pass := func(kind backend.Kind, list []int, rows int) {
		t.Helper()
		var picks [2][]int32
		both(func(i int) error {
			ctl := &backend.Control{}
			for _, l := range list {
				tokens := make([]int32, rows)
				for j := range tokens {
					tokens[j] = (token[l] + int32(7*j)) % 400
				}
				ctl.Lanes = append(ctl.Lanes, backend.LaneRows{Lane: l, Tokens: tokens, Positions: model.Positions(at[l], rows), Want: backend.WantLast})
			}
			res, err := runners[i].Launch(kind, ctl)
			for _, one := range res.Lanes {
				picks[i] = append(picks[i], one.Picks...)
			}
			return err
		})
		if !slices.Equal(picks[0], picks[1]) {
			t.Fatalf("%v of lanes %v at %v: picks %v, want %v", kind, list, at, picks[0], picks[1])
		}
		for n, l := range list {
			at[l] += rows
			token[l] = picks[0][n]
			if kind == backend.Verify {
				both(func(i int) error { return devices[i].Commit(l, rows) })
			}
		}
	}
	armed := 0
	for n := range rounds {
		for l := range at {
			if at[l] > room-100 {
				at[l] = 0
				both(func(i int) error { return devices[i].Reset(backend.Lane(l)) })
			}
		}
		list := [][]int{{0}, {1}, {0, 1}, {3, 2}, {0, 1, 2, 3}}[r.IntN(5)]
		for range least + r.IntN(most-least+1) {
			pass(backend.Decode, list, 1)
		}
		if devices[0].Armed() {
			armed++
		}
		switch l := r.IntN(lanes); r.IntN(8) {
		case 0:
			pass(backend.Verify, []int{l}, 3)
		case 1:
			pass(backend.Prefill, []int{l}, 2)
		case 2:
			at[l] = 0
			both(func(i int) error { return devices[i].Reset(backend.Lane(l)) })
		case 3:
			if n%8 == 0 {
				time.Sleep(15 * time.Millisecond)
			}
		case 4:
			for id, s := range m.States {
				if s.Kind != backend.Fixed || s.Store == backend.StoreInt {
					continue
				}
				var values [2][]float32
				both(func(i int) (err error) {
					v, err := devices[i].Values(backend.Lane(l), backend.StateID(id))
					values[i] = slices.Clone(v)
					return err
				})
				if !slices.Equal(values[0], values[1]) {
					t.Fatalf("round %d, lane %d: other bits of state %s", n, l, s.Name)
				}
			}
		}
	}
	say := t.Errorf
	if armed >= rounds/10 || testing.Short() { // tools that slow a GPU down may wait for each launch
		say = t.Logf
	}
	say("armed behind %d of %d runs of steps", armed, rounds)
}

// A GPU that waits in vain, as it does for a process that is stopped, gives up after a while, and the next step is none the worse.
func TestArmedGivesUp(t *testing.T) {
	if runtime.GOMAXPROCS(0) <= 2 {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	}
	m := subject(t)
	var picks [2][]int32
	for i := range picks {
		d := open(t, device.Options{States: m.States, Lanes: 1, Tokens: 256, Verify: 3, Carry: 256, Few: allFew, NoGraph: i == 1})
		defer d.Close()
		d.Sleepless()
		r := model.NewRunner(m, d, 32)
		token := int32(7)
		for n := range 120 {
			if n%40 == 30 && i == 0 {
				if !d.Armed() {
					t.Errorf("step %d: nothing waits", n)
				}
				time.Sleep(400 * time.Millisecond)
			}
			res, err := r.Launch(backend.Decode, &backend.Control{Lanes: []backend.LaneRows{{Lane: 0, Tokens: []int32{token}, Positions: model.Positions(n, 1), Want: backend.WantLast}}})
			if err != nil {
				t.Fatal(err)
			}
			token = res.Lanes[0].Picks[0]
			picks[i] = append(picks[i], token)
		}
	}
	if !slices.Equal(picks[0], picks[1]) {
		t.Errorf("picks %v, want %v", picks[0], picks[1])
	}
}
