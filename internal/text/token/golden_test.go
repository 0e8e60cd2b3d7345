package token

import (
	"encoding/json/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// root is the repository's root seen from here.
const root = "../../.."

func loadDir(t testing.TB, dir string) *Tokenizer {
	t.Helper()
	files := make([][]byte, 2)
	for i, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		files[i] = data
	}
	tok, err := Load(files[0], files[1])
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func micro(t testing.TB) *Tokenizer {
	return loadDir(t, filepath.Join(root, "testdata", "micro-radixark", "checkpoint"))
}

// goldenDirs are the committed golden folder, always there, and those that
// NINFER_GOLDEN has.
func goldenDirs(t *testing.T, names ...string) map[string]string {
	dirs := map[string]string{"micro-radixark": filepath.Join(root, "testdata", "micro-radixark")}
	for _, name := range names {
		dirs[name] = filepath.Join(os.Getenv("NINFER_GOLDEN"), name)
	}
	return dirs
}

// TestGolden compares with what the reference tokenizers library encoded and decoded.
func TestGolden(t *testing.T) {
	for name, dir := range goldenDirs(t, "mini-radixark") {
		t.Run(name, func(t *testing.T) {
			data, err := os.ReadFile(filepath.Join(dir, "tokenizer_golden.json"))
			if os.IsNotExist(err) {
				t.Skip("golden folder is not on this machine")
			}
			if err != nil {
				t.Fatal(err)
			}
			var cases []struct {
				Text    string  `json:"text"`
				IDs     []int32 `json:"ids"`
				Decoded string  `json:"decoded"`
			}
			if err := json.Unmarshal(data, &cases); err != nil {
				t.Fatal(err)
			}
			if len(cases) < 30 {
				t.Fatalf("only %d cases", len(cases))
			}
			tok := loadDir(t, filepath.Join(dir, "checkpoint"))
			for _, c := range cases {
				ids := tok.Encode(c.Text)
				if !slices.Equal(ids, c.IDs) {
					t.Errorf("Encode(%q) = %v, want %v", c.Text, ids, c.IDs)
				}
				if got := tok.Decode(c.IDs); got != c.Decoded {
					t.Errorf("Decode(%v) = %q, want %q", c.IDs, got, c.Decoded)
				}
			}
		})
	}
}
