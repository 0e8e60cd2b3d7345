package parse_test

import (
	"bytes"
	"encoding/json"
	"io"
	"math/big"
	"regexp"
	"strings"
	"unicode"

	"ninfer/internal/text/parse"
)

// oracle reads a whole answer of a request that declares f and g. It follows docs/serving.md, Tools, with regular expressions and the older JSON
// package, and shares nothing with the parser.
func oracle(text string) result {
	at := strings.Index(text, "<tool_call>")
	if at < 0 {
		return result{content: text}
	}
	r := result{content: strings.TrimRightFunc(text[:at], unicode.IsSpace), report: parse.Report{Marker: true}}
	if why := r.region(text[at:]); why != parse.None {
		return result{content: text, report: parse.Report{Marker: true, Fallback: why}}
	}
	r.report.Calls = len(r.calls)
	return r
}

var (
	nameTag   = regexp.MustCompile(`^([A-Za-z0-9_-]{1,64})>`)
	nameStart = regexp.MustCompile(`^[A-Za-z0-9_-]{0,64}$`)
	keyTag    = regexp.MustCompile(`^<parameter=([^<>\r\n]+)>`)
	anyTag    = regexp.MustCompile(`<parameter=[^<>\r\n]+>|</parameter>`)
	lineStart = regexp.MustCompile(`^\r?\n`)
	lineEnd   = regexp.MustCompile(`\r?\n$`)
	escapes   = regexp.MustCompile(`\\u....|\\.`)
	half      = regexp.MustCompile(`(?i)\\ud[89a-f]`)
	pair      = regexp.MustCompile(`(?i)\\\\|\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}`)
	fraction  = regexp.MustCompile(`^-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?$`)
)

func skip(text, tag string) (string, bool) {
	return strings.CutPrefix(strings.TrimLeftFunc(text, unicode.IsSpace), tag)
}

func (r *result) region(text string) parse.Reason {
	for first := true; ; first = false {
		rest, ok := skip(text, "<tool_call>")
		if !ok {
			if strings.TrimFunc(text, unicode.IsSpace) == "" && !first {
				return parse.None
			}
			return parse.TrailingContent
		}
		if rest, ok = skip(rest, "<function="); !ok {
			return parse.MalformedStructure
		}
		m := nameTag.FindStringSubmatch(rest)
		switch {
		case m == nil && nameStart.MatchString(rest):
			return parse.MalformedStructure // it ends within the name
		case m == nil:
			return parse.InvalidToolName
		case m[1] != "f" && m[1] != "g":
			return parse.UndeclaredTool
		}
		name, object, seen := m[1], "", map[string]bool{}
		rest = rest[len(m[0]):]
		for {
			if after, ok := skip(rest, "</function>"); ok {
				rest = after
				break
			}
			rest = strings.TrimLeftFunc(rest, unicode.IsSpace)
			m := keyTag.FindStringSubmatch(rest)
			if m == nil {
				return parse.MalformedStructure
			}
			if seen[m[1]] {
				return parse.DuplicateParameter
			}
			seen[m[1]] = true
			rest = rest[len(m[0]):]
			depth, end := 1, -1
			for _, tag := range anyTag.FindAllStringIndex(rest, -1) {
				if rest[tag[0]+1] == '/' {
					depth--
				} else {
					depth++
				}
				if depth == 0 {
					end = tag[0]
					rest, text = rest[tag[1]:], rest[:end]
					break
				}
			}
			if end < 0 {
				return parse.MalformedStructure
			}
			if value := r.value(name, m[1], text); value != "" {
				key := plain(m[1])
				if object != "" {
					object += ","
				}
				object += key + ":" + value
			}
		}
		if text, ok = skip(rest, "</tool_call>"); !ok {
			return parse.MalformedStructure
		}
		r.calls = append(r.calls, name+" {"+object+"}")
	}
}

// plain is a JSON string with nothing escaped that need not be.
func plain(s string) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.Encode(s)
	out := strings.TrimSuffix(b.String(), "\n")
	// That package escapes these all the same.
	return escapes.ReplaceAllStringFunc(out, func(e string) string {
		switch e {
		case `\u2028`:
			return "\u2028"
		case `\u2029`:
			return "\u2029"
		}
		return e
	})
}

// admits are the types of f's properties; absent is no statement.
var admits = map[string][]string{
	"s": {"string"}, "i": {"integer"}, "n": {"number"}, "b": {"boolean"}, "z": {"null"}, "o": {"object"}, "a": {"array"}, "si": {"string", "integer"},
	"bz": {"boolean", "null"}, "any_s": {"string", "null"}, "one_b": {"boolean", "null"}, "two": {"integer"},
	"any_ref": nil, "enum": nil, "ref": nil, "free": nil, "true": nil, "odd": nil, "odd_list": nil,
}

func (r *result) value(function, key, text string) string {
	text = lineStart.ReplaceAllString(text, "")
	text = lineEnd.ReplaceAllString(text, "")
	types, declared := admits[key]
	if function != "f" {
		types, declared = nil, false
	}
	may := func(want string) bool {
		for _, t := range types {
			if t == want {
				return true
			}
		}
		return false
	}
	if may("string") {
		return plain(text)
	}
	if types != nil && text == "" {
		r.report.Omitted++
		return ""
	}
	if !declared {
		r.report.Mismatches++
	}
	trimmed := strings.TrimSpace(text)
	if may("boolean") && (strings.ToLower(trimmed) == "true" || strings.ToLower(trimmed) == "false") {
		return strings.ToLower(trimmed)
	}
	if !unambiguous(trimmed) {
		if types != nil {
			r.report.Mismatches++
		}
		return plain(text)
	}
	var compact bytes.Buffer
	json.Compact(&compact, []byte(trimmed))
	kind := map[byte]string{'{': "object", '[': "array", '"': "string", 't': "boolean", 'f': "boolean", 'n': "null"}[trimmed[0]]
	if kind == "" {
		kind = "number"
		if fraction.MatchString(trimmed) {
			if x, ok := new(big.Rat).SetString(trimmed); ok && x.IsInt() && may("integer") {
				kind = "integer"
			}
		}
	}
	if types != nil && !may(kind) {
		r.report.Mismatches++
	}
	return compact.String()
}

// unambiguous reports whether a text is JSON that every reader understands alike: no two members of one name, no half characters, not
// nested without end.
func unambiguous(text string) bool {
	if !json.Valid([]byte(text)) {
		return false
	}
	if half.MatchString(pair.ReplaceAllString(text, "")) {
		return false
	}
	dec := json.NewDecoder(strings.NewReader(text))
	dec.UseNumber()
	type level struct {
		names map[string]bool
		key   bool
	}
	var open []level
	for {
		tok, err := dec.Token()
		if err == io.EOF {
			return true
		}
		if err != nil {
			return false
		}
		if d, ok := tok.(json.Delim); ok && (d == '}' || d == ']') {
			open = open[:len(open)-1]
			continue
		}
		if n := len(open); n > 0 && open[n-1].names != nil {
			if open[n-1].key {
				name := tok.(string)
				if open[n-1].names[name] {
					return false
				}
				open[n-1].names[name] = true
			}
			open[n-1].key = !open[n-1].key
			if !open[n-1].key {
				continue
			}
		}
		switch tok {
		case json.Delim('{'):
			open = append(open, level{map[string]bool{}, true})
		case json.Delim('['):
			open = append(open, level{})
		}
		if len(open) > 256 {
			return false
		}
	}
}
