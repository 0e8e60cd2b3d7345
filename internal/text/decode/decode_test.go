package decode

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

// words is a vocabulary: an id is an index, its bytes the string.
type words []string

func (w words) Bytes(id int32) []byte { return []byte(w[id]) }

const (
	thinkEnd = 0
	imEnd    = 1
)

// vocabulary has the two control tokens, plain words, and pieces of characters.
var vocabulary = words{"</think>", "<|im_end|>", "a", "b", "ab", "abc", " ", "\n\n", "c", "\xe4", "\xb8", "\xad", "中", "\xf0\x9f", "\x98\x80", "\xff", "", "aab", "\xe4\xb8\xadb", "\u3000x"}

func ids(t testing.TB, texts ...string) []int32 {
	var out []int32
	for _, s := range texts {
		i := slices.Index(vocabulary, s)
		if i < 0 {
			t.Fatalf("%q is not in the vocabulary", s)
		}
		out = append(out, int32(i))
	}
	return out
}

// collect joins the texts of events.
type seen struct {
	Reasoning, Answer, Stop string
	Closed, Ended           bool
	Reason                  Reason
}

func (s *seen) add(t testing.TB, events []Event) {
	for _, e := range events {
		if s.Ended {
			t.Fatalf("event %+v after the end", e)
		}
		switch e.Kind {
		case Reasoning:
			if s.Closed || s.Answer != "" {
				t.Fatalf("reasoning %q after it closed", e.Text)
			}
			s.Reasoning += e.Text
		case ReasoningEnd:
			s.Closed = true
		case Answer:
			s.Answer += e.Text
		case End:
			s.Ended, s.Reason, s.Stop = true, e.Reason, e.Stop
		}
		if (e.Kind == Reasoning || e.Kind == Answer) && (e.Text == "" || !utf8.ValidString(e.Text)) {
			t.Fatalf("event with text %q", e.Text)
		}
	}
}

