package server

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"

	"ninfer/internal/front"
)

// smallBody is what a body may take before it counts against the memory of all bodies.
const smallBody = 64 << 10

// readBody reads the body and returns it with what to call when it is no longer in memory. It is bounded three ways: one body by
// MaxBody, all together by twice that, and the time between two pieces by Stall.
func (s *Server) readBody(x *exchange) ([]byte, func(), *failure) {
	tooLarge := &failure{
		status: http.StatusRequestEntityTooLarge, code: "request_too_large",
		message: fmt.Sprintf("the body is larger than %d MiB", s.opt.MaxBody>>20),
	}
	if x.r.ContentLength > s.opt.MaxBody {
		x.w.Header().Set("Connection", "close") // rather than wait for what is left of it
		return nil, nil, tooLarge
	}
	in := &bodyReader{server: s, control: http.NewResponseController(x.w), in: http.MaxBytesReader(x.w, x.r.Body, s.opt.MaxBody)}
	release := func() { s.bodies.Add(-in.counted) }
	data, err := io.ReadAll(in)
	if err == nil {
		// The connection goes on to be watched for the client's leaving: no deadline may be left on it.
		in.control.SetReadDeadline(time.Time{})
		return data, release, nil
	}
	release()
	x.w.Header().Set("Connection", "close")
	var over *http.MaxBytesError
	switch {
	case errors.As(err, &over):
		return nil, nil, tooLarge
	case errors.Is(err, errBodies):
		return nil, nil, &failure{status: http.StatusTooManyRequests, code: "server_overloaded", message: "the server holds as many request bodies as it can; try again later", retry: true}
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, nil, &failure{status: http.StatusRequestTimeout, code: "request_timeout", message: "the body did not arrive in time"}
	}
	return nil, nil, bad("invalid_body", "", "the body could not be read to its end")
}

var errBodies = errors.New("too many bodies")

// bodyReader counts the bytes of a body.
type bodyReader struct {
	server  *Server
	control *http.ResponseController
	in      io.Reader
	read    int64
	counted int64
}

func (b *bodyReader) Read(p []byte) (int, error) {
	b.control.SetReadDeadline(time.Now().Add(b.server.opt.Stall))
	n, err := b.in.Read(p)
	b.read += int64(n)
	if more := max(b.read-smallBody, 0) - b.counted; more > 0 {
		b.counted += more
		if b.server.bodies.Add(more) > 2*b.server.opt.MaxBody {
			return n, errBodies
		}
	}
	return n, err
}

// object is a JSON object whose members are looked at one by one. Of members with the same name the last counts.
type object struct {
	path    string // of the object in the body; empty is the body itself
	members map[string]jsontext.Value
}

// parseBody reads the top of a body.
func parseBody(data []byte) (object, *failure) {
	value := jsontext.Value(data)
	var syntax *jsontext.SyntacticError
	var members map[string]jsontext.Value
	switch err := json.Unmarshal(data, &members, jsontext.AllowDuplicateNames(true)); {
	case err == nil && value.Kind() == '{':
		return object{members: members}, nil
	case errors.As(err, &syntax):
		return object{}, bad("invalid_json", "", "the body is not JSON in UTF-8: %v at byte %d", syntax.Err, syntax.ByteOffset)
	case err != nil && value.Kind() == '{':
		return object{}, bad("invalid_json", "", "the body is not JSON in UTF-8")
	}
	return object{}, bad("invalid_json", "", "the body must be a JSON object")
}

// at is the path of a member, as OpenAI writes it.
func (o object) at(name string) string {
	if o.path == "" {
		return name
	}
	return o.path + "." + name
}

// given returns a member that is there and not null.
func (o object) given(name string) (jsontext.Value, bool) {
	v, ok := o.members[name]
	return v, ok && v.Kind() != 'n'
}

func wrongType(path, want string) *failure {
	return bad("invalid_type", path, "%s must be %s", path, want)
}

// str, boolean, integer and number read a member of a type; nil if it is not given.
func (o object) str(name string) (*string, *failure) {
	v, ok := o.given(name)
	if !ok {
		return nil, nil
	}
	return stringAt(v, o.at(name))
}

func stringAt(v jsontext.Value, path string) (*string, *failure) {
	var s string
	if v.Kind() != '"' || json.Unmarshal(v, &s) != nil {
		return nil, wrongType(path, "a string")
	}
	return &s, nil
}

func (o object) boolean(name string) (*bool, *failure) {
	v, ok := o.given(name)
	if !ok {
		return nil, nil
	}
	if k := v.Kind(); k != 't' && k != 'f' {
		return nil, wrongType(o.at(name), "true or false")
	}
	b := v.Kind() == 't'
	return &b, nil
}

