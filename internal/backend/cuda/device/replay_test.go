package device_test

import (
	"flag"
	"slices"
	"testing"

	"ninfer/internal/artifact"
	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/model"
)

var (
	artifactFlag = flag.String("artifact", "", "artifact to use instead of the micro checkpoint widened to FP32")
	replaysFlag  = flag.Int("replays", 200, "replays of one step")
)

// subject is the micro model: as an artifact has it, with the formats that the tuned kernels take, or as the plain ones need it.
func subject(t *testing.T) *model.Model {
	if *artifactFlag == "" {
		m, _ := folder.Model(t)
		return m
	}
	f, err := artifact.Open(*artifactFlag)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	store, err := model.NewArtifact(f)
	if err != nil {
		t.Fatal(err)
	}
	m, err := model.Bind(store.Config(), store, model.Options{Drafter: true, IDs: 480})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// lanes runs three prompts of different lengths and returns what runs verify passes of one row a lane and takes them back.
func lanes(t *testing.T, m *model.Model) func(which ...int) [][]float32 {
	d := open(t, device.Options{States: m.States, Lanes: 3, Saved: 1, Tokens: 128, Verify: 6, Carry: 128})
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	r := model.NewRunner(m, d, 32)
	lengths := []int{40, 3, 77}
	for l, n := range lengths {
		tokens := make([]int32, n)
		for i := range tokens {
			tokens[i] = int32(20 + (37*i+91*l)%400)
		}
		if _, err := r.Prompt(backend.LaneRows{Lane: l, Tokens: tokens}); err != nil {
			t.Fatal(err)
		}
	}
	return func(which ...int) (rows [][]float32) {
		ctl := &backend.Control{}
		for _, l := range which {
			ctl.Lanes = append(ctl.Lanes, backend.LaneRows{
				Lane: l, Tokens: []int32{int32(100 + l)}, Positions: model.Positions(lengths[l], 1), Want: backend.WantLogits,
			})
		}
		res, err := r.Launch(backend.Verify, ctl)
		if err != nil {
			t.Fatal(err)
		}
		for i, l := range which {
			rows = append(rows, slices.Clone(res.Lanes[i].Logits[0]))
			if err := d.Commit(l, 0); err != nil {
				t.Fatal(err)
			}
		}
		return rows
	}
}

// A graph gives the same bits however often it is replayed.
func TestReplays(t *testing.T) {
	run := lanes(t, subject(t))
	for _, which := range [][]int{{0}, {0, 1, 2}} {
		want := run(which...)
		for i := range *replaysFlag {
			if got := run(which...); !slices.EqualFunc(got, want, slices.Equal[[]float32]) {
				t.Fatalf("lanes %v: replay %d has other bits, off by %.2g", which, i, worst(distances(t, got, want)))
			}
		}
	}
	t.Logf("%d replays of one and of three lanes", *replaysFlag)
}

// A row's logits depend on the company it keeps by no more than another order of sums makes.
func TestBatchRows(t *testing.T) {
	run := lanes(t, subject(t))
	together := run(0, 1, 2)
	most := 0.0
	for l := range 3 {
		most = max(most, worst(distances(t, together[l:l+1], run(l))))
	}
	t.Logf("worst %.2g", most)
	if !(most <= 1e-3) {
		t.Errorf("a row in a batch is off by %.2g from the row alone", most)
	}
}
