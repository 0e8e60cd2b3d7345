package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/anthropics/anthropic-sdk-go/v2"
	anthropicoption "github.com/anthropics/anthropic-sdk-go/v2/option"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
)

// response are the question's parameters, with the SDK's own types.
func (q question) response() (responses.ResponseNewParams, option.RequestOption) {
	p := responses.ResponseNewParams{Model: "nano", Temperature: openai.Float(0), MaxOutputTokens: openai.Int(200)}
	for _, m := range q.Messages {
		p.Input.OfInputItemList = append(p.Input.OfInputItemList, responses.ResponseInputItemParamOfMessage(m.Content, responses.EasyInputMessageRole(m.Role)))
	}
	for _, tool := range q.Tools {
		t := responses.ToolParamOfFunction(tool.Function.Name, tool.Function.Parameters, false)
		t.OfFunction.Description = openai.String(tool.Function.Description)
		p.Tools = append(p.Tools, t)
	}
	return p, option.WithJSONSet("chat_template_kwargs", map[string]any{"enable_thinking": q.Thinking})
}

// A model that means something, through Responses: text and reasoning, calls and the answer to their results, streamed and whole; a refusal,
// and a client that leaves.
func TestNanoResponses(t *testing.T) {
	var plain []question
	for _, thinking := range []bool{false, true} {
		plain = append(plain, questions(t, "copy", thinking, 2)...)
	}
	tools := append(questions(t, "tool", false, 2), questions(t, "tool", true, 1)...)
	s := serveNano(t)
	client := openaiClient(t, s, "none")
	ask := func(q question) responses.Response {
		t.Helper()
		p, o := q.response()
		whole, err := client.Responses.New(t.Context(), p, o)
		if err != nil {
			t.Fatal(err)
		}
		streamed := streamResponse(t, client, p, o)
		if !slices.Equal(textsOf(streamed), textsOf(*whole)) || streamed.Status != whole.Status || streamed.Usage.RawJSON() != whole.Usage.RawJSON() {
			t.Errorf("%s: streamed %s, whole %s", q.ID, streamed.RawJSON(), whole.RawJSON())
		}
		count, err := client.Responses.InputTokens.Count(t.Context(), responses.InputTokenCountParams{
			Input: responses.InputTokenCountParamsInputUnion{OfResponseInputItemArray: p.Input.OfInputItemList}, Tools: p.Tools,
		}, o)
		if err != nil || count.InputTokens != whole.Usage.InputTokens {
			t.Errorf("%s: counted %+v, %v; usage %s", q.ID, count, err, whole.Usage.RawJSON())
		}
		if (whole.Usage.OutputTokensDetails.ReasoningTokens > 0) != q.Thinking {
			t.Errorf("%s: usage %s", q.ID, whole.Usage.RawJSON())
		}
		return *whole
	}
	for _, q := range plain {
		r := ask(q)
		if strings.TrimSpace(r.OutputText()) != q.Expect.Text || r.Status != "completed" || len(r.Output) != map[bool]int{false: 1, true: 2}[q.Thinking] {
			t.Errorf("%s: %q, %s; want %q", q.ID, textsOf(r), r.Status, q.Expect.Text)
		}
	}
	for _, q := range tools {
		r := ask(q)
		last := r.Output[len(r.Output)-1]
		var args any
		if err := json.Unmarshal([]byte(last.AsFunctionCall().Arguments), &args); err != nil || last.Name != q.Expect.Name || !reflect.DeepEqual(args, q.Expect.Arguments) {
			t.Errorf("%s: %s; want %s %v", q.ID, r.RawJSON(), q.Expect.Name, q.Expect.Arguments)
			continue
		}
		p, o := q.response()
		output := responses.ResponseInputItemParamOfFunctionCallOutput("The answer is 1742.")
		output.OfFunctionCallOutput.CallID = openai.String(last.CallID)
		p.PreviousResponseID, p.Input.OfInputItemList = openai.String(r.ID), responses.ResponseInputParam{output}
		if next := streamResponse(t, client, p, o); next.Status != "completed" || strings.TrimSpace(next.OutputText()) == "" {
			t.Errorf("%s: after the result %s", q.ID, next.RawJSON())
		}
	}
	p, o := plain[len(plain)-1].response()
	long := p
	long.Input = responses.ResponseNewParamsInputUnion{OfString: openai.String(strings.Repeat(longText(), 4))}
	var refused *openai.Error
	if _, err := client.Responses.New(t.Context(), long, o); !errors.As(err, &refused) || refused.StatusCode != 400 || refused.Code != "context_length_exceeded" {
		t.Errorf("too long: %v", err)
	}
	p.Temperature, p.MaxOutputTokens = openai.Float(2), openai.Int(1900)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream := client.Responses.NewStreaming(ctx, p, o)
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	cancel()
	stream.Close()
	settled(t, s)
}

