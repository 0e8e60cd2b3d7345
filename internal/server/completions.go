package server

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"strings"

	"ninfer/internal/engine"
	"ninfer/internal/front"
)

// textCompletion is the answer of Completions as a whole, or an event of its stream.
type textCompletion struct {
	ID       string         `json:"id"`
	Object   string         `json:"object"`
	Created  int64          `json:"created"`
	Model    string         `json:"model"`
	Choices  []textChoice   `json:"choices"`
	Usage    jsontext.Value `json:"usage,omitzero"` // null in a stream where it is asked for and still to come
	Progress *progress      `json:"prompt_progress,omitzero"`
	Timings  *timings       `json:"timings,omitzero"`
}

type textChoice struct {
	Index        int           `json:"index"`
	Text         string        `json:"text"`
	Logprobs     *textLogprobs `json:"logprobs"`
	FinishReason *string       `json:"finish_reason"`
}

// textCall tells an answer as Completions does.
type textCall struct {
	*generation
	request *chatRequest
	id      string
}

// completions serves POST /v1/completions: a prompt without a template, answered as one undivided text.
func (s *Server) completions(x *exchange) {
	s.generate(x, func(data []byte, g *generation) (protocol, *front.Request, bool, *failure) {
		req, err := s.parseCompletion(data)
		if err != nil {
			return nil, nil, false, err
		}
		g.wanted, g.timed = req.logprobs, req.tokenTimings
		return &textCall{g, req, "cmpl-" + randomHex(8)}, &req.front, req.stream, nil
	})
}

// parseCompletion reads a body. What it has in common with Chat Completions means the same.
func (s *Server) parseCompletion(data []byte) (*chatRequest, *failure) {
	body, err := parseBody(data)
	if err != nil {
		return nil, err
	}
	r := &chatReader{object: body, served: s.opt.ModelID}
	r.out.front.Undivided = true
	for _, read := range []func() *failure{
		r.model, r.refused, r.completionRefused, r.streaming, r.limits, r.sampling, r.stops, r.choices, r.format, r.cacheHints, func() *failure { return r.prompt(s.model.Front) },
	} {
		if err := read(); err != nil {
			return nil, err
		}
	}
	return &r.out, nil
}

// completionRefused turns away what only this route has and this server does not do.
func (r *chatReader) completionRefused() *failure {
	if echo, err := r.boolean("echo"); err != nil {
		return err
	} else if echo != nil && *echo {
		return bad("echo_not_supported", "echo", "echo is not supported: the answer has only what the model adds")
	}
	if suffix, err := r.str("suffix"); err != nil {
		return err
	} else if suffix != nil && *suffix != "" {
		return bad("suffix_not_supported", "suffix", "suffix is not supported: the model does not fill in")
	}
	if n, err := r.integer("best_of"); err != nil {
		return err
	} else if n != nil && *n != 1 {
		return bad("n_not_supported", "best_of", "best_of is %d, only 1 is supported", *n)
	}
	n, err := r.integer("logprobs")
	switch {
	case err != nil || n == nil:
		return err
	case *n < 0 || *n > 20:
		return bad("invalid_value", "logprobs", "logprobs is %d, must be 0 to 20", *n)
	}
	return r.wantLogprobs(*n)
}

// prompt reads a text, in which control tokens may be spelled out, or ids. A list of one prompt is that prompt.
func (r *chatReader) prompt(f *front.Front) *failure {
	v, ok := r.given("prompt")
	if !ok {
		return bad("missing_required_parameter", "prompt", "prompt is missing")
	}
	const want = "a string, an array of token ids, or an array of one of these"
	path := "prompt"
	if v.Kind() == '[' {
		items, _, err := r.list("prompt")
		if err != nil {
			return err
		}
		if len(items) == 0 {
			return bad("invalid_value", "prompt", "prompt is empty")
		}
		if k := items[0].Kind(); k == '"' || k == '[' {
			if len(items) > 1 {
				return bad("n_not_supported", "prompt", "there are %d prompts, only one is supported", len(items))
			}
			v, path = items[0], "prompt[0]"
		}
	}
	switch v.Kind() {
	case '"':
		text, err := stringAt(v, path)
		if err != nil {
			return err
		}
		r.out.front.Prompt = f.Tokens(*text, false)
	case '[':
		ids, err := tokensAt(v, path)
		if err != nil {
			return err
		}
		r.out.front.Prompt = ids
	default:
		return wrongType(path, want)
	}
	if len(r.out.front.Prompt) == 0 {
		return bad("invalid_value", path, "%s has no tokens", path)
	}
	return nil
}

// tokensAt reads an array of token ids.
func tokensAt(v jsontext.Value, path string) ([]int32, *failure) {
	var ids []int32
	if v.Kind() != '[' || json.Unmarshal(v, &ids) != nil {
		return nil, wrongType(path, "an array of token ids")
	}
	return ids, nil
}

func (c *textCall) name() string { return "completions" }

func (c *textCall) chunk(text string, finish *string) textCompletion {
	k := textCompletion{
		ID: c.id, Object: "text_completion", Created: c.created, Model: c.server.opt.ModelID,
		Choices: []textChoice{{Text: text, FinishReason: finish}},
	}
	if c.request.includeUsage {
		k.Usage = jsontext.Value("null")
	}
	return k
}

func (c *textCall) finishReason(r engine.Reason) *string {
	reason := "length"
	if r == engine.Stop {
		reason = "stop"
	}
	return &reason
}

func (c *textCall) whole(items []item, out engine.Outcome) any {
	var text strings.Builder
	for _, it := range items {
		if !it.progress && it.event.Kind == front.Answer {
			text.WriteString(it.event.Text)
		}
	}
	answer := c.chunk(text.String(), c.finishReason(out.Reason))
	answer.Choices[0].Logprobs = c.textLogprobs(out)
	answer.Usage, _ = json.Marshal(c.usage())
	answer.Timings = c.timings(out)
	return answer
}

func (c *textCall) begin(*events) error { return nil }

func (c *textCall) show(ev *events, items []item) error {
	for _, it := range items {
		var k textCompletion
		switch {
		case it.progress && c.request.progress:
			k = c.chunk("", nil)
			k.Progress = c.generation.progress(it)
		case !it.progress && it.event.Kind == front.Answer:
			k = c.chunk(it.event.Text, nil)
			if c.request.tokenTimings {
				k.Timings = it.clock.timings()
			}
		default:
			continue
		}
		if err := ev.send(k); err != nil {
			return err
		}
	}
	return nil
}

func (c *textCall) end(ev *events, out engine.Outcome) error {
	last := c.chunk("", c.finishReason(out.Reason))
	if c.request.includeUsage {
		if err := ev.send(last); err != nil {
			return err
		}
		last.Choices = []textChoice{}
		last.Usage, _ = json.Marshal(c.usage())
	}
	last.Timings = c.timings(out)
	if err := ev.send(last); err != nil {
		return err
	}
	return ev.done()
}

func (c *textCall) broken(ev *events, f *failure) error { return ev.send(f.body()) }
