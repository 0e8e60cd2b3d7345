package artifact

import (
	"bytes"
	"encoding/json/jsontext"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// parsed is a directory with the places in its text that writing and
// verifying care about.
type parsed struct {
	Directory
	textEnd int // first byte after the root value
	// contentEnd is the length of the text that enters a content id: all up
	// to `,"files":`. It is -1 where files is not the last member or is
	// not written that way.
	contentEnd int
}

// parseDirectory reads a directory text (which may have white space around
// the root value) and checks rows R5 to R13 of the rejection table. path is
// the entry's path and names the file in errors; entry is its base name.
func parseDirectory(text []byte, path, entry string) (*parsed, error) {
	end, err := checkSyntax(text, path)
	if err != nil {
		return nil, err
	}
	p := &parser{path: path, dec: jsontext.NewDecoder(bytes.NewReader(text))}
	out := &parsed{textEnd: end, contentEnd: -1}
	if err := p.root(text, out); err != nil {
		return nil, err
	}
	if err := validate(&out.Directory, path, entry); err != nil {
		return nil, err
	}
	return out, nil
}

// checkSyntax checks that a text is one JSON value with nothing but white
// space around it (row R5) and gives the first byte after the value. It looks
// at the whole text, so that a broken one is reported as such whatever its
// first half says.
func checkSyntax(text []byte, path string) (end int, err error) {
	if bytes.HasPrefix(text, []byte("\xef\xbb\xbf")) {
		return 0, reject(path, 5, "the text begins with a byte order mark")
	}
	d := jsontext.NewDecoder(bytes.NewReader(text))
	if err := d.SkipValue(); err != nil {
		if errors.Is(err, io.EOF) {
			return 0, reject(path, 5, "the text is empty")
		}
		return 0, &FormatError{Path: path, Rule: 5, Class: classes[5], Err: oneLine(err)}
	}
	end = int(d.InputOffset())
	if i := bytes.IndexFunc(text[end:], func(r rune) bool { return !strings.ContainsRune(" \t\r\n", r) }); i >= 0 {
		return 0, reject(path, 5, "data after the root value at byte %d", end+i)
	}
	return end, nil
}

// oneLine replaces an error by one whose text has no line break.
func oneLine(err error) error {
	if s := err.Error(); strings.ContainsAny(s, "\r\n") {
		return errors.New(strings.Join(strings.Fields(s), " "))
	}
	return err
}

// parser reads typed values from a text whose syntax was checked before. Its
// errors are R6 unless a place has a row of its own.
type parser struct {
	path string
	dec  *jsontext.Decoder
}

// fail reports a fault at the value read last.
func (p *parser) fail(rule int, format string, args ...any) error {
	where := string(p.dec.StackPointer())
	switch {
	case where == "":
		where = "root"
	case strings.ContainsFunc(where, unicode.IsControl):
		where = quote(where) // a name may have line breaks in it
	}
	return reject(p.path, rule, "%s: %s", where, fmt.Sprintf(format, args...))
}

func (p *parser) broken(err error) error {
	return &FormatError{Path: p.path, Rule: 5, Class: classes[5], Err: oneLine(err)}
}

func kindName(k jsontext.Kind) string {
	switch k {
	case '{':
		return "an object"
	case '[':
		return "an array"
	case '"':
		return "a string"
	case '0':
		return "a number"
	case 'n':
		return "null"
	}
	return "a boolean"
}

// token reads one token of the wanted kind.
func (p *parser) token(rule int, want jsontext.Kind) (jsontext.Token, error) {
	if k := p.dec.PeekKind(); k != want && k > 0 {
		if err := p.dec.SkipValue(); err != nil {
			return jsontext.Token{}, p.broken(err)
		}
		return jsontext.Token{}, p.fail(rule, "want %s, not %s", kindName(want), kindName(k))
	}
	t, err := p.dec.ReadToken()
	if err != nil {
		return t, p.broken(err)
	}
	return t, nil
}

// object calls member for every member of an object; member must read the
// value.
func (p *parser) object(rule int, member func(name string) error) error {
	if _, err := p.token(rule, '{'); err != nil {
		return err
	}
	for p.dec.PeekKind() != '}' {
		t, err := p.token(rule, '"')
		if err != nil {
			return err
		}
		if err := member(t.String()); err != nil {
			return err
		}
	}
	_, err := p.token(rule, '}')
	return err
}

// array calls element for every element of an array; element must read it.
func (p *parser) array(rule int, element func(i int) error) error {
	if _, err := p.token(rule, '['); err != nil {
		return err
	}
	for i := 0; p.dec.PeekKind() != ']'; i++ {
		if err := element(i); err != nil {
			return err
		}
	}
	_, err := p.token(rule, ']')
	return err
}

func (p *parser) str(rule int) (string, error) {
	t, err := p.token(rule, '"')
	if err != nil {
		return "", err
	}
	return t.String(), nil
}

// id reads a non-empty string without NUL; the decoder has refused lone
// surrogates and invalid UTF-8.
func (p *parser) id(rule int) (string, error) {
	s, err := p.str(rule)
	if err == nil && !isID(s) {
		return "", p.fail(rule, "%q is not an id: it must be non-empty and free of U+0000", s)
	}
	return s, err
}

func isID(s string) bool {
	return s != "" && strings.IndexByte(s, 0) < 0 && utf8.ValidString(s)
}

// integer reads a JSON integer of at least low. Values from 2^63 on are legal
// in the format but no file system holds such a file; they are refused here.
func (p *parser) integer(rule int, low int64) (int64, error) {
	t, err := p.token(rule, '0')
	if err != nil {
		return 0, err
	}
	s := t.String()
	if strings.ContainsAny(s, ".eE") {
		return 0, p.fail(rule, "%s is not an integer", s)
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return 0, p.fail(rule, "%s is out of range (0 to %d)", s, int64(math.MaxInt64))
	}
	if n < low {
		return 0, p.fail(rule, "%d is less than %d", n, low)
	}
	return n, nil
}

// raw reads an open object verbatim.
func (p *parser) raw(rule int) (jsontext.Value, error) {
	if k := p.dec.PeekKind(); k != '{' {
		_, err := p.token(rule, '{')
		return nil, err
	}
	v, err := p.dec.ReadValue()
	if err != nil {
		return nil, p.broken(err)
	}
	return bytes.Clone(v), nil
}

// unknown skips an unlisted member and reports it.
func (p *parser) unknown(rule int, name string) error {
	if err := p.dec.SkipValue(); err != nil {
		return p.broken(err)
	}
	return p.fail(rule, "unknown member %q", name)
}

// seen is the set of members met in a record.
type seen map[string]bool

func (p *parser) missing(rule int, have seen, what string, names ...string) error {
	for _, n := range names {
		if !have[n] {
			return p.fail(rule, "%s lacks member %q", what, n)
		}
	}
	return nil
}

func (p *parser) root(text []byte, out *parsed) error {
	have := seen{}
	out.Metadata, out.Provenance = jsontext.Value("{}"), jsontext.Value("{}")
	last := ""
	previousEnd := 0
	err := p.object(6, func(name string) (err error) {
		have[name], last = true, name
		switch name {
		case "components":
			err = p.object(6, func(id string) error {
				c, err := p.component(id)
				out.Components = append(out.Components, c)
				return err
			})
		case "objects":
			err = p.array(6, func(int) error {
				o, err := p.objectRecord()
				out.Objects = append(out.Objects, o)
				return err
			})
		case "bindings":
			err = p.object(6, func(name string) error {
				if !isID(name) {
					return p.fail(6, "binding name %q is not an id", name)
				}
				b, err := p.binding(11)
				out.Bindings.Set(name, b)
				return err
			})
		case "uses":
			err = p.array(6, func(int) error {
				u, err := p.use()
				out.Uses = append(out.Uses, u)
				return err
			})
		case "files":
			if bytes.HasPrefix(text[previousEnd:], []byte(`,"files":`)) {
				out.contentEnd = previousEnd
			}
			err = p.array(6, func(i int) error {
				f, err := p.fileRecord(i)
				out.Files = append(out.Files, f)
				return err
			})
		case "metadata":
			out.Metadata, err = p.raw(13)
		case "provenance":
			out.Provenance, err = p.raw(13)
		default:
			err = p.unknown(6, name)
		}
		previousEnd = int(p.dec.InputOffset())
		return err
	})
	if err != nil {
		return err
	}
	if last != "files" {
		out.contentEnd = -1
	}
	return p.missing(6, have, "the directory", "components", "objects", "bindings", "uses", "files")
}

func (p *parser) component(id string) (Component, error) {
	c := Component{ID: id}
	if !isID(id) {
		return c, p.fail(6, "component name %q is not an id", id)
	}
	have := seen{}
	err := p.object(6, func(name string) (err error) {
		have[name] = true
		switch name {
		case "config":
			c.Config, err = p.raw(6)
		case "target":
			c.Target, err = p.id(6)
		case "resources":
			err = p.object(6, func(role string) error {
				if !isID(role) {
					return p.fail(6, "resource role %q is not an id", role)
				}
				object, err := p.id(6)
				c.Resources.Set(role, object)
				return err
			})
		case "proposal":
			c.Proposal, err = p.proposal()
		default:
			err = p.unknown(6, name)
		}
		return err
	})
	if err == nil {
		err = p.missing(6, have, "the component", "config")
	}
	return c, err
}

func (p *parser) proposal() (*Proposal, error) {
	out := &Proposal{}
	have := seen{}
	err := p.object(6, func(name string) (err error) {
		have[name] = true
		switch name {
		case "domain":
			out.Domain, err = p.str(6)
		case "rows":
			out.Rows, err = p.integer(6, 1)
		default:
			err = p.unknown(6, name)
		}
		return err
	})
	if err == nil {
		err = p.missing(6, have, "the proposal", "domain")
	}
	return out, err
}

func (p *parser) objectRecord() (Object, error) {
	var o Object
	var kind string
	have := seen{}
	err := p.object(6, func(name string) (err error) {
		have[name] = true
		switch name {
		case "id":
			o.ID, err = p.id(8)
		case "kind":
			kind, err = p.str(6)
		case "shape":
			o.Shape = []int{}
			err = p.array(6, func(int) error {
				n, err := p.integer(6, math.MinInt64)
				if err == nil && n <= 0 {
					err = p.fail(8, "dimension %d is not positive", n)
				}
				o.Shape = append(o.Shape, int(n))
				return err
			})
		case "format":
			o.Format, err = p.id(8)
		case "layout":
			o.Layout, err = p.id(8)
		case "encoding":
			o.Encoding, err = p.id(8)
		case "offset":
			o.Offset, err = p.integer(6, 0)
		case "bytes":
			o.Bytes, err = p.integer(6, 1)
		default:
			err = p.unknown(6, name)
		}
		return err
	})
	if err != nil {
		return o, err
	}
	if err := p.missing(6, have, "the object", "id", "kind", "offset", "bytes"); err != nil {
		return o, err
	}
	var foreign []string
	switch kind {
	case "tensor":
		err = p.missing(6, have, "the tensor", "shape", "format", "layout")
		foreign = []string{"encoding"}
	case "resource":
		o.Resource = true
		err = p.missing(6, have, "the resource", "encoding")
		foreign = []string{"shape", "format", "layout"}
	default:
		return o, p.fail(8, "object %q has unknown kind %q", o.ID, kind)
	}
	for _, name := range foreign {
		if err == nil && have[name] {
			err = p.fail(6, "a %s has no member %q", kind, name)
		}
	}
	return o, err
}

// binding reads one of the two forms; every fault in it is rule.
func (p *parser) binding(rule int) (Binding, error) {
	var b Binding
	have := seen{}
	err := p.object(rule, func(name string) (err error) {
		have[name] = true
		switch name {
		case "object":
			b.Object, err = p.id(rule)
		case "parts":
			err = p.array(rule, func(int) error {
				part, err := p.part(rule)
				b.Parts = append(b.Parts, part)
				return err
			})
		default:
			err = p.unknown(rule, name)
		}
		return err
	})
	switch {
	case err != nil:
	case have["object"] == have["parts"]:
		err = p.fail(rule, "a binding has either object or parts")
	case have["parts"] && len(b.Parts) == 0:
		err = p.fail(rule, "parts is empty")
	}
	return b, err
}

func (p *parser) part(rule int) (Part, error) {
	var out Part
	have := seen{}
	err := p.object(rule, func(name string) (err error) {
		have[name] = true
		switch name {
		case "object":
			out.Object, err = p.id(rule)
		case "range":
			var r []int64
			err = p.array(rule, func(int) error {
				n, err := p.integer(rule, 0)
				r = append(r, n)
				return err
			})
			if err == nil && len(r) != 2 {
				err = p.fail(rule, "a range is two integers, not %d", len(r))
			}
			if err == nil {
				out.Begin, out.End = r[0], r[1]
			}
		default:
			err = p.unknown(rule, name)
		}
		return err
	})
	if err == nil {
		err = p.missing(rule, have, "the part", "object", "range")
	}
	return out, err
}

func (p *parser) use() (Use, error) {
	var u Use
	have := seen{}
	err := p.object(6, func(name string) (err error) {
		have[name] = true
		switch name {
		case "parameter":
			u.Parameter, err = p.id(6)
		case "input":
			u.Input, err = p.id(6)
		case "activation_policy":
			u.Policy, err = p.str(6)
			if err == nil && u.Policy == "" {
				err = p.fail(12, "unknown activation policy \"\"")
			}
		case "auxiliaries":
			err = p.object(6, func(role string) error {
				if !isID(role) {
					return p.fail(6, "auxiliary role %q is not an id", role)
				}
				b, err := p.binding(12)
				u.Auxiliaries.Set(role, b)
				return err
			})
		default:
			err = p.unknown(6, name)
		}
		return err
	})
	if err == nil {
		err = p.missing(6, have, "the use", "parameter", "input")
	}
	return u, err
}

func (p *parser) fileRecord(i int) (FileRecord, error) {
	var f FileRecord
	have := seen{}
	err := p.object(6, func(name string) (err error) {
		have[name] = true
		switch name {
		case "path":
			isNull := p.dec.PeekKind() == 'n'
			switch {
			case i == 0 && !isNull:
				if err = p.dec.SkipValue(); err != nil {
					return p.broken(err)
				}
				err = p.fail(7, "the first file record is the entry and has path null")
			case isNull:
				_, err = p.token(7, 'n')
				if err == nil && i > 0 {
					err = p.fail(7, "a continuation file needs a name")
				}
			default:
				f.Path, err = p.id(7)
			}
		case "payload_bytes":
			f.PayloadBytes, err = p.integer(7, 1)
		default:
			err = p.unknown(6, name)
		}
		return err
	})
	if err == nil {
		err = p.missing(6, have, "the file record", "path", "payload_bytes")
	}
	return f, err
}
