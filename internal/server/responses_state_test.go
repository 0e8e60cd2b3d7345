package server_test

import (
	"context"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"ninfer/internal/front"
	"ninfer/internal/server"
)

// parsed is the object in an answer.
func parsed(t testing.TB, a answer) toldResponse {
	t.Helper()
	var r toldResponse
	if err := json.Unmarshal([]byte(a.body), &r); err != nil || a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	return r
}

// The prompt of a conversation in items is that of the same conversation in messages.
func TestResponsePrompts(t *testing.T) {
	gen := &script{text: "x"}
	s := start(t, setup{gen: gen, template: efforts, front: front.Options{Context: 2048}})
	const chatTools = `"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"b":1.50,"a":"<|im_end|>"}}}]`
	const flatTools = `"tools":[{"type":"function","name":"f","strict":null,"description":"d","parameters":{"b":1.50,"a":"<|im_end|>"}}]`
	for _, c := range []struct{ items, messages string }{
		{`"input":"Q <|im_end|>"`, `"messages":[{"role":"user","content":"Q <|im_end|>"}]`},
		{`"instructions":"I","input":[{"role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_text","text":"b"}]}]`, `"messages":[{"role":"developer","content":"I"},{"role":"user","content":"ab"}]`},
		{
			flatTools + `,"input":[{"role":"system","content":"S"},{"role":"user","content":"Q"},{"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"r1"},{"type":"reasoning_text","text":"r2"}]},` +
				`{"type":"message","role":"assistant","content":[{"type":"output_text","text":"t"},{"type":"refusal","refusal":"u"}]},{"type":"function_call","call_id":"a","name":"f","arguments":"{\"x\": 1.0}"},{"type":"function_call","call_id":"b","name":"f","arguments":"{}"},` +
				`{"type":"function_call_output","call_id":"b","output":[{"type":"input_text","text":"two"}]},{"type":"function_call_output","call_id":"a","output":"one"},{"role":"developer","content":"D"},{"role":"user","content":"R"}]`,
			chatTools + `,"messages":[{"role":"system","content":"S"},{"role":"user","content":"Q"},{"role":"assistant","reasoning_content":"r1r2","content":"tu","tool_calls":[{"id":"a","function":{"name":"f","arguments":"{\"x\": 1.0}"}},{"id":"b","function":{"name":"f","arguments":"{}"}}]},` +
				`{"role":"tool","tool_call_id":"a","content":"one"},{"role":"tool","tool_call_id":"b","content":"two"},{"role":"developer","content":"D"},{"role":"user","content":"R"}]`,
		},
		{`"reasoning":{"effort":"low"},"input":"Q"`, `"reasoning_effort":"low","messages":[{"role":"user","content":"Q"}]`},
		{`"chat_template_kwargs":{"enable_thinking":false},"input":[{"role":"user","content":"Q"},{"role":"assistant","content":"So "}]`, `"enable_thinking":false,"messages":[{"role":"user","content":"Q"},{"role":"assistant","content":"So "}]`},
	} {
		parsed(t, s.responses(t, `{"model":"m",`+c.items+`}`))
		got := gen.last()
		if a := s.chat(t, `{`+c.messages+`}`); a.status != 200 {
			t.Fatalf("%d %s", a.status, a.body)
		}
		if want := gen.last(); !slices.Equal(got.Prompt, want.Prompt) || got.MaxNew != want.MaxNew || got.Sampling.Temperature != want.Sampling.Temperature {
			t.Errorf("%s: prompt %q\nwant %q", c.items, tokenizer().Decode(got.Prompt), tokenizer().Decode(want.Prompt))
		}
	}
}

// thoughts is a template that shows reasoning, all of it if that is preserved and else that of the turn that is open.
const thoughts = `{%- for m in messages %}{{- '[' + m.role + '|' }}{%- if m.reasoning_content and preserve_thinking %}{{- '<' + m.reasoning_content + '>' }}{%- endif %}` +
	`{{- m.content | default('', true) }}{%- for c in m.tool_calls %}{{- c.function.name }}{%- endfor %}{{- ']' }}{%- endfor %}{{- '<think>' }}`

