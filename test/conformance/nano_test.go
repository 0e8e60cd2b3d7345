package conformance

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/shared"
)

// question is a held-out prompt of nano, the model inside the program, that the reference implementation answers rightly.
type question struct {
	ID       string `json:"id"`
	Skill    string `json:"skill"`
	Messages []struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	} `json:"messages"`
	Tools    []openTool `json:"tools"`
	Thinking bool       `json:"thinking"`
	Expect   struct {
		Kind      string   `json:"kind"`
		Text      string   `json:"text"`
		Name      string   `json:"name"`
		Arguments any      `json:"arguments"`
		All       []string `json:"all"`
	} `json:"expect"`
}

type openTool struct {
	Function struct {
		Name        string         `json:"name"`
		Description string         `json:"description"`
		Parameters  map[string]any `json:"parameters"`
	} `json:"function"`
}

// questions are the first n prompts of a skill in one mode that hold nothing but a system's and users' turns. It skips the test if the
// program has no model of its own.
func questions(t *testing.T, skill string, thinking bool, n int) []question {
	t.Helper()
	if out, err := exec.Command(program, "inspect").CombinedOutput(); err != nil {
		t.Skipf("%s", out)
	}
	right := map[string]bool{}
	lines(t, "reference.jsonl", func(r struct {
		ID   string `json:"id"`
		Pass bool   `json:"pass"`
	},
	) {
		right[r.ID] = r.Pass
	})
	var out []question
	lines(t, "heldout.jsonl", func(q question) {
		plain := right[q.ID] && q.Skill == skill && q.Thinking == thinking && len(out) < n
		for _, m := range q.Messages {
			plain = plain && (m.Role == "user" || m.Role == "system")
		}
		if plain {
			out = append(out, q)
		}
	})
	if len(out) < n {
		t.Fatalf("%d of %d questions of skill %s", len(out), n, skill)
	}
	return out
}

// lines reads a file of testdata/nano with a JSON object a line.
func lines[T any](t *testing.T, name string, take func(T)) {
	t.Helper()
	f, err := os.Open(filepath.Join(root, "testdata/nano", name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<24)
	for s.Scan() {
		var v T
		if err := json.Unmarshal(s.Bytes(), &v); err != nil {
			t.Fatal(err)
		}
		take(v)
	}
}

// serveNano serves the model inside the program.
func serveNano(t *testing.T, flags ...string) *site {
	t.Helper()
	return start(t, append([]string{"serve", "--port", "0", "--device", "cpu", "--max-context", "2048"}, flags...)...)
}

// params are the question's, with the SDK's own types.
func (q question) params() (openai.ChatCompletionNewParams, option.RequestOption) {
	p := openai.ChatCompletionNewParams{Model: "nano", Temperature: openai.Float(0), MaxCompletionTokens: openai.Int(200)}
	for _, m := range q.Messages {
		if m.Role == "system" {
			p.Messages = append(p.Messages, openai.SystemMessage(m.Content))
		} else {
			p.Messages = append(p.Messages, openai.UserMessage(m.Content))
		}
	}
	for _, tool := range q.Tools {
		p.Tools = append(p.Tools, openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{
			Name: tool.Function.Name, Description: openai.String(tool.Function.Description), Parameters: tool.Function.Parameters,
		}))
	}
	return p, option.WithJSONSet("enable_thinking", q.Thinking)
}

// reply is what a client makes of an answer.
type reply struct {
	content, reasoning, finish string
	calls                      []string // name and arguments
	message                    openai.ChatCompletionMessage
	usage                      openai.CompletionUsage
}

