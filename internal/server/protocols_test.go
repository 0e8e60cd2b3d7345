package server_test

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/front"
)

// own is a template in the official one's manner.
const own = "../text/chat/testdata/own.jinja"

// dialogue is a conversation that each of the protocols can say.
type dialogue struct {
	system   string // empty is none
	tools    bool
	thinking bool
	preserve bool
	turns    []turn
}

// turn is a user's text, or an assistant's with the results of its calls.
type turn struct {
	user      string
	assistant bool
	reasoning *string
	text      *string
	calls     []string // arguments
	results   []string
	order     []int // of the results where a protocol lets them be in any
}

// randomDialogue ends with a user's turn or with results.
func randomDialogue(rng *rand.Rand) dialogue {
	pick := func(from ...string) string { return from[rng.IntN(len(from))] }
	words := func() string {
		out := pick("Q", "ask ", "<tool_call>", "é")
		for range rng.IntN(8) {
			out += pick("a", "word ", "ünï ", "日本", "🙂", "<|im_end|>", "</think>", "\n", "<tool_response>", `"q"`, "03106 ")
		}
		return out
	}
	maybe := func(n int) *string {
		if rng.IntN(n) > 0 {
			return nil
		}
		s := words()
		return &s
	}
	d := dialogue{tools: rng.IntN(2) == 0, thinking: rng.IntN(3) > 0, preserve: rng.IntN(2) == 0}
	if rng.IntN(2) == 0 {
		d.system = words()
	}
	d.turns = []turn{{user: words()}}
	for range rng.IntN(5) {
		a := turn{assistant: true, reasoning: maybe(2), text: maybe(2)}
		for range rng.IntN(4) {
			b, _ := json.Marshal(words())
			a.calls = append(a.calls, pick(`{}`, `{"x":1}`, `{"x": 2.50, "s":`+string(b)+`}`, `{"b":[1,{"z":1e3}],"a":null}`))
			a.results = append(a.results, words())
		}
		if a.text == nil && a.calls == nil {
			s := words()
			a.text = &s
		}
		a.order = rng.Perm(len(a.calls))
		d.turns = append(d.turns, a)
		if a.calls == nil || rng.IntN(4) == 0 {
			d.turns = append(d.turns, turn{user: words()})
		}
	}
	return d
}

func quoted(s string) string {
	b, _ := json.Marshal(s)
	return string(b)
}

func (d dialogue) chat() string {
	var messages []string
	if d.system != "" {
		messages = append(messages, `{"role":"system","content":`+quoted(d.system)+`}`)
	}
	for i, t := range d.turns {
		if !t.assistant {
			messages = append(messages, `{"role":"user","content":`+quoted(t.user)+`}`)
			continue
		}
		m := `{"role":"assistant","content":null`
		if t.text != nil {
			m = `{"role":"assistant","content":` + quoted(*t.text)
		}
		if t.reasoning != nil {
			m += `,"reasoning_content":` + quoted(*t.reasoning)
		}
		var calls []string
		for j, args := range t.calls {
			calls = append(calls, fmt.Sprintf(`{"id":"c%d_%d","type":"function","function":{"name":"f","arguments":%s}}`, i, j, quoted(args)))
		}
		if calls != nil {
			m += `,"tool_calls":[` + strings.Join(calls, ",") + `]`
		}
		messages = append(messages, m+"}")
		for j, result := range t.results {
			messages = append(messages, fmt.Sprintf(`{"role":"tool","tool_call_id":"c%d_%d","content":%s}`, i, j, quoted(result)))
		}
	}
	body := fmt.Sprintf(`{"messages":[%s],"enable_thinking":%v,"preserve_thinking":%v,"temperature":0`, strings.Join(messages, ","), d.thinking, d.preserve)
	if d.tools {
		body += `,"tools":[{"type":"function","function":{"name":"f","description":"Does <it>.","parameters":{"type":"object","properties":{"x":{"type":"number"},"a":{}}}}},{"type":"function","function":{"name":"g","parameters":{"b":1.0}}}]`
	}
	return body
}

