package chat

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"
)

// Template is a compiled chat template.
type Template struct {
	name    string
	outline *outline
	plain   *jinja.Template
	marked  *jinja.Template // with firstMark

	neutral func() bool // see leadingTool
}

// firstMark and those after it up to lastMark are the candidates for the mark.
// They are noncharacters, which no text should hold; one that a text does hold is
// passed over.
const (
	firstMark = '\uFDD0'
	lastMark  = '\uFDEF'
)

// A RaiseError carries the words with which a template refused its input, such as
// "Unexpected message role.". They are meant for the client.
type RaiseError struct {
	Template string
	Message  string
}

func (e *RaiseError) Error() string {
	return fmt.Sprintf("chat template %s: %s", e.Template, oneLine(e.Message))
}

// The refusals of the official template that the product does otherwise.
const (
	refusesLaterSystem = "System message must be at the beginning."
	refusesNoQuery     = "No user query found in messages."
	refusesNoMessages  = "No messages provided."
)

// NewTemplate compiles a template. Name is its file's name; an error gives it and
// the line. Filters and tests that the engine lacks fail here. A template is
// read as Hugging Face reads one: with trim_blocks and lstrip_blocks.
func NewTemplate(name string, source []byte) (*Template, error) {
	if !utf8.Valid(source) {
		return nil, fmt.Errorf("chat template %s: is not UTF-8", name)
	}
	o, err := read(normalize(string(source)))
	if err != nil {
		return nil, compileError(name, err)
	}
	t := &Template{name: name, outline: o}
	if t.plain, err = t.compile(0); err != nil {
		return nil, compileError(name, err)
	}
	if t.marked, err = t.compile(firstMark); err != nil {
		return nil, compileError(name, err)
	}
	t.neutral = sync.OnceValue(t.emptySystemIsNeutral)
	return t, nil
}

// Source is the text that was compiled: line ends are \n, and the last one is not there.
func (t *Template) Source() string { return t.outline.source }

func (t *Template) compile(mark rune) (*jinja.Template, error) {
	return jinja.Compile(t.outline.rewrite(mark))
}

var lineNumber = regexp.MustCompile(`\bline (\d+)(, col \d+)?:? ?`)

// compileError puts the line, where one is known, behind the file's name.
func compileError(name string, err error) error {
	var at *sourceError
	if errors.As(err, &at) {
		return fmt.Errorf("chat template %s:%d: %s", name, at.line, oneLine(at.text))
	}
	text := err.Error()
	if m := lineNumber.FindStringSubmatchIndex(text); m != nil {
		line := text[m[2]:m[3]]
		return fmt.Errorf("chat template %s:%s: %s", name, line, oneLine(text[:m[0]]+text[m[1]:]))
	}
	return fmt.Errorf("chat template %s: %s", name, oneLine(text))
}

// oneLine keeps an error on one line.
func oneLine(s string) string {
	return strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r == '\n' || r == '\r' }), " ")
}

// Render renders a conversation. A refusal by the template is a *RaiseError.
func (t *Template) Render(in Input) (Prompt, error) {
	var tail []Part
	if in.Continue {
		var err error
		if in, tail, err = openLast(in); err != nil {
			return Prompt{}, fmt.Errorf("chat template %s: %w", t.name, err)
		}
	}
	c := &call{template: t, in: in, allowEmpty: tail != nil, now: time.Now()}
	if len(in.Messages) > 0 && in.Messages[0].Role == "tool" && t.neutral() {
		c.leadingTool = true
	}
	text, err := c.render(t.plain, 0)
	if errors.Is(err, errNoQuery) {
		c.noQuery = true
		text, err = c.render(t.plain, 0)
	}
	if err != nil {
		return Prompt{}, t.renderError(err)
	}
	mark, marked := t.unused(text)
	if marked == nil {
		return Prompt{}, fmt.Errorf("chat template %s: the text uses every character that could mark it", t.name)
	}
	withMarks, err := c.render(marked, mark)
	if err != nil {
		return Prompt{}, t.renderError(err)
	}
	p := newPrompt(withMarks, mark)
	if p.text != text {
		return Prompt{}, fmt.Errorf("chat template %s: cannot tell its control tokens from message text, because it compares text that it also writes", t.name)
	}
	for _, part := range tail {
		p.appendPlain(part.Text)
	}
	return p, nil
}

