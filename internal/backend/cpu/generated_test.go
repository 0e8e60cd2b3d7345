package cpu

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// What tools/asmgen wrote is what its sources say: the sums it recorded hold for its sources and for its output.
func TestGenerated(t *testing.T) {
	const root = "../../.."
	text, err := os.ReadFile("simd_amd64.sum")
	if err != nil {
		t.Fatal(err)
	}
	var listed []string
	for line := range strings.Lines(string(text)) {
		sum, name, ok := strings.Cut(strings.TrimSpace(line), "  ")
		if !ok {
			t.Fatalf("line %q", line)
		}
		listed = append(listed, name)
		b, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		b = bytes.ReplaceAll(b, []byte("\r\n"), []byte("\n"))
		if got := fmt.Sprintf("%x", sha256.Sum256(b)); got != sum {
			t.Errorf("%s changed since the assembly was generated: cd tools/asmgen && go run .", name)
		}
	}
	sources, err := filepath.Glob(filepath.Join(root, "tools/asmgen/*.go"))
	if err != nil || len(sources) == 0 {
		t.Fatalf("%d generator sources: %v", len(sources), err)
	}
	for _, s := range append(sources, "simd_amd64.s", "simd_amd64.go") {
		if !slices.ContainsFunc(listed, func(name string) bool { return filepath.Base(name) == filepath.Base(s) }) {
			t.Errorf("%s is not among the sums", s)
		}
	}
}
