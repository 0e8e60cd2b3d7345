package token

import (
	"slices"
	"strings"
)

// Tokenizer maps between text and ids. Load makes one; the zero value is empty.
type Tokenizer struct {
	count int
	ids   map[string]int32 // vocabulary in its byte-level spelling, without added tokens
	bytes []byte           // every token's bytes, end to end
	ends  []int32          // ends[id] is where the bytes of id end; they start where id-1 ends

	alphabet [256]int32        // the one-byte token of each byte
	merges   map[uint64]uint64 // left<<32|right to rank<<32|result
	whole    bool              // a piece that is a token is taken without merging (ignore_merges)
	marks    bool              // the split pattern counts combining marks as letters

	added   map[string]int32
	special []int32        // ids of added tokens with the special flag, ascending
	byStart [256][]control // added tokens by first byte, longest first
}

// control is an added token as the scanner for control spellings needs it.
type control struct {
	spelling string
	id       int32
}

// Segment is a run of text of one origin. In a Plain one no byte can be part of
// a control token.
type Segment struct {
	Text  string
	Plain bool
}

// Count is the number of ids: the highest id of both files plus one. The model's
// output head may have more rows; those are padding.
func (t *Tokenizer) Count() int { return t.count }

// ID returns the id of a spelling: an added token as written, such as </think>,
// or a vocabulary entry in the byte-level spelling of tokenizer.json.
func (t *Tokenizer) ID(spelling string) (int32, bool) {
	if id, ok := t.added[spelling]; ok {
		return id, true
	}
	id, ok := t.ids[spelling]
	return id, ok
}

// Bytes returns the bytes that id stands for: for an added token its spelling,
// for any other the decoded bytes, which need not be whole characters. It is
// empty for an id that neither file names. The slice must not be changed.
func (t *Tokenizer) Bytes(id int32) []byte {
	if id < 0 || int(id) >= t.count {
		return nil
	}
	start := int32(0)
	if id > 0 {
		start = t.ends[id-1]
	}
	return t.bytes[start:t.ends[id]:t.ends[id]]
}

// SpecialIDs returns the ids of added tokens flagged special in either file, ascending.
func (t *Tokenizer) SpecialIDs() []int32 { return slices.Clone(t.special) }

// Controls returns the spellings of all added tokens, special or not, in id order.
func (t *Tokenizer) Controls() []string {
	out := make([]string, 0, len(t.added))
	for s := range t.added {
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b string) int { return int(t.added[a]) - int(t.added[b]) })
	return out
}

// Encode returns the ids of text, reading control spellings as control tokens.
// Of several that fit, the earliest wins, then the longest. Nothing is put
// before or after. Invalid UTF-8 is read as Decode would show it.
func (t *Tokenizer) Encode(text string) []int32 {
	return t.EncodeSegments([]Segment{{Text: text}})
}

// EncodePlain returns the ids of text with every control spelling in it as
// ordinary text.
func (t *Tokenizer) EncodePlain(text string) []int32 {
	return t.ordinary(nil, text)
}

// EncodeSegments returns the ids of the joined text of segments. A control
// spelling counts only where no byte of it lies in a plain segment. Everything
// between two control tokens is normalised, split and merged as one text, across
// the borders of segments, so that borders leave no trace.
func (t *Tokenizer) EncodeSegments(segments []Segment) []int32 {
	var size int
	for _, s := range segments {
		size += len(s.Text)
	}
	var text strings.Builder
	text.Grow(size)
	var plain []span
	for _, s := range segments {
		start := text.Len()
		text.WriteString(s.Text)
		if s.Plain && len(s.Text) > 0 {
			plain = append(plain, span{start, text.Len()})
		}
	}
	s := text.String()
	dst := make([]int32, 0, len(s)/3+8)
	from := 0
	for i := 0; i < len(s); {
		c, ok := t.controlAt(s[i:], i, &plain)
		if !ok {
			i++
			continue
		}
		dst = t.ordinary(dst, s[from:i])
		dst = append(dst, c.id)
		i += len(c.spelling)
		from = i
	}
	return t.ordinary(dst, s[from:])
}

// span is a half-open range of bytes.
type span struct{ start, end int }

// controlAt finds the longest control spelling at the start of rest, which begins
// at byte pos of the whole text, that touches none of the plain spans. It drops
// spans that lie before pos.
func (t *Tokenizer) controlAt(rest string, pos int, plain *[]span) (control, bool) {
	candidates := t.byStart[rest[0]]
	if len(candidates) == 0 {
		return control{}, false
	}
	for len(*plain) > 0 && (*plain)[0].end <= pos {
		*plain = (*plain)[1:]
	}
	for _, c := range candidates {
		if !strings.HasPrefix(rest, c.spelling) {
			continue
		}
		if len(*plain) > 0 && (*plain)[0].start < pos+len(c.spelling) {
			continue
		}
		return c, true
	}
	return control{}, false
}

// ordinary appends the ids of text that holds no control token.
func (t *Tokenizer) ordinary(dst []int32, text string) []int32 {
	if text == "" {
		return dst
	}
	s := nfc(valid(text))
	for len(s) > 0 {
		n := nextPiece(s, t.marks)
		dst = t.merge(dst, s[:n])
		s = s[n:]
	}
	return dst
}

// Decode returns the text of ids, control tokens as their spellings. Bytes that
// are not UTF-8 become U+FFFD, one for each maximal part that could have started
// a character; ids outside the vocabulary give nothing.
func (t *Tokenizer) Decode(ids []int32) string {
	var b []byte
	for _, id := range ids {
		b = append(b, t.Bytes(id)...)
	}
	return valid(string(b))
}
