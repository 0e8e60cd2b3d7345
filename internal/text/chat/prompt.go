package chat

import (
	"strings"
	"unicode/utf8"

	"ninfer/internal/text/token"
)

// Prompt is a rendered conversation. It knows which of its text the template
// wrote: only there can control tokens be.
type Prompt struct {
	text  string
	plain []bool // by segment
	ends  []int  // where each segment ends
}

// Encoder is what Encode needs of a tokenizer; *token.Tokenizer has it.
type Encoder interface {
	EncodeSegments([]token.Segment) []int32
}

// newPrompt takes the marks out of a marked text.
func newPrompt(marked string, mark rune) Prompt {
	var p Prompt
	var text strings.Builder
	text.Grow(len(marked))
	suffix := string(mark)
	for i := 0; i < len(marked); {
		_, n := utf8.DecodeRuneInString(marked[i:])
		plain := !strings.HasPrefix(marked[i+n:], suffix)
		text.WriteString(marked[i : i+n])
		p.grow(text.Len(), plain)
		i += n
		if !plain {
			i += len(suffix)
		}
	}
	p.text = text.String()
	return p
}

// grow says that the text up to end is of the given kind.
func (p *Prompt) grow(end int, plain bool) {
	if n := len(p.ends); n > 0 && p.plain[n-1] == plain {
		p.ends[n-1] = end
		return
	}
	p.ends, p.plain = append(p.ends, end), append(p.plain, plain)
}

func (p *Prompt) appendPlain(text string) {
	if text == "" {
		return
	}
	p.text += text
	p.grow(len(p.text), true)
}

// Text is the prompt as the reference would show it. It does not say which
// control spellings in it are control tokens; do not encode it.
func (p Prompt) Text() string { return p.text }

// Segments is the prompt in runs that may hold control tokens and runs that may not.
func (p Prompt) Segments() []token.Segment {
	out := make([]token.Segment, len(p.ends))
	start := 0
	for i, end := range p.ends {
		out[i] = token.Segment{Text: p.text[start:end], Plain: p.plain[i]}
		start = end
	}
	return out
}

// Encode returns the prompt's ids. Where no message holds the spelling of a control
// token they are those of the whole text encoded at once.
func (p Prompt) Encode(tok Encoder) []int32 { return tok.EncodeSegments(p.Segments()) }
