package bench

import (
	"context"
	"math"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/backend/cpu"
	"ninfer/internal/engine"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

func TestParseTests(t *testing.T) {
	got, err := ParseTests("512, 8192", "128", "512,256;8192,256")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, x := range got {
		names = append(names, x.Name())
	}
	if want := "pp512 pp8192 tg128 pp512+tg256 pp8192+tg256"; strings.Join(names, " ") != want {
		t.Errorf("%v, want %s", names, want)
	}
	if d, _ := ParseTests("", "", ""); !slices.Equal(d, []Test{{Prompt: 512}, {Gen: 128}}) {
		t.Errorf("default is %v", d)
	}
	for _, bad := range [][3]string{{"0", "", ""}, {"x", "", ""}, {"", "-1", ""}, {"", "", "5"}, {"", "", "5,6,7"}, {"", "", "5,"}} {
		if _, err := ParseTests(bad[0], bad[1], bad[2]); err == nil {
			t.Errorf("%q accepted", bad)
		}
	}
}

func TestRun(t *testing.T) {
	m := modeltest.Micro(t)
	dev := cpu.NewOracle(cpu.Options{States: m.States, Lanes: 1, Tokens: 64, Verify: 4, Carry: 16})
	defer dev.Close()
	b, err := engine.NewBatch(model.NewRunner(m, dev, 12), engine.BatchOptions{Limits: engine.Limits{Lanes: 1, Pages: 1}, Context: 64})
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Repetitions: 3, Warmup: 1, Draft: 3, Corpus: []int32{20, 30, 40}, KeepIDs: true}
	row, err := Run(context.Background(), b, Test{Prompt: 20, Gen: 6}, o)
	if err != nil {
		t.Fatal(err)
	}
	if len(row.Repetitions) != 3 || row.Prefill == nil || row.Decode == nil {
		t.Fatalf("%+v", row)
	}
	var want float64
	for _, r := range row.Repetitions {
		want += 6 / r.Decode / 3
		if len(r.IDs) != 7 || !slices.Equal(r.IDs, row.Repetitions[0].IDs) {
			t.Errorf("ids %v", r.IDs)
		}
	}
	if math.Abs(row.Decode.Mean-want) > 1e-9*want {
		t.Errorf("rate %g, want %g", row.Decode.Mean, want)
	}
	if s := row.Speculation; s.Rounds == 0 || s.Drafted < s.Rounds || s.AcceptanceLength < 1 {
		t.Errorf("%+v", s)
	}
	if _, err := Run(context.Background(), b, Test{Prompt: 60, Gen: 20}, o); err == nil {
		t.Error("a test that does not fit is a row")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Run(ctx, b, Test{Prompt: 2, Gen: 2}, o); err == nil {
		t.Error("a cancelled test is a row")
	}
}

func TestCorpus(t *testing.T) {
	ids := Corpus(20000, 480)
	first := 0
	for _, id := range ids {
		if id < 0 || id >= 480 {
			t.Fatalf("id %d", id)
		}
		if id == 0 {
			first++
		}
	}
	// Rank 1 has the share ln 2 / ln 480 of a 1/r density.
	if share := float64(first) / 20000; math.Abs(share-math.Ln2/math.Log(480)) > 0.02 {
		t.Errorf("the first id has a share of %.3f", share)
	}
}
