package server

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"slices"

	"ninfer/internal/front"
)

func index(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }

// messages reads the conversation (docs/serving.md, Chat completions).
func (r *chatReader) messages() *failure {
	items, err := r.conversation()
	if err != nil {
		return err
	}
	for i, item := range items {
		o, err := objectAt(item, index("messages", i))
		if err != nil {
			return err
		}
		m, err := message(o)
		if err != nil {
			return err
		}
		r.out.front.Messages = append(r.out.front.Messages, m)
	}
	return nil
}

var roles = []string{"system", "developer", "user", "assistant", "tool", "function"}

func message(o object) (front.Message, *failure) {
	var m front.Message
	role, err := o.str("role")
	switch {
	case err != nil:
		return m, err
	case role == nil || !slices.Contains(roles, *role):
		return m, bad("invalid_value", o.at("role"), "%s must be one of %v", o.at("role"), roles)
	}
	m.Role = *role
	name, err := o.str("name")
	if err != nil {
		return m, err
	}
	switch m.Role {
	case "function": // the older name of a tool's result
		m.Role = "tool"
		if name == nil || *name == "" {
			return m, bad("invalid_value", o.at("name"), "%s is missing", o.at("name"))
		}
	case "tool":
		id, err := o.str("tool_call_id")
		if err != nil {
			return m, err
		}
		if id == nil {
			return m, bad("missing_required_parameter", o.at("tool_call_id"), "%s is missing", o.at("tool_call_id"))
		}
		m.ToolCallID = *id
	default:
		if name != nil && *name != "" {
			return m, bad("message_name_not_supported", o.at("name"), "%s is not supported: the model does not see names", o.at("name"))
		}
	}
	if m.Role == "assistant" {
		if err := assistant(o, &m); err != nil {
			return m, err
		}
	}
	return m, content(o, &m)
}

// assistant reads what only an assistant's message has.
func assistant(o object, m *front.Message) *failure {
	if _, ok := o.given("audio"); ok {
		return bad("assistant_history_not_supported", o.at("audio"), "%s is not supported", o.at("audio"))
	}
	if _, ok := o.given("function_call"); ok {
		return bad("legacy_tools_not_supported", o.at("function_call"), "%s is not supported; use tool_calls", o.at("function_call"))
	}
	first, err := o.str("reasoning_content")
	if err != nil {
		return err
	}
	second, err := o.str("reasoning")
	if err != nil {
		return err
	}
	if first != nil && second != nil && *first != *second {
		return bad("invalid_value", o.at("reasoning"), "%s and reasoning_content differ", o.at("reasoning"))
	}
	if m.Reasoning = first; first == nil {
		m.Reasoning = second
	}
	calls, _, err := o.list("tool_calls")
	if err != nil {
		return err
	}
	for i, raw := range calls {
		call, err := toolCall(raw, index(o.at("tool_calls"), i))
		if err != nil {
			return err
		}
		m.ToolCalls = append(m.ToolCalls, call)
	}
	return nil
}

func toolCall(raw jsontext.Value, path string) (front.ToolCall, *failure) {
	var out front.ToolCall
	call, err := objectAt(raw, path)
	if err != nil {
		return out, err
	}
	id, err := call.str("id")
	if err != nil {
		return out, err
	}
	kind, err := call.str("type")
	if err != nil {
		return out, err
	}
	function, ok, err := call.sub("function")
	switch {
	case err != nil:
		return out, err
	case id == nil:
		return out, bad("missing_required_parameter", call.at("id"), "%s is missing", call.at("id"))
	case kind != nil && *kind != "function":
		return out, bad("tool_type_not_supported", call.at("type"), "%s must be function", call.at("type"))
	case !ok:
		return out, wrongType(call.at("function"), "an object")
	}
	name, err := function.str("name")
	if err != nil {
		return out, err
	}
	if name == nil || *name == "" {
		return out, bad("missing_required_parameter", function.at("name"), "%s is missing", function.at("name"))
	}
	out = front.ToolCall{ID: *id, Name: *name, Arguments: function.members["arguments"]}
	text := out.Arguments
	if text.Kind() == '"' {
		s, err := stringAt(text, function.at("arguments"))
		if err != nil {
			return out, err
		}
		text = jsontext.Value(*s)
	}
	var members map[string]jsontext.Value
	if text.Kind() != '{' || json.Unmarshal(text, &members, jsontext.AllowDuplicateNames(true)) != nil {
		return out, bad("invalid_value", function.at("arguments"), "%s must be a JSON object or the text of one", function.at("arguments"))
	}
	return out, nil
}

// content reads the content of a message.
func content(o object, m *front.Message) *failure {
	path := o.at("content")
	v, ok := o.given("content")
	if !ok {
		if m.Role == "assistant" && len(m.ToolCalls) > 0 {
			return nil
		}
		return bad("missing_required_parameter", path, "%s is missing; only an assistant message with tool calls can do without", path)
	}
	switch v.Kind() {
	case '"':
		s, err := stringAt(v, path)
		if err != nil {
			return err
		}
		m.Content = front.Text(*s)
		return nil
	case '[':
	default:
		return wrongType(path, "a string or an array of parts")
	}
	parts, _, err := o.list("content")
	if err != nil {
		return err
	}
	m.Content = []front.Part{}
	for i, raw := range parts {
		p, err := part(raw, index(path, i), m.Role)
		if err != nil {
			return err
		}
		m.Content = append(m.Content, p)
	}
	return nil
}

func part(raw jsontext.Value, path, role string) (front.Part, *failure) {
	var none front.Part
	o, kind, err := typedPart(raw, path)
	if err != nil {
		return none, err
	}
	switch kind {
	case "text", "refusal":
		if kind == "refusal" && role != "assistant" {
			return none, bad("invalid_value", o.at("type"), "a refusal is possible only in an assistant message")
		}
		text, err := o.str(kind)
		if err != nil {
			return none, err
		}
		if text == nil {
			return none, bad("missing_required_parameter", o.at(kind), "%s is missing", o.at(kind))
		}
		return front.Part{Text: *text}, nil
	case "image_url":
		if role == "user" || role == "tool" {
			return none, media(o, kind)
		}
	case "video_url":
		if role == "user" {
			return none, media(o, kind)
		}
	}
	return none, bad("modality_not_supported", path, "content of type %q is not supported in a message of role %s", kind, role)
}

// media refuses a picture or film, after looking at whether it could be right.
func media(o object, kind string) *failure {
	path := o.at(kind)
	switch v := o.members[kind]; v.Kind() {
	case '"':
	case '{':
		source, err := objectAt(v, path)
		if err != nil {
			return err
		}
		url, err := source.str("url")
		if err != nil {
			return err
		}
		if url == nil {
			return bad("missing_required_parameter", source.at("url"), "%s is missing", source.at("url"))
		}
		detail, err := source.str("detail")
		if err != nil {
			return err
		}
		if detail != nil && *detail != "auto" {
			return bad("image_detail_not_supported", source.at("detail"), "%s can only be auto", source.at("detail"))
		}
	default:
		return wrongType(path, "a string or an object")
	}
	return bad("vision_disabled", path, "this server was started without vision and takes no pictures or films")
}
