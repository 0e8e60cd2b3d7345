package engine_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/engine"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

// job is a request of the metamorphic test with what it gives alone and undrafted.
type job struct {
	req  engine.Request
	want []int32
}

// jobs are prompts with their plain continuations.
func jobs(t testing.TB, m *model.Model, rng *rand.Rand, n int, open func(cpu.Options) backend.Device) []job {
	lane := newOn(t, m, 1, 160, open)
	out := make([]job, n)
	for i := range out {
		prompt := make([]int32, 1+rng.IntN(24))
		if i%8 == 0 { // more than a page
			prompt = make([]int32, 55+rng.IntN(30))
		}
		for j := range prompt {
			prompt[j] = int32(rng.IntN(480))
		}
		out[i].req = engine.Request{Prompt: prompt, MaxNew: 1 + rng.IntN(14)}
		out[i].want = generate(t, lane, out[i].req).IDs
	}
	return out
}

// storm runs the jobs through a batch of random shape with random arrivals, cancellations, insertions and drafts, and compares each with
// what it gives alone. It returns how often each number of drafts was accepted.
func storm(t *testing.T, m *model.Model, all []job, seed uint64, open func(cpu.Options) backend.Device) map[int]int {
	rng := rand.New(rand.NewPCG(seed, 21))
	lanes := 1 + rng.IntN(8)
	chunk := 1 + rng.IntN(40)
	pages := 2 + rng.IntN(2*lanes)
	dev := open(cpu.Options{States: m.States, Lanes: lanes, Tokens: 128, Verify: 6, Carry: 64, Pages: pages, Threads: 1})
	defer dev.Close()
	r := model.NewRunner(m, dev, chunk)
	if seed%2 == 1 { // as programs run it: lanes without drafts let rows wait for the drafter
		r.Lanes, r.Round = lanes, 6
		if seed%4 == 1 {
			r.Carry = 64
		}
	}
	b, err := engine.NewBatch(r, engine.BatchOptions{
		Limits:  engine.Limits{Lanes: lanes, Pages: pages, Pending: len(all), GapRows: 1 + rng.IntN(chunk), Passes: rng.IntN(3)},
		Context: 128, Adaptive: rng.IntN(2) == 0,
	})
	if err != nil {
		t.Fatal(err)
	}
	counts := map[int]int{}
	ended, added := 0, 0
	cancels := map[engine.RequestID]context.CancelFunc{}
	for steps := 0; ended < len(all); steps++ {
		if steps > 100000 {
			t.Fatalf("seed %d: %d of %d ended", seed, ended, len(all))
		}
		for added < len(all) && rng.IntN(3) == 0 {
			j := all[added]
			req := j.req
			if rng.IntN(3) > 0 {
				req.Draft = 1 + rng.IntN(5)
				if _, chains := dev.(*chaining); !chains && rng.IntN(4) > 0 {
					right := rng.IntN(8)
					req.Drafter = truth(j.want, func(round, i int) bool { return (i+round)%7 >= right })
				}
			}
			ctx, cancel := context.WithCancel(context.Background())
			id := engine.RequestID(added + 1)
			cancels[id] = cancel
			err := b.Add(ctx, id, req, nil, func(out engine.Outcome, err error) {
				ended++
				cancel()
				delete(cancels, id)
				if err != nil {
					t.Errorf("seed %d: request %d: %v", seed, id, err)
				}
				if out.Reason == engine.Cancelled {
					if len(out.IDs) > len(j.want) || !slices.Equal(out.IDs, j.want[:len(out.IDs)]) {
						t.Errorf("seed %d: request %d, cancelled: %v, alone %v", seed, id, out.IDs, j.want)
					}
					return
				}
				if !slices.Equal(out.IDs, j.want) {
					t.Errorf("seed %d: request %d: %v, alone %v", seed, id, out.IDs, j.want)
				}
				for i, n := range out.Stats.AcceptedAt {
					counts[i+1] += n
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			added++
		}
		if len(cancels) > 0 && rng.IntN(40) == 0 {
			for _, cancel := range cancels {
				cancel()
				break
			}
		}
		if _, err := b.Step(); err != nil {
			t.Fatal(err)
		}
	}
	if busy, err := b.Step(); busy || err != nil {
		t.Errorf("seed %d: work at the end: %v, %v", seed, busy, err)
	}
	if c, chains := dev.(*chaining); chains {
		counts[0] += c.uneven
	} else if n, _ := dev.(backend.Paged).Pages(); n != 0 {
		t.Errorf("seed %d: %d pages are held at the end", seed, n)
	}
	if active, waiting := b.Load(); active+waiting != 0 {
		t.Errorf("seed %d: %d active and %d waiting at the end", seed, active, waiting)
	}
	return counts
}

// Company changes nothing: whatever runs beside a request, however its prompt is cut and whatever is drafted for it, it gives the ids that
// it gives alone. NINFER_COMPANY is the number of requests, for long runs by hand.
func TestCompany(t *testing.T) {
	n := 2000
	if testing.Short() {
		n = 200
	}
	if v, err := strconv.Atoi(os.Getenv("NINFER_COMPANY")); err == nil {
		n = v
	}
	m := modeltest.Micro(t)
	const batch, storms = 50, 10 // of each set of requests
	var mu sync.Mutex            // above what it guards
	accepted := map[int]int{}
	t.Run("sets", func(t *testing.T) { // as many at a time as there are processors
		for set := range (n + batch*storms - 1) / (batch * storms) {
			t.Run(strconv.Itoa(set), func(t *testing.T) {
				t.Parallel()
				all := jobs(t, m, rand.New(rand.NewPCG(uint64(set), 8)), batch, cpu.NewFast)
				for i := range min(storms, (n-set*batch*storms+batch-1)/batch) {
					counts := storm(t, m, all, uint64(set*storms+i), cpu.NewFast)
					mu.Lock()
					for k, c := range counts {
						accepted[k] += c
					}
					mu.Unlock()
				}
			})
		}
	})
	for k := 1; k <= 5; k++ {
		if accepted[k] == 0 {
			t.Errorf("no draft was accepted at position %d", k)
		}
	}
}

// chaining is a device that chains passes, which it does one by one.
type chaining struct {
	backend.Device
	last   backend.Seq // of a chain
	lanes  []int
	picks  [][]int32
	uneven int // passes behind a chain in which lanes verify different numbers of its drafts
}

func (c *chaining) Chain(s backend.Step, ctl *backend.Control, more int) (q backend.Seq, err error) {
	c.lanes, c.picks = c.lanes[:0], make([][]int32, len(ctl.Lanes))
	for ; more >= 0; more-- {
		if q, err = c.Launch(s, ctl); err != nil {
			return 0, err
		}
		res, err := c.Device.Wait(q)
		if err != nil {
			return 0, err
		}
		next := &backend.Control{}
		for i, l := range ctl.Lanes {
			c.picks[i] = append(c.picks[i], res.Lanes[i].Picks...)
			next.Lanes = append(next.Lanes, backend.LaneRows{Lane: l.Lane, Tokens: res.Lanes[i].Picks, Want: backend.WantLast, Chain: true})
		}
		ctl = next
	}
	for _, l := range ctl.Lanes {
		c.lanes = append(c.lanes, l.Lane)
	}
	c.last = q
	return q, nil
}

func (c *chaining) Wait(q backend.Seq) (res backend.Result, err error) {
	if q != c.last {
		return c.Device.Wait(q)
	}
	for _, p := range c.picks {
		res.Lanes = append(res.Lanes, backend.LaneResult{Picks: p})
	}
	return res, nil
}

func (c *chaining) Behind(s backend.Step, ctl *backend.Control) ([][]int32, backend.Seq, error) {
	with := &backend.Control{Lanes: slices.Clone(ctl.Lanes)}
	uneven := 0
	for i, p := range c.picks {
		l := &with.Lanes[i]
		if l.Lane != c.lanes[i] || len(l.Tokens) != 1 {
			return nil, 0, fmt.Errorf("lane %d behind a chain of lane %d, %d tokens", l.Lane, c.lanes[i], len(l.Tokens))
		}
		if l.Tokens = slices.Concat(l.Tokens, p[:len(l.Positions)-1]); len(l.Tokens) != 1+len(p) {
			uneven = 1
		}
	}
	c.uneven += uneven
	q, err := c.Launch(s, with)
	return c.picks, q, err
}

// The same on a device that drafts and verifies without the host in between.
func TestCompanyChained(t *testing.T) {
	m := modeltest.Micro(t)
	open := func(o cpu.Options) backend.Device { return &chaining{Device: cpu.NewFast(o)} }
	all := jobs(t, m, rand.New(rand.NewPCG(3, 8)), 50, cpu.NewFast)
	uneven := 0
	for i := range uint64(4) {
		uneven += storm(t, m, all, i, open)[0]
	}
	if uneven == 0 {
		t.Error("no lane verified fewer drafts than another")
	}
}

// The same with a cache in FP8: a row is rounded by itself, whatever runs beside it.
func TestCompanyFP8(t *testing.T) {
	m := modeltest.Micro(t)
	open := func(o cpu.Options) backend.Device {
		o.KV = backend.CacheFP8
		return cpu.NewFast(o)
	}
	all := jobs(t, m, rand.New(rand.NewPCG(2, 8)), 50, open)
	for i := range uint64(2) {
		storm(t, m, all, i, open)
	}
}

// The same on the oracle, less of it.
func TestCompanyOracle(t *testing.T) {
	if testing.Short() {
		t.Skip("the oracle is slow")
	}
	n := 12
	if os.Getenv("NINFER_COMPANY") != "" {
		n = 200
	}
	m := modeltest.Micro(t)
	storm(t, m, jobs(t, m, rand.New(rand.NewPCG(1, 9)), n, cpu.NewOracle), 99, cpu.NewOracle)
}
