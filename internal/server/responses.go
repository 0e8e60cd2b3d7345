package server

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"strings"
	"time"

	"ninfer/internal/engine"
	"ninfer/internal/front"
)

// response is the object of OpenAI's Responses API.
type response struct {
	ID          string         `json:"id"`
	Object      string         `json:"object"`
	CreatedAt   int64          `json:"created_at"`
	Status      string         `json:"status"`
	Background  bool           `json:"background"`
	CompletedAt *int64         `json:"completed_at,omitzero"`
	Error       *responseError `json:"error"`
	Incomplete  *incomplete    `json:"incomplete_details"`
	Instruct    *string        `json:"instructions"`
	MaxOutput   *int64         `json:"max_output_tokens"`
	MaxCalls    *int64         `json:"max_tool_calls"`
	Model       string         `json:"model"`
	Output      []responseItem `json:"output"`
	Parallel    bool           `json:"parallel_tool_calls"`
	Previous    *string        `json:"previous_response_id"`
	CacheKey    *string        `json:"prompt_cache_key,omitzero"`
	Reasoning   responseEffort `json:"reasoning"`
	Safety      *string        `json:"safety_identifier,omitzero"`
	Tier        string         `json:"service_tier"`
	Store       bool           `json:"store"`
	Temperature float64        `json:"temperature"`
	Text        responseFormat `json:"text"`
	ToolChoice  jsontext.Value `json:"tool_choice"`
	Tools       jsontext.Value `json:"tools"`
	TopLogprobs int            `json:"top_logprobs"`
	TopP        float64        `json:"top_p"`
	Truncation  string         `json:"truncation"`
	Usage       *responseUsage `json:"usage"`
	User        *string        `json:"user"`
	Metadata    jsontext.Value `json:"metadata"`
}

type responseError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

type incomplete struct {
	Reason string `json:"reason"`
}

type responseEffort struct {
	Effort  *string `json:"effort"`
	Summary *string `json:"summary"`
}

type responseFormat struct {
	Format struct {
		Type string `json:"type"`
	} `json:"format"`
}

type responseUsage struct {
	Input        int `json:"input_tokens"`
	InputDetails struct {
		Cached int `json:"cached_tokens"`
	} `json:"input_tokens_details"`
	Output        int `json:"output_tokens"`
	OutputDetails struct {
		Reasoning int `json:"reasoning_tokens"`
	} `json:"output_tokens_details"`
	Total int `json:"total_tokens"`
}

// responseItem is an item of the output: reasoning, a message or a call.
type responseItem struct {
	ID        string     `json:"id"`
	Type      string     `json:"type"`
	Status    string     `json:"status"`
	Role      string     `json:"role,omitzero"`
	Summary   []struct{} `json:"summary,omitzero"`
	Content   []textPart `json:"content,omitzero"`
	Arguments *string    `json:"arguments,omitzero"`
	CallID    string     `json:"call_id,omitzero"`
	Name      string     `json:"name,omitzero"`
	Namespace string     `json:"namespace,omitzero"`
}

// newID is an id in the form of Responses.
func newID(prefix string) string { return prefix + randomHex(16) }

// responseEvent is an event of the stream.
type responseEvent struct {
	Type         string        `json:"type"`
	Sequence     int           `json:"sequence_number"`
	Response     *response     `json:"response,omitzero"`
	ItemID       string        `json:"item_id,omitzero"`
	OutputIndex  *int          `json:"output_index,omitzero"`
	ContentIndex *int          `json:"content_index,omitzero"`
	Item         *responseItem `json:"item,omitzero"`
	Part         *textPart     `json:"part,omitzero"`
	Delta        *string       `json:"delta,omitzero"`
	Text         *string       `json:"text,omitzero"`
	Name         string        `json:"name,omitzero"`
	Arguments    *string       `json:"arguments,omitzero"`
	Logprobs     *[]struct{}   `json:"logprobs,omitzero"`
}

// responseCall tells an answer as Responses does. The items of the output are put together as they are told, so a whole answer is what a
// stream ends with.
type responseCall struct {
	*generation
	request *responseRequest
	object  response

	sequence int
	err      error // of the stream

	open *responseItem // reasoning or message, the last of the output
	kind front.Kind    // of its text
	text strings.Builder
}

// responses serves POST /v1/responses.
func (s *Server) responses(x *exchange) {
	x.fields = responseFields
	s.generate(x, func(data []byte, g *generation) (protocol, *front.Request, bool, *failure) {
		req, err := parseResponse(data, s.opt.ModelID, s.store)
		switch {
		case err != nil:
			return nil, nil, false, err
		case !req.model:
			return nil, nil, false, bad("missing_required_parameter", "model", "model is missing; this server has %q", s.opt.ModelID)
		case req.store && s.store.cost(&responseTurn{parent: req.parent, size: sizeOf(req.items)}) > s.store.room:
			return nil, nil, false, noRoom()
		}
		return &responseCall{generation: g, request: req}, &req.front, req.stream, nil
	})
}

