package server_test

import (
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"ninfer/internal/engine"
	"ninfer/internal/front"
	"ninfer/internal/server"
)

func (s *site) messages(t testing.TB, body string) answer {
	t.Helper()
	return send(t, "POST", s.url+"/v1/messages", body)
}

// asked is a body of Messages that is good as it stands, with further members.
func asked(members string) string {
	return `{"model":"label","max_tokens":200,"messages":[{"role":"user","content":"Hello, how are you?"}]` + members + `}`
}

// steadyMessages replaces what differs between two runs, after a look at its form.
func steadyMessages(t testing.TB, body string) string {
	t.Helper()
	seen := map[string]bool{}
	for _, id := range regexp.MustCompile(`"(msg|toolu)_[^"]*"`).FindAllString(body, -1) {
		if !regexp.MustCompile(`^"(msg|toolu)_[0-9a-f]{24}"$`).MatchString(id) || seen[id] {
			t.Errorf("id %s", id)
		}
		seen[id] = true
	}
	for _, sig := range regexp.MustCompile(`"signature":"[^"]+"`).FindAllString(body, -1) {
		if !regexp.MustCompile(`^"signature":"[A-Za-z0-9+/]{43}="$`).MatchString(sig) {
			t.Errorf("signature %s", sig)
		}
	}
	for pattern, with := range map[string]string{`"msg_[0-9a-f]+"`: `"MSG"`, `"toolu_[0-9a-f]+"`: `"TOOLU"`, `"signature":"[^"]+"`: `"signature":"SIG"`, `"req_[0-9a-f]+"`: `"REQ"`} {
		body = regexp.MustCompile(pattern).ReplaceAllString(body, with)
	}
	return body
}

func anthropicUsage(input, output, thinking int) string {
	return fmt.Sprintf(`{"input_tokens":%d,"cache_creation_input_tokens":null,"cache_read_input_tokens":0,"output_tokens":%d,"output_tokens_details":{"thinking_tokens":%d},"server_tool_use":{"web_search_requests":0,"web_fetch_requests":0}}`, input, output, thinking)
}

// named is a server-sent event.
func named(name, members string) string {
	return "event: " + name + "\ndata: {\"type\":\"" + name + `"` + members + "}\n\n"
}

// block is all events of a block, a delta for each piece.
func block(index int, start, kind, member string, pieces ...string) string {
	out := named("content_block_start", fmt.Sprintf(`,"index":%d,"content_block":%s`, index, start))
	for _, p := range pieces {
		b, _ := json.Marshal(p)
		out += named("content_block_delta", fmt.Sprintf(`,"index":%d,"delta":{"type":%q,%q:%s}`, index, kind, member, b))
	}
	if kind == "thinking_delta" {
		out += named("content_block_delta", fmt.Sprintf(`,"index":%d,"delta":{"type":"signature_delta","signature":"SIG"}`, index))
	}
	return out + named("content_block_stop", fmt.Sprintf(`,"index":%d`, index))
}

func thinkingEvents(index int, pieces ...string) string {
	return block(index, `{"type":"thinking","thinking":"","signature":""}`, "thinking_delta", "thinking", pieces...)
}

func textEvents(index int, pieces ...string) string {
	return block(index, `{"type":"text","text":""}`, "text_delta", "text", pieces...)
}

func useEvents(index int, args string) string {
	return block(index, `{"type":"tool_use","id":"TOOLU","name":"f","input":{}}`, "input_json_delta", "partial_json", args)
}

// everything is a template that shows all of a conversation.
const everything = `{%- if tools %}{%- for t in tools %}{{- '[' + t | tojson + ']\n' }}{%- endfor %}{%- endif %}` +
	`{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.reasoning_content is defined and (preserve_thinking or loop.last) %}{{- '(' + m.reasoning_content + ')' }}{%- endif %}` +
	`{{- m.content }}{%- if m.tool_call_id is defined %}{{- '#' + m.tool_call_id }}{%- endif %}{%- for c in m.tool_calls %}{{- '{' + c.id + ' ' + c.function.name + ' ' + c.function.arguments | tojson + '}' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}` +
	`{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- else %}{{- '<think>\n' }}{%- endif %}{%- endif %}`

const anthropicWeather = `,"tools":[{"name":"f","input_schema":{"type":"object","properties":{"x":{"type":"integer"},"city":{"type":"string"}}}}]`

