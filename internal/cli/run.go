package cli

import (
	"bytes"
	"cmp"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"ninfer/internal/engine"
	"ninfer/internal/text/chat"
	"ninfer/internal/text/decode"
)

type runCommand struct {
	Artifact string `arg:"" optional:"" help:"Entry file."`

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

func (c *runCommand) check() error {
	c.MaxContext = cmp.Or(c.MaxContext, 2048)
	inputs := 0
	for _, given := range []bool{c.Prompt != "", c.Messages != "", c.RawPrompt != nil, c.PromptIDs != nil} {
		if given {
			inputs++
		}
	}
	switch {
	case inputs != 1:
		return usagef("need exactly one of --prompt, --messages, --raw-prompt and --prompt-ids, with some text")
	case c.MaxNew < 1:
		return usagef("--max-new is %d, need at least 1", c.MaxNew)
	case c.ThinkingBudget < 0 || c.ThinkingBudget > 0 && c.NoThinking:
		return usagef("--thinking-budget needs a positive number, and thinking on")
	case slices.Contains(c.Stop, "") || slices.Contains(c.ReasoningStop, ""):
		return usagef("a stop string is empty")
	case c.ReasoningEffort != "" && c.ReasoningEffort != "none" && c.NoThinking:
		return usagef("--reasoning-effort %s with --no-thinking", c.ReasoningEffort)
	case c.ReasoningEffort != "" && c.ReasoningEffort != "none" && !slices.Contains(chat.Efforts, c.ReasoningEffort):
		return usagef("--reasoning-effort %s: need none or one of %v", c.ReasoningEffort, chat.Efforts)
	}
	if err := c.modelFlags.check(1); err != nil {
		return err
	}
	return c.samplingFlags.check()
}

// earlyClose is appended when a thinking budget is used up: a sentence that lets the model go on to the answer, and the end of the
// block (product.md 8.6 gives the rule; the words are ours and part of docs).
const earlyClose = "\n\nThe time to think is over; I answer with what I have.\n</think>\n\n"

func (c *runCommand) Run(e *environment) error {
	if err := c.check(); err != nil {
		return err
	}
	l, err := load(c.Artifact)
	if err != nil {
		return err
	}
	defer l.close()
	if c.ChatTemplate != "" {
		if err := l.override(c.ChatTemplate); err != nil {
			return err
		}
	}
	prepare := time.Now()
	ids, thinking, err := c.prompt(e, l)
	if err != nil {
		return err
	}
	m, err := l.bind(c.options())
	if err != nil {
		return err
	}
	batch, dev, err := c.engine(e, m, 1, 0)
	if err != nil {
		return err
	}
	defer dev.Close()
	prepared := time.Since(prepare)

	out := &printer{answer: e.out, reasoning: e.err}
	opt := decode.Options{
		Thinking: thinking, StopIDs: slices.Concat(l.stopIDs, c.StopTokenID), Stops: c.Stop, ReasoningStops: c.ReasoningStop, Raw: c.RawOutput,
	}
	if id, ok := l.tokenizer.ID("</think>"); ok {
		opt.ThinkEnd = id
	} else {
		opt.Thinking = false
	}
	if c.ThinkingBudget > 0 && opt.Thinking && c.MaxNew > c.ThinkingBudget {
		opt.Budget, opt.Closing = c.ThinkingBudget, l.tokenizer.Encode(earlyClose)
		if room := min(c.MaxNew, c.MaxContext-len(ids)); room < c.ThinkingBudget+len(opt.Closing)+1 {
			return usagef("--thinking-budget %d: the limit of %d tokens cannot hold the budget, its %d closing tokens and an answer", c.ThinkingBudget, room, len(opt.Closing))
		}
	}
	if out.decoder, err = decode.New(l.tokenizer, opt); err != nil {
		return usageError{err}
	}
	res, err := batch.Run(e.ctx, engine.Request{
		Prompt: ids, MaxNew: c.MaxNew, Sampling: c.sampling(thinking), Watcher: out, Draft: c.DraftTokens,
	})
	if errors.Is(err, engine.ErrPromptTooLong) {
		return usageError{hintedError{err, "a larger --max-context, or a shorter prompt"}}
	}
	if flushed := out.finish(); err == nil {
		err = flushed
	}
	if err != nil {
		return err
	}
	c.report(e, res, out, prepared)
	if res.Reason == engine.Cancelled {
		return statusError(exitInterrupted)
	}
	return nil
}

// override replaces the artifact's chat template by a file's.
func (l *loaded) override(path string) error {
	source, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	l.template, err = chat.NewTemplate(path, source)
	return err
}

// prompt makes the ids, and says whether the prompt leaves a think block open.
func (c *runCommand) prompt(e *environment, l *loaded) (ids []int32, thinking bool, err error) {
	switch {
	case c.PromptIDs != nil:
		ids, err = parseIDs(*c.PromptIDs)
	case c.RawPrompt != nil:
		ids = l.tokenizer.Encode(*c.RawPrompt)
	default:
		ids, err = c.conversation(e, l)
	}
	if err != nil {
		return nil, false, err
	}
	if len(ids) == 0 {
		return nil, false, usagef("the prompt has no tokens")
	}
	for _, id := range ids {
		if int(id) >= l.tokenizer.Count() {
			return nil, false, usagef("prompt id %d is not one of the tokenizer's %d", id, l.tokenizer.Count())
		}
	}
	open, ok := l.tokenizer.ID("<think>")
	end, _ := l.tokenizer.ID("</think>")
	for i := len(ids) - 1; ok && i >= 0; i-- {
		if ids[i] == open || ids[i] == end {
			return ids, ids[i] == open, nil
		}
	}
	return ids, false, nil
}

// conversation renders --prompt or --messages with the template.
func (c *runCommand) conversation(e *environment, l *loaded) ([]int32, error) {
	in := chat.Input{AddGenerationPrompt: true, PreserveThinking: c.PreserveThinking}
	thinking := !c.NoThinking && c.ReasoningEffort != "none"
	in.EnableThinking = &thinking
	if c.ReasoningEffort != "none" {
		in.ReasoningEffort = c.ReasoningEffort
	}
	if c.Prompt != "" {
		in.Messages = []chat.Message{{Role: "user", Content: chat.TextContent(c.Prompt)}}
	} else {
		raw, err := readInput(e, c.Messages)
		if err != nil {
			return nil, usageError{err}
		}
		if in.Messages, in.Tools, err = parseConversation(raw); err != nil {
			return nil, usagef("%s: %w", c.Messages, err)
		}
	}
	if in.ReasoningEffort != "" {
		known, err := l.template.ProbeEfforts()
		if err != nil {
			return nil, err
		}
		if !slices.Contains(known.Accepted, in.ReasoningEffort) {
			return nil, usagef("--reasoning-effort %s: the template knows %v", in.ReasoningEffort, known.Accepted)
		}
	}
	p, err := l.template.Render(in)
	if err != nil {
		return nil, usageError{err}
	}
	return p.Encode(l.tokenizer), nil
}

// readInput reads a file, or stdin for "-".
func readInput(e *environment, path string) ([]byte, error) {
	if path == "-" {
		return io.ReadAll(e.in)
	}
	return os.ReadFile(path)
}

// parseConversation reads an array of messages, or an object with messages and tools (product.md 2.3.3).
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
	decoder           *decode.Decoder
	answer, reasoning io.Writer
	reason            decode.Event
	wroteReasoning    bool
	wroteAnswer       bool
	newline           bool // the answer so far ends a line
}