// countResponse serves POST /v1/responses/input_tokens.
func (s *Server) countResponse(x *exchange) {
	x.fields = responseFields
	s.count(x, func(data []byte) (*front.Request, *failure) {
		req, err := parseResponse(data, s.opt.ModelID, s.store)
		if err != nil {
			return nil, err
		}
		return &req.front, nil
	}, func(tokens int) any {
		return struct {
			Object string `json:"object"`
			Input  int    `json:"input_tokens"`
		}{"response.input_tokens", tokens}
	})
}

func noRoom() *failure {
	return bad("response_store_capacity_exceeded", "store", "store: the response is larger than what is kept of all responses; set it to false, or start the server with a larger --response-store-max-mib")
}

func (c *responseCall) name() string { return "responses" }

// start makes the object without output.
func (c *responseCall) start() {
	q, p := c.request, c.prepared
	c.object = response{
		ID: newID("resp_"), Object: "response", CreatedAt: c.created, Status: "in_progress", Instruct: q.instructions, MaxOutput: q.maxOutput,
		MaxCalls: q.maxToolCalls, Model: c.server.opt.ModelID, Output: []responseItem{}, Parallel: q.parallel, Previous: q.parentID,
		CacheKey: q.cacheKey, Safety: q.safety, Tier: "default", Store: q.store, Temperature: p.Sampling.Temperature, ToolChoice: q.toolChoice,
		Tools: q.tools, TopP: p.Sampling.TopP, Truncation: "disabled", User: q.user, Metadata: q.metadata,
	}
	c.object.Reasoning.Effort, c.object.Text.Format.Type = q.effort, "text"
	if q.topP != nil {
		c.object.TopP = *q.topP
	}
}

func (c *responseCall) whole(items []item, out engine.Outcome) any {
	c.start()
	c.tell(nil, items)
	if err := c.finish(nil, out); err != nil {
		return err
	}
	return &c.object
}

func (c *responseCall) begin(ev *events) error {
	c.start()
	c.send(ev, responseEvent{Type: "response.created", Response: &c.object})
	c.send(ev, responseEvent{Type: "response.in_progress", Response: &c.object})
	return c.err
}

func (c *responseCall) show(ev *events, items []item) error {
	c.tell(ev, items)
	return c.err
}

func (c *responseCall) end(ev *events, out engine.Outcome) error {
	if err := c.finish(ev, out); err != nil {
		return c.broken(ev, err)
	}
	return c.err
}

func (c *responseCall) broken(ev *events, f *failure) error {
	c.close(ev, "incomplete")
	c.object.Status, c.object.Error, c.object.CompletedAt = "failed", &responseError{f.code, f.message}, nil
	c.send(ev, responseEvent{Type: "response.failed", Response: &c.object})
	return c.err
}

// abandoned keeps what a client that went away was sent: it may know the id.
func (c *responseCall) abandoned() {
	if c.object.Status != "in_progress" {
		return // it is over, and only the last event did not arrive
	}
	c.close(nil, "incomplete")
	c.object.Status = "cancelled"
	c.usage()
	c.keep()
}

// send sends an event. Without a stream it does nothing; after a failure too.
func (c *responseCall) send(ev *events, e responseEvent) {
	if ev == nil || c.err != nil {
		return
	}
	e.Sequence = c.sequence
	c.sequence++
	c.err = ev.sendAs(e.Type, e)
}

// tell goes on with what the generation gave.
func (c *responseCall) tell(ev *events, items []item) {
	for _, it := range items {
		switch {
		case it.progress:
		case it.event.Kind == front.Reasoning, it.event.Kind == front.Answer:
			c.write(ev, it.event.Kind, it.event.Text)
		case it.event.Kind == front.ReasoningEnd:
			c.close(ev, "completed")
		case it.event.Kind == front.Call:
			c.close(ev, "completed")
			c.call(ev, it.event)
		}
	}
}

// at is where the last item of the output stands.
func (c *responseCall) at() *int {
	n := len(c.object.Output) - 1
	return &n
}

// textEvents are the names of the events of a text by its kind.
var textEvents = map[front.Kind]string{front.Reasoning: "response.reasoning_text", front.Answer: "response.output_text"}

// begun opens the item of a text, if it is not open.
func (c *responseCall) begun(ev *events, kind front.Kind) {
	if c.open != nil && c.kind == kind {
		return
	}
	c.close(ev, "completed")
	item := responseItem{ID: newID("msg_"), Type: "message", Status: "in_progress", Role: "assistant", Content: []textPart{}}
	if kind == front.Reasoning {
		item = responseItem{ID: newID("rs_"), Type: "reasoning", Status: "in_progress", Summary: []struct{}{}, Content: []textPart{}}
	}
	c.object.Output = append(c.object.Output, item)
	c.open, c.kind = &c.object.Output[len(c.object.Output)-1], kind
	c.text.Reset()
	c.send(ev, responseEvent{Type: "response.output_item.added", OutputIndex: c.at(), Item: c.open})
	part := c.part("")
	c.send(ev, responseEvent{Type: "response.content_part.added", ItemID: c.open.ID, OutputIndex: c.at(), ContentIndex: new(int), Part: &part})
}

