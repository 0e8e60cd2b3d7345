package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os/exec"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/anthropics/anthropic-sdk-go/v2"
	"github.com/anthropics/anthropic-sdk-go/v2/option"
)

func anthropicClient(t *testing.T, s *site, key string) anthropic.Client {
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return anthropic.NewClient(option.WithoutEnvironmentDefaults(), option.WithBaseURL(s.url), option.WithAPIKey(key), option.WithMaxRetries(0), option.WithHTTPClient(&http.Client{Transport: transport}))
}

var noThinking = anthropic.ThinkingConfigParamUnion{OfDisabled: &anthropic.ThinkingConfigDisabledParam{}}

// thinkingConfig is adaptive or disabled.
func thinkingConfig(on bool) anthropic.ThinkingConfigParamUnion {
	if on {
		return anthropic.ThinkingConfigParamUnion{OfAdaptive: &anthropic.ThinkingConfigAdaptiveParam{}}
	}
	return noThinking
}

// temperature is not among the SDK's fields any more.
func temperature(t float64) option.RequestOption { return option.WithJSONSet("temperature", t) }

// sent is a request with one text of the user's.
func sent(text string) anthropic.MessageNewParams {
	return anthropic.MessageNewParams{Model: "any", MaxTokens: 4096, Messages: []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock(text))}}
}