// ask asks as a whole or in a stream.
func ask(t *testing.T, client openai.Client, streamed bool, p openai.ChatCompletionNewParams, o option.RequestOption) reply {
	t.Helper()
	var c openai.ChatCompletion
	var r reply
	if streamed {
		p.StreamOptions.IncludeUsage = openai.Bool(true)
		stream := client.Chat.Completions.NewStreaming(t.Context(), p, o)
		var all openai.ChatCompletionAccumulator
		for stream.Next() {
			k := stream.Current()
			if !all.AddChunk(k) {
				t.Errorf("the accumulator refuses %s", k.RawJSON())
			}
			for _, choice := range k.Choices {
				r.reasoning += rawText(choice.Delta.JSON.ExtraFields["reasoning_content"].Raw())
			}
		}
		if err := stream.Err(); err != nil {
			t.Fatal(err)
		}
		c = all.ChatCompletion
	} else {
		got, err := client.Chat.Completions.New(t.Context(), p, o)
		if err != nil {
			t.Fatal(err)
		}
		c = *got
		r.reasoning = rawText(c.Choices[0].Message.JSON.ExtraFields["reasoning_content"].Raw())
	}
	r.message, r.usage = c.Choices[0].Message, c.Usage
	r.content, r.finish = r.message.Content, c.Choices[0].FinishReason
	for _, call := range r.message.ToolCalls {
		r.calls = append(r.calls, call.Function.Name+" "+call.Function.Arguments)
	}
	return r
}

// A model that means something: what it copies, with and without thinking, arrives as a whole and in a stream, drafted or not.
func TestNanoText(t *testing.T) {
	var all []question
	for _, thinking := range []bool{false, true} {
		all = append(all, questions(t, "copy", thinking, 3)...)
		all = append(all, questions(t, "docs", thinking, 2)...)
	}
	for _, flags := range [][]string{nil, {"--spec", "mtp", "--draft-tokens", "3"}} {
		t.Run(fmt.Sprint(len(flags) > 0), func(t *testing.T) {
			client := openaiClient(t, serveNano(t, flags...), "none")
			for _, q := range all {
				p, o := q.params()
				whole, streamed := ask(t, client, false, p, o), ask(t, client, true, p, o)
				if streamed.content != whole.content || streamed.reasoning != whole.reasoning || streamed.finish != whole.finish || streamed.usage.TotalTokens != whole.usage.TotalTokens {
					t.Errorf("%s: streamed %+v, whole %+v", q.ID, streamed, whole)
				}
				got := strings.TrimSpace(whole.content)
				if q.Expect.Kind == "exact" && got != q.Expect.Text {
					t.Errorf("%s: %q, want %q", q.ID, got, q.Expect.Text)
				}
				for _, s := range q.Expect.All {
					if !strings.Contains(strings.ToLower(got), strings.ToLower(s)) {
						t.Errorf("%s: %q lacks %q", q.ID, got, s)
					}
				}
				if whole.finish != "stop" || (whole.reasoning != "") != q.Thinking || (whole.usage.CompletionTokensDetails.ReasoningTokens > 0) != q.Thinking {
					t.Errorf("%s: finish %s, reasoning %q of %d tokens", q.ID, whole.finish, whole.reasoning, whole.usage.CompletionTokensDetails.ReasoningTokens)
				}
			}
		})
	}
}

// The model calls a tool by itself, gets the result through the SDK's own types, and answers. The SDK sends a declaration's members in an order
// of its own, so the prompts are not quite those that the reference answered: nano gets 78 of all 80 right then, and one of these may be wrong.
func TestNanoTools(t *testing.T) {
	wrong := 0
	all := append(questions(t, "tool", false, 3), questions(t, "tool", true, 2)...)
	client := openaiClient(t, serveNano(t), "none")
	for _, q := range all {
		p, o := q.params()
		whole, streamed := ask(t, client, false, p, o), ask(t, client, true, p, o)
		if whole.finish != "tool_calls" || len(whole.calls) != 1 || !reflect.DeepEqual(whole.calls, streamed.calls) || streamed.finish != whole.finish {
			t.Errorf("%s: %s %q, streamed %s %q: %q", q.ID, whole.finish, whole.calls, streamed.finish, streamed.calls, whole.content)
			continue
		}
		call := whole.message.ToolCalls[0]
		var args any
		if err := json.Unmarshal([]byte(call.Function.Arguments), &args); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(args, q.Expect.Arguments) {
			wrong++
		}
		if call.Function.Name != q.Expect.Name || wrong > 1 {
			t.Errorf("%s: calls %q, want %s %v; %d wrong so far", q.ID, whole.calls, q.Expect.Name, q.Expect.Arguments, wrong)
		}
		p.Messages = append(p.Messages, whole.message.ToParam(), openai.ToolMessage("The answer is 1742.", call.ID))
		answer := ask(t, client, false, p, o)
		if answer.finish != "stop" || strings.TrimSpace(answer.content) == "" || len(answer.calls) > 0 {
			t.Errorf("%s: after the result %s %q %q", q.ID, answer.finish, answer.content, answer.calls)
		}
		if again := ask(t, client, true, p, o); again.content != answer.content {
			t.Errorf("%s: after the result %q, streamed %q", q.ID, answer.content, again.content)
		}
	}
}

