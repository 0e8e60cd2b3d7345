package server_test

import (
	"bytes"
	"context"
	"encoding/json/v2"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"ninfer/internal/engine"
	"ninfer/internal/front"
	"ninfer/internal/server"
	"ninfer/internal/text/chat"
	"ninfer/internal/text/token"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const micro = "../../testdata/micro-radixark"

func read(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var tokenizer = sync.OnceValue(func() *token.Tokenizer {
	var files [2][]byte
	for i, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		b, err := os.ReadFile(filepath.Join(micro, "checkpoint", name))
		if err != nil {
			panic(err)
		}
		files[i] = b
	}
	tok, err := token.Load(files[0], files[1])
	if err != nil {
		panic(err)
	}
	return tok
})

// efforts is a template that knows efforts, and shows everything of a message.
const efforts = `{%- if reasoning_effort is defined and reasoning_effort not in ['low', 'medium', 'xhigh'] %}{{ raise_exception('Unsupported reasoning effort: ' ~ reasoning_effort) }}{%- endif %}` +
	`{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}` +
	`{%- for m in messages %}{%- if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('Unexpected message role.') }}{%- endif %}` +
	`{{- '<|im_start|>' + m.role + '\n' }}{%- if m.tool_calls %}{{- m.tool_calls | tojson }}{%- endif %}{{- m.content | default('', true) }}{{- '<|im_end|>\n' }}{%- endfor %}` +
	`{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if reasoning_effort is defined %}{{- reasoning_effort }}{%- endif %}` +
	`{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- else %}{{- '<think>\n' }}{%- endif %}{%- endif %}`

// script is a generator that says a text. Each token takes a while, or waits for a step.
type script struct {
	text  string
	ids   []int32 // instead of text
	delay time.Duration
	step  chan struct{} // if not nil, one receive for a token
	err   error         // after the text

	reason engine.Reason // after the text; empty is the limit
	cached int           // tokens of the prompt that need not run

	logprobs []engine.Logprob // of the outcome

	mu       sync.Mutex
	requests []engine.Request
	running  int
	said     int // tokens committed in all
	answered int // tokens of the last request that ended
}

func (s *script) Generate(ctx context.Context, r engine.Request) (engine.Outcome, error) {
	s.mu.Lock()
	s.requests = append(s.requests, r)
	s.running++
	s.mu.Unlock()
	var out engine.Outcome
	defer func() {
		s.mu.Lock()
		s.running--
		s.answered = len(out.IDs)
		s.mu.Unlock()
	}()
	out = engine.Outcome{Logprobs: s.logprobs, Stats: engine.Stats{PromptTokens: len(r.Prompt)}}
	r.Progress(s.cached)
	r.Progress(len(r.Prompt))
	ids := s.ids
	if ids == nil {
		ids = tokenizer().Encode(s.text)
	}
	for _, id := range ids {
		if len(out.IDs) >= r.MaxNew {
			out.Reason = engine.Length
			return out, nil
		}
		if s.step != nil {
			select {
			case <-s.step:
			case <-ctx.Done():
			}
		}
		if s.delay > 0 {
			select {
			case <-time.After(s.delay):
			case <-ctx.Done():
			}
		}
		if ctx.Err() != nil {
			out.Reason = engine.Cancelled
			return out, nil
		}
		v := r.Watcher.Preview([]int32{id})
		kept := slices.Concat([]int32{id}[:v.Keep], v.Insert)
		out.IDs = append(out.IDs, kept...)
		s.mu.Lock()
		s.said += len(kept)
		s.mu.Unlock()
		if err := r.Watcher.Commit(kept); err != nil {
			return out, err
		}
		if v.Reason != engine.Continue {
			out.Reason = v.Reason
			return out, nil
		}
	}
	if out.Reason = s.reason; out.Reason == engine.Continue {
		out.Reason = engine.Length
	}
	return out, s.err
}

// serial is a worker that lets a script run one request after the other, each to its end.
type serial struct {
	gen   *script
	queue []handed
}

type handed struct {
	ctx    context.Context
	id     engine.RequestID
	req    engine.Request
	onRun  func()
	onDone func(engine.Outcome, error)
}

func (s *serial) Check(engine.Request) error { return nil }

func (s *serial) Add(ctx context.Context, id engine.RequestID, r engine.Request, onRun func(), onDone func(engine.Outcome, error)) error {
	s.queue = append(s.queue, handed{ctx, id, r, onRun, onDone})
	return nil
}

func (s *serial) Remove(id engine.RequestID, err error) bool {
	i := slices.IndexFunc(s.queue, func(h handed) bool { return h.id == id })
	if i >= 0 {
		h := s.queue[i]
		s.queue = slices.Delete(s.queue, i, i+1)
		h.onDone(engine.Outcome{Reason: engine.Cancelled}, err)
	}
	return i >= 0
}

func (s *serial) Step() (bool, error) {
	if len(s.queue) == 0 {
		return false, nil
	}
	h := s.queue[0]
	s.queue = s.queue[1:]
	h.onRun()
	out, err := s.gen.Generate(h.ctx, h.req)
	h.onDone(out, err)
	return true, err
}

func (s *serial) Abandon(error) {
	for len(s.queue) > 0 {
		s.Remove(s.queue[0].id, engine.ErrFailed)
	}
}

func (s *script) last() engine.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requests[len(s.requests)-1]
}

