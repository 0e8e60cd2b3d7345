package server_test

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/front"
)

func (s *site) responses(t testing.TB, body string) answer {
	t.Helper()
	return send(t, "POST", s.url+"/v1/responses", body)
}

// flat are the tools of weather in the form of Responses.
const flat = `"tools":[{"type":"function","name":"f","parameters":{"type":"object","properties":{"x":{"type":"integer"},"city":{"type":"string"}}}}]`

// told is an event of a stream: its name and its members.
type told struct {
	name string
	Type string `json:"type"`
	// Pointers tell what is there.
	Sequence     *int           `json:"sequence_number"`
	Response     jsontext.Value `json:"response"`
	ItemID       string         `json:"item_id"`
	OutputIndex  *int           `json:"output_index"`
	ContentIndex *int           `json:"content_index"`
	Item         *toldItem      `json:"item"`
	Part         *toldPart      `json:"part"`
	Delta        *string        `json:"delta"`
	Text         *string        `json:"text"`
	Name         string         `json:"name"`
	Arguments    *string        `json:"arguments"`
	Logprobs     jsontext.Value `json:"logprobs"`
}

type toldItem struct {
	ID        string         `json:"id"`
	Type      string         `json:"type"`
	Status    string         `json:"status"`
	Role      string         `json:"role"`
	Summary   jsontext.Value `json:"summary"`
	Content   []toldPart     `json:"content"`
	Arguments string         `json:"arguments"`
	CallID    string         `json:"call_id"`
	Name      string         `json:"name"`
	Namespace string         `json:"namespace"`
}

type toldPart struct {
	Type        string         `json:"type"`
	Text        string         `json:"text"`
	Annotations jsontext.Value `json:"annotations"`
	Logprobs    jsontext.Value `json:"logprobs"`
}

type toldResponse struct {
	ID         string         `json:"id"`
	Status     string         `json:"status"`
	Error      jsontext.Value `json:"error"`
	Incomplete jsontext.Value `json:"incomplete_details"`
	Output     []toldItem     `json:"output"`
	Usage      *struct {
		Input        int `json:"input_tokens"`
		InputDetails struct {
			Cached int `json:"cached_tokens"`
		} `json:"input_tokens_details"`
		Output        int `json:"output_tokens"`
		OutputDetails struct {
			Reasoning int `json:"reasoning_tokens"`
		} `json:"output_tokens_details"`
		Total int `json:"total_tokens"`
	} `json:"usage"`
}

// streamed takes the events of a stream apart.
func streamed(t testing.TB, body string) []told {
	t.Helper()
	var events []told
	for frame := range strings.SplitSeq(strings.TrimSuffix(body, "\n\n"), "\n\n") {
		if strings.HasPrefix(frame, ":") {
			continue
		}
		head, data, ok := strings.Cut(frame, "\ndata: ")
		name, ok2 := strings.CutPrefix(head, "event: ")
		e := told{name: name}
		if err := json.Unmarshal([]byte(data), &e, json.RejectUnknownMembers(true)); !ok || !ok2 || err != nil {
			t.Fatalf("not an event: %q, %v", frame, err)
		}
		events = append(events, e)
	}
	return events
}

var responseIDs = regexp.MustCompile(`"(resp|rs|msg|fc|call|fco)_[0-9a-f]{32}"|"(created|completed)_at":[0-9]+`)

