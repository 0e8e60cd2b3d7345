package server_test

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/front"
)

// The requests of agents, as test/conformance records them: each is served, and what the model sees of it has the calls and results of its
// history in their order.
func TestAgents(t *testing.T) {
	files, err := filepath.Glob("testdata/agents/*.json")
	if err != nil || len(files) < 5 {
		t.Fatalf("%d requests, %v", len(files), err)
	}
	gen := &script{}
	s := start(t, setup{gen: gen, template: thoughts, front: front.Options{Context: 1 << 17}})
	for _, file := range files {
		var sent struct {
			Method  string            `json:"method"`
			Path    string            `json:"path"`
			Headers map[string]string `json:"headers"`
			Body    jsontext.Value    `json:"body"`
		}
		if err := json.Unmarshal(read(t, file), &sent); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if strings.Contains(string(sent.Body), "/tmp") || strings.Contains(string(sent.Body), "/root") {
			t.Errorf("%s has a path of a machine", file)
		}
		var headers []string
		for name, v := range sent.Headers {
			headers = append(headers, name, v)
		}
		gen.ids = tokenizer().Encode("Why.</think>\n\nSo.<|im_end|>")
		a := send(t, sent.Method, s.url+sent.Path, strings.ReplaceAll(string(sent.Body), `"actor"`, `"m"`), headers...)
		if a.status != 200 || deltas(a.body) != "Why.So." {
			t.Errorf("%s: %d %s", file, a.status, a.body)
			continue
		}
		// The history, read here in whatever form it has.
		var want []string
		var walk func(v any)
		walk = func(v any) {
			switch v := v.(type) {
			case []any:
				for _, e := range v {
					walk(e)
				}
			case map[string]any:
				if name, _ := v["name"].(string); name != "" && (v["arguments"] != nil || v["type"] == "tool_use") {
					want = append(want, joinedName(v["namespace"], name))
				}
				if v["role"] == "tool" || v["type"] == "tool_result" || v["type"] == "function_call_output" {
					want = append(want, "[tool|")
				}
				for _, member := range []string{"messages", "input", "content", "tool_calls", "function"} {
					walk(v[member])
				}
			}
		}
		var body any
		if err := json.Unmarshal(sent.Body, &body); err != nil {
			t.Fatal(err)
		}
		walk(body)
		prompt := tokenizer().Decode(gen.last().Prompt)
		rest := prompt
		for _, mark := range want {
			_, after, ok := strings.Cut(rest, mark)
			if !ok {
				t.Errorf("%s: no %s at its place in %s", file, mark, prompt)
				break
			}
			rest = after
		}
		if strings.HasSuffix(strings.TrimSuffix(file, ".json"), "-1") != (len(want) == 0) {
			t.Errorf("%s: %q in the history", file, want)
		}
	}
}

// deltas are the texts of a stream in any of the protocols.
func deltas(body string) string {
	var all strings.Builder
	var walk func(v any, told bool)
	walk = func(v any, told bool) {
		switch v := v.(type) {
		case string:
			if told {
				all.WriteString(v)
			}
		case []any:
			for _, e := range v {
				walk(e, false)
			}
		case map[string]any:
			for name, e := range v {
				walk(e, name == "delta" || told && slices.Contains([]string{"content", "reasoning_content", "text", "thinking"}, name))
			}
		}
	}
	for line := range strings.Lines(body) {
		if data, ok := strings.CutPrefix(line, "data: {"); ok {
			var event any
			if json.Unmarshal([]byte("{"+data), &event) == nil {
				walk(event, false)
			}
		}
	}
	return all.String()
}

// joinedName is how the model sees a tool of a group.
func joinedName(namespace any, name string) string {
	if group, _ := namespace.(string); group != "" {
		return group + "__" + name
	}
	return name
}