func TestDecode(t *testing.T) {
	closing := ids(t, "c", thinkEndText, "\n\n")
	tests := []struct {
		name      string
		opt       Options
		in        []string
		want      seen
		keep      int // ids committed, without those inserted
		reasoning int
	}{
		{"answer", Options{}, []string{"a", " ", "b"}, seen{Answer: "a b"}, 3, 0},
		{"stop id", Options{StopIDs: []int32{imEnd}}, []string{"a", "<|im_end|>", "b"}, seen{Answer: "a", Reason: StopID}, 2, 0},
		{"no stop id", Options{}, []string{"a", "<|im_end|>", "b"}, seen{Answer: "a<|im_end|>b"}, 3, 0},
		{"reasoning", Options{Thinking: true}, []string{"a", "\n\n", thinkEndText, "\n\n", " ", "b", "\n\n"}, seen{Reasoning: "a\n\n", Answer: "b\n\n", Closed: true}, 7, 3},
		{"blank after the marker is any white space", Options{Thinking: true}, []string{thinkEndText, "\n\n", "\u3000x"}, seen{Answer: "x", Closed: true}, 3, 1},
		{"only blank after the marker", Options{Thinking: true}, []string{"a", thinkEndText, "\n\n", " "}, seen{Reasoning: "a", Closed: true}, 4, 2},
		{"second marker is text", Options{Thinking: true}, []string{"a", thinkEndText, "b", thinkEndText}, seen{Reasoning: "a", Answer: "b</think>", Closed: true}, 4, 2},
		{"marker without thinking is text", Options{}, []string{"a", thinkEndText, " "}, seen{Answer: "a</think> "}, 3, 0},
		{"blank kept without thinking", Options{}, []string{"\n\n", "a"}, seen{Answer: "\n\na"}, 2, 0},
		{"ends inside thinking", Options{Thinking: true, StopIDs: []int32{imEnd}}, []string{"a", "<|im_end|>"}, seen{Reasoning: "a", Reason: StopID}, 2, 2},
		{"character over three ids", Options{}, []string{"\xe4", "\xb8", "\xad"}, seen{Answer: "中"}, 3, 0},
		{"unfinished at the end", Options{}, []string{"a", "\xe4", "\xb8"}, seen{Answer: "a\ufffd"}, 3, 0},
		{"unfinished before a stop id", Options{StopIDs: []int32{imEnd}}, []string{"\xf0\x9f", "<|im_end|>"}, seen{Answer: "\ufffd", Reason: StopID}, 2, 0},
		{"unfinished before the marker", Options{Thinking: true}, []string{"\xe4", thinkEndText, "\xb8"}, seen{Reasoning: "\ufffd", Answer: "\ufffd", Closed: true}, 3, 2},
		{"invalid bytes", Options{}, []string{"\xff", "\xe4", "a", "\xb8"}, seen{Answer: "\ufffd\ufffda\ufffd"}, 4, 0},
		{"stop string", Options{Stops: []string{"bc"}}, []string{"a", "b", "c", "a"}, seen{Answer: "a", Reason: StopString, Stop: "bc"}, 3, 0},
		{"stop string inside an id", Options{Stops: []string{"b"}}, []string{"a", "abc", "a"}, seen{Answer: "aa", Reason: StopString, Stop: "b"}, 2, 0},
		{"stop string not completed", Options{Stops: []string{"abcd"}}, []string{"a", "b", "c"}, seen{Answer: "abc"}, 3, 0},
		{"stop string restarts", Options{Stops: []string{"aac"}}, []string{"a", "a", "a", "c"}, seen{Answer: "a", Reason: StopString, Stop: "aac"}, 4, 0},
		{"earlier id wins", Options{Stops: []string{"abc", "b"}}, []string{"a", "b", "c"}, seen{Answer: "a", Reason: StopString, Stop: "b"}, 2, 0},
		{"earlier byte wins", Options{Stops: []string{"bc", "ab"}}, []string{"abc"}, seen{Reason: StopString, Stop: "ab"}, 1, 0},
		{"earlier declared wins", Options{Stops: []string{"abc", "ab"}}, []string{"abc"}, seen{Reason: StopString, Stop: "abc"}, 1, 0},
		{"stop string in a character", Options{Stops: []string{"中b"}}, []string{"\xe4", "\xb8", "\xad", "b"}, seen{Reason: StopString, Stop: "中b"}, 4, 0},
		{"not over the channel boundary", Options{Thinking: true, Stops: []string{"ab"}, ReasoningStops: []string{"ab"}}, []string{"a", thinkEndText, "b"}, seen{Reasoning: "a", Answer: "b", Closed: true}, 3, 2},
		{"answer stop in reasoning", Options{Thinking: true, Stops: []string{"ab"}}, []string{"ab", thinkEndText, "a"}, seen{Reasoning: "ab", Answer: "a", Closed: true}, 3, 2},
		{"reasoning stop", Options{Thinking: true, ReasoningStops: []string{"ab"}}, []string{"c", "ab", thinkEndText}, seen{Reasoning: "c", Reason: StopString, Stop: "ab"}, 2, 2},
		{"reasoning stop in answer", Options{Thinking: true, ReasoningStops: []string{"ab"}}, []string{thinkEndText, "ab"}, seen{Answer: "ab", Closed: true}, 2, 1},
		{"dropped blank is no answer", Options{Thinking: true, Stops: []string{"\n\n"}}, []string{thinkEndText, "\n\n", "a", "\n\n"}, seen{Answer: "a", Closed: true, Reason: StopString, Stop: "\n\n"}, 4, 1},
		{"stop id before stop string", Options{StopIDs: []int32{imEnd}, Stops: []string{"a<"}}, []string{"a", "<|im_end|>"}, seen{Answer: "a", Reason: StopID}, 2, 0},
		{"budget", Options{Thinking: true, Budget: 2, Closing: closing}, []string{"a", "b", "b", "b"}, seen{Reasoning: "abc", Closed: true, Reason: Continue}, 2, 4},
		{"budget not reached", Options{Thinking: true, Budget: 3, Closing: closing}, []string{"a", "b", thinkEndText, "c"}, seen{Reasoning: "ab", Answer: "c", Closed: true}, 4, 3},
		{"closes at the budget", Options{Thinking: true, Budget: 2, Closing: closing}, []string{"a", thinkEndText, "c"}, seen{Reasoning: "a", Answer: "c", Closed: true}, 3, 2},
		{"stops at the budget", Options{Thinking: true, Budget: 2, Closing: closing, StopIDs: []int32{imEnd}}, []string{"a", "<|im_end|>"}, seen{Reasoning: "a", Reason: StopID}, 2, 2},
		{"stop string at the budget", Options{Thinking: true, Budget: 2, Closing: closing, ReasoningStops: []string{"ab"}}, []string{"a", "b"}, seen{Reason: StopString, Stop: "ab"}, 2, 2},
		{"held text before the insertion", Options{Thinking: true, Budget: 2, Closing: closing, ReasoningStops: []string{"abc"}}, []string{"a", "b", "c"}, seen{Reasoning: "abc", Closed: true}, 2, 4},
		{"no stop in the insertion", Options{Thinking: true, Budget: 2, Closing: closing, ReasoningStops: []string{"c", "bc"}, StopIDs: ids(t, "c")}, []string{"a", "b", "c"}, seen{Reasoning: "abc", Closed: true}, 2, 4},
		{"no budget without thinking", Options{Budget: 1, Closing: closing}, []string{"a", "b"}, seen{Answer: "ab"}, 2, 0},
		{"raw", Options{Thinking: true, Raw: true, StopIDs: []int32{imEnd}}, []string{"a", thinkEndText, "\n\n", "b", "<|im_end|>"}, seen{Answer: "a</think>\n\nb<|im_end|>", Reason: StopID}, 5, 2},
		{"raw stop string in the marker", Options{Thinking: true, Raw: true, ReasoningStops: []string{"think"}}, []string{"a", thinkEndText, "b"}, seen{Answer: "a</", Reason: StopString, Stop: "think"}, 2, 2},
		{"raw stop string", Options{Raw: true, Stops: []string{"b"}}, []string{thinkEndText, "abc"}, seen{Answer: "</think>a", Reason: StopString, Stop: "b"}, 2, 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			test.opt.ThinkEnd = thinkEnd
			in := ids(t, test.in...)
			test.want.Ended = true
			// Every way to cut the input into rounds gives the same.
			for cuts := range 1 << (len(in) - 1) {
				d, err := New(vocabulary, test.opt)
				if err != nil {
					t.Fatal(err)
				}
				var got seen
				kept := 0
				why := Continue
				for start := 0; start < len(in) && why == Continue; {
					end := start + 1
					for end < len(in) && cuts>>(end-1)&1 == 0 {
						end++
					}
					var keep int
					keep, why = d.Preview(in[start:end])
					if why == Continue && keep != end-start {
						t.Fatalf("cuts %b: kept %d of %d without a reason", cuts, keep, end-start)
					}
					commit := in[start : start+keep]
					if why == Budget {
						commit = slices.Concat(commit, d.Closing())
					}
					got.add(t, d.Commit(commit))
					kept += keep
					start = end
				}
				got.add(t, d.Finish())
				if got != test.want || kept != test.keep || d.ReasoningTokens() != test.reasoning {
					t.Errorf("cuts %b: %+v, %d kept, %d reasoning\nwant %+v, %d kept, %d reasoning", cuts, got, kept, d.ReasoningTokens(), test.want, test.keep, test.reasoning)
				}
			}
		})
	}
}

