package server_test

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"

	"ninfer/internal/front"
)

// Conversations as the template gets them (docs/serving.md, Messages).
func TestMessagesHistory(t *testing.T) {
	gen := &script{text: "x"}
	s := start(t, setup{gen: gen, template: everything, front: front.Options{Context: 4096}})
	turn := func(role, text string) string { return "<|im_start|>" + role + "\n" + text + "<|im_end|>\n" }
	const open = "<|im_start|>assistant\n<think>\n"
	const shut = open + "\n</think>\n\n"
	uses := "{t1 f " + `{"b": 1.0, "a": 2}` + "}{t2 g {}}"
	for _, c := range []struct{ name, body, want string }{
		{"string", conversation(question), turn("user", "Q") + open},
		{"blocks are joined", conversation(said("user", text("a "), text(" b"))), turn("user", "a  b") + open},
		{
			"turns of a role are joined", conversation(said("user", text("a")) + "," + said("user", text("b")) + `,{"role":"assistant","content":"c"},` + said("assistant", notText, text("d")) + "," + question),
			turn("user", "ab") + turn("assistant", "cd") + turn("user", "Q") + open,
		},
		{"system", conversation(question, `,"system":" S "`), turn("system", " S ") + turn("user", "Q") + open},
		{"system's blocks", conversation(question, `,"system":[`+text("S")+`,`+text("T")+`]`), turn("system", "ST") + turn("user", "Q") + open},
		{"no system", conversation(question, `,"system":[`+text("")+`]`), turn("user", "Q") + open},
		{"billing", conversation(question, `,"system":[`+text("x-anthropic-billing-header: a=b; c")+`,`+text("T")+`]`), turn("system", "T") + turn("user", "Q") + open},
		{"only billing", conversation(question, `,"system":[`+text("x-anthropic-billing-header:")+`]`), turn("user", "Q") + open},
		{"billing in the second place", conversation(question, `,"system":[`+text("S")+`,`+text("x-anthropic-billing-header: a")+`]`), turn("system", "Sx-anthropic-billing-header: a") + turn("user", "Q") + open},
		{"billing behind a blank", conversation(question, `,"system":[`+text(" x-anthropic-billing-header: a")+`]`), turn("system", " x-anthropic-billing-header: a") + turn("user", "Q") + open},
		{"billing as a string", conversation(question, `,"system":"x-anthropic-billing-header: a"`), turn("system", "x-anthropic-billing-header: a") + turn("user", "Q") + open},
		{"system at the end", conversation(question + `,{"role":"system","content":"S"}`), turn("user", "Q") + turn("system", "S") + open},
		{
			"system before an answer", conversation(question + "," + said("system", text("S"), text("T")) + `,{"role":"assistant","content":"A"},` + question),
			turn("user", "Q") + turn("system", "ST") + turn("assistant", "A") + turn("user", "Q") + open,
		},
		{
			"calls and results", conversation(question + "," + said("assistant", notText, text("L"), useF, useG) + "," + said("user", resultF, resultG)),
			turn("user", "Q") + turn("assistant", "L"+uses) + turn("tool", "one#t1") + turn("tool", "two#t2") + open,
		},
		{
			"results in another order, and more", conversation(question + "," + said("assistant", useF, useG) + "," + said("user", resultG, resultF, text("more"))),
			turn("user", "Q") + turn("assistant", uses) + turn("tool", "one#t1") + turn("tool", "two#t2") + turn("user", "more") + open,
		},
		{
			"text behind a call", conversation(question + "," + said("assistant", useF, text("L"), useG) + "," + said("user", resultF, resultG)),
			turn("user", "Q") + turn("assistant", "L"+uses) + turn("tool", "one#t1") + turn("tool", "two#t2") + open,
		},
		{"results first", conversation(said("user", resultG, resultF)), turn("tool", "two#t2") + turn("tool", "one#t1") + open},
		{"no content", conversation(said("user", `{"type":"tool_result","tool_use_id":"t"}`)), turn("tool", "#t") + open},
		{"failed", conversation(said("user", `{"type":"tool_result","tool_use_id":"t","content":"no such file","is_error":true}`)), turn("tool", "The tool failed:\nno such file#t") + open},
		{"did not fail", conversation(said("user", `{"type":"tool_result","tool_use_id":"t","content":"x","is_error":false}`)), turn("tool", "x#t") + open},
		{
			"thoughts kept", conversation(question+","+said("assistant", notText, `{"type":"redacted_thinking","data":"d"}`, `{"type":"thinking","thinking":"U","signature":""}`, text("A"))+","+question, `,"preserve_thinking":true`),
			turn("user", "Q") + turn("assistant", "(TU)A") + turn("user", "Q") + open,
		},
		{"continued", conversation(question+`,{"role":"assistant","content":" So far "}`, `,"thinking":{"type":"disabled"}`), turn("user", "Q") + shut + " So far "},
		{"control spellings", conversation(`{"role":"user","content":"<|im_end|>"}`), turn("user", "<|im_end|>") + open},
	} {
		a := s.messages(t, c.body)
		if got := tokenizer().Decode(gen.last().Prompt); a.status != 200 || got != c.want {
			t.Errorf("%s: %d %s\n%q\nwant\n%q", c.name, a.status, a.body, got, c.want)
		}
	}
	// The last of these was text and not the end of a turn.
	end, _ := tokenizer().ID("<|im_end|>")
	n := 0
	for _, id := range gen.last().Prompt {
		if id == end {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d ends of turns in the prompt", n)
	}
}

// What was answered can be sent back as it is: the model sees what it wrote, member for member and digit for digit, whoever signed it.
func TestMessagesReplay(t *testing.T) {
	gen := &script{}
	s := start(t, setup{gen: gen, template: everything, front: front.Options{Context: 4096}})
	gen.ids = tokenizer().Encode("T</think>\n\nLook\n\n" + called("city", `a "b"`, "x", "2.50") + "<|im_end|>")
	var got struct {
		Content []map[string]any `json:"content"`
	}
	a := s.messages(t, asked(anthropicWeather))
	raw := a.body[strings.Index(a.body, `"content":[`)+len(`"content":`) : strings.Index(a.body, `,"stop_reason"`)]
	if err := json.Unmarshal([]byte(a.body), &got); err != nil || len(got.Content) != 3 {
		t.Fatalf("%s: %v", a.body, err)
	}
	id := got.Content[2]["id"].(string)
	for _, content := range []string{raw, strings.Replace(raw, got.Content[0]["signature"].(string), "bm90IG91cnM=", 1)} {
		a = s.messages(t, conversation(question+`,{"role":"assistant","content":`+content+`},`+said("user", `{"type":"tool_result","tool_use_id":"`+id+`","content":"one"}`), anthropicWeather, `,"preserve_thinking":true`))
		prompt := tokenizer().Decode(gen.last().Prompt)
		if want := "<|im_start|>assistant\n(T)Look{" + id + ` f {"city": "a \"b\"", "x": 2.50}}<|im_end|>` + "\n<|im_start|>tool\none#" + id + "<|im_end|>"; a.status != 200 || !strings.Contains(prompt, want) {
			t.Errorf("%d %s\nprompt %q\nwant %q", a.status, a.body, prompt, want)
		}
	}
}

// randomBody is a conversation of Messages that is in order: tools, calls and their results in any order, thoughts, system turns, prefill.
func randomBody(rng *rand.Rand) string {
	pick := func(from ...string) string { return from[rng.IntN(len(from))] }
	words := func() string {
		out := ""
		for range rng.IntN(6) {
			out += pick("a", "word ", "ünï ", "日本", "🙂", "<|im_end|>", "</think>", "\n", "<tool_call>", `"q"`, "03106 ")
		}
		return out
	}
	quoted := func() string { b, _ := json.Marshal(words()); return string(b) }
	value := func() string { return pick("1", "2.50", "true", "null", quoted(), `[1,{"z":1e3}]`) }
	block := func() string {
		mark := ""
		if rng.IntN(8) == 0 {
			mark = `,"cache_control":{"type":"ephemeral"}`
		}
		return `{"type":"text","text":` + quoted() + mark + `}`
	}
	content := func(blocks []string) string {
		if len(blocks) == 0 {
			return quoted()
		}
		return "[" + strings.Join(blocks, ",") + "]"
	}
	var messages []string
	var pending []string // ids without results
	add := func(role, content string) {
		messages = append(messages, `{"role":"`+role+`","content":`+content+`}`)
	}
	ids := 0
	for range 1 + rng.IntN(4) {
		var blocks []string
		rng.Shuffle(len(pending), func(i, j int) { pending[i], pending[j] = pending[j], pending[i] })
		for _, id := range pending {
			blocks = append(blocks, fmt.Sprintf(`{"type":"tool_result","tool_use_id":%q,"content":%s,"is_error":%v}`, id, content([]string{block()}), rng.IntN(3) == 0))
		}
		pending = nil
		for range rng.IntN(3) {
			blocks = append(blocks, block())
		}
		add("user", content(blocks))
		if rng.IntN(5) == 0 {
			add("system", quoted())
		}
		blocks = nil
		if rng.IntN(2) == 0 {
			blocks = append(blocks, `{"type":"thinking","thinking":`+quoted()+`,"signature":"x"}`)
		}
		if rng.IntN(2) == 0 {
			blocks = append(blocks, block())
		}
		for range rng.IntN(3) {
			id := fmt.Sprintf("t%d", ids)
			ids++
			pending = append(pending, id)
			blocks = append(blocks, fmt.Sprintf(`{"type":"tool_use","id":%q,"name":%q,"input":{"x":%s,"a":%s}}`, id, pick("f", "g"), value(), value()))
		}
		add("assistant", content(blocks))
	}
	thinking := pick("", `,"thinking":{"type":"adaptive"}`, `,"thinking":{"type":"enabled","budget_tokens":1024}`, `,"thinking":{"type":"disabled"}`)
	if last := messages[len(messages)-1]; len(pending) > 0 || strings.Contains(last, `"thinking"`) || !strings.Contains(thinking, "disabled") {
		messages = messages[:len(messages)-1] // else it is continued
	}
	body := `{"model":"m","max_tokens":2000,"messages":[` + strings.Join(messages, ",") + `]` + thinking
	switch rng.IntN(4) {
	case 0:
		body += `,"system":` + quoted()
	case 1:
		body += `,"system":[` + pick("", `{"type":"text","text":"x-anthropic-billing-header: a"},`) + `{"type":"text","text":` + quoted() + `}]`
	}
	if rng.IntN(2) == 0 {
		body += `,"tools":[{"name":"f","description":` + quoted() + `,"input_schema":{"type":"object","properties":{"x":{"type":"integer"}}}},{"input_schema":{},"name":"g"}]` + pick("", `,"tool_choice":{"type":"none"}`, `,"tool_choice":{"type":"auto","disable_parallel_tool_use":true}`)
	}
	return body + pick("", `,"preserve_thinking":true`, `,"output_config":{"effort":"high"}`, `,"temperature":0`) + "}"
}

// The count is what the answer's usage says of the same body, in a thousand conversations.
func TestMessagesCount(t *testing.T) {
	gen := &script{text: "x"}
	s := start(t, setup{gen: gen, template: everything, front: front.Options{Context: 1 << 16}})
	seen := map[string]int{}
	lengths := map[int]bool{}
	n := 1000
	if testing.Short() {
		n = 100
	}
	for i := range n {
		body := randomBody(rand.New(rand.NewPCG(10, uint64(i))))
		stream := i%2 == 0
		sent := body
		if stream {
			sent = `{"stream":true,` + body[1:]
		}
		c := send(t, "POST", s.url+"/v1/messages/count_tokens", body)
		a := s.messages(t, sent)
		if strings.Contains(a.body, "too_many_cache_breakpoints") && a.status == 400 && c.status == 400 {
			seen["refused"]++
			continue
		}
		var counted struct {
			Input *int `json:"input_tokens"`
		}
		if err := json.Unmarshal([]byte(c.body), &counted, json.RejectUnknownMembers(true)); err != nil || counted.Input == nil || c.status != 200 || a.status != 200 {
			t.Fatalf("%d %s, %d %s, %v\n%s", c.status, c.body, a.status, a.body, err, body)
		}
		// Of a stream the usage of its end counts, which is that of its start.
		var usages []struct {
			Input     int `json:"input_tokens"`
			CacheRead int `json:"cache_read_input_tokens"`
		}
		for _, part := range strings.Split(a.body, `"usage":`)[1:] {
			usages = append(usages, struct {
				Input     int `json:"input_tokens"`
				CacheRead int `json:"cache_read_input_tokens"`
			}{})
			part = part[:strings.Index(part, `,"output_tokens"`)] + "}"
			if err := json.Unmarshal([]byte(part), &usages[len(usages)-1]); err != nil {
				t.Fatal(err)
			}
		}
		if want := map[bool]int{false: 1, true: 2}[stream]; len(usages) != want {
			t.Fatalf("%s", a.body)
		}
		for _, u := range usages {
			if u.Input+u.CacheRead != *counted.Input || *counted.Input != len(gen.last().Prompt) {
				t.Fatalf("counted %d, usage %+v, prompt %d\n%s", *counted.Input, u, len(gen.last().Prompt), body)
			}
		}
		lengths[*counted.Input] = true
		for _, what := range []string{`"tool_use"`, `"tool_result"`, `"thinking":"`, `"role":"system"`, `"tools"`, `billing`, `"is_error":true`, `"cache_control"`} {
			if strings.Contains(body, what) {
				seen[what]++
			}
		}
		if !strings.HasSuffix(tokenizer().Decode(gen.last().Prompt), "<think>\n") {
			seen["plain or continued"]++
		}
	}
	if testing.Short() {
		return
	}
	for what, n := range map[string]int{`"tool_use"`: 100, `"tool_result"`: 100, `"thinking":"`: 100, `"role":"system"`: 100, `"tools"`: 100, `billing`: 50, `"is_error":true`: 50, `"cache_control"`: 50, "plain or continued": 100} {
		if seen[what] < n {
			t.Errorf("%s in %d conversations: they are not what they should be", what, seen[what])
		}
	}
	if len(lengths) < 300 || seen["refused"] > 100 {
		t.Errorf("%d lengths, %d refused", len(lengths), seen["refused"])
	}
}

// The requests of Claude Code, as test/conformance records them: all its tools are shown in their order, its note on billing is not, and the
// count is right.
func TestMessagesClaudeCode(t *testing.T) {
	files, err := filepath.Glob("testdata/agents/claude-code*.json")
	if err != nil || len(files) < 6 {
		t.Fatalf("%d requests, %v", len(files), err)
	}
	gen := &script{text: "x"}
	s := start(t, setup{gen: gen, template: everything, front: front.Options{Context: 1 << 17}})
	for _, file := range files {
		var sent struct {
			Path string         `json:"path"`
			Body jsontext.Value `json:"body"`
		}
		if err := json.Unmarshal(read(t, file), &sent); err != nil {
			t.Fatal(err)
		}
		var body struct {
			System []struct{ Text string } `json:"system"`
			Tools  []struct{ Name string } `json:"tools"`
		}
		if err := json.Unmarshal(sent.Body, &body, json.MatchCaseInsensitiveNames(true)); err != nil || len(body.Tools) < 10 || !strings.HasPrefix(body.System[0].Text, "x-anthropic-billing-header:") {
			t.Fatalf("%s: %+v, %v", file, body, err)
		}
		a := send(t, "POST", s.url+sent.Path, string(sent.Body))
		c := send(t, "POST", s.url+"/v1/messages/count_tokens?beta=true", string(sent.Body))
		if want := fmt.Sprintf(`{"input_tokens":%d}`, len(gen.last().Prompt)); a.status != 200 || c.body != want || !strings.Contains(a.body, want[1:len(want)-1]+",") {
			t.Errorf("%s: %d %s, count %s, want %s", file, a.status, a.body, c.body, want)
		}
		rest := tokenizer().Decode(gen.last().Prompt)
		if strings.Contains(rest, "billing") || !strings.Contains(rest, "<|im_start|>system\n"+body.System[1].Text+body.System[2].Text+"<|im_end|>") {
			t.Errorf("%s: prompt %s", file, rest)
		}
		for _, tool := range body.Tools {
			_, after, ok := strings.Cut(rest, `"function": {"name": "`+tool.Name+`", `)
			if !ok {
				t.Fatalf("%s: no tool %s at its place", file, tool.Name)
			}
			rest = after
		}
	}
}
