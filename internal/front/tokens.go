package front

import "fmt"

// Tokens are the ids of a text. The spellings of control tokens are those tokens, unless the text is plain.
func (f *Front) Tokens(text string, plain bool) []int32 {
	if plain {
		return f.opt.Tokenizer.EncodePlain(text)
	}
	return f.opt.Tokenizer.Encode(text)
}

// TokenText is the text of ids, with U+FFFD for what is not UTF-8.
func (f *Front) TokenText(ids []int32) (string, error) {
	for i, id := range ids {
		if n := f.opt.Tokenizer.Count(); id < 0 || int(id) >= n {
			return "", refuse(CodeInvalidValue, fmt.Sprintf("tokens[%d]", i), "token id %d is not one of 0 to %d", id, n-1)
		}
	}
	return f.opt.Tokenizer.Decode(ids), nil
}

// TokenBytes are the bytes of an id, which may be a part of a character.
func (f *Front) TokenBytes(id int32) []byte { return f.opt.Tokenizer.Bytes(id) }

// TemplateSource is the text of the chat template.
func (f *Front) TemplateSource() string { return f.opt.Template.Source() }
