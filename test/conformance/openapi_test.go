package conformance

import (
	"bytes"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"
)

// The description that the program serves is one, and what the program takes and answers is as described.
func TestDescription(t *testing.T) {
	s := serve(t, micro, "--max-context", "512", "--api-key", "k")
	get := func(method, path, body string) (*http.Request, *http.Response, []byte) {
		r, err := http.NewRequest(method, s.url+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer k")
		if body != "" {
			r.Header.Set("Content-Type", "application/json")
		}
		res, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		r.Body = io.NopCloser(strings.NewReader(body))
		return r, res, b
	}
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	_, _, file := get("GET", "/openapi.yaml", "")
	doc, err := openapi3.NewLoader().LoadFromData(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := doc.Validate(t.Context()); err != nil {
		t.Fatal(err)
	}
	doc.Servers = nil
	router, err := gorillamux.NewRouter(doc)
	if err != nil {
		t.Fatal(err)
	}
	said := map[string]bool{}
	const message = `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"Q"}]`
	_, _, made := get("POST", "/v1/responses", `{"model":"qwen4_exp","input":"Q","max_output_tokens":3}`)
	response := "/v1/responses/" + regexp.MustCompile(`resp_[0-9a-f]{32}`).FindString(string(made))
	const respond = `{"model":"qwen4_exp","max_output_tokens":5,"input":`
	const ask = `{"messages":[{"role":"user","content":"Q"}],"max_tokens":5`
	for _, c := range []struct {
		method, path, body string
		status             int
		refused            bool // the body is not as described
	}{
		{"GET", "/", "", 200, false},
		{"GET", "/health", "", 200, false},
		{"GET", "/ready", "", 200, false},
		{"GET", "/openapi.yaml", "", 200, false},
		{"GET", "/props", "", 200, false},
		{"GET", "/metrics", "", 200, false},
		{"GET", "/v1/models", "", 200, false},
		{"GET", "/v1/models/qwen4_exp", "", 200, false},
		{"GET", "/v1/models/other", "", 404, false},
		{"POST", "/v1/chat/completions", ask + "}", 200, false},
		{"POST", "/v1/chat/completions", ask + `,"enable_thinking":false,"stop":["a","b"],"seed":-5,"top_k":-1,"temperature":null,"tools":[{"type":"function","function":{"name":"f","parameters":{}}}],"tool_choice":"auto"}`, 200, false},
		{"POST", "/v1/chat/completions", ask + `,"stream":true,"stream_options":{"include_usage":true}}`, 200, false},
		{"POST", "/v1/chat/completions", `{"messages":[{"role":"user","content":[{"type":"text","text":"Q"}]},{"role":"assistant","content":null,"reasoning":"r","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"a","content":"one"}],"max_tokens":3}`, 200, false},
		{"POST", "/v1/chat/completions", ask + `,"logprobs":true,"top_logprobs":2}`, 200, false},
		{"POST", "/v1/chat/completions", ask + `,"temperature":3}`, 400, true},
		{"POST", "/v1/chat/completions", ask + `,"n":2}`, 400, true},
		{"POST", "/v1/chat/completions", ask + `,"tool_choice":"required"}`, 400, true},
		{"POST", "/v1/chat/completions", `{"messages":[]}`, 400, true},
		{"POST", "/v1/chat/completions", `{}`, 400, true},
		{"POST", "/v1/chat/completions/render", ask + "}", 200, false},
		{"POST", "/v1/messages", message + "}", 200, false},
		{"POST", "/v1/messages", message + `,"stream":true,"thinking":{"type":"disabled"},"system":[{"type":"text","text":"S"}],"tools":[{"name":"f","input_schema":{}}],"tool_choice":{"type":"auto"}}`, 200, false},
		{"POST", "/v1/messages", `{"model":"m","max_tokens":3,"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":"one"}]}]}`, 200, false},
		{"POST", "/v1/messages", message + `,"temperature":1.5}`, 400, true},
		{"POST", "/v1/messages", message + `,"tool_choice":{"type":"any"}}`, 400, true},
		{"POST", "/v1/messages", `{"model":"m","messages":[{"role":"user","content":[{"type":"document"}]}]}`, 400, true},
		{"POST", "/v1/messages", `{"model":"m"}`, 400, true},
		{"POST", "/v1/messages/count_tokens", message + "}", 200, false},
		{"POST", "/v1/messages/count_tokens", `{"messages":[]}`, 400, true},
		{"POST", "/v1/completions", `{"prompt":"abc","max_tokens":5}`, 200, false},
		{"POST", "/v1/completions", `{"prompt":[5,6,7],"max_tokens":5,"stream":true}`, 200, false},
		{"POST", "/v1/completions", `{"prompt":["abc"],"max_tokens":0}`, 200, false},
		{"POST", "/v1/completions", `{"prompt":"abc","max_tokens":3,"logprobs":2}`, 200, false},
		{"POST", "/v1/completions", `{"prompt":["abc","d"]}`, 400, true},
		{"POST", "/v1/completions", `{"prompt":5}`, 400, true},
		{"POST", "/v1/completions/render", `{"prompt":"abc"}`, 200, false},
		{"POST", "/v1/responses", respond + `"Q"}`, 200, false},
		{"POST", "/v1/responses", respond + `"Q","stream":true,"store":false,"include":["reasoning.encrypted_content"],"reasoning":{"summary":"auto"},"service_tier":"auto","truncation":"disabled"}`, 200, false},
		{"POST", "/v1/responses", respond + `[{"role":"user","content":[{"type":"input_text","text":"Q"}]},{"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"r"}]},` +
			`{"type":"function_call","call_id":"a","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"a","output":"o"}],"tools":[{"type":"namespace","name":"n","tools":[{"type":"function","name":"f"}]}],"metadata":{"a":"b"}}`, 200, false},
		{"POST", "/v1/responses", respond + `"Q","background":true}`, 400, true},
		{"POST", "/v1/responses", respond + `"Q","text":{"format":{"type":"json_object"}}}`, 400, true},
		{"POST", "/v1/responses", respond + `[{"type":"web_search_call"}]}`, 400, true},
		{"POST", "/v1/responses", `{"input":"Q"}`, 400, true},
		{"POST", "/v1/responses/input_tokens", `{"input":"Q"}`, 200, false},
		{"POST", "/v1/responses/compact", "", 400, false},
		{"GET", response, "", 200, false},
		{"GET", response + "/input_items?order=asc&limit=5", "", 200, false},
		{"GET", response + "/input_items?limit=500", "", 400, true},
		{"POST", response + "/cancel", "", 400, false},
		{"DELETE", response, "", 200, false},
		{"GET", response, "", 404, false},
		{"POST", "/tokenize", `{"prompt":"abc","return_token_strs":true}`, 200, false},
		{"POST", "/tokenize", `{"content":"é☃","with_pieces":true}`, 200, false},
		{"POST", "/tokenize", `{"prompt":5}`, 400, true},
		{"POST", "/detokenize", `{"tokens":[5,6]}`, 200, false},
		{"POST", "/detokenize", `{"tokens":"a"}`, 400, true},
		{"POST", "/apply-template", ask + "}", 200, false},
	} {
		r, res, body := get(c.method, c.path, c.body)
		route, params, err := router.FindRoute(r)
		if err != nil {
			t.Fatalf("%s %s: %v", c.method, c.path, err)
		}
		said[c.method+" "+route.Path] = true
		options := &openapi3filter.Options{AuthenticationFunc: openapi3filter.NoopAuthenticationFunc, IncludeResponseStatus: true, SchemaValidationOptions: []openapi3.SchemaValidationOption{openapi3.EnableJSONSchema2020()}}
		in := &openapi3filter.RequestValidationInput{Request: r, PathParams: params, Route: route, Options: options}
		if err := openapi3filter.ValidateRequest(t.Context(), in); (err != nil) != c.refused {
			t.Errorf("%s %s %s: the description says %v", c.method, c.path, c.body, err)
		}
		if res.StatusCode != c.status {
			t.Errorf("%s %s %s: %d %s", c.method, c.path, c.body, res.StatusCode, body)
		}
		kind := res.Header.Get("Content-Type")
		described(t, route, res.StatusCode, kind)
		if !strings.HasPrefix(kind, "application/json") {
			continue
		}
		out := &openapi3filter.ResponseValidationInput{RequestValidationInput: in, Status: res.StatusCode, Header: res.Header, Body: io.NopCloser(bytes.NewReader(body)), Options: options}
		if err := openapi3filter.ValidateResponse(t.Context(), out); err != nil {
			t.Errorf("%s %s %s: %v\n%s", c.method, c.path, c.body, err, body)
		}
	}
	for path, item := range doc.Paths.Map() {
		for method := range item.Operations() {
			if !said[method+" "+path] {
				t.Errorf("%s %s was not tried", method, path)
			}
		}
	}
}

// described checks that a type of answer is in the description.
func described(t *testing.T, route *routers.Route, status int, kind string) {
	t.Helper()
	answer := route.Operation.Responses.Status(status)
	if answer == nil {
		answer = route.Operation.Responses.Default()
	}
	kind, _, _ = strings.Cut(kind, ";")
	if answer == nil || answer.Value.Content.Get(kind) == nil {
		t.Errorf("%s %s: an answer %d of type %q is not described", route.Method, route.Path, status, kind)
	}
}
