package server

import (
	"encoding/json/jsontext"
	"slices"
	"strings"

	"ninfer/internal/front"
)

// billing is how a client marks a note to Anthropic that is no part of the conversation.
const billing = "x-anthropic-billing-header:"

// system reads the system prompt.
func (r *messagesReader) system() *failure {
	v, ok := r.given("system")
	if !ok {
		return nil
	}
	m := front.Message{Role: "system"}
	switch v.Kind() {
	case '"':
		text, err := stringAt(v, "system")
		if err != nil {
			return err
		}
		r.marks.plain()
		m.Content = front.Text(*text)
	case '[':
		blocks, _, err := r.list("system")
		if err != nil {
			return err
		}
		for i, raw := range blocks {
			o, kind, err := blockAt(raw, index("system", i))
			if err != nil {
				return err
			}
			if kind != "text" {
				return unknownBlock(o, kind, "system")
			}
			text, err := textOf(o)
			if err != nil {
				return err
			}
			if i == 0 && strings.HasPrefix(text, billing) {
				continue
			}
			if err := r.marks.read(o); err != nil {
				return err
			}
			m.Content = append(m.Content, front.Part{Text: text})
		}
	default:
		return wrongType("system", "a string or an array of text blocks")
	}
	if slices.ContainsFunc(m.Content, func(p front.Part) bool { return p.Text != "" }) {
		r.out.front.Messages = append(r.out.front.Messages, m)
	}
	return nil
}

// turn is what one side says until the other does: all messages of one role in a row.
type turn struct {
	role, path string
	parts      []front.Part // text
	reasoning  *string
	calls      []front.ToolCall
	results    []front.Message // of tools
	paths      []string        // of results
	hidden     bool            // something of it is not text
}

// messages reads the conversation (docs/serving.md, Messages).
func (r *messagesReader) messages() *failure {
	items, err := r.conversation()
	if err != nil {
		return err
	}
	var turns []*turn
	for i, raw := range items {
		o, err := objectAt(raw, index("messages", i))
		if err != nil {
			return err
		}
		role, err := o.str("role")
		switch {
		case err != nil:
			return err
		case role == nil || !slices.Contains([]string{"user", "assistant", "system"}, *role):
			return bad("invalid_value", o.at("role"), "%s must be one of user, assistant, system", o.at("role"))
		}
		if n := len(turns); n == 0 || turns[n-1].role != *role {
			turns = append(turns, &turn{role: *role, path: o.path})
		}
		if err := r.content(o, turns[len(turns)-1]); err != nil {
			return err
		}
	}
	for i, t := range turns {
		var before, after *turn
		if i > 0 {
			before = turns[i-1]
		}
		if i+1 < len(turns) {
			after = turns[i+1]
		}
		if err := r.add(t, before, after); err != nil {
			return err
		}
	}
	return nil
}

// add appends a turn to the conversation, if it is in order.
func (r *messagesReader) add(t, before, after *turn) *failure {
	messages := &r.out.front.Messages
	switch t.role {
	case "system":
		if before == nil || before.role != "user" || after != nil && after.role != "assistant" {
			return bad("invalid_message_order", t.path, "%s must follow a turn of the user's and be the last or stand before one of the assistant's", t.path)
		}
		*messages = append(*messages, front.Message{Role: "system", Content: t.parts})
	case "assistant":
		if after == nil {
			r.prefill = t.path
		}
		switch {
		case after == nil && t.hidden:
			return bad(codePrefill, t.path, "%s is to be continued, and for that it may hold text only", t.path)
		case len(t.calls) > 0 && (after == nil || after.role != "user"):
			return bad("invalid_tool_history", t.path, "%s has calls of tools whose results do not follow", t.path)
		}
		*messages = append(*messages, front.Message{Role: "assistant", Content: t.parts, Reasoning: t.reasoning, ToolCalls: t.calls})
	case "user":
		results, err := t.answers(before)
		if err != nil {
			return err
		}
		*messages = append(*messages, results...)
		if len(results) == 0 || len(t.parts) > 0 {
			*messages = append(*messages, front.Message{Role: "user", Content: t.parts})
		}
	}
	return nil
}

// answers are the results of a turn in the order of their calls. A history may begin with results, whose calls nobody knows any more.
func (t *turn) answers(before *turn) ([]front.Message, *failure) {
	if before == nil {
		for i, m := range t.results {
			if slices.ContainsFunc(t.results[:i], func(r front.Message) bool { return r.ToolCallID == m.ToolCallID }) {
				return nil, bad("invalid_tool_history", t.paths[i], "%s answers a call that has its result", t.paths[i])
			}
		}
		return t.results, nil
	}
	results, at, fault := inCallOrder(before.calls, t.results)
	switch {
	case fault == "":
		return results, nil
	case at >= 0:
		return nil, bad("invalid_tool_history", t.paths[at], "%s %s", t.paths[at], fault)
	}
	return nil, bad("invalid_tool_history", t.path, "%s: %s", t.path, fault)
}

