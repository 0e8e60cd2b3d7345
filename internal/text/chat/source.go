package chat

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// A template's source is read here only as far as is needed to find its string
// literals and say where they go; meaning is the engine's business.

// tagKind tells the parts of a template apart.
type tagKind uint8

const (
	textTag    tagKind = iota // outside of tags, or the inside of a raw block
	exprTag                   // {{ … }}
	stmtTag                   // {% … %}
	commentTag                // {# … #}
)

// tag is one part of the source: source[start:end], with what is between the
// delimiters and their signs in source[bodyStart:bodyEnd].
type tag struct {
	kind               tagKind
	start, end         int
	bodyStart, bodyEnd int
	left, right        byte // - or + inside the delimiter, or 0
	raw                bool // {% raw %}; it and {% endraw %} are comments here
	line               int
	text               string // of text: what is left of it after white space control
}

// sourceError is an error at a line of a template.
type sourceError struct {
	line int
	text string
}

func (e *sourceError) Error() string { return fmt.Sprintf("line %d: %s", e.line, e.text) }

// normalize does what Jinja does to a source before it reads it: every line end
// becomes \n, and one at the very end is dropped.
func normalize(source string) string {
	source = strings.ReplaceAll(source, "\r\n", "\n")
	source = strings.ReplaceAll(source, "\r", "\n")
	return strings.TrimSuffix(source, "\n")
}

// scan cuts a source into tags.
func scan(source string) ([]tag, error) {
	var tags []tag
	raw := false
	textStart, line := 0, 1
	flush := func(end int) {
		if end > textStart {
			tags = append(tags, tag{kind: textTag, start: textStart, end: end, text: source[textStart:end]})
		}
	}
	for i := 0; i < len(source); {
		kind, closer := textTag, ""
		if i+1 < len(source) && source[i] == '{' {
			switch source[i+1] {
			case '{':
				kind, closer = exprTag, "}}"
			case '%':
				kind, closer = stmtTag, "%}"
			case '#':
				kind, closer = commentTag, "#}"
			}
		}
		if kind == textTag || raw && kind != stmtTag {
			if source[i] == '\n' {
				line++
			}
			i++
			continue
		}
		t := tag{kind: kind, start: i, line: line}
		end := tagEnd(source, i+2, kind, closer)
		if end < 0 {
			if raw {
				i++
				continue
			}
			return nil, &sourceError{line, fmt.Sprintf("unclosed %s", source[i:i+2])}
		}
		t.end = end + 2
		t.bodyStart, t.bodyEnd = i+2, end
		if c := source[t.bodyStart]; (c == '-' || c == '+') && t.bodyStart < t.bodyEnd {
			t.left = c
			t.bodyStart++
		}
		if c := source[t.bodyEnd-1]; (c == '-' || c == '+' && kind != exprTag) && t.bodyStart < t.bodyEnd {
			t.right = c
			t.bodyEnd--
		}
		keyword := strings.TrimSpace(source[t.bodyStart:t.bodyEnd])
		if raw && keyword != "endraw" {
			i++
			continue
		}
		if raw = kind == stmtTag && keyword == "raw"; raw || keyword == "endraw" {
			t.kind, t.raw = commentTag, raw // nothing shows of them
		}
		flush(i)
		tags = append(tags, t)
		line += strings.Count(source[i:t.end], "\n")
		i = t.end
		textStart = i
	}
	if raw {
		return nil, &sourceError{tags[len(tags)-1].line, "raw block is not closed"}
	}
	flush(len(source))
	trimTags(tags)
	return tags, nil
}

