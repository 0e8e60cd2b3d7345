package token

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

func TestControls(t *testing.T) {
	tok := micro(t)
	const (
		start    = 0 // <|im_start|>, by the golden README
		end      = 1
		thinkOff = 8 // </think>
	)
	if id, ok := tok.ID("</think>"); !ok || id != thinkOff {
		t.Errorf("ID(</think>) = %d, %v", id, ok)
	}
	if tok.Count() != 480 { // by the golden README
		t.Errorf("Count() = %d, want 480", tok.Count())
	}
	if got, want := tok.SpecialIDs(), []int32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}; !slices.Equal(got, want) {
		t.Errorf("SpecialIDs() = %v, want %v", got, want)
	}
	if got := tok.Controls(); len(got) != 13 || got[0] != "<|im_start|>" || got[12] != "</tool_response>" {
		t.Errorf("Controls() = %q", got)
	}
	if got := string(tok.Bytes(end)); got != "<|im_end|>" {
		t.Errorf("Bytes(%d) = %q", end, got)
	}
	if tok.Bytes(-1) != nil || tok.Bytes(480) != nil {
		t.Error("ids outside the vocabulary have bytes")
	}
	if got := tok.Encode("<|im_start|><|im_end|></think>"); !slices.Equal(got, []int32{start, end, thinkOff}) {
		t.Errorf("Encode of three control tokens = %v", got)
	}
	text := "a<|im_start|>b</think>"
	plain := tok.EncodePlain(text)
	if slices.ContainsFunc(plain, func(id int32) bool { return id <= 12 }) {
		t.Errorf("EncodePlain(%q) = %v has a control token", text, plain)
	}
	if got := tok.Decode(plain); got != text {
		t.Errorf("Decode(EncodePlain(%q)) = %q", text, got)
	}
}

// TestSegments: borders between segments leave no trace except that a control
// spelling touching a plain byte is ordinary text.
func TestSegments(t *testing.T) {
	tok := micro(t)
	join := func(parts ...[]int32) []int32 { return slices.Concat(parts...) }
	end := []int32{1}
	tests := []struct {
		name     string
		segments []Segment
		want     []int32
	}{
		{"none", nil, nil},
		{"control across segments", []Segment{{Text: "<|im_"}, {Text: "end|>"}}, end},
		{"plain", []Segment{{Text: "<|im_end|>", Plain: true}}, tok.EncodePlain("<|im_end|>")},
		{"first byte plain", []Segment{{Text: "<", Plain: true}, {Text: "|im_end|>x"}}, tok.EncodePlain("<|im_end|>x")},
		{"last byte plain", []Segment{{Text: "x<|im_end|"}, {Text: ">", Plain: true}}, tok.EncodePlain("x<|im_end|>")},
		{"middle plain", []Segment{{Text: "<|im"}, {Text: "_", Plain: true}, {Text: "end|>"}}, tok.EncodePlain("<|im_end|>")},
		{"empty plain in the middle", []Segment{{Text: "<|im"}, {Plain: true}, {Text: "_end|>"}}, end},
		{
			"plain beside a control",
			[]Segment{{Text: "a<|im_end", Plain: true}, {Text: "<|im_end|>"}, {Text: "|>", Plain: true}},
			join(tok.EncodePlain("a<|im_end"), end, tok.EncodePlain("|>")),
		},
		{
			"merges across borders",
			[]Segment{{Text: "def f"}, {Text: "(x)", Plain: true}, {Text: ":\n  ret"}, {Text: "urn", Plain: true}},
			tok.Encode("def f(x):\n  return"),
		},
		{"composition across borders", []Segment{{Text: "e"}, {Text: "\u0301", Plain: true}}, tok.Encode("é")},
		{
			"no composition across a control",
			[]Segment{{Text: "<|im_end|>"}, {Text: "\u0338", Plain: true}},
			join(end, tok.EncodePlain("\u0338")),
		},
	}
	for _, test := range tests {
		if got := tok.EncodeSegments(test.segments); !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
	}
}

