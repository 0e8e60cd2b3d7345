// Package parse finds the tool calls in the text of an answer, as it comes.
//
// The model writes calls as text:
//
//	<tool_call>
//	<function=NAME>
//	<parameter=KEY>
//	value
//	</parameter>
//	</function>
//	</tool_call>
//
// Nothing forces it to write them well. The region of calls starts at the first <tool_call>, and everything from there to the end must be
// complete calls of declared functions with nothing but white space around them. If it is not, the whole answer is content, byte for byte,
// and Report says why. So a call is certain only at the end of the output, and Finish alone returns calls; what makes a region impossible
// shows early, and then its text goes on as content at once. White space at the end of the content waits too, because it is not shown if a
// region follows.
//
// How the text is cut into pieces changes nothing but when events come. A Parser is for the answer only, never for reasoning, and for
// requests that declared tools. It takes time linear in the text, keeps no more than it, and belongs to one goroutine.
package parse

import (
	"bytes"
	"maps"
	"slices"
	"unicode"
	"unicode/utf8"
)

// The markers of the format. The first and the last are tokens of their own, the others are ordinary text.
const (
	callOpen      = "<tool_call>"
	functionOpen  = "<function="
	parameterOpen = "<parameter="
	parameterShut = "</parameter>"
	functionShut  = "</function>"
	callShut      = "</tool_call>"
)

// Reason says why a region is not calls. The values are words for logs.
type Reason string

// The reasons. Of several the one met first counts.
const (
	None               Reason = ""
	MalformedStructure Reason = "malformed_structure" // a tag is missing, or another thing stands in its place
	DuplicateParameter Reason = "duplicate_parameter" // two parameters of a call have one name
	InvalidToolName    Reason = "invalid_tool_name"   // characters other than A-Z a-z 0-9 _ -, none, or too many
	UndeclaredTool     Reason = "undeclared_tool"     // the request did not declare it
	TrailingContent    Reason = "trailing_content"    // something follows a call that is not another
)

// Kind says what an Event is.
type Kind uint8

// The kinds of events. All content comes before the first call.
const (
	Content Kind = iota // text of the answer
	Call                // a complete call
)

// Event is a piece of the answer.
type Event struct {
	Kind Kind
	Text string // of Content, never empty
	Name string // of Call
	// Arguments of Call are the text of a JSON object without white space outside strings. Members are in the order in which the model wrote
	// them, numbers have its digits.
	Arguments string
}

// Report is what a parser found.
type Report struct {
	Marker     bool   // a <tool_call> was seen
	Calls      int    // calls returned
	Omitted    int    // arguments left out: empty text where no string is allowed
	Mismatches int    // arguments kept that the tool's schema does not declare so
	Fallback   Reason // why the region is content, or None
}

// Parser reads one answer. Make one with Tools.Parser.
type Parser struct {
	tools   *Tools
	maxName int

	held  []byte // what is not shown yet: white space and what may be a marker, then the region
	white int    // of held in content: how much at its start is known to be white space
	start int    // in held: where the piece being read starts
	at    int    // in held: everything before it was looked at
	state state

	calls  []Event
	call   *call // the one being read
	report Report
}

// call is a call that is not complete.
type call struct {
	name   string
	tool   *tool
	seen   map[string]bool
	key    string
	depth  int    // nested parameters open in the value
	nested int    // in held: where the key of what may be another one starts
	args   []byte // JSON, without the last brace
}

// state is what comes next.
type state uint8

const (
	inContent  state = iota // text, until <tool_call>
	atFunction              // <function=
	inName                  // the rest of a name, >
	atMember                // <parameter= or </function>
	inKey                   // the rest of a key, >
	inValue                 // text, until </parameter>
	inNested                // in the value: what may be a key, >
	atShut                  // </tool_call>
	atNext                  // <tool_call> or the end
	inPlain                 // text to the end: nothing is a call any more
)

// Feed takes the next piece of the answer.
func (p *Parser) Feed(text string) []Event {
	var events []Event
	p.held = append(p.held, text...)
	for p.step(&events) {
	}
	return events
}

