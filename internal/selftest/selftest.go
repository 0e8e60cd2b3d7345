package selftest

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"ninfer/internal/backend"
	"ninfer/internal/model"
	"ninfer/internal/num"
	"ninfer/internal/text/chat"
	"ninfer/internal/text/token"
)

// Backend is an implementation under test.
type Backend struct {
	Name string
	// Bound is the largest relative L2 distance of a row of logits or streams from the recorded one.
	Bound float64
	// Decisions requires the recorded routing and selection, free running.
	Decisions bool
	// Open returns a device for one lane of the model with room for tokens, carrying up to that many rows.
	Open func(m *model.Model, tokens int) (backend.Device, error)
	// Stored compares in another way; Bound and Decisions are not used then.
	Stored *Stored
}

// Subject is what a golden folder is compared with.
type Subject struct {
	Model     *model.Model // with its drafter
	Tokenizer *token.Tokenizer
	Template  *chat.Template
}

// Line is the outcome of one case on one backend.
type Line struct {
	Backend string
	Case    string
	Skipped string   // why nothing was compared
	Parts   []string // what was compared, with the worst error of each
	Broken  []string // bounds that do not hold
}

// OK reports whether nothing is broken.
func (l Line) OK() bool { return len(l.Broken) == 0 }

// String is the line that a person reads.
func (l Line) String() string {
	head := fmt.Sprintf("%-7s %-11s ", l.Backend, l.Case)
	switch {
	case l.Skipped != "":
		return head + "skip  " + l.Skipped
	case l.OK():
		return head + "ok    " + strings.Join(l.Parts, "  ")
	}
	return head + "FAIL  " + strings.Join(l.Broken, "; ") + "  (" + strings.Join(l.Parts, "  ") + ")"
}

// Run compares every case of the folder dir on every backend and reports each line as it is known. It returns whether everything
// holds; the error is of the folder, a backend or the context, not of a comparison.
func Run(ctx context.Context, s Subject, dir string, backends []Backend, report func(Line)) (bool, error) {
	g, err := openGolden(dir)
	if g != nil && g.tensors != nil {
		defer g.tensors.Close()
	}
	if err != nil {
		return false, fmt.Errorf("selftest: %w", err)
	}
	ok := true
	put := func(l Line) {
		ok = ok && l.OK()
		report(l)
	}
	if g.tokenizer != nil {
		put(s.tokenizer(g))
	}
	for _, b := range backends {
		var all free
		for _, name := range g.names {
			if err := ctx.Err(); err != nil {
				return false, err
			}
			l := Line{Backend: b.Name, Case: name}
			if strings.HasPrefix(name, "image") {
				l.Skipped = "holds a picture; this build has no vision"
				put(l)
				continue
			}
			t := &test{s: s, g: g, c: g.cases[name], b: b, line: &l}
			run := t.run
			if b.Stored != nil {
				run = func() error { return t.stored(&all) }
			}
			if err := run(); err != nil {
				return false, fmt.Errorf("selftest: %s: %s: %w", b.Name, name, err)
			}
			put(l)
		}
		if b.Stored != nil {
			put(b.statistics(&all))
		}
	}
	return ok, nil
}

// tokenizer compares encoding and decoding with the reference tokenizer.
func (s Subject) tokenizer(g *golden) Line {
	l := Line{Backend: "text", Case: "tokenizer"}
	for _, c := range g.tokenizer {
		if got := s.Tokenizer.Encode(c.Text); !slices.Equal(got, c.IDs) {
			l.Broken = append(l.Broken, fmt.Sprintf("%.40q encodes to %v, recorded is %v", c.Text, got, c.IDs))
		}
		if got := s.Tokenizer.Decode(c.IDs); got != c.Decoded {
			l.Broken = append(l.Broken, fmt.Sprintf("%v decodes to %.40q, recorded is %.40q", c.IDs, got, c.Decoded))
		}
	}
	l.Parts = append(l.Parts, fmt.Sprintf("%d texts", len(g.tokenizer)))
	return l
}

// test is one case on one backend.
type test struct {
	s    Subject
	g    *golden
	c    *goldenCase
	b    Backend
	line *Line
}

func (t *test) part(format string, args ...any) {
	t.line.Parts = append(t.line.Parts, fmt.Sprintf(format, args...))
}

func (t *test) broken(format string, args ...any) {
	t.line.Broken = append(t.line.Broken, fmt.Sprintf(format, args...))
}

// encodedDrafter bounds drafts of a drafter whose experts convert has re-encoded in four bits: the recorded ones are those of the BF16
// experts. It tells a wrong drafter from a coarse one, no more; verification of drafts does not depend on it.
const encodedDrafter = 0.1

