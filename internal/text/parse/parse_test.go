package parse_test

import (
	"encoding/json/jsontext"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/text/parse"
)

// f is declared by most tests.
var f = parse.Tool{Name: "f", Parameters: jsontext.Value(`{"type":"object","properties":{
	"s":{"type":"string"},"i":{"type":"integer"},"n":{"type":"number"},"b":{"type":"boolean"},"z":{"type":"null"},
	"o":{"type":"object"},"a":{"type":"array","items":{"type":"string"}},
	"si":{"type":["string","integer"]},"bz":{"type":["boolean","null"]},
	"any_s":{"anyOf":[{"type":"string"},{"type":"null"}]},"one_b":{"oneOf":[{"type":"boolean"},{"type":"null"}]},
	"any_ref":{"anyOf":[{"type":"integer"},{"$ref":"#/$defs/x"}]},"enum":{"enum":["1"]},"ref":{"$ref":"#/$defs/x"},
	"free":{},"true":true,"odd":{"type":"date"},"odd_list":{"type":["integer","date"]},"two":{"type":"integer","anyOf":[{"type":"string"}]}}}`)}

var g = parse.Tool{Name: "g"}

// result is what an answer comes to, whatever the cuts.
type result struct {
	content string
	calls   []string // name and arguments
	report  parse.Report
}

func (r result) String() string {
	return fmt.Sprintf("content %q, calls %q, %+v", r.content, r.calls, r.report)
}

// feed parses pieces. It fails the test if events are not in order.
func feed(t testing.TB, tools *parse.Tools, pieces ...string) result {
	var r result
	p := tools.Parser(64)
	take := func(events []parse.Event) {
		for _, e := range events {
			switch {
			case e.Kind == parse.Call:
				r.calls = append(r.calls, e.Name+" "+e.Arguments)
			case e.Text == "" || len(r.calls) > 0:
				t.Errorf("event %+v after %v", e, r)
			default:
				r.content += e.Text
			}
		}
	}
	for _, piece := range pieces {
		events := p.Feed(piece)
		if slices.ContainsFunc(events, func(e parse.Event) bool { return e.Kind == parse.Call }) {
			t.Errorf("a call before the end")
		}
		take(events)
	}
	take(p.Finish())
	take(p.Finish())
	r.report = p.Report()
	return r
}

// call writes a call as the model does.
func call(name string, args ...string) string {
	s := "<tool_call>\n<function=" + name + ">\n"
	for i := 0; i < len(args); i += 2 {
		s += "<parameter=" + args[i] + ">\n" + args[i+1] + "\n</parameter>\n"
	}
	return s + "</function>\n</tool_call>"
}

func calls(n int) parse.Report { return parse.Report{Marker: true, Calls: n} }

func fallback(why parse.Reason) parse.Report { return parse.Report{Marker: true, Fallback: why} }

