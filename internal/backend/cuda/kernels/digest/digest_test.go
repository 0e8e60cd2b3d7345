package digest

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ninfer/internal/backend/cuda/code"
)

func TestSource(t *testing.T) {
	const base = "int a = 1; // one\nint b = '\"'; /* two */ asm(\"x // y\\\"\" \"z\");\n"
	for _, same := range []string{
		"int a = 1;\nint b = '\"';\n\n asm(\"x // y\\\"\" \"z\");", "// first\nint a = 1; int b = '\"'; /* \n other */ asm(\"x // y\\\"\" \"z\"); // last",
	} {
		if Source(same) != Source(base) {
			t.Errorf("%q and %q differ", strip(same), strip(base))
		}
	}
	for _, other := range []string{
		"int a = 2; int b = '\"'; asm(\"x // y\\\"\" \"z\");", "int a = 1; int b = '\"'; asm(\"x // z\\\"\" \"z\");", "int a = 1; int b = '\"'; asm(\"x  // y\\\"\" \"z\");",
		"inta = 1; int b = '\"'; asm(\"x // y\\\"\" \"z\");", "int a = 1; int b = '\"'; asm(\"x",
	} {
		if Source(other) == Source(base) {
			t.Errorf("%q has the same sum", other)
		}
	}
	// the sum itself cannot change without compiling again: SHA-256 of "int a;"
	if s := Source(" int /* x */ a; // y\n"); s != "68ee7ca0e099b2c45f613f363e4911edbf3f696a3569f0ca666d433db8503c90" {
		t.Errorf("sum %s", s)
	}
}

// Each way in which sources, machine code, manifest and table can part is told, and nothing else is.
func TestStale(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	image := sha256.Sum256([]byte("code"))
	manifest := fmt.Sprintf(`{"archs": ["90a"], "headers": {"a.h": %q}, "kernels": {"one": {"source": %q, "fatbin": %q}}}`,
		Source("int h;"), Source("int k;"), hex.EncodeToString(image[:]))
	const report = "source kernel target registers shared stack spills\none k sm_90a 80 0 8 0\none l sm_90a 80 0 8 4+4\n"
	good := map[string]string{"manifest.json": manifest, "a.h": "int h; // better", "one.cu": "int  k;", "fatbin/one.fatbin": "code", "resources.txt": report}
	table := code.Table[int]{Archs: []string{"sm_90a"}, Sources: []string{"one"}, Kernels: []code.Kernel{{Name: "k"}, {Name: "l"}}}
	for _, c := range []struct{ name, text, want string }{
		{"other.go", "", ""},
		{"a.h", "long h;", "a.h is not"},
		{"b.cuh", "int h;", "b.cuh is not"},
		{"one.cu", "int j;", "one.cu is not"},
		{"fatbin/one.fatbin", "edoc", "one.fatbin is not"},
		{"two.cu", "int k;", "2 sources"},
		{"manifest.json", strings.Replace(manifest, "90a", "80", 1), "machine code for sm_80"},
		{"manifest.json", strings.Replace(manifest, "a.h", "c.h", 1), "c.h is in the manifest only"},
		{"manifest.json", strings.Replace(manifest, `"one"`, `"won"`, 1), "one.cu is in the table"},
		{"manifest.json", "{", "json"},
		{"resources.txt", strings.Replace(report, " 0\n", " 16\n", 1), "k on sm_90a spills 16 bytes"},
		{"resources.txt", strings.Replace(report, "4+4", "8+8", 1), "l on sm_90a spills 8+8 bytes"},
		{"resources.txt", "one k sm_90a 80 0 8 0\n", "l on sm_90a is not in"},
	} {
		for name, text := range good {
			write(name, text)
		}
		write(c.name, c.text)
		got := strings.Join(Stale(dir, &table, "l on sm_90a spills 4+4 bytes"), "\n")
		if c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%s %q: %q, want %q", c.name, c.text, got, c.want)
		}
		if err := os.Remove(filepath.Join(dir, c.name)); err != nil {
			t.Fatal(err)
		}
	}
}