const thinkEndText = "</think>"

// expect computes an output at once, by looking at the whole text after each id.
func expect(opt Options, in []int32) (want seen, keep int) {
	bytesOf := func(ids []int32) string {
		var b strings.Builder
		for _, id := range ids {
			b.WriteString(vocabulary[id])
		}
		return b.String()
	}
	// shown is the text of ids; unless all is said, without an unfinished character.
	shown := func(ids []int32, all bool) string {
		s := bytesOf(ids)
		if !all {
			for n := 1; n <= 3 && n <= len(s); n++ {
				tail := s[len(s)-n:]
				if utf8.RuneStart(tail[0]) {
					if !utf8.FullRuneInString(tail) {
						s = s[:len(s)-n]
					}
					break
				}
			}
		}
		var b strings.Builder
		for len(s) > 0 {
			r, n := utf8.DecodeRuneInString(s)
			if r != utf8.RuneError || n > 1 {
				b.WriteString(s[:n])
				s = s[n:]
				continue
			}
			// The maximal part: as long as some continuation makes it a character.
			n = 1
			for n < len(s) && n < 3 && !utf8.FullRuneInString(s[:n]) {
				if !utf8.FullRuneInString(s[:n+1]) {
					n++
					continue
				}
				break
			}
			b.WriteString("\ufffd")
			s = s[n:]
		}
		return b.String()
	}
	start := 0
	open := opt.Thinking
	drop := false
	channel := func(all bool, end int) string {
		s := shown(in[start:end], all)
		if drop {
			s = strings.TrimLeftFunc(s, unicode.IsSpace)
		}
		return s
	}
	put := func(s string) {
		if open {
			want.Reasoning = s
		} else {
			want.Answer = s
		}
	}
	want.Ended = true
	for i, id := range in {
		if slices.Contains(opt.StopIDs, id) {
			put(channel(true, i))
			want.Reason = StopID
			return want, i + 1
		}
		if open && id == opt.ThinkEnd {
			put(channel(true, i))
			open, drop, start = false, true, i+1
			want.Closed = true
			continue
		}
		stops := opt.Stops
		if open {
			stops = opt.ReasoningStops
		}
		text := channel(false, i+1)
		best := -1
		for _, stop := range stops {
			if at := strings.Index(text, stop); at >= 0 && (best < 0 || at < best) {
				best = at
				want.Stop = stop
			}
		}
		if best >= 0 {
			put(text[:best])
			want.Reason = StopString
			return want, i + 1
		}
	}
	put(channel(true, len(in)))
	return want, len(in)
}

