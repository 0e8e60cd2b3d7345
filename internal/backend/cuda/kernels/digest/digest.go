// Package digest sums CUDA sources the way the kernels' manifest does: without comments and with white space made uniform, so that a
// better comment does not make compiled code look stale. The sums stand in a committed file: changing the rule means compiling again.
package digest

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// Source is the SHA-256 of a C++ source without comments, every run of white space outside quotes being one space, in hex.
func Source(text string) string {
	s := sha256.Sum256([]byte(strip(text)))
	return hex.EncodeToString(s[:])
}

func strip(text string) string {
	var b strings.Builder
	space := func() {
		if s := b.String(); s != "" && s[len(s)-1] != ' ' {
			b.WriteByte(' ')
		}
	}
	for i := 0; i < len(text); {
		rest := text[i:]
		switch c := text[i]; {
		case strings.HasPrefix(rest, "//"):
			n := strings.IndexByte(rest, '\n')
			if n < 0 {
				n = len(rest)
			}
			i += n
		case strings.HasPrefix(rest, "/*"):
			n := strings.Index(rest, "*/")
			if n < 0 {
				n = len(rest) - 2
			}
			i += n + 2
			space()
		case c == '"' || c == '\'':
			j := i + 1
			for j < len(text) && text[j] != c && text[j] != '\n' {
				if text[j] == '\\' {
					j++
				}
				j++
			}
			j = min(j+1, len(text))
			b.WriteString(text[i:j])
			i = j
		case c == ' ' || c == '\t' || c == '\n' || c == '\r':
			space()
			i++
		default:
			b.WriteByte(c)
			i++
		}
	}
	return strings.TrimSpace(b.String())
}
