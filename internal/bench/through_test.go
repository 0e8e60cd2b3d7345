package bench

import (
	"context"
	"testing"
	"time"

	"ninfer/internal/backend/cpu"
	"ninfer/internal/engine"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

// slow is a worker whose units take at least so long.
type slow struct {
	engine.Worker
	by time.Duration
}

func (s slow) Step() (bool, error) {
	time.Sleep(s.by)
	return s.Worker.Step()
}

// Rounds through the engine cannot be faster than its units, and all requests are in those that count.
func TestThrough(t *testing.T) {
	m := modeltest.Micro(t)
	const lanes, by = 3, 2 * time.Millisecond
	test := Through{Prompt: 40, Batch: lanes, Steps: 10, Sampling: engine.Sampling{Temperature: 1}}
	dev := cpu.NewFast(cpu.Options{States: m.States, Lanes: lanes, Tokens: 128, Verify: 1, Carry: 64, Threads: 1})
	defer dev.Close()
	b, err := engine.NewBatch(model.NewRunner(m, dev, 16), engine.BatchOptions{Limits: engine.Limits{Lanes: lanes, Pages: 2 * lanes, Pending: lanes, Passes: 1}, Context: 128})
	if err != nil {
		t.Fatal(err)
	}
	q := engine.NewQueue(slow{b, by}, lanes, time.Minute)
	defer q.Drain(context.Background())
	row, err := test.Measure(context.Background(), q, []int32{20, 30, 40})
	if err != nil {
		t.Fatal(err)
	}
	if row.Rounds < test.Steps || row.Rounds > test.MostNew() {
		t.Errorf("%d rounds for %d steps", row.Rounds, test.Steps)
	}
	if least := float64(by.Microseconds()); row.Microseconds < least || row.Mean < least {
		t.Errorf("%+v: faster than the units of %g us", row, least)
	}
	if _, err := (Through{Prompt: 120, Batch: 1, Steps: 10}).Measure(context.Background(), q, []int32{20}); err == nil {
		t.Error("a test that does not fit is a row")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := test.Measure(ctx, q, []int32{20}); err == nil {
		t.Error("a cancelled test is a row")
	}
	if l := q.Load(); l.Places != 0 {
		t.Errorf("%+v is left", l)
	}
}
