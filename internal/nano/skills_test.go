package nano_test

import (
	"bufio"
	"bytes"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"flag"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/artifact"
	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/engine"
	"ninfer/internal/front"
	"ninfer/internal/model"
	"ninfer/internal/nano"
	"ninfer/internal/quality"
	"ninfer/internal/text/chat"
	"ninfer/internal/text/token"
)

var (
	all       = flag.Bool("all", false, "every held-out prompt; without it a sample of each skill")
	modelFlag = flag.String("model", "", "artifact to use where the program has none inside")
)

const data = "../../testdata/nano"

// least are the scores in percent below which the build fails: what was asked of copy, json, tool, needle and docs, and for others a little
// less than was reached.
var least = map[string]float64{
	"copy": 95, "json": 90, "tool": 90, "needle": 90, "docs": 80, "reverse": 90, "tool_result": 90, "chat": 85, "think": 85, "arithmetic": 85,
}

// sample is how many prompts of a skill an ordinary test asks.
const sample = 16

// item is one held-out prompt.
type item struct {
	ID       string           `json:"id"`
	Skill    string           `json:"skill"`
	Messages jsontext.Value   `json:"messages"`
	Tools    []jsontext.Value `json:"tools"`
	Thinking bool             `json:"thinking"`
	MaxNew   int              `json:"max_new"`
	Expect   expectation      `json:"expect"`
}

// recorded is what the reference implementation answered.
type recorded struct {
	ID     string  `json:"id"`
	Prompt []int32 `json:"prompt_tokens"`
	Tokens []int32 `json:"tokens"`
	Text   string  `json:"text"`
	Pass   bool    `json:"pass"`
	Margin float64 `json:"margin"`
}