func (d dialogue) responses() string {
	var items []string
	for i, t := range d.turns {
		if !t.assistant {
			items = append(items, `{"role":"user","content":[{"type":"input_text","text":`+quoted(t.user)+`}]}`)
			continue
		}
		if t.reasoning != nil {
			items = append(items, `{"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":`+quoted(*t.reasoning)+`}]}`)
		}
		if t.text != nil {
			items = append(items, `{"type":"message","role":"assistant","content":[{"type":"output_text","text":`+quoted(*t.text)+`}]}`)
		}
		for j, args := range t.calls {
			items = append(items, fmt.Sprintf(`{"type":"function_call","call_id":"c%d_%d","name":"f","arguments":%s}`, i, j, quoted(args)))
		}
		for _, j := range t.order {
			items = append(items, fmt.Sprintf(`{"type":"function_call_output","call_id":"c%d_%d","output":%s}`, i, j, quoted(t.results[j])))
		}
	}
	body := fmt.Sprintf(`{"model":"m","input":[%s],"chat_template_kwargs":{"enable_thinking":%v},"preserve_thinking":%v,"temperature":0`, strings.Join(items, ","), d.thinking, d.preserve)
	if d.system != "" {
		body += `,"instructions":` + quoted(d.system)
	}
	if d.tools {
		body += `,"tools":[{"type":"function","name":"f","description":"Does <it>.","parameters":{"type":"object","properties":{"x":{"type":"number"},"a":{}}},"strict":false},{"name":"g","type":"function","parameters":{"b":1.0}}]`
	}
	return body
}

func (d dialogue) messages() string {
	var messages []string
	content := ""
	flush := func(role string) {
		if content != "" {
			messages = append(messages, `{"role":"`+role+`","content":[`+strings.TrimPrefix(content, ",")+`]}`)
		}
		content = ""
	}
	for i, t := range d.turns {
		if !t.assistant {
			content += `,{"type":"text","text":` + quoted(t.user) + `}`
			continue
		}
		flush("user")
		if t.reasoning != nil {
			content += `,{"type":"thinking","thinking":` + quoted(*t.reasoning) + `,"signature":"s"}`
		}
		if t.text != nil {
			content += `,{"type":"text","text":` + quoted(*t.text) + `}`
		}
		for j, args := range t.calls {
			content += fmt.Sprintf(`,{"type":"tool_use","id":"c%d_%d","name":"f","input":%s}`, i, j, args)
		}
		flush("assistant")
		for _, j := range t.order {
			content += fmt.Sprintf(`,{"type":"tool_result","tool_use_id":"c%d_%d","content":%s}`, i, j, quoted(t.results[j]))
		}
	}
	flush("user")
	thinking := map[bool]string{false: "disabled", true: "adaptive"}[d.thinking]
	body := fmt.Sprintf(`{"model":"x","messages":[%s],"thinking":{"type":%q},"preserve_thinking":%v,"temperature":0`, strings.Join(messages, ","), thinking, d.preserve)
	if d.system != "" {
		body += `,"system":` + quoted(d.system)
	}
	if d.tools {
		body += `,"tools":[{"name":"f","description":"Does <it>.","input_schema":{"type":"object","properties":{"x":{"type":"number"},"a":{}}}},{"name":"g","input_schema":{"b":1.0}}]`
	}
	return body
}

// The count of Responses is what the usage of the same body says, in a thousand conversations with tools and reasoning; and
// a conversation is the same prompt in all protocols.
func TestResponseCount(t *testing.T) {
	gen := &script{text: "x"}
	s := start(t, setup{gen: gen, template: string(read(t, own)), front: front.Options{Context: 1 << 16}})
	seen := map[string]int{}
	lengths := map[int]bool{}
	n := 1000
	if testing.Short() {
		n = 100
	}
	for i := range n {
		d := randomDialogue(rand.New(rand.NewPCG(7, uint64(i))))
		body := d.responses() + `,"max_output_tokens":1`
		count := send(t, "POST", s.url+"/v1/responses/input_tokens", body+"}")
		a := s.responses(t, body+fmt.Sprintf(`,"stream":%v}`, i%2 == 0))
		object := []byte(a.body)
		if i%2 == 0 && a.status == 200 {
			events := streamed(t, a.body)
			object = events[len(events)-1].Response
		}
		got := parsed(t, answer{status: a.status, body: string(object)})
		prompt := gen.last().Prompt
		if want := fmt.Sprintf(`{"object":"response.input_tokens","input_tokens":%d}`, got.Usage.Input); count.status != 200 || count.body != want || got.Usage.Input != len(prompt) {
			t.Fatalf("counted %s, usage %+v, prompt %d\n%s", count.body, got.Usage, len(prompt), body)
		}
		lengths[len(prompt)] = true
		for what, is := range map[string]bool{
			"tools": d.tools, "plain": !d.thinking, "preserved": d.preserve, "reasoning": strings.Contains(body, `"reasoning_text"`), "calls": strings.Contains(body, `"function_call"`),
			"ends with results": d.turns[len(d.turns)-1].assistant,
		} {
			if is {
				seen[what]++
			}
		}
		if i%5 != 0 {
			continue
		}
		if a := s.chat(t, d.chat()+`,"max_tokens":1}`); a.status != 200 || !slices.Equal(gen.last().Prompt, prompt) {
			t.Fatalf("%d %s\nchat      %q\nresponses %q", a.status, a.body, tokenizer().Decode(gen.last().Prompt), tokenizer().Decode(prompt))
		}
		if a := s.messages(t, d.messages()+`,"max_tokens":1}`); a.status != 200 || !slices.Equal(gen.last().Prompt, prompt) {
			t.Fatalf("%d %s\nmessages  %q\nresponses %q\n%s", a.status, a.body, tokenizer().Decode(gen.last().Prompt), tokenizer().Decode(prompt), d.messages())
		}
	}
	for _, what := range []string{"tools", "plain", "preserved", "reasoning", "calls", "ends with results"} {
		if seen[what] < n/5 {
			t.Errorf("%s in %d conversations: they are not what they should be", what, seen[what])
		}
	}
	if len(lengths) < n*3/10 {
		t.Errorf("%d lengths", len(lengths))
	}
}

