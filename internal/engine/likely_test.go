package engine_test

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/engine"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
	"ninfer/internal/num"
)

// lister is a device that answers with lists of so many likely ids, as a GPU does.
type lister struct {
	backend.Device
	most, ids       int
	ctl             *backend.Control
	lists, recalled int
}

func (l *lister) Launch(s backend.Step, c *backend.Control) (backend.Seq, error) {
	l.ctl = c
	return l.Device.Launch(s, c)
}

func (l *lister) Wait(q backend.Seq) (backend.Result, error) {
	res, err := l.Device.Wait(q)
	out := backend.Result{Lanes: slices.Clone(res.Lanes)}
	for i := range out.Lanes {
		lane := &out.Lanes[i]
		if !l.ctl.Lanes[i].Want.Likely() {
			continue
		}
		rows := lane.Logits
		for _, row := range rows {
			var list []backend.Likely
			for id, v := range row[:l.ids] {
				list = append(list, backend.Likely{Value: num.FromBF16(num.ToBF16(v)), ID: int32(id)})
			}
			slices.SortStableFunc(list, func(a, b backend.Likely) int { return cmp.Compare(b.Value, a.Value) })
			list = list[:l.most]
			slices.SortFunc(list, func(a, b backend.Likely) int { return cmp.Compare(a.ID, b.ID) })
			lane.Likely = append(lane.Likely, list)
			l.lists++
		}
		lane.Logits = nil
		lane.Recall = func(row int) ([]float32, error) {
			l.recalled++
			return rows[row], nil
		}
	}
	return out, err
}

// Drawn output is the same whether a device gives logits or lists, whatever their length.
func TestLikely(t *testing.T) {
	m := modeltest.Micro(t)
	const lanes = 3
	run := func(wrap func(backend.Device) backend.Device) (all []string) {
		dev := cpu.NewFast(cpu.Options{States: m.States, Lanes: lanes, Tokens: 128, Verify: 6, Carry: 64, Threads: 1})
		defer dev.Close()
		b, err := engine.NewBatch(model.NewRunner(m, wrap(dev), 16), engine.BatchOptions{
			Limits: engine.Limits{Lanes: lanes, Pages: 2 * lanes, Pending: 20}, Context: 128,
		})
		if err != nil {
			t.Fatal(err)
		}
		all = make([]string, 12)
		for i := range all {
			req := engine.Request{Prompt: []int32{31, int32(40 + i), 200}, MaxNew: 40, Draft: i % 3, Logprobs: i%5 == 4, Sampling: engine.Sampling{
				Temperature: 0.5 + float64(i%4)/2, TopP: 0.95, TopK: []int{20, 5, 1}[i%3], Presence: float64(i%3) / 2, Frequency: 0.1 * float64(i%2), Seed: uint64(i),
			}}
			err := b.Add(context.Background(), engine.RequestID(i+1), req, nil, func(out engine.Outcome, err error) { all[i] = fmt.Sprint(out.IDs, out.Reason, err) })
			if err != nil {
				t.Fatal(err)
			}
		}
		for busy := true; busy; {
			if busy, err = b.Step(); err != nil {
				t.Fatal(err)
			}
		}
		return all
	}
	want := run(func(d backend.Device) backend.Device { return d })
	for _, most := range []int{21, 40, m.Options.IDs} {
		l := &lister{most: most, ids: m.Options.IDs}
		got := run(func(d backend.Device) backend.Device { l.Device = d; return l })
		if !slices.Equal(got, want) {
			t.Errorf("lists of %d: other output", most)
		}
		if l.lists == 0 || most == 21 && l.recalled == 0 || most == m.Options.IDs && l.recalled > 0 {
			t.Errorf("lists of %d: %d of them, %d recalled", most, l.lists, l.recalled)
		}
		t.Logf("lists of %d: %d, %d recalled", most, l.lists, l.recalled)
	}
}