// part is a part of the open item.
func (c *responseCall) part(text string) textPart {
	if c.kind == front.Reasoning {
		return textPart{Type: "reasoning_text", Text: text}
	}
	return textPart{Type: "output_text", Text: text, Annotations: []struct{}{}, Logprobs: &[]struct{}{}}
}

// write goes on with a text.
func (c *responseCall) write(ev *events, kind front.Kind, text string) {
	c.begun(ev, kind)
	c.text.WriteString(text)
	e := responseEvent{Type: textEvents[kind] + ".delta", ItemID: c.open.ID, OutputIndex: c.at(), ContentIndex: new(int), Delta: &text}
	if kind == front.Answer {
		e.Logprobs = &[]struct{}{}
	}
	c.send(ev, e)
}

// close ends the open item, if there is one.
func (c *responseCall) close(ev *events, status string) {
	if c.open == nil {
		return
	}
	text := c.text.String()
	e := responseEvent{Type: textEvents[c.kind] + ".done", ItemID: c.open.ID, OutputIndex: c.at(), ContentIndex: new(int), Text: &text}
	if c.kind == front.Answer {
		e.Logprobs = &[]struct{}{}
	}
	c.send(ev, e)
	part := c.part(text)
	c.send(ev, responseEvent{Type: "response.content_part.done", ItemID: c.open.ID, OutputIndex: c.at(), ContentIndex: new(int), Part: &part})
	c.open.Content, c.open.Status = []textPart{part}, status
	c.send(ev, responseEvent{Type: "response.output_item.done", OutputIndex: c.at(), Item: c.open})
	c.open = nil
}

// call tells a call, which is complete when it comes.
func (c *responseCall) call(ev *events, e front.Event) {
	name := groupedTool{name: e.Name}
	if grouped, ok := c.request.groups[e.Name]; ok {
		name = grouped
	}
	item := responseItem{ID: newID("fc_"), Type: "function_call", Status: "in_progress", Arguments: new(string), CallID: newID("call_"), Name: name.name, Namespace: name.namespace}
	c.object.Output = append(c.object.Output, item)
	c.send(ev, responseEvent{Type: "response.output_item.added", OutputIndex: c.at(), Item: &item})
	c.send(ev, responseEvent{Type: "response.function_call_arguments.delta", ItemID: item.ID, OutputIndex: c.at(), Delta: &e.Text})
	c.send(ev, responseEvent{Type: "response.function_call_arguments.done", ItemID: item.ID, OutputIndex: c.at(), Name: item.Name, Arguments: &e.Text})
	done := &c.object.Output[*c.at()]
	done.Status, done.Arguments = "completed", &e.Text
	c.send(ev, responseEvent{Type: "response.output_item.done", OutputIndex: c.at(), Item: done})
}

// finish ends the answer.
func (c *responseCall) finish(ev *events, out engine.Outcome) *failure {
	kind := "response.completed"
	switch out.Reason {
	case engine.Stop:
		if len(c.object.Output) == 0 {
			c.begun(ev, front.Answer)
		}
		c.close(ev, "completed")
		now := time.Now().Unix()
		c.object.Status, c.object.CompletedAt = "completed", &now
	default:
		kind = "response.incomplete"
		c.close(ev, "incomplete")
		c.object.Status, c.object.Incomplete = "incomplete", &incomplete{"max_output_tokens"}
	}
	c.usage()
	if !c.keep() {
		return noRoom()
	}
	c.send(ev, responseEvent{Type: kind, Response: &c.object})
	return nil
}

// usage puts the counts into the object.
func (c *responseCall) usage() {
	counts := c.generation.usage()
	u := &responseUsage{Input: counts.Prompt, Output: counts.Completion, Total: counts.Total}
	u.InputDetails.Cached, u.OutputDetails.Reasoning = counts.PromptDetails.Cached, counts.CompletionDetails.Reasoning
	c.object.Usage = u
}

// keep stores the response, if that was asked for. It reports whether there was room.
func (c *responseCall) keep() bool {
	if !c.request.store {
		return true
	}
	turn := &responseTurn{parent: c.request.parent, input: c.request.items}
	for _, item := range c.object.Output {
		turn.output = append(turn.output, marshal(item))
	}
	turn.size = sizeOf(turn.input, turn.output)
	return c.server.store.put(&responseRecord{c.object.ID, marshal(&c.object), turn, c.request.preserve})
}

// marshal writes a value of ours.
func marshal(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic("server: an answer is not JSON: " + err.Error())
	}
	return b
}
