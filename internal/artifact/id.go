package artifact

import (
	"bytes"
	"crypto/sha256"
	"encoding/json/jsontext"
	"fmt"
	"slices"
	"unicode/utf16"
)

// contentIDPrefix names the derivation; it has reached disk through the ids.
const contentIDPrefix = "ninfer/v3/content-id/1"

// contentID derives the id of an artifact from what it says and holds: the
// directory text without files, and the SHA-256 of every object and hole in
// payload order. Names, split, host and time do not enter. The result has the
// form of a version 8 UUID.
func contentID(content []byte, digests [][sha256.Size]byte) [16]byte {
	h := sha256.New()
	h.Write([]byte(contentIDPrefix))
	h.Write([]byte{0})
	h.Write(content)
	h.Write([]byte{0})
	for i := range digests {
		h.Write(digests[i][:])
	}
	id := [16]byte(h.Sum(nil))
	id[6] = id[6]&0x0f | 0x80
	id[8] = id[8]&0x3f | 0x80
	return id
}

// isContentID tells whether an id has the form of a content id. Ids from
// elsewhere have it with a chance of 1 in 64 if they are plain digests, and
// never if they are random UUIDs.
func isContentID(id [16]byte) bool { return id[6]>>4 == 8 && id[8]>>6 == 2 }

// upgradeIDPrefix begins the seed of the ids of upgraded mixed artifacts.
const upgradeIDPrefix = "ninfer-v3/qwen4_exp/v2-upgrade"

// UpgradeID derives the id that the upgrade of a version 2 mixed artifact
// gives its output (docs/format.md 1.6): from the SHA-256 of the version 2
// file, 64 lower-case hex digits, and the canonical form of the directory
// without offsets and files. It says nothing about the payload.
func (p *Plan) UpgradeID(v2SHA256 string) ([16]byte, error) {
	return upgradeID(&p.Directory, p.Text, v2SHA256)
}

func upgradeID(d *Directory, text []byte, v2SHA256 string) ([16]byte, error) {
	c, err := canonicalDirectory(d, text)
	if err != nil {
		return [16]byte{}, fmt.Errorf("artifact: canonical directory: %w", err)
	}
	h := sha256.New()
	h.Write([]byte(upgradeIDPrefix))
	h.Write([]byte{0})
	h.Write([]byte(v2SHA256))
	h.Write([]byte{0})
	h.Write(c)
	return [16]byte(h.Sum(nil)), nil
}

// canonicalDirectory is the canonical form of docs/format.md 1.6.
func canonicalDirectory(d *Directory, text []byte) ([]byte, error) {
	members := map[string][]byte{"metadata": []byte("{}"), "provenance": []byte("{}")}
	dec := jsontext.NewDecoder(bytes.NewReader(text))
	if _, err := dec.ReadToken(); err != nil {
		return nil, err
	}
	for dec.PeekKind() == '"' {
		t, err := dec.ReadToken()
		if err != nil {
			return nil, err
		}
		name := t.String() // the next read voids the token
		v, err := appendCanonical(nil, dec)
		if err != nil {
			return nil, err
		}
		members[name] = v
	}
	var objects []byte
	for i := range d.Objects {
		o := &d.Objects[i]
		objects = append(objects, "[,"[min(i, 1)], '[')
		objects = appendASCII(objects, o.kind())
		objects = appendASCII(append(objects, ','), o.ID)
		if o.Resource {
			objects = appendASCII(append(objects, ','), o.Encoding)
			objects = append(appendInt(append(objects, ','), o.Bytes), ']')
			continue
		}
		objects = append(objects, ",["...)
		for j, n := range o.Shape {
			if j > 0 {
				objects = append(objects, ',')
			}
			objects = appendInt(objects, int64(n))
		}
		objects = appendASCII(append(objects, "],"...), o.Format)
		objects = append(appendASCII(append(objects, ','), o.Layout), ']')
	}
	members["objects"] = append(objects, ']')

	var out []byte
	for i, name := range []string{"bindings", "components", "metadata", "objects", "provenance", "uses"} {
		out = append(out, "{,"[min(i, 1)])
		out = append(appendASCII(out, name), ':')
		out = append(out, members[name]...)
	}
	return append(out, '}'), nil
}

// appendCanonical appends one value with sorted member names, no white space
// and ASCII only.
func appendCanonical(dst []byte, dec *jsontext.Decoder) ([]byte, error) {
	switch dec.PeekKind() {
	case '{':
		type member struct {
			name  string
			value []byte
		}
		if _, err := dec.ReadToken(); err != nil {
			return nil, err
		}
		var members []member
		for dec.PeekKind() == '"' {
			t, err := dec.ReadToken()
			if err != nil {
				return nil, err
			}
			m := member{name: t.String()}
			if m.value, err = appendCanonical(nil, dec); err != nil {
				return nil, err
			}
			members = append(members, m)
		}
		if _, err := dec.ReadToken(); err != nil {
			return nil, err
		}
		// UTF-8 sorts as code points do.
		slices.SortFunc(members, func(a, b member) int { return bytes.Compare([]byte(a.name), []byte(b.name)) })
		dst = append(dst, '{')
		for i, m := range members {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = append(appendASCII(dst, m.name), ':')
			dst = append(dst, m.value...)
		}
		return append(dst, '}'), nil
	case '[':
		if _, err := dec.ReadToken(); err != nil {
			return nil, err
		}
		dst = append(dst, '[')
		for i := 0; dec.PeekKind() != ']'; i++ {
			if i > 0 {
				dst = append(dst, ',')
			}
			var err error
			if dst, err = appendCanonical(dst, dec); err != nil {
				return nil, err
			}
		}
		_, err := dec.ReadToken()
		return append(dst, ']'), err
	}
	v, err := dec.ReadValue()
	if err != nil || v.Kind() != '"' {
		return append(dst, v...), err
	}
	s, err := jsontext.AppendUnquote(nil, v)
	return appendASCII(dst, string(s)), err
}

// appendASCII appends a JSON string with everything beyond printable ASCII as
// \uxxxx; other than in the directory text that includes U+007F.
func appendASCII(dst []byte, s string) []byte {
	for _, c := range string(appendString(nil, s)) {
		if c < 0x7f {
			dst = append(dst, byte(c))
			continue
		}
		for _, u := range utf16.Encode([]rune{c}) {
			dst = fmt.Appendf(dst, `\u%04x`, u)
		}
	}
	return dst
}
