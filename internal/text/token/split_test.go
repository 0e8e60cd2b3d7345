package token

import (
	"math/rand/v2"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/dlclark/regexp2/v2"
)

// alphabetOf is what the random texts are made of: characters of every class of
// the pattern, and those on which branches hand over to one another.
var pieces = []string{
	"a", "Z", "é", "ß", "ſ", "中", "한", "ᄀ", "ǅ", "ʰ", "\u0301", "\u20dd", "\u0903", "1", "٣", "Ⅳ", "½",
	" ", " ", " ", "\t", "\n", "\r", "\r\n", "\v", "\f", "\u0085", "\u00a0", "\u2028", "\u3000", "\u200b",
	"'", "'", "'s", "'S", "'t", "'re", "'VE", "'m", "'lL", "'d", "'r", "'v", "'l", "s", "S", "e", "l",
	"!", ".", "-", "_", "<", "|", "😀", "\u200d", "\x00", "\x1c", "\x7f", "\ufffd", "\ue000", "€", "$", "\u0378",
}

func randomText(rng *rand.Rand) string {
	var b strings.Builder
	for range rng.IntN(24) {
		if rng.IntN(40) == 0 {
			r := rune(rng.IntN(0x30000))
			if utf8.ValidRune(r) {
				b.WriteRune(r)
			}
			continue
		}
		b.WriteString(pieces[rng.IntN(len(pieces))])
	}
	return b.String()
}

// TestSplitAgainstRegexp2 compares the hand-written splitter with the pattern of
// the file run by a backtracking regex engine. That engine does not fold the
// long s to s, the reference's does; the pattern is given it as a third case.
func TestSplitAgainstRegexp2(t *testing.T) {
	for name, pattern := range map[string]string{"marks": patternMarks, "plain": patternPlain} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			re := regexp2.MustCompile(strings.Replace(pattern, "(?i:'s|", "(?i:'[sſ]|", 1), regexp2.None)
			check := func(text string) {
				var want []string
				m, err := re.FindStringMatch(text)
				for end := 0; m != nil; m, err = re.FindNextMatch(m) {
					if err != nil {
						t.Fatal(err)
					}
					if m.RuneIndex != end {
						t.Fatalf("%q: the pattern leaves a gap", text)
					}
					end += m.RuneLength
					want = append(want, m.String())
				}
				if strings.Join(want, "") != text {
					t.Fatalf("%q: the pattern leaves a gap", text)
				}
				s := text
				for i := 0; s != ""; i++ {
					n := nextPiece(s, pattern == patternMarks)
					if i >= len(want) || s[:n] != want[i] {
						t.Fatalf("%q: piece %d is %q, want %q", text, i, s[:n], want)
					}
					s = s[n:]
				}
			}
			rng := rand.New(rand.NewPCG(1, 2))
			texts := 100_000
			if name == "plain" {
				texts = 20_000
			}
			for range texts {
				check(randomText(rng))
			}
			for r := rune(0); r <= utf8.MaxRune; r++ {
				switch {
				case !utf8.ValidRune(r), r > 0x32400 && r < 0xE0000, r > 0xE0200:
					continue // surrogates, unassigned, private
				case name == "plain" && r%8 != 0: // only marks differ
					if !unicode.IsMark(r) {
						continue
					}
				case r%16 != 0 && (unicode.Is(unicode.Han, r) || unicode.Is(unicode.Hangul, r) || unicode.Is(unicode.Tangut, r)):
					continue // letters, one like the other
				}
				c := string(r)
				check("a" + c + "b " + c + "  " + c + c + "1'" + c)
			}
		})
	}
}
