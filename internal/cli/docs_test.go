package cli

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

// Options and commands that the documents name are there, and a command that is written out has its options. What other programs have
// is listed here; documents about kernels name many and are only asked for commands.
func TestDocumentedOptions(t *testing.T) {
	others := []string{"auth-type"}
	parser, err := kong.New(&commands{})
	if err != nil {
		t.Fatal(err)
	}
	all, of := map[string]bool{}, map[string]map[string]bool{}
	for _, node := range parser.Model.Leaves(false) {
		of[node.Name] = map[string]bool{}
		for _, group := range node.AllFlags(false) {
			for _, f := range group {
				for _, name := range append(slices.Clone(f.Aliases), f.Name) {
					all[name], of[node.Name][name] = true, true
				}
			}
		}
	}
	option := regexp.MustCompile(`(?:^|[^\w-])--([a-z][a-z0-9-]*)`)
	command := regexp.MustCompile("`ninfer ([a-z]+)([^`]*)")
	docs, err := filepath.Glob("../../docs/*.md")
	if err != nil || len(docs) == 0 {
		t.Fatal(err)
	}
	seen := 0
	for _, path := range append(docs, "../../README.md", "../../CONTRIBUTING.md") {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		kernels := strings.HasSuffix(path, "kernels.md") || strings.HasSuffix(path, "ladders.md")
		fenced := false
		for i, line := range strings.Split(string(text), "\n") {
			if strings.HasPrefix(line, "```") {
				fenced = !fenced
			}
			if fenced {
				line = "`" + line
			}
			if strings.Contains(line, "-->") { // an arrow
				continue
			}
			for _, m := range option.FindAllStringSubmatch(line, -1) {
				seen++
				if !kernels && !all[m[1]] && !slices.Contains(others, m[1]) {
					t.Errorf("%s:%d: no command has --%s", path, i+1, m[1])
				}
			}
			for _, m := range command.FindAllStringSubmatch(line, -1) {
				if of[m[1]] == nil {
					t.Errorf("%s:%d: there is no command %s", path, i+1, m[1])
					continue
				}
				for _, o := range option.FindAllStringSubmatch(m[2], -1) {
					if !of[m[1]][o[1]] {
						t.Errorf("%s:%d: ninfer %s has no --%s", path, i+1, m[1], o[1])
					}
				}
			}
		}
	}
	if seen < 100 {
		t.Errorf("only %d options found in the documents", seen)
	}
}
