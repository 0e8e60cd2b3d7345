package chat

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/text/token"
)

// root is the repository's root seen from here.
const root = "../../.."

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		t.Skipf("%s is not on this machine", filepath.Base(path))
	}
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// official is the official template, which is not part of the repository.
func official(t testing.TB) *Template {
	t.Helper()
	tmpl, err := NewTemplate("chat_template.jinja", readFile(t, filepath.Join(os.Getenv("NINFER_GOLDEN"), "qwen3.8_chat_template.jinja")))
	if err != nil {
		t.Fatal(err)
	}
	return tmpl
}

// own is a template of the repository's own in the official one's manner.
func own(t testing.TB) *Template {
	t.Helper()
	tmpl, err := NewTemplate("own.jinja", readFile(t, "testdata/own.jinja"))
	if err != nil {
		t.Fatal(err)
	}
	return tmpl
}

// both runs a test on our own template, and on the official one where it is.
func both(t *testing.T, test func(t *testing.T, tmpl *Template)) {
	t.Run("own", func(t *testing.T) { test(t, own(t)) })
	t.Run("official", func(t *testing.T) { test(t, official(t)) })
}

func tokenizer(t testing.TB, dir string) *token.Tokenizer {
	t.Helper()
	tok, err := token.Load(readFile(t, filepath.Join(dir, "tokenizer.json")), readFile(t, filepath.Join(dir, "tokenizer_config.json")))
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func micro(t testing.TB) *token.Tokenizer {
	return tokenizer(t, filepath.Join(root, "testdata", "micro-radixark", "checkpoint"))
}

// vector is a conversation and what Python made of it; see testdata/vectors.py.
type vector struct {
	Name             string                    `json:"name"`
	Messages         jsontext.Value            `json:"messages"`
	Tools            []jsontext.Value          `json:"tools"`
	EnableThinking   *bool                     `json:"enable_thinking"`
	ReasoningEffort  string                    `json:"reasoning_effort"`
	PreserveThinking bool                      `json:"preserve_thinking"`
	AddVisionID      bool                      `json:"add_vision_id"`
	AddPrompt        bool                      `json:"add_generation_prompt"`
	Continue         bool                      `json:"continue"`
	Args             map[string]jsontext.Value `json:"args"`
	Text             *string                   `json:"text"`
	SHA256           string                    `json:"sha256"` // of the text, where its wording is not ours
	Error            string                    `json:"error"`
}

func (v vector) input(t testing.TB) Input {
	t.Helper()
	messages, err := ParseMessages(v.Messages)
	if err != nil {
		t.Fatal(err)
	}
	in := Input{
		Messages: messages, Tools: v.Tools, AddGenerationPrompt: v.AddPrompt, Continue: v.Continue,
		EnableThinking: v.EnableThinking, ReasoningEffort: v.ReasoningEffort,
		PreserveThinking: v.PreserveThinking, AddVisionID: v.AddVisionID,
	}
	for name, value := range v.Args {
		in.Args = append(in.Args, Arg{name, value})
	}
	return in
}

func vectors(t testing.TB, file string, atLeast int) []vector {
	var out []vector
	if err := json.Unmarshal(readFile(t, file), &out); err != nil {
		t.Fatal(err)
	}
	if len(out) < atLeast {
		t.Fatalf("only %d vectors", len(out))
	}
	return out
}

// TestOwn is TestOfficial, smaller, for where the official template is not.
func TestOwn(t *testing.T) {
	tmpl, tok := own(t), micro(t)
	if err := tmpl.Check(tok); err != nil {
		t.Error(err)
	}
	for _, v := range vectors(t, "testdata/own.json", 25) {
		p, err := tmpl.Render(v.input(t))
		if err != nil {
			t.Errorf("%s: %v", v.Name, err)
		} else if p.Text() != *v.Text {
			t.Errorf("%s:\n got %q\nwant %q", v.Name, p.Text(), *v.Text)
		}
	}
}

// productRenders are refusals of the official template that the product renders;
// their expected texts stand under other names, with the template patched.
var productRenders = map[string]bool{"later system refused": true, "no query refused": true}

// TestOfficial compares with Jinja2 on the official template, and checks that the
// ids are those of the whole text wherever no message spells a control token.
func TestOfficial(t *testing.T) {
	tmpl, tok := official(t), micro(t)
	for _, v := range vectors(t, "testdata/official.json", 200) {
		p, err := tmpl.Render(v.input(t))
		if v.SHA256 == "" {
			if productRenders[v.Name] {
				if err != nil {
					t.Errorf("%s: %v", v.Name, err)
				}
				continue
			}
			if err == nil || !strings.Contains(err.Error(), v.Error) {
				// Media in a later system message reads differently; nothing else does.
				t.Errorf("%s: error %v, want %q", v.Name, err, v.Error)
			}
			var raised *RaiseError
			if !errors.As(err, &raised) || raised.Message != v.Error {
				t.Errorf("%s: error %#v is not a RaiseError with %q", v.Name, err, v.Error)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", v.Name, err)
			continue
		}
		if sum := sha256.Sum256([]byte(p.Text())); hex.EncodeToString(sum[:]) != v.SHA256 {
			t.Errorf("%s: %q is not what Python renders (SHA-256 %s)", v.Name, p.Text(), v.SHA256)
			continue
		}
		spelled := slices.ContainsFunc(tok.Controls(), func(c string) bool { return strings.Contains(string(v.Messages), c) })
		if !spelled {
			if got, want := p.Encode(tok), tok.Encode(p.Text()); !slices.Equal(got, want) {
				t.Errorf("%s: ids differ from those of the whole text", v.Name)
			}
		}
	}
}

// TestRenderings has renderings of the official template, written out.
func TestRenderings(t *testing.T) {
	tmpl := official(t)
	off := false
	reasoning := "\nR\n"
	b1 := []Message{
		{Role: "system", Content: TextContent(" S ")},
		{Role: "user", Content: TextContent("Hi\n")},
		{Role: "assistant", Content: TextContent("A"), Reasoning: &reasoning},
		{Role: "user", Content: TextContent("Q")},
	}
	r := "R"
	b2 := []Message{
		{Role: "user", Content: TextContent("Q")},
		{Role: "assistant", Reasoning: &r, ToolCalls: []ToolCall{
			{Name: "f", Arguments: jsontext.Value(`{"x":1, "y":"a b", "z":{"k":[true,null,"é"]}}`)},
			{Name: "g", Arguments: jsontext.Value(`"{}"`)},
		}},
		{Role: "tool", Content: TextContent("one ")},
		{Role: "tool", Content: TextContent("two")},
	}
	const head = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
	tests := []struct {
		name string
		in   Input
		want string
	}{
		{"B.1 thinking", Input{Messages: b1}, head + "A<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\n"},
		{"B.1 preserved", Input{Messages: b1, PreserveThinking: true}, head + "<think>\nR\n</think>\n\nA<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\n"},
		{"B.1 not thinking", Input{Messages: b1, EnableThinking: &off}, head + "A<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"},
		{"B.2", Input{Messages: b2}, "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\nR\n</think>\n\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n" +
			"<parameter=y>\na b\n</parameter>\n<parameter=z>\n{\"k\": [true, null, \"é\"]}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call><|im_end|>\n" +
			"<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"},
	}
	for _, test := range tests {
		test.in.AddGenerationPrompt = true
		test.in.ReasoningEffort = "medium"
		p, err := tmpl.Render(test.in)
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
		} else if p.Text() != test.want {
			t.Errorf("%s:\n got %q\nwant %q", test.name, p.Text(), test.want)
		}
	}
	_, err := tmpl.Render(Input{Messages: b2, ReasoningEffort: "high"})
	if err == nil || !strings.Contains(err.Error(), "xhigh (default), medium, and low") {
		t.Errorf("B.3: %v", err)
	}
}

// TestJinja compares small templates with Jinja2, both as they are and marked.
func TestJinja(t *testing.T) {
	var rows []struct {
		Data     jsontext.Value `json:"data"`
		Template string         `json:"template"`
		Text     string         `json:"text"`
	}
	if err := json.Unmarshal(readFile(t, "testdata/jinja.json"), &rows); err != nil {
		t.Fatal(err)
	}
	var args []Arg
	dec := jsontext.NewDecoder(strings.NewReader(string(rows[0].Data)))
	dec.ReadToken()
	for dec.PeekKind() != '}' {
		name, err := dec.ReadToken()
		if err != nil {
			t.Fatal(err)
		}
		key := name.String()
		value, err := dec.ReadValue()
		if err != nil {
			t.Fatal(err)
		}
		args = append(args, Arg{key, value.Clone()})
	}
	for _, row := range rows[1:] {
		tmpl, err := NewTemplate("t", []byte(row.Template))
		if err != nil {
			t.Errorf("%q: %v", row.Template, err)
			continue
		}
		p, err := tmpl.Render(Input{Args: args})
		if err != nil {
			t.Errorf("%q: %v", row.Template, err)
		} else if p.Text() != row.Text {
			t.Errorf("%q:\n got %q\nwant %q", row.Template, p.Text(), row.Text)
		}
	}
}

// TestGolden renders, encodes and decodes the chat cases of the golden folders,
// which the reference implementation wrote.
func TestGolden(t *testing.T) {
	dirs := []string{filepath.Join(root, "testdata", "micro-radixark")}
	for _, name := range []string{"micro-radixark", "micro-swift", "micro-mixed", "mini-radixark"} {
		dirs = append(dirs, filepath.Join(os.Getenv("NINFER_GOLDEN"), name))
	}
	for _, dir := range dirs {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			var golden struct {
				Cases map[string]struct {
					Tokens         []int32        `json:"tokens"`
					Greedy         []int32        `json:"greedy"`
					Messages       jsontext.Value `json:"messages"`
					EnableThinking *bool          `json:"enable_thinking"`
					Prompt         string         `json:"prompt"`
					Text           string         `json:"text"`
				} `json:"cases"`
			}
			if err := json.Unmarshal(readFile(t, filepath.Join(dir, "golden.json")), &golden); err != nil {
				t.Fatal(err)
			}
			tok := tokenizer(t, filepath.Join(dir, "checkpoint"))
			tmpl, err := NewTemplate("chat_template.jinja", readFile(t, filepath.Join(dir, "checkpoint", "chat_template.jinja")))
			if err != nil {
				t.Fatal(err)
			}
			if err := tmpl.Check(tok); err != nil {
				t.Error(err)
			}
			for _, name := range []string{"chat_think", "chat_plain"} {
				c, ok := golden.Cases[name]
				if !ok {
					t.Fatalf("no case %s", name)
				}
				messages, err := ParseMessages(c.Messages)
				if err != nil {
					t.Fatal(err)
				}
				p, err := tmpl.Render(Input{Messages: messages, AddGenerationPrompt: true, EnableThinking: c.EnableThinking})
				if err != nil {
					t.Fatal(err)
				}
				if p.Text() != c.Prompt {
					t.Errorf("%s: prompt %q, want %q", name, p.Text(), c.Prompt)
				}
				if ids := p.Encode(tok); !slices.Equal(ids, c.Tokens) {
					t.Errorf("%s: ids %v, want %v", name, ids, c.Tokens)
				}
				if text := tok.Decode(c.Greedy); text != c.Text {
					t.Errorf("%s: decoded %q, want %q", name, text, c.Text)
				}
			}
		})
	}
}