// account is an answer, whatever its protocol.
type account struct {
	reasoning, text            string
	calls                      string // names and arguments
	end                        string // stop, calls, length
	prompt, cached, all, think int    // tokens
}

// The same conversation and the same output, in three protocols, streamed and whole: the same text, calls and counts.
func TestProtocols(t *testing.T) {
	gen := &script{}
	s := start(t, setup{gen: gen, template: string(read(t, own)), front: front.Options{Context: 1 << 16, MaxTokens: 5000}})
	rng := rand.New(rand.NewPCG(3, 4))
	pick := func(from ...string) string { return from[rng.IntN(len(from))] }
	ends := map[string]int{}
	for i := range 60 {
		d := randomDialogue(rng)
		say := ""
		if d.thinking {
			say = pick("", "Thought 🙂 ", "a\n<tool_call>b") + "</think>" + pick("", "\n\n", " \n")
		}
		say += pick("", "Text. ", "日本\n\n", "<tool_call> no")
		for range rng.IntN(3) {
			say += called("x", pick("1", "2.50", "x", ""), "city", pick("Oslo", "03106", "a\nb</parameter"))
		}
		gen.ids = tokenizer().Encode(say)
		if rng.IntN(4) > 0 {
			gen.ids = append(gen.ids, tokenizer().Encode("<|im_end|>")...)
		} else {
			gen.ids = gen.ids[:rng.IntN(len(gen.ids)+1)]
		}
		want := account{end: "?"}
		for _, stream := range []bool{false, true} {
			more := fmt.Sprintf(`,"stream":%v`, stream)
			usage := ""
			if stream {
				usage = `,"stream_options":{"include_usage":true}`
			}
			for name, got := range map[string]account{
				"chat":      saidInChat(t, s.chat(t, d.chat()+more+usage+"}"), stream),
				"responses": saidInResponses(t, s.responses(t, d.responses()+more+"}"), stream),
				"messages":  saidInMessages(t, s.messages(t, d.messages()+more+"}"), stream),
			} {
				if want.end == "?" {
					want = got
				}
				if !reflect.DeepEqual(got, want) {
					t.Errorf("%d, %s, streamed %v: %+v\nwant %+v\nsaid %q", i, name, stream, got, want, say)
				}
			}
		}
		if want.prompt != len(gen.last().Prompt) || want.all != len(gen.ids) {
			t.Errorf("%d: %+v, prompt of %d, output of %d", i, want, len(gen.last().Prompt), len(gen.ids))
		}
		ends[want.end]++
	}
	if ends["stop"] < 5 || ends["calls"] < 5 || ends["length"] < 5 {
		t.Errorf("%v", ends)
	}
}

// frames are the data of a stream's events.
func frames(t *testing.T, a answer, stream bool) []map[string]any {
	t.Helper()
	if a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	var out []map[string]any
	add := func(data string) {
		var v map[string]any
		if err := json.Unmarshal([]byte(data), &v); err != nil {
			t.Fatalf("%s: %v", data, err)
		}
		out = append(out, v)
	}
	if !stream {
		add(a.body)
		return out
	}
	for line := range strings.Lines(a.body) {
		if data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: {"); ok {
			add("{" + data)
		}
	}
	return out
}

// path goes down into a value; nil where there is nothing.
func path(v any, names ...any) any {
	for _, name := range names {
		switch at := name.(type) {
		case string:
			m, _ := v.(map[string]any)
			v = m[at]
		case int:
			l, _ := v.([]any)
			if at >= len(l) {
				return nil
			}
			v = l[at]
		}
	}
	return v
}

func str(v any) string { s, _ := v.(string); return s }