// Every order of events of OpenAI's Responses API, and that the object at the end is what the whole answer is.
func TestResponseEvents(t *testing.T) {
	gen := &script{}
	s := start(t, setup{gen: gen})
	two := called("x", "1") + "\n" + called("x", "2", "city", "03106")
	reasoning := []string{"added reasoning", "part", "reasoning_text.delta", "reasoning_text.done", "part.done", "done reasoning"}
	message := []string{"added message", "part", "output_text.delta", "output_text.done", "part.done", "done message"}
	call := []string{"added function_call", "function_call_arguments.delta", "function_call_arguments.done", "done function_call"}
	plain := `,"chat_template_kwargs":{"enable_thinking":false}`
	for _, c := range []struct {
		name, members, say string
		limit              bool // cut instead of ended by the model
		want               []string
		texts              []string // of the items: text or arguments
		last               string   // status of the last item, if it is not completed
		end                string
	}{
		{name: "A.2: reasoning, then a call", members: "," + flat, say: "Two.</think>\n\n" + called("x", "1"), want: slices.Concat(reasoning, call), texts: []string{"Two.", `{"x":1}`}, end: "completed"},
		{name: "text", members: plain, say: "Hello 🙂.", want: message, texts: []string{"Hello 🙂."}, end: "completed"},
		{name: "reasoning and text", say: "So.</think>\n\nHello.", want: slices.Concat(reasoning, message), texts: []string{"So.", "Hello."}, end: "completed"},
		{name: "text and calls", members: plain + "," + flat, say: "Look:\n\n" + two, want: slices.Concat(message, call, call), texts: []string{"Look:", `{"x":1}`, `{"x":2,"city":"03106"}`}, end: "completed"},
		{name: "all", members: "," + flat, say: "So.</think>\n\nLook:\n\n" + two, want: slices.Concat(reasoning, message, call, call), texts: []string{"So.", "Look:", `{"x":1}`, `{"x":2,"city":"03106"}`}, end: "completed"},
		{name: "one call at most", members: `,"parallel_tool_calls":false,` + flat, say: "So.</think>\n\n" + two, want: slices.Concat(reasoning, call), texts: []string{"So.", `{"x":1}`}, end: "completed"},
		{name: "only a call", members: plain + "," + flat, say: called("x", "1"), want: call, texts: []string{`{"x":1}`}, end: "completed"},
		{name: "calls that are text", members: plain + "," + flat, say: called("x", "1") + " more", want: message, texts: []string{called("x", "1") + " more"}, end: "completed"},
		{name: "calls that are not wanted", members: plain + `,"tool_choice":"none",` + flat, say: called("x", "1"), want: message, texts: []string{called("x", "1")}, end: "completed"},
		{name: "nothing", members: plain, say: "", want: slices.DeleteFunc(slices.Clone(message), func(s string) bool { return strings.HasSuffix(s, ".delta") }), texts: []string{""}, end: "completed"},
		{name: "no reasoning, nothing", say: "</think>", want: slices.DeleteFunc(slices.Clone(message), func(s string) bool { return strings.HasSuffix(s, ".delta") }), texts: []string{""}, end: "completed"},
		{name: "only reasoning", say: "So.</think>", want: reasoning, texts: []string{"So."}, end: "completed"},
		{name: "ended in the reasoning", say: "So.", want: reasoning, texts: []string{"So."}, end: "completed"},
		{name: "cut in the reasoning", say: "So long", limit: true, want: reasoning, texts: []string{"So long"}, last: "incomplete", end: "incomplete"},
		{name: "cut in the text", say: "So.</think>\n\nHello", limit: true, want: slices.Concat(reasoning, message), texts: []string{"So.", "Hello"}, last: "incomplete", end: "incomplete"},
		{name: "cut behind the reasoning", say: "So.</think>", limit: true, want: reasoning, texts: []string{"So."}, end: "incomplete"},
		{name: "cut behind a call", members: plain + "," + flat, say: called("x", "1"), limit: true, want: call, texts: []string{`{"x":1}`}, end: "incomplete"},
		{name: "no output asked for", members: `,"max_output_tokens":0`, say: "x", end: "incomplete"},
	} {
		t.Run(c.name, func(t *testing.T) {
			gen.ids = tokenizer().Encode(c.say)
			if !c.limit {
				gen.ids = append(gen.ids, tokenizer().Encode("<|im_end|>")...)
			}
			body := `{"model":"m","input":"Q"` + c.members
			whole := s.responses(t, body+"}")
			if whole.status != 200 {
				t.Fatalf("%d %s", whole.status, whole.body)
			}
			stream := s.responses(t, body+`,"stream":true}`)
			if kind := stream.header.Get("Content-Type"); kind != "text/event-stream" || strings.Contains(stream.body, "[DONE]") {
				t.Errorf("%s: %s", kind, stream.body)
			}
			events := streamed(t, stream.body)
			var got []string
			var texts []string
			item, text := -1, ""
			id := ""
			for i, e := range events {
				if e.Sequence == nil || *e.Sequence != i || e.name != e.Type {
					t.Errorf("event %d is %s, %s with number %v", i, e.name, e.Type, e.Sequence)
				}
				name, _ := strings.CutPrefix(e.Type, "response.")
				switch name {
				case "created", "in_progress", "completed", "incomplete":
					if e.Response == nil {
						t.Errorf("%s has no response", name)
					}
				case "output_item.added":
					if item++; *e.OutputIndex != item || e.Item.Status != "in_progress" || e.Item.Arguments != "" || len(e.Item.Content) != 0 {
						t.Errorf("%s %d: %+v", name, *e.OutputIndex, e.Item)
					}
					id, text = e.Item.ID, ""
					name = "added " + e.Item.Type
				case "output_item.done":
					status := "completed"
					if item == len(c.texts)-1 && c.last != "" {
						status = c.last
					}
					whole := e.Item.Arguments
					if len(e.Item.Content) == 1 {
						whole = e.Item.Content[0].Text
					}
					if *e.OutputIndex != item || e.Item.ID != id || e.Item.Status != status || whole != text {
						t.Errorf("%s %d: %+v, told %q", name, *e.OutputIndex, e.Item, text)
					}
					texts = append(texts, whole)
					name = "done " + e.Item.Type
				default:
					inText := !strings.HasPrefix(name, "function_call")
					if e.ItemID != id || *e.OutputIndex != item || (e.ContentIndex != nil) != inText || inText && *e.ContentIndex != 0 {
						t.Errorf("%s of %s at %d, %v", name, e.ItemID, *e.OutputIndex, e.ContentIndex)
					}
					switch {
					case e.Delta != nil:
						if text += *e.Delta; *e.Delta == "" {
							t.Errorf("%s is empty", name)
						}
					case e.Text != nil && *e.Text != text, e.Arguments != nil && *e.Arguments != text, name == "content_part.done" && e.Part.Text != text:
						t.Errorf("%s: %+v, told %q", name, e, text)
					}
					name = strings.Replace(name, "content_part.added", "part", 1)
					name = strings.Replace(name, "content_part.done", "part.done", 1)
				}
				if n := len(got); n == 0 || got[n-1] != name || !strings.HasSuffix(name, ".delta") {
					got = append(got, name)
				}
			}
			if want := slices.Concat([]string{"created", "in_progress"}, c.want, []string{c.end}); !slices.Equal(got, want) {
				t.Errorf("events %q\nwant %q", got, want)
			}
			if !slices.Equal(texts, c.texts) {
				t.Errorf("texts %q, want %q", texts, c.texts)
			}
			var first, last toldResponse
			for i, dst := range map[int]*toldResponse{0: &first, len(events) - 1: &last} {
				if err := json.Unmarshal(events[i].Response, dst); err != nil {
					t.Fatal(err)
				}
			}
			if first.ID != last.ID || first.Status != "in_progress" || len(first.Output) != 0 || first.Usage != nil || last.Status != c.end {
				t.Errorf("first %+v, last %+v", first, last)
			}
			details := map[bool]string{false: "null", true: `{"reason":"max_output_tokens"}`}[c.end == "incomplete"]
			if string(last.Incomplete) != details || len(last.Output) != len(c.texts) {
				t.Errorf("last %+v", last)
			}
			if u := last.Usage; u == nil || u.Total != u.Input+u.Output || u.Input != len(gen.last().Prompt) {
				t.Errorf("usage %+v", u)
			}
			a, b := responseIDs.ReplaceAllString(string(events[len(events)-1].Response), "ID"), responseIDs.ReplaceAllString(whole.body, "ID")
			if a != b {
				t.Errorf("streamed %s\nwhole    %s", a, b)
			}
		})
	}
}

