package token

import (
	"bytes"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// maxIDs bounds the ids a file may name, so that a damaged one cannot ask for
// memory without end. The family's vocabulary has 248,077.
const maxIDs = 1 << 24

// Load reads a tokenizer from the contents of tokenizer.json and
// tokenizer_config.json. The added tokens of both are joined; a token may stand
// in both, with the same id. It fails on two spellings for one id, two ids for
// one spelling, added tokens that are to be matched with stripping, as single
// words or after normalisation, and on any step of the reference tokenizer that
// this package does not have.
func Load(tokenizerJSON, tokenizerConfigJSON []byte) (*Tokenizer, error) {
	l := loader{vocab: map[string]int32{}, added: map[int32]addedToken{}}
	if err := l.readTokenizer(tokenizerJSON); err != nil {
		return nil, fmt.Errorf("tokenizer.json: %w", err)
	}
	if err := l.readConfig(tokenizerConfigJSON); err != nil {
		return nil, fmt.Errorf("tokenizer_config.json: %w", err)
	}
	t, err := l.build()
	if err != nil {
		return nil, fmt.Errorf("tokenizer files: %w", err)
	}
	return t, nil
}

// loader gathers what the files say before it is made into tables.
type loader struct {
	vocab  map[string]int32
	merges [][2]string
	added  map[int32]addedToken
	marks  bool
	whole  bool
}

// addedToken is an entry of added_tokens; in added_tokens_decoder the id is the key.
type addedToken struct {
	ID         int32  `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

func (a addedToken) check() error {
	switch {
	case a.Content == "":
		return fmt.Errorf("added token %d has no content", a.ID)
	case a.ID < 0 || a.ID >= maxIDs:
		return fmt.Errorf("added token %q has id %d, outside 0..%d", a.Content, a.ID, maxIDs-1)
	case a.LStrip || a.RStrip || a.SingleWord || a.Normalized:
		return fmt.Errorf("added token %q has a strip, single_word or normalized flag, which is not supported", a.Content)
	}
	return nil
}

func (l *loader) readTokenizer(data []byte) error {
	dec := jsontext.NewDecoder(bytes.NewReader(data), jsontext.AllowDuplicateNames(true))
	seen := map[string]bool{}
	err := object(dec, func(name string) error {
		if seen[name] {
			return fmt.Errorf("member %q stands twice", name)
		}
		seen[name] = true
		if name == "model" {
			return l.readModel(dec)
		}
		raw, err := dec.ReadValue()
		if err != nil {
			return err
		}
		switch name {
		case "added_tokens":
			err = l.readAdded(raw)
		case "normalizer":
			err = checkNormalizer(raw)
		case "pre_tokenizer":
			err = l.checkPreTokenizer(raw)
		case "decoder":
			err = checkDecoder(raw)
		}
		// post_processor, truncation and padding act only on request in the
		// reference; nothing here requests them.
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if _, err := dec.ReadToken(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("at byte %d: text after the end of the object", dec.InputOffset())
	}
	for _, name := range []string{"model", "normalizer", "pre_tokenizer", "decoder"} {
		if !seen[name] {
			return fmt.Errorf("member %q is missing", name)
		}
	}
	return nil
}

// object reads an object, calling member with each name; member reads the value.
func object(dec *jsontext.Decoder, member func(name string) error) error {
	if kind := dec.PeekKind(); kind != '{' {
		if _, err := dec.ReadToken(); err != nil {
			return err
		}
		return fmt.Errorf("at byte %d: expected an object", dec.InputOffset())
	}
	if _, err := dec.ReadToken(); err != nil {
		return err
	}
	for dec.PeekKind() != '}' {
		name, err := dec.ReadToken()
		if err != nil {
			return err
		}
		if err := member(name.String()); err != nil {
			return err
		}
	}
	_, err := dec.ReadToken()
	return err
}

func (l *loader) readModel(dec *jsontext.Decoder) error {
	var kind string
	seen := map[string]bool{}
	err := object(dec, func(name string) error {
		if seen[name] {
			return fmt.Errorf("model: member %q stands twice", name)
		}
		seen[name] = true
		switch name {
		case "vocab":
			return l.readVocab(dec)
		case "merges":
			return l.readMerges(dec)
		}
		raw, err := dec.ReadValue()
		if err != nil {
			return err
		}
		value := string(raw)
		switch name {
		case "type":
			kind = value
		case "ignore_merges":
			l.whole = value == "true"
		case "dropout", "unk_token":
			if value != "null" {
				return fmt.Errorf("model: %s %s is not supported", name, value)
			}
		case "continuing_subword_prefix", "end_of_word_suffix":
			if value != "null" && value != `""` {
				return fmt.Errorf("model: %s %s is not supported", name, value)
			}
		case "byte_fallback":
			if value != "false" {
				return fmt.Errorf("model: byte_fallback is not supported")
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if kind != `"BPE"` {
		return fmt.Errorf("model: type is %s, need \"BPE\"", kind)
	}
	if !seen["vocab"] || !seen["merges"] {
		return fmt.Errorf("model: vocab or merges is missing")
	}
	return nil
}

func (l *loader) readVocab(dec *jsontext.Decoder) error {
	return object(dec, func(spelling string) error {
		tok, err := dec.ReadToken()
		if err != nil {
			return err
		}
		if tok.Kind() != '0' {
			return fmt.Errorf("vocab: id of %q is not a number", spelling)
		}
		id, err := strconv.ParseInt(tok.String(), 10, 32)
		if err != nil || id < 0 || id >= maxIDs {
			return fmt.Errorf("vocab: id %s of %q is not within 0..%d", tok, spelling, maxIDs-1)
		}
		if _, ok := l.vocab[spelling]; ok {
			return fmt.Errorf("vocab: %q stands twice", spelling)
		}
		l.vocab[spelling] = int32(id)
		return nil
	})
}

// readMerges takes both forms of the file: ["a","b"] and "a b".
func (l *loader) readMerges(dec *jsontext.Decoder) error {
	if dec.PeekKind() != '[' {
		return fmt.Errorf("merges: expected an array")
	}
	if _, err := dec.ReadToken(); err != nil {
		return err
	}
	for dec.PeekKind() != ']' {
		tok, err := dec.ReadToken()
		if err != nil {
			return err
		}
		var parts []string
		switch tok.Kind() {
		case '"':
			parts = strings.Split(tok.String(), " ")
		case '[':
			for dec.PeekKind() == '"' && len(parts) < 3 {
				part, err := dec.ReadToken()
				if err != nil {
					return err
				}
				parts = append(parts, part.String())
			}
			if end, err := dec.ReadToken(); err != nil {
				return err
			} else if end.Kind() != ']' {
				parts = nil
			}
		}
		if len(parts) != 2 {
			return fmt.Errorf("merges: entry %d is not a pair", len(l.merges))
		}
		l.merges = append(l.merges, [2]string(parts))
	}
	_, err := dec.ReadToken()
	return err
}

func (l *loader) readAdded(raw jsontext.Value) error {
	var entries []addedToken
	if err := json.Unmarshal(raw, &entries); err != nil {
		return err
	}
	for _, a := range entries {
		if err := a.check(); err != nil {
			return err
		}
		if _, ok := l.added[a.ID]; ok {
			return fmt.Errorf("two added tokens have id %d", a.ID)
		}
		l.added[a.ID] = a
	}
	return nil
}

func (l *loader) readConfig(data []byte) error {
	var config struct {
		Added          map[string]addedToken `json:"added_tokens_decoder"`
		AddPrefixSpace bool                  `json:"add_prefix_space"`
	}
	if err := json.Unmarshal(data, &config); err != nil {
		return err
	}
	if config.AddPrefixSpace {
		return fmt.Errorf("add_prefix_space is not supported")
	}
	for key, a := range config.Added {
		id, err := strconv.ParseInt(key, 10, 32)
		if err != nil || strconv.FormatInt(id, 10) != key {
			return fmt.Errorf("added_tokens_decoder: key %q is not an id", key)
		}
		a.ID = int32(id)
		if err := a.check(); err != nil {
			return err
		}
		if old, ok := l.added[a.ID]; ok {
			if old.Content != a.Content {
				return fmt.Errorf("added token %d is %q here and %q in tokenizer.json", id, a.Content, old.Content)
			}
			a.Special = a.Special || old.Special
		}
		l.added[a.ID] = a
	}
	return nil
}

func checkNormalizer(raw jsontext.Value) error {
	var n struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(raw, &n); err != nil {
		return err
	}
	if n.Type != "NFC" {
		return fmt.Errorf("is %q, need \"NFC\"", n.Type)
	}
	return nil
}

func (l *loader) checkPreTokenizer(raw jsontext.Value) error {
	type step struct {
		Type    string `json:"type"`
		Pattern struct {
			Regex string
		} `json:"pattern"`
		Behavior       string `json:"behavior"`
		Invert         bool   `json:"invert"`
		AddPrefixSpace bool   `json:"add_prefix_space"`
		UseRegex       *bool  `json:"use_regex"`
	}
	var p struct {
		Type  string `json:"type"`
		Steps []step `json:"pretokenizers"`
	}
	if err := json.Unmarshal(raw, &p); err != nil {
		return err
	}
	if p.Type != "Sequence" || len(p.Steps) != 2 || p.Steps[0].Type != "Split" || p.Steps[1].Type != "ByteLevel" {
		return fmt.Errorf("need a sequence of Split and ByteLevel")
	}
	split, level := p.Steps[0], p.Steps[1]
	if split.Behavior != "Isolated" || split.Invert {
		return fmt.Errorf("split must be isolated and not inverted")
	}
	switch split.Pattern.Regex {
	case patternMarks:
		l.marks = true
	case patternPlain:
	default:
		return fmt.Errorf("split pattern %q is not one of this model family", split.Pattern.Regex)
	}
	if level.AddPrefixSpace || level.UseRegex == nil || *level.UseRegex {
		return fmt.Errorf("byte level must have add_prefix_space and use_regex false")
	}
	return nil
}

func checkDecoder(raw jsontext.Value) error {
	var d struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(raw, &d); err != nil {
		return err
	}
	if d.Type != "ByteLevel" {
		return fmt.Errorf("is %q, need \"ByteLevel\"", d.Type)
	}
	return nil
}

// build makes the tables.
func (l *loader) build() (*Tokenizer, error) {
	t := &Tokenizer{ids: l.vocab, marks: l.marks, whole: l.whole, added: map[string]int32{}}
	for _, id := range l.vocab {
		t.count = max(t.count, int(id)+1)
	}
	for id := range l.added {
		t.count = max(t.count, int(id)+1)
	}
	spellings := make([]string, t.count)
	for s, id := range l.vocab {
		if s == "" {
			return nil, fmt.Errorf("vocab: id %d has no spelling", id)
		}
		if spellings[id] != "" {
			return nil, fmt.Errorf("vocab: %q and %q have the same id %d", spellings[id], s, id)
		}
		spellings[id] = s
	}
	for b := range t.alphabet {
		id, ok := l.vocab[string(runeOf[b])]
		if !ok {
			return nil, fmt.Errorf("vocab: no token for byte 0x%02X (%q)", b, runeOf[b])
		}
		t.alphabet[b] = id
	}
	for _, id := range slices.Sorted(maps.Keys(l.added)) {
		a := l.added[id]
		if other, ok := t.added[a.Content]; ok {
			return nil, fmt.Errorf("added token %q has ids %d and %d", a.Content, other, id)
		}
		if other, ok := l.vocab[a.Content]; ok && other != id {
			return nil, fmt.Errorf("added token %q has id %d, its vocab entry %d", a.Content, id, other)
		}
		if s := spellings[id]; s != "" && s != a.Content {
			return nil, fmt.Errorf("added token %q has the id %d of vocab entry %q", a.Content, id, s)
		}
		t.added[a.Content] = id
		if a.Special {
			t.special = append(t.special, id)
		}
		t.byStart[a.Content[0]] = append(t.byStart[a.Content[0]], control{a.Content, id})
	}
	for i := range t.byStart {
		slices.SortFunc(t.byStart[i], func(a, b control) int { return len(b.spelling) - len(a.spelling) })
	}
	t.ends = make([]int32, t.count)
	for id, s := range spellings {
		if a, ok := l.added[int32(id)]; ok {
			t.bytes = append(t.bytes, a.Content...)
		} else {
			t.bytes = appendSpelled(t.bytes, s)
		}
		t.ends[id] = int32(len(t.bytes))
	}
	return t, l.buildMerges(t)
}

func (l *loader) buildMerges(t *Tokenizer) error {
	t.merges = make(map[uint64]uint64, len(l.merges))
	for rank, m := range l.merges {
		left, ok1 := l.vocab[m[0]]
		right, ok2 := l.vocab[m[1]]
		result, ok3 := l.vocab[m[0]+m[1]]
		if !ok1 || !ok2 || !ok3 {
			return fmt.Errorf("merges: entry %d (%q, %q) names a token that is not in vocab", rank, m[0], m[1])
		}
		t.merges[uint64(uint32(left))<<32|uint64(uint32(right))] = uint64(rank)<<32 | uint64(uint32(result))
	}
	return nil
}
