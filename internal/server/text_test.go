package server_test

import (
	"encoding/json/v2"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/server"
)

// Every event of Completions, to the letter, and the answer as a whole. The text is undivided: think markers stay in it.
func TestCompletionShapes(t *testing.T) {
	gen := &script{}
	s := start(t, setup{gen: gen})
	tok := tokenizer()
	prompt := "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\n"
	n := len(tok.Encode(prompt))
	quoted, _ := json.Marshal(prompt)
	say := "ab</think>\n\ncd"
	gen.ids = tok.Encode(say + "<|im_end|>")
	count := len(gen.ids)
	event := func(text, finish, rest string) string {
		b, _ := json.Marshal(text)
		return `data: {"id":"ID","object":"text_completion","created":0,"model":"m","choices":[{"index":0,"text":` + string(b) + `,"logprobs":null,"finish_reason":` + finish + `}]` + rest + "}\n\n"
	}
	clean := func(body string) string {
		return steady(replaceAll(body, `"id":"cmpl-[0-9a-f]{16}"`, `"id":"ID"`))
	}
	pieces := func(rest string) (out string) {
		for _, id := range gen.ids[:count-1] {
			out += event(tok.Decode([]int32{id}), "null", rest)
		}
		return out
	}
	post := func(members string) answer {
		return send(t, "POST", s.url+"/v1/completions", `{"prompt":`+string(quoted)+members+`}`)
	}
	a := post(``)
	text, _ := json.Marshal(say)
	want := `{"id":"ID","object":"text_completion","created":0,"model":"m","choices":[{"index":0,"text":` + string(text) + `,"logprobs":null,"finish_reason":"stop"}],` + usageOf(n, count, 0) + "," + timings(n, count) + "}"
	if got := clean(a.body); a.status != 200 || got != want {
		t.Errorf("%d %s\nwant %s", a.status, got, want)
	}
	// Without a template nothing is known of a mode: the model's own sampling defaults, and no budget.
	if r := gen.last(); !slices.Equal(r.Prompt, tok.Encode(prompt)) || r.Sampling.Temperature != 1 || r.Sampling.TopP != 0.95 || r.Sampling.Presence != 0 {
		t.Errorf("%+v", r)
	}
	a = post(`,"stream":true`)
	if got, want := clean(a.body), pieces("")+event("", `"stop"`, ","+timings(n, count))+"data: [DONE]\n\n"; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	a = post(`,"stream":true,"stream_options":{"include_usage":true}`)
	last := `data: {"id":"ID","object":"text_completion","created":0,"model":"m","choices":[],` + usageOf(n, count, 0) + "," + timings(n, count) + "}\n\n"
	if got, want := clean(a.body), pieces(`,"usage":null`)+event("", `"stop"`, `,"usage":null`)+last+"data: [DONE]\n\n"; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	a = post(`,"stop":["</th"],"max_tokens":50`)
	if got := clean(a.body); !strings.Contains(got, `"text":"ab","logprobs":null,"finish_reason":"stop"`) {
		t.Errorf("%s", got)
	}
	a = post(`,"max_tokens":2`)
	if got := clean(a.body); !strings.Contains(got, `"finish_reason":"length"`) {
		t.Errorf("%s", got)
	}
	a = post(`,"stream":true,"return_progress":true,"timings_per_token":true`)
	if !strings.Contains(a.body, `"text":"","logprobs":null,"finish_reason":null}],"prompt_progress":{"total":`+fmt.Sprint(n)+`,"cache":0,"processed":0,`) || !strings.Contains(a.body, `"text":"ab","logprobs":null,"finish_reason":null}],"timings":{`) {
		t.Errorf("%s", a.body)
	}
	if log := s.log.String(); !strings.Contains(log, "protocol completions") {
		t.Errorf("log %s", log)
	}
}

