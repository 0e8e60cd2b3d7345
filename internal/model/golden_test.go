package model_test

import (
	"encoding/json/v2"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

type goldenCase struct {
	Tokens []int32 `json:"tokens"`
	Next   int32   `json:"next"`
	Drafts []int32 `json:"drafts"`
	Greedy []int32 `json:"greedy"`
}

// relative is the largest relative L2 distance of corresponding rows.
func relative(t testing.TB, got [][]float32, want []float32) float64 {
	t.Helper()
	if len(got) == 0 || len(want)%len(got) != 0 {
		t.Fatalf("%d rows against %d values", len(got), len(want))
	}
	w, worst := len(want)/len(got), 0.0
	for r, row := range got {
		var d, n float64
		for i, v := range want[r*w : (r+1)*w] {
			d += (float64(row[i]) - float64(v)) * (float64(row[i]) - float64(v))
			n += float64(v) * float64(v)
		}
		worst = max(worst, math.Sqrt(d/n))
	}
	return worst
}

func narrow(rows [][]float64) (out [][]float32) {
	for _, r := range rows {
		line := make([]float32, len(r))
		for i, v := range r {
			line[i] = float32(v)
		}
		out = append(out, line)
	}
	return out
}

// The exact oracle computes what the reference computes: logits, streams, MTP and chained drafts of every text case.
func TestGolden(t *testing.T) {
	for _, f := range modeltest.Folders {
		t.Run(filepath.Base(f.Dir), func(t *testing.T) {
			m, _ := f.Model(t)
			golden := map[string]modeltest.Safetensor{}
			modeltest.OpenSafetensors(t, filepath.Join(f.Dir, "golden.safetensors"), golden)
			raw, err := os.ReadFile(filepath.Join(f.Dir, "golden.json"))
			if err != nil {
				t.Skip(err)
			}
			var meta struct {
				Cases map[string]goldenCase `json:"cases"`
			}
			if err := json.Unmarshal(raw, &meta); err != nil {
				t.Fatal(err)
			}
			for name, g := range meta.Cases {
				if strings.HasPrefix(name, "image") || testing.Short() && len(g.Tokens) > 100 {
					continue
				}
				dev := cpu.NewOracle(cpu.Options{States: m.States, Lanes: 1, Tokens: len(g.Tokens) + 8, Verify: 4, Carry: len(g.Tokens)})
				r := model.NewRunner(m, dev, len(g.Tokens))
				r.Taps = true
				trace := &backend.Trace{}
				res, err := r.Prompt(backend.LaneRows{Tokens: g.Tokens, Want: backend.WantLogitsAll, Trace: trace})
				if err != nil {
					t.Fatal(err)
				}
				worst := relative(t, res.Logits, golden[name+".logits"].Values())
				for l := range m.Config.Text.Layers {
					key := fmt.Sprintf("layer%d", l)
					if s, ok := golden[name+"."+key]; ok {
						if e := relative(t, narrow(trace.Streams[fmt.Sprintf("layer %d", l)]), s.Values()); e > 1e-5 {
							t.Errorf("%s: layer %d streams off by %.2g", name, l, e)
						}
					}
				}
				drafts, logits, err := r.Draft(0, []int32{g.Next}, len(g.Drafts), backend.WantLogits)
				if err != nil {
					t.Fatal(err)
				}
				draft := relative(t, logits, golden[name+".draft_logits"].Values())
				t.Logf("%-11s logits %.2g drafts %.2g %v want %v", name, worst, draft, drafts, g.Drafts)
				if worst > 1e-5 || draft > 1e-5 {
					t.Errorf("%s: beyond 1e-5", name)
				}
			}
		})
	}
}
