package server

import (
	"encoding/json/jsontext"
	"encoding/json/v2"

	"ninfer/internal/engine"
	"ninfer/internal/front"
)

// completion is the answer of Chat Completions as a whole.
type completion struct {
	ID      string   `json:"id"`
	Object  string   `json:"object"`
	Created int64    `json:"created"`
	Model   string   `json:"model"`
	Choices []choice `json:"choices"`
	Usage   usage    `json:"usage"`
	Timings *timings `json:"timings"`
}

type choice struct {
	Index        int           `json:"index"`
	Message      answerMessage `json:"message"`
	Logprobs     *logprobs     `json:"logprobs"`
	FinishReason string        `json:"finish_reason"`
}

type answerMessage struct {
	Role      string     `json:"role"`
	Content   *string    `json:"content"` // null if there are only calls
	Refusal   *string    `json:"refusal"`
	Reasoning string     `json:"reasoning_content,omitzero"`
	ToolCalls []chatTool `json:"tool_calls,omitzero"`
}

// chatTool is a call of a tool.
type chatTool struct {
	Index    *int         `json:"index,omitzero"` // in a stream
	ID       string       `json:"id"`
	Type     string       `json:"type"`
	Function chatFunction `json:"function"`
}

type chatFunction struct {
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
}

type usage struct {
	Prompt        int `json:"prompt_tokens"`
	Completion    int `json:"completion_tokens"`
	Total         int `json:"total_tokens"`
	PromptDetails struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
	CompletionDetails struct {
		Reasoning int `json:"reasoning_tokens"`
	} `json:"completion_tokens_details"`
}

// chunk is one event of a stream.
type chunk struct {
	ID       string         `json:"id"`
	Object   string         `json:"object"`
	Created  int64          `json:"created"`
	Model    string         `json:"model"`
	Choices  []chunkChoice  `json:"choices"`
	Usage    jsontext.Value `json:"usage,omitzero"` // null where usage is asked for and still to come
	Progress *progress      `json:"prompt_progress,omitzero"`
	Timings  *timings       `json:"timings,omitzero"`
}

type chunkChoice struct {
	Index        int       `json:"index"`
	Delta        delta     `json:"delta"`
	Logprobs     *struct{} `json:"logprobs"`
	FinishReason *string   `json:"finish_reason"`
}

type delta struct {
	Role      string     `json:"role,omitzero"`
	Content   *string    `json:"content,omitzero"`
	Reasoning string     `json:"reasoning_content,omitzero"`
	ToolCalls []chatTool `json:"tool_calls,omitzero"`
}

type progress struct {
	Total     int     `json:"total"`
	Cache     int     `json:"cache"`
	Processed int     `json:"processed"`
	TimeMS    float64 `json:"time_ms"`
}

// chatCall tells an answer as Chat Completions does.
type chatCall struct {
	*generation
	request *chatRequest
	id      string
	calls   int  // told so far
	stopped bool // by a stop string

	reasoning, content frame // of a stream
}

// chat serves POST /v1/chat/completions.
func (s *Server) chat(x *exchange) {
	s.generate(x, func(data []byte, g *generation) (protocol, *front.Request, bool, *failure) {
		req, err := parseChat(data, s.opt.ModelID)
		if err != nil {
			return nil, nil, false, err
		}
		g.wanted, g.timed = req.logprobs, req.tokenTimings
		return &chatCall{generation: g, request: req, id: "chatcmpl-" + randomHex(8)}, &req.front, req.stream, nil
	})
}

func (c *chatCall) name() string { return "chat" }

func (c *chatCall) whole(items []item, out engine.Outcome) any {
	answer := collect(items)
	message := answerMessage{Role: "assistant", Reasoning: answer.reasoning}
	for _, call := range answer.calls {
		message.ToolCalls = append(message.ToolCalls, c.tool(call))
	}
	if answer.text != "" || len(answer.calls) == 0 {
		message.Content = &answer.text
	}
	c.stopped = answer.stop != ""
	return completion{
		ID: c.id, Object: "chat.completion", Created: c.created, Model: c.server.opt.ModelID,
		Choices: []choice{{Message: message, Logprobs: c.logprobs(out), FinishReason: c.finishReason(out.Reason)}},
		Usage:   c.usage(), Timings: c.timings(out),
	}
}

