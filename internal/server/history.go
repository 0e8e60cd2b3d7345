package server

import (
	"bytes"
	"encoding/json/jsontext"
	"slices"

	"ninfer/internal/front"
)

// What Responses and Messages bring into the form of Chat Completions, so that the same conversation gives the same prompt.

// functionTool writes the declaration of a tool in the form that the model sees, {"type":"function","function":{…}}: the members of a flat
// declaration in the order and spelling received, under other names where names has one; those that names calls "" and those that are null
// are left out.
func functionTool(raw jsontext.Value, names map[string]string) jsontext.Value {
	out := []byte(`{"type":"function","function":{`)
	first := true
	each(raw, func(name string, value jsontext.Value) {
		if other, ok := names[name]; ok {
			name = other
		}
		if name == "" || value.Kind() == 'n' {
			return
		}
		if !first {
			out = append(out, ',')
		}
		first = false
		out, _ = jsontext.AppendQuote(out, name) // it was JSON
		out = append(append(out, ':'), value...)
	})
	return append(out, '}', '}')
}

// each calls f with the members of an object in their order. The value must be an object without fault.
func each(raw jsontext.Value, f func(name string, value jsontext.Value)) {
	d := jsontext.NewDecoder(bytes.NewReader(raw), jsontext.AllowDuplicateNames(true))
	d.ReadToken()
	for d.PeekKind() == '"' {
		name, err := d.ReadToken()
		if err != nil {
			return
		}
		text := name.String()
		value, err := d.ReadValue()
		if err != nil {
			return
		}
		f(text, slices.Clone(value))
	}
}

// inCallOrder puts results in the order of the calls that they answer. fault is what is wrong with the first that cannot be placed, and at
// its index among the results; or, with at -1, that a call has none.
func inCallOrder(calls []front.ToolCall, results []front.Message) (ordered []front.Message, at int, fault string) {
	ordered = make([]front.Message, len(calls))
	placed := make([]bool, len(calls))
	for i, r := range results {
		call := slices.IndexFunc(calls, func(c front.ToolCall) bool { return c.ID == r.ToolCallID })
		switch {
		case call < 0:
			return nil, i, "answers no call of the turn before it"
		case placed[call]:
			return nil, i, "answers a call that has its result"
		}
		ordered[call], placed[call] = r, true
	}
	if missing := slices.Index(placed, false); missing >= 0 {
		return nil, -1, "a call has no result: " + calls[missing].ID
	}
	return ordered, 0, ""
}