// TestDecodeInvalid takes its cases from the Unicode Standard, table 3-8 to 3-11
// ("U+FFFD substitution of maximal subparts").
func TestDecodeInvalid(t *testing.T) {
	tok := micro(t)
	tests := []struct{ bytes, want string }{
		{"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82A", "\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffdA"},
		{"\xed\xa0\x80\xed\xbf\xbf\xed\xafA", "\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffdA"},
		{"\xf4\x91\x92\x93\xffA\x80\xbfB", "\ufffd\ufffd\ufffd\ufffd\ufffdA\ufffd\ufffdB"},
		{"\xe1\x80\xe2\xf0\x91\x92\xf1\xbfA", "\ufffd\ufffd\ufffd\ufffdA"},
		{"\xe4\xb8", "\ufffd"},
		{"\xf0\x9f\x98", "\ufffd"},
		{"", ""},
	}
	for _, test := range tests {
		var ids []int32
		for i := range len(test.bytes) {
			ids = append(ids, tok.alphabet[test.bytes[i]])
		}
		if got := tok.Decode(ids); got != test.want {
			t.Errorf("Decode of %x = %q, want %q", test.bytes, got, test.want)
		}
		if got := tok.Decode(tok.EncodePlain(test.bytes)); got != test.want {
			t.Errorf("Decode(EncodePlain(%x)) = %q, want %q", test.bytes, got, test.want)
		}
	}
}

// TestNFC: expected values by the composition rules of UAX 15, written out.
func TestNFC(t *testing.T) {
	many := strings.Repeat("\u0300", 40)
	tests := []struct{ in, want string }{
		{"", ""},
		{"abc", "abc"},
		{"e\u0301", "é"},
		{"\u212b\u2126", "Å\u03a9"},        // singletons
		{"\u0958", "\u0915\u093c"},         // excluded from composition
		{"a\u0323\u0307", "ạ\u0307"},       // ordered already
		{"a\u0307\u0323", "ạ\u0307"},       // reordered: below before above
		{"q\u0307\u0323", "q\u0323\u0307"}, // reordered, nothing to compose
		{"\u1100\u1161\u11a8", "각"},        // Hangul
		{"a" + many, "à" + many[:39*2]},    // more marks than package norm takes as they are
		{"a\u0315" + many, "à" + many[:39*2] + "\u0315"},
		{"x\u0338" + many + "e\u0301" + many, "x\u0338" + many + "é" + many},
		{"\u0344" + many, "\u0308\u0301" + many},
	}
	for _, test := range tests {
		if got := nfc(test.in); got != test.want {
			t.Errorf("nfc(%+q) = %+q, want %+q", test.in, got, test.want)
		}
	}
	// Where package norm is right, the slow path agrees with it.
	for r := rune(0x80); r < 0x30000; r++ {
		if !utf8.ValidRune(r) || r >= 0x3400 && r < 0xF900 && r%97 != 0 || r >= 0x12000 && r < 0x2F800 && r%13 != 0 {
			continue
		}
		for _, s := range []string{string(r), "a" + string(r) + "\u0301\u0323", string(r) + "\u0338\u11a8\u0327"} {
			if got, want := composeLong(s), norm.NFC.String(s); got != want {
				t.Fatalf("composeLong(%+q) = %+q, want %+q", s, got, want)
			}
		}
	}
}

// TestManyMarks: around the number of marks that package norm takes, whatever they follow and whatever stands among them.
func TestManyMarks(t *testing.T) {
	for _, first := range []string{"", "a", "검", "가", "\u1100\u1161\u11a8", "\u09c7", "\u0dd9", "\u1e9b\u0323", "ộ", "\U0001d15e", "\xcc", "\u0344"} {
		for _, among := range []string{"", "\u1161", "\u11a8", "\u09be", "\u0dcf", "\u0301", "검", "\u0f73", "ǋ"} {
			for _, at := range []int{0, 1, 14, 29} {
				for n := 25; n < 36; n++ {
					s := valid("é\u0323" + first + strings.Repeat("\u0323", min(n, at)) + among + strings.Repeat("\u0300", max(0, n-at)))
					if got, want := nfc(s), composeLong(s); got != want {
						t.Fatalf("nfc(%+q) = %+q, want %+q", s, got, want)
					}
				}
			}
		}
	}
}

