package quality

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/arch"
	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

const (
	micro = "../../testdata/micro-radixark"
	ids   = 480 // of micro's tokenizer
)

func subject(t *testing.T, m *model.Model, chunk int) *Subject {
	t.Helper()
	dev := cpu.NewFast(cpu.Options{States: m.States, Lanes: 1, Tokens: 512, Carry: chunk})
	t.Cleanup(func() { dev.Close() })
	return &Subject{Runner: model.NewRunner(m, dev, chunk), IDs: ids}
}

// plain binds micro without its drafter, after a change of its weights.
func plain(t *testing.T, change func(*modeltest.Checkpoint)) *model.Model {
	t.Helper()
	c, ck := modeltest.OpenCheckpoint(t, filepath.Join(micro, "checkpoint"))
	if change != nil {
		change(ck)
	}
	m, err := model.Bind(c, ck, model.Options{IDs: ids})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// golden reads the reference's tokens, greedy continuation and logits of a case.
func golden(t *testing.T, name string) (tokens, greedy []int32, logits [][]float64) {
	t.Helper()
	cases, tensors := modeltest.Golden(t, micro)
	l := tensors[name+".logits"]
	for row := range slices.Chunk(l.Values(), l.Shape[1]) {
		out := make([]float64, ids)
		for i := range out {
			out[i] = float64(row[i])
		}
		logits = append(logits, out)
	}
	c := cases[name]
	return c.Tokens, c.Greedy, logits
}

// logprob is written out: the logarithm of the softmax.
func logprob(logits []float64, id int32) float64 {
	sum := 0.0
	for _, v := range logits {
		sum += math.Exp(v - logits[id])
	}
	return -math.Log(sum)
}

// Every token after the first is scored once, in order; no window is longer than the context, and later ones keep as much history as
// docs/measuring.md says.
func TestWindows(t *testing.T) {
	for _, c := range [][3]int{{2, 2, 1}, {3, 2, 1}, {10, 4, 1}, {10, 4, 3}, {10, 100, 50}, {100, 10, 5}, {101, 10, 5}, {4097, 4096, 2048}, {10000, 4096, 2048}} {
		n, context, stride := c[0], c[1], c[2]
		next := 1
		for i, w := range Windows(n, context, stride) {
			switch {
			case w.First != next || w.End <= w.First || w.End > n || w.Scored != w.End-w.First:
				t.Fatalf("%v: window %d is %+v, next to score is %d", c, i, w, next)
			case w.End-w.Begin > context:
				t.Errorf("%v: window %d has %d tokens", c, i, w.End-w.Begin)
			case i == 0 && (w.Begin != 0 || w.End != min(context, n)):
				t.Errorf("%v: first window %+v", c, w)
			case i > 0 && (w.First-w.Begin != min(context-stride, w.First) || w.Scored != min(stride, n-w.First)):
				t.Errorf("%v: window %d is %+v", c, i, w)
			}
			next = w.End
		}
		if next != n {
			t.Errorf("%v: scored up to %d", c, next)
		}
	}
	if w := Windows(1, 4, 2); w != nil {
		t.Errorf("one token gives %v", w)
	}
}

// One window gives the reference's own probabilities; the result is a sum over tokens, by stream and domain, and does not depend on
// the chunks.
func TestMeasure(t *testing.T) {
	tokens, _, logits := golden(t, "long")
	texts := map[string][]int32{"a": tokens, "b": tokens[:100], "c": tokens[:40]}
	sum := func(n int) float64 {
		nll := 0.0
		for i := range n - 1 {
			nll -= logprob(logits[i], tokens[i+1])
		}
		return nll
	}
	streams := []Stream{{Name: "a", Domain: "x", Text: "a"}, {Name: "b", Domain: "y", Text: "b"}, {Name: "c", Domain: "x", Text: "c"}}
	var first *Perplexity
	for _, chunk := range []int{7, 512} {
		var last, calls int
		var scores []TokenScore
		p, err := Measure(context.Background(), subject(t, plain(t, nil), chunk), streams, func(text string) []int32 { return texts[text] }, PerplexityOptions{
			Context: 400, Stride: 100, Progress: func(done, all int) { last, calls = all-done, calls+1 },
			Token: func(s TokenScore) error { scores = append(scores, s); return nil },
		})
		if err != nil {
			t.Fatal(err)
		}
		for i, want := range []float64{sum(len(tokens)), sum(100), sum(40)} {
			if got := p.Streams[i]; math.Abs(got.NLL/want-1) > 1e-5 || got.Scored != len(texts[got.Name])-1 || math.Abs(math.Log(got.Perplexity)-got.NLL/float64(got.Scored)) > 1e-12 {
				t.Errorf("stream %s: %+v, want %v", got.Name, got.Score, want)
			}
		}
		if d := p.Domains; len(d) != 2 || d[0].Domain != "x" || d[0].Streams != 2 || d[1].Streams != 1 || math.Abs(d[0].NLL/(sum(len(tokens))+sum(40))-1) > 1e-5 {
			t.Errorf("domains %+v", d)
		}
		if n := len(tokens) - 1 + 99 + 39; p.Overall.Scored != n || p.Overall.Tokens != n+3 || last != 0 || calls != n || len(scores) != n {
			t.Errorf("overall %+v, %d calls, %d scores", p.Overall, calls, len(scores))
		}
		if s := scores[5]; s.At != 6 || s.ID != tokens[6] || math.Abs(s.Logprob-logprob(logits[5], tokens[6])) > 1e-4 {
			t.Errorf("score %+v", s)
		}
		if first == nil {
			first = p
		} else if p.Overall.NLL != first.Overall.NLL {
			t.Errorf("chunks of %d: %v, before %v", chunk, p.Overall.NLL, first.Overall.NLL)
		}
	}
}

// A later window sees its history and nothing before it: its scores are those of a text that begins there.
func TestMeasureHistory(t *testing.T) {
	tokens, _, _ := golden(t, "long")
	tokens = tokens[:120]
	s := subject(t, plain(t, nil), 32)
	one := func(text []int32, context, stride int) *Perplexity {
		p, err := Measure(context1, s, []Stream{{Name: "a", Domain: "x"}}, func(string) []int32 { return text }, PerplexityOptions{Context: context, Stride: stride})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	w := one(tokens, 64, 16).Streams[0].Windows
	if len(w) != 5 {
		t.Fatalf("%d windows", len(w))
	}
	for _, x := range w[1:] {
		whole := one(tokens[x.Begin:x.End], 200, 100).Overall.NLL
		before := one(tokens[x.Begin:x.First], 200, 100).Overall.NLL
		if math.Abs(whole-before-x.NLL) > 1e-9*whole {
			t.Errorf("window %+v: want %v", x, whole-before)
		}
	}
	for _, o := range []PerplexityOptions{{}, {Context: 4, Stride: 4}, {Context: 4}} {
		if _, err := Measure(context1, s, nil, nil, o); err == nil {
			t.Errorf("%+v accepted", o)
		}
	}
	if _, err := Measure(context1, s, []Stream{{Name: "short"}}, func(string) []int32 { return tokens[:1] }, PerplexityOptions{Context: 4, Stride: 2}); err == nil || !strings.Contains(err.Error(), "short") {
		t.Errorf("one token: %v", err)
	}
	ended, cancel := context.WithCancel(context1)
	cancel()
	if _, err := Measure(ended, s, []Stream{{Name: "a"}}, func(string) []int32 { return tokens }, PerplexityOptions{Context: 4, Stride: 2}); err != context.Canceled {
		t.Errorf("cancelled: %v", err)
	}
}

var context1 = context.Background()

// The base's answer is the reference's greedy continuation, and a model compared with itself changes nothing.
func TestCompareSame(t *testing.T) {
	tokens, greedy, _ := golden(t, "short")
	m := plain(t, nil)
	c, err := Compare(context1, subject(t, m, 64), subject(t, m, 5), []Prompt{{Name: "short", IDs: tokens}, {Name: "stop", IDs: tokens, Stops: map[int32]bool{greedy[1]: true}}}, len(greedy), nil)
	if err != nil {
		t.Fatal(err)
	}
	if c.Flips != 0 || c.MeanChange != 0 || c.MeanSize != 0 || c.LargestChange != 0 || c.SameText != 2 || c.BasePerplexity != c.OtherPerplexity || c.MeanKL > 1e-9 {
		t.Errorf("%+v", c)
	}
	if c.Answers[0].Tokens != len(greedy) || c.Answers[1].Tokens > 2 {
		t.Errorf("%d and %d tokens", c.Answers[0].Tokens, c.Answers[1].Tokens)
	}
	got, err := subject(t, m, 64).Continue(context1, tokens, len(greedy), nil)
	if err != nil || !slices.Equal(got, greedy) {
		t.Errorf("continues with %v, the reference with %v: %v", got, greedy, err)
	}
}

// Another output head changes what formulas over the two rows of logits say.
func TestCompareOther(t *testing.T) {
	tokens, _, _ := golden(t, "chat_plain")
	base := plain(t, nil)
	other := plain(t, func(ck *modeltest.Checkpoint) {
		w := ck.Tensors[arch.LMHead]
		w.Data = slices.Clone(w.Data)
		for i := 1; i < len(w.Data); i += 2 * 7 { // every seventh weight changes its sign
			w.Data[i] ^= 0x80
		}
		ck.Tensors[arch.LMHead] = w
	})
	const most = 12
	c, err := Compare(context1, subject(t, base, 64), subject(t, other, 64), []Prompt{{Name: "p", IDs: tokens}}, most, nil)
	if err != nil {
		t.Fatal(err)
	}
	// The same again with single passes and plain sums.
	answer, err := subject(t, base, 64).Continue(context1, tokens, most, nil)
	if err != nil {
		t.Fatal(err)
	}
	rows := func(m *model.Model) (out [][]float64) {
		r := subject(t, m, 512).Runner
		res, err := r.Prompt(backend.LaneRows{Tokens: slices.Concat(tokens, answer), Want: backend.WantLogitsAll})
		if err != nil {
			t.Fatal(err)
		}
		for _, row := range res.Logits[len(tokens)-1:][:most] {
			line := make([]float64, ids)
			for i := range line {
				line[i] = float64(row[i])
			}
			out = append(out, line)
		}
		return out
	}
	x, y := rows(base), rows(other)
	var change, size, kl, margin, nll float64
	flips := 0
	for i, id := range answer {
		a, b := logprob(x[i], id), logprob(y[i], id)
		change += (b - a) / most
		size += math.Abs(b-a) / most
		nll -= b / most
		for j := range x[i] {
			p := logprob(x[i], int32(j))
			kl += math.Exp(p) * (p - logprob(y[i], int32(j))) / most
		}
		best := 0
		for j := range y[i] {
			if y[i][j] > y[i][best] {
				best = j
			}
		}
		if int32(best) != id {
			flips++
			margin = max(margin, x[i][id]-x[i][best])
		}
	}
	if flips == 0 {
		t.Fatal("the change is too small for this test")
	}
	near := func(what string, got, want float64) {
		if math.Abs(got-want) > 1e-6*max(1, math.Abs(want)) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	near("change", c.MeanChange, change)
	near("size", c.MeanSize, size)
	near("kl", c.MeanKL, kl)
	near("margin", c.LargestMargin, margin)
	near("perplexity", c.OtherPerplexity, math.Exp(nll))
	if c.Flips != flips || c.SameText != 0 || c.Answers[0].Differs != c.Answers[0].Flips[0].At {
		t.Errorf("%d flips, want %d: %+v", c.Flips, flips, c.Answers[0])
	}
	if _, err := Compare(context1, &Subject{IDs: 1}, &Subject{IDs: 2}, nil, 1, nil); err == nil {
		t.Error("different tokenizers were compared")
	}
}

func TestCorpus(t *testing.T) {
	dir := t.TempDir()
	put := func(name, text string) string {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256([]byte(text))
		return hex.EncodeToString(sum[:])
	}
	a, b, bad := put("a.txt", "first"), put("b.txt", "second"), put("bad.txt", "\xff")
	line := func(name, domain, path, sum string) string {
		return fmt.Sprintf(`{"name":%q,"domain":%q,"path":%q,"sha256":%q}`, name, domain, path, sum)
	}
	read := func(quick bool, lines ...string) ([]Stream, error) {
		put("m.json", `{"corpus":"test","streams":[`+strings.Join(lines, ",")+`]}`)
		return ReadCorpus(filepath.Join(dir, "m.json"), quick)
	}
	all := []string{line("a", "x", "a.txt", a), line("b", "x", "b.txt", strings.ToUpper(b)), line("c", "y", "a.txt", a)}
	got, err := read(false, all...)
	if err != nil || len(got) != 3 || got[1].Text != "second" || got[1].SHA256 != b || got[2].Domain != "y" {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err = read(true, all...); err != nil || len(got) != 2 || got[0].Name != "a" || got[1].Name != "c" {
		t.Errorf("quick: %+v, %v", got, err)
	}
	for want, lines := range map[string][]string{
		"lists no streams": nil, "the sha256 of": {line("a", "x", "a.txt", b)}, "listed twice": {all[0], all[0]}, "not UTF-8": {line("a", "x", "bad.txt", bad)},
		"leaves the manifest's folder": {line("a", "x", "../a.txt", a)}, "needs name": {line("", "x", "a.txt", a)}, "absent.txt": {line("a", "x", "absent.txt", a)},
	} {
		if _, err := read(false, lines...); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "m.json") {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if _, err := ReadCorpus(filepath.Join(dir, "a.txt"), false); err == nil {
		t.Error("a text was read as a manifest")
	}
}

// Whatever a manifest holds, reading it gives streams that are what was listed, or an error of one line.
func FuzzManifest(f *testing.F) {
	dir := f.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.txt"), []byte("first"), 0o644); err != nil {
		f.Fatal(err)
	}
	sum := sha256.Sum256([]byte("first"))
	f.Add([]byte(fmt.Sprintf(`{"corpus":"c","streams":[{"name":"a","domain":"x","path":"a.txt","sha256":"%x"}]}`, sum)), false)
	f.Add([]byte(`{"streams":[{"name":"a","domain":"x","path":"../../etc/hostname","sha256":"00"}]}`), true)
	f.Add([]byte(`{"streams":[{"name":"a","domain":"x","path":"a\nb","sha256":"00"}]}`), true)
	f.Add([]byte(`[]`), false)
	f.Fuzz(func(t *testing.T, raw []byte, quick bool) {
		streams, err := readManifest(raw, dir, quick)
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("%q", err)
			}
			return
		}
		for _, s := range streams {
			if s.Text != "first" || s.Name == "" || s.Domain == "" {
				t.Errorf("%+v", s)
			}
		}
	})
}
