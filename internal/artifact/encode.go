package artifact

import (
	"bytes"
	"encoding/json/jsontext"
	"fmt"
	"strconv"
	"unicode/utf8"
)

// The directory text is fixed to the byte (docs/format.md 1.5): no white
// space, member order as listed here, non-ASCII characters literal. A general
// JSON encoder sorts, escapes or reformats numbers, so the text is written by
// hand. These bytes enter artifact ids and published digests.

const hexDigits = "0123456789abcdef"

// appendString appends s as a JSON string, escaping only what must be.
func appendString(dst []byte, s string) []byte {
	dst = append(dst, '"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c >= 0x20:
			dst = append(dst, c)
		case c == '\b':
			dst = append(dst, '\\', 'b')
		case c == '\t':
			dst = append(dst, '\\', 't')
		case c == '\n':
			dst = append(dst, '\\', 'n')
		case c == '\f':
			dst = append(dst, '\\', 'f')
		case c == '\r':
			dst = append(dst, '\\', 'r')
		default:
			dst = append(dst, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		}
	}
	return append(dst, '"')
}

func appendInt(dst []byte, n int64) []byte { return strconv.AppendInt(dst, n, 10) }

// appendRaw appends an open object without white space and with strings in
// the directory's spelling; member order and the spelling of numbers stay.
func appendRaw(dst []byte, v jsontext.Value) ([]byte, error) {
	if len(v) == 0 {
		return append(dst, '{', '}'), nil
	}
	dec := jsontext.NewDecoder(bytes.NewReader(v))
	if k := dec.PeekKind(); k != '{' {
		return nil, fmt.Errorf("want a JSON object, not %.40q", []byte(v))
	}
	dst, err := appendValue(dst, dec)
	if err != nil {
		return nil, oneLine(err)
	}
	if rest := bytes.TrimLeft(v[dec.InputOffset():], " \t\r\n"); len(rest) > 0 {
		return nil, fmt.Errorf("data after the JSON object: %.40q", rest)
	}
	return dst, nil
}

// appendValue copies one value; the decoder bounds the depth.
func appendValue(dst []byte, dec *jsontext.Decoder) ([]byte, error) {
	kind := dec.PeekKind()
	if kind != '{' && kind != '[' {
		return appendScalar(dst, dec)
	}
	if _, err := dec.ReadToken(); err != nil {
		return nil, err
	}
	dst = append(dst, byte(kind))
	end := jsontext.Kind(kind + 2) // '}' or ']'
	for i := 0; dec.PeekKind() != end; i++ {
		if i > 0 {
			dst = append(dst, ',')
		}
		var err error
		if kind == '{' {
			if dst, err = appendScalar(dst, dec); err != nil {
				return nil, err
			}
			dst = append(dst, ':')
		}
		if dst, err = appendValue(dst, dec); err != nil {
			return nil, err
		}
	}
	_, err := dec.ReadToken()
	return append(dst, byte(end)), err
}

// appendScalar copies a string in the directory's spelling, anything else
// verbatim.
func appendScalar(dst []byte, dec *jsontext.Decoder) ([]byte, error) {
	v, err := dec.ReadValue()
	if err != nil || v.Kind() != '"' {
		return append(dst, v...), err
	}
	s, err := jsontext.AppendUnquote(nil, v)
	return appendString(dst, string(s)), err
}

// order says in which order members are written.
type order int

const (
	converterOrder order = iota // docs/format.md 1.5
	upgradeOrder                // of the dialect L upgrade, docs/format.md 1.9
)

