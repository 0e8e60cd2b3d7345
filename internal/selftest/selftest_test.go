package selftest_test

import (
	"context"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
	"ninfer/internal/selftest"
	"ninfer/internal/text/chat"
	"ninfer/internal/text/token"
)

const micro = "../../testdata/micro-radixark"

func subject(t *testing.T) selftest.Subject {
	read := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join(micro, "checkpoint", name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	tok, err := token.Load(read("tokenizer.json"), read("tokenizer_config.json"))
	if err != nil {
		t.Fatal(err)
	}
	tpl, err := chat.NewTemplate("chat_template.jinja", read("chat_template.jinja"))
	if err != nil {
		t.Fatal(err)
	}
	return selftest.Subject{Model: modeltest.Micro(t), Tokenizer: tok, Template: tpl}
}

// folder copies the golden folder with some of its cases, changed by edit.
func folder(t *testing.T, edit func(cases map[string]map[string]jsontext.Value), names ...string) string {
	dir := t.TempDir()
	raw, err := os.ReadFile(filepath.Join(micro, "golden.json"))
	if err != nil {
		t.Fatal(err)
	}
	var meta map[string]jsontext.Value
	if err := json.Unmarshal(raw, &meta); err != nil {
		t.Fatal(err)
	}
	var cases map[string]map[string]jsontext.Value
	if err := json.Unmarshal(meta["cases"], &cases); err != nil {
		t.Fatal(err)
	}
	for name := range cases {
		if !slices.Contains(names, name) {
			delete(cases, name)
		}
	}
	if edit != nil {
		edit(cases)
	}
	out, err := json.Marshal(map[string]any{"cases": cases})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "golden.json"), out, 0o644); err != nil {
		t.Fatal(err)
	}
	abs, err := filepath.Abs(filepath.Join(micro, "golden.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(abs, filepath.Join(dir, "golden.safetensors")); err != nil {
		t.Skip(err)
	}
	return dir
}

func exact(bound float64) selftest.Backend {
	return selftest.Backend{Name: "exact", Bound: bound, Decisions: true, Open: func(m *model.Model, tokens int) (backend.Device, error) {
		return cpu.NewOracle(cpu.Options{States: m.States, Lanes: 1, Tokens: tokens, Carry: tokens}), nil
	}}
}

func run(t *testing.T, s selftest.Subject, dir string, b selftest.Backend) (bool, []string) {
	t.Helper()
	var lines []string
	ok, err := selftest.Run(context.Background(), s, dir, []selftest.Backend{b}, func(l selftest.Line) { lines = append(lines, l.String()) })
	if err != nil {
		t.Fatal(err)
	}
	return ok, lines
}

func TestPasses(t *testing.T) {
	ok, lines := run(t, subject(t), folder(t, nil, "one", "short", "chat_think", "image"), exact(1e-5))
	if !ok || len(lines) != 4 {
		t.Errorf("ok %v:\n%s", ok, strings.Join(lines, "\n"))
	}
	if !strings.Contains(strings.Join(lines, "\n"), "image       skip") {
		t.Error("the picture is not said to be skipped")
	}
}

// Whatever is compared can fail.
func TestFails(t *testing.T) {
	s := subject(t)
	for name, c := range map[string]struct {
		edit func(map[string]map[string]jsontext.Value)
		b    selftest.Backend
		want string
	}{
		"bound": {nil, exact(1e-12), "logits off by"},
		"greedy": {func(c map[string]map[string]jsontext.Value) {
			c["short"]["greedy"] = jsontext.Value(`[145]`)
			c["short"]["margin"] = jsontext.Value(`[9]`)
		}, exact(1e-5), "greedy token 0 is 144, recorded is 145"},
		"draft": {func(c map[string]map[string]jsontext.Value) {
			c["short"]["drafts"] = jsontext.Value(`[126,463,20]`)
		}, exact(1e-5), "draft 2 is 19, recorded is 20"},
		"prompt": {func(c map[string]map[string]jsontext.Value) {
			c["chat_think"]["prompt"] = jsontext.Value(`"other"`)
		}, exact(1e-5), "recorded is \"other\""},
		"text": {func(c map[string]map[string]jsontext.Value) {
			c["chat_think"]["text"] = jsontext.Value(`"other"`)
		}, exact(1e-5), "continuation decodes to"},
	} {
		names := []string{"short"}
		if name == "prompt" || name == "text" {
			names = []string{"chat_think"}
		}
		ok, lines := run(t, s, folder(t, c.edit, names...), c.b)
		if text := strings.Join(lines, "\n"); ok || !strings.Contains(text, "FAIL") || !strings.Contains(text, c.want) {
			t.Errorf("%s: ok %v, want %q in\n%s", name, ok, c.want, text)
		}
	}
}

// A backend that keeps BF16 values is held against an oracle that rounds alike. The exact one is far enough from that to break bounds of
// half its distance, and near enough to keep those of a GPU.
func TestStored(t *testing.T) {
	backend := func(own, alike bool, worst, median, freeMedian float64) selftest.Backend {
		open := func(stored bool) func(*model.Model, int) (backend.Device, error) {
			return func(m *model.Model, tokens int) (backend.Device, error) {
				return cpu.NewOracle(cpu.Options{States: m.States, Lanes: 1, Tokens: tokens, Carry: tokens, Stored: stored}), nil
			}
		}
		return selftest.Backend{Name: "it", Open: open(own), Stored: &selftest.Stored{
			Open: open(alike), Worst: worst, Median: median, Draft: 2e-2, FreeMedian: freeMedian, Near: 2e-2, Share: 0.9,
		}}
	}
	s, dir := subject(t), folder(t, nil, "one", "short")
	for _, c := range []struct {
		b    selftest.Backend
		want string // what is broken, or empty
	}{
		{backend(true, true, 1e-12, 1e-12, 2e-2), ""},
		{backend(false, true, 5e-2, 2e-2, 1e-4), ""}, // the exact oracle is the recorded reference to 1e-5
		{backend(false, true, 1e-3, 1e-3, 1e-4), "with forced decisions off by"},
	} {
		ok, lines := run(t, s, dir, c.b)
		text := strings.Join(lines, "\n")
		if ok != (c.want == "") || !strings.Contains(text, c.want) || len(lines) != 3 || !strings.Contains(text, "all rows") || !strings.Contains(text, "15 rows") {
			t.Errorf("ok %v, want %q in\n%s", ok, c.want, text)
		}
	}
}

func TestBadFolders(t *testing.T) {
	s := subject(t)
	broken := folder(t, func(c map[string]map[string]jsontext.Value) { c["one"]["tokens"] = jsontext.Value(`[]`) }, "one")
	for _, dir := range []string{t.TempDir(), "absent", broken} {
		_, err := selftest.Run(context.Background(), s, dir, nil, func(selftest.Line) {})
		if err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", dir, err)
		}
	}
}