// content reads the blocks of a message into its turn.
func (r *messagesReader) content(o object, t *turn) *failure {
	path := o.at("content")
	v, ok := o.given("content")
	if !ok {
		return bad("missing_required_parameter", path, "%s is missing", path)
	}
	switch v.Kind() {
	case '"':
		text, err := stringAt(v, path)
		if err != nil {
			return err
		}
		r.marks.plain()
		t.parts = append(t.parts, front.Part{Text: *text})
		return nil
	case '[':
	default:
		return wrongType(path, "a string or an array of blocks")
	}
	blocks, _, err := o.list("content")
	if err != nil {
		return err
	}
	for i, raw := range blocks {
		block, kind, err := blockAt(raw, index(path, i))
		if err != nil {
			return err
		}
		if err := r.block(block, kind, t); err != nil {
			return err
		}
	}
	return nil
}

// block reads one block of a message.
func (r *messagesReader) block(o object, kind string, t *turn) *failure {
	if strings.HasSuffix(kind, "thinking") {
		if ttl, err := cacheMark(o); err != nil {
			return err
		} else if ttl != "" {
			return bad("invalid_cache_control", o.at("cache_control"), "%s is not possible on what was thought", o.at("cache_control"))
		}
	} else if err := r.marks.read(o); err != nil {
		return err
	}
	switch {
	case kind == "text":
		text, err := textOf(o)
		if err != nil {
			return err
		}
		t.parts = append(t.parts, front.Part{Text: text})
		return nil
	case kind == "image" && t.role == "user":
		return image(o)
	case kind == "tool_result" && t.role == "user":
		if len(t.parts) > 0 {
			return bad("invalid_tool_history", o.path, "%s must stand before everything else of its turn", o.path)
		}
		return r.result(o, t)
	case kind == "thinking" && t.role == "assistant":
		// Whether the signature is ours does not matter: the text is the conversation's as any other.
		t.hidden = true
		text, err := o.str("thinking")
		if err != nil {
			return err
		}
		if text == nil {
			return bad("missing_required_parameter", o.at("thinking"), "%s is missing", o.at("thinking"))
		}
		if t.reasoning != nil {
			*text = *t.reasoning + *text
		}
		t.reasoning = text
		return nil
	case kind == "redacted_thinking" && t.role == "assistant":
		t.hidden = true
		return nil
	case kind == "tool_use" && t.role == "assistant":
		t.hidden = true
		return call(o, t)
	}
	return unknownBlock(o, kind, t.role)
}

// call reads a tool_use block.
func call(o object, t *turn) *failure {
	id, err := o.str("id")
	if err != nil {
		return err
	}
	name, err := o.str("name")
	if err != nil {
		return err
	}
	_, ok, err := o.sub("input")
	switch {
	case err != nil:
		return err
	case id == nil || *id == "":
		return bad("missing_required_parameter", o.at("id"), "%s is missing", o.at("id"))
	case slices.ContainsFunc(t.calls, func(c front.ToolCall) bool { return c.ID == *id }):
		return bad("invalid_tool_history", o.at("id"), "%s is that of another call of the turn", o.at("id"))
	case name == nil || *name == "":
		return bad("missing_required_parameter", o.at("name"), "%s is missing", o.at("name"))
	case !ok:
		return bad("missing_required_parameter", o.at("input"), "%s is missing", o.at("input"))
	}
	caller, ok, err := o.sub("caller")
	if err != nil {
		return err
	}
	if ok {
		kind, err := caller.str("type")
		if err != nil {
			return err
		}
		if kind == nil || *kind != "direct" {
			return bad("tool_caller_not_supported", caller.at("type"), "%s can only be direct", caller.at("type"))
		}
	}
	t.calls = append(t.calls, front.ToolCall{ID: *id, Name: *name, Arguments: o.members["input"]})
	return nil
}

// failedTool is what the model sees before the result of a tool that failed. It is part of the documentation.
const failedTool = "The tool failed:\n"