func (t *Template) renderError(err error) error {
	var raised *RaiseError
	if errors.As(err, &raised) {
		return raised
	}
	return fmt.Errorf("chat template %s: %s", t.name, oneLine(err.Error()))
}

// unused returns a mark that is in neither text nor the template's source, and the
// template compiled with it, or nil.
func (t *Template) unused(text string) (rune, *jinja.Template) {
	for mark := rune(firstMark); mark <= lastMark; mark++ {
		if strings.ContainsRune(text, mark) || strings.ContainsRune(t.outline.source, mark) {
			continue
		}
		if mark == firstMark {
			return mark, t.marked
		}
		if marked, err := t.compile(mark); err == nil {
			return mark, marked
		}
	}
	return 0, nil
}

// emptySystemIsNeutral reports whether an empty system message at the start leaves
// no trace in the prompt, as in the official template.
func (t *Template) emptySystemIsNeutral() bool {
	thinking := false
	user := Message{Role: "user", Content: TextContent("x")}
	var texts [2]string
	for i, messages := range [][]Message{{user}, {{Role: "system"}, user}} {
		p, err := t.Render(Input{Messages: messages, EnableThinking: &thinking})
		if err != nil {
			return false
		}
		texts[i] = p.Text()
	}
	return texts[0] == texts[1]
}

// openLast takes the last message off for Continue and returns its text.
func openLast(in Input) (Input, []Part, error) {
	n := len(in.Messages)
	if n == 0 || in.Messages[n-1].Role != "assistant" {
		return in, nil, fmt.Errorf("to continue, the last message must be the assistant's")
	}
	last := in.Messages[n-1]
	if in.EnableThinking == nil || *in.EnableThinking {
		return in, nil, fmt.Errorf("to continue an assistant message, thinking must be off")
	}
	if len(last.ToolCalls) > 0 {
		return in, nil, fmt.Errorf("an assistant message to continue may hold no tool calls")
	}
	for _, p := range last.Content {
		if p.Kind != Text {
			return in, nil, fmt.Errorf("an assistant message to continue may hold no media")
		}
	}
	in.Messages = in.Messages[:n-1]
	in.AddGenerationPrompt = true
	return in, append([]Part{}, last.Content...), nil
}

// call is one Render.
type call struct {
	template    *Template
	in          Input
	now         time.Time
	noQuery     bool // the history has no user's question, by the template's judgement
	allowEmpty  bool // no message is left beside the one to be continued
	leadingTool bool // the history starts with a tool result

	vars    map[string]jinja.Value
	restore func(string) string
	later   []string // texts of system messages that are not first, in order
}

//lint:ignore ST1005 the words are the template's
var errNoQuery = errors.New(refusesNoQuery)

// prepare turns the input into template variables. It does so for every rendering
// anew, because a template may change the lists and objects that it is given.
func (c *call) prepare() error {
	in := c.in
	c.vars, c.later = map[string]jinja.Value{}, nil
	v := &values{}
	messages, err := c.messages(v)
	if err != nil {
		return err
	}
	c.vars["messages"] = messages
	// Hugging Face hands these two over as none where there are none.
	c.vars["tools"], c.vars["documents"] = jinja.None(), jinja.None()
	if in.Tools != nil {
		tools := jinja.NewList(nil)
		for i, raw := range in.Tools {
			list := tools.AsList()
			tool, err := v.parse(raw, func(x jinja.Value) { list.Items[i] = x })
			if err != nil {
				return fmt.Errorf("tool %d: %w", i, err)
			}
			list.Append(tool)
		}
		c.vars["tools"] = tools
	}
	c.vars["add_generation_prompt"] = jinja.NewBool(in.AddGenerationPrompt)
	// Without a question every turn belongs to the open one, whose reasoning is kept.
	c.vars["preserve_thinking"] = jinja.NewBool(in.PreserveThinking || c.noQuery)
	c.vars["add_vision_id"] = jinja.NewBool(in.AddVisionID)
	reserved := map[string]bool{"enable_thinking": true, "reasoning_effort": true, "raise_exception": true, "strftime_now": true, "namespace": true}
	for name := range c.vars {
		reserved[name] = true
	}
	delete(reserved, "documents")
	for name := range in.Tokens {
		reserved[name] = true
	}
	for _, name := range ownFilters {
		reserved[name] = true
	}
	if in.EnableThinking != nil {
		c.vars["enable_thinking"] = jinja.NewBool(*in.EnableThinking)
	}
	if in.ReasoningEffort != "" {
		c.vars["reasoning_effort"] = v.text(in.ReasoningEffort)
	}
	given := map[string]bool{}
	for _, arg := range in.Args {
		if reserved[arg.Name] || given[arg.Name] {
			return fmt.Errorf("template argument %q cannot be set, or not twice", arg.Name)
		}
		given[arg.Name] = true
		value, err := v.parse(arg.Value, func(x jinja.Value) { c.vars[arg.Name] = x })
		if err != nil {
			return fmt.Errorf("template argument %q: %w", arg.Name, err)
		}
		c.vars[arg.Name] = value
	}
	c.restore, err = v.finish(c.template.outline.source)
	return err
}

