package token

import (
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// maxMarks is how many combining characters in a row package norm leaves alone.
// After 30 it inserts U+034F (the stream-safe text format), which NFC does not.
const maxMarks = 30

// nfc returns the canonical composition of s.
func nfc(s string) string {
	if norm.NFC.IsNormalString(s) {
		return s
	}
	if manyMarks(s) {
		return composeLong(s)
	}
	return norm.NFC.String(s)
}

// manyMarks reports whether s may hold more combining characters in a row than
// package norm leaves alone. That package also counts starters that can join
// what is before them, such as the vowels and last consonants of Hangul, of
// which a syllable may end with two.
func manyMarks(s string) bool {
	const syllable = 2
	run := 0
	for len(s) > 0 {
		if s[0] < utf8.RuneSelf {
			run, s = 0, s[1:]
			continue
		}
		p := norm.NFC.PropertiesString(s)
		n := max(p.Size(), 1)
		count := func(p norm.Properties) {
			if p.BoundaryBefore() {
				run = syllable
			} else {
				run++
			}
		}
		if d := p.Decomposition(); d != nil {
			for len(d) > 0 {
				q := norm.NFC.Properties(d)
				count(q)
				d = d[max(q.Size(), 1):]
			}
		} else {
			count(p)
		}
		if run >= maxMarks {
			return true
		}
		s = s[n:]
	}
	return false
}

// composeLong is NFC step by step (Unicode Standard Annex 15): decompose, order,
// compose. It is slow and only for text on which package norm departs from it.
func composeLong(s string) string {
	type char struct {
		r   rune
		ccc uint8
	}
	var chars []char
	for _, r := range s {
		for _, d := range norm.NFD.String(string(r)) {
			chars = append(chars, char{d, norm.NFD.PropertiesString(string(d)).CCC()})
		}
	}
	for i := 0; i < len(chars); {
		if chars[i].ccc == 0 {
			i++
			continue
		}
		j := i
		for j < len(chars) && chars[j].ccc != 0 {
			j++
		}
		slices.SortStableFunc(chars[i:j], func(a, b char) int { return int(a.ccc) - int(b.ccc) })
		i = j
	}
	out := make([]char, 0, len(chars))
	starter := -1
	for _, c := range chars {
		if starter >= 0 {
			last := out[len(out)-1].ccc
			adjacent := starter == len(out)-1
			if adjacent || last < c.ccc {
				if r, ok := compose(out[starter].r, c.r); ok {
					out[starter].r = r
					continue
				}
			}
		}
		if c.ccc == 0 {
			starter = len(out)
		}
		out = append(out, c)
	}
	var b strings.Builder
	b.Grow(len(s))
	for _, c := range out {
		b.WriteRune(c.r)
	}
	return b.String()
}

// compose returns the primary composite of two characters, if there is one.
func compose(a, b rune) (rune, bool) {
	pair := norm.NFC.String(string([]rune{a, b}))
	r, n := utf8.DecodeRuneInString(pair)
	return r, n == len(pair)
}