// cases are the rules of docs/serving.md, Tools, without those about types.
var cases = []struct {
	name, text, content string
	calls               []string
	report              parse.Report
}{
	{name: "empty"},
	{name: "text", text: " a <b> c\n ", content: " a <b> c\n "},
	{name: "part of a marker", text: "a <tool_cal", content: "a <tool_cal"},
	{name: "marker in other spelling", text: "<Tool_call>", content: "<Tool_call>"},
	{name: "call", text: call("f", "i", "1"), calls: []string{`f {"i":1}`}, report: calls(1)},
	{name: "call after text", text: "Look:\n\n" + call("f", "i", "1"), content: "Look:", calls: []string{`f {"i":1}`}, report: calls(1)},
	{name: "text that is white", text: "\u3000 \n\n" + call("g"), calls: []string{`g {}`}, report: calls(1)},
	{name: "text with white ends of many kinds", text: " a\u00a0\u3000b\u00a0\u2028\r\n" + call("g"), content: " a\u00a0\u3000b", calls: []string{`g {}`}, report: calls(1)},
	{name: "two calls", text: call("f", "i", "1", "s", "x") + "\n" + call("g") + "\n\n", calls: []string{`f {"i":1,"s":"x"}`, `g {}`}, report: calls(2)},
	{name: "the same call twice", text: call("g") + call("g"), calls: []string{`g {}`, `g {}`}, report: calls(2)},
	{
		name: "B.2", text: "<tool_call>\n<function=f>\n<parameter=i>\n1\n</parameter>\n<parameter=s>\na b\n</parameter>\n<parameter=o>\n{\"k\": [true, null, \"é\"]}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
		calls: []string{`f {"i":1,"s":"a b","o":{"k":[true,null,"é"]}}`, `g {}`}, report: calls(2),
	},
	{name: "order of the model", text: call("f", "s", "x", "i", "1"), calls: []string{`f {"s":"x","i":1}`}, report: calls(1)},
	{name: "no line ends", text: "<tool_call><function=f><parameter=s>x</parameter></function></tool_call>", calls: []string{`f {"s":"x"}`}, report: calls(1)},
	{name: "CRLF", text: strings.ReplaceAll(call("f", "s", "x\ny"), "\n", "\r\n"), calls: []string{`f {"s":"x\r\ny"}`}, report: calls(1)},
	{name: "one line end a side", text: call("f", "s", "\n x \n"), calls: []string{`f {"s":"\n x \n"}`}, report: calls(1)},
	{name: "one line end between", text: "<tool_call><function=f><parameter=s>\n</parameter></function></tool_call>", calls: []string{`f {"s":""}`}, report: calls(1)},
	{
		name: "verbatim", text: call("f", "s", " a && b <c> \"d\" 'e' \\n {\"x\": 1} </function></tool_call> <tool_call> &lt; 0\u2028"),
		calls: []string{"f {\"s\":\" a && b <c> \\\"d\\\" 'e' \\\\n {\\\"x\\\": 1} </function></tool_call> <tool_call> &lt; 0\u2028\"}"}, report: calls(1),
	},
	{name: "nested parameter", text: call("f", "s", "<parameter=q>\n1\n</parameter>"), calls: []string{`f {"s":"<parameter=q>\n1\n</parameter>"}`}, report: calls(1)},
	{name: "nested twice", text: call("f", "s", "<parameter=q><parameter=r></parameter></parameter>-<parameter=q></parameter>"), calls: []string{`f {"s":"<parameter=q><parameter=r></parameter></parameter>-<parameter=q></parameter>"}`}, report: calls(1)},
	{name: "what is no nested parameter", text: call("f", "s", "<parameter=> <parameter=a\nb> <parameter=<parameter"), calls: []string{`f {"s":"<parameter=> <parameter=a\nb> <parameter=<parameter"}`}, report: calls(1)},
	{name: "lone nested opener", text: call("f", "s", "<parameter=q>"), report: fallback(parse.MalformedStructure)},
	{name: "lone nested closer", text: call("f", "s", "x </parameter> y"), report: fallback(parse.MalformedStructure)},
	{name: "nothing in it", text: "a\n<tool_call>\n</tool_call>", report: fallback(parse.MalformedStructure)},
	{name: "two functions in one", text: "<tool_call><function=g></function><function=g></function></tool_call>", report: fallback(parse.MalformedStructure)},
	{name: "text between", text: "<tool_call>x<function=g></function></tool_call>", report: fallback(parse.MalformedStructure)},
	{name: "text before a parameter", text: "<tool_call><function=g>x</function></tool_call>", report: fallback(parse.MalformedStructure)},
	{name: "empty key", text: call("f", "", "x"), report: fallback(parse.MalformedStructure)},
	{name: "key of two lines", text: call("f", "a\nb", "x"), report: fallback(parse.MalformedStructure)},
	{name: "JSON call", text: "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>", report: fallback(parse.MalformedStructure)},
	{name: "cut second call", text: call("g") + "\n<tool_call>\n<function=g>\n", report: fallback(parse.MalformedStructure)},
	{name: "cut closer", text: "Hm \n" + strings.TrimSuffix(call("g"), ">"), report: fallback(parse.MalformedStructure)},
	{name: "only the marker", text: "a <tool_call>", report: fallback(parse.MalformedStructure)},
	{name: "duplicate", text: call("f", "s", "x", "i", "1", "s", "x"), report: fallback(parse.DuplicateParameter)},
	{name: "name with a blank", text: call("f "), report: fallback(parse.InvalidToolName)},
	{name: "empty name", text: call(""), report: fallback(parse.InvalidToolName)},
	{name: "long name", text: call(strings.Repeat("f", 65)), report: fallback(parse.InvalidToolName)},
	{name: "name of full length", text: call(strings.Repeat("f", 64)), report: fallback(parse.UndeclaredTool)},
	{name: "undeclared", text: call("h", "s", "x"), report: fallback(parse.UndeclaredTool)},
	{name: "undeclared second", text: "T " + call("g") + call("h"), report: fallback(parse.UndeclaredTool)},
	{name: "trailing text", text: "T\n" + call("g") + "\nDone.", report: fallback(parse.TrailingContent)},
	{name: "trailing part of a marker", text: call("g") + "\n<tool_", report: fallback(parse.TrailingContent)},
	{name: "counts of a fallback", text: call("f", "i", "", "new", "x") + ".", report: fallback(parse.TrailingContent)},
	{name: "omitted and mismatched", text: call("f", "i", "", "n", "x", "s", ""), calls: []string{`f {"n":"x","s":""}`}, report: parse.Report{Marker: true, Calls: 1, Omitted: 1, Mismatches: 1}},
	{name: "all omitted", text: call("f", "i", ""), calls: []string{`f {}`}, report: parse.Report{Marker: true, Calls: 1, Omitted: 1}},
	{name: "key to be escaped", text: call("f", `a"b\`, "1"), calls: []string{`f {"a\"b\\":1}`}, report: parse.Report{Marker: true, Calls: 1, Mismatches: 1}},
}

func TestCases(t *testing.T) {
	tools := parse.NewTools([]parse.Tool{f, g})
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			want := result{c.content, c.calls, c.report}
			if c.report.Fallback != parse.None {
				want.content = c.text // the whole answer, byte for byte
			}
			if got := feed(t, tools, c.text); got.String() != want.String() {
				t.Fatalf("%v\nwant %v", got, want)
			}
			if got := oracle(c.text); got.String() != want.String() {
				t.Fatalf("oracle: %v\nwant %v", got, want)
			}
			for i := range c.text {
				for j := i; j <= min(i+12, len(c.text)); j++ {
					if got := feed(t, tools, c.text[:i], c.text[i:j], c.text[j:]); got.String() != want.String() {
						t.Fatalf("cut at %d and %d: %v\nwant %v", i, j, got, want)
					}
				}
			}
			if got := feed(t, tools, strings.Split(c.text, "")...); got.String() != want.String() {
				t.Errorf("by character: %v\nwant %v", got, want)
			}
			bytes := make([]string, len(c.text))
			for i := range bytes {
				bytes[i] = c.text[i : i+1]
			}
			if got := feed(t, tools, bytes...); got.String() != want.String() {
				t.Errorf("by byte: %v\nwant %v", got, want)
			}
		})
	}
}

// Which values become strings (docs/serving.md, Tools).
func TestTypes(t *testing.T) {
	tools := parse.NewTools([]parse.Tool{f})
	const omitted = ""
	for _, c := range []struct {
		key, text, want string
		mismatch        bool
	}{
		// Admits a string: the text.
		{"s", "", `""`, false},
		{"s", "03106", `"03106"`, false},
		{"s", `"q"`, `"\"q\""`, false},
		{"s", "null", `"null"`, false},
		{"si", "5", `"5"`, false},
		{"any_s", "null", `"null"`, false},
		// Does not: nothing is nothing.
		{"i", "", omitted, false},
		{"bz", "", omitted, false},
		{"o", "", omitted, false},
		// Booleans in any case.
		{"b", "True", "true", false},
		{"b", "FALSE", "false", false},
		{"b", " true ", "true", false},
		{"bz", "True", "true", false},
		{"one_b", "fAlse", "false", false},
		{"i", "True", `"True"`, true},
		// JSON keeps its own type.
		{"b", "1", "1", true},
		{"i", `"7"`, `"7"`, true},
		{"i", "true", "true", true},
		{"o", "[1]", "[1]", true},
		{"a", `["x", 1]`, `["x",1]`, false},
		{"o", "{\n \"b\": 1.0,\n \"a\": [1e3]\n}", `{"b":1.0,"a":[1e3]}`, false},
		{"z", "null", "null", false},
		{"bz", "false", "false", false},
		{"bz", "null", "null", false},
		{"one_b", "null", "null", false},
		{"i", "null", "null", true},
		// Numbers, as written.
		{"n", "3", "3", false},
		{"n", "-1.50E+2", "-1.50E+2", false},
		{"i", "230.0", "230.0", false},
		{"i", "1.5e1", "1.5e1", false},
		{"i", "-0", "-0", false},
		{"i", "0.000", "0.000", false},
		{"i", "2.5", "2.5", true},
		{"i", "1e-1", "1e-1", true},
		{"i", "10e-1", "10e-1", false},
		{"i", "1e99999999999999999999", "1e99999999999999999999", false},
		{"i", "1e-99999999999999999999", "1e-99999999999999999999", true},
		{"i", "123456789012345678901234567890", "123456789012345678901234567890", false},
		{"n", "0.1000000000000000055511151231257827", "0.1000000000000000055511151231257827", false},
		{"i", " 5\t", "5", false},
		// Not JSON.
		{"i", "five", `"five"`, true},
		{"i", "05", `"05"`, true},
		{"n", "NaN", `"NaN"`, true},
		{"o", "{'a': 1}", `"{'a': 1}"`, true},
		{"a", "[1", `"[1"`, true},
		{"i", "1 2", `"1 2"`, true},
		{"z", "None", `"None"`, true},
		{"o", `{"a":1,"a":2}`, `"{\"a\":1,\"a\":2}"`, true},
		{"i", " ", `" "`, true},
		// No usable type.
		{"free", " 1 ", "1", false},
		{"true", "[ ]", "[]", false},
		{"ref", "x y ", `"x y "`, false},
		{"enum", "1", "1", false},
		{"enum", "", `""`, false},
		{"any_ref", "1", "1", false},
		{"any_ref", "True", `"True"`, false},
		{"odd", "2026-01-01", `"2026-01-01"`, false},
		{"odd_list", "", `""`, false},
		// A direct type goes before a union.
		{"two", "5", "5", false},
		// Not declared.
		{"new", "1", "1", true},
		{"new", "x", `"x"`, true},
		{"new", "", `""`, true},
	} {
		got := feed(t, tools, call("f", c.key, c.text))
		want := result{calls: []string{`f {"` + c.key + `":` + c.want + `}`}, report: calls(1)}
		if c.want == omitted {
			want.calls[0], want.report.Omitted = "f {}", 1
		}
		if c.mismatch {
			want.report.Mismatches = 1
		}
		if got.String() != want.String() {
			t.Errorf("%s %q: %v\nwant %v", c.key, c.text, got, want)
		}
	}
}

// Nothing that the model nests may make its call one that cannot be sent back.
func TestDepth(t *testing.T) {
	tools := parse.NewTools([]parse.Tool{f})
	for n, want := range map[int]string{256: strings.Repeat("[", 256) + strings.Repeat("]", 256), 257: `"` + strings.Repeat("[", 257) + strings.Repeat("]", 257) + `"`} {
		got := feed(t, tools, call("f", "free", strings.Repeat("[", n)+strings.Repeat("]", n)))
		if len(got.calls) != 1 || got.calls[0] != `f {"free":`+want+`}` {
			t.Errorf("%d deep: %.80v", n, got)
		}
	}
	if got := feed(t, tools, call("f", "free", strings.Repeat("[", 1e6))); got.report.Calls != 1 || !strings.HasPrefix(got.calls[0], `f {"free":"[[`) {
		t.Errorf("a million deep: %.80v", got)
	}
}

func TestTools(t *testing.T) {
	for _, c := range []struct {
		name  string
		tools []parse.Tool
		want  string
		count int
	}{
		{"declared twice alike", []parse.Tool{{Name: "f", Parameters: jsontext.Value(`{"properties":{"x":{"type":"string"}}}`)}, {Name: "f", Parameters: jsontext.Value(`{ "properties": {"x": {"type": "string"}}}`)}}, `f {"x":"1"}`, 0},
		{"declared twice, differently", []parse.Tool{{Name: "f", Parameters: jsontext.Value(`{"properties":{"x":{"type":"string"}}}`)}, g, {Name: "f"}}, `f {"x":1}`, 0},
		{"schema that is none", []parse.Tool{{Name: "f", Parameters: jsontext.Value(`[`)}}, `f {"x":1}`, 1},
		{"properties that are none", []parse.Tool{{Name: "f", Parameters: jsontext.Value(`{"properties":["x"]}`)}}, `f {"x":1}`, 1},
		{"last of two members", []parse.Tool{{Name: "f", Parameters: jsontext.Value(`{"properties":{"x":{"type":"integer","type":"string"}}}`)}}, `f {"x":"1"}`, 0},
		{"null", []parse.Tool{{Name: "f", Parameters: jsontext.Value(`null`)}}, `f {"x":1}`, 1},
	} {
		got := feed(t, parse.NewTools(c.tools), call("f", "x", "1"))
		if want := (result{calls: []string{c.want}, report: parse.Report{Marker: true, Calls: 1, Mismatches: c.count}}); got.String() != want.String() {
			t.Errorf("%s: %v\nwant %v", c.name, got, want)
		}
	}
}

// What cannot belong to a call is not kept waiting, and nothing that may is shown.
func TestHolding(t *testing.T) {
	tools := parse.NewTools([]parse.Tool{g})
	for _, c := range []struct{ in, shown string }{
		{"a", "a"},
		{"a \n", "a"},
		{"a <", "a"},
		{"a <tool_call", "a"},
		{"a <tool_x", "a <tool_x"},
		{"a <tool_call>\n<function=g", "a"},
		{"a <tool_call>x", "a <tool_call>x"},
		{"a <tool_call>\n<function=h>", "a <tool_call>\n<function=h>"},
		{"a <tool_call>\n<function=g!", "a <tool_call>\n<function=g!"},
		{"a " + call("g"), "a"},
		{"a " + call("g") + "\n", "a"},
		{"a " + call("g") + "\n.", "a " + call("g") + "\n."},
		{"a <tool_call>x b ", "a <tool_call>x b "},
	} {
		p := tools.Parser(64)
		shown := ""
		for _, e := range p.Feed(c.in) {
			shown += e.Text
		}
		if shown != c.shown {
			t.Errorf("%q shows %q, want %q", c.in, shown, c.shown)
		}
	}
}

// pieces that texts are put together from at random: enough structure to be calls now and then, enough damage to be none.
var pieces = []string{
	"<tool_call>", "</tool_call>", "<function=f>", "<function=g>", "<function=h>", "<function=", "</function>", "<parameter=i>", "<parameter=s>", "<parameter=",
	"</parameter>", "<parameter=q>", ">", "<", "\n", "\r\n", " ", "\u3000", "é", "1", "2.50", "true", "{\"a\": [1]}", "x",
}

func randomText(r *rand.Rand) string {
	var b strings.Builder
	for range r.IntN(12) {
		switch r.IntN(4) {
		case 0:
			b.WriteString(pieces[r.IntN(len(pieces))])
		case 1:
			b.WriteString(call([]string{"f", "g"}[r.IntN(2)]))
		default:
			var args []string
			for _, key := range r.Perm(4)[:r.IntN(4)] {
				value := ""
				for range r.IntN(4) {
					value += pieces[r.IntN(len(pieces))]
				}
				args = append(args, []string{"i", "s", "free", "new"}[key], value)
			}
			b.WriteString(call("f", args...))
			if r.IntN(2) == 0 {
				b.WriteByte('\n')
			}
		}
	}
	text := b.String()
	if len(text) > 0 && r.IntN(4) == 0 { // damage
		i := r.IntN(len(text))
		text = text[:i] + text[i+r.IntN(min(4, len(text)-i)):]
	}
	return text
}

// split cuts a text like commits of several tokens do.
func split(r *rand.Rand, text string) []string {
	var out []string
	for len(text) > 0 {
		n := 1 + r.IntN(min(len(text), 1+r.IntN(40)))
		out, text = append(out, text[:n]), text[n:]
	}
	return out
}

func TestRandom(t *testing.T) {
	tools := parse.NewTools([]parse.Tool{f, g})
	met := map[parse.Reason]int{}
	withCalls := 0
	for seed := range uint64(10000) {
		r := rand.New(rand.NewPCG(seed, 1))
		text := randomText(r)
		want := oracle(text)
		if got := feed(t, tools, split(r, text)...); got.String() != want.String() {
			t.Fatalf("seed %d, %q:\n%v\nwant %v", seed, text, got, want)
		}
		met[want.report.Fallback]++
		if len(want.calls) > 0 {
			withCalls++
		}
	}
	for _, why := range []parse.Reason{parse.None, parse.MalformedStructure, parse.DuplicateParameter, parse.InvalidToolName, parse.UndeclaredTool, parse.TrailingContent} {
		if met[why] == 0 && why != parse.DuplicateParameter {
			t.Errorf("no text is %q: %v", why, met)
		}
	}
	if withCalls < 1000 {
		t.Errorf("only %d texts have calls", withCalls)
	}
}

func FuzzParser(f1 *testing.F) {
	for _, c := range cases {
		f1.Add(c.text, uint64(1))
	}
	tools := parse.NewTools([]parse.Tool{f, g})
	f1.Fuzz(func(t *testing.T, text string, seed uint64) {
		want := feed(t, tools, text)
		if got := feed(t, tools, split(rand.New(rand.NewPCG(seed, 2)), text)...); got.String() != want.String() {
			t.Errorf("%q:\n%v\nwhole %v", text, got, want)
		}
		if want := oracle(text); strings.ToValidUTF8(text, "") == text {
			if got := feed(t, tools, text); got.String() != want.String() {
				t.Errorf("%q:\n%v\nwant %v", text, got, want)
			}
		}
		for _, c := range want.calls {
			if _, args, _ := strings.Cut(c, " "); jsontext.Value(args).Kind() != '{' || !jsontext.Value(args).IsValid() {
				t.Errorf("%q: %s is not an object", text, args)
			}
		}
		if want.report.Calls == 0 && want.content != text {
			t.Errorf("%q: text lost: %q", text, want.content)
		}
	})
}

// Bytes that come one by one, and what never ends, take linear time: a second for each would be far more than it takes.
func TestLinear(t *testing.T) {
	tools := parse.NewTools([]parse.Tool{f, g})
	for _, c := range []struct{ start, more string }{
		{"", " "},
		{"", "<"},
		{"", "<tool_call"},
		{"", "é"},
		{"<tool_call>", " "},
		{"<tool_call><function=f><parameter=", "k"},
		{"<tool_call><function=f><parameter=s>", "<parameter="},
		{"<tool_call><function=f><parameter=s>", "<parameter=x>"},
		{"<tool_call><function=f><parameter=s><parameter=", "k"},
		{call("g"), " "},
	} {
		p := tools.Parser(64)
		p.Feed(c.start)
		more := strings.Repeat(c.more, 1<<18/len(c.more))
		for i := range len(more) {
			p.Feed(more[i : i+1])
		}
		p.Finish()
	}
}

func BenchmarkParser(b *testing.B) {
	tools := parse.NewTools([]parse.Tool{f})
	text := strings.Repeat("word ", 1000) + call("f", "s", strings.Repeat("line of <code>\n", 1000))
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		p := tools.Parser(64)
		for i := 0; i < len(text); i += 4 {
			p.Feed(text[i:min(i+4, len(text))])
		}
		p.Finish()
	}
}