func number(v any) int { n, _ := v.(float64); return int(n) }

func saidInChat(t *testing.T, a answer, stream bool) (r account) {
	t.Helper()
	member := map[bool]string{false: "message", true: "delta"}[stream]
	for _, f := range frames(t, a, stream) {
		choice := path(f, "choices", 0)
		r.reasoning += str(path(choice, member, "reasoning_content"))
		r.text += str(path(choice, member, "content"))
		calls, _ := path(choice, member, "tool_calls").([]any)
		for _, c := range calls {
			r.calls += str(path(c, "function", "name")) + str(path(c, "function", "arguments"))
		}
		if end := str(path(choice, "finish_reason")); end != "" {
			r.end = strings.Replace(end, "tool_calls", "calls", 1)
		}
		if u := path(f, "usage"); u != nil {
			r.prompt, r.cached, r.all, r.think = number(path(u, "prompt_tokens")), number(path(u, "prompt_tokens_details", "cached_tokens")), number(path(u, "completion_tokens")), number(path(u, "completion_tokens_details", "reasoning_tokens"))
		}
	}
	return r
}

func saidInResponses(t *testing.T, a answer, stream bool) (r account) {
	t.Helper()
	all := frames(t, a, stream)
	object := any(all[len(all)-1])
	kinds := []any{}
	if stream {
		object = path(object, "response")
		for _, f := range all {
			switch str(f["type"]) {
			case "response.reasoning_text.delta":
				r.reasoning += str(f["delta"])
			case "response.output_text.delta":
				r.text += str(f["delta"])
			case "response.function_call_arguments.done":
				r.calls += str(f["name"]) + str(f["arguments"])
			}
		}
	}
	items, _ := path(object, "output").([]any)
	for _, item := range items {
		kinds = append(kinds, path(item, "type"))
		if stream {
			continue
		}
		switch path(item, "type") {
		case "reasoning":
			r.reasoning += str(path(item, "content", 0, "text"))
		case "message":
			r.text += str(path(item, "content", 0, "text"))
		case "function_call":
			r.calls += str(path(item, "name")) + str(path(item, "arguments"))
		}
	}
	switch {
	case path(object, "status") == "incomplete":
		r.end = "length"
	case slices.Contains(kinds, any("function_call")):
		r.end = "calls"
	default:
		r.end = "stop"
	}
	u := path(object, "usage")
	r.prompt, r.cached, r.all, r.think = number(path(u, "input_tokens")), number(path(u, "input_tokens_details", "cached_tokens")), number(path(u, "output_tokens")), number(path(u, "output_tokens_details", "reasoning_tokens"))
	if number(path(u, "total_tokens")) != r.prompt+r.all {
		t.Errorf("%v", u)
	}
	return r
}

func saidInMessages(t *testing.T, a answer, stream bool) (r account) {
	t.Helper()
	usage := map[string]any{}
	input := "" // of the open block, in the spelling received
	for _, f := range frames(t, a, stream) {
		delta := path(f, "delta")
		switch str(f["type"]) {
		case "message":
			// The spelling and order of a call's input is compared as text.
			var raw struct {
				Content []struct {
					Name  string         `json:"name"`
					Input jsontext.Value `json:"input"`
				} `json:"content"`
			}
			if err := json.Unmarshal([]byte(a.body), &raw); err != nil {
				t.Fatal(err)
			}
			blocks, _ := f["content"].([]any)
			for i, b := range blocks {
				r.reasoning += str(path(b, "thinking"))
				r.text += str(path(b, "text"))
				r.calls += raw.Content[i].Name + string(raw.Content[i].Input)
			}
			r.end = str(f["stop_reason"])
			usage = f["usage"].(map[string]any)
		case "message_start":
			maps.Copy(usage, path(f, "message", "usage").(map[string]any))
		case "content_block_start":
			r.calls += str(path(f, "content_block", "name"))
			input = ""
		case "content_block_delta":
			r.reasoning += str(path(delta, "thinking"))
			r.text += str(path(delta, "text"))
			input += str(path(delta, "partial_json"))
		case "content_block_stop":
			r.calls += input
		case "message_delta":
			r.end = str(path(delta, "stop_reason"))
			maps.Copy(usage, f["usage"].(map[string]any))
		}
	}
	r.end = map[string]string{"end_turn": "stop", "tool_use": "calls", "max_tokens": "length"}[r.end]
	r.cached = number(usage["cache_read_input_tokens"])
	r.prompt, r.all, r.think = number(usage["input_tokens"])+r.cached, number(usage["output_tokens"]), number(path(usage, "output_tokens_details", "thinking_tokens"))
	return r
}
