package lint

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// text is a passage that people read: a comment, or a line of a document, and the line where it begins.
type text struct {
	file string
	line int
	text string
}

// comments yields the comments of a source file, neighbouring lines joined, and the lines of anything else.
func comments(path string, src []byte) ([]text, error) {
	switch filepath.Ext(path) {
	case ".go":
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, path, src, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		var out []text
		for _, c := range f.Comments {
			out = append(out, text{path, set.Position(c.Pos()).Line, strings.Join(strings.Fields(c.Text()), " ")})
		}
		return out, nil
	case ".cu", ".cuh", ".h", ".js", ".s":
		return marked(path, src, "//"), nil
	case ".py", ".sh":
		return marked(path, src, "#"), nil
	}
	return marked(path, src, ""), nil
}

// marked joins what follows the mark in neighbouring lines.
func marked(path string, src []byte, mark string) []text {
	var out []text
	last := -2 // the line of the latest
	for i, line := range strings.Split(string(src), "\n") {
		_, comment, ok := strings.Cut(line, mark)
		switch {
		case !ok:
		case last == i-1 && mark != "":
			out[len(out)-1].text += " " + strings.TrimSpace(comment)
			last = i
		default:
			out = append(out, text{path, i + 1, strings.TrimSpace(comment)})
			last = i
		}
	}
	return out
}

var (
	document = regexp.MustCompile(`[\w./-]*\w\.md\b`)
	section  = regexp.MustCompile("^`?,? (\\d+(?:\\.\\d+)*)(?:(?:,| and| to) (\\d+(?:\\.\\d+)+))*")
	number   = regexp.MustCompile(`\d+(?:\.\d+)*`)
	title    = regexp.MustCompile("^`?, (([A-Z][\\w-]*).*)")
	path     = regexp.MustCompile("`((?:cmd|docs|internal|test|testdata|tools)/[\\w./-]*)")
	heading  = regexp.MustCompile(`(?m)^(?:#+ |\*\*)(?:(\d+(?:\.\d+)*)[. ])?(.*)$`)
)

// reference says what is wrong with what a text cites: documents of this repository by their path from its root, or from the file's own
// folder, and of docs/ sections by number ("docs/format.md 1.3") or title ("docs/serving.md, Load"); nothing else ending in .md. Paths in
// backquotes that begin with a folder of the root are there too.
func reference(root, file, s string) []string {
	var wrong []string
	for _, at := range document.FindAllStringIndex(s, -1) {
		name, rest := s[at[0]:at[1]], s[at[1]:]
		doc, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			doc, err = os.ReadFile(filepath.Join(filepath.Dir(file), name))
		}
		if err != nil {
			wrong = append(wrong, name+" is not in the repository")
			continue
		}
		numbers, titles := map[string]bool{}, []string{}
		for _, h := range heading.FindAllStringSubmatch(string(doc), -1) {
			numbers[h[1]] = true
			titles = append(titles, strings.Trim(h[2], "*` "))
		}
		if m := section.FindString(rest); m != "" {
			for _, n := range number.FindAllString(m, -1) {
				if !numbers[n] {
					wrong = append(wrong, name+" has no section "+n)
				}
			}
		}
		if m := title.FindStringSubmatch(rest); m != nil {
			found := false
			for _, t := range titles {
				t, _, _ = strings.Cut(t, ":")
				found = found || t != "" && strings.HasPrefix(m[1], t)
			}
			if !found {
				wrong = append(wrong, name+" has no section "+m[2])
			}
		}
	}
	for _, m := range path.FindAllStringSubmatch(s, -1) {
		if list, _ := filepath.Glob(filepath.Join(root, m[1])); list == nil {
			wrong = append(wrong, m[1]+" is not in the repository")
		}
	}
	return wrong
}

// TestReferences: what comments and documents cite is there.
func TestReferences(t *testing.T) {
	const root = "../.."
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if path != root && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" || d.Name() == "bin") {
				return filepath.SkipDir
			}
			return nil
		}
		switch filepath.Ext(path) {
		case ".go", ".cu", ".cuh", ".h", ".js", ".s", ".py", ".sh", ".md":
		default:
			return nil
		}
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		list, err := comments(path, src)
		if err != nil {
			return err
		}
		for _, c := range list {
			for _, w := range reference(root, path, c.text) {
				t.Errorf("%s:%d: %s", path, c.line, w)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// What a reference must look like, by references to this repository's own documents.
func TestReference(t *testing.T) {
	for s, want := range map[string]string{
		"README.md": "",
		"as docs/format.md 1.3, 4.1.2 and 5.7 say":    "",
		"(docs/format.md 3.2 to 3.7)":                 "",
		"docs/format.md 9.9":                          "docs/format.md has no section 9.9",
		"docs/format.md 1.3 and 1.33":                 "docs/format.md has no section 1.33",
		"docs/serving.md, Sampling defaults":          "",
		"docs/serving.md, Nonsense":                   "docs/serving.md has no section Nonsense",
		"the rules of product.md 7.2":                 "product.md is not in the repository",
		"`docs/serving.md`, Nonsense":                 "docs/serving.md has no section Nonsense",
		"`docs/serving.md`, Load; `tools/nano`":       "",
		"`internal/none/x.go` and `ninfer serve`":     "internal/none/x.go is not in the repository",
		"see kernels.md":                              "kernels.md is not in the repository",
		"docs/kernels.md says, docs/none.md does not": "docs/none.md is not in the repository",
	} {
		if got := strings.Join(reference("../..", "lint_test.go", s), "; "); got != want {
			t.Errorf("%q: %q, want %q", s, got, want)
		}
	}
	// Strings are no comments, and neighbouring lines are one.
	src := "package p\n\nvar s = \"none.md\"\n\n// See docs/format.md\n// 9.9.\nvar t int\n"
	list, err := comments("p.go", []byte(src))
	if err != nil || len(list) != 1 || list[0].line != 5 || list[0].text != "See docs/format.md 9.9." {
		t.Errorf("comments %+v, %v", list, err)
	}
	if list := marked("k.cu", []byte("a // one\nb // two\nc\n// three"), "//"); len(list) != 2 || list[0].text != "one two" || list[1].line != 4 {
		t.Errorf("comments %+v", list)
	}
}
