package modeltest

import (
	"encoding/json/v2"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Case is a text of a golden folder and what the reference makes of it.
type Case struct {
	Tokens []int32 `json:"tokens"`
	Next   int32   `json:"next"`   // the most likely next token
	Drafts []int32 `json:"drafts"` // of the drafter behind it
	Greedy []int32 `json:"greedy"` // the continuation by most likely tokens
}

// Golden reads the text cases of a golden folder, and the tensors recorded for them: NAME.logits and others. It skips without the folder.
func Golden(t testing.TB, dir string) (map[string]Case, map[string]Safetensor) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, "golden.json"))
	if err != nil {
		t.Skip(err)
	}
	var meta struct {
		Cases map[string]Case `json:"cases"`
	}
	if err := json.Unmarshal(raw, &meta); err != nil {
		t.Fatal(err)
	}
	for name := range meta.Cases {
		if strings.HasPrefix(name, "image") {
			delete(meta.Cases, name)
		}
	}
	values := map[string]Safetensor{}
	OpenSafetensors(t, filepath.Join(dir, "golden.safetensors"), values)
	return meta.Cases, values
}

// Worst is the largest relative L2 distance of corresponding rows.
func Worst(t testing.TB, got [][]float32, want []float32) float64 {
	t.Helper()
	if len(got) == 0 || len(want) == 0 || len(want)%len(got) != 0 {
		t.Fatalf("%d rows against %d values", len(got), len(want))
	}
	w, most := len(want)/len(got), 0.0
	for r, row := range got {
		var d, n float64
		for i, v := range want[r*w : (r+1)*w] {
			d += (float64(row[i]) - float64(v)) * (float64(row[i]) - float64(v))
			n += float64(v) * float64(v)
		}
		e := math.Sqrt(d / n)
		if math.IsNaN(e) {
			t.Fatalf("row %d has no distance", r)
		}
		most = max(most, e)
	}
	return most
}
