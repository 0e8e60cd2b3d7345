package server

import (
	"context"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"net/http"
	"strings"
	"time"

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
	Logprobs     *struct{}     `json:"logprobs"`
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

// chatCall is one request in progress.
type chatCall struct {
	server   *Server
	exchange *exchange
	request  *chatRequest
	prepared *front.Prepared
	output   *output
	ticket   *engine.Ticket
	id       string
	created  int64
	start    time.Time
	left     bool // the client could not be reached
	calls    int  // told so far
	stopped  bool // by a stop string
}

// chat serves POST /v1/chat/completions.
func (s *Server) chat(x *exchange) {
	start := time.Now()
	if err := s.runChat(x, start); err != nil {
		f := failureOf(err)
		s.logRefusal(x, f, err)
		x.fail(f)
	}
}

// runChat returns an error while nothing of the answer has been sent.
func (s *Server) runChat(x *exchange, start time.Time) error {
	m, refused := s.available()
	if refused != nil {
		return refused
	}
	data, release, refused := s.readBody(x)
	if refused != nil {
		return refused
	}
	defer func() { release() }()
	req, refused := parseChat(data, s.opt.ModelID)
	if refused != nil {
		return refused
	}
	// The client's leaving ends this context, and so does our giving up on it.
	ctx, cancel := context.WithCancel(x.r.Context())
	defer cancel()
	slot, err := m.Queue.Reserve(ctx)
	if err != nil {
		return err
	}
	defer slot.Release()
	c := &chatCall{server: s, exchange: x, request: req, id: "chatcmpl-" + randomHex(8), created: start.Unix(), start: start}
	if c.prepared, err = m.Front.Prepare(req.front); err != nil {
		return err
	}
	data, req.front.Messages = nil, nil
	release()
	release = func() {}
	c.output = newOutput(c.prepared.Session(), &s.counters)
	c.ticket, err = slot.Submit(engine.Request{
		Prompt: c.prepared.Prompt, MaxNew: c.prepared.MaxNew, Sampling: engine.Sampling(c.prepared.Sampling), StopIDs: c.prepared.StopIDs,
		Watcher: c.output, Draft: m.Draft, Progress: c.output.progress,
	})
	if err != nil {
		return err
	}
	if req.stream {
		c.stream(ctx, cancel)
		return nil
	}
	return c.whole()
}

// whole waits for the end and answers at once. A client that leaves ends the ticket through its context.
func (c *chatCall) whole() error {
	out, err := c.ticket.Outcome()
	var reasoning, answer strings.Builder
	var calls []chatTool
	for _, it := range c.output.finish() {
		if it.progress {
			continue
		}
		switch it.event.Kind {
		case front.Reasoning:
			reasoning.WriteString(it.event.Text)
		case front.Answer:
			answer.WriteString(it.event.Text)
		case front.Call:
			calls = append(calls, c.tool(it.event))
		case front.End:
			c.stopped = it.event.Text != ""
		}
	}
	if err != nil {
		c.log(out, err)
		return err
	}
	if out.Reason != engine.Cancelled {
		control := http.NewResponseController(c.exchange.w)
		control.SetWriteDeadline(time.Now().Add(c.server.opt.Stall))
		defer control.SetWriteDeadline(time.Time{})
		message := answerMessage{Role: "assistant", Reasoning: reasoning.String(), ToolCalls: calls}
		if text := answer.String(); text != "" || len(calls) == 0 {
			message.Content = &text
		}
		c.exchange.reply(http.StatusOK, completion{
			ID: c.id, Object: "chat.completion", Created: c.created, Model: c.server.opt.ModelID,
			Choices: []choice{{Message: message, FinishReason: c.finishReason(out.Reason)}},
			Usage:   c.usage(), Timings: c.timings(out),
		})
		control.Flush() // under the deadline, and before the place is given back
	}
	c.log(out, nil)
	return nil
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

func (c *chatCall) usage() usage {
	counts := c.output.session.Usage()
	u := usage{Prompt: counts.Prompt, Completion: counts.Completion, Total: counts.Prompt + counts.Completion}
	u.PromptDetails.Cached = c.output.times().cached
	u.CompletionDetails.Reasoning = counts.Reasoning
	return u
}

// timings are those of a finished request.
func (c *chatCall) timings(out engine.Outcome) *timings {
	t := c.output.times().timings()
	if n := out.Stats.Drafted; n > 0 {
		t.DraftN, t.DraftAccepted = &n, &out.Stats.Accepted
	}
	return t
}

// stream sends events as they come. It cancels the request if the client cannot be reached.
func (c *chatCall) stream(ctx context.Context, cancel context.CancelFunc) {
	ev := c.server.events(c.exchange)
	empty := ""
	err := ev.send(c.chunk(delta{Role: "assistant", Content: &empty}, nil))
	silence := time.NewTimer(c.server.opt.KeepAlive)
	defer silence.Stop()
	for err == nil {
		select {
		case <-c.output.wake:
			err = c.show(ev, c.output.take())
		case <-c.ticket.Done():
			out, failed := c.ticket.Outcome()
			c.end(ev, out, failed)
			return
		case <-silence.C:
			err = ev.comment("keep-alive")
		case <-ctx.Done():
			err = ctx.Err()
		}
		silence.Reset(c.server.opt.KeepAlive)
	}
	c.left = true
	cancel()
	out, failed := c.ticket.Outcome() // within one unit of work
	c.log(out, failed)
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

// show sends items.
func (c *chatCall) show(ev *events, items []item) error {
	for i, it := range items {
		var k chunk
		switch {
		case it.progress && c.request.progress:
			k = c.chunk(delta{}, nil)
			k.Progress = &progress{
				Total: len(c.prepared.Prompt), Cache: it.clock.cached, Processed: it.clock.prompt,
				TimeMS: milliseconds(it.clock.processed.Sub(it.clock.admitted)),
			}
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

// end sends what is left and the terminal events, or an error in their place.
func (c *chatCall) end(ev *events, out engine.Outcome, failed error) {
	err := c.show(ev, c.output.finish())
	switch {
	case err != nil:
	case failed != nil:
		err = ev.send(failureOf(failed).body())
	case out.Reason == engine.Cancelled: // the client has left
	default:
		reason := c.finishReason(out.Reason)
		last := c.chunk(delta{}, &reason)
		if c.request.includeUsage {
			if err = ev.send(last); err != nil {
				break
			}
			last.Choices = []chunkChoice{}
			last.Usage, _ = json.Marshal(c.usage())
		}
		last.Timings = c.timings(out)
		if err = ev.send(last); err == nil {
			err = ev.done()
		}
	}
	c.left = err != nil
	c.log(out, failed)
}