func (s *script) state() (running, said int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running, s.said
}

// setup are the things a test may choose.
type setup struct {
	gen      *script
	worker   engine.Worker // instead of gen
	opt      server.Options
	front    front.Options
	template string
	places   int
	timeout  time.Duration
	draft    int
	activity func() engine.Activity
	loading  bool
}

// site is a server on a loopback socket.
type site struct {
	*server.Server
	url    string
	log    *safeBuffer
	stop   context.CancelFunc
	served chan error
	queue  *engine.Queue
}

type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func start(t testing.TB, c setup) *site {
	t.Helper()
	if c.opt.ModelID == "" {
		c.opt.ModelID = "m"
	}
	s := &site{log: &safeBuffer{}, served: make(chan error, 1)}
	if c.opt.Log == nil {
		c.opt.Log = server.NewLog(s.log, slog.LevelDebug)
	}
	if c.opt.Grace == 0 {
		c.opt.Grace = time.Second
	}
	s.Server = server.New(c.opt)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.url = "http://" + l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	s.stop = cancel
	go func() { s.served <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		client.CloseIdleConnections()
		select {
		case err := <-s.served:
			s.served <- err
		case <-time.After(20 * time.Second):
			t.Error("the server does not end")
		}
	})
	if !c.loading {
		s.ready(t, c)
	}
	return s
}

func (s *site) ready(t testing.TB, c setup) {
	t.Helper()
	file := func(name string) []byte { return read(t, filepath.Join(micro, "checkpoint", name)) }
	source := file("chat_template.jinja")
	if c.template != "" {
		source = []byte(c.template)
	}
	tmpl, err := chat.NewTemplate("chat_template.jinja", source)
	if err != nil {
		t.Fatal(err)
	}
	c.front.Tokenizer, c.front.Template = tokenizer(), tmpl
	c.front.TokenizerConfig, c.front.GenerationConfig = file("tokenizer_config.json"), file("generation_config.json")
	c.front.FreshSeeds = true
	if c.front.Context == 0 {
		c.front.Context = 512
	}
	if c.front.MaxTokens == 0 {
		c.front.MaxTokens = 200
	}
	f, err := front.New(c.front)
	if err != nil {
		t.Fatal(err)
	}
	if c.places == 0 {
		c.places = 17
	}
	if c.timeout == 0 {
		c.timeout = 30 * time.Second
	}
	if c.worker == nil {
		c.worker = &serial{gen: c.gen}
	}
	s.queue = engine.NewQueue(c.worker, c.places, c.timeout)
	s.Ready(server.Model{Front: f, Queue: s.queue, Draft: c.draft, Concurrency: 3, File: "x.ninfer", Activity: c.activity})
}

var client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 4}}

// answer is what a request got.
type answer struct {
	status int
	header http.Header
	body   string
}

