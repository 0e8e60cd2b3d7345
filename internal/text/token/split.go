package token

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// The split patterns of the family, as they stand in tokenizer.json. They differ
// in whether combining marks count as letters. nextPiece is both of them written
// out by hand, because package regexp has no look-ahead; a file with any other
// pattern fails to load.
const (
	patternMarks = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patternPlain = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
)

// class is what the patterns tell apart.
type class uint8

const (
	other   class = iota // punctuation, symbols, controls, unassigned
	letter               // \p{L}, and \p{M} where the pattern has it
	number               // \p{N}
	newline              // \r \n
	blank                // \s other than \r \n
)

var ascii = func() (table [utf8.RuneSelf]class) {
	for r := range table {
		table[r] = classOf(rune(r))
	}
	return
}()

func classOf(r rune) class {
	switch {
	case r == '\r' || r == '\n':
		return newline
	case unicode.IsSpace(r): // White_Space, as \s is in the reference's regex library
		return blank
	case unicode.IsLetter(r):
		return letter
	case unicode.IsNumber(r):
		return number
	}
	return other
}

// classAt returns the class and size of the first character of s.
func classAt(s string, marks bool) (class, int) {
	if c := s[0]; c < utf8.RuneSelf {
		return ascii[c], 1
	}
	r, n := utf8.DecodeRuneInString(s)
	c := classOf(r)
	if c == other && marks && unicode.IsMark(r) {
		c = letter
	}
	return c, n
}

// run returns how many bytes at the start of s are of class want.
func run(s string, want class, marks bool) int {
	i := 0
	for i < len(s) {
		c, n := classAt(s[i:], marks)
		if c != want {
			break
		}
		i += n
	}
	return i
}

// nextPiece returns the length of the first match of the pattern in s, which must
// be valid UTF-8 and not empty. Every character is matched by some branch, so
// the pieces are the whole text. Branches are tried in the order of the pattern.
func nextPiece(s string, marks bool) int {
	first, size := classAt(s, marks)
	if s[0] == '\'' {
		if n := contraction(s); n > 0 {
			return n
		}
	}
	switch first {
	case letter:
		return size + run(s[size:], letter, marks)
	case number:
		return size
	case newline:
		return blanks(s)
	}
	// A blank or other character is taken along by the letters after it.
	rest := s[size:]
	if n := run(rest, letter, marks); n > 0 {
		return size + n
	}
	if first == blank {
		if s[0] == ' ' {
			if n := run(rest, other, marks); n > 0 {
				return size + n + run(rest[n:], newline, marks)
			}
		}
		return blanks(s)
	}
	n := size + run(rest, other, marks)
	return n + run(s[n:], newline, marks)
}

// blanks is the last three branches: white space up to the last line end in it;
// else all of it at the end of the text; else all but the last character, which
// the next piece may take along; else the one character.
func blanks(s string) int {
	end, last, lastLine := 0, 0, 0
	for end < len(s) {
		c, n := classAt(s[end:], false)
		if c != blank && c != newline {
			break
		}
		last = end
		end += n
		if c == newline {
			lastLine = end
		}
	}
	switch {
	case lastLine > 0:
		return lastLine
	case end == len(s) || last == 0:
		return end
	}
	return last
}

// contraction returns the length of 's 't 're 've 'm 'll 'd at the start of s, in
// any case, or 0. The long s (U+017F) folds to s, as it does in the regex
// libraries with Unicode case folding that the reference uses.
func contraction(s string) int {
	if len(s) < 2 {
		return 0
	}
	switch s[1] | 0x20 { // lower case, and no other byte becomes a letter
	case 's', 't', 'm', 'd':
		return 2
	case 'r', 'v':
		if len(s) > 2 && s[2]|0x20 == 'e' {
			return 3
		}
	case 'l':
		if len(s) > 2 && s[2]|0x20 == 'l' {
			return 3
		}
	}
	if strings.HasPrefix(s[1:], "ſ") {
		return 1 + len("ſ")
	}
	return 0
}