// The object of OpenAI's Responses API, member for member.
func TestResponseObject(t *testing.T) {
	gen := &script{ids: tokenizer().Encode("So.</think>\n\nHi<|im_end|>")}
	s := start(t, setup{gen: gen})
	a := s.responses(t, `{"model":"m","input":"Q","instructions":"Be.","max_output_tokens":50,"temperature":0.5,"top_p":0,"metadata":{"b":"2","a":"1"},"client_metadata":{"x":1},`+
		`"reasoning":{"summary":"auto"},"text":{"format":{"type":"text"},"verbosity":"medium"},"tool_choice":"auto","max_tool_calls":3,"truncation":"disabled","top_logprobs":0,"service_tier":"auto",`+
		`"background":false,"include":["reasoning.encrypted_content"],"prompt_cache_key":"k","prompt_cache_retention":"24h","safety_identifier":"s","user":"u","parallel_tool_calls":true,`+flat+`}`)
	want := `{"id":ID,"object":"response",ID,"status":"completed","background":false,ID,"error":null,"incomplete_details":null,"instructions":"Be.","max_output_tokens":50,"max_tool_calls":3,` +
		`"model":"m","output":[{"id":ID,"type":"reasoning","status":"completed","summary":[],"content":[{"type":"reasoning_text","text":"So."}]},` +
		`{"id":ID,"type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"Hi","annotations":[],"logprobs":[]}]}],"parallel_tool_calls":true,"previous_response_id":null,` +
		`"prompt_cache_key":"k","reasoning":{"effort":null,"summary":null},"safety_identifier":"s","service_tier":"default","store":true,"temperature":0.5,"text":{"format":{"type":"text"}},"tool_choice":"auto",` + flat +
		`,"top_logprobs":0,"top_p":0,"truncation":"disabled","usage":` + fmt.Sprintf(`{"input_tokens":%d,"input_tokens_details":{"cached_tokens":0},"output_tokens":%d,"output_tokens_details":{"reasoning_tokens":%d},"total_tokens":%d}`,
		len(gen.last().Prompt), len(gen.ids), len(tokenizer().Encode("So.</think>")), len(gen.last().Prompt)+len(gen.ids)) + `,"user":"u","metadata":{"a":"1","b":"2"}}`
	if got := responseIDs.ReplaceAllString(a.body, "ID"); a.status != 200 || got != want {
		t.Errorf("%d %s\nwant %s", a.status, got, want)
	}
	if a := s.responses(t, `{"model":"m","input":"Q"}`); !strings.Contains(a.body, `"instructions":null,"max_output_tokens":null,"max_tool_calls":null,`) ||
		!strings.Contains(a.body, `"tool_choice":"auto","tools":[],`) || !strings.Contains(a.body, `"temperature":1,`) || !strings.Contains(a.body, `"top_p":0.95,`) ||
		!strings.Contains(a.body, `"user":null,"metadata":{}}`) || strings.Contains(a.body, "prompt_cache_key") {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// A failure after the start is an event with the object, and the last one.
func TestResponseFailed(t *testing.T) {
	gen := &script{ids: tokenizer().Encode("So.</think>\n\nHi"), err: errors.New("broken")}
	s := start(t, setup{gen: gen})
	events := streamed(t, s.responses(t, `{"model":"m","input":"Q","stream":true}`).body)
	last := events[len(events)-1]
	var r toldResponse
	if err := json.Unmarshal(last.Response, &r); err != nil {
		t.Fatal(err)
	}
	if last.Type != "response.failed" || r.Status != "failed" || string(r.Error) != `{"code":"internal_error","message":"the request failed inside the server"}` || len(r.Output) != 2 || r.Output[1].Status != "incomplete" {
		t.Errorf("%s %s", last.Type, last.Response)
	}
	for i, e := range events {
		if *e.Sequence != i {
			t.Errorf("event %d has number %d", i, *e.Sequence)
		}
	}
}

// Tools in groups: the model sees one name, the client gets two (docs/serving.md, Responses).
func TestResponseGroups(t *testing.T) {
	gen := &script{}
	s := start(t, setup{gen: gen, template: efforts, front: front.Options{Context: 8192, MaxTokens: 1000}})
	call := func(name string) string {
		return "<tool_call>\n<function=" + name + ">\n</function>\n</tool_call>"
	}
	long := strings.Repeat("n", 64)
	gen.ids = tokenizer().Encode("</think>" + call("crm__f") + "\n" + call("mcp__f") + "\n" + call("f") + "\n" + call(long+"__"+long) + "<|im_end|>")
	tools := `"tools":[{"type":"namespace","name":"crm","description":"Customers.","tools":[{"type":"function","name":"f","description":"Finds.","parameters":{"type":"object"},"strict":false}]},` +
		`{"type":"namespace","name":"mcp__","tools":[{"type":"function","name":"f"}]},{"type":"namespace","name":"` + long + `","tools":[{"type":"function","name":"` + long + `"}]},{"type":"function","description":null,"strict":null,"name":"f","parameters":{"b":1.0,"a":[]}}]`
	a := s.responses(t, `{"model":"m","input":"Q",`+tools+`}`)
	var r toldResponse
	if err := json.Unmarshal([]byte(a.body), &r); err != nil || a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	var got []string
	for _, item := range r.Output {
		got = append(got, item.Namespace+"/"+item.Name)
	}
	if want := []string{"crm/f", "mcp__/f", "/f", long + "/" + long}; !slices.Equal(got, want) {
		t.Errorf("%q in %s", got, a.body)
	}
	want := `[{"type": "function", "function": {"name": "crm__f", "description": "Customers.\n\nFinds.", "parameters": {"type": "object"}}}, {"type": "function", "function": {"name": "mcp__f"}}, {"type": "function", "function": {"name": "` + long + `__` + long + `"}}, ` +
		`{"type": "function", "function": {"name": "f", "parameters": {"b": 1.0, "a": []}}}]`
	if prompt := tokenizer().Decode(gen.last().Prompt); !strings.Contains(prompt, want) {
		t.Errorf("prompt %q\nwant %q", prompt, want)
	}
	// Sent back as they are, the calls are what the model wrote.
	items := slices.Clone(r.Output)
	var input []string
	for _, item := range items {
		b, _ := json.Marshal(map[string]string{"type": item.Type, "call_id": item.CallID, "name": item.Name, "namespace": item.Namespace, "arguments": item.Arguments})
		input = append(input, string(b))
	}
	for _, item := range items {
		input = append(input, `{"type":"function_call_output","call_id":"`+item.CallID+`","output":"o"}`)
	}
	if a := s.responses(t, `{"model":"m","input":[{"role":"user","content":"Q"},`+strings.Join(input, ",")+`],`+tools+`}`); a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	prompt := tokenizer().Decode(gen.last().Prompt)
	for _, name := range []string{"crm__f", "mcp__f", "f"} {
		if !strings.Contains(prompt, `"function": {"name": "`+name+`", "arguments": {}}`) {
			t.Errorf("%s is not in %q", name, prompt)
		}
	}
}
