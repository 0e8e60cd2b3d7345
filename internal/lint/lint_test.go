package lint

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// allowed says which of our packages, and which modules, a package may import besides the standard library. A name covers the packages
// below it; the longest name wins. "*" is everything.
var allowed = map[string][]string{
	"cmd/ninfer":              {"internal/cli"},
	"internal/num":            {"golang.org/x/sys"},
	"internal/mmap":           {"golang.org/x/sys"},
	"internal/direct":         {"golang.org/x/sys"},
	"internal/invariants":     {"golang.org/x/sys"},
	"internal/arch":           {"internal/num"},
	"internal/artifact":       {"internal/num", "internal/mmap", "internal/direct", "golang.org/x/sys"},
	"internal/hf":             {"internal/num", "internal/mmap", "internal/direct"},
	"internal/hf/hub":         {"golang.org/x/sys"},
	"internal/convert":        {"internal/arch", "internal/artifact", "internal/hf", "internal/text", "internal/num"},
	"internal/synth":          {"internal/arch", "internal/artifact", "internal/num"},
	"internal/backend":        {"internal/num"},
	"internal/backend/optest": {"internal/backend", "internal/num"},
	"internal/backend/cpu":    {"internal/backend", "internal/num", "golang.org/x/sys"},
	"internal/backend/cuda":   {"internal/backend", "internal/num", "github.com/ebitengine/purego", "golang.org/x/sys"},
	"internal/model":          {"internal/arch", "internal/backend", "internal/artifact", "internal/num"},
	"internal/selftest":       {"internal/model", "internal/engine", "internal/front", "internal/text", "internal/vision", "internal/backend", "internal/artifact", "internal/hf", "internal/arch", "internal/num"},
	"internal/bench":          {"internal/model", "internal/engine", "internal/backend", "internal/artifact", "internal/arch", "internal/num"},
	"internal/quality":        {"internal/model", "internal/backend", "internal/num"},
	"internal/text":           {"golang.org/x/text", "github.com/ardanlabs/jinja"},
	"internal/vision":         {"golang.org/x/image"},
	"internal/grammar":        {"github.com/santhosh-tekuri/jsonschema/v6"},
	"internal/engine":         {"internal/model", "internal/backend", "internal/num"},
	"internal/front":          {"internal/text", "internal/vision", "internal/grammar"},
	"internal/server":         {"internal/front", "internal/engine", "github.com/prometheus/client_golang"},
	"internal/web":            {},
	"internal/nano":           {},
	"internal/lint":           {},
	"internal/cli":            {"*"},
}

// rule finds the entry for a package: the longest name that is the package or above it.
func rule(pkg string) ([]string, bool) {
	for {
		if r, ok := allowed[pkg]; ok {
			return r, true
		}
		i := strings.LastIndexByte(pkg, '/')
		if i < 0 {
			return nil, false
		}
		pkg = pkg[:i]
	}
}

func under(pkg, dir string) bool { return pkg == dir || strings.HasPrefix(pkg, dir+"/") }

func permitted(pkg, path string) bool {
	path = strings.TrimPrefix(path, "ninfer/")
	list, _ := rule(pkg)
	for _, a := range list {
		if a == "*" || under(path, a) {
			return true
		}
	}
	// A package may use the ones beside it under the same entry.
	for p := pkg; p != "."; p = filepath.Dir(p) {
		if _, ok := allowed[p]; ok {
			return under(path, p)
		}
	}
	return false
}

// files yields the Go files of the module, tests and other modules excluded.
func files(t *testing.T, root string) map[string][]string {
	byDir := map[string][]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if path != root {
				if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil || strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" {
					return filepath.SkipDir
				}
			}
			return nil
		}
		if strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
			dir, _ := filepath.Rel(root, filepath.Dir(path))
			byDir[filepath.ToSlash(dir)] = append(byDir[filepath.ToSlash(dir)], path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return byDir
}

func TestImports(t *testing.T) {
	for pkg, paths := range files(t, "../..") {
		if strings.HasPrefix(pkg, "tools") {
			continue
		}
		if _, ok := rule(pkg); !ok {
			t.Errorf("package %s has no entry in the import table", pkg)
			continue
		}
		for _, path := range paths {
			f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
			if err != nil {
				t.Fatal(err)
			}
			for _, imp := range f.Imports {
				name, _ := strconv.Unquote(imp.Path.Value)
				first, _, _ := strings.Cut(name, "/")
				if first != "ninfer" && !strings.Contains(first, ".") {
					if name == "C" {
						t.Errorf("%s: cgo", path)
					}
					continue
				}
				if !permitted(pkg, name) {
					t.Errorf("%s: package %s may not import %s", path, pkg, name)
				}
			}
		}
	}
}

func TestPackageComments(t *testing.T) {
	for pkg, paths := range files(t, "../..") {
		documented := false
		for _, path := range paths {
			f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.PackageClauseOnly|parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			documented = documented || f.Doc != nil
		}
		if !documented {
			t.Errorf("package %s has no comment", pkg)
		}
	}
}

// TestModules compares the modules linked into the binary, for every system we build for, with modules.txt: a new dependency is a decision.
func TestModules(t *testing.T) {
	linked := map[string]bool{}
	for _, system := range []string{"linux/amd64", "linux/arm64", "windows/amd64"} {
		goos, goarch, _ := strings.Cut(system, "/")
		cmd := exec.Command("go", "list", "-deps", "-f", "{{with .Module}}{{.Path}} {{.Version}}{{end}}", "ninfer/cmd/ninfer")
		cmd.Env = append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0")
		cmd.Dir = "../.."
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("go list: %v", err)
		}
		for line := range strings.Lines(string(out)) {
			if line = strings.TrimSpace(line); line != "" && line != "ninfer" {
				linked[line] = true
			}
		}
	}
	var got []string
	for m := range linked {
		got = append(got, m)
	}
	slices.Sort(got)
	want, err := os.ReadFile("modules.txt")
	if err != nil {
		t.Fatal(err)
	}
	if text := strings.Join(got, "\n") + "\n"; text != string(want) {
		t.Errorf("modules linked into the binary are\n%s\nmodules.txt has\n%s", text, want)
	}
}