// Finish says that the answer has ended, for whatever reason, and returns what was held back: the calls or their text.
func (p *Parser) Finish() []Event {
	var events []Event
	switch p.state {
	case inContent, inPlain:
	case atNext:
		if rest := bytes.TrimLeftFunc(p.held[p.start:], unicode.IsSpace); len(rest) > 0 {
			p.fail(TrailingContent)
			break
		}
		p.held, p.state = nil, inPlain
		p.report.Calls = len(p.calls)
		events, p.calls = p.calls, nil
		return events
	default:
		p.fail(MalformedStructure)
	}
	p.state = inPlain
	p.show(&events, len(p.held))
	return events
}

// Called reports whether what was fed ends a call: a region so far without fault whose last tag is </tool_call>.
func (p *Parser) Called() bool { return p.state == atNext && len(p.calls) > 0 }

// Clone returns a parser in the same place, which goes its own way from there.
func (p *Parser) Clone() *Parser {
	c := *p
	c.held, c.calls = slices.Clone(p.held), slices.Clone(p.calls)
	if p.call != nil {
		call := *p.call
		call.seen, call.args = maps.Clone(p.call.seen), slices.Clone(p.call.args)
		c.call = &call
	}
	return &c
}

// Report is what was found; it is complete after Finish.
func (p *Parser) Report() Report { return p.report }

// step goes on by one piece; it reports whether there may be more.
func (p *Parser) step(events *[]Event) bool {
	switch p.state {
	case inContent:
		return p.content(events)
	case atFunction:
		return p.expect(events, MalformedStructure, tag{functionOpen, inName})
	case inName:
		return p.name(events)
	case atMember:
		return p.expect(events, MalformedStructure, tag{parameterOpen, inKey}, tag{functionShut, atShut})
	case inKey:
		return p.keyEnd(events)
	case inValue:
		return p.value()
	case inNested:
		return p.nested()
	case atShut:
		return p.expect(events, MalformedStructure, tag{callShut, atNext})
	case atNext:
		return p.expect(events, TrailingContent, tag{callOpen, atFunction})
	}
	p.show(events, len(p.held))
	return false
}

// content looks for the start of the region and shows what cannot belong to it.
func (p *Parser) content(events *[]Event) bool {
	for {
		i := bytes.IndexByte(p.held[p.at:], '<')
		if i < 0 {
			p.at = len(p.held)
			break
		}
		p.at += i
		met, open := match(p.held[p.at:], callOpen)
		if met {
			p.report.Marker = true
			p.visible(events)
			p.at += len(callOpen)
			p.start, p.state = p.at, atFunction
			return true
		}
		if open {
			break
		}
		p.at++
	}
	p.visible(events)
	return false
}

// visible shows what was looked at without the white space at its end. A last character that is not complete may be white space.
func (p *Parser) visible(events *[]Event) {
	text := p.held[p.white:p.at]
	for i := len(text) - 1; i >= 0 && i > len(text)-utf8.UTFMax; i-- {
		if utf8.RuneStart(text[i]) {
			if !utf8.FullRune(text[i:]) {
				text = text[:i]
			}
			break
		}
	}
	end := p.white + len(text)
	if n := len(bytes.TrimRightFunc(text, unicode.IsSpace)); n > 0 {
		n += p.white
		p.white = 0
		p.show(events, n)
		end -= n
	}
	p.white = end
}

// tag is a marker and what follows it.
type tag struct {
	text string
	next state
}

// expect skips white space and reads one of the tags. Anything else ends the region for the reason given.
func (p *Parser) expect(events *[]Event, why Reason, tags ...tag) bool {
	for p.at < len(p.held) {
		r, n := utf8.DecodeRune(p.held[p.at:])
		if r == utf8.RuneError && !utf8.FullRune(p.held[p.at:]) {
			return false
		}
		if !unicode.IsSpace(r) {
			break
		}
		p.at += n
	}
	wait := false
	for _, t := range tags {
		met, open := match(p.held[p.at:], t.text)
		if met {
			p.at += len(t.text)
			p.start, p.state = p.at, t.next
			if t.next == atNext {
				p.complete()
			}
			return true
		}
		wait = wait || open
	}
	if wait {
		return false
	}
	p.fail(why)
	p.show(events, len(p.held))
	return false
}

