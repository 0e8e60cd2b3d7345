package server

import (
	"errors"
	"fmt"
	"net/http"

	"ninfer/internal/engine"
	"ninfer/internal/front"
)

// failure is an error as a client sees it (product.md 3.5).
type failure struct {
	status  int
	code    string // empty is null
	param   string // empty is null
	message string
	retry   bool // worth trying again soon
}

func (f *failure) Error() string { return f.message }

// kind is OpenAI's type member.
func (f *failure) kind() string {
	switch {
	case f.status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case f.status >= 500:
		return "server_error"
	}
	return "invalid_request_error"
}

// anthropicKind is Anthropic's type member.
func (f *failure) anthropicKind() string {
	switch f.status {
	case http.StatusUnauthorized:
		return "authentication_error"
	case http.StatusNotFound:
		return "not_found_error"
	}
	if f.status >= 500 {
		return "api_error"
	}
	return "invalid_request_error"
}

// errorBody is the body of an OpenAI error; in a stream it is an event.
type errorBody struct {
	Error struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    *string `json:"code"`
	} `json:"error"`
}

func (f *failure) body() errorBody {
	var b errorBody
	b.Error.Message, b.Error.Type = f.message, f.kind()
	if f.param != "" {
		b.Error.Param = &f.param
	}
	if f.code != "" {
		b.Error.Code = &f.code
	}
	return b
}

// fail answers with an error in the shape of the route's family.
func (x *exchange) fail(f *failure) {
	if f.retry {
		x.w.Header().Set("Retry-After", "1")
	}
	if !x.anthropic {
		x.reply(f.status, f.body())
		return
	}
	type inner struct {
		Type    string `json:"type"`
		Message string `json:"message"`
	}
	x.reply(f.status, struct {
		Type      string `json:"type"`
		Error     inner  `json:"error"`
		RequestID string `json:"request_id"`
	}{"error", inner{f.anthropicKind(), f.message}, x.id})
}

// bad is a request that cannot be served as it stands.
func bad(code, param, format string, args ...any) *failure {
	return &failure{status: http.StatusBadRequest, code: code, param: param, message: fmt.Sprintf(format, args...)}
}

func noModel(id, served string) *failure {
	return &failure{status: http.StatusNotFound, code: "model_not_found", param: "model", message: fmt.Sprintf("the model %q does not exist; this server has %q", id, served)}
}

// failureOf turns an error of front or queue into one for the client. What it does not know is the server's own.
func failureOf(err error) *failure {
	var known *failure
	var refused *front.Error
	switch {
	case errors.As(err, &known):
		return known
	case errors.As(err, &refused):
		return bad(refused.Code, refused.Param, "%s", refused.Message)
	case errors.Is(err, engine.ErrPromptTooLong), errors.Is(err, engine.ErrTooLarge):
		return bad(front.CodeContextLength, "messages", "%v", err)
	case errors.Is(err, engine.ErrOverloaded):
		return &failure{status: http.StatusTooManyRequests, code: "server_overloaded", message: "the server has as many requests as it can hold; try again later", retry: true}
	case errors.Is(err, engine.ErrPending):
		return &failure{status: http.StatusServiceUnavailable, code: "request_queue_timeout", message: "the request waited too long for its turn", retry: true}
	case errors.Is(err, engine.ErrDraining):
		return &failure{status: http.StatusServiceUnavailable, code: "service_unavailable", message: "the server is shutting down", retry: true}
	case errors.Is(err, engine.ErrFailed):
		return &failure{status: http.StatusServiceUnavailable, code: "service_unavailable", message: "the engine has failed"}
	}
	return &failure{status: http.StatusInternalServerError, code: "internal_error", message: "the request failed inside the server"}
}
