package server_test

import (
	"encoding/json/v2"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const weather = `"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"x":{"type":"integer"},"city":{"type":"string"}}}}}]`

func called(args ...string) string {
	s := "<tool_call>\n<function=f>\n"
	for i := 0; i < len(args); i += 2 {
		s += "<parameter=" + args[i] + ">\n" + args[i+1] + "\n</parameter>\n"
	}
	return s + "</function>\n</tool_call>"
}

// Calls in the order and shapes of docs/serving.md, Tools, and text wherever there are none.
func TestToolCalls(t *testing.T) {
	gen := &script{}
	s := start(t, setup{gen: gen})
	two := called("x", "1") + "\n" + called("x", "2", "city", "03106")
	call := func(index, args string) string {
		return `{` + index + `"id":"CALL","type":"function","function":{"name":"f","arguments":` + args + `}}`
	}
	first, second := `"{\"x\":1}"`, `"{\"x\":2,\"city\":\"03106\"}"`
	both := "[" + call("", first) + "," + call("", second) + "]"
	streamed := "[" + call(`"index":0,`, first) + "," + call(`"index":1,`, second) + "]"
	for _, c := range []struct {
		name, members, say string
		limit              bool // cut instead of ended by the model
		content, reasoning string
		calls, deltas      string // JSON, or empty
		finish             string
		warning            string
	}{
		{name: "text, then two", say: "Two look-ups.</think>\n\nChecking both.\n\n" + two, content: `"Checking both."`, reasoning: "Two look-ups.", calls: both, deltas: streamed, finish: "tool_calls"},
		{name: "only a call", members: `,"enable_thinking":false`, say: called("x", "1"), content: "null", calls: "[" + call("", first) + "]", deltas: "[" + call(`"index":0,`, first) + "]", finish: "tool_calls"},
		{name: "cut behind a call", members: `,"enable_thinking":false`, say: called("x", "1"), limit: true, content: "null", calls: "[" + call("", first) + "]", deltas: "[" + call(`"index":0,`, first) + "]", finish: "length"},
		{name: "cut in the second", members: `,"enable_thinking":false`, say: called("x", "1") + "\n<tool_call>\n<function=f>", limit: true, content: "TEXT", finish: "length", warning: "malformed_structure"},
		{name: "in the reasoning", say: "<tool_call>" + called("x", "1") + "</think>\n\nA", reasoning: "<tool_call>" + called("x", "1"), content: `"A"`, finish: "stop"},
		{name: "text after", members: `,"enable_thinking":false`, say: "A\n" + called("x", "1") + "\nB", content: "TEXT", finish: "stop", warning: "trailing_content"},
		{name: "undeclared", members: `,"enable_thinking":false`, say: strings.Replace(called("x", "1"), "=f>", "=g>", 1), content: "TEXT", finish: "stop", warning: "undeclared_tool"},
		{name: "no choice", members: `,"enable_thinking":false,"tool_choice":"none"`, say: called("x", "1"), content: "TEXT", finish: "stop"},
		{name: "ended by a stop string", members: `,"enable_thinking":false,"stop":"END"`, say: called("x", "1") + "END", content: "null", calls: "[" + call("", first) + "]", deltas: "[" + call(`"index":0,`, first) + "]", finish: "stop"},
		{name: "cut by a stop string", members: `,"enable_thinking":false,"stop":"</function>"`, say: called("x", "1"), content: `"<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n"`, finish: "stop", warning: "malformed_structure"},
	} {
		t.Run(c.name, func(t *testing.T) {
			gen.ids = tokenizer().Encode(c.say)
			if !c.limit {
				gen.ids = append(gen.ids, tokenizer().Encode("<|im_end|>")...)
			}
			content := c.content
			if content == "TEXT" {
				b, _ := json.Marshal(c.say)
				content = string(b)
			}
			body := `{"messages":[{"role":"user","content":"Q"}],` + weather + c.members
			ids := regexp.MustCompile(`"call_[0-9a-f]{16}"`)
			before := s.log.String()
			a := s.chat(t, body+"}")
			want := `"message":{"role":"assistant","content":` + content + `,"refusal":null`
			if c.reasoning != "" {
				b, _ := json.Marshal(c.reasoning)
				want += `,"reasoning_content":` + string(b)
			}
			if c.calls != "" {
				want += `,"tool_calls":` + c.calls
			}
			want += fmt.Sprintf(`},"logprobs":null,"finish_reason":%q}]`, c.finish)
			if found := ids.FindAllString(a.body, -1); len(found) > 1 && found[0] == found[1] {
				t.Errorf("one id for two calls: %v", found)
			}
			if got := ids.ReplaceAllString(a.body, `"CALL"`); a.status != 200 || !strings.Contains(got, want) {
				t.Errorf("%d %s\nwant %s", a.status, got, want)
			}

			a = s.chat(t, body+`,"stream":true}`)
			var told []string // kinds of deltas, in order
			texts := map[string]string{}
			finish := ""
			for line := range strings.Lines(ids.ReplaceAllString(a.body, `"CALL"`)) {
				data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: {")
				if !ok {
					continue
				}
				var chunk struct {
					Choices []struct {
						Delta  map[string]any `json:"delta"`
						Finish *string        `json:"finish_reason"`
					} `json:"choices"`
				}
				if err := json.Unmarshal([]byte("{"+data), &chunk); err != nil {
					t.Fatal(err)
				}
				for name, v := range chunk.Choices[0].Delta {
					switch {
					case name == "tool_calls":
						want := `"delta":{"tool_calls":` + c.deltas + `}`
						if !strings.Contains(data, want) {
							t.Errorf("%s\nwant %s", data, want)
						}
					case name == "role" || v == "":
						continue
					default:
						texts[name] += v.(string)
					}
					if n := len(told); n == 0 || told[n-1] != name || name == "tool_calls" {
						told = append(told, name)
					}
				}
				if f := chunk.Choices[0].Finish; f != nil {
					finish = *f
				}
			}
			order := []string{}
			if c.reasoning != "" {
				order = append(order, "reasoning_content")
			}
			if content != "null" {
				order = append(order, "content")
			}
			if c.calls != "" {
				order = append(order, "tool_calls")
			}
			text, _ := json.Marshal(texts["content"])
			if content == "null" {
				text = []byte("null")
			}
			if !slices.Equal(told, order) || finish != c.finish || texts["reasoning_content"] != c.reasoning || string(text) != content {
				t.Errorf("told %v, finish %s, %q; want %v, %s", told, finish, texts, order, c.finish)
			}
			log := strings.TrimPrefix(s.log.String(), before)
			if got := strings.Count(log, "warning  tool calls left as text"); got != 2*min(len(c.warning), 1) || c.warning != "" && !strings.Contains(log, "reason "+c.warning) {
				t.Errorf("log:\n%s", log)
			}
		})
	}
}

// A call that was returned can be sent back as it is: the model then sees what it wrote, member for member and digit for digit.
func TestToolReplay(t *testing.T) {
	gen := &script{}
	s := start(t, setup{gen: gen, template: efforts})
	gen.ids = tokenizer().Encode("</think>" + called("city", "a \"b\"", "x", "2.50") + "<|im_end|>")
	a := s.chat(t, `{"messages":[{"role":"user","content":"Q"}],`+weather+`}`)
	var answer struct {
		Choices []struct {
			Message struct {
				ToolCalls []any `json:"tool_calls"`
			} `json:"message"`
		} `json:"choices"`
	}
	if err := json.Unmarshal([]byte(a.body), &answer); err != nil || len(answer.Choices[0].Message.ToolCalls) != 1 {
		t.Fatalf("%v in %s", err, a.body)
	}
	calls, _ := json.Marshal(answer.Choices[0].Message.ToolCalls)
	id := regexp.MustCompile(`call_[0-9a-f]{16}`).FindString(a.body)
	if a := s.chat(t, `{"messages":[{"role":"user","content":"Q"},{"role":"assistant","content":null,"tool_calls":`+string(calls)+`},{"role":"tool","tool_call_id":"`+id+`","content":"one"}],`+weather+`}`); a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	prompt := tokenizer().Decode(gen.last().Prompt)
	if !strings.Contains(prompt, `{"city": "a \"b\"", "x": 2.50}`) || !strings.Contains(prompt, "<|im_start|>tool\none<|im_end|>") {
		t.Errorf("prompt %q", prompt)
	}
}