// account is an answer, whatever its protocol.
type account struct {
	reasoning, text      string
	calls                string // names and arguments
	end                  string // stop, calls, length
	prompt, all, thought int64  // tokens
}

// tools are the question's, with their members in one order, whatever the SDK's types would make of them: the prompt has them as they come.
// form has a name, a description and a schema to fill in.
func (q question) tools(t *testing.T, form string) []json.RawMessage {
	list := []json.RawMessage{}
	for _, tool := range q.Tools {
		var parts [3]any
		for i, v := range []any{tool.Function.Name, tool.Function.Description, tool.Function.Parameters} {
			b, err := json.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			parts[i] = b
		}
		list = append(list, json.RawMessage(fmt.Sprintf(form, parts[:]...)))
	}
	return list
}

// The same prompt, greedy, through three protocols and six ways: the same text, calls and counts.
func TestNanoProtocols(t *testing.T) {
	var all []question
	for _, thinking := range []bool{false, true} {
		all = append(all, questions(t, "copy", thinking, 2)...)
		all = append(all, questions(t, "tool", thinking, 2)...)
	}
	s := serveNano(t)
	client, other := openaiClient(t, s, "none"), anthropicClient(t, s, "none")
	for i, q := range all {
		for _, limit := range []int64{200, 7} {
			if limit == 7 && i%2 == 1 {
				continue
			}
			got6 := map[string]account{}
			for _, streamed := range []bool{false, true} {
				how := map[bool]string{false: ", whole", true: ", streamed"}[streamed]
				p, _ := q.params()
				p.SetExtraFields(map[string]any{"enable_thinking": q.Thinking})
				p.MaxCompletionTokens = openai.Int(limit)
				chat := ask(t, client, streamed, p, option.WithJSONSet("tools", q.tools(t, `{"type":"function","function":{"name":%s,"description":%s,"parameters":%s}}`)))
				a := account{
					reasoning: chat.reasoning, text: chat.content, end: strings.Replace(chat.finish, "tool_calls", "calls", 1), prompt: chat.usage.PromptTokens,
					all: chat.usage.CompletionTokens, thought: chat.usage.CompletionTokensDetails.ReasoningTokens,
				}
				for _, c := range chat.message.ToolCalls {
					a.calls += c.Function.Name + c.Function.Arguments
				}
				got6["chat"+how] = a

				rp, ro := q.response()
				rt := option.WithJSONSet("tools", q.tools(t, `{"type":"function","name":%s,"description":%s,"parameters":%s}`))
				rp.MaxOutputTokens = openai.Int(limit)
				var r responses.Response
				if streamed {
					r = streamResponse(t, client, rp, ro, rt)
				} else if whole, err := client.Responses.New(t.Context(), rp, ro, rt); err != nil {
					t.Fatal(err)
				} else {
					r = *whole
				}
				a = account{end: "stop", prompt: r.Usage.InputTokens, all: r.Usage.OutputTokens, thought: r.Usage.OutputTokensDetails.ReasoningTokens}
				for i, text := range textsOf(r) {
					switch item := r.Output[i]; item.Type {
					case "reasoning":
						a.reasoning = text
					case "message":
						a.text = text
					default:
						a.calls, a.end = a.calls+item.Name+text, "calls"
					}
				}
				if r.Status == "incomplete" {
					a.end = "length"
				}
				got6["responses"+how] = a

				mp := q.messages()
				mp.MaxTokens = limit
				m := got(t, other, streamed, mp, temperature(0), anthropicoption.WithJSONSet("tools", q.tools(t, `{"name":%s,"description":%s,"input_schema":%s}`)))
				a = account{
					end:    map[anthropic.StopReason]string{"end_turn": "stop", "tool_use": "calls", "max_tokens": "length"}[m.StopReason],
					prompt: m.Usage.InputTokens + m.Usage.CacheReadInputTokens, all: m.Usage.OutputTokens, thought: m.Usage.OutputTokensDetails.ThinkingTokens,
				}
				for _, b := range m.Content {
					a.reasoning, a.text = a.reasoning+b.Thinking, a.text+b.Text
					if b.Type == "tool_use" {
						a.calls += b.Name + string(b.Input)
					}
				}
				got6["messages"+how] = a
			}
			for how, a := range got6 {
				if want := got6["chat, whole"]; a != want {
					t.Errorf("%s, limit %d: %s %+v\nwant %+v", q.ID, limit, how, a, want)
				}
			}
		}
	}
}

// The npm package on nano.
func TestNanoResponsesNode(t *testing.T) {
	nanoNode(t, "responses-nano.mjs", 5)
}
