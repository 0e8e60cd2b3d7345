package server

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	_ "embed" // the API's description
	"encoding/hex"
	"encoding/json/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// exchange is one request with its answer.
type exchange struct {
	w         http.ResponseWriter
	r         *http.Request
	id        string // of the HTTP request
	anthropic bool   // the family of error bodies

	// fields are the route's names for fields that front and queue name as Chat Completions does.
	fields map[string]string
}

// ServeHTTP is of http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	x := &exchange{w: w, r: r, id: "req_" + randomHex(16)}
	path := r.URL.Path
	x.anthropic = path == "/v1/messages" || strings.HasPrefix(path, "/v1/messages/")
	header := w.Header()
	if x.anthropic {
		header.Set("Request-Id", x.id)
	} else {
		header.Set("X-Request-Id", x.id) // spelled as net/http keeps it, which is faster
	}
	if s.opt.CORS {
		header.Set("Access-Control-Allow-Origin", "*")
		header.Set("Access-Control-Expose-Headers", "x-request-id, request-id")
		if r.Method == http.MethodOptions {
			header.Set("Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS")
			if asked := r.Header.Get("Access-Control-Request-Headers"); asked != "" {
				header.Set("Access-Control-Allow-Headers", asked)
			}
			w.WriteHeader(http.StatusNoContent)
			return
		}
	}
	if len(path) > 1 {
		path = strings.TrimSuffix(path, "/")
	}
	methods, open := s.route(path)
	if !open && r.Method != http.MethodOptions && !s.authorized(r) {
		header.Set("WWW-Authenticate", "Bearer")
		x.fail(&failure{status: http.StatusUnauthorized, code: "invalid_api_key", message: "the API key is missing or wrong: send it as Authorization: Bearer KEY or x-api-key: KEY"})
		return
	}
	handle := methods[r.Method]
	if r.Method == http.MethodHead {
		handle = methods[http.MethodGet]
	}
	switch {
	case handle != nil:
		handle(x)
	case methods == nil:
		x.fail(&failure{status: http.StatusNotFound, code: "not_found", message: "there is no route " + r.Method + " " + r.URL.Path})
	default:
		var allow []string
		for _, m := range []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodDelete, http.MethodOptions} {
			if methods[m] != nil || m == http.MethodHead && methods[http.MethodGet] != nil || m == http.MethodOptions && s.opt.CORS {
				allow = append(allow, m)
			}
		}
		list := strings.Join(allow, ", ")
		header.Set("Allow", list)
		x.fail(&failure{status: http.StatusMethodNotAllowed, code: "method_not_allowed", message: r.URL.Path + " takes " + list + ", not " + r.Method})
	}
}

// handlers are those of one path by method; that of GET is also HEAD's.
type handlers map[string]func(*exchange)

// fixed are the routes whose paths have no variable part.
func (s *Server) fixed() map[string]handlers {
	get := func(h func(*exchange)) handlers { return handlers{http.MethodGet: h} }
	post := func(h func(*exchange)) handlers { return handlers{http.MethodPost: h} }
	return map[string]handlers{
		"/health":                     get(s.health),
		"/ready":                      get(s.readiness),
		"/props":                      get(s.props),
		"/openapi.yaml":               get(s.description),
		"/metrics":                    get(s.metrics.page),
		"/v1/models":                  get(s.models),
		"/v1/chat/completions":        post(s.chat),
		"/v1/chat/completions/render": post(s.renderChat),
		"/v1/completions":             post(s.completions),
		"/v1/completions/render":      post(s.renderCompletion),
		"/v1/messages":                post(s.messages),
		"/v1/messages/count_tokens":   post(s.countMessages),
		"/v1/responses":               post(s.responses),
		"/v1/responses/input_tokens":  post(s.countResponse),
		"/v1/responses/compact":       post(s.compactResponse),
		"/tokenize":                   post(s.tokenize),
		"/detokenize":                 post(s.detokenize),
		"/apply-template":             post(s.applyTemplate),
	}
}

