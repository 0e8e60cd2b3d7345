package server

import (
	"math"

	"ninfer/internal/engine"
	"ninfer/internal/front"
)

// logprobs are the log-probabilities of an answer (docs/serving.md, Log-probabilities).
type logprobs struct {
	Content []tokenLogprob `json:"content"`
	Refusal *string        `json:"refusal"`
}

// logprobWish is what a request wants of them.
type logprobWish struct {
	logprobs bool
	top      int // likeliest tokens at each place
}

// wantLogprobs notes the wish, which streams cannot have.
func (r *chatReader) wantLogprobs(top int64) *failure {
	if stream, err := r.boolean("stream"); err == nil && stream != nil && *stream {
		return bad("logprobs_stream_not_supported", "logprobs", "logprobs is not supported with stream")
	}
	r.out.logprobs = logprobWish{true, int(top)}
	return nil
}

// tokenLogprob is that of a token of the output, with the likeliest ones at its place.
type tokenLogprob struct {
	tokenChance
	Forced bool          `json:"forced,omitzero"` // inserted: the model was not asked
	Top    []tokenChance `json:"top_logprobs"`
}

// tokenChance is a token and how likely the model found it. The two values differ only where a constraint excludes tokens, and this
// server has none.
type tokenChance struct {
	Token   string  `json:"token"`
	ID      int32   `json:"token_id"`
	Logprob float64 `json:"logprob"`
	Raw     float64 `json:"raw_logprob"`
	Bytes   []int   `json:"bytes"` // what the token stands for; Token has U+FFFD where that is a part of a character
}

// impossible is the log-probability of what cannot be: JSON has no infinity.
const impossible = -9999

func chance(f *front.Front, id int32, value float64) tokenChance {
	if !(value > impossible) { // not a number is none either
		value = impossible
	}
	text, _ := f.TokenText([]int32{id}) // the id is the tokenizer's
	c := tokenChance{Token: text, ID: id, Logprob: value, Raw: value, Bytes: []int{}}
	for _, b := range f.TokenBytes(id) {
		c.Bytes = append(c.Bytes, int(b))
	}
	return c
}

// logprobs returns those of the whole output, nil if they were not asked for.
func (g *generation) logprobs(out engine.Outcome) *logprobs {
	if !g.wanted.logprobs {
		return nil
	}
	f := g.server.model.Front
	l := &logprobs{Content: make([]tokenLogprob, len(out.Logprobs))}
	for i, p := range out.Logprobs {
		t := tokenLogprob{tokenChance: chance(f, p.ID, p.Value), Forced: p.Forced, Top: make([]tokenChance, len(p.Top))}
		for j, c := range p.Top {
			t.Top[j] = chance(f, c.ID, c.Value)
		}
		l.Content[i] = t
	}
	return l
}

// textLogprobs are log-probabilities in the older form of Completions, with the newer one beside it.
type textLogprobs struct {
	Tokens  []string              `json:"tokens"`
	Values  []float64             `json:"token_logprobs"`
	Top     *[]map[string]float64 `json:"top_logprobs"` // null if none were asked for
	Offsets []int                 `json:"text_offset"`  // characters of the text before the token
	Content []tokenLogprob        `json:"content"`
}

// textLogprobs returns the same for Completions. A token may stand in Top beside the likeliest ones, as OpenAI has it; of tokens with
// the same text there the likelier one counts.
func (g *generation) textLogprobs(out engine.Outcome) *textLogprobs {
	all := g.logprobs(out)
	if all == nil {
		return nil
	}
	l := &textLogprobs{Tokens: []string{}, Values: []float64{}, Offsets: []int{}, Content: all.Content}
	if g.wanted.top > 0 {
		l.Top = &[]map[string]float64{}
	}
	characters := 0
	for _, t := range all.Content {
		l.Tokens, l.Values, l.Offsets = append(l.Tokens, t.Token), append(l.Values, t.Logprob), append(l.Offsets, characters)
		for _, b := range t.Bytes {
			if b&0xc0 != 0x80 { // a character begins
				characters++
			}
		}
		if g.wanted.top == 0 {
			continue
		}
		top := map[string]float64{t.Token: t.Logprob}
		for _, c := range t.Top {
			top[c.Token] = math.Max(c.Logprob, valueOr(top, c.Token, impossible))
		}
		*l.Top = append(*l.Top, top)
	}
	return l
}

func valueOr(m map[string]float64, name string, other float64) float64 {
	if v, ok := m[name]; ok {
		return v
	}
	return other
}