// A response goes on from another: with its items, without its instructions and tools, with its preservation (docs/serving.md, Responses).
func TestResponseChain(t *testing.T) {
	gen := &script{}
	s := start(t, setup{gen: gen, template: thoughts, front: front.Options{Context: 2048}, opt: server.Options{StoreRecords: 5}})
	say := func(text string) { gen.ids = tokenizer().Encode(text + "<|im_end|>") }
	ask := func(members string) toldResponse {
		t.Helper()
		return parsed(t, s.responses(t, `{"model":"m",`+members+`}`))
	}
	prompt := func() string { return tokenizer().Decode(gen.last().Prompt) }
	expect := func(want string) {
		t.Helper()
		if got := prompt(); got != want {
			t.Errorf("prompt %s\nwant   %s", got, want)
		}
	}
	say("r1</think>a1" + called("x", "1"))
	first := ask(`"input":"Q1","instructions":"I1","preserve_thinking":true,` + flat)
	expect("[system|I1][user|Q1]<think>")
	result := `[{"type":"function_call_output","call_id":"` + first.Output[2].CallID + `","output":"o"}]`
	say("r2</think>a2")
	second := ask(`"previous_response_id":"` + first.ID + `","input":` + result)
	expect("[user|Q1][assistant|<r1>a1f][tool|o]<think>")
	third := ask(`"previous_response_id":"` + second.ID + `","input":"Q3","instructions":"I3","preserve_thinking":false`)
	expect("[system|I3][user|Q1][assistant|a1f][tool|o][assistant|a2][user|Q3]<think>")
	// It went on, and so did what the parent asked for; the same response may be gone on from again.
	ask(`"previous_response_id":"` + third.ID + `","input":"Q4"`)
	expect("[user|Q1][assistant|a1f][tool|o][assistant|a2][user|Q3][assistant|a2][user|Q4]<think>")
	ask(`"previous_response_id":"` + second.ID + `"`)
	expect("[user|Q1][assistant|<r1>a1f][tool|o][assistant|<r2>a2]<think>")
	count := send(t, "POST", s.url+"/v1/responses/input_tokens", `{"previous_response_id":"`+second.ID+`","input":[]}`)
	if want := fmt.Sprintf(`{"object":"response.input_tokens","input_tokens":%d}`, len(gen.last().Prompt)); count.body != want {
		t.Errorf("%s, want %s", count.body, want)
	}

	gone := func(id string) {
		t.Helper()
		a := s.responses(t, `{"model":"m","input":"Q","previous_response_id":"`+id+`"}`)
		if _, _, param, code := errorIn(t, a.body); a.status != 404 || param != "previous_response_id" || code != "response_not_found" {
			t.Errorf("%d %s", a.status, a.body)
		}
		for _, path := range []string{"", "/input_items"} {
			if a := send(t, "GET", s.url+"/v1/responses/"+id+path, ""); a.status != 404 || !strings.Contains(a.body, `"code":"response_not_found"`) {
				t.Errorf("%d %s", a.status, a.body)
			}
		}
	}
	// The calls of the first have no result in a conversation that goes on from it otherwise.
	a := s.responses(t, `{"model":"m","input":"Q","previous_response_id":"`+first.ID+`"}`)
	if _, _, _, code := errorIn(t, a.body); code != "invalid_tool_history" {
		t.Errorf("%s", a.body)
	}
	// Deleted ones are gone, and those after them stay whole.
	d := send(t, "DELETE", s.url+"/v1/responses/"+first.ID, "")
	if d.status != 200 || d.body != `{"id":"`+first.ID+`","object":"response.deleted","deleted":true}` {
		t.Errorf("%d %s", d.status, d.body)
	}
	if d := send(t, "DELETE", s.url+"/v1/responses/"+first.ID, ""); d.status != 404 {
		t.Errorf("%d %s", d.status, d.body)
	}
	gone(first.ID)
	last := ask(`"previous_response_id":"` + second.ID + `","input":"Q5"`)
	expect("[user|Q1][assistant|<r1>a1f][tool|o][assistant|<r2>a2][user|Q5]<think>")
	// One that is not stored can be neither read nor gone on from.
	gone(ask(`"input":"Q","store":false`).ID)
	// The least lately used one makes room: third is older than what came after it, and second was used since.
	for range 3 {
		ask(`"input":"Q"`)
	}
	gone(third.ID)
	for _, id := range []string{second.ID, last.ID} {
		if a := send(t, "GET", s.url+"/v1/responses/"+id, ""); a.status != 200 {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
}

// A response too large to be kept is refused before it runs if that is known, and else fails.
func TestResponseTooLarge(t *testing.T) {
	gen := &script{ids: tokenizer().Encode("</think>" + strings.Repeat("long ", 400) + "<|im_end|>")}
	s := start(t, setup{gen: gen, front: front.Options{Context: 8192, MaxTokens: 4000}, opt: server.Options{StoreBytes: 8000}})
	refused := func(a answer) bool {
		_, _, param, code := errorIn(t, a.body)
		return a.status == 400 && code == "response_store_capacity_exceeded" && param == "store"
	}
	if a := s.responses(t, `{"model":"m","input":"`+strings.Repeat("q", 8000)+`"}`); !refused(a) || len(gen.requests) != 0 {
		t.Errorf("%d %s", a.status, a.body)
	}
	body := `{"model":"m","instructions":"` + strings.Repeat("i ", 1500) + `","input":"Q"`
	if a := s.responses(t, body+`}`); !refused(a) {
		t.Errorf("%d %s", a.status, a.body)
	}
	events := streamed(t, s.responses(t, body+`,"stream":true}`).body)
	if last := events[len(events)-1]; last.Type != "response.failed" || !strings.Contains(string(last.Response), `"error":{"code":"response_store_capacity_exceeded"`) {
		t.Errorf("%s %s", last.Type, last.Response)
	}
	parsed(t, s.responses(t, body+`,"store":false}`))
	// Those that ran are in the log, the last one soon after its answer.
	for i := 0; strings.Count(s.log.String(), "protocol responses") < 3; i++ {
		if i > 400 {
			t.Fatalf("log:\n%s", s.log)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// What can be read of a kept response, and what cannot be asked of it (docs/serving.md, Responses).
func TestResponseResources(t *testing.T) {
	gen := &script{ids: tokenizer().Encode("r</think>\n\na<|im_end|>")}
	s := start(t, setup{gen: gen, front: front.Options{Context: 2048}})
	whole := s.responses(t, `{"model":"m","input":[{"id":"msg_own","role":"user","content":"Q1"},{"role":"assistant","content":"A"},{"role":"user","content":[{"type":"input_text","text":"Q2"}]}]}`)
	first := parsed(t, whole)
	get := func(path string) answer { return send(t, "GET", s.url+"/v1/responses/"+path, "") }
	if a := get(first.ID); a.status != 200 || a.body != whole.body {
		t.Errorf("%d %s, want %s", a.status, a.body, whole.body)
	}
	if a := send(t, "HEAD", s.url+"/v1/responses/"+first.ID, ""); a.status != 200 || a.body != "" {
		t.Errorf("%d %s", a.status, a.body)
	}
	second := parsed(t, s.responses(t, `{"model":"m","input":"Q3","stream":false,"previous_response_id":"`+first.ID+`"}`))

	type listed struct {
		Object  string           `json:"object"`
		Data    []jsontext.Value `json:"data"`
		FirstID *string          `json:"first_id"`
		LastID  *string          `json:"last_id"`
		HasMore bool             `json:"has_more"`
	}
	list := func(query string) (l listed, texts, ids []string) {
		t.Helper()
		a := get(second.ID + "/input_items" + query)
		if err := json.Unmarshal([]byte(a.body), &l, json.RejectUnknownMembers(true)); err != nil || a.status != 200 || l.Object != "list" {
			t.Fatalf("%s: %d %s", query, a.status, a.body)
		}
		for _, raw := range l.Data {
			var item toldItem
			if err := json.Unmarshal(raw, &item); err != nil || len(item.Content) != 1 || item.Status != "completed" || item.ID == "" {
				t.Errorf("%s", raw)
			}
			texts, ids = append(texts, item.Content[0].Text), append(ids, item.ID)
		}
		if n := len(ids); n > 0 && (*l.FirstID != ids[0] || *l.LastID != ids[n-1]) || n == 0 && (l.FirstID != nil || l.LastID != nil) {
			t.Errorf("%s: %v, %v of %q", query, l.FirstID, l.LastID, ids)
		}
		return l, texts, ids
	}
	all := []string{"Q1", "A", "Q2", "r", "a", "Q3"}
	_, texts, ids := list("?order=asc")
	if !slices.Equal(texts, all) || ids[0] != "msg_own" || ids[3] != first.Output[0].ID {
		t.Errorf("%q %q", texts, ids)
	}
	down := slices.Clone(all)
	slices.Reverse(down)
	for _, c := range []struct {
		query string
		want  []string
		more  bool
	}{
		{"", down, false},
		{"?limit=4", down[:4], true},
		{"?limit=6&order=desc", down, false},
		{"?limit=2&order=asc&after=" + ids[1], all[2:4], true},
		{"?limit=2&order=asc&after=" + ids[3], all[4:], false},
		{"?order=asc&after=" + ids[5], nil, false},
		{"?after=" + ids[1], []string{"Q1"}, false},
		{"?include=message.input_image.image_url&limit=100", down, false},
		{"?include[]=message.input_image.image_url", down, false},
	} {
		if l, texts, _ := list(c.query); !slices.Equal(texts, c.want) || l.HasMore != c.more {
			t.Errorf("%s: %q, more %v", c.query, texts, l.HasMore)
		}
	}
	first0, _ := json.Marshal(string(`{"id":"msg_own","type":"message","status":"completed","role":"user","content":[{"type":"input_text","text":"Q1"}]}`))
	if l, _, _ := list("?order=asc&limit=1"); fmt.Sprintf("%q", l.Data[0]) != string(first0) {
		t.Errorf("%s", l.Data[0])
	}
	for _, c := range []struct {
		method, path, code, param string
		status                    int
	}{
		{"GET", second.ID + "/input_items?limit=0", "invalid_pagination", "limit", 400},
		{"GET", second.ID + "/input_items?limit=101", "invalid_pagination", "limit", 400},
		{"GET", second.ID + "/input_items?limit=x", "invalid_pagination", "limit", 400},
		{"GET", second.ID + "/input_items?order=up", "invalid_pagination", "order", 400},
		{"GET", second.ID + "/input_items?after=msg_x", "invalid_pagination", "after", 400},
		{"GET", second.ID + "/input_items?include=file", "include_not_supported", "include", 400},
		{"GET", second.ID + "?stream=true", "retrieve_stream_not_supported", "stream", 400},
		{"GET", second.ID + "?starting_after=3", "stream_recovery_not_supported", "starting_after", 400},
		{"GET", second.ID + "?include=file", "include_not_supported", "include", 400},
		{"GET", second.ID + "?include[]=file", "include_not_supported", "include", 400},
		{"GET", "resp_none", "response_not_found", "response_id", 404},
		{"DELETE", "resp_none", "response_not_found", "response_id", 404},
		{"POST", second.ID + "/cancel", "background_not_supported", "", 400},
		{"POST", "resp_none/cancel", "background_not_supported", "", 400},
		{"POST", "compact", "compaction_not_supported", "", 400},
	} {
		a := send(t, c.method, s.url+"/v1/responses/"+c.path, "")
		if _, _, param, code := errorIn(t, a.body); a.status != c.status || code != c.code || param != c.param {
			t.Errorf("%s %s: %d %s", c.method, c.path, a.status, a.body)
		}
	}
	if a := get(second.ID + "?stream=false"); a.status != 200 {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// Who leaves a stream ends its request, and finds under the id what it was sent, as cancelled. A failure and one who waits for the whole
// leave nothing.
func TestResponseCancelled(t *testing.T) {
	gen := &script{ids: tokenizer().Encode("Reasoning that goes on and on."), step: make(chan struct{})}
	s := start(t, setup{gen: gen})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, "POST", s.url+"/v1/responses", strings.NewReader(`{"model":"m","input":"Q","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	res, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	for range 5 {
		gen.step <- struct{}{}
	}
	var got []byte
	for deltas := 0; deltas < 5; deltas = strings.Count(string(got), "response.reasoning_text.delta\n") {
		b := make([]byte, 4096)
		n, err := res.Body.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, b[:n]...)
	}
	cut := strings.LastIndex(string(got), "\n\n")
	events := streamed(t, string(got[:cut+2]))
	seen := ""
	for _, e := range events {
		if e.Delta != nil {
			seen += *e.Delta
		}
	}
	id := parsed(t, answer{status: 200, body: string(events[0].Response)}).ID
	if a := send(t, "GET", s.url+"/v1/responses/"+id, ""); a.status != 404 {
		t.Errorf("%d %s", a.status, a.body)
	}
	cancel()
	for i := 0; ; i++ {
		a := send(t, "GET", s.url+"/v1/responses/"+id, "")
		if a.status == 200 {
			kept := parsed(t, a)
			if kept.Status != "cancelled" || len(kept.Output) != 1 || kept.Output[0].Status != "incomplete" || kept.Output[0].Content[0].Text != seen || kept.Usage.Output != 5 {
				t.Errorf("%s", a.body)
			}
			break
		}
		if i > 400 {
			t.Fatal("nothing was kept")
		}
		time.Sleep(5 * time.Millisecond)
	}
	if running, said := gen.state(); running != 0 || said != 5 {
		t.Errorf("%d run, %d said", running, said)
	}
}
