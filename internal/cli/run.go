package cli

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"ninfer/internal/engine"
	"ninfer/internal/front"
	"ninfer/internal/text/chat"
)

type runCommand struct {
	Artifact string `arg:"" optional:"" help:"Entry file. Default: nano, the model inside the program."`

	Prompt    string  `placeholder:"TEXT" help:"One user turn."`
	Messages  string  `placeholder:"FILE" help:"Conversation as JSON; - is stdin."`
	RawPrompt *string `placeholder:"TEXT" help:"Text as it is, without template; control spellings are control tokens."`
	PromptIDs *string `name:"prompt-ids" placeholder:"LIST" help:"Token ids as they are."`

	MaxNew          int      `default:"128" placeholder:"N" help:"Most tokens to generate."`
	ThinkingBudget  int      `placeholder:"N" help:"Most thinking tokens before the block is closed."`
	ReasoningEffort string   `placeholder:"E" help:"none, minimal, low, medium, high, xhigh or max; the template decides which exist."`
	Stop            []string `sep:"none" placeholder:"TEXT" help:"Stop string of the answer; repeatable."`
	ReasoningStop   []string `sep:"none" placeholder:"TEXT" help:"Stop string of the reasoning; repeatable."`
	StopTokenID     []int32  `name:"stop-token-id" placeholder:"N" help:"Further stop id; repeatable."`
	RawOutput       bool     `help:"Print the stream as it is, control spellings included."`
	PrintTokenIDs   bool     `name:"print-token-ids" help:"List the generated ids in the report."`

	modelFlags    `embed:""`
	samplingFlags `embed:""`
}

// interactive reports whether the command line names no prompt and a person is there to type one.
func (c *runCommand) interactive(e *environment) bool { return c.inputs() == 0 && e.terminal() }

// inputs is how many prompts the command line names.
func (c *runCommand) inputs() int {
	n := 0
	for _, given := range []bool{c.Prompt != "", c.Messages != "", c.RawPrompt != nil, c.PromptIDs != nil} {
		if given {
			n++
		}
	}
	return n
}

func (c *runCommand) check(e *environment) error {
	c.MaxContext = cmp.Or(c.MaxContext, 2048)
	switch {
	case c.inputs() != 1 && !c.interactive(e):
		return usagef("need exactly one of --prompt, --messages, --raw-prompt and --prompt-ids, with some text")
	case c.MaxNew < 1:
		return usagef("--max-new is %d, need at least 1", c.MaxNew)
	case c.ThinkingBudget < 0 || c.ThinkingBudget > 0 && c.NoThinking:
		return usagef("--thinking-budget needs a positive number, and thinking on")
	case slices.Contains(c.Stop, "") || slices.Contains(c.ReasoningStop, ""):
		return usagef("a stop string is empty")
	case c.ReasoningEffort != "" && c.ReasoningEffort != "none" && c.NoThinking:
		return usagef("--reasoning-effort %s with --no-thinking", c.ReasoningEffort)
	}
	if err := c.modelFlags.check(1); err != nil {
		return err
	}
	return c.samplingFlags.check()
}

func (c *runCommand) Run(e *environment) error {
	if err := c.check(e); err != nil {
		return err
	}
	prepare := time.Now()
	l, err := load(e, c.Artifact)
	if err != nil {
		return err
	}
	defer l.close()
	if c.Artifact == "" {
		c.small()
	}
	if c.ChatTemplate != "" {
		if err := l.override(c.ChatTemplate); err != nil {
			return err
		}
	}
	opt := c.samplingFlags.front(c.MaxContext)
	opt.MaxTokens = c.MaxNew
	f, err := l.front(opt)
	if err != nil {
		return err
	}
	req, err := c.request(e, l)
	if err != nil {
		return err
	}
	var p *front.Prepared
	if !c.interactive(e) { // what is wrong with a prompt is said before weights are read
		if p, err = f.Prepare(req); err != nil {
			return usageError{err}
		}
		if err := roomFor(p, c.MaxContext); err != nil {
			return err
		}
	}
	m, err := l.bind(c.options())
	if err != nil {
		return err
	}
	c.weights = l.weightBytes()
	if err := l.warm(e, &c.modelFlags); err != nil {
		return err
	}
	batch, dev, err := c.engine(e, m, 1, 0)
	if err != nil {
		return err
	}
	defer dev.Close()
	if p == nil {
		return c.converse(e, batch, f, req)
	}
	prepared := time.Since(prepare)
	out := &printer{session: p.Session(), answer: e.out, reasoning: e.err}
	res, err := out.generate(e.ctx, batch, p, c.DraftTokens)
	if err != nil {
		return err
	}
	c.report(e, res, out, prepared)
	if res.Reason == engine.Cancelled {
		return statusError(exitInterrupted)
	}
	return nil
}

// roomFor refuses a prompt that fills the context.
func roomFor(p *front.Prepared, context int) error {
	if p.MaxNew > 0 {
		return nil
	}
	return usageError{hintedError{
		fmt.Errorf("prompt too long: %d tokens and room for output do not fit a context of %d", len(p.Prompt), context),
		"a larger --max-context, or a shorter prompt",
	}}
}