// messages builds the template's messages.
func (c *call) messages(v *values) (jinja.Value, error) {
	list := jinja.NewList(nil)
	items := list.AsList()
	if c.leadingTool {
		// The official template opens the user's turn for a tool result only where a
		// message stands before it. An empty system message does not show.
		empty := jinja.NewDict()
		empty.AsDict().Set("role", jinja.NewString("system"))
		empty.AsDict().Set("content", jinja.NewString(""))
		items.Append(empty)
	}
	for i, m := range c.in.Messages {
		message, err := c.message(v, m, i == 0)
		if err != nil {
			return list, fmt.Errorf("message %d: %w", i, err)
		}
		items.Append(message)
	}
	return list, nil
}

func (c *call) message(v *values, m Message, first bool) (jinja.Value, error) {
	object := jinja.NewDict()
	dict := object.AsDict()
	role := m.Role
	if role == "developer" {
		role = "system"
	}
	dict.Set("role", v.text(role))
	var text strings.Builder
	media := false
	for _, p := range m.Content {
		text.WriteString(p.Text)
		media = media || p.Kind != Text
	}
	if role == "system" && !first {
		if media {
			return object, fmt.Errorf("a system message cannot contain images or videos")
		}
		c.later = append(c.later, text.String())
	}
	if !media {
		dict.Set("content", v.text(text.String()))
	} else {
		parts := jinja.NewList(nil)
		for _, p := range m.Content {
			part := jinja.NewDict()
			switch p.Kind {
			case Image:
				part.AsDict().Set("type", jinja.NewString("image"))
			case Video:
				part.AsDict().Set("type", jinja.NewString("video"))
			default:
				part.AsDict().Set("type", jinja.NewString("text"))
				part.AsDict().Set("text", v.text(p.Text))
			}
			parts.AsList().Append(part)
		}
		dict.Set("content", parts)
	}
	if m.Reasoning != nil {
		dict.Set("reasoning_content", v.text(*m.Reasoning))
	}
	if len(m.ToolCalls) > 0 {
		calls := jinja.NewList(nil)
		for i, tc := range m.ToolCalls {
			call, err := toolCall(v, tc)
			if err != nil {
				return object, fmt.Errorf("tool call %d: %w", i, err)
			}
			calls.AsList().Append(call)
		}
		dict.Set("tool_calls", calls)
	}
	if m.ToolCallID != "" {
		dict.Set("tool_call_id", v.text(m.ToolCallID))
	}
	if m.Name != "" {
		dict.Set("name", v.text(m.Name))
	}
	return object, nil
}

func toolCall(v *values, tc ToolCall) (jinja.Value, error) {
	object, function := jinja.NewDict(), jinja.NewDict()
	if tc.ID != "" {
		object.AsDict().Set("id", v.text(tc.ID))
	}
	object.AsDict().Set("type", jinja.NewString("function"))
	function.AsDict().Set("name", v.text(tc.Name))
	raw := tc.Arguments
	if raw.Kind() == '"' {
		text, err := unquoteJSON(raw)
		if err != nil {
			return object, fmt.Errorf("arguments: %w", err)
		}
		raw = text
	}
	if raw.Kind() != '{' {
		return object, fmt.Errorf("arguments must be a JSON object or the text of one")
	}
	arguments, err := v.parse(raw, nil)
	if err != nil {
		return object, fmt.Errorf("arguments: %w", err)
	}
	function.AsDict().Set("arguments", arguments)
	object.AsDict().Set("function", function)
	return object, nil
}

