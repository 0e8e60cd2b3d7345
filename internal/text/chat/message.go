package chat

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
)

// Input is everything a prompt is rendered from.
type Input struct {
	// Messages is the conversation, oldest first.
	Messages []Message
	// Tools are the declared tools, each a JSON object {type, function:{…}}; it is
	// rendered with the members, order and number spelling that it has here.
	Tools []jsontext.Value

	// AddGenerationPrompt opens the assistant's turn at the end.
	AddGenerationPrompt bool
	// Continue opens the assistant's turn with the text of the last message, which
	// must be the assistant's, for the model to go on from. Thinking must be off,
	// and the message may hold neither media nor tool calls; reasoning in it is not
	// rendered. AddGenerationPrompt is then implied.
	Continue bool

	// EnableThinking is the template's enable_thinking; nil leaves it undefined.
	EnableThinking *bool
	// ReasoningEffort is the template's reasoning_effort; empty leaves it undefined.
	ReasoningEffort string
	// PreserveThinking keeps the reasoning of finished turns. The template always
	// gets it, because the official one keeps reasoning where it is undefined.
	PreserveThinking bool
	// AddVisionID puts "Picture N: " or "Video N: " before media.
	AddVisionID bool

	// Tokens are the named special tokens of the tokenizer's configuration, such as
	// eos_token. They alone among the values given may become control tokens.
	Tokens map[string]string
	// Args are further template variables. None may have the name of one that the
	// fields above set.
	Args []Arg
}

// Arg is a template variable with a JSON value.
type Arg struct {
	Name  string
	Value jsontext.Value
}

// Message is one turn of a conversation.
type Message struct {
	Role    string // system, developer, user, assistant, tool
	Content []Part // joined without separators; nil is no content
	// Reasoning is the reasoning_content of an assistant's turn; nil leaves it undefined.
	Reasoning  *string
	ToolCalls  []ToolCall
	ToolCallID string
	Name       string
}

// Part is a piece of a message's content.
type Part struct {
	Kind PartKind
	Text string // of a Text part
}

// PartKind says what a Part is.
type PartKind uint8

// The kinds of content.
const (
	Text PartKind = iota
	Image
	Video
)

// ToolCall is a call in an assistant's turn.
type ToolCall struct {
	ID   string
	Name string
	// Arguments is a JSON object, or a JSON string holding the text of one.
	Arguments jsontext.Value
}

// TextContent is the content of a message that is just text.
func TextContent(text string) []Part { return []Part{{Kind: Text, Text: text}} }

// ParseMessages reads a JSON array of messages in the form of the OpenAI chat
// API: content as a string, null or an array of parts, reasoning_content or
// reasoning, tool_calls. Where a part's picture or film comes from is not kept.
func ParseMessages(data []byte) ([]Message, error) {
	type part struct {
		Type    string `json:"type"`
		Text    string `json:"text"`
		Refusal string `json:"refusal"`
	}
	type call struct {
		ID       string `json:"id"`
		Function struct {
			Name      string         `json:"name"`
			Arguments jsontext.Value `json:"arguments"`
		} `json:"function"`
	}
	var wire []struct {
		Role             string         `json:"role"`
		Content          jsontext.Value `json:"content"`
		ReasoningContent *string        `json:"reasoning_content"`
		Reasoning        *string        `json:"reasoning"`
		ToolCalls        []call         `json:"tool_calls"`
		ToolCallID       string         `json:"tool_call_id"`
		Name             string         `json:"name"`
	}
	if err := json.Unmarshal(data, &wire); err != nil {
		return nil, fmt.Errorf("messages: %w", err)
	}
	messages := make([]Message, len(wire))
	for i, w := range wire {
		m := Message{Role: w.Role, Reasoning: w.ReasoningContent, ToolCallID: w.ToolCallID, Name: w.Name}
		if m.Reasoning == nil {
			m.Reasoning = w.Reasoning
		}
		switch w.Content.Kind() {
		case '"':
			var text string
			if err := json.Unmarshal(w.Content, &text); err != nil {
				return nil, fmt.Errorf("message %d: content: %w", i, err)
			}
			m.Content = TextContent(text)
		case '[':
			var parts []part
			if err := json.Unmarshal(w.Content, &parts); err != nil {
				return nil, fmt.Errorf("message %d: content: %w", i, err)
			}
			m.Content = []Part{}
			for _, p := range parts {
				switch p.Type {
				case "text":
					m.Content = append(m.Content, Part{Kind: Text, Text: p.Text})
				case "refusal":
					m.Content = append(m.Content, Part{Kind: Text, Text: p.Refusal})
				case "image", "image_url":
					m.Content = append(m.Content, Part{Kind: Image})
				case "video", "video_url":
					m.Content = append(m.Content, Part{Kind: Video})
				default:
					return nil, fmt.Errorf("message %d: content part type %q is not supported", i, p.Type)
				}
			}
		case 'n', 0:
		default:
			return nil, fmt.Errorf("message %d: content must be a string, null or an array of parts", i)
		}
		for _, c := range w.ToolCalls {
			m.ToolCalls = append(m.ToolCalls, ToolCall{ID: c.ID, Name: c.Function.Name, Arguments: c.Function.Arguments})
		}
		messages[i] = m
	}
	return messages, nil
}
