package front_test

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/front"
	"ninfer/internal/text/chat"
	"ninfer/internal/text/token"
)

func read(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var folders = []string{"../../testdata/micro-radixark", filepath.Join(os.Getenv("NINFER_GOLDEN"), "mini-radixark")}

// options are those of a golden folder, with another template if one is named.
func options(t testing.TB, dir, template string) front.Options {
	t.Helper()
	file := func(name string) []byte { return read(t, filepath.Join(dir, "checkpoint", name)) }
	tok, err := token.Load(file("tokenizer.json"), file("tokenizer_config.json"))
	if err != nil {
		t.Fatal(err)
	}
	source := file("chat_template.jinja")
	if template != "" {
		source = []byte(template)
	}
	tmpl, err := chat.NewTemplate("chat_template.jinja", source)
	if err != nil {
		t.Fatal(err)
	}
	return front.Options{Tokenizer: tok, Template: tmpl, TokenizerConfig: file("tokenizer_config.json"), GenerationConfig: file("generation_config.json"), Context: 512, MaxTokens: 64}
}

func newFront(t testing.TB, opt front.Options) *front.Front {
	t.Helper()
	f, err := front.New(opt)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func micro(t testing.TB) front.Options { return options(t, folders[0], "") }

// efforts is a template with the efforts of the official one.
const efforts = `{%- set e = reasoning_effort | default('xhigh') %}{%- if enable_thinking and e not in ['low', 'medium', 'xhigh'] %}{{ raise_exception('Unsupported reasoning effort: ' ~ e) }}{%- endif %}` +
	`{%- if enable_thinking %}{{- '<|im_start|>system\neffort ' + e + '<|im_end|>\n' }}{%- endif %}` +
	`{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}` +
	`{{- '<|im_start|>assistant\n' }}{%- if enable_thinking %}{{- '<think>\n' }}{%- else %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}`

func user(text string) []chat.Message {
	return []chat.Message{{Role: "user", Content: chat.TextContent(text)}}
}

func ptr[T any](v T) *T { return &v }

// The reference's prompts: text, ids and mode.
func TestGoldenPrompts(t *testing.T) {
	for _, dir := range folders {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			f := newFront(t, options(t, dir, ""))
			var golden struct {
				Cases map[string]struct {
					Tokens   []int32        `json:"tokens"`
					Greedy   []int32        `json:"greedy"`
					Messages jsontext.Value `json:"messages"`
					Thinking bool           `json:"enable_thinking"`
					Prompt   string         `json:"prompt"`
					Text     string         `json:"text"`
				} `json:"cases"`
			}
			if err := json.Unmarshal(read(t, filepath.Join(dir, "golden.json")), &golden); err != nil {
				t.Fatal(err)
			}
			n := 0
			for name, c := range golden.Cases {
				if c.Messages == nil {
					continue
				}
				n++
				messages, err := chat.ParseMessages(c.Messages)
				if err != nil {
					t.Fatal(err)
				}
				p, err := f.Prepare(front.Request{Messages: messages, EnableThinking: &c.Thinking, Raw: true})
				if err != nil {
					t.Fatal(err)
				}
				if p.Text != c.Prompt || !slices.Equal(p.Prompt, c.Tokens) || p.Thinking != c.Thinking {
					t.Errorf("%s: prompt %q, thinking %v", name, p.Text, p.Thinking)
				}
				// The reference's continuation as it is, up to the end id.
				s := p.Session()
				keep, ends, _ := s.Preview(c.Greedy)
				var text strings.Builder
				for _, e := range slices.Concat(s.Commit(c.Greedy[:keep]), s.Finish()) {
					if e.Kind == front.Answer {
						text.WriteString(e.Text)
					}
				}
				end := slices.IndexFunc(c.Greedy, func(id int32) bool { return id == 1 || id == 6 })
				if ends != (end >= 0) || ends && keep != end+1 || !strings.HasPrefix(c.Text, text.String()) || !ends && text.String() != c.Text {
					t.Errorf("%s: kept %d, ends %v, text %q, want %q", name, keep, ends, text.String(), c.Text)
				}
				if u := s.Usage(); u.Prompt != len(c.Tokens) || u.Completion != keep {
					t.Errorf("%s: usage %+v", name, u)
				}
			}
			if n < 2 {
				t.Errorf("%d conversations", n)
			}
		})
	}
}

