package engine

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

func describe(u Unit) string {
	var b strings.Builder
	for _, a := range u.Admit {
		fmt.Fprintf(&b, "admit %d to lane %d, %d pages\n", a.ID, a.Lane, a.Pages)
	}
	switch {
	case u.Prefill.Rows == 0 && len(u.Round) == 0:
		b.WriteString("idle\n")
	case u.Prefill.Rows > 0:
		fmt.Fprintf(&b, "lane %d prompt rows %d+%d", u.Prefill.Lane, u.Prefill.First, u.Prefill.Rows)
		if u.Prefill.Last {
			b.WriteString(" last")
		}
		b.WriteString("\n")
	default:
		fmt.Fprintf(&b, "round of lanes %v\n", u.Round)
	}
	return b.String()
}

// TestSchedules runs the traces of testdata/scheduler: events and the units that follow.
func TestSchedules(t *testing.T) {
	datadriven.Walk(t, "testdata/scheduler", func(t *testing.T, path string) {
		var s *Scheduler
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			arg := func(name string, otherwise int) int {
				if !d.HasArg(name) {
					return otherwise
				}
				var v int
				d.ScanArgs(t, name, &v)
				return v
			}
			switch d.Cmd {
			case "limits":
				var err error
				if s, err = NewScheduler(Limits{
					Lanes: arg("lanes", 2), Pages: arg("pages", 100), Pending: arg("pending", 8), Chunk: arg("chunk", 128),
					GapRows: arg("gap", 128), Passes: arg("passes", 2),
				}); err != nil {
					return err.Error() + "\n"
				}
				return ""
			case "arrive":
				if err := s.Arrive(RequestID(arg("id", 0)), arg("prompt", 64), arg("output", 64)); err != nil {
					return err.Error() + "\n"
				}
				return fmt.Sprintf("%d waiting\n", s.Waiting())
			case "leave":
				return fmt.Sprintf("%v, %d pages free\n", s.Leave(RequestID(arg("id", 0))), s.FreePages())
			case "extend":
				s.Extend(RequestID(arg("id", 0)), arg("rows", 0))
				return ""
			case "next":
				var b strings.Builder
				for range arg("times", 1) {
					b.WriteString(describe(s.Next()))
				}
				return b.String()
			}
			t.Fatalf("unknown command %q", d.Cmd)
			return ""
		})
	})
}

// Random loads: pages are never over-reserved, everything that arrives starts and finishes, nobody waits for ever while others pass, and
// a lane that is ready is in every second unit at least.
func TestSchedulerProperties(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		l := Limits{Lanes: 1 + rng.IntN(8), Pages: 4 + rng.IntN(40), Pending: 1 + rng.IntN(20), Chunk: 1 + rng.IntN(200), GapRows: 1 + rng.IntN(100), Passes: rng.IntN(4)}
		s, err := NewScheduler(l)
		if err != nil {
			t.Fatal(err)
		}
		type job struct{ prompt, output, done, left, skipped, ahead int }
		jobs := map[RequestID]*job{}
		lanes := map[int]RequestID{}
		var order []RequestID
		next, started, finished, overtaken := RequestID(1), 0, 0, map[RequestID]int{}
		for step := 0; step < 100000 && (step < 300 || finished < len(jobs)); step++ {
			if step < 300 && rng.IntN(3) == 0 {
				j := &job{prompt: 1 + rng.IntN(400), output: 1 + rng.IntN(60)}
				if s.Arrive(next, j.prompt, j.output) == nil {
					j.ahead = len(order)
					jobs[next] = j
					order = append(order, next)
				}
				next++
			}
			u := s.Next()
			for _, a := range u.Admit {
				if lanes[a.Lane] != 0 {
					t.Fatalf("seed %d: lane %d given twice", seed, a.Lane)
				}
				lanes[a.Lane] = a.ID
				started++
				for i, id := range order {
					if id == a.ID {
						for _, earlier := range order[:i] {
							if overtaken[earlier]++; overtaken[earlier] > l.Passes*(jobs[earlier].ahead+1) {
								t.Fatalf("seed %d: request %d overtaken %d times", seed, earlier, overtaken[earlier])
							}
						}
						order = append(order[:i:i], order[i+1:]...)
						break
					}
				}
			}
			reserved := 0
			for _, id := range lanes {
				if id != 0 {
					reserved += pagesFor(jobs[id].prompt + jobs[id].output)
				}
			}
			if reserved+s.FreePages() != l.Pages || s.FreePages() < 0 {
				t.Fatalf("seed %d: %d pages reserved, %d free of %d", seed, reserved, s.FreePages(), l.Pages)
			}
			in := map[int]bool{}
			if u.Prefill.Rows > 0 {
				j := jobs[lanes[u.Prefill.Lane]]
				if u.Prefill.First != j.done || u.Prefill.Rows > l.Chunk {
					t.Fatalf("seed %d: chunk %+v of a prompt at %d", seed, u.Prefill, j.done)
				}
				j.done += u.Prefill.Rows
				if u.Prefill.Last != (j.done == j.prompt) {
					t.Fatalf("seed %d: chunk %+v at %d of %d", seed, u.Prefill, j.done, j.prompt)
				}
				in[u.Prefill.Lane] = true
				if j.left = j.output; !u.Prefill.Last {
					j.left = 0
				}
			}
			for _, lane := range u.Round {
				id := lanes[lane]
				j := jobs[id]
				if id == 0 || j.done < j.prompt {
					t.Fatalf("seed %d: lane %d in a round with %+v", seed, lane, j)
				}
				in[lane] = true
				j.skipped = 0
				if j.left--; j.left <= 0 || rng.IntN(20) == 0 {
					s.Leave(id)
					delete(lanes, lane)
					finished++
				}
			}
			for lane, id := range lanes {
				if id == 0 || in[lane] {
					continue
				}
				if j := jobs[id]; j.done == j.prompt {
					if j.skipped++; j.skipped > 1 {
						t.Fatalf("seed %d: ready lane %d skipped %d units", seed, lane, j.skipped)
					}
				}
			}
		}
		if started != len(jobs) || finished != len(jobs) || s.Active() != 0 || s.Waiting() != 0 || s.FreePages() != l.Pages {
			t.Fatalf("seed %d: %d jobs, %d started, %d finished, %d active, %d waiting, %d pages free", seed, len(jobs), started, finished, s.Active(), s.Waiting(), s.FreePages())
		}
	}
}
