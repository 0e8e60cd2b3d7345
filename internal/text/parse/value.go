package parse

import (
	"bytes"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"strconv"
	"strings"
)

// Tool is a declared function.
type Tool struct {
	Name string
	// Parameters is its JSON Schema, in any form: what is not understood leaves arguments untyped. Nil declares no parameters.
	Parameters jsontext.Value
}

// Tools are the functions that a request declared. They may be used by any number of parsers at a time.
type Tools struct {
	byName map[string]*tool
}

// tool is what is known of a function.
type tool struct {
	untyped    bool // declared twice, differently
	properties map[string]types
}

// types are the types that a schema admits, as bits; 0 is no usable statement.
type types uint8

const (
	typeString types = 1 << iota
	typeInteger
	typeNumber
	typeBoolean
	typeNull
	typeObject
	typeArray
)

var typeNames = map[string]types{
	"string": typeString, "integer": typeInteger, "number": typeNumber, "boolean": typeBoolean, "null": typeNull, "object": typeObject, "array": typeArray,
}

// NewTools reads the schemas.
func NewTools(declared []Tool) *Tools {
	t := &Tools{byName: make(map[string]*tool, len(declared))}
	text := make(map[string]string, len(declared))
	for _, d := range declared {
		schema := d.Parameters.Clone()
		if schema.Compact() != nil {
			schema = nil
		}
		if _, again := t.byName[d.Name]; again {
			if text[d.Name] != string(schema) {
				t.byName[d.Name] = &tool{untyped: true}
			}
			continue
		}
		t.byName[d.Name], text[d.Name] = &tool{properties: properties(schema)}, string(schema)
	}
	return t
}

// Parser returns a parser at the start of an answer. A function's name has at most maxName characters.
func (t *Tools) Parser(maxName int) *Parser { return &Parser{tools: t, maxName: maxName} }

// properties reads the types of an object schema's properties.
func properties(schema jsontext.Value) map[string]types {
	out := map[string]types{}
	for name, s := range members(members(schema)["properties"]) {
		out[name] = admitted(s)
	}
	return out
}

// members are those of a JSON object, none of anything else. Of two with one name the last counts.
func members(v jsontext.Value) map[string]jsontext.Value {
	var out map[string]jsontext.Value
	if v.Kind() != '{' || json.Unmarshal(v, &out, jsontext.AllowDuplicateNames(true)) != nil {
		return nil
	}
	return out
}

// admitted are the types of a property's schema: its type, or those of all branches of its anyOf or oneOf. Whatever else the schema says
// does not count.
func admitted(schema jsontext.Value) types {
	m := members(schema)
	if t := named(m["type"]); t != 0 {
		return t
	}
	for _, union := range []string{"anyOf", "oneOf"} {
		var branches []jsontext.Value
		if m[union].Kind() != '[' || json.Unmarshal(m[union], &branches, jsontext.AllowDuplicateNames(true)) != nil {
			continue
		}
		var all types
		for _, b := range branches {
			t := named(members(b)["type"])
			if t == 0 {
				all = 0
				break
			}
			all |= t
		}
		if all != 0 {
			return all
		}
	}
	return 0
}

// named reads a type member: a name or a list of names.
func named(v jsontext.Value) types {
	var names []string
	switch v.Kind() {
	case '"':
		names = []string{""}
		if json.Unmarshal(v, &names[0]) != nil {
			return 0
		}
	case '[':
		if json.Unmarshal(v, &names) != nil {
			return 0
		}
	}
	var all types
	for _, n := range names {
		t, ok := typeNames[n]
		if !ok {
			return 0
		}
		all |= t
	}
	return all
}

// argument ends the parameter being read.
func (p *Parser) argument(text string) {
	c := p.call
	text = trimLine(text)
	want, declared := c.tool.properties[c.key]
	var value []byte
	switch {
	case want&typeString != 0:
		value = quote(text)
	case want != 0 && text == "":
		p.report.Omitted++
		return
	default:
		v, kind := typed(text, want)
		if v == nil {
			v, kind = quote(text), typeString
		}
		// A schema that says nothing is matched by everything; an argument that is not declared is a mismatch whatever it is.
		if want != 0 && kind&want == 0 || !declared && !c.tool.untyped {
			p.report.Mismatches++
		}
		value = v
	}
	if len(c.args) > 1 {
		c.args = append(c.args, ',')
	}
	c.args = append(append(append(c.args, quote(c.key)...), ':'), value...)
}

// trimLine takes one line end off each side.
func trimLine(text string) string {
	if after, ok := strings.CutPrefix(text, "\r\n"); ok {
		text = after
	} else {
		text = strings.TrimPrefix(text, "\n")
	}
	if before, ok := strings.CutSuffix(text, "\r\n"); ok {
		return before
	}
	return strings.TrimSuffix(text, "\n")
}

func quote(text string) []byte {
	out, _ := jsontext.AppendQuote(nil, text) // what is not UTF-8 becomes U+FFFD
	return out
}

// maxDepth bounds the nesting of a value that is taken as JSON. Deeper ones could not be sent back as a part of the history.
const maxDepth = 256

// typed reads the text of a value that need not be a string: its JSON and the types that it has, or nil if it is none. An object with two
// members of one name is none: as a string it loses nothing.
func typed(text string, want types) (jsontext.Value, types) {
	text = strings.TrimSpace(text)
	if want&typeBoolean != 0 {
		if lower := strings.ToLower(text); lower == "true" || lower == "false" {
			return jsontext.Value(lower), typeBoolean
		}
	}
	v := jsontext.Value(text)
	if !v.IsValid() || depth(text) > maxDepth || v.Compact() != nil {
		return nil, 0
	}
	switch v.Kind() {
	case '"':
		return v, typeString
	case '{':
		return v, typeObject
	case '[':
		return v, typeArray
	case 'n':
		return v, typeNull
	case 't', 'f':
		return v, typeBoolean
	}
	if whole(string(v)) {
		return v, typeInteger | typeNumber
	}
	return v, typeNumber
}

// depth is the most arrays and objects open at once in valid JSON.
func depth(text string) int {
	dec := jsontext.NewDecoder(bytes.NewBufferString(text))
	most := 0
	for {
		if _, err := dec.ReadToken(); err != nil {
			return most
		}
		most = max(most, dec.StackDepth())
	}
}

// whole reports whether a JSON number has no fraction: 230.0 and 1.5e1 have none.
func whole(number string) bool {
	number = strings.TrimPrefix(number, "-")
	mantissa, exponent := number, "0"
	if i := strings.IndexAny(number, "eE"); i >= 0 {
		mantissa, exponent = number[:i], number[i+1:]
	}
	before, after, _ := strings.Cut(mantissa, ".")
	digits := before + after
	significant := strings.TrimRight(digits, "0")
	if significant == "" {
		return true
	}
	e, err := strconv.Atoi(exponent)
	if err != nil {
		return !strings.HasPrefix(exponent, "-")
	}
	return e >= len(after)-(len(digits)-len(significant))
}
