package token

import "strings"

// The byte-level spelling (GPT-2's): every byte is written as one printable
// character, itself where it is printable Latin-1, else the next free character
// from U+0100 on.
var (
	runeOf [256]rune
	byteOf = map[rune]byte{}
)

func init() {
	next := rune(0x100)
	for b := range 256 {
		r := rune(b)
		if !(r >= '!' && r <= '~' || r >= 0xA1 && r <= 0xAC || r >= 0xAE && r <= 0xFF) {
			r = next
			next++
		}
		runeOf[b] = r
		byteOf[r] = byte(b)
	}
}

// spell writes bytes in the byte-level spelling.
func spell(s string) string {
	var out strings.Builder
	for i := range len(s) {
		out.WriteRune(runeOf[s[i]])
	}
	return out.String()
}

// appendSpelled appends the bytes that a spelling stands for, or the spelling
// itself if some character of it stands for no byte, as the reference decodes.
func appendSpelled(dst []byte, spelling string) []byte {
	start := len(dst)
	for _, r := range spelling {
		b, ok := byteOf[r]
		if !ok {
			return append(dst[:start], spelling...)
		}
		dst = append(dst, b)
	}
	return dst
}