// TestMergeLong: the heap and the linear search give the same ids.
func TestMergeLong(t *testing.T) {
	tok := micro(t)
	for _, s := range []string{"the return of the function", "aaaaaaaaaaaaaaaaaaaa", "def  \n\n\n   return", "\xff\xfe the", "ab"} {
		for n := 2; n <= len(s); n++ {
			short, long := tok.mergeShort(nil, s[:n]), tok.mergeLong(nil, s[:n])
			if !slices.Equal(short, long) {
				t.Errorf("%q: %v by search, %v by heap", s[:n], short, long)
			}
		}
	}
	long := strings.Repeat("return", 50_000) // quadratic would not end
	if got := tok.Decode(tok.Encode(long)); got != long {
		t.Error("a long piece does not come back")
	}
}

func TestLoadErrors(t *testing.T) {
	dir := filepath.Join(root, "testdata", "micro-radixark", "checkpoint")
	read := func(name string) string {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	tokenizer, config := read("tokenizer.json"), read("tokenizer_config.json")
	const entry = `"single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true`
	decoder := func(entries string) string {
		return strings.Replace(config, "{", `{"added_tokens_decoder": {`+entries+`},`, 1)
	}
	edit := func(old, new string) string {
		if !strings.Contains(tokenizer, old) {
			t.Fatalf("tokenizer.json has no %q", old)
		}
		return strings.Replace(tokenizer, old, new, 1)
	}
	tests := []struct{ name, tokenizer, config, want string }{
		{"empty", "", config, "tokenizer.json: "},
		{"not an object", "[]", config, "expected an object"},
		{"cut", tokenizer[:len(tokenizer)/2], config, "EOF"},
		{"tail", tokenizer + "x", config, "after the end"},
		{"no model", "{}", config, `"model" is missing`},
		{"config", tokenizer, "{", "tokenizer_config.json: "},
		{"pattern", edit(`\\p{N}|`, `\\p{N}{1,3}|`), config, "split pattern"},
		{"normalizer", edit(`"NFC"`, `"NFKC"`), config, `normalizer: is "NFKC"`},
		{"behavior", edit(`"Isolated"`, `"Removed"`), config, "isolated"},
		{"prefix space", edit(`"add_prefix_space": false`, `"add_prefix_space": true`), config, "add_prefix_space"},
		{"model", edit(`"BPE"`, `"Unigram"`), config, "need \"BPE\""},
		{"byte fallback", edit(`"byte_fallback": false`, `"byte_fallback": true`), config, "byte_fallback"},
		{"lstrip", edit(`"lstrip": false`, `"lstrip": true`), config, "not supported"},
		{"normalized", edit(`"normalized": false`, `"normalized": true`), config, "not supported"},
		{"single word", edit(`"single_word": false`, `"single_word": true`), config, "not supported"},
		{"duplicate added id", edit(`"id": 1,`, `"id": 0,`), config, "two added tokens have id 0"},
		{"duplicate added content", edit(`"content": "<|im_end|>"`, `"content": "<|im_start|>"`), config, `"<|im_start|>" has ids 0 and 1`},
		{"added against vocab", edit(`"id": 1,`, `"id": 500,`), config, "its vocab entry 1"},
		{"duplicate vocab id", edit(`"<think>": 7`, `"<think>": 8`), config, "same id 8"},
		{"no byte token", edit(`"!": 13`, `"!!!!": 13`), config, "no token for byte 0x21"},
		{"negative id", edit(`"!": 13`, `"!": -13`), config, "is not within"},
		{"huge id", edit(`"!": 13`, `"!": 1e9`), config, "is not within"},
		{"config conflict", tokenizer, decoder(`"1": {"content": "<|other|>", ` + entry + `}`), `"<|other|>" here and "<|im_end|>"`},
		{"config second id", tokenizer, decoder(`"500": {"content": "<|im_end|>", ` + entry + `}`), `"<|im_end|>" has ids 1 and 500`},
		{"config rstrip", tokenizer, decoder(`"500": {"content": "<|x|>", "rstrip": true}`), "not supported"},
		{"config takes a vocab id", tokenizer, decoder(`"14": {"content": "<|x|>", ` + entry + `}`), "has the id 14 of vocab entry"},
		{"config key", tokenizer, decoder(`"01": {"content": "<|x|>", ` + entry + `}`), `key "01" is not an id`},
		{"config empty content", tokenizer, decoder(`"500": {"content": "", ` + entry + `}`), "has no content"},
	}
	for _, test := range tests {
		_, err := Load([]byte(test.tokenizer), []byte(test.config))
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want one with %q", test.name, err, test.want)
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: error of more than one line: %q", test.name, err)
		}
	}

	// What only the second file knows is joined; what stands in both is one token.
	tok, err := Load([]byte(tokenizer), []byte(decoder(
		`"1": {"content": "<|im_end|>", `+entry+`}, "490": {"content": "<|audio|>", `+entry+`}`)))
	if err != nil {
		t.Fatal(err)
	}
	if tok.Count() != 491 {
		t.Errorf("Count() = %d with a token 490 of the second file", tok.Count())
	}
	if got := tok.Encode("a<|audio|><|im_end|>"); len(got) != 3 || got[1] != 490 || got[2] != 1 {
		t.Errorf("Encode with a token of the second file = %v", got)
	}
	if len(tok.Bytes(485)) != 0 || !slices.Contains(tok.SpecialIDs(), 490) {
		t.Error("ids between the files and the last one are wrong")
	}
}