// integer reads a number without fraction or exponent that an int64 holds.
func (o object) integer(name string) (*int64, *failure) {
	v, ok := o.given(name)
	if !ok {
		return nil, nil
	}
	if v.Kind() != '0' {
		return nil, wrongType(o.at(name), "an integer")
	}
	n, err := strconv.ParseInt(string(v), 10, 64)
	switch {
	case errors.Is(err, strconv.ErrRange):
		return nil, bad("invalid_value", o.at(name), "%s is out of range", o.at(name))
	case err != nil:
		return nil, wrongType(o.at(name), "an integer")
	}
	return &n, nil
}

func (o object) number(name string) (*float64, *failure) {
	v, ok := o.given(name)
	if !ok {
		return nil, nil
	}
	if v.Kind() != '0' {
		return nil, wrongType(o.at(name), "a number")
	}
	n, err := strconv.ParseFloat(string(v), 64)
	if err != nil {
		return nil, bad("invalid_value", o.at(name), "%s is out of range", o.at(name))
	}
	return &n, nil
}

// list reads an array; ok says that it is given.
func (o object) list(name string) (items []jsontext.Value, ok bool, err *failure) {
	v, ok := o.given(name)
	if !ok {
		return nil, false, nil
	}
	if v.Kind() != '[' || json.Unmarshal(v, &items, jsontext.AllowDuplicateNames(true)) != nil {
		return nil, false, wrongType(o.at(name), "an array")
	}
	return items, true, nil
}

// sub reads an object; ok says that it is given.
func (o object) sub(name string) (in object, ok bool, err *failure) {
	v, ok := o.given(name)
	if !ok {
		return object{}, false, nil
	}
	in, err = objectAt(v, o.at(name))
	return in, err == nil, err
}

func objectAt(v jsontext.Value, path string) (object, *failure) {
	in := object{path: path}
	if v.Kind() != '{' || json.Unmarshal(v, &in.members, jsontext.AllowDuplicateNames(true)) != nil {
		return object{}, wrongType(path, "an object")
	}
	return in, nil
}

// refuseConstraints refuses what would force a call into a form: strict is the path of the first declaration that asks for it, constraints is
// the request's tool_constraints.
func refuseConstraints(strict string, constraints *string) *failure {
	switch {
	case strict != "":
		return bad(codeConstrained, strict, "%s is not supported yet: arguments cannot be forced to follow the schema", strict)
	case constraints != nil && *constraints == "basic":
		return bad(codeConstrained, "tool_constraints", "tool_constraints basic is not supported yet; only auto is")
	}
	return nil
}

// templateArgs takes the members of chat_template_kwargs that no field of a request has too; the template gets all that we do not know.
func templateArgs(kwargs object, to *front.Request) *failure {
	vision, err := kwargs.boolean("add_vision_id")
	if err != nil {
		return err
	}
	to.AddVisionID = vision != nil && *vision
	for name, value := range kwargs.members {
		switch name {
		case "enable_thinking", "preserve_thinking", "reasoning_effort", "add_vision_id":
		default:
			to.Args = append(to.Args, front.Arg{Name: name, Value: value})
		}
	}
	return nil
}

// typedPart opens a content part of OpenAI's protocols and gives its type; a cache breakpoint is checked and has no effect.
func typedPart(raw jsontext.Value, path string) (o object, kind string, err *failure) {
	if o, err = objectAt(raw, path); err != nil {
		return o, "", err
	}
	given, err := o.str("type")
	if err != nil {
		return o, "", err
	}
	if given == nil {
		return o, "", bad("missing_required_parameter", o.at("type"), "%s is missing", o.at("type"))
	}
	if v, ok := o.given("prompt_cache_breakpoint"); ok {
		if k := v.Kind(); k != '{' && k != 't' && k != 'f' {
			return o, "", bad("invalid_cache_breakpoint", o.at("prompt_cache_breakpoint"), "%s must be an object or a boolean", o.at("prompt_cache_breakpoint"))
		}
	}
	return o, *given, nil
}

// conversation is the list that messages must be.
func (o object) conversation() ([]jsontext.Value, *failure) {
	items, ok, err := o.list("messages")
	switch {
	case err != nil:
		return nil, err
	case !ok:
		return nil, bad("missing_required_parameter", "messages", "messages is missing")
	case len(items) == 0:
		return nil, bad("invalid_value", "messages", "messages is empty")
	}
	return items, nil
}

// toolConstraints is the request's tool_constraints: basic, auto or nothing.
func (o object) toolConstraints() (*string, *failure) {
	v, err := o.str("tool_constraints")
	if err == nil && v != nil && *v != "basic" && *v != "auto" {
		err = bad("invalid_value", "tool_constraints", "tool_constraints %q is not one of basic, auto", *v)
	}
	return v, err
}