// request is the command line as a request.
func (c *runCommand) request(e *environment, l *loaded) (front.Request, error) {
	req := front.Request{
		Effort: c.ReasoningEffort, Stop: c.Stop, ReasoningStop: c.ReasoningStop, StopIDs: c.StopTokenID, Raw: c.RawOutput,
	}
	if c.ThinkingBudget > 0 {
		req.ThinkingBudget = &c.ThinkingBudget
	}
	var err error
	switch {
	case c.PromptIDs != nil:
		req.Prompt, err = parseIDs(*c.PromptIDs)
		req.Prompt = append([]int32{}, req.Prompt...)
	case c.RawPrompt != nil:
		req.Prompt = append([]int32{}, l.tokenizer.Encode(*c.RawPrompt)...)
	case c.Prompt != "":
		req.Messages = []front.Message{{Role: "user", Content: front.Text(c.Prompt)}}
	case c.Messages != "":
		var raw []byte
		if raw, err = readInput(e, c.Messages); err != nil {
			return req, usageError{err}
		}
		if req.Messages, req.Tools, err = parseConversation(raw); err != nil {
			return req, usagef("%s: %w", c.Messages, err)
		}
	}
	return req, err
}

// readInput reads a file, or stdin for "-".
func readInput(e *environment, path string) ([]byte, error) {
	if path == "-" {
		return io.ReadAll(e.in)
	}
	return os.ReadFile(path)
}

// parseConversation reads an array of messages, or an object with messages and tools.
func parseConversation(raw []byte) ([]chat.Message, []jsontext.Value, error) {
	file := struct {
		Messages jsontext.Value   `json:"messages"`
		Tools    []jsontext.Value `json:"tools"`
	}{Messages: raw}
	if trimmed := bytes.TrimSpace(raw); len(trimmed) > 0 && trimmed[0] == '{' {
		file.Messages = nil
		if err := json.Unmarshal(raw, &file, json.RejectUnknownMembers(true)); err != nil {
			return nil, nil, err
		}
		if file.Messages == nil {
			return nil, nil, errors.New("no messages")
		}
	}
	messages, err := chat.ParseMessages(file.Messages)
	if err == nil && len(messages) == 0 {
		err = errors.New("no messages")
	}
	for _, m := range messages {
		for _, p := range m.Content {
			if p.Kind != chat.Text {
				return nil, nil, errors.New("a message holds media; this build has no media support")
			}
		}
	}
	return messages, file.Tools, err
}

// printer is the watcher of a run: answers go to stdout and reasoning to stderr, as they are committed.
type printer struct {
	session           *front.Session
	answer, reasoning io.Writer
	stopped           string          // the stop string that ended the output
	said              strings.Builder // the answer
	thought           bool
	newline           bool // the answer so far ends a line
}

// generate runs a prepared request and prints what comes.
func (p *printer) generate(ctx context.Context, b *engine.Batch, r *front.Prepared, drafts int) (engine.Outcome, error) {
	res, err := b.Run(ctx, engine.Request{Prompt: r.Prompt, MaxNew: r.MaxNew, Sampling: engine.Sampling(r.Sampling), Watcher: p, Draft: drafts})
	if err != nil {
		return res, err
	}
	err = p.print(p.session.Finish())
	if p.said.Len() > 0 && !p.newline {
		io.WriteString(p.answer, "\n")
	}
	if p.thought && p.said.Len() == 0 {
		io.WriteString(p.reasoning, "\n")
	}
	return res, err
}

// Preview is of engine.Watcher.
func (p *printer) Preview(ids []int32) engine.Verdict {
	keep, ends, insert := p.session.Preview(ids)
	v := engine.Verdict{Keep: keep, Insert: insert}
	if ends {
		v.Reason = engine.Stop
	}
	return v
}

// Commit is of engine.Watcher.
func (p *printer) Commit(ids []int32) error { return p.print(p.session.Commit(ids)) }

func (p *printer) print(events []front.Event) error {
	for _, ev := range events {
		var err error
		switch ev.Kind {
		case front.Reasoning:
			p.thought = true
			_, err = io.WriteString(p.reasoning, ev.Text)
		case front.Answer:
			if p.thought && p.said.Len() == 0 {
				io.WriteString(p.reasoning, "\n")
			}
			p.said.WriteString(ev.Text)
			p.newline = strings.HasSuffix(ev.Text, "\n")
			_, err = io.WriteString(p.answer, ev.Text)
		case front.End:
			p.stopped = ev.Text
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// report tells how the generation went.
func (c *runCommand) report(e *environment, res engine.Outcome, out *printer, prepared time.Duration) {
	s, u := res.Stats, out.session.Usage()
	reason := string(res.Reason)
	if out.stopped != "" {
		reason += fmt.Sprintf(" at %q", out.stopped)
	}
	rate := func(n int, d time.Duration) float64 { return float64(n) / max(d.Seconds(), 1e-9) }
	e.say("%s: %d prompt, %d output, %d reasoning tokens", reason, u.Prompt, u.Completion, u.Reasoning)
	e.say("prepare %v, prefill %v (%.1f tokens/s), decode %v (%.1f tokens/s), total %v", round(prepared),
		round(s.Prefill), rate(s.PromptTokens, s.Prefill), round(s.Decode), rate(max(s.OutputTokens-1, 0), s.Decode), round(prepared+s.Prefill+s.Decode))
	if c.DraftTokens > 0 {
		e.say("drafting: %d rounds, %d drafted, %d accepted, %.2f tokens a round, accepted at %v, %d steps without drafts",
			s.Rounds, s.Drafted, s.Accepted, 1+float64(s.Accepted)/float64(max(s.Rounds, 1)), s.AcceptedAt, s.FallbackSteps)
	}
	if c.PrintTokenIDs {
		e.say("ids %v", res.IDs)
	}
}

func round(d time.Duration) time.Duration { return d.Round(100 * time.Microsecond) }
