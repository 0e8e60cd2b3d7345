package server

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	"ninfer/internal/engine"
	"ninfer/internal/front"
)

// failure is an error as a client sees it (docs/serving.md, Routes).
type failure struct {
	status  int
	code    string // empty is null
	param   string // empty is null
	message string
	retry   bool // worth trying again soon

	tokens, limit int // of a prompt that is too long, where they are known
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

// statusOverloaded is Anthropic's status of a server that is full.
const statusOverloaded = 529

// anthropic is Anthropic's status and type (docs/serving.md, Messages).
func (f *failure) anthropic() (status int, kind string) {
	switch f.status {
	case http.StatusUnauthorized:
		return f.status, "authentication_error"
	case http.StatusForbidden:
		return f.status, "permission_error"
	case http.StatusNotFound:
		return f.status, "not_found_error"
	case http.StatusRequestEntityTooLarge:
		return f.status, "request_too_large"
	case http.StatusTooManyRequests:
		return statusOverloaded, "overloaded_error"
	case http.StatusGatewayTimeout:
		return f.status, "timeout_error"
	}
	switch {
	case f.code == codeQueueTimeout:
		return http.StatusGatewayTimeout, "timeout_error"
	case f.status >= 500:
		return f.status, "api_error"
	}
	return f.status, "invalid_request_error"
}

const (
	codeQueueTimeout = "request_queue_timeout"
	codeUnknown      = "unknown_parameter"
)

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

// anthropicError is the body of an Anthropic error; in a stream it is an event.
type anthropicError struct {
	Type  string `json:"type"`
	Error struct {
		Type    string `json:"type"`
		Message string `json:"message"`
	} `json:"error"`
	RequestID string `json:"request_id"`
}

func (f *failure) anthropicBody(requestID string) anthropicError {
	b := anthropicError{Type: "error", RequestID: requestID}
	_, b.Error.Type = f.anthropic()
	switch {
	case f.limit > 0:
		// Clients look for these words and numbers to shorten their conversation.
		b.Error.Message = fmt.Sprintf("prompt is too long: %d tokens > %d maximum", f.tokens, f.limit)
	case f.status == http.StatusBadRequest:
		// There is no member for it, and a name is what programs and searches can hold on to.
		b.Error.Message = f.message + " (" + f.code + ")"
	default:
		b.Error.Message = f.message
	}
	return b
}

// fail answers with an error in the shape of the route's family.
func (x *exchange) fail(f *failure) {
	if f.retry {
		x.w.Header().Set("Retry-After", "1")
	}
	f = x.spell(f)
	if !x.anthropic {
		x.reply(f.status, f.body())
		return
	}
	status, _ := f.anthropic()
	x.reply(status, f.anthropicBody(x.id))
}

// spell gives a failure the route's name of the field, in param and at the start of the message.
func (x *exchange) spell(f *failure) *failure {
	name, ok := x.fields[f.param]
	if !ok || f.code == codeUnknown { // that is the client's own name
		return f
	}
	c := *f
	c.param = name
	if rest, ok := strings.CutPrefix(f.message, f.param+" "); ok {
		c.message = name + " " + rest
	}
	return &c
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
		f := bad(refused.Code, refused.Param, "%s", refused.Message)
		f.tokens, f.limit = refused.Tokens, refused.Limit
		return f
	case errors.Is(err, engine.ErrPromptTooLong), errors.Is(err, engine.ErrTooLarge):
		return bad(front.CodeContextLength, "messages", "%v", err)
	case errors.Is(err, engine.ErrOverloaded):
		return &failure{status: http.StatusTooManyRequests, code: "server_overloaded", message: "the server has as many requests as it can hold; try again later", retry: true}
	case errors.Is(err, engine.ErrPending):
		return &failure{status: http.StatusServiceUnavailable, code: codeQueueTimeout, message: "the request waited too long for its turn", retry: true}
	case errors.Is(err, engine.ErrDraining):
		return &failure{status: http.StatusServiceUnavailable, code: "service_unavailable", message: "the server is shutting down", retry: true}
	case errors.Is(err, engine.ErrFailed):
		return &failure{status: http.StatusServiceUnavailable, code: "service_unavailable", message: "the engine has failed"}
	}
	return &failure{status: http.StatusInternalServerError, code: "internal_error", message: "the request failed inside the server"}
}