func send(t testing.TB, method, url, body string, header ...string) answer {
	t.Helper()
	r, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	if r.Header.Get("Transfer-Encoding") == "chunked" {
		r.ContentLength = -1
	}
	res, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{res.StatusCode, res.Header, string(b)}
}

func (s *site) chat(t testing.TB, body string) answer {
	t.Helper()
	return send(t, "POST", s.url+"/v1/chat/completions", body)
}

// errorIn checks the shape of an OpenAI error and returns its members.
func errorIn(t testing.TB, body string) (message, kind, param, code string) {
	t.Helper()
	var e struct {
		Error *struct {
			Message *string `json:"message"`
			Type    *string `json:"type"`
			Param   *string `json:"param"`
			Code    *string `json:"code"`
		} `json:"error"`
	}
	if err := json.Unmarshal([]byte(body), &e, json.RejectUnknownMembers(true)); err != nil || e.Error == nil || e.Error.Message == nil || e.Error.Type == nil {
		t.Fatalf("not an error body: %s (%v)", body, err)
	}
	for _, name := range []string{`"message":`, `"type":`, `"param":`, `"code":`} {
		if !strings.Contains(body, name) {
			t.Fatalf("%s has no member %s", body, name)
		}
	}
	text := func(s *string) string {
		if s == nil {
			return ""
		}
		return *s
	}
	return *e.Error.Message, *e.Error.Type, text(e.Error.Param), text(e.Error.Code)
}

func TestRoutes(t *testing.T) {
	s := start(t, setup{gen: &script{text: "x"}, opt: server.Options{ModelID: "org/model"}})
	for _, c := range []struct {
		method, path string
		status       int
		want         string // in the body
		header       [2]string
	}{
		{"GET", "/health", 200, `{"status":"ok"}`, [2]string{"Content-Type", "application/json"}},
		{"GET", "/health/", 200, `{"status":"ok"}`, [2]string{}},
		{"HEAD", "/health", 200, "", [2]string{"Content-Length", "15"}},
		{"GET", "/v1/models", 200, `"object":"list","data":[{"id":"org/model","object":"model","created":`, [2]string{}},
		{"GET", "/v1/models/", 200, `"owned_by":"ninfer","max_model_len":512}]}`, [2]string{}},
		{"GET", "/v1/models/org/model", 200, `{"id":"org/model","object":"model",`, [2]string{}},
		{"GET", "/v1/models/org%2Fmodel", 200, `"max_model_len":512}`, [2]string{}},
		{"GET", "/v1/models/other", 404, `"code":"model_not_found"`, [2]string{}},
		{"GET", "/", 404, `"code":"not_found"`, [2]string{}},
		{"GET", "/v1//models", 404, `"code":"not_found"`, [2]string{}},
		{"GET", "/v1/responses", 405, `"error":{`, [2]string{"Allow", "POST"}},
		{"GET", "/v1/responses/resp_x/other", 404, `"code":"not_found"`, [2]string{}},
		{"POST", "/v1/responses/resp_x", 405, `"error":{`, [2]string{"Allow", "GET, HEAD, DELETE"}},
		{"POST", "/v1/messages/batches", 404, `{"type":"error","error":{"type":"not_found_error",`, [2]string{}},
		{"GET", "/v1/messages/count_tokens", 405, `"request_id":"req_`, [2]string{"Allow", "POST"}},
		{"GET", "/v1/messages/", 405, `{"type":"error","error":{"type":"invalid_request_error",`, [2]string{"Allow", "POST"}},
		{"POST", "/health", 405, `"code":"method_not_allowed"`, [2]string{"Allow", "GET, HEAD"}},
		{"DELETE", "/v1/models/x", 405, `"error":{`, [2]string{"Allow", "GET, HEAD"}},
		{"GET", "/v1/chat/completions", 405, `"error":{`, [2]string{"Allow", "POST"}},
		{"OPTIONS", "/v1/chat/completions", 405, `"error":{`, [2]string{"Allow", "POST"}},
	} {
		a := send(t, c.method, s.url+c.path, "")
		if a.status != c.status || !strings.Contains(a.body, c.want) || c.header[0] != "" && a.header.Get(c.header[0]) != c.header[1] {
			t.Errorf("%s %s: %d %s %v", c.method, c.path, a.status, a.body, a.header)
		}
		name, other := "X-Request-Id", "Request-Id"
		if strings.HasPrefix(c.path, "/v1/messages") {
			name, other = other, name
		}
		if a.header.Get(name) == "" || a.header.Get(other) != "" {
			t.Errorf("%s %s: ids %q, %q", c.method, c.path, a.header.Get(name), a.header.Get(other))
		}
		if a.header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s %s: CORS without --cors", c.method, c.path)
		}
	}
	if a, b := send(t, "GET", s.url+"/health", ""), send(t, "GET", s.url+"/health", ""); a.header.Get("X-Request-Id") == b.header.Get("X-Request-Id") {
		t.Error("two requests have one id")
	}
}

