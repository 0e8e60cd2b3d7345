package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
)

// streamResponse runs a streamed response and checks what the SDK sees of it: the numbers of the events, and that the deltas are the items
// of the object at the end, which it returns.
func streamResponse(t *testing.T, client openai.Client, p responses.ResponseNewParams, opts ...option.RequestOption) responses.Response {
	t.Helper()
	stream := client.Responses.NewStreaming(t.Context(), p, opts...)
	defer stream.Close()
	var last responses.Response
	texts := map[int64]string{}
	for n := int64(0); stream.Next(); n++ {
		e := stream.Current()
		if e.SequenceNumber != n {
			t.Errorf("event %d has number %d", n, e.SequenceNumber)
		}
		switch e.Type {
		case "response.reasoning_text.delta", "response.output_text.delta", "response.function_call_arguments.delta":
			texts[e.OutputIndex] += e.Delta
		case "response.completed", "response.incomplete", "response.failed":
			last = e.Response
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	if got := textsOf(last); len(got) != len(texts) && !(len(got) == 1 && got[0] == "") {
		t.Errorf("%d texts in %s", len(texts), last.RawJSON())
	}
	for i, text := range textsOf(last) {
		if texts[int64(i)] != text {
			t.Errorf("item %d was told as %q: %s", i, texts[int64(i)], last.RawJSON())
		}
	}
	return last
}

// textsOf are the texts of a response's items: reasoning, message, arguments of calls.
func textsOf(r responses.Response) (texts []string) {
	for _, item := range r.Output {
		switch item.Type {
		case "reasoning":
			texts = append(texts, item.AsReasoning().Content[0].Text)
		case "message":
			texts = append(texts, item.AsMessage().Content[0].Text)
		case "function_call":
			texts = append(texts, item.AsFunctionCall().Arguments)
		}
	}
	return texts
}

// The SDK gets the reference's continuation, streamed and as a whole, and counts its prompt.
func TestResponsesGolden(t *testing.T) {
	client := openaiClient(t, serve(t, micro, "--max-context", "512", "--model-id", "tiny"), "none")
	for name, c := range micro.conversations(t) {
		want, tokens, finish := c.visible()
		var messages []struct{ Role, Content string }
		if err := json.Unmarshal(c.Messages, &messages); err != nil {
			t.Fatal(err)
		}
		p := responses.ResponseNewParams{Model: "tiny", Temperature: openai.Float(0), MaxOutputTokens: openai.Int(int64(len(c.Greedy)))}
		var items responses.ResponseInputParam
		for _, m := range messages {
			items = append(items, responses.ResponseInputItemParamOfMessage(m.Content, responses.EasyInputMessageRole(m.Role)))
		}
		p.Input.OfInputItemList = items
		thinking := option.WithJSONSet("chat_template_kwargs", map[string]any{"enable_thinking": c.Thinking})
		whole, err := client.Responses.New(t.Context(), p, thinking)
		if err != nil {
			t.Fatal(err)
		}
		kind, status := "message", responses.ResponseStatusCompleted
		if c.Thinking {
			kind = "reasoning"
		}
		if finish == "length" {
			status = responses.ResponseStatusIncomplete
		}
		for _, r := range []responses.Response{*whole, streamResponse(t, client, p, thinking)} {
			if got := textsOf(r); len(got) != 1 || got[0] != want || r.Output[0].Type != kind || r.Status != status {
				t.Errorf("%s: %s, want %q as %s, %s", name, r.RawJSON(), want, kind, status)
			}
			if u := r.Usage; int(u.InputTokens) != len(c.Tokens) || int(u.OutputTokens) != tokens || u.TotalTokens != u.InputTokens+u.OutputTokens {
				t.Errorf("%s: usage %s, want %d and %d", name, u.RawJSON(), len(c.Tokens), tokens)
			}
			if !c.Thinking && r.OutputText() != want {
				t.Errorf("%s: %q", name, r.OutputText())
			}
		}
		count, err := client.Responses.InputTokens.Count(t.Context(), responses.InputTokenCountParams{
			Model: openai.String("tiny"), Input: responses.InputTokenCountParamsInputUnion{OfResponseInputItemArray: items},
		}, thinking)
		if err != nil || int(count.InputTokens) != len(c.Tokens) {
			t.Errorf("%s: counted %v, %v, want %d", name, count, err, len(c.Tokens))
		}
	}
}

// Tools with reasoning: calls, results by previous_response_id and by a history of the client's own, and what is kept.
func TestResponsesTools(t *testing.T) {
	client := openaiClient(t, act(t), "none")
	say := "Two look-ups.</think>\n\nChecking both.\n\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=x>\n2.50\n</parameter>\n<parameter=zip>\n03106\n</parameter>\n</function>\n</tool_call>"
	tool := responses.ToolParamOfFunction("f", map[string]any{
		"type": "object", "properties": map[string]any{"x": map[string]any{"type": "number"}, "zip": map[string]any{"type": "string"}},
	}, false)
	p := responses.ResponseNewParams{
		Model: "actor", Input: responses.ResponseNewParamsInputUnion{OfString: openai.String(say)}, Tools: []responses.ToolUnionParam{tool},
		Instructions: openai.String("Be exact."), Metadata: map[string]string{"k": "v"},
	}
	whole, err := client.Responses.New(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	streamed := streamResponse(t, client, p)
	for _, r := range []responses.Response{*whole, streamed} {
		if got, want := textsOf(r), []string{"Two look-ups.", "Checking both.", `{"x":1}`, `{"x":2.50,"zip":"03106"}`}; !slices.Equal(got, want) || r.Status != "completed" || r.Metadata["k"] != "v" || r.Instructions.OfString != "Be exact." {
			t.Errorf("%s", r.RawJSON())
		}
	}
	if a, b := whole.Usage.RawJSON(), streamed.Usage.RawJSON(); a != b {
		t.Errorf("usage %s and %s", a, b)
	}

	// Results for the kept response.
	var outputs responses.ResponseInputParam
	for i, item := range slices.Backward(whole.Output[2:]) {
		output := responses.ResponseInputItemParamOfFunctionCallOutput([]string{"one", "two"}[i])
		output.OfFunctionCallOutput.CallID = openai.String(item.CallID)
		outputs = append(outputs, output)
	}
	next := responses.ResponseNewParams{Model: "actor", PreviousResponseID: openai.String(whole.ID), Input: responses.ResponseNewParamsInputUnion{OfInputItemList: outputs}, Tools: p.Tools}
	answer, err := client.Responses.New(t.Context(), next)
	if err != nil {
		t.Fatal(err)
	}
	if answer.OutputText() != "Got one and two" || answer.PreviousResponseID != whole.ID {
		t.Errorf("%s", answer.RawJSON())
	}
	count, err := client.Responses.InputTokens.Count(t.Context(), responses.InputTokenCountParams{
		PreviousResponseID: next.PreviousResponseID, Input: responses.InputTokenCountParamsInputUnion{OfResponseInputItemArray: outputs}, Tools: next.Tools,
	})
	if err != nil || count.InputTokens != answer.Usage.InputTokens {
		t.Errorf("counted %v, %v, used %d", count, err, answer.Usage.InputTokens)
	}

	// The same from a history that the client keeps: the output's items go back as they came.
	history := []any{map[string]any{"role": "user", "content": say}}
	for _, item := range whole.Output {
		history = append(history, json.RawMessage(item.RawJSON()))
	}
	for _, o := range outputs {
		history = append(history, o)
	}
	own, err := client.Responses.New(t.Context(), responses.ResponseNewParams{Model: "actor", Tools: p.Tools, Store: openai.Bool(false)}, option.WithJSONSet("input", history))
	if err != nil {
		t.Fatal(err)
	}
	if own.OutputText() != "Got one and two" || own.Usage.InputTokens != answer.Usage.InputTokens {
		t.Errorf("%s, want a prompt of %d", own.RawJSON(), answer.Usage.InputTokens)
	}

	// What is kept.
	kept, err := client.Responses.Get(t.Context(), answer.ID, responses.ResponseGetParams{})
	if err != nil || kept.RawJSON() != answer.RawJSON() {
		t.Errorf("%v, %s", err, kept.RawJSON())
	}
	pages := client.Responses.InputItems.ListAutoPaging(t.Context(), answer.ID, responses.InputItemListParams{Limit: openai.Int(2), Order: "asc"})
	var kinds []string
	for pages.Next() {
		kinds = append(kinds, pages.Current().Type)
	}
	if want := []string{"message", "reasoning", "message", "function_call", "function_call", "function_call_output", "function_call_output"}; pages.Err() != nil || !slices.Equal(kinds, want) {
		t.Errorf("%v, %q", pages.Err(), kinds)
	}
	if err := client.Responses.Delete(t.Context(), answer.ID); err != nil {
		t.Error(err)
	}
	var refused *openai.Error
	for _, id := range []string{answer.ID, own.ID} {
		if _, err := client.Responses.Get(t.Context(), id, responses.ResponseGetParams{}); !errors.As(err, &refused) || refused.StatusCode != 404 || refused.Code != "response_not_found" {
			t.Errorf("%v", err)
		}
	}
}

// What the SDK makes of refusals, and what becomes of a response whose client leaves.
func TestResponsesErrors(t *testing.T) {
	s := act(t)
	client := openaiClient(t, s, "none")
	p := responses.ResponseNewParams{Model: "actor", Input: responses.ResponseNewParamsInputUnion{OfString: openai.String("COUNT 400000")}, MaxOutputTokens: openai.Int(5)}
	for _, c := range []struct {
		option      option.RequestOption
		status      int
		code, param string
	}{
		{option.WithJSONSet("model", "gpt"), 404, "model_not_found", "model"},
		{option.WithJSONSet("background", true), 400, "background_not_supported", "background"},
		{option.WithJSONSet("temperature", 9), 400, "invalid_value", "temperature"},
		{option.WithJSONSet("reasoning", map[string]any{"effort": "high"}), 400, "reasoning_effort_not_supported", "reasoning.effort"},
		{option.WithJSONSet("tools", []any{map[string]any{"type": "web_search"}}), 400, "tool_type_not_supported", "tools[0].type"},
		{option.WithJSONSet("surprise", 1), 400, "unknown_parameter", "surprise"},
		{option.WithJSONSet("previous_response_id", "resp_x"), 404, "response_not_found", "previous_response_id"},
	} {
		var refused *openai.Error
		if _, err := client.Responses.New(t.Context(), p, c.option); !errors.As(err, &refused) || refused.StatusCode != c.status || refused.Code != c.code || refused.Param != c.param {
			t.Errorf("%s: %v", c.code, err)
		}
		stream := client.Responses.NewStreaming(t.Context(), p, c.option)
		if stream.Next() || !errors.As(stream.Err(), &refused) || refused.StatusCode != c.status || refused.Code != c.code {
			t.Errorf("%s, streamed: %v", c.code, stream.Err())
		}
		stream.Close()
	}
	var refused *openai.Error
	if _, err := client.Responses.Cancel(t.Context(), "resp_x"); !errors.As(err, &refused) || refused.StatusCode != 400 || refused.Code != "background_not_supported" {
		t.Errorf("%v", err)
	}
	if cut, err := client.Responses.New(t.Context(), p); err != nil || cut.Status != "incomplete" || cut.IncompleteDetails.Reason != "max_output_tokens" || cut.Usage.OutputTokens != 5 {
		t.Errorf("%v, %s", err, cut.RawJSON())
	}

	p.MaxOutputTokens = openai.Int(400000)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream := client.Responses.NewStreaming(ctx, p)
	defer stream.Close()
	id := ""
	for n := 0; n < 50 && stream.Next(); n++ {
		if e := stream.Current(); e.Type == "response.created" {
			id = e.Response.ID
		}
	}
	cancel()
	for i := 0; ; i++ {
		kept, err := client.Responses.Get(t.Context(), id, responses.ResponseGetParams{})
		if err == nil {
			if kept.Status != responses.ResponseStatusCancelled || kept.Usage.OutputTokens == 0 || kept.Usage.OutputTokens >= 400000 {
				t.Errorf("%s, %s", kept.Status, kept.Usage.RawJSON())
			}
			break
		}
		if i > 400 {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// The npm package.
func TestResponsesNode(t *testing.T) {
	out := node(t, "responses.mjs", act(t).url)
	if n := strings.Count(out, "\n"); n != 8 {
		t.Errorf("%d checks:\n%s", n, out)
	}
}

// node runs a script of the folder node with its packages.
func node(t *testing.T, script string, args ...string) string {
	t.Helper()
	dir := npm(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	run := exec.CommandContext(ctx, "node", append([]string{script}, args...)...)
	run.Dir = dir
	out, err := run.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}
