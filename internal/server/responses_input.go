package server

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"slices"

	"ninfer/internal/front"
)

// input reads the new items behind those of the responses before (docs/serving.md, Responses).
func (r *responseReader) input() *failure {
	var items []jsontext.Value
	v, ok := r.given("input")
	switch {
	case !ok:
	case v.Kind() == '"':
		text, err := stringAt(v, "input")
		if err != nil {
			return err
		}
		message, _ := json.Marshal(easyMessage{"message", "user", *text})
		items = []jsontext.Value{message}
	case v.Kind() == '[':
		var err *failure
		if items, _, err = r.list("input"); err != nil {
			return err
		}
	default:
		return wrongType("input", "a string or an array of items")
	}
	h := itemReader{ids: map[string]bool{}}
	q := &r.out
	if q.instructions != nil {
		h.messages = append(h.messages, front.Message{Role: "developer", Content: front.Text(*q.instructions)})
	}
	// What was stored has been read before. Only with the items behind it can it be wrong: by a result that is not there.
	for _, raw := range q.parent.items() {
		if _, err := h.item(raw, "previous_response_id"); err != nil {
			return err
		}
		q.previousInput++
	}
	for i, raw := range items {
		kept, err := h.item(raw, index("input", i))
		if err != nil {
			return err
		}
		q.items = append(q.items, kept)
	}
	if err := h.close(); err != nil {
		return err
	}
	if len(items) == 0 {
		if !slices.ContainsFunc(h.messages, func(m front.Message) bool { return m.Role == "user" }) {
			return bad("missing_required_parameter", "input", "input is missing, and no response before has a question of the user's")
		}
		q.front.NewTurn = true
	}
	q.front.Messages = h.messages
	return nil
}

type easyMessage struct {
	Type    string `json:"type"`
	Role    string `json:"role"`
	Content string `json:"content"`
}

// itemReader puts items together to messages. Items of the assistant in a row are one turn; the results of its calls come right behind it.
type itemReader struct {
	messages []front.Message
	ids      map[string]bool

	turn    *front.Message // the assistant's, while it is open
	stage   int            // of the turn: what it has last
	calls   []front.ToolCall
	results []front.Message
	paths   []string // of the results
}

// The parts of an assistant's turn, in the order that they must have.
const (
	stageReasoning = iota + 1
	stageMessage
	stageCalls
)

// item reads one item and returns it as it is kept: with an id, and its content as parts.
func (h *itemReader) item(raw jsontext.Value, path string) (jsontext.Value, *failure) {
	o, err := objectAt(raw, path)
	if err != nil {
		return nil, err
	}
	kind, err := o.str("type")
	if err != nil {
		return nil, err
	}
	if _, ok := o.given("role"); kind == nil && ok {
		message := "message"
		kind = &message
	}
	if kind == nil {
		return nil, bad("missing_required_parameter", o.at("type"), "%s is missing", o.at("type"))
	}
	read := map[string]func(object) (any, *failure){
		"message": h.message, "reasoning": h.reasoning, "function_call": h.call, "function_call_output": h.result,
	}[*kind]
	if read == nil {
		return nil, bad("item_type_not_supported", o.at("type"), "%s %q is not supported, only message, reasoning, function_call and function_call_output", o.at("type"), *kind)
	}
	kept, err := read(o)
	if err != nil {
		return nil, err
	}
	b, fault := json.Marshal(kept)
	if fault != nil {
		panic("server: an item is not JSON: " + fault.Error())
	}
	return b, nil
}

// id returns the item's own id, or a new one.
func (h *itemReader) id(o object, prefix string) (string, *failure) {
	id, err := o.str("id")
	if err != nil {
		return "", err
	}
	if id == nil || *id == "" {
		fresh := newID(prefix)
		id = &fresh
	}
	if h.ids[*id] {
		return "", bad("duplicate_item_id", o.at("id"), "%s: two items have this id", o.at("id"))
	}
	h.ids[*id] = true
	return *id, nil
}

// close ends what is open: the assistant's turn, and then the results of its calls.
func (h *itemReader) close() *failure {
	h.closeTurn()
	return h.closeResults()
}

func (h *itemReader) closeTurn() {
	if h.turn == nil {
		return
	}
	if h.turn.Content == nil && len(h.turn.ToolCalls) == 0 {
		h.turn.Content = front.Text("")
	}
	h.messages = append(h.messages, *h.turn)
	h.calls, h.turn, h.stage = h.turn.ToolCalls, nil, 0
}

func (h *itemReader) closeResults() *failure {
	if len(h.calls) == 0 {
		return nil
	}
	ordered, at, fault := inCallOrder(h.calls, h.results)
	if fault != "" {
		path := "input"
		if at >= 0 {
			path = h.paths[at]
		}
		return bad("invalid_tool_history", path, "%s: %s", path, fault)
	}
	h.messages = append(h.messages, ordered...)
	h.calls, h.results, h.paths = nil, nil, nil
	return nil
}

