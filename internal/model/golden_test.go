package model_test

import (
	"fmt"
	"path/filepath"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

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
			cases, golden := modeltest.Golden(t, f.Dir)
			for name, g := range cases {
				if testing.Short() && len(g.Tokens) > 100 {
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
				worst := modeltest.Worst(t, res.Logits, golden[name+".logits"].Values())
				for l := range m.Config.Text.Layers {
					key := fmt.Sprintf("layer%d", l)
					if s, ok := golden[name+"."+key]; ok {
						if e := modeltest.Worst(t, narrow(trace.Streams[fmt.Sprintf("layer %d", l)]), s.Values()); e > 1e-5 {
							t.Errorf("%s: layer %d streams off by %.2g", name, l, e)
						}
					}
				}
				drafts, logits, err := r.Draft(0, []int32{g.Next}, len(g.Drafts), backend.WantLogits)
				if err != nil {
					t.Fatal(err)
				}
				draft := modeltest.Worst(t, logits, golden[name+".draft_logits"].Values())
				t.Logf("%-11s logits %.2g drafts %.2g %v want %v", name, worst, draft, drafts, g.Drafts)
				if worst > 1e-5 || draft > 1e-5 {
					t.Errorf("%s: beyond 1e-5", name)
				}
			}
		})
	}
}