func TestAuthentication(t *testing.T) {
	s := start(t, setup{gen: &script{text: "x"}, opt: server.Options{APIKey: "k1", CORS: true}})
	for _, c := range []struct {
		path   string
		header []string
		ok     bool
	}{
		{"/health", nil, true},
		{"/v1/models", nil, false},
		{"/no/such", nil, false},
		{"/v1/models", []string{"Authorization", "Bearer k1"}, true},
		{"/v1/models", []string{"Authorization", "bEARER  k1 "}, true},
		{"/v1/models", []string{"x-api-key", " k1"}, true},
		{"/v1/models", []string{"Authorization", "Bearer k2", "x-api-key", "k1"}, true},
		{"/v1/models", []string{"Authorization", "Bearer k2"}, false},
		{"/v1/models", []string{"Authorization", "k1"}, false},
		{"/v1/models", []string{"Authorization", "Basic k1"}, false},
		{"/v1/models", []string{"x-api-key", ""}, false},
		{"/v1/messages", []string{"x-api-key", "k"}, false},
	} {
		a := send(t, "GET", s.url+c.path, "", c.header...)
		if (a.status == 401) == c.ok {
			t.Errorf("%s %q: %d", c.path, c.header, a.status)
		}
		switch {
		case c.ok:
		case c.path == "/v1/messages":
			if !strings.Contains(a.body, `"type":"authentication_error"`) {
				t.Errorf("%s", a.body)
			}
		default:
			if _, kind, _, code := errorIn(t, a.body); kind != "invalid_request_error" || code != "invalid_api_key" {
				t.Errorf("%s", a.body)
			}
		}
	}
	// A page asks before it may send its key.
	a := send(t, "OPTIONS", s.url+"/v1/chat/completions", "", "Access-Control-Request-Headers", "authorization, x-stainless-os")
	want := http.Header{
		"Access-Control-Allow-Origin":   {"*"},
		"Access-Control-Allow-Methods":  {"GET, POST, DELETE, OPTIONS"},
		"Access-Control-Allow-Headers":  {"authorization, x-stainless-os"},
		"Access-Control-Expose-Headers": {"x-request-id, request-id"},
	}
	for name, v := range want {
		if a.status != 204 || !slices.Equal(a.header[name], v) {
			t.Errorf("%d, %s: %v", a.status, name, a.header[name])
		}
	}
}

// Before the model is there the socket says so, and nothing is accepted.
func TestLoading(t *testing.T) {
	c := setup{gen: &script{text: "x"}, loading: true}
	s := start(t, c)
	if a := send(t, "GET", s.url+"/health", ""); a.status != 503 || a.body != `{"status":"loading"}` {
		t.Errorf("%d %s", a.status, a.body)
	}
	for _, a := range []answer{s.chat(t, hello), send(t, "GET", s.url+"/v1/models", "")} {
		if _, kind, _, code := errorIn(t, a.body); a.status != 503 || kind != "server_error" || code != "service_unavailable" {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	s.ready(t, c)
	if a := s.chat(t, hello); a.status != 200 {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// A server that is stopped while it loads ends.
func TestStopLoading(t *testing.T) {
	s := start(t, setup{loading: true})
	s.stop()
	if err := <-s.served; err != nil {
		t.Error(err)
	}
	s.served <- nil
}

const hello = `{"messages":[{"role":"user","content":"Hello, how are you?"}],"temperature":0,"max_tokens":24}`