func TestMode(t *testing.T) {
	plain := options(t, folders[0], efforts)
	off := plain
	off.NoThinking = true
	for _, c := range []struct {
		name     string
		opt      front.Options
		req      front.Request
		thinking bool
		effort   string
		code     string
	}{
		{name: "default", opt: plain, thinking: true},
		{name: "process without thinking", opt: off, thinking: false},
		{name: "request over process", opt: off, req: front.Request{EnableThinking: ptr(true)}, thinking: true},
		{name: "request off", opt: plain, req: front.Request{EnableThinking: ptr(false)}},
		{name: "effort none", opt: plain, req: front.Request{Effort: "none"}},
		{name: "effort none twice", opt: plain, req: front.Request{Effort: "none", EnableThinking: ptr(false)}},
		{name: "effort", opt: plain, req: front.Request{Effort: "low"}, thinking: true, effort: "low"},
		{name: "effort wants thinking", opt: off, req: front.Request{Effort: "medium"}, thinking: true, effort: "medium"},
		{name: "effort without thinking", opt: plain, req: front.Request{Effort: "medium", EnableThinking: ptr(false)}, effort: "medium"},
		{name: "conflict", opt: plain, req: front.Request{Effort: "none", EnableThinking: ptr(true)}, code: front.CodeTemplateOptions},
		{name: "unknown effort", opt: plain, req: front.Request{Effort: "high"}, code: front.CodeEffort},
		{name: "no such effort", opt: plain, req: front.Request{Effort: "much"}, code: front.CodeEffort},
		{name: "template without efforts", opt: micro(t), req: front.Request{Effort: "low"}, code: front.CodeEffort},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.req.Messages = user("Q")
			p, err := newFront(t, c.opt).Prepare(c.req)
			if c.code != "" {
				wantCode(t, err, c.code)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			tail := map[bool]string{true: "<think>\n", false: "<think>\n\n</think>\n\n"}[c.thinking]
			if p.Thinking != c.thinking || !strings.HasSuffix(p.Text, "assistant\n"+tail) || p.Effort != c.effort {
				t.Errorf("thinking %v, effort %q, prompt %q", p.Thinking, p.Effort, p.Text)
			}
			want := "effort " + c.effort
			if c.effort == "" {
				want = "effort xhigh"
			}
			if strings.Contains(p.Text, want) != c.thinking {
				t.Errorf("prompt %q, want effort %q only with thinking", p.Text, want)
			}
		})
	}
	f := newFront(t, plain)
	_, err := f.Prepare(front.Request{Messages: user("Q"), Effort: "high"})
	if err == nil || !strings.Contains(err.Error(), "low, medium, xhigh") {
		t.Errorf("the refusal %q lists no efforts", err)
	}
	if e := f.Efforts(); e.Default != "xhigh" || !slices.Equal(e.Accepted, []string{"low", "medium", "xhigh"}) {
		t.Errorf("efforts %+v", e)
	}
}

func wantCode(t testing.TB, err error, code string) *front.Error {
	t.Helper()
	var e *front.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Fatalf("error %v, want code %s", err, code)
	}
	return e
}

// A template that ignores thinking leaves no block open, whatever was asked: the output is an answer then.
func TestTemplateWithoutThinking(t *testing.T) {
	f := newFront(t, options(t, folders[0], `{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}{{- '<|im_start|>assistant\n' }}`))
	p, err := f.Prepare(front.Request{Messages: user("<think> is a word"), EnableThinking: ptr(true)})
	if err != nil {
		t.Fatal(err)
	}
	if p.Thinking {
		t.Error("thinking without an open block")
	}
}