// Refusals, a limit, and a client that leaves, on the model inside the program.
func TestNanoErrorsAndCancel(t *testing.T) {
	q := questions(t, "copy", false, 1)[0]
	s := serveNano(t)
	client := openaiClient(t, s, "none")
	p, o := q.params()
	var refused *openai.Error
	long := p
	long.Messages = []openai.ChatCompletionMessageParamUnion{openai.UserMessage(strings.Repeat(longText(), 4))}
	if _, err := client.Chat.Completions.New(t.Context(), long, o); !errors.As(err, &refused) || refused.StatusCode != 400 || refused.Code != "context_length_exceeded" {
		t.Errorf("too long: %v", err)
	}
	other := p
	other.Model = "other"
	if _, err := client.Chat.Completions.New(t.Context(), other, o); !errors.As(err, &refused) || refused.StatusCode != 404 || refused.Code != "model_not_found" {
		t.Errorf("another model: %v", err)
	}
	short := p
	short.MaxCompletionTokens = openai.Int(1)
	if got := ask(t, client, false, short, o); got.finish != "length" || got.usage.CompletionTokens != 1 {
		t.Errorf("limit: %s after %d tokens", got.finish, got.usage.CompletionTokens)
	}
	endless := p
	endless.MaxCompletionTokens = openai.Int(1900)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	// A bias towards nothing in particular: high temperature keeps the model from ending soon.
	endless.Temperature, endless.Seed = openai.Float(2), openai.Int(1)
	stream := client.Chat.Completions.NewStreaming(ctx, endless, option.WithJSONSet("enable_thinking", true))
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	cancel()
	for stream.Next() {
	}
	stream.Close()
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		res, err := http.Get(s.url + "/ready")
		if err != nil {
			t.Fatal(err)
		}
		var ready struct {
			Running int `json:"running"`
		}
		err = json.NewDecoder(res.Body).Decode(&ready)
		res.Body.Close()
		if err == nil && ready.Running == 0 {
			break
		}
		if time.Since(begin) > 5*time.Second {
			t.Fatalf("%d running after the client has left, %v", ready.Running, err)
		}
	}
	http.DefaultClient.CloseIdleConnections()
	if got := ask(t, client, false, p, o); strings.TrimSpace(got.content) != q.Expect.Text {
		t.Errorf("after that: %q", got.content)
	}
}

// The npm package on nano.
func TestNanoNode(t *testing.T) {
	nanoNode(t, "nano.mjs", 6)
}

// nanoNode runs a script of node/ against nano, with questions that it answers rightly; the script prints a line for each of its checks.
func nanoNode(t *testing.T, script string, checks int) {
	t.Helper()
	cases := map[string][]question{"copy": questions(t, "copy", false, 2), "think": questions(t, "copy", true, 2), "tool": questions(t, "tool", false, 2)}
	dir := npm(t)
	raw, err := json.Marshal(cases)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "cases.json"), raw, 0o644); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	run := exec.CommandContext(ctx, "node", script, serveNano(t).url, "cases.json")
	run.Dir = dir
	out, err := run.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if n := strings.Count(string(out), "\n"); n != checks {
		t.Errorf("%d checks:\n%s", n, out)
	}
}
