package server

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json/jsontext"
	"hash"

	"ninfer/internal/engine"
	"ninfer/internal/front"
)

// messageAnswer is the answer of Messages as a whole, and without content what opens its stream, as in Anthropic's Messages API.
type messageAnswer struct {
	ID           string        `json:"id"`
	Type         string        `json:"type"`
	Role         string        `json:"role"`
	Model        string        `json:"model"`
	Content      []any         `json:"content"`
	StopReason   *string       `json:"stop_reason"`
	StopSequence *string       `json:"stop_sequence"`
	Usage        messagesUsage `json:"usage"`
}

type thinkingBlock struct {
	Type      string `json:"type"`
	Thinking  string `json:"thinking"`
	Signature string `json:"signature"`
}

type textBlock struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

type toolUseBlock struct {
	Type  string         `json:"type"`
	ID    string         `json:"id"`
	Name  string         `json:"name"`
	Input jsontext.Value `json:"input"`
}

type messagesUsage struct {
	Input         int  `json:"input_tokens"` // that were processed
	CacheCreation *int `json:"cache_creation_input_tokens"`
	CacheRead     int  `json:"cache_read_input_tokens"`
	Output        int  `json:"output_tokens"`
	Details       struct {
		Thinking int `json:"thinking_tokens"`
	} `json:"output_tokens_details"`
	ServerTools struct {
		Search int `json:"web_search_requests"`
		Fetch  int `json:"web_fetch_requests"`
	} `json:"server_tool_use"`
}

// Events of a stream, as in Anthropic's Messages API. Their type is also the name of the server-sent event.
type (
	messageStart struct {
		Type    string        `json:"type"`
		Message messageAnswer `json:"message"`
	}
	blockStart struct {
		Type  string `json:"type"`
		Index int    `json:"index"`
		Block any    `json:"content_block"`
	}
	blockDelta struct {
		Type  string `json:"type"`
		Index int    `json:"index"`
		Delta any    `json:"delta"`
	}
	blockStop struct {
		Type  string `json:"type"`
		Index int    `json:"index"`
	}
	messageDelta struct {
		Type  string `json:"type"`
		Delta struct {
			StopReason   string  `json:"stop_reason"`
			StopSequence *string `json:"stop_sequence"`
		} `json:"delta"`
		Usage messagesUsage `json:"usage"`
	}
	bareEvent struct {
		Type string `json:"type"`
	}
)

// The deltas of blocks.
type (
	thinkingDelta struct {
		Type     string `json:"type"`
		Thinking string `json:"thinking"`
	}
	signatureDelta struct {
		Type      string `json:"type"`
		Signature string `json:"signature"`
	}
	textDelta struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	inputDelta struct {
		Type string `json:"type"`
		JSON string `json:"partial_json"`
	}
)

// signature is what a thinking block carries for its way back. Clients must send it and may not look into it; nothing depends on it when
// it returns, since what was thought is text of the conversation like any other.
func signature(text hash.Hash) string { return base64.StdEncoding.EncodeToString(text.Sum(nil)) }

// messageCall tells an answer as Messages does.
type messageCall struct {
	*generation
	id, model string
	calls     int    // told so far
	stop      string // the stop string that was met

	// Of a stream.
	started bool
	open    front.Kind // of the open block; End is none
	index   int        // of the open block or the next
	thought hash.Hash
	text    frame // the delta of the open block
}

// messages serves POST /v1/messages.
func (s *Server) messages(x *exchange) {
	x.fields = messagesFields
	s.generate(x, func(data []byte, g *generation) (protocol, *front.Request, bool, *failure) {
		req, err := parseMessages(data, s.model.Front)
		if err != nil {
			return nil, nil, false, err
		}
		return &messageCall{generation: g, id: "msg_" + randomHex(12), model: req.model, open: front.End}, &req.front, req.stream, nil
	})
}

// countMessages serves POST /v1/messages/count_tokens.
func (s *Server) countMessages(x *exchange) {
	x.fields = messagesFields
	s.count(x, func(data []byte) (*front.Request, *failure) {
		req, err := parseMessages(data, s.model.Front)
		if err != nil {
			return nil, err
		}
		return &req.front, nil
	}, func(tokens int) any {
		return struct {
			Input int `json:"input_tokens"`
		}{tokens}
	})
}

func (c *messageCall) name() string { return "messages" }

func (c *messageCall) whole(items []item, out engine.Outcome) any {
	told := collect(items)
	content := []any{}
	if told.reasoning != "" {
		sum := sha256.New()
		sum.Write([]byte(told.reasoning))
		content = append(content, thinkingBlock{"thinking", told.reasoning, signature(sum)})
	}
	if told.text != "" {
		content = append(content, textBlock{"text", told.text})
	}
	for _, call := range told.calls {
		content = append(content, c.use(call, jsontext.Value(call.Text)))
	}
	c.stop = told.stop
	answer := c.message(c.counts())
	answer.Content = content
	reason, sequence := c.stopReason(out.Reason)
	answer.StopReason, answer.StopSequence = &reason, sequence
	return answer
}

func (c *messageCall) message(u messagesUsage) messageAnswer {
	return messageAnswer{ID: c.id, Type: "message", Role: "assistant", Model: c.model, Content: []any{}, Usage: u}
}

