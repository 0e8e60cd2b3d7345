package conformance

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/shared"
)

// buildActor builds tools/actor, the server with an actor in the model's place.
var buildActor = sync.OnceValues(func() (string, error) {
	path := filepath.Join(filepath.Dir(program), "actor")
	build := exec.Command("go", "build", "-o", path, "./tools/actor")
	build.Dir, build.Env, build.Stderr = root, append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off"), os.Stderr
	return path, build.Run()
})

// act serves an actor.
func act(t testing.TB, flags ...string) *site {
	t.Helper()
	path, err := buildActor()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	s := &site{cmd: exec.CommandContext(ctx, path, append(flags, filepath.Join(micro.path, "checkpoint"))...)}
	s.cmd.Stderr = os.Stderr
	stdout, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.cmd.Process.Signal(os.Interrupt)
		if err := s.cmd.Wait(); err != nil {
			t.Errorf("the actor ended with %v", err)
		}
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	s.url = strings.TrimSpace(line)
	return s
}

// Tools with the Go SDK: calls as a whole and streamed, their results, and the answer to them.
func TestOpenAITools(t *testing.T) {
	client := openaiClient(t, act(t), "none")
	say := "Two look-ups.</think>\n\nChecking both.\n\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=x>\n2.50\n</parameter>\n<parameter=zip>\n03106\n</parameter>\n</function>\n</tool_call>"
	p := openai.ChatCompletionNewParams{
		Model: "actor", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(say)},
		Tools: []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{Name: "f", Parameters: shared.FunctionParameters{
			"type": "object", "properties": map[string]any{"x": map[string]any{"type": "number"}, "zip": map[string]any{"type": "string"}},
		}})},
	}
	want := []string{`f {"x":1}`, `f {"x":2.50,"zip":"03106"}`}
	stream := client.Chat.Completions.NewStreaming(t.Context(), p)
	var all openai.ChatCompletionAccumulator
	var reasoning string
	for stream.Next() {
		k := stream.Current()
		if !all.AddChunk(k) {
			t.Errorf("the accumulator refuses %s", k.RawJSON())
		}
		for _, choice := range k.Choices {
			reasoning += rawText(choice.Delta.JSON.ExtraFields["reasoning_content"].Raw())
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	whole, err := client.Chat.Completions.New(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	for name, got := range map[string]openai.ChatCompletion{"streamed": all.ChatCompletion, "whole": *whole} {
		m := got.Choices[0].Message
		var calls []string
		ids := map[string]bool{}
		for _, c := range m.ToolCalls {
			calls = append(calls, c.Function.Name+" "+c.Function.Arguments)
			ids[c.ID] = true
		}
		if m.Content != "Checking both." || got.Choices[0].FinishReason != "tool_calls" || !reflect.DeepEqual(calls, want) || len(ids) != 2 {
			t.Errorf("%s: %q, %s, %q", name, m.Content, got.Choices[0].FinishReason, calls)
		}
	}
	if other := rawText(whole.Choices[0].Message.JSON.ExtraFields["reasoning_content"].Raw()); reasoning != "Two look-ups." || other != reasoning {
		t.Errorf("reasoning %q and %q", reasoning, other)
	}
	p.Messages = append(p.Messages, whole.Choices[0].Message.ToParam())
	for i, c := range whole.Choices[0].Message.ToolCalls {
		p.Messages = append(p.Messages, openai.ToolMessage([]string{"one", "two"}[i], c.ID))
	}
	answer, err := client.Chat.Completions.New(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if got := answer.Choices[0].Message; got.Content != "Got one and two" || len(got.ToolCalls) != 0 || answer.Choices[0].FinishReason != "stop" {
		t.Errorf("%s", got.RawJSON())
	}
}

// installNode makes a folder with the packages of node/package.json and the scripts, once.
var installNode = sync.OnceValues(func() (string, error) {
	dir := filepath.Join(filepath.Dir(program), "node")
	if err := os.CopyFS(dir, os.DirFS("node")); err != nil {
		return "", err
	}
	install := exec.Command("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
	install.Dir = dir
	if out, err := install.CombinedOutput(); err != nil {
		return "", fmt.Errorf("npm ci: %w\n%s", err, out)
	}
	return dir, nil
})

// npm returns that folder; it skips the test where there is no Node. What a test puts there no other one may read.
func npm(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"node", "npm"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Skip(err)
		}
	}
	dir, err := installNode()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// The npm package, which has ideas of its own about streams and tools.
func TestOpenAINode(t *testing.T) {
	dir := npm(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	run := exec.CommandContext(ctx, "node", "openai.mjs", act(t).url, serve(t, micro, "--max-context", "256", "--api-key", "right", "--model-id", "tiny").url, "right")
	run.Dir = dir
	out, err := run.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if n := strings.Count(string(out), "\n"); n != 11 {
		t.Errorf("%d checks:\n%s", n, out)
	}
}