// trimTags does white space control as Jinja does with trim_blocks and
// lstrip_blocks: a minus takes the white space beside it; without a sign, a
// statement or comment takes the line end behind it, and the blanks before it if
// it is the first on its line. What is beside a tag ends at the next tag; the engine
// looks past it, so its own control is switched off by rewrite.
func trimTags(tags []tag) {
	for i := range tags {
		t := &tags[i]
		if t.kind != textTag {
			continue
		}
		lineStart := i == 0
		if i > 0 {
			before, whole := tags[i-1], t.text
			switch {
			case before.right == '-':
				t.text = strings.TrimLeftFunc(t.text, isSpace)
			case before.right == 0 && before.kind != exprTag && !before.raw:
				t.text = strings.TrimPrefix(t.text, "\n")
			}
			lineStart = strings.HasSuffix(whole[:len(whole)-len(t.text)], "\n")
		}
		if i+1 == len(tags) {
			continue
		}
		switch after := tags[i+1]; {
		case after.left == '-':
			t.text = strings.TrimRightFunc(t.text, isSpace)
		case after.left == 0 && after.kind != exprTag:
			line := strings.LastIndexByte(t.text, '\n') + 1
			if (line > 0 || lineStart) && strings.TrimFunc(t.text[line:], isSpace) == "" {
				t.text = t.text[:line]
			}
		}
	}
}

// tagEnd returns where the closer of a tag stands, or -1. In expressions it may
// stand in a string or a bracket without closing.
func tagEnd(source string, i int, kind tagKind, closer string) int {
	if kind == commentTag {
		if n := strings.Index(source[i:], closer); n >= 0 {
			return i + n
		}
		return -1
	}
	depth := 0
	for i < len(source) {
		switch c := source[i]; {
		case c == '\'' || c == '"':
			n := stringEnd(source[i:])
			if n < 0 {
				return -1
			}
			i += n
			continue
		case depth <= 0 && strings.HasPrefix(source[i:], closer):
			return i
		case strings.IndexByte("([{", c) >= 0:
			depth++
		case strings.IndexByte(")]}", c) >= 0:
			depth--
		}
		i++
	}
	return -1
}

// stringEnd returns the length of the string literal at the start of s, or -1.
func stringEnd(s string) int {
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case s[0]:
			return i + 1
		}
	}
	return -1
}

// lexKind tells the tokens inside a tag apart.
type lexKind uint8

const (
	nameLex lexKind = iota
	stringLex
	numberLex
	opLex
	endLex // before the first and after the last
)

// lexeme is one token inside a tag, at source[start:end].
type lexeme struct {
	kind       lexKind
	start, end int
	text       string // as in the source
}

func (l lexeme) is(text string) bool { return l.kind != stringLex && l.text == text }

// lex cuts the body of an expression or statement into tokens.
func lex(source string, t tag) ([]lexeme, error) {
	var out []lexeme
	line := t.line
	for i := t.bodyStart; i < t.bodyEnd; {
		c := source[i]
		start := i
		kind := opLex
		switch {
		case c == '\n':
			line++
			i++
			continue
		case c == ' ' || c == '\t':
			i++
			continue
		case c == '\'' || c == '"':
			n := stringEnd(source[i:t.bodyEnd])
			if n < 0 {
				return nil, &sourceError{line, "string is not closed"}
			}
			kind = stringLex
			i += n
			line += strings.Count(source[start:i], "\n")
		case c == '_' || c|0x20 >= 'a' && c|0x20 <= 'z':
			kind = nameLex
			for i < t.bodyEnd && (source[i] == '_' || source[i]|0x20 >= 'a' && source[i]|0x20 <= 'z' || source[i] >= '0' && source[i] <= '9') {
				i++
			}
		case c >= '0' && c <= '9':
			kind = numberLex
			for i < t.bodyEnd && (source[i] >= '0' && source[i] <= '9' || source[i]|0x20 == 'e') {
				i++
			}
		default:
			i++
			if i < t.bodyEnd && slices.Contains([]string{"**", "//", "==", "!=", "<=", ">="}, source[start:i+1]) {
				i++
			} else if strings.IndexByte("()[]{}.,:|~+-*/%<>=", c) < 0 {
				r, _ := utf8.DecodeRuneInString(source[start:])
				return nil, &sourceError{line, fmt.Sprintf("unexpected character %q", r)}
			}
		}
		out = append(out, lexeme{kind, start, i, source[start:i]})
	}
	return out, nil
}