// Preview is of engine.Watcher.
func (p *printer) Preview(ids []int32) engine.Verdict {
	keep, why := p.decoder.Preview(ids)
	switch why {
	case decode.StopID, decode.StopString:
		return engine.Verdict{Keep: keep, Reason: engine.Stop}
	case decode.Budget:
		return engine.Verdict{Keep: keep, Insert: p.decoder.Closing()}
	}
	return engine.Verdict{Keep: keep}
}

// Commit is of engine.Watcher.
func (p *printer) Commit(ids []int32) error { return p.print(p.decoder.Commit(ids)) }

func (p *printer) print(events []decode.Event) error {
	for _, ev := range events {
		var err error
		switch ev.Kind {
		case decode.Reasoning:
			p.wroteReasoning = true
			_, err = io.WriteString(p.reasoning, ev.Text)
		case decode.Answer:
			if p.wroteReasoning && !p.wroteAnswer {
				io.WriteString(p.reasoning, "\n")
			}
			p.wroteAnswer, p.newline = true, ev.Text[len(ev.Text)-1] == '\n'
			_, err = io.WriteString(p.answer, ev.Text)
		case decode.End:
			p.reason = ev
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// finish prints what was held back and ends the line.
func (p *printer) finish() error {
	err := p.print(p.decoder.Finish())
	if p.wroteAnswer && !p.newline {
		io.WriteString(p.answer, "\n")
	}
	if p.wroteReasoning && !p.wroteAnswer {
		io.WriteString(p.reasoning, "\n")
	}
	return err
}

// report tells how the generation went.
func (c *runCommand) report(e *environment, res engine.Outcome, out *printer, prepared time.Duration) {
	s := res.Stats
	reason := string(res.Reason)
	if out.reason.Stop != "" {
		reason += fmt.Sprintf(" at %q", out.reason.Stop)
	}
	e.say("%s: %d prompt, %d output, %d reasoning tokens", reason, s.PromptTokens, s.OutputTokens, out.decoder.ReasoningTokens())
	rate := func(n int, d time.Duration) float64 { return float64(n) / max(d.Seconds(), 1e-9) }
	e.say("prepare %v, prefill %v (%.1f tokens/s), decode %v (%.1f tokens/s)", round(prepared), round(s.Prefill), rate(s.PromptTokens, s.Prefill),
		round(s.Decode), rate(max(s.OutputTokens-1, 0), s.Decode))
	if c.DraftTokens > 0 {
		e.say("drafting: %d rounds, %d drafted, %d accepted, %.2f tokens a round, accepted at %v, %d steps without drafts",
			s.Rounds, s.Drafted, s.Accepted, 1+rate(s.Accepted, time.Duration(s.Rounds)*time.Second), s.AcceptedAt, s.FallbackSteps)
	}
	if c.PrintTokenIDs {
		e.say("ids %v", res.IDs)
	}
}

func round(d time.Duration) time.Duration { return d.Round(100 * time.Microsecond) }
