package token

import (
	"strings"
	"unicode/utf8"
)

// Scan reads one character from the start of b, which must not be empty. For a
// whole character it returns its size and ok. Otherwise size bytes form a maximal
// part to be shown as one U+FFFD: as many bytes as could have begun a character
// (Unicode 17, section 3.9, "U+FFFD substitution of maximal subparts"). More is
// true when b ended inside such a part, so that further bytes could complete it.
func Scan(b []byte) (size int, ok, more bool) {
	c := b[0]
	if c < utf8.RuneSelf {
		return 1, true, false
	}
	var want int
	low, high := byte(0x80), byte(0xBF) // what the second byte may be
	switch {
	case c >= 0xC2 && c <= 0xDF:
		want = 2
	case c >= 0xE0 && c <= 0xEF:
		want = 3
		switch c {
		case 0xE0:
			low = 0xA0
		case 0xED:
			high = 0x9F
		}
	case c >= 0xF0 && c <= 0xF4:
		want = 4
		switch c {
		case 0xF0:
			low = 0x90
		case 0xF4:
			high = 0x8F
		}
	default:
		return 1, false, false
	}
	for i := 1; i < want; i++ {
		if i == len(b) {
			return i, false, true
		}
		if b[i] < low || b[i] > high {
			return i, false, false
		}
		low, high = 0x80, 0xBF
	}
	return want, true, false
}

// valid returns s with each maximal part that is not UTF-8 as one U+FFFD.
func valid(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	var out strings.Builder
	b := []byte(s)
	for len(b) > 0 {
		n, ok, _ := Scan(b)
		if ok {
			out.Write(b[:n])
		} else {
			out.WriteRune(utf8.RuneError)
		}
		b = b[n:]
	}
	return out.String()
}
