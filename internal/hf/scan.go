package hf

import (
	"bytes"
	"encoding/json/jsontext"
	"errors"
	"fmt"
	"math"
)

// scanner reads JSON text strictly. It exists because an index and the headers of a large checkpoint are 80 MB of JSON, and a
// general decoder alone would take the second that opening may take.
type scanner struct {
	b []byte
	i int
}

var errEnd = errors.New("text ends early")

// space skips white space and returns the next byte, 0 at the end.
func (s *scanner) space() byte {
	for ; s.i < len(s.b); s.i++ {
		switch c := s.b[s.i]; c {
		case ' ', '\t', '\n', '\r':
		default:
			return c
		}
	}
	return 0
}

func (s *scanner) expect(c byte) error {
	if got := s.space(); got != c {
		if s.i == len(s.b) {
			return errEnd
		}
		return fmt.Errorf("offset %d: found %q, need %q", s.i, got, c)
	}
	s.i++
	return nil
}

// str reads a string. The result is a view of the text unless the string has escapes.
func (s *scanner) str() ([]byte, error) {
	if err := s.expect('"'); err != nil {
		return nil, err
	}
	start, plain := s.i, true
	for s.i < len(s.b) {
		switch c := s.b[s.i]; {
		case c == '"':
			raw := s.b[start:s.i]
			s.i++
			if plain {
				return raw, nil
			}
			out, err := jsontext.AppendUnquote(nil, s.b[start-1:s.i])
			if err != nil {
				return nil, fmt.Errorf("offset %d: %w", start, err)
			}
			return out, nil
		case c == '\\':
			plain = false
			s.i += 2
		case c < ' ':
			return nil, fmt.Errorf("offset %d: control character in a string", s.i)
		default:
			plain = plain && c < 0x80
			s.i++
		}
	}
	s.i = len(s.b)
	return nil, errEnd
}

// integer reads a nonnegative integer without fraction or exponent.
func (s *scanner) integer() (int64, error) {
	c := s.space()
	if c < '0' || c > '9' {
		if s.i == len(s.b) {
			return 0, errEnd
		}
		return 0, fmt.Errorf("offset %d: found %q, need a nonnegative integer", s.i, c)
	}
	start, n := s.i, int64(0)
	for ; s.i < len(s.b) && s.b[s.i] >= '0' && s.b[s.i] <= '9'; s.i++ {
		d := int64(s.b[s.i] - '0')
		if n > (math.MaxInt64-d)/10 {
			return 0, fmt.Errorf("offset %d: integer is too large", start)
		}
		n = n*10 + d
	}
	if s.b[start] == '0' && s.i > start+1 {
		return 0, fmt.Errorf("offset %d: integer with a leading zero", start)
	}
	if s.i < len(s.b) && (s.b[s.i] == '.' || s.b[s.i]|0x20 == 'e') {
		return 0, fmt.Errorf("offset %d: number is not an integer", start)
	}
	return n, nil
}

// value skips any one value, checking that it is valid and has no duplicate members.
func (s *scanner) value() error {
	s.space()
	d := jsontext.NewDecoder(bytes.NewBuffer(s.b[s.i:]))
	if _, err := d.ReadValue(); err != nil {
		return fmt.Errorf("offset %d: %w", s.i, err)
	}
	s.i += int(d.InputOffset())
	return nil
}

// members calls f for each member of an object, positioned before the value, which f must read. f must not keep the name.
func (s *scanner) members(f func(name []byte) error) error {
	if err := s.expect('{'); err != nil {
		return err
	}
	if s.space() == '}' {
		s.i++
		return nil
	}
	for {
		name, err := s.str()
		if err != nil {
			return err
		}
		if err := s.expect(':'); err != nil {
			return err
		}
		if err := f(name); err != nil {
			return err
		}
		if s.space() == '}' {
			s.i++
			return nil
		}
		if err := s.expect(','); err != nil {
			return err
		}
	}
}

// elements calls f for each element of an array, positioned before it.
func (s *scanner) elements(f func(i int) error) error {
	if err := s.expect('['); err != nil {
		return err
	}
	if s.space() == ']' {
		s.i++
		return nil
	}
	for i := 0; ; i++ {
		if err := f(i); err != nil {
			return err
		}
		if s.space() == ']' {
			s.i++
			return nil
		}
		if err := s.expect(','); err != nil {
			return err
		}
	}
}

// end requires that only white space is left.
func (s *scanner) end() error {
	if c := s.space(); s.i < len(s.b) {
		return fmt.Errorf("offset %d: %q follows the value", s.i, c)
	}
	return nil
}