// The order: defaults of the mode, the model's file, the process, the request, --greedy.
func TestSampling(t *testing.T) {
	think := front.Sampling{Temperature: 1, TopP: 0.95, TopK: 20}
	plain := front.Sampling{Temperature: 0.7, TopP: 0.8, TopK: 20, Presence: 1.5}
	process := front.Settings{Temperature: ptr(0.5), Seed: ptr(uint64(9))}
	for _, c := range []struct {
		name   string
		file   string
		opt    front.Options
		req    front.Settings
		off    bool
		want   front.Sampling
		random bool
	}{
		{name: "thinking", want: think},
		{name: "plain", off: true, want: plain},
		{name: "file is of the thinking mode", file: `{"temperature":0.6,"top_p":0.9,"top_k":5,"min_p":0.1}`, want: front.Sampling{Temperature: 0.6, TopP: 0.9, TopK: 5, MinP: 0.1}},
		{name: "file is not of the plain mode", file: `{"temperature":0.6,"top_p":0.9,"top_k":5}`, off: true, want: plain},
		{name: "file that is greedy", file: `{"do_sample":false}`, want: front.Sampling{TopP: 0.95, TopK: 20}},
		{name: "process", opt: front.Options{Sampling: process}, off: true, want: front.Sampling{Temperature: 0.5, TopP: 0.8, TopK: 20, Presence: 1.5, Seed: 9}},
		{name: "request over process", opt: front.Options{Sampling: process}, req: front.Settings{Temperature: ptr(2.0), Seed: ptr(uint64(3))}, want: front.Sampling{Temperature: 2, TopP: 0.95, TopK: 20, Seed: 3}},
		{name: "all of a request", req: front.Settings{Temperature: ptr(0.1), TopP: ptr(0.2), MinP: ptr(0.3), Presence: ptr(-2.0), Frequency: ptr(2.0), TopK: ptr(7)}, want: front.Sampling{Temperature: 0.1, TopP: 0.2, TopK: 7, MinP: 0.3, Presence: -2, Frequency: 2}},
		{name: "top_k above the cap", req: front.Settings{TopK: ptr(1000)}, want: think},
		{name: "top_k -1", req: front.Settings{TopK: ptr(-1)}, want: front.Sampling{Temperature: 1, TopP: 0.95}},
		{name: "greedy process", opt: front.Options{Greedy: true}, req: front.Settings{Temperature: ptr(1.0)}, want: front.Sampling{TopP: 0.95, TopK: 20}},
		{name: "top_p 0 is the best token", req: front.Settings{TopP: ptr(0.0)}, want: front.Sampling{Temperature: 1, TopP: math.SmallestNonzeroFloat64, TopK: 20}},
		{name: "fresh seed", opt: front.Options{FreshSeeds: true}, want: think, random: true},
		{name: "fresh seed but chosen", opt: front.Options{FreshSeeds: true}, req: front.Settings{Seed: ptr(uint64(0))}, want: think},
		{name: "fresh seed but process", opt: front.Options{FreshSeeds: true, Sampling: front.Settings{Seed: ptr(uint64(4))}}, want: front.Sampling{Temperature: 1, TopP: 0.95, TopK: 20, Seed: 4}},
	} {
		t.Run(c.name, func(t *testing.T) {
			opt := micro(t)
			opt.Sampling, opt.Greedy, opt.FreshSeeds = c.opt.Sampling, c.opt.Greedy, c.opt.FreshSeeds
			if c.file != "" {
				opt.GenerationConfig = []byte(c.file)
			}
			p, err := newFront(t, opt).Prepare(front.Request{Messages: user("Q"), EnableThinking: ptr(!c.off), Sampling: c.req})
			if err != nil {
				t.Fatal(err)
			}
			if c.random {
				if p.Sampling.Seed == 0 {
					t.Error("no fresh seed")
				}
				p.Sampling.Seed = 0
			}
			if p.Sampling != c.want {
				t.Errorf("%+v, want %+v", p.Sampling, c.want)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	f := newFront(t, micro(t))
	nan := math.NaN()
	for _, c := range []struct {
		name  string
		req   front.Request
		code  string
		param string
	}{
		{"no messages", front.Request{}, front.CodeInvalidPrompt, "messages"},
		{"temperature", front.Request{Sampling: front.Settings{Temperature: ptr(2.1)}}, front.CodeInvalidValue, "temperature"},
		{"temperature that is no number", front.Request{Sampling: front.Settings{Temperature: &nan}}, front.CodeInvalidValue, "temperature"},
		{"top_p", front.Request{Sampling: front.Settings{TopP: ptr(-0.1)}}, front.CodeInvalidValue, "top_p"},
		{"min_p", front.Request{Sampling: front.Settings{MinP: ptr(1.1)}}, front.CodeInvalidValue, "min_p"},
		{"presence", front.Request{Sampling: front.Settings{Presence: ptr(-2.1)}}, front.CodeInvalidValue, "presence_penalty"},
		{"frequency", front.Request{Sampling: front.Settings{Frequency: ptr(math.Inf(1))}}, front.CodeInvalidValue, "frequency_penalty"},
		{"top_k", front.Request{Sampling: front.Settings{TopK: ptr(-2)}}, front.CodeInvalidValue, "top_k"},
		{"stop", front.Request{Stop: []string{"a", ""}}, front.CodeInvalidValue, "stop"},
		{"stop id", front.Request{StopIDs: []int32{480}}, front.CodeInvalidValue, "stop_token_ids"},
		{"limit", front.Request{MaxTokens: ptr(-2)}, front.CodeInvalidValue, "max_completion_tokens"},
		{"budget 0", front.Request{ThinkingBudget: ptr(0)}, front.CodeInvalidValue, "thinking_budget_tokens"},
		{"too long", front.Request{Messages: user(strings.Repeat("é!", 600))}, front.CodeContextLength, "messages"},
		{"continue while thinking", front.Request{Messages: append(user("Q"), chat.Message{Role: "assistant", Content: chat.TextContent("A")})}, front.CodeInvalidPrompt, "messages"},
		{"template argument that is ours", front.Request{Args: []chat.Arg{{Name: "messages", Value: jsontext.Value("[]")}}}, front.CodeTemplateOptions, "chat_template_kwargs.messages"},
		{"template argument that is a token", front.Request{Args: []chat.Arg{{Name: "eos_token", Value: jsontext.Value(`""`)}}}, front.CodeTemplateOptions, "chat_template_kwargs.eos_token"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.req.Messages == nil && c.name != "no messages" {
				c.req.Messages = user("Q")
			}
			_, err := f.Prepare(c.req)
			if e := wantCode(t, err, c.code); e.Param != c.param || strings.ContainsAny(e.Message, "\n") || e.Message == "" {
				t.Errorf("param %q, message %q", e.Param, e.Message)
			}
		})
	}
	_, err := f.Prepare(front.Request{Messages: user(strings.Repeat("é!", 600))})
	if err == nil || !strings.Contains(err.Error(), "512") || !strings.Contains(err.Error(), "tokens") {
		t.Errorf("%v: names neither count nor ceiling", err)
	}
	raises := newFront(t, options(t, folders[0], `{%- if messages[0].role == 'critic' %}{{ raise_exception('Unexpected message role.') }}{%- endif %}{{- '<|im_start|>assistant\n' }}`))
	_, err = raises.Prepare(front.Request{Messages: []chat.Message{{Role: "critic"}}})
	if e := wantCode(t, err, front.CodeInvalidPrompt); !strings.Contains(e.Message, "Unexpected message role.") || !strings.Contains(e.Message, "chat_template.jinja") {
		t.Errorf("%q: not the template's words and name", e.Message)
	}
}

func TestContinue(t *testing.T) {
	f := newFront(t, micro(t))
	p, err := f.Prepare(front.Request{Messages: append(user("Q"), chat.Message{Role: "assistant", Content: chat.TextContent(" So far ")}), EnableThinking: ptr(false)})
	if err != nil {
		t.Fatal(err)
	}
	if want := "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n So far "; p.Text != want || p.Thinking {
		t.Errorf("%q, want %q", p.Text, want)
	}
}

func TestLimits(t *testing.T) {
	opt := micro(t)
	opt.ThinkingBudget = 10
	f := newFront(t, opt)
	base, err := f.Prepare(front.Request{Messages: user("Q")})
	if err != nil {
		t.Fatal(err)
	}
	n, closing := len(base.Prompt), len(base.Closing)
	if base.Budget != 10 || closing < 3 || base.MaxNew != 64 {
		t.Fatalf("budget %d, closing %v, limit %d", base.Budget, base.Closing, base.MaxNew)
	}
	if got := opt.Tokenizer.Decode(base.Closing); got != front.EarlyClose || !strings.HasSuffix(got, "\n</think>\n\n") {
		t.Errorf("closing text is %q", got)
	}
	for _, c := range []struct {
		name       string
		context    int
		limit      *int
		budget     *int
		off        bool
		wantNew    int
		wantBudget int
		code       string
		fit        bool
	}{
		{name: "rest of the context", limit: ptr(-1), wantNew: 512 - n, wantBudget: 10},
		{name: "only the prompt", limit: ptr(0), wantNew: 0},
		{name: "beyond the context", limit: ptr(100000), wantNew: 100000, wantBudget: 10},
		{name: "no budget", budget: ptr(-1), wantNew: 64},
		{name: "request over default", budget: ptr(3), wantNew: 64, wantBudget: 3},
		{name: "not thinking", budget: ptr(3), off: true, wantNew: 64},
		{name: "limit is the budget", limit: ptr(10), wantNew: 10},
		{name: "limit is below the budget", limit: ptr(9), wantNew: 9},
		{name: "limit one above the budget", limit: ptr(11), code: front.CodeBudgetCapacity},
		{name: "limit one too small", limit: ptr(10 + closing), code: front.CodeBudgetCapacity},
		{name: "limit one too small, fitted", limit: ptr(10 + closing), fit: true, wantNew: 10 + closing, wantBudget: 9},
		{name: "limit one above the budget, fitted", limit: ptr(11), fit: true, wantNew: 11},
		{name: "limit just enough, fitted", limit: ptr(10 + closing + 1), fit: true, wantNew: 10 + closing + 1, wantBudget: 10},
		{name: "limit is the budget, fitted", limit: ptr(10), fit: true, wantNew: 10},
		{name: "limit just enough", limit: ptr(10 + closing + 1), wantNew: 10 + closing + 1, wantBudget: 10},
		{name: "context one too small", context: n + 10 + closing, code: front.CodeBudgetCapacity},
		{name: "context just enough", context: n + 10 + closing + 1, wantNew: 64, wantBudget: 10},
		{name: "prompt fills the context", context: n, wantNew: 0},
		{name: "prompt over the context", context: n - 1, code: front.CodeContextLength},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := opt
			if c.context > 0 {
				o.Context = c.context
			}
			p, err := newFront(t, o).Prepare(front.Request{Messages: user("Q"), MaxTokens: c.limit, ThinkingBudget: c.budget, FitBudget: c.fit, EnableThinking: ptr(!c.off)})
			if c.code != "" {
				wantCode(t, err, c.code)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if p.MaxNew != c.wantNew || p.Budget != c.wantBudget {
				t.Errorf("limit %d, budget %d; want %d, %d", p.MaxNew, p.Budget, c.wantNew, c.wantBudget)
			}
		})
	}
}

// A session with a budget: the closing text comes as reasoning, once, and is counted.
func TestSessionBudget(t *testing.T) {
	opt := micro(t)
	p, err := newFront(t, opt).Prepare(front.Request{Messages: user("Q"), ThinkingBudget: ptr(3), Stop: []string{"STOP"}})
	if err != nil {
		t.Fatal(err)
	}
	s := p.Session()
	thought, answer := opt.Tokenizer.Encode("abc"), opt.Tokenizer.Encode("xy STOP z")
	thought = append(thought, opt.Tokenizer.Encode("defgh")...)
	keep, ends, insert := s.Preview(thought)
	if keep != 3 || ends || !slices.Equal(insert, p.Closing) {
		t.Fatalf("Preview = %d, %v, %v", keep, ends, insert)
	}
	got := s.Commit(slices.Concat(thought[:keep], insert))
	keep, ends, insert = s.Preview(answer)
	if !ends || insert != nil {
		t.Fatalf("Preview = %d, %v, %v", keep, ends, insert)
	}
	got = append(got, s.Commit(answer[:keep])...)
	got = append(got, s.Finish()...)
	before, _, _ := strings.Cut(front.EarlyClose, "</think>")
	want := []front.Event{
		{Kind: front.Reasoning, Text: opt.Tokenizer.Decode(thought[:3]) + before}, {Kind: front.ReasoningEnd}, {Kind: front.Answer, Text: "xy "}, {Kind: front.End, Text: "STOP"},
	}
	if !reflect.DeepEqual(join(got), want) {
		t.Errorf("%q\nwant %q", join(got), want)
	}
	marker := slices.Index(p.Closing, opt.Tokenizer.Encode("</think>")[0])
	if u := s.Usage(); u.Completion != 3+len(p.Closing)+keep || u.Reasoning != 3+marker+1 || u.Prompt != len(p.Prompt) {
		t.Errorf("usage %+v", u)
	}
}

// Calls are found in the answer, not in the reasoning, for requests that ask for it, however many tokens a round commits.
func TestSessionCalls(t *testing.T) {
	opt := micro(t)
	tools := []jsontext.Value{jsontext.Value(`{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"zip":{"type":"string"},"n":{"type":"integer"}}}}}`)}
	call := func(zip string) string {
		return "<tool_call>\n<function=f>\n<parameter=zip>\n" + zip + "\n</parameter>\n<parameter=n>\n2.0\n</parameter>\n</function>\n</tool_call>"
	}
	const args = `{"zip":"03106","n":2.0}`
	two := call("03106") + "\n" + call("03106")
	stop := opt.Tokenizer.Encode("<|im_end|>")
	for _, c := range []struct {
		name, text string
		req        front.Request
		end        bool // by the model
		want       []front.Event
		report     front.CallReport
	}{
		{
			name: "two after text", text: "T " + call("1") + "</think>\n\nLook: \n\n" + two, req: front.Request{Tools: tools, ReadCalls: true}, end: true,
			want: []front.Event{
				{Kind: front.Reasoning, Text: "T " + call("1")},
				{Kind: front.ReasoningEnd},
				{Kind: front.Answer, Text: "Look:"},
				{Kind: front.Call, Name: "f", Text: args},
				{Kind: front.Call, Name: "f", Text: args},
				{Kind: front.End},
			},
			report: front.CallReport{Marker: true, Calls: 2},
		},
		{
			name: "cut by a limit", text: "</think>" + call("03106"), req: front.Request{Tools: tools, ReadCalls: true},
			want:   []front.Event{{Kind: front.ReasoningEnd}, {Kind: front.Call, Name: "f", Text: args}, {Kind: front.End}},
			report: front.CallReport{Marker: true, Calls: 1},
		},
		{
			name: "no call", text: "</think>x <tool_call> y", req: front.Request{Tools: tools, ReadCalls: true}, end: true,
			want:   []front.Event{{Kind: front.ReasoningEnd}, {Kind: front.Answer, Text: "x <tool_call> y"}, {Kind: front.End}},
			report: front.CallReport{Marker: true, Fallback: "malformed_structure"},
		},
		{
			name: "not asked for", text: "</think>" + two, req: front.Request{Tools: tools}, end: true,
			want: []front.Event{{Kind: front.ReasoningEnd}, {Kind: front.Answer, Text: two}, {Kind: front.End}},
		},
		{
			name: "no tools", text: "</think>" + two, req: front.Request{ReadCalls: true}, end: true,
			want: []front.Event{{Kind: front.ReasoningEnd}, {Kind: front.Answer, Text: two}, {Kind: front.End}},
		},
		{
			name: "at most one", text: "T " + two + "</think>A" + two, req: front.Request{Tools: tools, ReadCalls: true, OneCall: true}, end: true,
			want: []front.Event{
				{Kind: front.Reasoning, Text: "T " + two},
				{Kind: front.ReasoningEnd},
				{Kind: front.Answer, Text: "A"},
				{Kind: front.Call, Name: "f", Text: args},
				{Kind: front.End},
			},
			report: front.CallReport{Marker: true, Calls: 1},
		},
		{
			name: "at most one, whose value spells the end of a call", text: "</think>" + call("a\n</function>\n</tool_call>\n") + call("b"), req: front.Request{Tools: tools, ReadCalls: true, OneCall: true}, end: true,
			want: []front.Event{
				{Kind: front.ReasoningEnd},
				{Kind: front.Call, Name: "f", Text: `{"zip":"a\n</function>\n</tool_call>\n","n":2.0}`},
				{Kind: front.End},
			},
			report: front.CallReport{Marker: true, Calls: 1},
		},
		{
			name: "at most one, and there is none", text: "</think>a > b </tool_call>" + call("03106")[1:], req: front.Request{Tools: tools, ReadCalls: true, OneCall: true}, end: true,
			want: []front.Event{{Kind: front.ReasoningEnd}, {Kind: front.Answer, Text: "a > b </tool_call>" + call("03106")[1:]}, {Kind: front.End}},
		},
		{
			name: "raw", text: "</think>" + two, req: front.Request{Tools: tools, ReadCalls: true, Raw: true}, end: true,
			want: []front.Event{{Kind: front.Answer, Text: "</think>" + two + "<|im_end|>"}, {Kind: front.End}},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.req.Messages = user("Q")
			p, err := newFront(t, opt).Prepare(c.req)
			if err != nil {
				t.Fatal(err)
			}
			ids := opt.Tokenizer.Encode(c.text)
			if c.end {
				ids = append(ids, stop...)
			}
			for n := 1; n <= len(ids); n++ {
				s := p.Session()
				var got []front.Event
				for i := 0; i < len(ids); i += n {
					round := ids[i:min(i+n, len(ids))]
					keep, ends, _ := s.Preview(round)
					got = append(got, s.Commit(round[:keep])...)
					if ends {
						break
					}
				}
				got = join(append(got, s.Finish()...))
				if !reflect.DeepEqual(got, c.want) || s.Calls() != c.report {
					t.Fatalf("%d a round: %q, %+v\nwant %q, %+v", n, got, s.Calls(), c.want, c.report)
				}
			}
		})
	}
	_, err := newFront(t, opt).Prepare(front.Request{Messages: user("Q"), Tools: []jsontext.Value{jsontext.Value(`{"function":{}}`)}, ReadCalls: true})
	if e := wantCode(t, err, front.CodeInvalidValue); e.Param != "tools[0]" {
		t.Errorf("param %q", e.Param)
	}
}

// A prompt of the client's own: its ids are run as they are, and the output is one text, think markers and all.
func TestUndivided(t *testing.T) {
	opt := micro(t)
	opt.ThinkingBudget = 3
	f := newFront(t, opt)
	ids := f.Tokens("<|im_start|>assistant\n<think>\n", false)
	p, err := f.Prepare(front.Request{Prompt: ids, Undivided: true, Stop: []string{"END"}})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(p.Prompt, ids) || p.Thinking || p.Budget != 0 || p.Sampling != f.Defaults(true) {
		t.Errorf("%+v", p)
	}
	s := p.Session()
	out := opt.Tokenizer.Encode("abcdefgh</think>x END y")
	keep, ends, insert := s.Preview(out)
	got := join(append(s.Commit(out[:keep]), s.Finish()...))
	if want := []front.Event{{Kind: front.Answer, Text: "abcdefgh</think>x "}, {Kind: front.End, Text: "END"}}; !ends || insert != nil || !reflect.DeepEqual(got, want) || s.Usage().Reasoning != 0 {
		t.Errorf("%q, ends %v, inserts %v, %+v", got, ends, insert, s.Usage())
	}
	_, err = f.Prepare(front.Request{Prompt: make([]int32, 513), Undivided: true})
	if e := wantCode(t, err, front.CodeContextLength); e.Param != "prompt" {
		t.Errorf("param %q", e.Param)
	}
}

func TestTokens(t *testing.T) {
	opt := micro(t)
	f := newFront(t, opt)
	end, _ := opt.Tokenizer.ID("<|im_end|>")
	if got := f.Tokens("<|im_end|>", false); !slices.Equal(got, []int32{end}) {
		t.Errorf("%v", got)
	}
	if got := f.Tokens("<|im_end|>", true); len(got) < 2 || slices.Contains(got, end) {
		t.Errorf("%v", got)
	}
	if got, err := f.TokenText(f.Tokens("é <|im_end|>☃", true)); err != nil || got != "é <|im_end|>☃" {
		t.Errorf("%q, %v", got, err)
	}
	for _, id := range []int32{-1, int32(opt.Tokenizer.Count())} {
		_, err := f.TokenText([]int32{0, id})
		if e := wantCode(t, err, front.CodeInvalidValue); e.Param != "tokens[1]" {
			t.Errorf("param %q", e.Param)
		}
	}
	if got := f.TokenBytes(end); string(got) != "<|im_end|>" {
		t.Errorf("%q", got)
	}
	if f.TemplateSource() == "" || f.TemplateSource() != opt.Template.Source() {
		t.Error("not the template's source")
	}
}

// join puts neighbours of one kind together.
func join(events []front.Event) []front.Event {
	var out []front.Event
	for _, e := range events {
		if n := len(out); n > 0 && out[n-1].Kind == e.Kind && e.Kind != front.Call {
			out[n-1].Text += e.Text
			continue
		}
		out = append(out, e)
	}
	return out
}

func TestNewRefuses(t *testing.T) {
	for name, change := range map[string]func(*front.Options){
		"no context":     func(o *front.Options) { o.Context = 0 },
		"no limit":       func(o *front.Options) { o.MaxTokens = 0 },
		"range":          func(o *front.Options) { o.Sampling.TopP = ptr(3.0) },
		"end id":         func(o *front.Options) { o.GenerationConfig = []byte(`{"eos_token_id":480}`) },
		"end id's type":  func(o *front.Options) { o.GenerationConfig = []byte(`{"eos_token_id":["a"]}`) },
		"file":           func(o *front.Options) { o.GenerationConfig = []byte(`{`) },
		"file's range":   func(o *front.Options) { o.GenerationConfig = []byte(`{"temperature":-1}`) },
		"tokenizer file": func(o *front.Options) { o.TokenizerConfig = []byte(`[]`) },
	} {
		opt := micro(t)
		change(&opt)
		if _, err := front.New(opt); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// One end id or several, or none.
func TestEndIDs(t *testing.T) {
	for file, want := range map[string][]int32{`{"eos_token_id":6}`: {6, 9}, `{"eos_token_id":[1,6]}`: {1, 6, 9}, `{}`: {9}, `{"eos_token_id":null}`: {9}} {
		opt := micro(t)
		opt.GenerationConfig = []byte(file)
		p, err := newFront(t, opt).Prepare(front.Request{Messages: user("Q"), StopIDs: []int32{9}})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(p.StopIDs, want) {
			t.Errorf("%s: %v, want %v", file, p.StopIDs, want)
		}
	}
}

// The official template, where its file is at hand.
func TestOfficialTemplate(t *testing.T) {
	source := read(t, filepath.Join(os.Getenv("NINFER_GOLDEN"), "qwen3.8_chat_template.jinja"))
	f := newFront(t, options(t, folders[0], string(source)))
	if e := f.Efforts(); fmt.Sprint(e.Accepted) != "[low medium xhigh]" || e.Default != "xhigh" {
		t.Errorf("efforts %+v", e)
	}
	reasoning := "\nR\n"
	messages := []chat.Message{
		{Role: "system", Content: chat.TextContent(" S ")},
		{Role: "user", Content: chat.TextContent("Hi\n")},
		{Role: "assistant", Reasoning: &reasoning, Content: chat.TextContent("A")},
		{Role: "user", Content: chat.TextContent("Q")},
	}
	head := "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
	tail := "A<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
	for _, c := range []struct {
		preserve *bool
		process  bool
		off      bool
		want     string
	}{ // what the official template makes of it, written out
		{want: head + tail + "<think>\n"},
		{preserve: ptr(true), want: head + "<think>\nR\n</think>\n\n" + tail + "<think>\n"},
		{process: true, want: head + "<think>\nR\n</think>\n\n" + tail + "<think>\n"},
		{process: true, preserve: ptr(false), want: head + tail + "<think>\n"},
		{off: true, want: head + tail + "<think>\n\n</think>\n\n"},
	} {
		opt := options(t, folders[0], string(source))
		opt.PreserveThinking = c.process
		req := front.Request{Messages: messages, Effort: "medium", PreserveThinking: c.preserve}
		if c.off {
			req.EnableThinking = ptr(false)
		}
		p, err := newFront(t, opt).Prepare(req)
		if err != nil {
			t.Fatal(err)
		}
		if p.Text != c.want {
			t.Errorf("%q\nwant %q", p.Text, c.want)
		}
	}
}