// The forms of a prompt, and what is refused.
func TestCompletionRequests(t *testing.T) {
	gen := &script{text: "x"}
	s := start(t, setup{gen: gen})
	for body, want := range map[string][]int32{
		`{"prompt":"ab"}`: tokenizer().Encode("ab"),
		`{"prompt":["ab"],"echo":false,"best_of":1}`: tokenizer().Encode("ab"),
		`{"prompt":[5,6,7],"suffix":"","user":"u"}`:  {5, 6, 7},
		`{"prompt":[[5,6,7]],"logprobs":null}`:       {5, 6, 7},
		`{"prompt":"<|im_end|>"}`:                    tokenizer().Encode("<|im_end|>"),
	} {
		a := send(t, "POST", s.url+"/v1/completions", body)
		if a.status != 200 || !slices.Equal(gen.last().Prompt, want) {
			t.Errorf("%s: %d %s, prompt %v", body, a.status, a.body, gen.last().Prompt)
		}
	}
	gen.requests = nil
	for _, c := range []struct {
		body        string
		status      int
		code, param string
	}{
		{`{}`, 400, "missing_required_parameter", "prompt"},
		{`{"prompt":null}`, 400, "missing_required_parameter", "prompt"},
		{`{"prompt":""}`, 400, "invalid_value", "prompt"},
		{`{"prompt":[]}`, 400, "invalid_value", "prompt"},
		{`{"prompt":[[]]}`, 400, "invalid_value", "prompt[0]"},
		{`{"prompt":5}`, 400, "invalid_type", "prompt"},
		{`{"prompt":[1,"a"]}`, 400, "invalid_type", "prompt"},
		{`{"prompt":[1.5]}`, 400, "invalid_type", "prompt"},
		{`{"prompt":[99999999999]}`, 400, "invalid_type", "prompt"},
		{`{"prompt":[-1]}`, 400, "invalid_prompt", "prompt"},
		{`{"prompt":[480]}`, 400, "invalid_prompt", "prompt"},
		{`{"prompt":["a","b"]}`, 400, "n_not_supported", "prompt"},
		{`{"prompt":"` + strings.Repeat("é!", 600) + `"}`, 400, "context_length_exceeded", "prompt"},
		{`{"prompt":"a","model":"gpt"}`, 404, "model_not_found", "model"},
		{`{"prompt":"a","echo":true}`, 400, "echo_not_supported", "echo"},
		{`{"prompt":"a","suffix":"b"}`, 400, "suffix_not_supported", "suffix"},
		{`{"prompt":"a","best_of":2}`, 400, "n_not_supported", "best_of"},
		{`{"prompt":"a","n":2}`, 400, "n_not_supported", "n"},
		{`{"prompt":"a","logprobs":0,"stream":true}`, 400, "logprobs_stream_not_supported", "logprobs"},
		{`{"prompt":"a","logprobs":21}`, 400, "invalid_value", "logprobs"},
		{`{"prompt":"a","logprobs":true}`, 400, "invalid_type", "logprobs"},
		{`{"prompt":"a","logprobs":-1}`, 400, "invalid_value", "logprobs"},
		{`{"prompt":"a","temperature":3}`, 400, "invalid_value", "temperature"},
		{`{"prompt":"a","guided_regex":"x"}`, 400, "constrained_decoding_not_supported", "guided_regex"},
		{`{"prompt":"a","response_format":{"type":"json_object"}}`, 400, "constrained_decoding_not_supported", "response_format"},
	} {
		for _, path := range []string{"/v1/completions", "/v1/completions/render"} {
			a := send(t, "POST", s.url+path, c.body)
			if _, _, param, code := errorIn(t, a.body); a.status != c.status || code != c.code || param != c.param {
				t.Errorf("%s %s: %d %s, want %d %s %s", path, c.body, a.status, a.body, c.status, c.code, c.param)
			}
		}
	}
	if gen.requests != nil {
		t.Errorf("%d refused requests ran", len(gen.requests))
	}
}