// lines reads a file of JSON objects, one a line.
func lines[T any](t *testing.T, name string) []T {
	t.Helper()
	f, err := os.Open(filepath.Join(data, name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var out []T
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<24)
	for s.Scan() {
		if len(bytes.TrimSpace(s.Bytes())) == 0 {
			continue
		}
		var v T
		if err := json.Unmarshal(s.Bytes(), &v); err != nil {
			t.Fatalf("%s: line %d: %v", name, len(out)+1, err)
		}
		out = append(out, v)
	}
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

// subject is the embedded model with its text side.
type subject struct {
	model     *model.Model
	front     *front.Front
	tokenizer *token.Tokenizer
	// device makes the device that answers; nil is the CPU's fast one.
	device func(cpu.Options) backend.Device
}

// open opens the embedded model. Tests skip in a build without it.
func open(t *testing.T, o model.Options) subject {
	t.Helper()
	if testing.Short() {
		t.Skip("asks the model for half a minute: not with -short")
	}
	raw, err := nano.Artifact()
	if *modelFlag != "" {
		raw, err = os.ReadFile(*modelFlag)
	}
	if errors.Is(err, nano.ErrLeftOut) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	f, err := artifact.OpenBytes(nano.Name, raw)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	store, err := model.NewArtifact(f)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	for _, role := range []string{"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} {
		if files[role], err = store.Resource("text", role); err != nil {
			t.Fatal(err)
		}
	}
	s := subject{}
	if s.tokenizer, err = token.Load(files["tokenizer.json"], files["tokenizer_config.json"]); err != nil {
		t.Fatal(err)
	}
	template, err := chat.NewTemplate("chat_template.jinja", files["chat_template.jinja"])
	if err != nil {
		t.Fatal(err)
	}
	o.IDs = s.tokenizer.Count()
	if s.model, err = model.Bind(store.Config(), store, o); err != nil {
		t.Fatal(err)
	}
	if s.front, err = front.New(front.Options{
		Tokenizer: s.tokenizer, Template: template, TokenizerConfig: files["tokenizer_config.json"], GenerationConfig: files["generation_config.json"],
		Context: store.Config().Text.MaxPositions, MaxTokens: 1, Greedy: true,
	}); err != nil {
		t.Fatal(err)
	}
	return s
}

// answer is a generation in progress, and what came of it.
type answer struct {
	item    item
	prompt  *front.Prepared
	session *front.Session
	outcome engine.Outcome
	output
}

// Preview is of engine.Watcher.
func (a *answer) Preview(ids []int32) engine.Verdict {
	keep, ends, insert := a.session.Preview(ids)
	v := engine.Verdict{Keep: keep, Insert: insert}
	if ends {
		v.Reason = engine.Stop
	}
	return v
}

// Commit is of engine.Watcher.
func (a *answer) Commit(ids []int32) error {
	a.take(a.session.Commit(ids))
	return nil
}

func (a *answer) take(events []front.Event) {
	for _, e := range events {
		switch e.Kind {
		case front.Answer:
			a.text += e.Text
		case front.Call:
			a.calls = append(a.calls, e)
		}
	}
}

// prepare renders an item.
func (s subject) prepare(t *testing.T, x item) *answer {
	t.Helper()
	messages, err := chat.ParseMessages(x.Messages)
	if err != nil {
		t.Fatalf("%s: %v", x.ID, err)
	}
	keep := false
	p, err := s.front.Prepare(front.Request{
		Messages: messages, Tools: x.Tools, ReadCalls: true, EnableThinking: &x.Thinking, PreserveThinking: &keep, MaxTokens: &x.MaxNew,
	})
	if err != nil {
		t.Fatalf("%s: %v", x.ID, err)
	}
	return &answer{item: x, prompt: p, session: p.Session()}
}

// ask generates the answers to items, several at a time, with so many drafts a round, on the device that run and serve use.
func (s subject) ask(t *testing.T, items []item, drafts int) map[string]*answer {
	t.Helper()
	const chunk, page = 512, engine.PageTokens
	lanes := min(8, len(items))
	out := map[string]*answer{}
	room := 0
	for _, x := range items {
		a := s.prepare(t, x)
		out[x.ID] = a
		room = max(room, len(a.prompt.Prompt)+x.MaxNew+drafts+1)
	}
	pages := (room + page - 1) / page
	o := cpu.Options{States: s.model.States, Lanes: lanes, Tokens: pages * page, Verify: drafts + 1, Carry: chunk + drafts + 1, KV: backend.CacheBF16}
	var dev backend.Device
	if s.device != nil {
		dev = s.device(o)
	} else {
		dev = cpu.NewFast(o)
	}
	defer dev.Close()
	b, err := engine.NewBatch(model.NewRunner(s.model, dev, chunk), engine.BatchOptions{
		Limits: engine.Limits{Lanes: lanes, Pages: lanes * pages, Pending: len(items), Passes: lanes}, Context: pages * page,
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, x := range items {
		a := out[x.ID]
		err := b.Add(t.Context(), engine.RequestID(i+1), engine.Request{
			Prompt: a.prompt.Prompt, MaxNew: a.prompt.MaxNew, Sampling: engine.Sampling(a.prompt.Sampling), Watcher: a, Draft: drafts,
		}, nil, func(o engine.Outcome, err error) {
			if err != nil {
				t.Errorf("%s: %v", x.ID, err)
			}
			a.take(a.session.Finish())
			a.outcome, a.ended = o, o.Reason == engine.Stop
		})
		if err != nil {
			t.Fatalf("%s: %v", x.ID, err)
		}
	}
	for {
		worked, err := b.Step()
		if err != nil {
			t.Fatal(err)
		}
		if !worked {
			return out
		}
	}
}

// chosen are the held-out prompts that this run asks: the first of each skill, or all. Long needles are for -all only.
func chosen(t *testing.T) []item {
	t.Helper()
	count := map[string]int{}
	return slices.DeleteFunc(lines[item](t, "heldout.jsonl"), func(x item) bool {
		count[x.Skill]++
		most := sample
		if strings.HasPrefix(x.Skill, "needle") {
			most = sample / 2
		}
		if x.Skill == "needle4k" || x.Skill == "needle8k" {
			most = 0
		}
		return !*all && count[x.Skill] > most
	})
}

// tie is how far apart two logits may be that BF16 rounding, which greedy decoding applies and the reference does not, makes equal: a
// step at the size of the largest logits.
const tie = 0.125

// TestSkills asks the held-out prompts and compares scores with the limits and with the reference's.
func TestSkills(t *testing.T) {
	s := open(t, model.Options{})
	items := chosen(t)
	long := func(x item) bool { return x.Skill == "needle4k" || x.Skill == "needle8k" }
	answers := s.ask(t, slices.DeleteFunc(slices.Clone(items), long), 0)
	if longs := slices.DeleteFunc(slices.Clone(items), func(x item) bool { return !long(x) }); len(longs) > 0 {
		maps.Copy(answers, s.ask(t, longs, 0))
	}
	reference := map[string]recorded{}
	for _, r := range lines[recorded](t, "reference.jsonl") {
		reference[r.ID] = r
	}
	type tally struct{ n, pass, theirs, same int }
	skills := map[string]*tally{}
	for _, x := range items {
		k := skills[x.Skill]
		if k == nil {
			k = &tally{}
			skills[x.Skill] = k
		}
		k.n++
		a, r := answers[x.ID], reference[x.ID]
		if err := x.Expect.judge(a.output); err == nil {
			k.pass++
		} else {
			t.Logf("%s: %v", x.ID, err)
		}
		if r.Pass {
			k.theirs++
		}
		switch {
		case long(x): // only reported
		case r.ID == "":
			t.Errorf("%s: the reference has no answer", x.ID)
		case !slices.Equal(a.prompt.Prompt, r.Prompt):
			t.Errorf("%s: the prompt is %v, the reference's %v", x.ID, a.prompt.Prompt, r.Prompt)
		case slices.Equal(a.outcome.IDs, r.Tokens):
			k.same++
		case r.Margin > tie:
			t.Errorf("%s: %q, the reference says %q without a near tie (%.3f)", x.ID, s.tokenizer.Decode(a.outcome.IDs), r.Text, r.Margin)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(skills)) {
		k := skills[name]
		score, theirs := 100*float64(k.pass)/float64(k.n), 100*float64(k.theirs)/float64(k.n)
		t.Logf("%-12s %5.1f %% of %d, the reference %5.1f %%, the same text %d times", name, score, k.n, theirs, k.same)
		if score < least[name] {
			t.Errorf("%s: %.1f %%, need %v", name, score, least[name])
		}
		if off := math.Abs(score - theirs); off > 1 && name != "needle4k" && name != "needle8k" && k.pass-k.theirs != 1 && k.theirs-k.pass != 1 {
			t.Errorf("%s: %.1f points from the reference", name, off)
		}
	}
}

// TestDrafts: drafting changes nothing about greedy text, and pays.
func TestDrafts(t *testing.T) {
	s := open(t, model.Options{Drafter: true})
	items := slices.DeleteFunc(chosen(t), func(x item) bool { return x.Skill != "chat" && x.Skill != "docs" })
	plain, drafted := s.ask(t, items, 0), s.ask(t, items, 3)
	rounds, accepted := 0, 0
	for _, x := range items {
		a, b := plain[x.ID], drafted[x.ID]
		if !slices.Equal(a.outcome.IDs, b.outcome.IDs) {
			t.Errorf("%s: %q with drafts, %q without", x.ID, s.tokenizer.Decode(b.outcome.IDs), s.tokenizer.Decode(a.outcome.IDs))
		}
		rounds += b.outcome.Stats.Rounds
		accepted += b.outcome.Stats.Accepted
	}
	per := 1 + float64(accepted)/float64(max(rounds, 1))
	t.Logf("%.2f tokens a round at three drafts, %d rounds", per, rounds)
	if per < 2 {
		t.Errorf("%.2f tokens a round, need 2", per)
	}
}

// TestPerplexity compares with the reference's sum over the same text.
func TestPerplexity(t *testing.T) {
	s := open(t, model.Options{})
	raw, err := os.ReadFile(filepath.Join(data, "reference.json"))
	if err != nil {
		t.Fatal(err)
	}
	var reference struct {
		Perplexity struct {
			Tokens int     `json:"tokens"`
			Scored int     `json:"scored"`
			NLL    float64 `json:"mean_nll"`
		} `json:"perplexity"`
	}
	if err := json.Unmarshal(raw, &reference); err != nil {
		t.Fatal(err)
	}
	want := reference.Perplexity
	streams, err := quality.ReadCorpus(filepath.Join(data, "corpus.json"), false)
	if err != nil {
		t.Fatal(err)
	}
	dev := cpu.NewFast(cpu.Options{States: s.model.States, Lanes: 1, Tokens: want.Tokens, Carry: 512, KV: backend.CacheBF16})
	defer dev.Close()
	q := &quality.Subject{Runner: model.NewRunner(s.model, dev, 512), IDs: s.tokenizer.Count()}
	p, err := quality.Measure(t.Context(), q, streams, s.tokenizer.EncodePlain, quality.PerplexityOptions{Context: max(want.Tokens, 2), Stride: max(want.Tokens, 2) - 1})
	if err != nil {
		t.Fatal(err)
	}
	got := p.Overall
	off := math.Exp(got.NLL/float64(got.Scored)-want.NLL) - 1
	t.Logf("perplexity %.5f, the reference %.5f (%+.4f %%)", got.Perplexity, math.Exp(want.NLL), 100*off)
	if got.Tokens != want.Tokens || got.Scored != want.Scored || !(math.Abs(off) <= 1e-3) {
		t.Errorf("%d tokens, %d scored, perplexity %v; the reference %d, %d, %v", got.Tokens, got.Scored, got.Perplexity, want.Tokens, want.Scored, math.Exp(want.NLL))
	}
}