// name reads the name of a function.
func (p *Parser) name(events *[]Event) bool {
	why := None
	for ; p.at < len(p.held); p.at++ {
		c := p.held[p.at]
		if n := p.at - p.start; c == '>' && n > 0 {
			name := string(p.held[p.start:p.at])
			if t, ok := p.tools.byName[name]; ok {
				p.at++
				p.call = &call{name: name, tool: t, seen: map[string]bool{}, args: []byte{'{'}}
				p.start, p.state = p.at, atMember
				return true
			}
			why = UndeclaredTool
			break
		} else if !nameByte(c) || n >= p.maxName {
			why = InvalidToolName
			break
		}
	}
	if why == None {
		return false
	}
	p.fail(why)
	p.show(events, len(p.held))
	return false
}

func nameByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '-'
}

// key reads up to the > of a parameter's tag. It reports whether the tag is complete, and if not whether it can become so.
func (p *Parser) key() (met, open bool) {
	for ; p.at < len(p.held); p.at++ {
		switch p.held[p.at] {
		case '>':
			return p.at > p.start, false
		case '<', '\n', '\r':
			return false, false
		}
	}
	return false, true
}

func (p *Parser) keyEnd(events *[]Event) bool {
	met, open := p.key()
	if open {
		return false
	}
	if met {
		p.call.key = string([]rune(string(p.held[p.start:p.at]))) // as JSON can hold it: two names must not become one there
		if !p.call.seen[p.call.key] {
			p.call.seen[p.call.key] = true
			p.at++
			p.start, p.state = p.at, inValue
			return true
		}
		p.fail(DuplicateParameter)
	} else {
		p.fail(MalformedStructure)
	}
	p.show(events, len(p.held))
	return false
}

// value looks for the end of a value, and for parameters written out in it. start stays where the value starts.
func (p *Parser) value() bool {
	for {
		i := bytes.IndexByte(p.held[p.at:], '<')
		if i < 0 {
			p.at = len(p.held)
			return false
		}
		p.at += i
		rest := p.held[p.at:]
		shut, mayShut := match(rest, parameterShut)
		nested, mayNest := match(rest, parameterOpen)
		switch {
		case shut && p.call.depth > 0:
			p.call.depth--
			p.at += len(parameterShut)
		case shut:
			p.argument(string(p.held[p.start:p.at]))
			p.at += len(parameterShut)
			p.start, p.state = p.at, atMember
			return true
		case nested:
			p.at += len(parameterOpen)
			p.call.nested, p.state = p.at, inNested
			return true
		case mayShut || mayNest:
			return false
		default:
			p.at++
		}
	}
}

// nested reads the key of what may be a parameter in a value. It is one if it is a key: not empty, in one line, without <.
func (p *Parser) nested() bool {
	for ; p.at < len(p.held); p.at++ {
		switch p.held[p.at] {
		case '>':
			if p.at > p.call.nested {
				p.call.depth++
			}
			p.state = inValue
			return true
		case '<', '\n', '\r':
			p.state = inValue
			return true
		}
	}
	return false
}

// fail gives up the region: all of it is content.
func (p *Parser) fail(why Reason) {
	p.report.Fallback, p.report.Omitted, p.report.Mismatches = why, 0, 0
	p.state, p.calls, p.call = inPlain, nil, nil
}

// complete ends the call.
func (p *Parser) complete() {
	p.calls = append(p.calls, Event{Kind: Call, Name: p.call.name, Arguments: string(append(p.call.args, '}'))})
	p.call = nil
}

// show returns held text up to n and drops it.
func (p *Parser) show(events *[]Event, n int) {
	if n == 0 {
		return
	}
	if i := len(*events); i > 0 {
		(*events)[i-1].Text += string(p.held[:n])
	} else {
		*events = append(*events, Event{Kind: Content, Text: string(p.held[:n])})
	}
	p.held = p.held[n:]
	p.at, p.start = max(p.at-n, 0), max(p.start-n, 0)
}

// match reports whether text starts with a tag, and if not whether more text could make it so.
func match(text []byte, tag string) (met, open bool) {
	n := min(len(text), len(tag))
	same := string(text[:n]) == tag[:n]
	return same && n == len(tag), same && n < len(tag)
}