// block pairs the statements that open and close.
var blocks = map[string]string{
	"if": "endif", "for": "endfor", "macro": "endmacro", "call": "endcall",
	"filter": "endfilter", "block": "endblock", "generation": "endgeneration",
}

// Filters and tests the engine has. Naming another fails the load here, with its
// line; the engine would find it only when a rendering gets there.
var (
	filters = names(`abs batch capitalize count d default dictsort e escape first float from_json fromjson indent int
		items join last length list lower map max min reject rejectattr replace reverse round safe select selectattr
		sort string sum title tojson trim unique upper wordcount`)
	tests = names(`defined undefined none boolean integer float number string mapping iterable sequence callable true
		false eq equalto ne gt greaterthan ge lt lessthan le in odd even divisibleby upper lower sameas`)
)

func names(list string) map[string]bool {
	set := map[string]bool{}
	for _, name := range strings.Fields(list) {
		set[name] = true
	}
	return set
}

// edit is a place inside a tag that rewrite changes: a filter with another name, or
// a string literal that may reach the output.
type edit struct {
	start, end int
	name       string // the filter's new name; empty for a literal
}

// outline is what rewriting needs to know of a source.
type outline struct {
	source string
	tags   []tag
	edits  []edit // in order
}

// read checks a source and finds its outline.
func read(source string) (*outline, error) {
	tags, err := scan(source)
	if err != nil {
		return nil, err
	}
	o := &outline{source: source, tags: tags}
	type open struct {
		closer string
		tag    tag
	}
	var stack []open
	for _, t := range tags {
		if t.kind == textTag || t.kind == commentTag {
			continue
		}
		lexemes, err := lex(source, t)
		if err != nil {
			return nil, err
		}
		if err := o.readFilters(lexemes, t); err != nil {
			return nil, err
		}
		o.findLiterals(lexemes, t.kind == stmtTag)
		if t.kind == exprTag {
			continue
		}
		if len(lexemes) == 0 {
			return nil, &sourceError{t.line, "empty statement"}
		}
		keyword, rest := lexemes[0].text, lexemes[1:]
		closer, opens := blocks[keyword]
		if keyword == "set" && !slices.ContainsFunc(rest, func(l lexeme) bool { return l.is("=") }) {
			closer, opens = "endset", true
		}
		switch {
		case opens:
			stack = append(stack, open{closer, t})
		case strings.HasPrefix(keyword, "end"):
			if len(stack) == 0 || stack[len(stack)-1].closer != keyword {
				return nil, &sourceError{t.line, fmt.Sprintf("%s without its opening statement", keyword)}
			}
			stack = stack[:len(stack)-1]
		}
	}
	if len(stack) > 0 {
		last := stack[len(stack)-1]
		return nil, &sourceError{last.tag.line, fmt.Sprintf("block is not closed, %s is missing", last.closer)}
	}
	slices.SortFunc(o.edits, func(a, b edit) int { return a.start - b.start })
	return o, nil
}

// readFilters checks the names of filters and tests, and notes filters to be replaced.
func (o *outline) readFilters(lexemes []lexeme, t tag) error {
	for i, l := range lexemes {
		if i == 0 || l.kind != nameLex {
			continue
		}
		line := t.line + strings.Count(o.source[t.start:l.start], "\n")
		before := lexemes[i-1]
		if before.is("|") || i == 1 && before.is("filter") && t.kind == stmtTag {
			if !filters[l.text] {
				return &sourceError{line, fmt.Sprintf("filter %q is not supported", l.text)}
			}
			if name, ok := ownFilters[l.text]; ok {
				o.edits = append(o.edits, edit{l.start, l.end, name})
			}
		}
		if (before.is("is") || before.is("not") && i > 1 && lexemes[i-2].is("is")) && !l.is("not") && !tests[strings.ToLower(l.text)] {
			return &sourceError{line, fmt.Sprintf("test %q is not supported", l.text)}
		}
	}
	return nil
}