// Every event of a stream, to the letter, as Anthropic's API has them, and the answer as a whole.
func TestMessagesShapes(t *testing.T) {
	gen := &script{}
	s := start(t, setup{gen: gen, template: everything})
	tok := tokenizer()
	const off = `,"thinking":{"type":"disabled"}`
	two := called("x", "1") + "\n" + called("x", "2", "city", "03106")
	for _, c := range []struct {
		name, members, say string
		limit              bool // cut instead of ended by the model
		blocks             []string
		content            string
		reason             string // JSON
		thinking           int
	}{
		{
			name: "thinking, text, tool use", members: anthropicWeather, say: "ab</think>\n\ncd\n\n" + called("x", "1"),
			blocks:  []string{thinkingEvents(0, "ab"), textEvents(1, "c", "d"), useEvents(2, `{"x":1}`)},
			content: `{"type":"thinking","thinking":"ab","signature":"SIG"},{"type":"text","text":"cd"},{"type":"tool_use","id":"TOOLU","name":"f","input":{"x":1}}`,
			reason:  `"tool_use","stop_sequence":null`, thinking: 2,
		},
		{
			name: "two calls and nothing else", members: anthropicWeather + off, say: two,
			blocks:  []string{useEvents(0, `{"x":1}`), useEvents(1, `{"x":2,"city":"03106"}`)},
			content: `{"type":"tool_use","id":"TOOLU","name":"f","input":{"x":1}},{"type":"tool_use","id":"TOOLU","name":"f","input":{"x":2,"city":"03106"}}`,
			reason:  `"tool_use","stop_sequence":null`,
		},
		{
			name: "at most one call", members: anthropicWeather + off + `,"tool_choice":{"type":"auto","disable_parallel_tool_use":true}`, say: two,
			blocks:  []string{useEvents(0, `{"x":1}`)},
			content: `{"type":"tool_use","id":"TOOLU","name":"f","input":{"x":1}}`,
			reason:  `"tool_use","stop_sequence":null`,
		},
		{
			name: "a call without arguments", members: anthropicWeather + off, say: called(),
			blocks: []string{useEvents(0, `{}`)}, content: `{"type":"tool_use","id":"TOOLU","name":"f","input":{}}`, reason: `"tool_use","stop_sequence":null`,
		},
		{
			name: "cut behind a call", members: anthropicWeather + off, say: called("x", "1"), limit: true,
			blocks: []string{useEvents(0, `{"x":1}`)}, content: `{"type":"tool_use","id":"TOOLU","name":"f","input":{"x":1}}`, reason: `"max_tokens","stop_sequence":null`,
		},
		{
			name: "a call that is none", members: anthropicWeather + off, say: strings.Replace(called("x", "1"), "=f>", "=g>", 1),
			content: `{"type":"text","text":"TEXT"}`, reason: `"end_turn","stop_sequence":null`,
		},
		{
			name: "no choice", members: anthropicWeather + off + `,"tool_choice":{"type":"none"}`, say: called("x", "1"),
			content: `{"type":"text","text":"TEXT"}`, reason: `"end_turn","stop_sequence":null`,
		},
		{
			name: "thinking and text", say: "ab</think>\n\ncd",
			blocks:  []string{thinkingEvents(0, "ab"), textEvents(1, "c", "d")},
			content: `{"type":"thinking","thinking":"ab","signature":"SIG"},{"type":"text","text":"cd"}`, reason: `"end_turn","stop_sequence":null`, thinking: 2,
		},
		{
			name: "text", members: off, say: "cd", blocks: []string{textEvents(0, "c", "d")}, content: `{"type":"text","text":"cd"}`, reason: `"end_turn","stop_sequence":null`,
		},
		{
			name: "ends inside thinking", say: "ab", blocks: []string{thinkingEvents(0, "ab")}, content: `{"type":"thinking","thinking":"ab","signature":"SIG"}`,
			reason: `"end_turn","stop_sequence":null`, thinking: 2,
		},
		{
			name: "cut inside thinking", say: "ab", limit: true, blocks: []string{thinkingEvents(0, "ab")}, content: `{"type":"thinking","thinking":"ab","signature":"SIG"}`,
			reason: `"max_tokens","stop_sequence":null`, thinking: 1,
		},
		{name: "nothing", members: off, say: "", reason: `"end_turn","stop_sequence":null`},
		{name: "no thoughts", say: "</think>\n\ncd", blocks: []string{textEvents(0, "c", "d")}, content: `{"type":"text","text":"cd"}`, reason: `"end_turn","stop_sequence":null`, thinking: 1},
		{
			name: "stop string", members: off + `,"stop_sequences":["zz","de"]`, say: "cdef", blocks: []string{textEvents(0, "c")}, content: `{"type":"text","text":"c"}`,
			reason: `"stop_sequence","stop_sequence":"de"`,
		},
		{
			name: "stop string behind a call", members: anthropicWeather + off + `,"stop_sequences":["END"]`, say: called("x", "1") + "END",
			blocks: []string{useEvents(0, `{"x":1}`)}, content: `{"type":"tool_use","id":"TOOLU","name":"f","input":{"x":1}}`, reason: `"stop_sequence","stop_sequence":"END"`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			gen.ids = tok.Encode(c.say)
			if !c.limit {
				gen.ids = append(gen.ids, tok.Encode("<|im_end|>")...)
			}
			a := s.messages(t, asked(c.members))
			prompt, output := len(gen.last().Prompt), gen.output()
			text, _ := json.Marshal(c.say)
			content := strings.ReplaceAll(c.content, `"TEXT"`, string(text))
			usage := anthropicUsage(prompt, output, c.thinking)
			want := `{"id":"MSG","type":"message","role":"assistant","model":"label","content":[` + content + `],"stop_reason":` + c.reason + `,"usage":` + usage + `}`
			if got := steadyMessages(t, a.body); a.status != 200 || got != want {
				t.Errorf("%d\n%s\nwant\n%s", a.status, got, want)
			}

			a = s.messages(t, `{"stream":true,`+asked(c.members)[1:])
			blocks := strings.Join(c.blocks, "")
			got := steadyMessages(t, a.body)
			if strings.Contains(c.content, `"TEXT"`) { // in pieces as they come
				blocks, got = joinText(textEvents(0, c.say)), joinText(got)
			}
			want = named("message_start", `,"message":{"id":"MSG","type":"message","role":"assistant","model":"label","content":[],"stop_reason":null,"stop_sequence":null,"usage":`+anthropicUsage(prompt, 0, 0)+`}`) +
				blocks + named("message_delta", `,"delta":{"stop_reason":`+c.reason+`},"usage":`+usage) + named("message_stop", "")
			if a.status != 200 || got != want {
				t.Errorf("%d\n%s\nwant\n%s", a.status, got, want)
			}
			for name, want := range map[string]string{"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"} {
				if a.header.Get(name) != want {
					t.Errorf("%s: %q", name, a.header.Get(name))
				}
			}
			if id := a.header.Get("Request-Id"); !strings.HasPrefix(id, "req_") || a.header.Get("X-Request-Id") != "" {
				t.Errorf("header %v", a.header)
			}
		})
	}
	if log := s.log.String(); !strings.Contains(log, "protocol messages") || !strings.Contains(log, "reason undeclared_tool") {
		t.Errorf("log %s", log)
	}
}

