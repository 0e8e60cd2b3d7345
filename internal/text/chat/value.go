package chat

import (
	"bytes"
	"encoding/json/jsontext"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/ardanlabs/jinja"
)

// maxDepth bounds the nesting of JSON values, which the engine walks recursively.
const maxDepth = 500

// values turns JSON into template values, in order.
//
// The engine has int64 and float64 only, and would write 1e3 as 1000.0 and round
// long integers. A number whose spelling the engine would not give back is
// therefore passed as a stand-in: a float no one writes, with digits that occur
// nowhere else in the input. Where the rendered text shows it, restore puts the
// spelling back. A template that computes with such a number gets nonsense; none
// is known to.
type values struct {
	data   strings.Builder // every string seen, to choose stand-ins that are not in it
	odd    []oddNumber
	prefix string
}

// oddNumber is a number waiting for its stand-in.
type oddNumber struct {
	spelling string
	set      func(jinja.Value)
}

// parse reads one JSON value. set is called when the value's place may have to be
// filled again with a stand-in.
func (v *values) parse(raw jsontext.Value, set func(jinja.Value)) (jinja.Value, error) {
	dec := jsontext.NewDecoder(bytes.NewReader(raw))
	value, err := v.read(dec, set, 0)
	if err != nil {
		return jinja.Undefined(), err
	}
	if rest := bytes.TrimLeft(raw[dec.InputOffset():], " \t\r\n"); len(rest) > 0 {
		return jinja.Undefined(), fmt.Errorf("text after the end of the JSON value")
	}
	return value, nil
}

func (v *values) read(dec *jsontext.Decoder, set func(jinja.Value), depth int) (jinja.Value, error) {
	if depth > maxDepth {
		return jinja.Undefined(), fmt.Errorf("JSON nested more than %d deep", maxDepth)
	}
	tok, err := dec.ReadToken()
	if err != nil {
		return jinja.Undefined(), err
	}
	switch tok.Kind() {
	case 'n':
		return jinja.None(), nil
	case 't', 'f':
		return jinja.NewBool(tok.Bool()), nil
	case '"':
		return v.text(tok.String()), nil
	case '0':
		return v.number(tok.String(), set), nil
	case '[':
		list := jinja.NewList(nil)
		items := list.AsList()
		for dec.PeekKind() != ']' {
			i := items.Len()
			item, err := v.read(dec, func(x jinja.Value) { items.Items[i] = x }, depth+1)
			if err != nil {
				return item, err
			}
			items.Append(item)
		}
		_, err := dec.ReadToken()
		return list, err
	default:
		object := jinja.NewDict()
		dict := object.AsDict()
		for dec.PeekKind() != '}' {
			name, err := dec.ReadToken()
			if err != nil {
				return object, err
			}
			key := name.String()
			v.data.WriteString(key)
			v.data.WriteByte('\n')
			value, err := v.read(dec, func(x jinja.Value) { dict.Set(key, x) }, depth+1)
			if err != nil {
				return object, err
			}
			dict.Set(key, value)
		}
		_, err := dec.ReadToken()
		return object, err
	}
}

// unquoteJSON returns the text in a JSON string.
func unquoteJSON(raw jsontext.Value) (jsontext.Value, error) {
	tok, err := jsontext.NewDecoder(bytes.NewReader(raw)).ReadToken()
	if err != nil {
		return nil, err
	}
	return jsontext.Value(tok.String()), nil
}

// text returns a string value and notes its content.
func (v *values) text(s string) jinja.Value {
	v.data.WriteString(s)
	v.data.WriteByte('\n')
	return jinja.NewString(s)
}

// number returns the value of a JSON number, or queues it for a stand-in.
func (v *values) number(spelling string, set func(jinja.Value)) jinja.Value {
	v.data.WriteString(spelling)
	v.data.WriteByte('\n')
	if i, err := strconv.ParseInt(spelling, 10, 64); err == nil && strconv.FormatInt(i, 10) == spelling {
		return jinja.NewInt(i)
	}
	if f, err := strconv.ParseFloat(spelling, 64); err == nil && !math.IsInf(f, 0) && jinja.NewFloat(f).String() == spelling {
		return jinja.NewFloat(f)
	}
	v.odd = append(v.odd, oddNumber{spelling, set})
	return jinja.NewFloat(0)
}

// perExponent is how many stand-ins share a decimal exponent. A stand-in is
// 7.ddddddddNNNNN1e+EEE: digits common to all of one rendering, five that count,
// and a last one, so that no trailing zero is lost. A float64 keeps 15 digits.
const perExponent = 100_000

// finish fills in the stand-ins. Source is the template, whose text they must not
// occur in either. The returned function puts the spellings back into a rendered text.
func (v *values) finish(source string) (restore func(string) string, err error) {
	if len(v.odd) == 0 {
		return func(s string) string { return s }, nil
	}
	data := v.data.String()
	for seed := uint64(0); ; seed++ {
		if seed == 1000 {
			return nil, fmt.Errorf("numbers: no digits are free to stand for them")
		}
		v.prefix = "7." + fmt.Sprintf("%08d", (seed*2654435761+40192837)%100_000_000)
		if !strings.Contains(data, v.prefix) && !strings.Contains(source, v.prefix) {
			break
		}
	}
	if len(v.odd) > 200*perExponent {
		return nil, fmt.Errorf("numbers: more than %d need their spelling kept", 200*perExponent)
	}
	for i, n := range v.odd {
		digits := standIn(v.prefix, i)
		f, err := strconv.ParseFloat(digits, 64)
		if err != nil {
			return nil, fmt.Errorf("numbers: stand-in %s: %w", digits, err)
		}
		value := jinja.NewFloat(f)
		if value.String() != digits {
			return nil, fmt.Errorf("numbers: stand-in %s is written %s", digits, value.String())
		}
		if strings.HasPrefix(n.spelling, "-") {
			value = jinja.NewFloat(-f)
		}
		n.set(value)
	}
	return v.restore, nil
}

// restore puts spellings where their stand-ins are.
func (v *values) restore(text string) string {
	var b strings.Builder
	for {
		at := strings.Index(text, v.prefix)
		if at < 0 {
			break
		}
		// What follows the prefix is NNNNN1e+EEE.
		rest := text[at+len(v.prefix):]
		const length = len("000001e+100")
		i := -1
		if len(rest) >= length {
			low, err1 := strconv.Atoi(rest[:5])
			high, err2 := strconv.Atoi(rest[len("000001e+"):length])
			if err1 == nil && err2 == nil {
				i = (high-100)*perExponent + low
			}
		}
		if i < 0 || i >= len(v.odd) || !strings.HasPrefix(rest, standIn("", i)) {
			b.WriteString(text[:at+1]) // a template took it apart
			text = text[at+1:]
			continue
		}
		spelling := v.odd[i].spelling
		before := text[:at]
		if strings.HasPrefix(spelling, "-") {
			before = strings.TrimSuffix(before, "-")
		}
		b.WriteString(before)
		b.WriteString(spelling)
		text = rest[length:]
	}
	b.WriteString(text)
	return b.String()
}

// standIn is the i-th stand-in without its sign.
func standIn(prefix string, i int) string {
	return fmt.Sprintf("%s%05d1e+%d", prefix, i%perExponent, 100+i/perExponent)
}