// route returns the handlers of a path, none if there is no such path, and whether it needs no key. The page needs none, because it holds
// nothing and could not ask for one before it is there.
func (s *Server) route(path string) (h handlers, open bool) {
	if h, ok := s.routes[path]; ok {
		return h, path == "/health" || path == "/ready"
	}
	if id, ok := strings.CutPrefix(path, "/v1/models/"); ok && id != "" {
		return handlers{http.MethodGet: func(x *exchange) { s.oneModel(x, id) }}, false
	}
	if rest, ok := strings.CutPrefix(path, "/v1/responses/"); ok {
		if h := s.responseRoute(rest); h != nil {
			return h, false
		}
	}
	if s.opt.Page != nil {
		if file := s.opt.Page(path); file != nil {
			return handlers{http.MethodGet: func(x *exchange) { file.ServeHTTP(x.w, x.r) }}, true
		}
	}
	return nil, false
}

// authorized compares digests, so that the time says nothing about the key.
func (s *Server) authorized(r *http.Request) bool {
	if s.opt.APIKey == "" {
		return true
	}
	given := slices.Clone(r.Header.Values("x-api-key"))
	for _, v := range r.Header.Values("Authorization") {
		if scheme, key, ok := strings.Cut(strings.TrimSpace(v), " "); ok && strings.EqualFold(scheme, "bearer") {
			given = append(given, key)
		}
	}
	ok := 0
	for _, key := range given {
		sum := sha256.Sum256([]byte(strings.TrimSpace(key)))
		ok |= subtle.ConstantTimeCompare(sum[:], s.key[:])
	}
	return ok == 1
}

func randomHex(bytes int) string {
	b := make([]byte, bytes)
	rand.Read(b) // never fails
	return hex.EncodeToString(b)
}

// reply sends a value as JSON.
func (x *exchange) reply(status int, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		panic("server: an answer is not JSON: " + err.Error())
	}
	x.send(status, body)
}

// send sends JSON.
func (x *exchange) send(status int, body []byte) {
	x.w.Header().Set("Content-Type", "application/json")
	x.w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	x.w.WriteHeader(status)
	x.w.Write(body)
}

// health is about the process: a full queue and a server that ends are healthy.
func (s *Server) health(x *exchange) {
	switch s.state() {
	case "loading":
		x.reply(http.StatusServiceUnavailable, status{Status: "loading"})
	case "unavailable":
		x.reply(http.StatusServiceUnavailable, status{Status: "unavailable"})
	default:
		x.send(http.StatusOK, healthy)
	}
}

var healthy = []byte(`{"status":"ok"}`)

// readiness is about new requests: whether it makes sense to send one here, and what it would find.
func (s *Server) readiness(x *exchange) {
	state := s.state()
	if state != "ready" {
		x.reply(http.StatusServiceUnavailable, status{Status: state})
		return
	}
	load := s.model.Queue.Load()
	x.reply(http.StatusOK, status{state, &load.Running, &load.Waiting})
}

type status struct {
	Status  string `json:"status"`
	Running *int   `json:"running,omitzero"`
	Waiting *int   `json:"waiting,omitzero"`
}

// state is loading, unavailable after a failure, draining at the end, or ready.
func (s *Server) state() string {
	m := s.serving()
	switch {
	case m == nil:
		return "loading"
	case m.Queue.Failure() != nil:
		return "unavailable"
	case s.ending.Load():
		return "draining"
	}
	return "ready"
}

//go:embed openapi.yaml
var openapi []byte

// description serves GET /openapi.yaml.
func (s *Server) description(x *exchange) {
	x.w.Header().Set("Content-Type", "application/yaml")
	x.w.Write(openapi)
}

// modelObject is a model as OpenAI lists it, with the context as vLLM adds it.
type modelObject struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
	MaxLen  int    `json:"max_model_len"`
}

func (s *Server) object(m *Model) modelObject {
	return modelObject{s.opt.ModelID, "model", s.created, "ninfer", m.Front.Context()}
}

func (s *Server) models(x *exchange) {
	m, err := s.available()
	if err != nil {
		x.fail(err)
		return
	}
	x.reply(http.StatusOK, struct {
		Object string        `json:"object"`
		Data   []modelObject `json:"data"`
	}{"list", []modelObject{s.object(m)}})
}

func (s *Server) oneModel(x *exchange, id string) {
	m, err := s.available()
	switch {
	case err != nil:
		x.fail(err)
	case id != s.opt.ModelID:
		x.fail(noModel(id, s.opt.ModelID))
	default:
		x.reply(http.StatusOK, s.object(m))
	}
}

// available returns the model unless it is still loading.
func (s *Server) available() (*Model, *failure) {
	if m := s.serving(); m != nil {
		return m, nil
	}
	return nil, &failure{status: http.StatusServiceUnavailable, code: "service_unavailable", message: "the model is loading", retry: true}
}
