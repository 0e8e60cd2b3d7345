package main

import (
	"encoding/json/v2"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// The committed figures follow from their own bytes, times and read rates, and say where they come from.
func TestCommittedRows(t *testing.T) {
	files, err := filepath.Glob("../../../../docs/perf/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("no figures: %v", err)
	}
	for _, path := range files {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var rows []map[string]any
		if err := json.Unmarshal(text, &rows); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		seen := map[string]bool{}
		for _, r := range rows {
			name, _ := r["name"].(string)
			what, _ := r["what"].(string)
			variant, _ := r["variant"].(string)
			num := func(k string) float64 { v, _ := r[k].(float64); return v }
			if !slices.Contains([]string{"kernel", "decode", "prefill", "round", "load", "engine"}, what) || !slices.Contains([]string{"bf16", "fp8", "mixed"}, variant) || name == "" {
				t.Errorf("%s: row %v", path, r)
			}
			if r["commit"] == "" || r["command"] == "" {
				t.Errorf("%s: %s %s says not where it comes from", path, name, variant)
			}
			key := what + name + variant + string(rune(int(num("context")))) + string(rune(int(num("batch"))))
			if seen[key] {
				t.Errorf("%s: %s %s twice", path, name, variant)
			}
			seen[key] = true
			if what == "decode" && (num("read_gbps") == 0 || num("distinct_experts") == 0 || num("us") == 0 || math.Abs(num("tokens_per_s")*num("us")/num("batch")/1e6-1) > 1e-6) {
				t.Errorf("%s: %s %s: row %v", path, name, variant, r)
			}
			if what != "kernel" && what != "load" && what != "decode" && what != "engine" || num("read_gbps") == 0 {
				continue // prefill and rounds are measured elsewhere; yardsticks before the read stream have no rate
			}
			floor := num("bytes") / num("read_gbps") / 1e6 // ms
			if math.Abs(floor-num("floor_ms")) > 1e-3*floor {
				t.Errorf("%s: %s %s: floor %g ms, recomputed %g", path, name, variant, num("floor_ms"), floor)
			}
			if ratio := floor * 1000 / num("us"); math.Abs(ratio-num("ratio")) > 1e-3*ratio+1e-9 {
				t.Errorf("%s: %s %s: ratio %g, recomputed %g", path, name, variant, num("ratio"), ratio)
			}
		}
	}
}

func TestMerge(t *testing.T) {
	old := []row{{What: "kernel", Name: "a", Batch: 1, Us: 1}, {What: "kernel", Name: "a", Batch: 2, Us: 2}, {What: "kernel", Name: "b", Batch: 1, Us: 3}}
	got := merge(old, []row{{What: "kernel", Name: "a", Batch: 2, Us: 20}, {What: "kernel", Name: "0", Batch: 1, Us: 4}})
	want := []row{{What: "kernel", Name: "0", Batch: 1, Us: 4}, {What: "kernel", Name: "a", Batch: 1, Us: 1}, {What: "kernel", Name: "a", Batch: 2, Us: 20}, {What: "kernel", Name: "b", Batch: 1, Us: 3}}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v", got)
	}
}