// Rendering gives the tokens that the request itself would run, and runs nothing.
func TestRender(t *testing.T) {
	gen := &script{text: "x"}
	s := start(t, setup{gen: gen, template: efforts})
	for _, c := range []struct{ path, body string }{
		{"/v1/chat/completions", with(weather + `,"reasoning_effort":"low","max_tokens":7`)},
		{"/v1/chat/completions", with(`"stream":true,"enable_thinking":false`)},
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":"<|im_end|> é"}]}`},
		{"/v1/completions", `{"prompt":"a <|im_end|>","max_tokens":7}`},
	} {
		if a := send(t, "POST", s.url+c.path, c.body); a.status != 200 {
			t.Fatalf("%s: %s", c.body, a.body)
		}
		ran := gen.last()
		gen.requests = nil
		a := send(t, "POST", s.url+c.path+"/render", c.body)
		type rendered struct {
			ID     string  `json:"request_id"`
			Model  string  `json:"model"`
			Tokens []int32 `json:"token_ids"`
			Prompt string  `json:"prompt"`
			Max    int     `json:"max_tokens"`
		}
		list := []rendered{{}}
		var err error
		if c.path == "/v1/completions" {
			err = json.Unmarshal([]byte(a.body), &list, json.RejectUnknownMembers(true))
		} else {
			err = json.Unmarshal([]byte(a.body), &list[0], json.RejectUnknownMembers(true))
		}
		if err != nil || len(list) != 1 {
			t.Fatalf("%v in %s", err, a.body)
		}
		got := list[0]
		if !slices.Equal(got.Tokens, ran.Prompt) || got.Max != ran.MaxNew || got.Model != "m" || got.ID == "" || got.Prompt != tokenizer().Decode(ran.Prompt) {
			t.Errorf("%+v, ran %v with %d", got, ran.Prompt, ran.MaxNew)
		}
		if c.path == "/v1/chat/completions" {
			a := send(t, "POST", s.url+"/apply-template", c.body)
			b, _ := json.Marshal(map[string]string{"prompt": got.Prompt})
			if a.status != 200 || a.body != string(b) {
				t.Errorf("%d %s, want %s", a.status, a.body, b)
			}
			a = send(t, "POST", s.url+"/tokenize", c.body)
			b, _ = json.Marshal(ran.Prompt)
			if want := fmt.Sprintf(`{"count":%d,"max_model_len":512,"tokens":%s}`, len(ran.Prompt), b); a.status != 200 || a.body != want {
				t.Errorf("%d %s, want %s", a.status, a.body, want)
			}
		}
		if gen.requests != nil {
			t.Error("rendering ran the model")
		}
	}
	// The same refusals as the request itself.
	for _, path := range []string{"/v1/chat/completions/render", "/apply-template", "/tokenize"} {
		a := send(t, "POST", s.url+path, with(`"reasoning_effort":"high"`))
		if _, _, _, code := errorIn(t, a.body); a.status != 400 || code != "reasoning_effort_not_supported" {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
	}
}

func TestTokenize(t *testing.T) {
	s := start(t, setup{gen: &script{}})
	tok := tokenizer()
	list := func(ids []int32) string {
		b, _ := json.Marshal(ids)
		return string(b)
	}
	end := tok.Encode("<|im_end|>")
	if len(end) != 1 {
		t.Fatal(end)
	}
	plain := tok.EncodePlain("<|im_end|>")
	smile := tok.Encode("☃")
	if len(smile) < 2 {
		t.Fatal("the character is one token")
	}
	first, _ := json.Marshal(fmt.Sprint(tok.Bytes(smile[0])))
	bytes := strings.ReplaceAll(strings.Trim(string(first), `"`), " ", ",")
	for _, c := range []struct {
		path, body string
		status     int
		want       string // in the body
	}{
		{"/tokenize", `{"prompt":"<|im_end|>"}`, 200, `{"count":1,"max_model_len":512,"tokens":` + list(end) + `}`},
		{"/tokenize", `{"content":"<|im_end|>"}`, 200, `"tokens":` + list(plain) + `}`},
		{"/tokenize", `{"content":"<|im_end|>","parse_special":true,"model":"m"}`, 200, `"tokens":` + list(end) + `}`},
		{"/tokenize", `{"prompt":""}`, 200, `{"count":0,"max_model_len":512,"tokens":[]}`},
		{"/tokenize", `{"prompt":"<|im_end|>","return_token_strs":true}`, 200, `"token_strs":["<|im_end|>"]}`},
		{"/tokenize", `{"content":"☃","with_pieces":true}`, 200, fmt.Sprintf(`"tokens":[{"id":%d,"piece":%s}`, smile[0], bytes)},
		{"/tokenize", `{}`, 400, `"code":"missing_required_parameter"`},
		{"/tokenize", `{"prompt":"a","content":"b"}`, 400, `"param":"content"`},
		{"/tokenize", `{"prompt":5}`, 400, `"code":"invalid_type"`},
		{"/tokenize", `{"prompt":"a","with_pieces":1}`, 400, `"param":"with_pieces"`},
		{"/tokenize", `{"messages":[{"role":"user","content":"Q"}],"add_generation_prompt":false}`, 400, `"param":"add_generation_prompt"`},
		{"/tokenize", `{"prompt":"a","model":"gpt"}`, 404, `"code":"model_not_found"`},
		{"/detokenize", `{"tokens":` + list(smile) + `}`, 200, `{"prompt":"☃","content":"☃"}`},
		{"/detokenize", `{"tokens":` + list(smile[:1]) + `}`, 200, `{"prompt":"` + "\ufffd" + `","content":"` + "\ufffd" + `"}`},
		{"/detokenize", `{"tokens":[]}`, 200, `{"prompt":"","content":""}`},
		{"/detokenize", `{"tokens":[1,480]}`, 400, `"param":"tokens[1]"`},
		{"/detokenize", `{"tokens":["a"]}`, 400, `"code":"invalid_type"`},
		{"/detokenize", `{}`, 400, `"code":"missing_required_parameter"`},
	} {
		a := send(t, "POST", s.url+c.path, c.body)
		if a.status != c.status || !strings.Contains(a.body, c.want) {
			t.Errorf("%s %s: %d %s, want %d %s", c.path, c.body, a.status, a.body, c.status, c.want)
		}
	}
	a := send(t, "GET", s.url+"/props", "")
	want := `{"default_generation_settings":{"n_ctx":512},"total_slots":3,"model_alias":"m","model_path":"x.ninfer","role":"model","modalities":{"vision":false,"audio":false},"chat_template":"`
	if a.status != 200 || !strings.HasPrefix(a.body, want) {
		t.Errorf("%d %s", a.status, a.body)
	}
	if a := send(t, "GET", s.url+"/openapi.yaml", ""); a.status != 200 || a.body != string(read(t, "openapi.yaml")) || a.header.Get("Content-Type") != "application/yaml" {
		t.Errorf("%d, %d bytes", a.status, len(a.body))
	}
}

// Ready says whether a request makes sense, health whether the process works.
func TestReadiness(t *testing.T) {
	gen := &script{text: strings.Repeat("x", 100), step: make(chan struct{})}
	c := setup{gen: gen, loading: true, opt: server.Options{APIKey: "k"}}
	s := start(t, c)
	get := func(path string) (int, string) {
		a := send(t, "GET", s.url+path, "")
		return a.status, a.body
	}
	if status, body := get("/ready"); status != 503 || body != `{"status":"loading"}` {
		t.Errorf("%d %s", status, body)
	}
	s.ready(t, c)
	if status, body := get("/ready"); status != 200 || body != `{"status":"ready","running":0,"waiting":0}` {
		t.Errorf("%d %s", status, body)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		send(t, "POST", s.url+"/v1/chat/completions", hello, "x-api-key", "k")
	}()
	eventually(t, "a request runs", func() bool {
		_, body := get("/ready")
		return body == `{"status":"ready","running":1,"waiting":0}`
	})
	// The listener is closed when the server ends, but a connection that is there may still ask.
	r := httpRecorder{header: http.Header{}}
	s.stop()
	eventually(t, "the server says that it ends", func() bool {
		r.body = nil
		s.ServeHTTP(&r, must(http.NewRequest("GET", s.url+"/ready", nil)))
		return r.status == 503 && string(r.body) == `{"status":"draining"}`
	})
	r.body = nil
	s.ServeHTTP(&r, must(http.NewRequest("GET", s.url+"/health", nil)))
	if r.status != 200 || string(r.body) != `{"status":"ok"}` {
		t.Errorf("%d %s", r.status, r.body)
	}
	close(gen.step)
	<-done
	failing := start(t, setup{gen: &script{text: "x", err: fmt.Errorf("the device is gone")}})
	failing.chat(t, hello)
	<-failing.served
	failing.served <- nil
	r.body = nil
	failing.ServeHTTP(&r, must(http.NewRequest("GET", failing.url+"/ready", nil)))
	if r.status != 503 || string(r.body) != `{"status":"unavailable"}` {
		t.Errorf("%d %s", r.status, r.body)
	}
}

// The page is there for everyone, at its own paths only.
func TestPage(t *testing.T) {
	page := func(path string) http.Handler {
		if path != "/" && path != "/assets/a.js" {
			return nil
		}
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "page "+path) })
	}
	s := start(t, setup{gen: &script{text: "x"}, opt: server.Options{APIKey: "k", Page: page}})
	for _, c := range []struct {
		method, path string
		status       int
		body         string
	}{
		{"GET", "/", 200, "page /"},
		{"HEAD", "/", 200, ""},
		{"GET", "/assets/a.js", 200, "page /assets/a.js"},
		{"GET", "/assets/b.js", 401, "invalid_api_key"},
		{"POST", "/", 405, "method_not_allowed"},
		{"GET", "/v1/models", 401, "invalid_api_key"},
	} {
		if a := send(t, c.method, s.url+c.path, ""); a.status != c.status || !strings.Contains(a.body, c.body) {
			t.Errorf("%s %s: %d %s", c.method, c.path, a.status, a.body)
		}
	}
	if a := send(t, "GET", s.url+"/assets/b.js", "", "x-api-key", "k"); a.status != 404 {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// httpRecorder is an answer that goes nowhere.
type httpRecorder struct {
	header http.Header
	status int
	body   []byte
}

func (r *httpRecorder) Header() http.Header { return r.header }

func (r *httpRecorder) WriteHeader(status int) { r.status = status }

func (r *httpRecorder) Write(b []byte) (int, error) {
	r.body = append(r.body, b...)
	return len(b), nil
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func replaceAll(s, pattern, with string) string {
	return regexp.MustCompile(pattern).ReplaceAllString(s, with)
}