// TestIgnoreMerges: with the flag a piece that is a token is that token, even if
// no chain of merges leads to it.
func TestIgnoreMerges(t *testing.T) {
	dir := filepath.Join(root, "testdata", "micro-radixark", "checkpoint")
	data, err := os.ReadFile(filepath.Join(dir, "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	s := strings.Replace(string(data), `"<think>": 7`, `"zq": 490, "<think>": 7`, 1)
	for flag, want := range map[string]int{"false": 2, "true": 1} {
		tok, err := Load([]byte(strings.Replace(s, `"ignore_merges": false`, `"ignore_merges": `+flag, 1)), []byte("{}"))
		if err != nil {
			t.Fatal(err)
		}
		if got := tok.Encode("zq"); len(got) != want {
			t.Errorf("ignore_merges %s: %v", flag, got)
		}
	}
}

// FuzzRoundTrip: the decoded ids are the text in NFC, whatever the text.
func FuzzRoundTrip(f *testing.F) {
	tok := micro(f)
	for _, s := range []string{
		"", "Hello, world!", "e\u0301", "<|im_end|>", "a<|im_end|>\u0338", "\xff\xe4\xb8", "\u0f73\u0f71",
		"a" + strings.Repeat("\u0300\u0323", 30), "'S 's 'ſx", " \n \t x", "\u1100\u1161\u11a8", "\U0001d15e",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if !utf8.ValidString(s) {
			s = valid(s)
			if !utf8.ValidString(s) {
				t.Fatalf("valid gives %q", s)
			}
		}
		want := composeLong(s)
		if got := tok.Decode(tok.EncodePlain(s)); got != want {
			t.Errorf("Decode(EncodePlain(%q)) = %q, want %q", s, got, want)
		}
		// With control tokens the parts between them are normalised one by one.
		var parts strings.Builder
		rest := s
		for rest != "" {
			at, length := len(rest), 0
			for _, c := range tok.Controls() {
				if i := strings.Index(rest, c); i >= 0 && i < at {
					at, length = i, len(c)
				}
			}
			parts.WriteString(composeLong(rest[:at]))
			parts.WriteString(rest[at : at+length])
			rest = rest[at+length:]
		}
		if got := tok.Decode(tok.Encode(s)); got != parts.String() {
			t.Errorf("Decode(Encode(%q)) = %q, want %q", s, got, parts.String())
		}
	})
}

// FuzzLoad: a damaged file is an error of one line, never a panic.
func FuzzLoad(f *testing.F) {
	f.Add([]byte(`{"model":{"type":"BPE","vocab":{"a":0},"merges":[["a","a"]]}}`), []byte("{}"))
	f.Add([]byte(`{"added_tokens":[{"id":0,"content":"x"}],"model":{"vocab":[]}}`), []byte(`{"added_tokens_decoder":{"1":{"content":"y"}}}`))
	f.Fuzz(func(t *testing.T, tokenizer, config []byte) {
		tok, err := Load(tokenizer, config)
		if err == nil {
			tok.Encode("text <|im_end|>")
		} else if strings.ContainsAny(err.Error(), "\r\n") {
			t.Errorf("error of more than one line: %q", err)
		}
	})
}

func BenchmarkEncode(b *testing.B) {
	tok := micro(b)
	text := strings.Repeat("The quick brown fox jumps over the lazy dog.\n\treturn x + 1234; // naïve\n", 200)
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		tok.Encode(text)
	}
}
