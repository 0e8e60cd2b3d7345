package lint

import (
	"encoding/json/v2"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// TestMeasurements: every recorded row says which commit and command it is from, and what follows from its other numbers does.
func TestMeasurements(t *testing.T) {
	files, err := filepath.Glob("../../docs/perf/*.json")
	if err != nil || len(files) == 0 {
		t.Fatal("no measurements", err)
	}
	commit := regexp.MustCompile(`^[0-9a-f]{7,40}( with [0-9a-f]{7,40})?$`)
	for _, path := range files {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var rows []struct {
			What       string  `json:"what"`
			Name       string  `json:"name"`
			Variant    string  `json:"variant"`
			Context    int     `json:"context"`
			Batch      int     `json:"batch"`
			Us         float64 `json:"us"`
			Bytes      float64 `json:"bytes"`
			FloorMs    float64 `json:"floor_ms"`
			Ratio      float64 `json:"ratio"`
			ReadGBps   float64 `json:"read_gbps"`
			TokensPerS float64 `json:"tokens_per_s"`
			Commit     string  `json:"commit"`
			Command    string  `json:"command"`
		}
		if err := json.Unmarshal(text, &rows); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		for i, r := range rows {
			off := func(what string, got, want, most float64) {
				if math.Abs(got/want-1) > most {
					t.Errorf("%s: row %d, %s %s %s of %d tokens, %d lanes: %s is %v, the others give %v", path, i+1, r.What, r.Name, r.Variant, r.Context, r.Batch, what, got, want)
				}
			}
			if r.What == "" || r.Name == "" || r.Us <= 0 || r.Command == "" || !commit.MatchString(r.Commit) {
				t.Errorf("%s: row %d lacks what, name, us, commit or command: %+v", path, i+1, r)
				continue
			}
			if r.FloorMs > 0 {
				off("ratio", r.Ratio, r.FloorMs*1e3/r.Us, 0.01)
			}
			if r.FloorMs > 0 && r.Bytes > 0 && r.ReadGBps > 0 {
				off("floor_ms", r.FloorMs, r.Bytes/r.ReadGBps/1e6, 0.02)
			}
			switch {
			case r.TokensPerS == 0:
			case r.What == "prefill":
				off("tokens_per_s", r.TokensPerS, float64(r.Context)*1e6/r.Us, 0.01)
			case r.What == "decode" || r.What == "engine":
				off("tokens_per_s", r.TokensPerS, float64(r.Batch)*1e6/r.Us, 0.01)
			}
		}
	}
}