// assistant opens the assistant's turn, or goes on with it.
func (h *itemReader) assistant(stage int, path string) *failure {
	if h.turn == nil {
		if err := h.closeResults(); err != nil {
			return err
		}
		h.turn = &front.Message{Role: "assistant"}
	}
	if stage < h.stage || stage == h.stage && stage != stageCalls {
		return bad("invalid_assistant_history", path, "%s: the items of an assistant's turn must be its reasoning, its message and its calls, in this order", path)
	}
	h.stage = stage
	return nil
}

// keptMessage is a message as it is stored and listed.
type keptMessage struct {
	ID      string           `json:"id"`
	Type    string           `json:"type"`
	Status  string           `json:"status"`
	Role    string           `json:"role"`
	Content []jsontext.Value `json:"content"`
}

func (h *itemReader) message(o object) (any, *failure) {
	role, err := o.str("role")
	if err != nil {
		return nil, err
	}
	if role == nil || !slices.Contains([]string{"user", "assistant", "system", "developer"}, *role) {
		return nil, bad("invalid_value", o.at("role"), "%s must be one of user, assistant, system, developer", o.at("role"))
	}
	if *role == "assistant" {
		if err := h.assistant(stageMessage, o.path); err != nil {
			return nil, err
		}
	} else if err := h.close(); err != nil {
		return nil, err
	}
	id, err := h.id(o, "msg_")
	if err != nil {
		return nil, err
	}
	parts, kept, err := h.parts(o, "content", *role)
	if err != nil {
		return nil, err
	}
	if *role == "assistant" {
		h.turn.Content = parts
	} else {
		h.messages = append(h.messages, front.Message{Role: *role, Content: parts})
	}
	status, err := itemStatus(o)
	return keptMessage{id, "message", status, *role, kept}, err
}

// itemStatus is completed unless the item says otherwise.
func itemStatus(o object) (string, *failure) {
	status, err := o.str("status")
	if err != nil || status == nil {
		return "completed", err
	}
	return *status, nil
}

// textPart is a part of a content that is text.
type textPart struct {
	Type        string      `json:"type"`
	Text        string      `json:"text"`
	Annotations []struct{}  `json:"annotations,omitzero"`
	Logprobs    *[]struct{} `json:"logprobs,omitzero"`
}

// parts reads a content: a text or an array of parts. Beside what the model sees it returns the parts as they are kept.
func (h *itemReader) parts(o object, member, role string) (parts []front.Part, kept []jsontext.Value, err *failure) {
	path := o.at(member)
	v, ok := o.given(member)
	if !ok {
		return nil, nil, bad("missing_required_parameter", path, "%s is missing", path)
	}
	parts, kept = []front.Part{}, []jsontext.Value{}
	switch v.Kind() {
	case '"':
		text, err := stringAt(v, path)
		if err != nil {
			return nil, nil, err
		}
		kind := "input_text"
		if role == "assistant" {
			kind = "output_text"
		}
		part, _ := json.Marshal(textPart{Type: kind, Text: *text})
		return front.Text(*text), append(kept, part), nil
	case '[':
	default:
		return nil, nil, wrongType(path, "a string or an array of parts")
	}
	list, _, err := o.list(member)
	if err != nil {
		return nil, nil, err
	}
	for i, raw := range list {
		p, err := responsePart(raw, index(path, i), role)
		if err != nil {
			return nil, nil, err
		}
		parts, kept = append(parts, p), append(kept, raw)
	}
	return parts, kept, nil
}

// responsePart reads one part. role tells who may say what; it is tool for the results of calls.
func responsePart(raw jsontext.Value, path, role string) (front.Part, *failure) {
	var none front.Part
	o, kind, err := typedPart(raw, path)
	if err != nil {
		return none, err
	}
	member := ""
	switch kind {
	case "input_text":
		member = "text"
	case "output_text":
		if role == "assistant" {
			member = "text"
		}
	case "refusal":
		if role == "assistant" {
			member = "refusal"
		}
	case "input_image":
		if role == "user" || role == "tool" {
			return none, responseMedia(o, "image_url")
		}
	case "input_video":
		if role == "user" {
			return none, responseMedia(o, "video_url")
		}
	}
	if member == "" {
		return none, bad("modality_not_supported", o.at("type"), "content of type %q is not supported in %s", kind, map[bool]string{true: "a result", false: "a message of role " + role}[role == "tool"])
	}
	text, err := o.str(member)
	if err != nil {
		return none, err
	}
	if text == nil {
		return none, bad("missing_required_parameter", o.at(member), "%s is missing", o.at(member))
	}
	return front.Part{Text: *text}, nil
}

// responseMedia refuses a picture or film, after looking at whether it could be right.
func responseMedia(o object, member string) *failure {
	if _, ok := o.given("file_id"); ok {
		return bad("modality_not_supported", o.at("file_id"), "%s is not supported: this server keeps no files", o.at("file_id"))
	}
	if detail, err := o.str("detail"); err != nil {
		return err
	} else if detail != nil && *detail != "auto" {
		return bad("image_detail_not_supported", o.at("detail"), "%s can only be auto", o.at("detail"))
	}
	if _, ok := o.given(member); !ok {
		return bad("missing_required_parameter", o.at(member), "%s is missing", o.at(member))
	}
	return media(o, member)
}

