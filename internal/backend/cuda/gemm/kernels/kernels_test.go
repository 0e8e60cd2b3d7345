package kernels

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/backend/cuda/kernels/digest"
)

// The committed machine code belongs to the sources beside it.
func TestFresh(t *testing.T) {
	raw, err := os.ReadFile("manifest.json")
	if err != nil {
		t.Fatal(err)
	}
	var m struct {
		Archs   []string                                   `json:"archs"`
		Headers map[string]string                          `json:"headers"`
		Kernels map[string]struct{ Source, Fatbin string } `json:"kernels"`
	}
	if err := json.Unmarshal(raw, &m, json.MatchCaseInsensitiveNames(true)); err != nil {
		t.Fatal(err)
	}
	check := func(path, want string) {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Error(err)
			return
		}
		sum := digest.Source(string(b))
		if filepath.Ext(path) == ".fatbin" {
			s := sha256.Sum256(b)
			sum = hex.EncodeToString(s[:])
		}
		if sum != want {
			t.Errorf("%s has changed since the kernels were compiled: run tools/kernelgen -dir internal/backend/cuda/gemm/kernels", path)
		}
	}
	for _, pattern := range []string{"*.cu", "*.cuh", "*.h"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if name, ok := strings.CutSuffix(f, ".cu"); ok {
				check(f, m.Kernels[name].Source)
				check(filepath.Join("fatbin", name+".fatbin"), m.Kernels[name].Fatbin)
			} else {
				check(f, m.Headers[f])
			}
		}
	}
	if len(m.Kernels) != len(sources) {
		t.Errorf("%d sources compiled, %d in the table", len(m.Kernels), len(sources))
	}
	for i, a := range archs {
		if i >= len(m.Archs) || "sm_"+m.Archs[i] != a {
			t.Errorf("machine code for %v, want %v", m.Archs, archs)
		}
	}
	if slices.Contains(sources, "") {
		t.Error("a source without a name")
	}
}
