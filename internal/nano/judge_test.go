package nano_test

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"ninfer/internal/front"
)

// expectation is the rule that an answer must satisfy (tools/nano/README.md).
type expectation struct {
	Kind      string         `json:"kind"`
	Text      string         `json:"text"`
	Value     jsontext.Value `json:"value"`
	Name      string         `json:"name"`
	Arguments jsontext.Value `json:"arguments"`
	All       []string       `json:"all"`
}

// output is what a client sees of a generation.
type output struct {
	text  string // of the answer, calls taken out
	calls []front.Event
	ended bool // by itself, not by a limit
}

// judge says what is wrong with an output, or nothing.
func (x expectation) judge(o output) error {
	content := strings.TrimSpace(o.text)
	if !o.ended {
		return fmt.Errorf("it did not end by itself: %.80q", content)
	}
	if x.Kind != "tool" && len(o.calls) > 0 {
		return fmt.Errorf("it calls %s", o.calls[0].Name)
	}
	switch x.Kind {
	case "exact":
		if content != x.Text {
			return fmt.Errorf("%q, want %q", content, x.Text)
		}
	case "json":
		if !equalJSON([]byte(content), x.Value) {
			return fmt.Errorf("%s, want %s", content, x.Value)
		}
	case "tool":
		switch {
		case len(o.calls) != 1:
			return fmt.Errorf("%d calls, want one: %.80q", len(o.calls), content)
		case o.calls[0].Name != x.Name || !equalJSON([]byte(o.calls[0].Text), x.Arguments):
			return fmt.Errorf("calls %s %s, want %s %s", o.calls[0].Name, o.calls[0].Text, x.Name, x.Arguments)
		}
	case "contains":
		for _, s := range x.All {
			if !strings.Contains(strings.ToLower(content), strings.ToLower(s)) {
				return fmt.Errorf("%q lacks %q", content, s)
			}
		}
	default:
		return fmt.Errorf("the rule %q is unknown", x.Kind)
	}
	return nil
}

// equalJSON compares two texts as JSON: the order of members does not count, and 1 is 1.0.
func equalJSON(a, b []byte) bool {
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && reflect.DeepEqual(x, y)
}

func TestJudge(t *testing.T) {
	exact := expectation{Kind: "exact", Text: "abc"}
	value := expectation{Kind: "json", Value: jsontext.Value(`{"a":1,"b":["x",null]}`)}
	tool := expectation{Kind: "tool", Name: "f", Arguments: jsontext.Value(`{"x":"1","y":2}`)}
	contains := expectation{Kind: "contains", All: []string{"--port", "8080"}}
	call := func(name, args string) front.Event { return front.Event{Kind: front.Call, Name: name, Text: args} }
	for i, c := range []struct {
		x  expectation
		o  output
		ok bool
	}{
		{exact, output{text: " abc\n", ended: true}, true},
		{exact, output{text: "abc"}, false},
		{exact, output{text: "abcd", ended: true}, false},
		{exact, output{text: "abc", ended: true, calls: []front.Event{call("f", "{}")}}, false},
		{value, output{text: "{\"b\": [\"x\", null], \"a\": 1.0}", ended: true}, true},
		{value, output{text: "{\"b\": [\"x\", null], \"a\": \"1\"}", ended: true}, false},
		{value, output{text: "Here: {\"b\": [\"x\", null], \"a\": 1}", ended: true}, false},
		{value, output{text: "{\"a\":1,\"b\":[\"x\",null]} {}", ended: true}, false},
		{tool, output{text: "I look.", calls: []front.Event{call("f", `{"y":2.0,"x":"1"}`)}, ended: true}, true},
		{tool, output{calls: []front.Event{call("f", `{"y":2,"x":1}`)}, ended: true}, false},
		{tool, output{calls: []front.Event{call("g", `{"y":2,"x":"1"}`)}, ended: true}, false},
		{tool, output{calls: []front.Event{call("f", `{"y":2,"x":"1"}`), call("f", `{"y":2,"x":"1"}`)}, ended: true}, false},
		{tool, output{text: "f", ended: true}, false},
		{contains, output{text: "Use --PORT 8080.", ended: true}, true},
		{contains, output{text: "Use --port 8,080.", ended: true}, false},
		{expectation{Kind: "other"}, output{ended: true}, false},
	} {
		if err := c.x.judge(c.o); (err == nil) != c.ok {
			t.Errorf("case %d: %v", i, err)
		}
	}
}