// encoded reports whether the drafter cannot be compared closely.
func (t *test) encoded() bool { return t.s.Model.DraftExperts() == num.NVFP4 }

// bound compares rows and notes the result.
func bound[T float32 | float64](t *test, what string, got [][]T, want [][]float32) {
	t.within(what, t.b.Bound, func() (float64, error) { return worst(got, want) })
}

// drafted is bound for what the drafter computes.
func drafted(t *test, what string, got [][]float32, want [][]float32) {
	limit := t.b.Bound
	if t.encoded() {
		limit, what = max(limit, encodedDrafter), what+" (nvfp4 experts)"
	}
	t.within(what, limit, func() (float64, error) { return worst(got, want) })
}

func (t *test) within(what string, limit float64, worst func() (float64, error)) {
	w, err := worst()
	switch {
	case err != nil:
		t.broken("%s: %v", what, err)
		return
	case !(w <= limit):
		t.broken("%s off by %.2g, bound is %.2g", what, w, limit)
	}
	t.part("%s %.1e", what, w)
}

// open returns a runner on a fresh device.
func (t *test) open(chunk int) (*model.Runner, error) {
	dev, err := t.b.Open(t.s.Model, len(t.c.Tokens)+len(t.c.Greedy)+len(t.c.Drafts)+1)
	if err != nil {
		return nil, err
	}
	return model.NewRunner(t.s.Model, dev, chunk), nil
}

func (t *test) run() error {
	if t.c.chat() {
		t.conversation()
	}
	r, err := t.open(len(t.c.Tokens))
	if err != nil {
		return err
	}
	defer r.Dev.Close()
	logits, err := t.target(r)
	if err != nil {
		return err
	}
	draft, err := t.drafter(r)
	if err != nil {
		return err
	}
	if err := t.greedy(r, logits[len(logits)-1]); err != nil {
		return err
	}
	for _, chunk := range []int{1, 3, 64} {
		if chunk < len(t.c.Tokens) {
			if err := t.chunked(chunk, logits, draft); err != nil {
				return err
			}
		}
	}
	t.part("chunks")
	return nil
}

// conversation compares the rendered prompt, its ids and the decoded continuation.
func (t *test) conversation() {
	messages, err := chat.ParseMessages(t.c.Messages)
	if err != nil {
		t.broken("messages: %v", err)
		return
	}
	p, err := t.s.Template.Render(chat.Input{Messages: messages, AddGenerationPrompt: true, EnableThinking: &t.c.EnableThinking})
	switch {
	case err != nil:
		t.broken("template: %v", err)
		return
	case p.Text() != t.c.Prompt:
		t.broken("prompt is %q, recorded is %q", p.Text(), t.c.Prompt)
	case !slices.Equal(p.Encode(t.s.Tokenizer), t.c.Tokens):
		t.broken("prompt ids are %v, recorded are %v", p.Encode(t.s.Tokenizer), t.c.Tokens)
	}
	if got := t.s.Tokenizer.Decode(t.c.Greedy); got != t.c.Text {
		t.broken("continuation decodes to %q, recorded is %q", got, t.c.Text)
	}
	t.part("prompt and text")
}

// target runs the prompt in one piece and compares logits, streams and decisions.
func (t *test) target(r *model.Runner) ([][]float32, error) {
	r.Taps = true
	trace := &backend.Trace{}
	n := len(t.c.Tokens)
	res, err := r.Launch(backend.Prefill, &backend.Control{Lanes: []backend.LaneRows{
		{Tokens: t.c.Tokens, Positions: model.Positions(0, n), Want: backend.WantLogitsAll, Trace: trace},
	}})
	if err != nil {
		return nil, err
	}
	logits := cloned(res.Lanes[0].Logits)
	want, err := t.g.rows(t.line.Case+".logits", n)
	if err != nil {
		return nil, err
	}
	bound(t, "logits", logits, want)
	layers, routed, chosen := 0, 0, 0
	var streams float64
	for l := range t.s.Model.Config.Text.Layers {
		want, err := t.g.rows(fmt.Sprintf("%s.layer%d", t.line.Case, l), n)
		if err != nil {
			continue // streams are recorded for some cases only
		}
		layers++
		w, err := worst(trace.Streams[fmt.Sprintf("layer %d", l)], want)
		if err != nil {
			return nil, err
		}
		if streams = max(streams, w); !(w <= t.b.Bound) {
			t.broken("layer %d streams off by %.2g, bound is %.2g", l, w, t.b.Bound)
		}
		if e := t.g.experts(t.line.Case, l); e != nil {
			routed += differing(e, trace.Experts[l], slices.Equal[[]int32])
		}
		if s := t.g.selected(t.line.Case, l); s != nil {
			chosen += differing(s, trace.Selected[l], slices.Equal[[]bool])
		}
	}
	if layers > 0 {
		t.part("streams %.1e", streams)
		t.part("routing %d selection %d differ", routed, chosen)
		if t.b.Decisions && routed+chosen > 0 {
			t.broken("%d rows are routed and %d selected otherwise than recorded", routed, chosen)
		}
	}
	return logits, nil
}

