package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/drivertest"
	"ninfer/internal/model"
)

// Whatever takes the shapes of a model, small ones that few kernels were made for too, both cards have room for its launches: prompts of all
// kinds, drafts and verifying of one to eight lanes.
func TestLaunches(t *testing.T) {
	configs := map[string]string{
		"official": "official", "micro": "../../testdata/micro-radixark/checkpoint/config.json", "nano": "../../testdata/nano/checkpoint/config.json",
	}
	if dir := os.Getenv("NINFER_GOLDEN"); dir != "" {
		configs["mini"] = filepath.Join(dir, "mini-radixark/checkpoint/config.json")
	}
	for model, config := range configs {
		for _, v := range []variantFlags{
			{SourceProfile: "radixark"}, {SourceProfile: "radixark", ProjectionFormat: "fp8_e4m3fn_row_bf16", MTPExpertFormat: "nvfp4"}, {SourceProfile: "swift"}, {SourceProfile: "mixed"},
		} {
			l := madeUp(t, config, v)
			for name, card := range map[string]drivertest.Card{"H200": drivertest.H200, "RTX PRO 6000": drivertest.RTX6000} {
				for _, small := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s %s %s on %s, small formats %v", model, v.SourceProfile, v.ProjectionFormat, name, small), func(t *testing.T) {
						everyLaunch(t, l, card, small)
					})
				}
			}
		}
	}
}

func everyLaunch(t *testing.T, l *loaded, card drivertest.Card, small bool) {
	must := orFatal(t)
	_, m, d := opened(t, l, card, small, 2048, 512)
	r := model.NewRunner(m, d, 512)
	r.Lanes, r.Round = 8, 6
	must(r.Prepare())
	for lane, n := range []int{1, 5, 12, 13, 40, 300, 512, 700} {
		_, err := r.Prompt(backend.LaneRows{Lane: lane, Tokens: make([]int32, n), Want: backend.WantLikely})
		must(err)
	}
	for lanes := 1; lanes <= 8; lanes++ {
		var drafts, rows []backend.LaneRows
		for lane := range lanes {
			at := d.Lengths(backend.Lane(lane))
			drafts = append(drafts, backend.LaneRows{Lane: lane, Tokens: make([]int32, at.Target-at.Drafter), Want: backend.WantLast})
			n := 1 + lane%6
			rows = append(rows, backend.LaneRows{Lane: lane, Tokens: make([]int32, n), Positions: model.Positions(at.Target, n), Want: backend.WantAll})
		}
		_, err := r.Drafts(&backend.Control{Lanes: drafts}, 4)
		must(err)
		_, err = r.Launch(backend.Verify, &backend.Control{Lanes: rows})
		must(err)
		for lane := range lanes {
			must(d.Commit(lane, 1+lane%2*min(1, lane%6)))
		}
	}
}