// keptReasoning is a reasoning item as it is stored and listed.
type keptReasoning struct {
	ID        string           `json:"id"`
	Type      string           `json:"type"`
	Summary   []jsontext.Value `json:"summary"`
	Content   []jsontext.Value `json:"content"`
	Encrypted jsontext.Value   `json:"encrypted_content,omitzero"`
	Status    string           `json:"status"`
}

func (h *itemReader) reasoning(o object) (any, *failure) {
	if err := h.assistant(stageReasoning, o.path); err != nil {
		return nil, err
	}
	id, err := h.id(o, "rs_")
	if err != nil {
		return nil, err
	}
	summary, _, err := o.list("summary")
	if err != nil {
		return nil, err
	}
	content, ok, err := o.list("content")
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, bad("missing_required_parameter", o.at("content"), "%s is missing: a summary or sealed reasoning cannot take the place of the reasoning", o.at("content"))
	}
	text := ""
	for i, raw := range content {
		part, err := objectAt(raw, index(o.at("content"), i))
		if err != nil {
			return nil, err
		}
		kind, err := part.str("type")
		if err != nil {
			return nil, err
		}
		if kind == nil || *kind != "reasoning_text" {
			return nil, bad("invalid_value", part.at("type"), "%s must be reasoning_text", part.at("type"))
		}
		s, err := part.str("text")
		if err != nil {
			return nil, err
		}
		if s == nil {
			return nil, bad("missing_required_parameter", part.at("text"), "%s is missing", part.at("text"))
		}
		text += *s
	}
	h.turn.Reasoning = &text
	status, err := itemStatus(o)
	sealed, _ := o.given("encrypted_content")
	return keptReasoning{id, "reasoning", summary, content, sealed, status}, err
}

// keptCall is a call as it is stored and listed.
type keptCall struct {
	ID        string `json:"id"`
	Type      string `json:"type"`
	Status    string `json:"status"`
	Arguments string `json:"arguments"`
	CallID    string `json:"call_id"`
	Name      string `json:"name"`
	Namespace string `json:"namespace,omitzero"`
}

func (h *itemReader) call(o object) (any, *failure) {
	if err := h.assistant(stageCalls, o.path); err != nil {
		return nil, err
	}
	id, err := h.id(o, "fc_")
	if err != nil {
		return nil, err
	}
	texts := map[string]string{}
	for _, name := range []string{"call_id", "name", "arguments", "namespace"} {
		v, err := o.str(name)
		switch {
		case err != nil:
			return nil, err
		case v != nil && (*v != "" || name == "namespace"):
			texts[name] = *v
		case name != "namespace":
			return nil, bad("missing_required_parameter", o.at(name), "%s is missing", o.at(name))
		}
	}
	call := front.ToolCall{ID: texts["call_id"], Name: joined(texts["namespace"], texts["name"])}
	call.Arguments, _ = json.Marshal(texts["arguments"])
	var members map[string]jsontext.Value
	if text := jsontext.Value(texts["arguments"]); text.Kind() != '{' || json.Unmarshal(text, &members, jsontext.AllowDuplicateNames(true)) != nil {
		return nil, bad("invalid_value", o.at("arguments"), "%s must be the text of a JSON object", o.at("arguments"))
	}
	if slices.ContainsFunc(h.turn.ToolCalls, func(c front.ToolCall) bool { return c.ID == call.ID }) {
		return nil, bad("invalid_tool_history", o.at("call_id"), "%s: two calls have this id", o.at("call_id"))
	}
	h.turn.ToolCalls = append(h.turn.ToolCalls, call)
	status, err := itemStatus(o)
	return keptCall{id, "function_call", status, texts["arguments"], call.ID, texts["name"], texts["namespace"]}, err
}

// keptResult is the result of a call as it is stored and listed.
type keptResult struct {
	ID     string         `json:"id"`
	Type   string         `json:"type"`
	Status string         `json:"status"`
	CallID string         `json:"call_id"`
	Output jsontext.Value `json:"output"`
}

func (h *itemReader) result(o object) (any, *failure) {
	h.closeTurn()
	id, err := h.id(o, "fco_")
	if err != nil {
		return nil, err
	}
	call, err := o.str("call_id")
	if err != nil {
		return nil, err
	}
	if call == nil {
		return nil, bad("missing_required_parameter", o.at("call_id"), "%s is missing", o.at("call_id"))
	}
	if len(h.calls) == 0 {
		return nil, bad("invalid_tool_history", o.at("call_id"), "%s answers no call of the turn before it", o.at("call_id"))
	}
	parts, _, err := h.parts(o, "output", "tool")
	if err != nil {
		return nil, err
	}
	h.results = append(h.results, front.Message{Role: "tool", ToolCallID: *call, Content: parts})
	h.paths = append(h.paths, o.at("call_id"))
	output, _ := o.given("output")
	status, err := itemStatus(o)
	return keptResult{id, "function_call_output", status, *call, output}, err
}