// finishReason is OpenAI's word for it. Calls are the reason only if the model ended by itself.
func (c *chatCall) finishReason(r engine.Reason) string {
	switch {
	case r != engine.Stop:
		return "length"
	case c.calls > 0 && !c.stopped:
		return "tool_calls"
	}
	return "stop"
}

// tool is the next call, with an id of its own.
func (c *chatCall) tool(e front.Event) chatTool {
	c.calls++
	return chatTool{ID: "call_" + randomHex(8), Type: "function", Function: chatFunction{e.Name, e.Text}}
}

func (c *chatCall) begin(ev *events) error {
	empty, mark := "", "\x00"
	c.reasoning, c.content = newFrame("", c.chunk(delta{Reasoning: mark}, nil)), newFrame("", c.chunk(delta{Content: &mark}, nil))
	return ev.send(c.chunk(delta{Role: "assistant", Content: &empty}, nil))
}

// chunk is an event with one choice.
func (c *chatCall) chunk(d delta, finish *string) chunk {
	k := chunk{
		ID: c.id, Object: "chat.completion.chunk", Created: c.created, Model: c.server.opt.ModelID,
		Choices: []chunkChoice{{Delta: d, FinishReason: finish}},
	}
	if c.request.includeUsage {
		k.Usage = jsontext.Value("null")
	}
	return k
}

func (c *chatCall) show(ev *events, items []item) error {
	for i := range items {
		it := &items[i] // a copy of each would be most of what a stream allocates
		// Nearly all events are these two.
		if kind := it.event.Kind; !it.progress && !c.request.tokenTimings && (kind == front.Reasoning || kind == front.Answer) {
			f := c.content
			if kind == front.Reasoning {
				f = c.reasoning
			}
			if err := ev.sendText(f, it.event.Text); err != nil {
				return err
			}
			continue
		}
		var k chunk
		switch {
		case it.progress && c.request.progress:
			k = c.chunk(delta{}, nil)
			k.Progress = c.generation.progress(*it)
		case it.progress:
			continue
		case it.event.Kind == front.Reasoning:
			k = c.chunk(delta{Reasoning: it.event.Text}, nil)
		case it.event.Kind == front.Answer:
			k = c.chunk(delta{Content: &it.event.Text}, nil)
		case it.event.Kind == front.Call:
			// All that end together are told together.
			if i > 0 && items[i-1].event.Kind == front.Call {
				continue
			}
			var calls []chatTool
			for _, next := range items[i:] {
				if next.event.Kind != front.Call {
					break
				}
				at := c.calls
				call := c.tool(next.event)
				call.Index = &at
				calls = append(calls, call)
			}
			k = c.chunk(delta{ToolCalls: calls}, nil)
		default:
			c.stopped = c.stopped || it.event.Kind == front.End && it.event.Text != ""
			continue
		}
		if c.request.tokenTimings && !it.progress {
			k.Timings = it.clock.timings()
		}
		if err := ev.send(k); err != nil {
			return err
		}
	}
	return nil
}

func (c *chatCall) end(ev *events, out engine.Outcome) error {
	reason := c.finishReason(out.Reason)
	last := c.chunk(delta{}, &reason)
	if c.request.includeUsage {
		if err := ev.send(last); err != nil {
			return err
		}
		last.Choices = []chunkChoice{}
		last.Usage, _ = json.Marshal(c.usage())
	}
	last.Timings = c.timings(out)
	if err := ev.send(last); err != nil {
		return err
	}
	return ev.done()
}

func (c *chatCall) broken(ev *events, f *failure) error { return ev.send(f.body()) }