// TestAgainstWhole compares random outputs, cut at random, with the same looked at as
// a whole.
func TestAgainstWhole(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	stops := []string{"ab", "abc", "aab", "b", "\n\n", "中", "\ufffd", "c a", "中b", "</think>"}
	some := func() (out []string) {
		for range rng.IntN(3) {
			out = append(out, stops[rng.IntN(len(stops))])
		}
		return
	}
	ended := map[Reason]int{}
	for range 60_000 {
		opt := Options{Thinking: rng.IntN(2) == 0, ThinkEnd: thinkEnd, Stops: some(), ReasoningStops: some()}
		if rng.IntN(2) == 0 {
			opt.StopIDs = []int32{imEnd}
		}
		in := make([]int32, rng.IntN(12))
		for i := range in {
			in[i] = int32(rng.IntN(len(vocabulary)))
		}
		want, keep := expect(opt, in)
		d, err := New(vocabulary, opt)
		if err != nil {
			t.Fatal(err)
		}
		var got seen
		kept := 0
		for rest := in; len(rest) > 0; {
			n := 1 + rng.IntN(len(rest))
			before := fmt.Sprintf("%+v", d.state)
			k, why := d.Preview(rest[:n])
			if after := fmt.Sprintf("%+v", d.state); after != before {
				t.Fatalf("Preview changed %s to %s", before, after)
			}
			got.add(t, d.Commit(rest[:k]))
			kept += k
			rest = rest[n:]
			if why != Continue {
				break
			}
		}
		got.add(t, d.Finish())
		ended[want.Reason]++
		if got != want || kept != keep || d.Tokens() != kept {
			t.Fatalf("%+v\n in %v\n got %+v, %d kept, %d tokens\nwant %+v, %d kept", opt, in, got, kept, d.Tokens(), want, keep)
		}
	}
	if len(ended) != 3 {
		t.Errorf("reasons met: %v", ended)
	}
}