// result reads a tool_result block.
func (r *messagesReader) result(o object, t *turn) *failure {
	id, err := o.str("tool_use_id")
	if err != nil {
		return err
	}
	if id == nil || *id == "" {
		return bad("missing_required_parameter", o.at("tool_use_id"), "%s is missing", o.at("tool_use_id"))
	}
	failed, err := o.boolean("is_error")
	if err != nil {
		return err
	}
	m := front.Message{Role: "tool", ToolCallID: *id, Content: []front.Part{}}
	if failed != nil && *failed {
		m.Content = append(m.Content, front.Part{Text: failedTool})
	}
	path := o.at("content")
	v, ok := o.given("content")
	switch {
	case !ok:
	case v.Kind() == '"':
		text, err := stringAt(v, path)
		if err != nil {
			return err
		}
		m.Content = append(m.Content, front.Part{Text: *text})
	case v.Kind() == '[':
		last := r.marks.last
		blocks, _, err := o.list("content")
		if err != nil {
			return err
		}
		for i, raw := range blocks {
			inner, kind, err := blockAt(raw, index(path, i))
			if err != nil {
				return err
			}
			if err := r.marks.read(inner); err != nil {
				return err
			}
			switch kind {
			case "text":
				text, err := textOf(inner)
				if err != nil {
					return err
				}
				m.Content = append(m.Content, front.Part{Text: text})
			case "image":
				return image(inner)
			default:
				return unknownBlock(inner, kind, "tool_result")
			}
		}
		r.marks.last = last // the block is the result, not what is in it
	default:
		return wrongType(path, "a string or an array of blocks")
	}
	t.results, t.paths = append(t.results, m), append(t.paths, o.path)
	return nil
}

// blockAt opens a block.
func blockAt(raw jsontext.Value, path string) (object, string, *failure) {
	o, err := objectAt(raw, path)
	if err != nil {
		return o, "", err
	}
	kind, err := o.str("type")
	switch {
	case err != nil:
		return o, "", err
	case kind == nil:
		return o, "", bad("missing_required_parameter", o.at("type"), "%s is missing", o.at("type"))
	}
	return o, *kind, nil
}

// textOf is the text of a text block.
func textOf(o object) (string, *failure) {
	text, err := o.str("text")
	switch {
	case err != nil:
		return "", err
	case text == nil:
		return "", bad("missing_required_parameter", o.at("text"), "%s is missing", o.at("text"))
	}
	return *text, nil
}

// image refuses a picture, after looking at whether it could be right.
func image(o object) *failure {
	source, ok, err := o.sub("source")
	if err != nil {
		return err
	}
	if !ok {
		return bad("missing_required_parameter", o.at("source"), "%s is missing", o.at("source"))
	}
	kind, err := source.str("type")
	if err != nil {
		return err
	}
	needs := map[string][]string{"base64": {"media_type", "data"}, "url": {"url"}}
	switch {
	case kind != nil && *kind == "file":
		return bad("files_not_supported", source.at("type"), "%s file is not supported: this server keeps no files", source.at("type"))
	case kind == nil || needs[*kind] == nil:
		return bad("invalid_value", source.at("type"), "%s must be base64 or url", source.at("type"))
	}
	for _, name := range needs[*kind] {
		if v, err := source.str(name); err != nil {
			return err
		} else if v == nil {
			return bad("missing_required_parameter", source.at(name), "%s is missing", source.at(name))
		}
	}
	transformations, _, err := o.sub("transformations")
	if err != nil {
		return err
	}
	oversized, err := transformations.str("oversized_image")
	if err != nil {
		return err
	}
	if oversized != nil && *oversized != "downsize" && *oversized != "error" {
		path := transformations.at("oversized_image")
		return bad("invalid_value", path, "%s %q is not one of downsize, error", path, *oversized)
	}
	return bad("vision_disabled", o.path, "%s: this server was started without vision and takes no pictures", o.path)
}

// unknownBlock refuses a block that has no place where it stands, or none anywhere here.
func unknownBlock(o object, kind, where string) *failure {
	code := "invalid_value"
	switch {
	case kind == "document":
		code = "documents_not_supported"
		if source, ok, _ := o.sub("source"); ok {
			if from, _ := source.str("type"); from != nil && *from == "file" {
				code = "files_not_supported"
			}
		}
	case kind == "search_result":
		code = "search_results_not_supported"
	case kind == "container_upload":
		code = "container_not_supported"
	case kind == "tool_reference":
		code = "deferred_tools_not_supported"
	case strings.HasPrefix(kind, "mcp_"):
		code = "mcp_not_supported"
	case kind == "server_tool_use", strings.HasSuffix(kind, "_tool_result"):
		code = "server_tools_not_supported"
	}
	return bad(code, o.at("type"), "%s: a block of type %q is not supported in %s", o.at("type"), kind, where)
}
