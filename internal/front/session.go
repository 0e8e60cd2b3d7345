package front

import (
	"bytes"
	"cmp"
	"slices"

	"ninfer/internal/text/decode"
	"ninfer/internal/text/parse"
	"ninfer/internal/text/token"
)

// Kind says what an Event is.
type Kind uint8

// The kinds of events, in the order in which they can come. A request has any number of Reasoning, Answer and Call events and at most
// one of the others.
const (
	Reasoning    Kind = iota // text of the reasoning
	ReasoningEnd             // the think block closed
	Answer                   // text of the answer
	Call                     // a complete tool call; calls come at the end of the output, all at once
	End                      // the output ended: nothing follows
)

// Event is a piece of what a client sees. Text is valid UTF-8, whole characters, and never empty in Reasoning and Answer. In End it is
// the stop string that was met, if one was. In Call it is the arguments, a JSON object, and Name is the function.
type Event struct {
	Kind Kind
	Text string
	Name string
}

// Usage are counts of tokens.
type Usage struct {
	Prompt     int
	Completion int // reasoning, inserted and withheld stop tokens included
	Reasoning  int // of them, committed while the think block was open, closing marker included
}

// Session is the output of one request. Its Preview and Commit are what an engine's watcher does: the engine asks before it commits
// ids and tells which it committed. It belongs to one goroutine at a time.
type Session struct {
	prompt  int
	decoder *decode.Decoder
	calls   *parse.Parser // nil: calls are not looked for
	one     bool          // the first call ends the output
	tokens  *token.Tokenizer
}

// Session starts the output.
func (p *Prepared) Session() *Session {
	d, err := decode.New(p.front.opt.Tokenizer, decode.Options{
		Thinking: p.Thinking, ThinkEnd: p.front.shut, StopIDs: p.StopIDs, Stops: p.req.Stop, ReasoningStops: p.req.ReasoningStop,
		Budget: p.Budget, Closing: p.Closing, Raw: p.req.Raw,
	})
	if err != nil {
		panic("front: a prepared request has options that decoding refuses: " + err.Error())
	}
	s := &Session{prompt: len(p.Prompt), decoder: d, one: p.req.OneCall, tokens: p.front.opt.Tokenizer}
	if p.tools != nil {
		s.calls = p.tools.Parser(cmp.Or(p.req.MaxToolName, 64))
	}
	return s
}

// Preview says how many of the ids that would come next may be committed, whether the output ends with them, and what to append after
// them without asking the model. It changes nothing.
func (s *Session) Preview(ids []int32) (keep int, ends bool, insert []int32) {
	keep, why := s.decoder.Preview(ids)
	if n, called := s.firstCall(ids[:keep]); called {
		return n, true, nil
	}
	switch why {
	case decode.StopID, decode.StopString:
		return keep, true, nil
	case decode.Budget:
		return keep, false, s.decoder.Closing()
	}
	return keep, false, nil
}

// firstCall says after how many of the ids the first call is complete, if it ends the output. The end of a call has a ">", and only then
// is it worth while to try.
func (s *Session) firstCall(ids []int32) (n int, called bool) {
	if !s.one || s.calls == nil || !slices.ContainsFunc(ids, func(id int32) bool { return bytes.IndexByte(s.tokens.Bytes(id), '>') >= 0 }) {
		return 0, false
	}
	decoder, calls := s.decoder.Clone(), s.calls.Clone()
	for i := range ids {
		for _, e := range decoder.Commit(ids[i : i+1]) {
			if e.Kind == decode.Answer {
				calls.Feed(e.Text)
			}
		}
		if calls.Called() {
			return i + 1, true
		}
	}
	return 0, false
}

// Commit takes ids that were committed, inserted ones included, and returns what to show. What is shown is never taken back.
func (s *Session) Commit(ids []int32) []Event { return s.events(s.decoder.Commit(ids)) }

// Finish ends the output and returns what was held back. It is for every end: after a stop, which Commit has shown, it returns nothing.
func (s *Session) Finish() []Event { return s.events(s.decoder.Finish()) }

// Usage are the counts so far.
func (s *Session) Usage() Usage {
	return Usage{Prompt: s.prompt, Completion: s.decoder.Tokens(), Reasoning: s.decoder.ReasoningTokens()}
}

// CallReport says what was found of tool calls.
type CallReport = parse.Report

// Calls is what was found of tool calls; it is complete after the end.
func (s *Session) Calls() CallReport {
	if s.calls == nil {
		return CallReport{}
	}
	return s.calls.Report()
}

func (s *Session) events(in []decode.Event) []Event {
	var out []Event
	for _, e := range in {
		switch e.Kind {
		case decode.Reasoning:
			out = append(out, Event{Kind: Reasoning, Text: e.Text})
		case decode.ReasoningEnd:
			out = append(out, Event{Kind: ReasoningEnd})
		case decode.Answer:
			if s.calls == nil {
				out = append(out, Event{Kind: Answer, Text: e.Text})
			} else {
				out = appendParsed(out, s.calls.Feed(e.Text))
			}
		case decode.End:
			if s.calls != nil {
				out = appendParsed(out, s.calls.Finish())
			}
			out = append(out, Event{Kind: End, Text: e.Stop})
		}
	}
	return out
}

func appendParsed(out []Event, in []parse.Event) []Event {
	for _, e := range in {
		if e.Kind == parse.Call {
			out = append(out, Event{Call, e.Arguments, e.Name})
			continue
		}
		if n := len(out); n > 0 && out[n-1].Kind == Answer {
			out[n-1].Text += e.Text
			continue
		}
		out = append(out, Event{Kind: Answer, Text: e.Text})
	}
	return out
}

// ReadsCalls reports whether calls of tools are looked for in the answer.
func (p *Prepared) ReadsCalls() bool { return p.tools != nil }