// use is the next call, with an id of its own.
func (c *messageCall) use(e front.Event, input jsontext.Value) toolUseBlock {
	c.calls++
	return toolUseBlock{"tool_use", "toolu_" + randomHex(12), e.Name, input}
}

// stopReason is Anthropic's word for it, and the stop string that was met. Calls are the reason only if the model ended by itself.
func (c *messageCall) stopReason(r engine.Reason) (string, *string) {
	switch {
	case r == engine.Context, len(c.prepared.Prompt) == c.server.model.Front.Context():
		return "model_context_window_exceeded", nil
	case r != engine.Stop:
		return "max_tokens", nil
	case c.stop != "":
		return "stop_sequence", &c.stop
	case c.calls > 0:
		return "tool_use", nil
	}
	return "end_turn", nil
}

// counts are the tokens so far. The prompt is divided by what the cache gave, which is known from the admission on.
func (c *messageCall) counts() messagesUsage {
	n := c.output.session.Usage()
	u := messagesUsage{CacheRead: c.output.times().cached, Output: n.Completion}
	u.Input = n.Prompt - u.CacheRead
	u.Details.Thinking = n.Reasoning
	return u
}

// begin waits for the admission, because the first event tells what the cache gave.
func (c *messageCall) begin(*events) error { return nil }

// start sends the first event, once.
func (c *messageCall) start(ev *events) error {
	if c.started {
		return nil
	}
	c.started = true
	cached := c.output.times().cached
	return ev.sendAs("message_start", messageStart{"message_start", c.message(messagesUsage{Input: len(c.prepared.Prompt) - cached, CacheRead: cached})})
}

func (c *messageCall) show(ev *events, items []item) error {
	for _, it := range items {
		if !c.started && !it.progress && it.event.Kind == front.End {
			continue // of a request that never ran
		}
		if err := c.start(ev); err != nil {
			return err
		}
		if it.progress {
			continue
		}
		if err := c.event(ev, it.event); err != nil {
			return err
		}
	}
	return nil
}

// event tells one piece of the output.
func (c *messageCall) event(ev *events, e front.Event) error {
	switch e.Kind {
	case front.Reasoning, front.Answer:
		if c.open != e.Kind {
			if err := c.openBlock(ev, e.Kind); err != nil {
				return err
			}
		}
		if e.Kind == front.Reasoning {
			c.thought.Write([]byte(e.Text))
		}
		return ev.sendText(c.text, e.Text)
	case front.Call:
		if err := c.closeBlock(ev); err != nil {
			return err
		}
		c.open = front.Call
		if err := ev.sendAs("content_block_start", blockStart{"content_block_start", c.index, c.use(e, jsontext.Value("{}"))}); err != nil {
			return err
		}
		if err := ev.sendAs("content_block_delta", blockDelta{"content_block_delta", c.index, inputDelta{"input_json_delta", e.Text}}); err != nil {
			return err
		}
		return c.closeBlock(ev)
	case front.ReasoningEnd:
		return c.closeBlock(ev)
	case front.End:
		c.stop = e.Text
		return c.closeBlock(ev)
	}
	return nil
}

// openBlock starts a block of text or thinking, after the end of the one before it.
func (c *messageCall) openBlock(ev *events, kind front.Kind) error {
	if err := c.closeBlock(ev); err != nil {
		return err
	}
	c.open = kind
	var block, delta any
	const mark = "\x00"
	if kind == front.Reasoning {
		c.thought = sha256.New()
		block, delta = thinkingBlock{Type: "thinking"}, thinkingDelta{"thinking_delta", mark}
	} else {
		block, delta = textBlock{Type: "text"}, textDelta{"text_delta", mark}
	}
	c.text = newFrame("content_block_delta", blockDelta{"content_block_delta", c.index, delta})
	return ev.sendAs("content_block_start", blockStart{"content_block_start", c.index, block})
}

// closeBlock ends the open block, if there is one.
func (c *messageCall) closeBlock(ev *events) error {
	switch c.open {
	case front.End:
		return nil
	case front.Reasoning:
		if err := ev.sendAs("content_block_delta", blockDelta{"content_block_delta", c.index, signatureDelta{"signature_delta", signature(c.thought)}}); err != nil {
			return err
		}
	}
	c.open = front.End
	c.index++
	return ev.sendAs("content_block_stop", blockStop{"content_block_stop", c.index - 1})
}

func (c *messageCall) end(ev *events, out engine.Outcome) error {
	if err := c.start(ev); err != nil {
		return err
	}
	if err := c.closeBlock(ev); err != nil {
		return err
	}
	last := messageDelta{Type: "message_delta", Usage: c.counts()}
	last.Delta.StopReason, last.Delta.StopSequence = c.stopReason(out.Reason)
	if err := ev.sendAs("message_delta", last); err != nil {
		return err
	}
	return ev.sendAs("message_stop", bareEvent{"message_stop"})
}

func (c *messageCall) broken(ev *events, f *failure) error {
	return ev.sendAs("error", f.anthropicBody(c.exchange.id))
}

// silent is the stream's sign of life. Before the first event it can only be a comment.
func (c *messageCall) silent(ev *events) error {
	if !c.started {
		return c.generation.silent(ev)
	}
	return ev.sendAs("ping", bareEvent{"ping"})
}