// group is a bracket that is open at some point of an expression.
type group struct {
	kind   byte   // ( [ {, or c for a call
	callee string // of a call: the name before the bracket, with . for a method, | for a filter
	arg    int    // commas seen
	output bool   // whether the value of the whole group may reach the output
	cond   bool   // after if, until its else
	value  bool   // in {: after the colon
}

// findLiterals notes the string literals whose text may reach the output: not
// those compared, searched for, used as keys or tested. Where it errs, either the
// marked rendering differs from the plain one, or a control spelling of the
// template stays unmarked; Render and Check find these.
func (o *outline) findLiterals(lexemes []lexeme, statement bool) {
	at := func(i int) lexeme {
		if i < 0 || i >= len(lexemes) {
			return lexeme{kind: endLex}
		}
		return lexemes[i]
	}
	compares := func(l lexeme) bool {
		return l.kind != stringLex && slices.Contains([]string{"==", "!=", "<", ">", "<=", ">=", "in", "not", "is", "%"}, l.text)
	}
	if statement && at(0).is("for") { // the in of a for statement compares nothing
		if i := slices.IndexFunc(lexemes, func(l lexeme) bool { return l.is("in") }); i > 0 {
			lexemes = lexemes[i+1:]
		}
	}
	stack := []group{{output: true}}
	for i, l := range lexemes {
		top := &stack[len(stack)-1]
		switch {
		case l.kind == stringLex:
			next := at(i + 1)
			formats := next.is("%") || next.is(".") && at(i+2).is("format")
			ok := top.passes() && !compares(at(i-1)) && !compares(next) && !formats && !next.is("[")
			if top.kind == '{' && !top.value {
				ok = false
			}
			if ok {
				o.edits = append(o.edits, edit{start: l.start, end: l.end})
			}
		case l.is("("):
			g := group{kind: '(', output: top.passes() && !compares(at(i-1))}
			if before := at(i - 1); before.kind == nameLex && !slices.Contains(keywords, before.text) {
				g.kind = 'c'
				g.callee = before.text
				switch prefix := at(i - 2); {
				case prefix.is("."), prefix.is("|"):
					g.callee = prefix.text + g.callee
				case prefix.is("is"), prefix.is("not"):
					g.output = false
				case i == 2 && prefix.is("filter"):
					g.callee = "|" + g.callee
				}
			}
			stack = append(stack, g)
		case l.is("["):
			before := at(i - 1)
			subscript := before.kind == nameLex && !slices.Contains(keywords, before.text) || before.kind == stringLex || before.is(")") || before.is("]")
			stack = append(stack, group{kind: '[', output: top.passes() && !subscript && !compares(before)})
		case l.is("{"):
			stack = append(stack, group{kind: '{', output: top.passes() && !compares(at(i-1))})
		case l.is(")"), l.is("]"), l.is("}"):
			if len(stack) > 1 {
				stack = stack[:len(stack)-1]
			}
		case l.is(","):
			top.arg++
			top.cond, top.value = false, false
		case l.is(":"):
			top.value = true
		case l.is("if"), l.is("elif"):
			top.cond = true
		case l.is("else"):
			top.cond = false
		}
	}
}

// keywords are names after which a bracket groups rather than calls or subscripts.
var keywords = []string{"if", "else", "elif", "in", "not", "and", "or", "is", "set", "for", "recursive", "call", "filter", "macro"}

// passes reports whether a value at this point of the group may reach the output.
func (g *group) passes() bool {
	if !g.output || g.cond {
		return false
	}
	if g.kind != 'c' {
		return true
	}
	switch g.callee {
	case ".replace", "|replace", ".get", ".insert":
		return g.arg == 1 // what replaces, the default, the item; not what is looked for
	case "|default", "|d", "|join", ".append", ".update":
		return true
	}
	return g.callee[0] != '.' && g.callee[0] != '|' // a macro, namespace, dict
}