// differing counts the rows that are not equal.
func differing[T any](want, got []T, equal func(a, b T) bool) int {
	n := max(len(want), len(got)) - min(len(want), len(got))
	for i := range min(len(want), len(got)) {
		if !equal(want[i], got[i]) {
			n++
		}
	}
	return n
}

// cloned are rows that the next launch does not overwrite.
func cloned(rows [][]float32) (out [][]float32) {
	for _, row := range rows {
		out = append(out, slices.Clone(row))
	}
	return out
}

// drafter runs the MTP head over the prompt, teacher-forced, then the chained drafts, each from the recorded one before it.
func (t *test) drafter(r *model.Runner) ([][]float32, error) {
	n := len(t.c.Tokens)
	launch := func(rows backend.LaneRows) ([][]float32, error) {
		res, err := r.Launch(backend.Draft, &backend.Control{Lanes: []backend.LaneRows{rows}})
		if err != nil {
			return nil, err
		}
		return cloned(res.Lanes[0].Logits), nil
	}
	got, err := launch(backend.LaneRows{Tokens: t.c.Tokens[1:], Want: backend.WantLogitsAll})
	if err != nil {
		return nil, err
	}
	want, err := t.g.rows(t.line.Case+".mtp_logits", n-1)
	if err != nil {
		return nil, err
	}
	drafted(t, "mtp", got, want)
	if want, err = t.g.rows(t.line.Case+".draft_logits", len(t.c.Drafts)); err != nil {
		return nil, err
	}
	var logits [][]float32
	next := t.c.Next
	for i, d := range t.c.Drafts {
		row, err := launch(backend.LaneRows{Tokens: []int32{next}, Want: backend.WantLogits, Chain: i > 0})
		if err != nil {
			return nil, err
		}
		logits = append(logits, slices.Clone(row[0]))
		if id, best := greedy(row[0], t.s.Model.Options.IDs); id != d && !t.encoded() && forced(t.c.DraftsMargin[i], best) {
			t.broken("draft %d is %d, recorded is %d", i, id, d)
		}
		next = d
	}
	drafted(t, "drafts", logits, want)
	return logits, nil
}

// greedy feeds the recorded continuation and compares what would have been chosen at every step.
func (t *test) greedy(r *model.Runner, last []float32) error {
	ids := t.c.Greedy
	rows := [][]float32{last}
	for i, id := range ids[:len(ids)-1] {
		res, err := r.Launch(backend.Decode, &backend.Control{Lanes: []backend.LaneRows{
			{Tokens: []int32{id}, Positions: model.Positions(len(t.c.Tokens)+i, 1), Want: backend.WantLogits},
		}})
		if err != nil {
			return err
		}
		rows = append(rows, slices.Clone(res.Lanes[0].Logits[0]))
	}
	equal := 0
	for i, id := range ids {
		got, best := greedy(rows[i], t.s.Model.Options.IDs)
		switch {
		case got == id:
			equal++
		case forced(t.c.Margin[i], best):
			t.broken("greedy token %d is %d, recorded is %d", i, got, id)
		}
	}
	t.part("greedy %d/%d", equal, len(ids))
	return nil
}

// chunked runs the prompt in chunks and requires the same bits, of the drafter too.
func (t *test) chunked(chunk int, logits, draft [][]float32) error {
	r, err := t.open(chunk)
	if err != nil {
		return err
	}
	defer r.Dev.Close()
	res, err := r.Prompt(backend.LaneRows{Tokens: t.c.Tokens, Want: backend.WantLogitsAll})
	if err != nil {
		return err
	}
	if n := differing(logits, res.Logits, slices.Equal[[]float32]); n > 0 {
		t.broken("%d rows of logits change when the prompt comes in chunks of %d", n, chunk)
	}
	next, chain := t.c.Next, false
	for i, d := range t.c.Drafts {
		out, err := r.Launch(backend.Draft, &backend.Control{Lanes: []backend.LaneRows{{Tokens: []int32{next}, Want: backend.WantLogits, Chain: chain}}})
		if err != nil {
			return err
		}
		if len(out.Lanes[0].Logits) != 1 || !slices.Equal(out.Lanes[0].Logits[0], draft[i]) {
			t.broken("draft %d changes when the prompt comes in chunks of %d", i, chunk)
			break
		}
		next, chain = d, true
	}
	return nil
}
