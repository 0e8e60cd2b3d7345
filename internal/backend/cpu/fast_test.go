package cpu_test

import (
	"context"
	"encoding/json/v2"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ninfer/internal/artifact"
	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/convert"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

// The golden folders, seen from here.
var micro, mini = golden{"../../../testdata/micro-radixark", 480}, golden{"../../../../shared/golden/mini-radixark", 2000}

type golden struct {
	dir string
	ids int
}

// artifact converts the folder's checkpoint and binds it: weights in the formats that users have.
func (g golden) artifact(t testing.TB, projections string) *model.Model {
	t.Helper()
	dir := filepath.Join(g.dir, "checkpoint")
	if _, err := os.Stat(dir); err != nil {
		t.Skip(err)
	}
	out := filepath.Join(t.TempDir(), "qwen3_8_flash_next_125b_a6b_nvfp4.ninfer")
	if projections == "fp8" {
		out = filepath.Join(t.TempDir(), "qwen3_8_flash_next_125b_a6b_nvfp4_fp8.ninfer")
	}
	if _, err := convert.Run(context.Background(), convert.Options{Model: dir, Out: out, ProjectionFormat: projections}); err != nil {
		t.Fatal(err)
	}
	f, err := artifact.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	store, err := model.NewArtifact(f)
	if err != nil {
		t.Fatal(err)
	}
	m, err := model.Bind(store.Config(), store, model.Options{Drafter: true, IDs: g.ids})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

type goldenCase struct {
	Tokens []int32 `json:"tokens"`
	Next   int32   `json:"next"`
	Drafts []int32 `json:"drafts"`
}

// cases are the folder's text cases and its values.
func (g golden) cases(t testing.TB) (map[string]goldenCase, map[string]modeltest.Safetensor) {
	values := map[string]modeltest.Safetensor{}
	modeltest.OpenSafetensors(t, filepath.Join(g.dir, "golden.safetensors"), values)
	raw, err := os.ReadFile(filepath.Join(g.dir, "golden.json"))
	if err != nil {
		t.Skip(err)
	}
	var meta struct {
		Cases map[string]goldenCase `json:"cases"`
	}
	if err := json.Unmarshal(raw, &meta); err != nil {
		t.Fatal(err)
	}
	for name := range meta.Cases {
		if strings.HasPrefix(name, "image") {
			delete(meta.Cases, name)
		}
	}
	return meta.Cases, values
}

// worst is the largest relative L2 distance of corresponding rows.
func worst(t testing.TB, got [][]float32, want []float32) float64 {
	t.Helper()
	if len(got) == 0 || len(want)%len(got) != 0 {
		t.Fatalf("%d rows against %d values", len(got), len(want))
	}
	w, most := len(want)/len(got), 0.0
	for r, row := range got {
		var d, n float64
		for i, v := range want[r*w : (r+1)*w] {
			d += (float64(row[i]) - float64(v)) * (float64(row[i]) - float64(v))
			n += float64(v) * float64(v)
		}
		most = max(most, math.Sqrt(d/n))
	}
	return most
}

// The fast path computes what the reference computes, on the checkpoint's values and on the converted ones: logits of all positions
// and the chained drafts.
func TestFastGolden(t *testing.T) {
	for _, g := range []golden{micro, mini} {
		t.Run(filepath.Base(g.dir), func(t *testing.T) {
			cases, values := g.cases(t)
			m := g.artifact(t, "")
			levels := cpu.Levels()
			if g == mini {
				levels = levels[len(levels)-1:]
			}
			for _, level := range levels {
				dev := cpu.NewFast(cpu.Options{States: m.States, Lanes: 1, Tokens: 320, Verify: 4, Carry: 320, Level: level})
				r := model.NewRunner(m, dev, 320)
				for name, c := range cases {
					if err := dev.Reset(backend.Lane(0)); err != nil {
						t.Fatal(err)
					}
					res, err := r.Prompt(backend.LaneRows{Tokens: c.Tokens, Want: backend.WantLogitsAll})
					if err != nil {
						t.Fatal(err)
					}
					e := worst(t, res.Logits, values[name+".logits"].Values())
					drafts, logits, err := r.Draft(0, []int32{c.Next}, len(c.Drafts), backend.WantLogits)
					if err != nil {
						t.Fatal(err)
					}
					d := worst(t, logits, values[name+".draft_logits"].Values())
					t.Logf("%v %-11s logits %.2g drafts %.2g", level, name, e, d)
					if !(e < 1e-3) || !(d < 1e-3) || fmt.Sprint(drafts) != fmt.Sprint(c.Drafts) {
						t.Errorf("%v %s: logits off by %.2g, drafts by %.2g, %v, want %v", level, name, e, d, drafts, c.Drafts)
					}
				}
				if err := dev.Close(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}