// appendContent appends the directory text up to but excluding `,"files":`.
func appendContent(dst []byte, d *Directory, ord order) ([]byte, error) {
	for _, s := range names(d) {
		if !utf8.ValidString(s) {
			return nil, fmt.Errorf("name %q is not valid UTF-8", s)
		}
	}
	members := []string{"components", "objects", "bindings", "uses", "metadata", "provenance"}
	if ord == upgradeOrder {
		members = []string{"components", "bindings", "uses", "objects", "metadata", "provenance"}
	}
	var err error
	for i, name := range members {
		if i == 0 {
			dst = append(dst, '{')
		} else {
			dst = append(dst, ',')
		}
		dst = append(appendString(dst, name), ':')
		switch name {
		case "components":
			dst, err = appendComponents(dst, d.Components)
		case "objects":
			for i := range d.Objects {
				dst = append(dst, "[,"[min(i, 1)])
				dst = appendObject(dst, &d.Objects[i], ord)
			}
			dst = append(dst, ']')
		case "bindings":
			dst = appendBindings(dst, &d.Bindings)
		case "uses":
			dst = appendUses(dst, d.Uses)
		case "metadata":
			dst, err = appendRaw(dst, d.Metadata)
		case "provenance":
			dst, err = appendRaw(dst, d.Provenance)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return dst, nil
}

// names are all strings of a directory that go into the text as they are.
func names(d *Directory) []string {
	var out []string
	binding := func(b Binding) {
		out = append(out, b.Object)
		for _, p := range b.Parts {
			out = append(out, p.Object)
		}
	}
	for i := range d.Components {
		c := &d.Components[i]
		out = append(out, c.ID, c.Target)
		for role, id := range c.Resources.All() {
			out = append(out, role, id)
		}
	}
	for i := range d.Objects {
		o := &d.Objects[i]
		out = append(out, o.ID, o.Encoding, o.Format, o.Layout)
	}
	for name, b := range d.Bindings.All() {
		out = append(out, name)
		binding(b)
	}
	for i := range d.Uses {
		u := &d.Uses[i]
		out = append(out, u.Parameter, u.Input, u.Policy)
		for role, b := range u.Auxiliaries.All() {
			out = append(out, role)
			binding(b)
		}
	}
	return out
}

func appendComponents(dst []byte, components []Component) ([]byte, error) {
	dst = append(dst, '{')
	for i := range components {
		c := &components[i]
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(appendString(dst, c.ID), `:{"config":`...)
		var err error
		if dst, err = appendRaw(dst, c.Config); err != nil {
			return nil, fmt.Errorf("config of %q: %w", c.ID, err)
		}
		if c.Target != "" {
			dst = appendString(append(dst, `,"target":`...), c.Target)
		}
		if c.Resources.Len() > 0 {
			dst = append(dst, `,"resources":`...)
			sep := byte('{')
			for role, id := range c.Resources.All() {
				dst = appendString(append(dst, sep), role)
				dst = appendString(append(dst, ':'), id)
				sep = ','
			}
			dst = append(dst, '}')
		}
		if p := c.Proposal; p != nil {
			dst = appendString(append(dst, `,"proposal":{"domain":`...), p.Domain)
			if p.Rows != 0 {
				dst = appendInt(append(dst, `,"rows":`...), p.Rows)
			}
			dst = append(dst, '}')
		}
		dst = append(dst, '}')
	}
	return append(dst, '}'), nil
}

// appendObject appends one object record.
func appendObject(dst []byte, o *Object, ord order) []byte {
	field := func(sep byte, name string) { dst = append(appendString(append(dst, sep), name), ':') }
	kind := func() { field(',', "kind"); dst = appendString(dst, o.kind()) }
	place := func() {
		field(',', "offset")
		dst = appendInt(dst, o.Offset)
		field(',', "bytes")
		dst = appendInt(dst, o.Bytes)
	}
	content := func() {
		if o.Resource {
			field(',', "encoding")
			dst = appendString(dst, o.Encoding)
			return
		}
		field(',', "shape")
		dst = append(dst, '[')
		for i, n := range o.Shape {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = appendInt(dst, int64(n))
		}
		dst = append(dst, ']')
		field(',', "format")
		dst = appendString(dst, o.Format)
		field(',', "layout")
		dst = appendString(dst, o.Layout)
	}
	field('{', "id")
	dst = appendString(dst, o.ID)
	if ord == upgradeOrder {
		kind()
		place()
		content()
	} else {
		content()
		place()
		kind()
	}
	return append(dst, '}')
}

func appendBinding(dst []byte, b Binding) []byte {
	if len(b.Parts) == 0 {
		return append(appendString(append(dst, `{"object":`...), b.Object), '}')
	}
	dst = append(dst, `{"parts":`...)
	for i, p := range b.Parts {
		dst = append(dst, "[,"[min(i, 1)])
		dst = appendString(append(dst, `{"object":`...), p.Object)
		dst = appendInt(append(dst, `,"range":[`...), p.Begin)
		dst = appendInt(append(dst, ','), p.End)
		dst = append(dst, `]}`...)
	}
	return append(dst, `]}`...)
}

func appendBindings(dst []byte, m *Map[Binding]) []byte {
	dst = append(dst, '{')
	first := true
	for name, b := range m.All() {
		if !first {
			dst = append(dst, ',')
		}
		first = false
		dst = append(appendString(dst, name), ':')
		dst = appendBinding(dst, b)
	}
	return append(dst, '}')
}

func appendUses(dst []byte, uses []Use) []byte {
	dst = append(dst, '[')
	for i := range uses {
		u := &uses[i]
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendString(append(dst, `{"parameter":`...), u.Parameter)
		dst = appendString(append(dst, `,"input":`...), u.Input)
		if u.Policy != "" {
			dst = appendString(append(dst, `,"activation_policy":`...), u.Policy)
		}
		if u.Auxiliaries.Len() > 0 {
			dst = append(dst, `,"auxiliaries":`...)
			dst = appendBindings(dst, &u.Auxiliaries)
		}
		dst = append(dst, '}')
	}
	return append(dst, ']')
}

// appendFiles appends `,"files":`, the records and the end of the root.
func appendFiles(dst []byte, files []FileRecord) []byte {
	dst = append(dst, `,"files":`...)
	for i, f := range files {
		dst = append(dst, "[,"[min(i, 1)])
		dst = append(dst, `{"path":`...)
		if i == 0 {
			dst = append(dst, "null"...)
		} else {
			dst = appendString(dst, f.Path)
		}
		dst = append(appendInt(append(dst, `,"payload_bytes":`...), f.PayloadBytes), '}')
	}
	return append(dst, `]}`...)
}
