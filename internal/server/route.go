package server

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
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
}

// ServeHTTP is of http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	x := &exchange{w: w, r: r, id: "req_" + randomHex(16)}
	path := r.URL.Path
	x.anthropic = path == "/v1/messages" || strings.HasPrefix(path, "/v1/messages/")
	header := w.Header()
	if x.anthropic {
		header.Set("request-id", x.id)
	} else {
		header.Set("x-request-id", x.id)
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
	if path != "/health" && r.Method != http.MethodOptions && !s.authorized(r) {
		header.Set("WWW-Authenticate", "Bearer")
		x.fail(&failure{status: http.StatusUnauthorized, code: "invalid_api_key", message: "the API key is missing or wrong: send it as Authorization: Bearer KEY or x-api-key: KEY"})
		return
	}
	method, handle := s.route(path)
	switch {
	case handle == nil:
		x.fail(&failure{status: http.StatusNotFound, code: "not_found", message: "there is no route " + r.Method + " " + r.URL.Path})
	case r.Method == method, r.Method == http.MethodHead && method == http.MethodGet:
		handle(x)
	default:
		allow := []string{method}
		if method == http.MethodGet {
			allow = append(allow, http.MethodHead)
		}
		if s.opt.CORS {
			allow = append(allow, http.MethodOptions)
		}
		header.Set("Allow", strings.Join(allow, ", "))
		x.fail(&failure{status: http.StatusMethodNotAllowed, code: "method_not_allowed", message: r.URL.Path + " takes " + method + ", not " + r.Method})
	}
}

// route returns the method and the handler of a path, or nothing.
func (s *Server) route(path string) (string, func(*exchange)) {
	switch path {
	case "/health":
		return http.MethodGet, s.health
	case "/v1/models":
		return http.MethodGet, s.models
	case "/v1/chat/completions":
		return http.MethodPost, s.chat
	}
	if id, ok := strings.CutPrefix(path, "/v1/models/"); ok && id != "" {
		return http.MethodGet, func(x *exchange) { s.oneModel(x, id) }
	}
	return "", nil
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
	x.w.Header().Set("Content-Type", "application/json")
	x.w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	x.w.WriteHeader(status)
	x.w.Write(body)
}

func (s *Server) health(x *exchange) {
	type state struct {
		Status string `json:"status"`
	}
	m := s.serving()
	switch {
	case m == nil:
		x.reply(http.StatusServiceUnavailable, state{"loading"})
	case m.Queue.Failure() != nil:
		x.reply(http.StatusServiceUnavailable, state{"unavailable"})
	default:
		x.reply(http.StatusOK, state{"ok"})
	}
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