// output is how many tokens the last request got.
func (s *script) output() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.answered
}

// joinText makes one text of the pieces of a block, and of its start.
func joinText(body string) string {
	return strings.ReplaceAll(body, `"}}`+"\n\n"+`event: content_block_delta`+"\n"+`data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"`, "")
}

// What the cache gave is told from the start on, and taken off the input (docs/serving.md, Messages).
func TestMessagesCached(t *testing.T) {
	gen := &script{text: "x", cached: 7}
	s := start(t, setup{gen: gen})
	for _, stream := range []string{"", `,"stream":true`} {
		a := s.messages(t, asked(stream))
		want := fmt.Sprintf(`"usage":{"input_tokens":%d,"cache_creation_input_tokens":null,"cache_read_input_tokens":7,"output_tokens":`, len(gen.last().Prompt)-7)
		if n := strings.Count(a.body, want); a.status != 200 || n != strings.Count(a.body, `"usage"`) || stream != "" && (n != 2 || !strings.Contains(a.body[:strings.Index(a.body, "\n\n")], want+"0,")) {
			t.Errorf("%d %s\nwant %s", a.status, a.body, want)
		}
	}
}

// Names of tools have up to 128 characters here, twice as many as in Chat Completions.
func TestMessagesToolName(t *testing.T) {
	name := strings.Repeat("n", 128)
	gen := &script{ids: tokenizer().Encode("</think>" + strings.Replace(called(), "=f>", "="+name+">", 1) + "<|im_end|>")}
	s := start(t, setup{gen: gen, template: everything, front: front.Options{Context: 2048}})
	if a := s.messages(t, asked(`,"max_tokens":400,"tools":[{"name":"`+name+`"}]`)); a.status != 200 || !strings.Contains(a.body, `"name":"`+name+`","input":{}}`) || !strings.Contains(a.body, `"tool_use"`) {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// The signature belongs to what was thought: a stream and a whole answer have the same, other thoughts another.
func TestMessagesSignature(t *testing.T) {
	gen := &script{}
	s := start(t, setup{gen: gen})
	var got []string
	for _, say := range []string{"ab</think>c", "ab</think>d", "abc</think>c"} {
		for _, stream := range []string{"", `,"stream":true`} {
			gen.ids = tokenizer().Encode(say + "<|im_end|>")
			got = append(got, strings.Join(regexp.MustCompile(`"signature":"[^"]+"`).FindAllString(s.messages(t, asked(stream)).body, -1), " "))
		}
	}
	if got[0] == "" || got[0] != got[1] || got[0] != got[2] || got[0] != got[3] || got[4] == got[0] || got[4] != got[5] || strings.Contains(got[0], " ") {
		t.Errorf("%q", got)
	}
}

// The context's end is told as such, whether a prompt leaves room or not (docs/serving.md, Messages).
func TestMessagesContext(t *testing.T) {
	prompt := tokenizer().Encode("<|im_start|>user\nHello, how are you?<|im_end|>\n<|im_start|>assistant\n<think>\n")
	full := start(t, setup{gen: &script{text: "x"}, front: front.Options{Context: len(prompt)}})
	for _, stream := range []string{"", `,"stream":true`} {
		a := full.messages(t, asked(stream))
		if a.status != 200 || !strings.Contains(a.body, `"stop_reason":"model_context_window_exceeded"`) || !strings.Contains(a.body, `"output_tokens":0`) {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	short := start(t, setup{gen: &script{text: "x"}, front: front.Options{Context: len(prompt) - 1}})
	a := short.messages(t, asked(""))
	want := fmt.Sprintf("prompt is too long: %d tokens > %d maximum", len(prompt), len(prompt)-1)
	if kind, message := anthropicError(t, a); a.status != 400 || kind != "invalid_request_error" || message != want {
		t.Errorf("%d %s", a.status, a.body)
	}
	// Who counts wants to know by how much.
	if a := send(t, "POST", short.url+"/v1/messages/count_tokens", asked("")); a.status != 200 || a.body != fmt.Sprintf(`{"input_tokens":%d}`, len(prompt)) {
		t.Errorf("%d %s", a.status, a.body)
	}
	ended := start(t, setup{gen: &script{text: "", reason: engine.Context}})
	if a := ended.messages(t, asked("")); !strings.Contains(a.body, `"stop_reason":"model_context_window_exceeded","stop_sequence":null`) {
		t.Errorf("%s", a.body)
	}
}

// anthropicError checks the shape of an error and returns its members.
func anthropicError(t testing.TB, a answer) (kind, message string) {
	t.Helper()
	var e struct {
		Type  string `json:"type"`
		Error struct {
			Type    string `json:"type"`
			Message string `json:"message"`
		} `json:"error"`
		RequestID string `json:"request_id"`
	}
	if err := json.Unmarshal([]byte(a.body), &e, json.RejectUnknownMembers(true)); err != nil || e.Type != "error" || e.Error.Message == "" {
		t.Fatalf("not an error body: %s (%v)", a.body, err)
	}
	if id := a.header.Get("Request-Id"); id == "" || id != e.RequestID || a.header.Get("Content-Type") != "application/json" {
		t.Errorf("request_id %q, header %v", e.RequestID, a.header)
	}
	return e.Error.Type, e.Error.Message
}

// Failures of the server in Anthropic's words (docs/serving.md, Messages), as an answer and in a stream that has begun.
func TestMessagesFailures(t *testing.T) {
	want := func(s *site, name string, a answer, status int, kind string) {
		t.Helper()
		if got, _ := anthropicError(t, a); a.status != status || got != kind {
			t.Errorf("%s: %d %s; want %d %s", name, a.status, a.body, status, kind)
		}
	}
	loading := start(t, setup{loading: true, opt: server.Options{APIKey: "k", MaxBody: 1 << 20}})
	want(loading, "no key", loading.messages(t, asked("")), 401, "authentication_error")
	want(loading, "loading", send(t, "POST", loading.url+"/v1/messages", asked(""), "x-api-key", "k"), 503, "api_error")
	want(loading, "no route", send(t, "POST", loading.url+"/v1/messages/x", asked(""), "x-api-key", "k"), 404, "not_found_error")

	gen := &script{text: "abcdefgh", step: make(chan struct{})}
	s := start(t, setup{gen: gen, places: 2, timeout: 100 * time.Millisecond, opt: server.Options{MaxBody: 1 << 20, KeepAlive: 30 * time.Millisecond}})
	want(s, "large", s.messages(t, strings.Repeat("x", 2<<20)), 413, "request_too_large")
	running := make(chan answer)
	go func() { running <- s.messages(t, asked(`,"stream":true,"thinking":{"type":"disabled"}`)) }()
	eventually(t, "one runs", func() bool { n, _ := gen.state(); return n == 1 })
	waiting := make(chan answer)
	go func() { waiting <- s.messages(t, asked("")) }()
	eventually(t, "one waits", func() bool { return s.queue.Load().Waiting == 1 })
	a := s.messages(t, asked(""))
	want(s, "full", a, 529, "overloaded_error")
	if a.header.Get("Retry-After") == "" {
		t.Errorf("header %v", a.header)
	}
	want(s, "waited", <-waiting, 504, "timeout_error")
	go func() { waiting <- s.messages(t, asked(`,"stream":true`)) }()
	a = <-waiting
	if got := steadyMessages(t, a.body); a.status != 200 || !regexp.MustCompile(`^(: keep-alive\n\n)*event: error\ndata: {"type":"error","error":{"type":"timeout_error","message":"[^"]+"},"request_id":"REQ"}\n\n$`).MatchString(got) {
		t.Errorf("waited in a stream: %d %s", a.status, a.body)
	}
	close(gen.step)
	a = <-running
	// Where it stood still there is a sign of life.
	if got := a.body; !strings.HasPrefix(got, "event: message_start\n") || !strings.Contains(got, "event: ping\ndata: {\"type\":\"ping\"}\n\n") || strings.Contains(got, ": keep-alive") || !strings.HasSuffix(got, named("message_stop", "")) {
		t.Errorf("%s", got)
	}

	broken := start(t, setup{gen: &script{text: "ab", err: errors.New("device lost")}})
	a = broken.messages(t, asked(`,"stream":true`))
	if got := steadyMessages(t, a.body); !strings.HasPrefix(got, "event: message_start\n") || !strings.HasSuffix(got, named("error", `,"error":{"type":"api_error","message":"the request failed inside the server"},"request_id":"REQ"`)) || strings.Contains(got, "message_stop") {
		t.Errorf("%s", a.body)
	}
	if err := <-broken.served; err == nil {
		t.Error("the server goes on")
	}
	broken.served <- nil
}

// A client that leaves ends its request, in a stream and without.
func TestMessagesCancel(t *testing.T) {
	gen := &script{ids: slices.Repeat(tokenizer().Encode("x"), 100_000), delay: time.Millisecond}
	s := start(t, setup{gen: gen, front: front.Options{MaxTokens: 100_000, Context: 200_000}})
	for _, stream := range []bool{false, true} {
		r, err := http.NewRequest("POST", s.url+"/v1/messages", strings.NewReader(fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"Q"}],"stream":%v}`, stream)))
		if err != nil {
			t.Fatal(err)
		}
		c := &http.Client{Timeout: 100 * time.Millisecond, Transport: &http.Transport{}}
		res, err := c.Do(r)
		if (err == nil) != stream {
			t.Fatalf("stream %v: %v", stream, err)
		}
		if err == nil {
			if _, err := io.ReadAll(res.Body); err == nil {
				t.Error("the stream ended")
			}
			res.Body.Close()
		}
		c.CloseIdleConnections()
		eventually(t, "the request ends", func() bool { running, _ := gen.state(); return running == 0 && s.queue.Load() == engine.Load{} })
	}
	if n := strings.Count(s.log.String(), " client_disconnected | protocol messages"); n != 2 {
		t.Errorf("%d of 2 in the log:\n%s", n, s.log)
	}
}