// FuzzDecode: one id at a time, all at once, and looked at as a whole are the same.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{2, 3, 0, 7, 9, 10, 11, 1}, "ab", "\n\n", true)
	f.Add([]byte{9, 0, 10, 15, 13, 14}, "c", "\ufffd", false)
	f.Fuzz(func(t *testing.T, data []byte, stop, reasoningStop string, thinking bool) {
		if stop == "" || reasoningStop == "" || !utf8.ValidString(stop) || !utf8.ValidString(reasoningStop) {
			return
		}
		in := make([]int32, len(data))
		for i, b := range data {
			in[i] = int32(int(b) % len(vocabulary))
		}
		opt := Options{Thinking: thinking, ThinkEnd: thinkEnd, StopIDs: []int32{imEnd}, Stops: []string{stop}, ReasoningStops: []string{reasoningStop}}
		want, keep := expect(opt, in)
		for _, size := range []int{1, max(len(in), 1)} {
			d, err := New(vocabulary, opt)
			if err != nil {
				t.Fatal(err)
			}
			var got seen
			kept, why := 0, Continue
			for rest := range slices.Chunk(in, size) {
				var k int
				k, why = d.Preview(rest)
				got.add(t, d.Commit(rest[:k]))
				kept += k
				if why != Continue {
					break
				}
			}
			got.add(t, d.Finish())
			if got != want || kept != keep {
				t.Errorf("in %v by %d:\n got %+v, %d kept\nwant %+v, %d kept", in, size, got, kept, want, keep)
			}
		}
	})
}

// TestHeld: only what may become part of a stop string is held back.
func TestHeld(t *testing.T) {
	d, err := New(vocabulary, Options{Stops: []string{"abc"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct{ in, want string }{{"a", ""}, {"a", "a"}, {"b", ""}, {" ", "ab "}, {"ab", ""}, {"\xe4", ""}, {"\xb8", ""}, {"\xad", "ab中"}} {
		var got seen
		got.add(t, d.Commit(ids(t, step.in)))
		if got.Answer != step.want {
			t.Errorf("after %q: %q, want %q", step.in, got.Answer, step.want)
		}
	}
}

func TestBudgetState(t *testing.T) {
	closing := ids(t, "c", thinkEndText, "\n\n")
	d, err := New(vocabulary, Options{Thinking: true, ThinkEnd: thinkEnd, Budget: 1, Closing: closing})
	if err != nil {
		t.Fatal(err)
	}
	d.Commit(ids(t, "a"))
	if keep, why := d.Preview(ids(t, "b")); keep != 0 || why != Budget {
		t.Errorf("Preview with the insertion due = %d, %d", keep, why)
	}
	if !d.state.open {
		t.Error("the block is closed before the insertion")
	}
	var got seen
	got.add(t, d.Commit(closing))
	if d.state.open || got.Reasoning != "c" || got.Answer != "" || !got.Closed {
		t.Errorf("after the insertion: %+v", got)
	}
	if keep, why := d.Preview(ids(t, "a", "b")); keep != 2 || why != Continue {
		t.Errorf("Preview after the insertion = %d, %d", keep, why)
	}
	if d.Tokens() != 4 || d.ReasoningTokens() != 3 {
		t.Errorf("%d tokens, %d of reasoning", d.Tokens(), d.ReasoningTokens())
	}
	got = seen{}
	got.add(t, d.Finish())
	if want := (seen{Ended: true}); got != want {
		t.Errorf("Finish: %+v", got)
	}
	if events := d.Commit(ids(t, "a")); events != nil || d.Tokens() != 4 {
		t.Errorf("commit after the end: %+v", events)
	}
}

func TestNewErrors(t *testing.T) {
	for _, opt := range []Options{
		{Stops: []string{"a", ""}},
		{ReasoningStops: []string{""}},
		{Stops: []string{"\xb8"}},
		{Budget: -1},
		{Thinking: true, ThinkEnd: thinkEnd, Budget: 1},
		{Thinking: true, ThinkEnd: thinkEnd, Budget: 1, Closing: []int32{2}},
	} {
		if _, err := New(vocabulary, opt); err == nil {
			t.Errorf("%+v: no error", opt)
		}
	}
}

// TestState keeps Preview honest: a field that is a slice or map must be replaced,
// never written to, and this list says which are known to be.
func TestState(t *testing.T) {
	for _, f := range reflect.VisibleFields(reflect.TypeFor[state]()) {
		switch f.Type.Kind() {
		case reflect.Slice, reflect.Map, reflect.Pointer:
			if f.Name != "progress" {
				t.Errorf("state.%s is shared between copies", f.Name)
			}
		}
	}
}
