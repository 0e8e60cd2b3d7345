package chat

import (
	"encoding/json/jsontext"
	"errors"
	"fmt"
	"slices"
)

// Efforts are the values of reasoning_effort that exist for any model. The value
// none is not among them: it turns thinking off and no template sees it.
var Efforts = []string{"minimal", "low", "medium", "high", "xhigh", "max"}

// EffortSupport says what a template makes of reasoning_effort.
type EffortSupport struct {
	// Accepted are the values of Efforts that the template knows, in that order. It
	// is empty for a template that ignores effort.
	Accepted []string
	// Default is the accepted value that renders as none given does, or empty.
	Default string
}

// ProbeEfforts renders one user turn with every effort value to learn which the
// template accepts. A value counts if it renders and its prompt is not that of a
// word no template can know.
func (t *Template) ProbeEfforts() (EffortSupport, error) {
	thinking := true
	render := func(effort string) (string, error) {
		p, err := t.Render(Input{
			Messages:            []Message{{Role: "user", Content: TextContent("x")}},
			AddGenerationPrompt: true,
			EnableThinking:      &thinking,
			ReasoningEffort:     effort,
		})
		return p.Text(), err
	}
	absent, err := render("")
	if err != nil {
		return EffortSupport{}, err
	}
	unknown, unknownErr := render("no-such-effort")
	var s EffortSupport
	for _, effort := range Efforts {
		text, err := render(effort)
		if err != nil || unknownErr == nil && text == unknown {
			continue
		}
		s.Accepted = append(s.Accepted, effort)
		if text == absent && s.Default == "" {
			s.Default = effort
		}
	}
	return s, nil
}

// Coder is what Check needs of a tokenizer; *token.Tokenizer has it.
type Coder interface {
	Encoder
	Encode(text string) []int32
}

// Check renders conversations without any control spelling in them and fails if
// a control token of the prompt is not seen to come from the template. That
// happens to templates that put a spelling together from parts; the prompts of
// such a template would be wrong without a sign of it. It is meant for the start
// of the program.
func (t *Template) Check(tok Coder) error {
	on, off := true, false
	user := Message{Role: "user", Content: TextContent("question")}
	reasoning := "because"
	call := Message{Role: "assistant", Reasoning: &reasoning, ToolCalls: []ToolCall{{Name: "f", Arguments: jsontext.Value(`{"x":1,"y":"z"}`)}}}
	tool := jsontext.Value(`{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"x":{"type":"integer"}}}}}`)
	samples := []Input{
		{Messages: []Message{user}, AddGenerationPrompt: true},
		{Messages: []Message{user}, AddGenerationPrompt: true, EnableThinking: &on},
		{Messages: []Message{user}, AddGenerationPrompt: true, EnableThinking: &off},
		{Messages: []Message{{Role: "system", Content: TextContent("rules")}, user, {Role: "assistant", Content: TextContent("answer")}, user}},
		{Messages: []Message{user, call, {Role: "tool", Content: TextContent("result")}}, Tools: []jsontext.Value{tool}, EnableThinking: &on, PreserveThinking: true},
		{Messages: []Message{{Role: "user", Content: []Part{{Kind: Image}, {Kind: Video}, {Kind: Text, Text: "x"}}}}, AddGenerationPrompt: true},
	}
	rendered := false
	for _, in := range samples {
		p, err := t.Render(in)
		var raised *RaiseError
		if errors.As(err, &raised) {
			continue // a template need not know tools or media
		}
		if err != nil {
			return err
		}
		rendered = true
		if !slices.Equal(p.Encode(tok), tok.Encode(p.Text())) {
			return fmt.Errorf("chat template %s: control tokens in its output cannot be told from message text; write each as one literal", t.name)
		}
	}
	if !rendered {
		return fmt.Errorf("chat template %s: refuses every conversation", t.name)
	}
	return nil
}