// render runs one of the two compiled forms; mark is that form's, or zero. A fault
// of the engine on a template that it takes for something else is an error too.
func (c *call) render(compiled *jinja.Template, mark rune) (text string, err error) {
	defer func() {
		if p := recover(); p != nil {
			text, err = "", fmt.Errorf("the template engine failed: %v", p)
		}
	}()
	if err := c.prepare(); err != nil {
		return "", err
	}
	own := func(text string) string {
		if mark == 0 {
			return text
		}
		return markText(text, mark)
	}
	later := c.later
	vars := c.vars
	for name, text := range c.in.Tokens {
		vars[name] = jinja.NewString(own(text))
	}
	vars["raise_exception"] = jinja.NewCallable("raise_exception", func(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
		message := ""
		if len(args) > 0 {
			message = printed(args[0])
		}
		switch {
		case message == refusesLaterSystem && len(later) > 0:
			content := strings.TrimFunc(later[0], isSpace)
			later = later[1:]
			return jinja.NewString(own("<|im_start|>system\n") + content + own("<|im_end|>\n")), nil
		case message == refusesNoQuery:
			if !c.noQuery {
				return jinja.Undefined(), errNoQuery
			}
			return jinja.NewString(""), nil
		case message == refusesNoMessages && c.allowEmpty:
			return jinja.NewString(""), nil
		}
		return jinja.Undefined(), &RaiseError{c.template.name, message}
	})
	vars["strftime_now"] = jinja.NewCallable("strftime_now", func(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
		format := "%Y-%m-%d"
		if len(args) > 0 {
			format = printed(args[0])
		}
		return jinja.NewString(strftime(c.now, format)), nil
	})
	vars[ownFilters["trim"]] = jinja.NewCallable("trim", trim)
	text, err = compiled.RenderValues(vars)
	if err != nil {
		return "", err
	}
	return c.restore(text), nil
}

// ownFilters replace filters of the engine that differ from Jinja's: its trim
// keeps U+001C..U+001F, which Python counts as white space.
var ownFilters = map[string]string{"trim": "ninfer_trim"}

func trim(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	if len(args) == 0 {
		return jinja.NewString(""), nil
	}
	s := printed(args[0])
	chars := jinja.None()
	if len(args) > 1 {
		chars = args[1]
	} else if c, ok := kwargs["chars"]; ok {
		chars = c
	}
	if chars.IsString() {
		return jinja.NewString(strings.Trim(s, chars.AsString())), nil
	}
	return jinja.NewString(strings.TrimFunc(s, isSpace)), nil
}

// isSpace is Python's str.isspace for one character.
func isSpace(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }

// printed is what the engine writes for a value.
func printed(v jinja.Value) string {
	switch {
	case v.IsString():
		return v.AsString()
	case v.IsUndefined(), v.IsCallable():
		return ""
	}
	return v.String()
}

// strftime formats a time by the directives of C that templates use.
func strftime(t time.Time, format string) string {
	layouts := map[byte]string{
		'Y': "2006", 'y': "06", 'm': "01", 'd': "02", 'H': "15", 'I': "03", 'M': "04", 'S': "05",
		'B': "January", 'b': "Jan", 'A': "Monday", 'a': "Mon", 'p': "PM", 'Z': "MST", 'z': "-0700",
	}
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' || i+1 == len(format) {
			b.WriteByte(format[i])
			continue
		}
		i++
		switch layout, ok := layouts[format[i]]; {
		case ok:
			b.WriteString(t.Format(layout))
		case format[i] == 'j':
			b.WriteString(fmt.Sprintf("%03d", t.YearDay()))
		case format[i] == '%':
			b.WriteByte('%')
		default:
			b.WriteString(format[i-1 : i+1])
		}
	}
	return b.String()
}