// got asks as a whole or in a stream, which the SDK puts together.
func got(t *testing.T, client anthropic.Client, streamed bool, p anthropic.MessageNewParams, o ...option.RequestOption) anthropic.Message {
	t.Helper()
	if !streamed {
		m, err := client.Messages.New(t.Context(), p, o...)
		if err != nil {
			t.Fatal(err)
		}
		return *m
	}
	stream := client.Messages.NewStreaming(t.Context(), p, o...)
	defer stream.Close()
	var m anthropic.Message
	for stream.Next() {
		if err := m.Accumulate(stream.Current()); err != nil {
			t.Fatal(err)
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	return m
}

// blocks are the contents of an answer, a line each.
func blocks(m anthropic.Message) []string {
	var out []string
	for _, b := range m.Content {
		switch b := b.AsAny().(type) {
		case anthropic.ThinkingBlock:
			if b.Signature == "" {
				out = append(out, "no signature")
			}
			out = append(out, "thinking "+b.Thinking)
		case anthropic.TextBlock:
			out = append(out, "text "+b.Text)
		case anthropic.ToolUseBlock:
			out = append(out, "use "+b.Name+" "+string(b.Input))
		default:
			out = append(out, "unknown "+b.(interface{ RawJSON() string }).RawJSON())
		}
	}
	return out
}

const twoLookUps = "Two look-ups.</think>\n\nChecking both.\n\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=x>\n2.50\n</parameter>\n<parameter=zip>\n03106\n</parameter>\n</function>\n</tool_call>"

func functionF() []anthropic.ToolUnionParam {
	return []anthropic.ToolUnionParam{{OfTool: &anthropic.ToolParam{
		Name: "f", Description: anthropic.String("Looks up"),
		InputSchema: anthropic.ToolInputSchemaParam{Properties: map[string]any{"x": map[string]any{"type": "number"}, "zip": map[string]any{"type": "string"}}},
	}}}
}

// Plain and streamed answers, thinking, stop sequences, limits, and tools there and back, with the Go SDK.
func TestAnthropicGo(t *testing.T) {
	client := anthropicClient(t, act(t), "none")
	for _, c := range []struct {
		name   string
		change func(*anthropic.MessageNewParams)
		say    string
		want   []string
		reason anthropic.StopReason
		stop   string
	}{
		{"plain", nil, "Because.</think>\n\nHello, wörld 🙂 \n", []string{"thinking Because.", "text Hello, wörld 🙂 \n"}, "end_turn", ""},
		{"no thinking", func(p *anthropic.MessageNewParams) { p.Thinking = noThinking }, "Hello", []string{"text Hello"}, "end_turn", ""},
		{"budget", func(p *anthropic.MessageNewParams) { p.Thinking = anthropic.ThinkingConfigParamOfEnabled(2000) }, "T</think>\n\nA", []string{"thinking T", "text A"}, "end_turn", ""},
		{"stop", func(p *anthropic.MessageNewParams) { p.Thinking, p.StopSequences = noThinking, []string{"END"} }, "Hello END more", []string{"text Hello "}, "stop_sequence", "END"},
		{"limit", func(p *anthropic.MessageNewParams) { p.Thinking, p.MaxTokens = noThinking, 3 }, "COUNT 9", []string{"text xxx"}, "max_tokens", ""},
		{"tools", func(p *anthropic.MessageNewParams) { p.Tools = functionF() }, twoLookUps, []string{"thinking Two look-ups.", "text Checking both.", `use f {"x":1}`, `use f {"x":2.50,"zip":"03106"}`}, "tool_use", ""},
		{"one tool", func(p *anthropic.MessageNewParams) {
			p.Tools = functionF()
			p.ToolChoice = anthropic.ToolChoiceUnionParam{OfAuto: &anthropic.ToolChoiceAutoParam{DisableParallelToolUse: anthropic.Bool(true)}}
		}, twoLookUps, []string{"thinking Two look-ups.", "text Checking both.", `use f {"x":1}`}, "tool_use", ""},
	} {
		p := sent(c.say)
		if c.change != nil {
			c.change(&p)
		}
		whole, streamed := got(t, client, false, p), got(t, client, true, p)
		count, err := client.Messages.CountTokens(t.Context(), anthropic.MessageCountTokensParams{Model: p.Model, Messages: p.Messages, Thinking: p.Thinking, ToolChoice: p.ToolChoice, Tools: counted(p.Tools)})
		if err != nil {
			t.Fatal(err)
		}
		for how, m := range map[string]anthropic.Message{"whole": whole, "streamed": streamed} {
			if !reflect.DeepEqual(blocks(m), c.want) || m.StopReason != c.reason || m.StopSequence != c.stop || m.Model != "any" || m.Role != "assistant" {
				t.Errorf("%s, %s: %q, %s %q", c.name, how, blocks(m), m.StopReason, m.StopSequence)
			}
			if u := m.Usage; u.InputTokens+u.CacheReadInputTokens != count.InputTokens || u.OutputTokens == 0 || u.OutputTokens != whole.Usage.OutputTokens || (u.OutputTokensDetails.ThinkingTokens > 0) != strings.Contains(c.want[0], "thinking") {
				t.Errorf("%s, %s: usage %s, counted %d", c.name, how, u.RawJSON(), count.InputTokens)
			}
		}
		if c.name != "tools" {
			continue
		}
		p.Messages = append(p.Messages, streamed.ToParam())
		var results []anthropic.ContentBlockParamUnion
		for i, b := range streamed.Content[2:] {
			results = append(results, anthropic.NewToolResultBlock(b.ID, []string{"one", "two"}[i], false))
		}
		p.Messages = append(p.Messages, anthropic.NewUserMessage(results[1], results[0]))
		if m := got(t, client, true, p); !reflect.DeepEqual(blocks(m), []string{"text Got one and two"}) || m.StopReason != "end_turn" {
			t.Errorf("after the results: %q, %s", blocks(m), m.StopReason)
		}
	}
}

// counted are declarations in the types of the count.
func counted(tools []anthropic.ToolUnionParam) []anthropic.MessageCountTokensToolUnionParam {
	var out []anthropic.MessageCountTokensToolUnionParam
	for _, t := range tools {
		out = append(out, anthropic.MessageCountTokensToolUnionParam{OfTool: t.OfTool})
	}
	return out
}

// The reference's continuations through the program.
func TestAnthropicGolden(t *testing.T) {
	for _, f := range []folder{micro, mini} {
		t.Run(f.name, func(t *testing.T) {
			cases := f.conversations(t)
			client := anthropicClient(t, serve(t, f, "--max-context", "512"), "none")
			for name, c := range cases {
				want, tokens, finish := c.visible()
				var messages []struct{ Role, Content string }
				if err := json.Unmarshal(c.Messages, &messages); err != nil {
					t.Fatal(err)
				}
				p := anthropic.MessageNewParams{Model: "any", MaxTokens: int64(len(c.Greedy)), Thinking: thinkingConfig(c.Thinking)}
				for _, m := range messages {
					switch m.Role {
					case "system":
						p.System = append(p.System, anthropic.TextBlockParam{Text: m.Content})
					case "user":
						p.Messages = append(p.Messages, anthropic.NewUserMessage(anthropic.NewTextBlock(m.Content)))
					default:
						p.Messages = append(p.Messages, anthropic.NewAssistantMessage(anthropic.NewTextBlock(m.Content)))
					}
				}
				kind := map[bool]string{true: "thinking ", false: "text "}[c.Thinking]
				reason := map[string]anthropic.StopReason{"stop": "end_turn", "length": "max_tokens"}[finish]
				for _, streamed := range []bool{false, true} {
					m := got(t, client, streamed, p, temperature(0))
					if !reflect.DeepEqual(blocks(m), []string{kind + want}) || m.StopReason != reason {
						t.Errorf("%s: %q, %s; want %q, %s", name, blocks(m), m.StopReason, kind+want, reason)
					}
					if u := m.Usage; int(u.InputTokens) != len(c.Tokens) || int(u.OutputTokens) != tokens {
						t.Errorf("%s: usage %s, want %d and %d", name, u.RawJSON(), len(c.Tokens), tokens)
					}
				}
			}
		})
	}
}

// What the SDK makes of keys and refusals.
func TestAnthropicErrors(t *testing.T) {
	s := serve(t, micro, "--max-context", "256", "--api-key", "right")
	hello := sent("Hi")
	hello.MaxTokens = 3
	for _, c := range []struct {
		name    string
		key     string
		option  option.RequestOption
		status  int
		kind    anthropic.ErrorType
		message string // in it
	}{
		{"key", "wrong", option.WithHeader("a", "b"), 401, "authentication_error", "x-api-key"},
		{"temperature", "right", option.WithJSONSet("temperature", 1.5), 400, "invalid_request_error", "temperature"},
		{"type", "right", option.WithJSONSet("max_tokens", "many"), 400, "invalid_request_error", "max_tokens"},
		{"document", "right", option.WithJSONSet("messages.0.content.0.type", "document"), 400, "invalid_request_error", "documents_not_supported"},
		{"choice", "right", option.WithJSONSet("tool_choice", map[string]any{"type": "any"}), 400, "invalid_request_error", "tool_choice"},
		{"length", "right", option.WithJSONSet("messages.0.content.0.text", longText()), 400, "invalid_request_error", "prompt is too long: "},
	} {
		client := anthropicClient(t, s, c.key)
		_, err := client.Messages.New(t.Context(), hello, c.option)
		for range 2 {
			var refused *anthropic.Error
			if !errors.As(err, &refused) || refused.StatusCode != c.status || refused.Type() != c.kind || !strings.Contains(refused.Message, c.message) || !strings.HasPrefix(refused.RequestID, "req_") {
				t.Errorf("%s: %v", c.name, err)
			}
			stream := client.Messages.NewStreaming(t.Context(), hello, c.option)
			if stream.Next() {
				t.Errorf("%s: an event before the error", c.name)
			}
			err = stream.Err()
			stream.Close()
		}
	}
	if m := got(t, anthropicClient(t, s, "right"), false, hello); m.StopReason != "max_tokens" || m.Usage.OutputTokens != 3 {
		t.Errorf("%s", m.RawJSON())
	}
}

// A stream that is closed and a call whose context ends are over on the server too.
func TestAnthropicCancel(t *testing.T) {
	s := act(t)
	client := anthropicClient(t, s, "none")
	p := sent("COUNT 400000")
	p.MaxTokens = 400000
	stream := client.Messages.NewStreaming(t.Context(), p)
	for range 20 {
		if !stream.Next() {
			t.Fatal(stream.Err())
		}
	}
	stream.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := client.Messages.New(ctx, p, option.WithRequestTimeout(time.Hour)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	settled(t, s)
	if m := got(t, client, false, sent("</think>again")); !reflect.DeepEqual(blocks(m), []string{"text again"}) {
		t.Errorf("after that: %q", blocks(m))
	}
}

// settled waits until a server has nothing to do.
func settled(t *testing.T, s *site) {
	t.Helper()
	defer http.DefaultClient.CloseIdleConnections()
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		res, err := http.Get(s.url + "/ready")
		if err != nil {
			t.Fatal(err)
		}
		ready := struct {
			Running int `json:"running"`
		}{-1}
		err = json.NewDecoder(res.Body).Decode(&ready)
		res.Body.Close()
		switch {
		case err == nil && ready.Running == 0:
			return
		case time.Since(begin) > 10*time.Second:
			t.Fatalf("%d still run, %v", ready.Running, err)
		}
	}
}

// The npm package, with its helpers for streams and tools.
func TestAnthropicNode(t *testing.T) {
	dir := npm(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	run := exec.CommandContext(ctx, "node", "anthropic.mjs", act(t).url, serve(t, micro, "--max-context", "256", "--api-key", "right").url, "right")
	run.Dir = dir
	out, err := run.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if n := strings.Count(string(out), "\n"); n != 8 {
		t.Errorf("%d checks:\n%s", n, out)
	}
}

// messages are the question's, with the SDK's own types.
func (q question) messages() anthropic.MessageNewParams {
	p := anthropic.MessageNewParams{Model: "nano", MaxTokens: 200, Thinking: thinkingConfig(q.Thinking)}
	for _, m := range q.Messages {
		if m.Role == "system" {
			p.System = append(p.System, anthropic.TextBlockParam{Text: m.Content})
		} else {
			p.Messages = append(p.Messages, anthropic.NewUserMessage(anthropic.NewTextBlock(m.Content)))
		}
	}
	for _, tool := range q.Tools {
		schema := anthropic.ToolInputSchemaParam{Properties: tool.Function.Parameters["properties"], ExtraFields: map[string]any{}}
		for name, v := range tool.Function.Parameters {
			if name != "type" && name != "properties" {
				schema.ExtraFields[name] = v
			}
		}
		p.Tools = append(p.Tools, anthropic.ToolUnionParam{OfTool: &anthropic.ToolParam{Name: tool.Function.Name, Description: anthropic.String(tool.Function.Description), InputSchema: schema}})
	}
	return p
}

// A model that means something: text, thinking, a tool there and back, a limit, a count, an error, a client that leaves.
func TestNanoMessages(t *testing.T) {
	var plain []question
	for _, thinking := range []bool{false, true} {
		plain = append(plain, questions(t, "copy", thinking, 2)...)
	}
	tools := append(questions(t, "tool", false, 2), questions(t, "tool", true, 1)...)
	s := serveNano(t)
	client := anthropicClient(t, s, "none")
	ask := func(q question, p anthropic.MessageNewParams) anthropic.Message {
		t.Helper()
		whole, streamed := got(t, client, false, p, temperature(0)), got(t, client, true, p, temperature(0))
		kinds := blocks(whole)
		if !reflect.DeepEqual(blocks(streamed), kinds) || streamed.StopReason != whole.StopReason || streamed.Usage.OutputTokens != whole.Usage.OutputTokens {
			t.Errorf("%s: streamed %q, whole %q", q.ID, blocks(streamed), kinds)
		}
		count, err := client.Messages.CountTokens(t.Context(), anthropic.MessageCountTokensParams{Model: p.Model, System: anthropic.MessageCountTokensParamsSystemUnion{OfTextBlockArray: p.System}, Messages: p.Messages, Thinking: p.Thinking, Tools: counted(p.Tools)})
		if err != nil || count.InputTokens != whole.Usage.InputTokens+whole.Usage.CacheReadInputTokens {
			t.Errorf("%s: counted %+v, %v; usage %s", q.ID, count, err, whole.Usage.RawJSON())
		}
		if (whole.Usage.OutputTokensDetails.ThinkingTokens > 0) != q.Thinking {
			t.Errorf("%s: usage %s", q.ID, whole.Usage.RawJSON())
		}
		return whole
	}
	for _, q := range plain {
		m := ask(q, q.messages())
		last := m.Content[len(m.Content)-1]
		if strings.TrimSpace(last.Text) != q.Expect.Text || m.StopReason != "end_turn" || len(m.Content) != map[bool]int{false: 1, true: 2}[q.Thinking] {
			t.Errorf("%s: %q, %s; want %q", q.ID, blocks(m), m.StopReason, q.Expect.Text)
		}
	}
	for _, q := range tools {
		p := q.messages()
		m := ask(q, p)
		use := m.Content[len(m.Content)-1]
		var args any
		if err := json.Unmarshal(use.Input, &args); err != nil || m.StopReason != "tool_use" || use.Name != q.Expect.Name || !reflect.DeepEqual(args, q.Expect.Arguments) {
			t.Errorf("%s: %q, %s; want %s %v", q.ID, blocks(m), m.StopReason, q.Expect.Name, q.Expect.Arguments)
			continue
		}
		p.Messages = append(p.Messages, m.ToParam(), anthropic.NewUserMessage(anthropic.NewToolResultBlock(use.ID, "The answer is 1742.", false)))
		if m := got(t, client, true, p, temperature(0)); m.StopReason != "end_turn" || len(m.Content) == 0 || strings.TrimSpace(m.Content[len(m.Content)-1].Text) == "" {
			t.Errorf("%s: after the result %q, %s", q.ID, blocks(m), m.StopReason)
		}
	}
	p := plain[0].messages()
	p.MaxTokens = 1
	if m := got(t, client, false, p); m.StopReason != "max_tokens" || m.Usage.OutputTokens != 1 {
		t.Errorf("limit: %s", m.RawJSON())
	}
	long := sent(strings.Repeat(longText(), 4))
	var refused *anthropic.Error
	if _, err := client.Messages.New(t.Context(), long); !errors.As(err, &refused) || refused.StatusCode != 400 || !strings.HasPrefix(refused.Message, "prompt is too long: ") {
		t.Errorf("too long: %v", err)
	}
	endless := plain[len(plain)-1].messages()
	endless.MaxTokens = 1900
	stream := client.Messages.NewStreaming(t.Context(), endless, temperature(1))
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	stream.Close()
	settled(t, s)
}

// The npm package on nano.
func TestNanoAnthropicNode(t *testing.T) {
	nanoNode(t, "anthropic-nano.mjs", 6)
}