// suspicious reports whether text could hold part of a control spelling. Those of
// the family all look like <…> or <|…|>.
func suspicious(text string) bool { return strings.ContainsAny(text, "<>|[]") }

// rewrite returns the source for the engine: white space control done, raw blocks
// as literals, filters renamed and, if mark is not zero, mark behind every
// character, white space excepted, of text and of those literals that could be part
// of a control spelling. Lines keep their numbers.
func (o *outline) rewrite(mark rune) string {
	var b strings.Builder
	edits := o.edits
	for i, t := range o.tags {
		open, closer := "{{ ", " }}"
		switch t.kind {
		case textTag, commentTag:
			raw := i > 0 && o.tags[i-1].raw
			b.WriteString(o.text(t, raw, mark))
			continue
		case stmtTag:
			open, closer = "{%+ ", " +%}" // the plus keeps the engine from trimming
		}
		b.WriteString(open)
		copied := t.bodyStart
		for ; len(edits) > 0 && edits[0].start < t.bodyEnd; edits = edits[1:] {
			e := edits[0]
			replacement := e.name
			if replacement == "" {
				value := unquote(o.source[e.start:e.end])
				if mark == 0 || !suspicious(value) {
					continue
				}
				replacement = quote(markText(value, mark))
			}
			b.WriteString(o.source[copied:e.start])
			b.WriteString(replacement)
			copied = e.end
		}
		b.WriteString(o.source[copied:t.bodyEnd])
		b.WriteString(closer)
	}
	return b.String()
}

// text is what rewrite writes for text, and for a comment, which has none. Lines lost
// from the source stay in a comment.
func (o *outline) text(t tag, raw bool, mark rune) string {
	text := t.text
	if mark != 0 && suspicious(text) {
		text = markText(text, mark)
	}
	if raw && text != "" {
		text = "{{ " + quote(text) + " }}"
	}
	lost := strings.Count(o.source[t.start:t.end], "\n") - strings.Count(text, "\n")
	if lost == 0 {
		return text
	}
	return "{#+" + strings.Repeat("\n", lost) + "+#}" + text
}

// markText puts mark behind every character that is not white space. White space
// stays bare, so that trimming works as without marks.
func markText(text string, mark rune) string {
	var b strings.Builder
	for _, r := range text {
		b.WriteRune(r)
		if !unicode.IsSpace(r) && (r < 0x1c || r > 0x1f) {
			b.WriteRune(mark)
		}
	}
	return b.String()
}

// unquote returns the text of a string literal, by the escapes of Python.
func unquote(literal string) string {
	s := literal[1 : len(literal)-1]
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' || i+1 == len(s) {
			b.WriteByte(s[i])
			continue
		}
		i++
		digits, base := 0, 16
		switch c := s[i]; c {
		case 'x':
			digits = 2
		case 'u':
			digits = 4
		case 'U':
			digits = 8
		case '0', '1', '2', '3', '4', '5', '6', '7':
			base = 8
			i--
			for digits < 3 && i+1+digits < len(s) && s[i+1+digits] >= '0' && s[i+1+digits] <= '7' {
				digits++
			}
		case '\n': // a line that goes on
			continue
		case '\\', '\'', '"':
			b.WriteByte(c)
			continue
		default:
			if j := strings.IndexByte("abfnrtv", c); j >= 0 {
				b.WriteByte("\a\b\f\n\r\t\v"[j])
			} else {
				b.WriteByte('\\')
				b.WriteByte(c)
			}
			continue
		}
		if i+1+digits <= len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+1+digits], base, 32); err == nil {
				b.WriteRune(rune(n))
				i += digits
				continue
			}
		}
		b.WriteByte('\\')
		b.WriteByte(s[i])
	}
	return b.String()
}

// quote writes text as a string literal.
func quote(text string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`, "\n", `\n`, "\r", `\r`, "\t", `\t`).Replace(text) + "'"
}
