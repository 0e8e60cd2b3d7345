package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/param"
)

func openaiClient(t *testing.T, s *site, key string) openai.Client {
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return openai.NewClient(option.WithBaseURL(s.url+"/v1/"), option.WithAPIKey(key), option.WithMaxRetries(0), option.WithHTTPClient(&http.Client{Transport: transport}))
}

// params are those of a recorded conversation, with the SDK's own types for messages.
func params(t *testing.T, c conversation) (openai.ChatCompletionNewParams, option.RequestOption) {
	t.Helper()
	var messages []struct{ Role, Content string }
	if err := json.Unmarshal(c.Messages, &messages); err != nil {
		t.Fatal(err)
	}
	p := openai.ChatCompletionNewParams{Temperature: openai.Float(0), MaxCompletionTokens: openai.Int(int64(len(c.Greedy)))}
	for _, m := range messages {
		switch m.Role {
		case "system":
			p.Messages = append(p.Messages, openai.SystemMessage(m.Content))
		case "user":
			p.Messages = append(p.Messages, openai.UserMessage(m.Content))
		case "assistant":
			p.Messages = append(p.Messages, openai.AssistantMessage(m.Content))
		default:
			t.Fatalf("role %q", m.Role)
		}
	}
	return p, option.WithJSONSet("chat_template_kwargs", map[string]any{"enable_thinking": c.Thinking})
}

func rawText(raw string) (s string) {
	if raw != "" {
		json.Unmarshal([]byte(raw), &s)
	}
	return s
}

// The SDK streams the reference's continuation, and gets it as a whole.
func TestOpenAIGolden(t *testing.T) {
	for _, f := range []folder{micro, mini} {
		for _, flags := range [][]string{nil, {"--spec", "mtp", "--draft-tokens", "3"}} {
			name := f.name
			if flags != nil {
				name += " drafted"
			}
			t.Run(name, func(t *testing.T) {
				cases := f.conversations(t)
				client := openaiClient(t, serve(t, f, append(flags, "--max-context", "512")...), "none")
				for name, c := range cases {
					want, tokens, finish := c.visible()
					p, thinking := params(t, c)
					p.StreamOptions.IncludeUsage = param.NewOpt(true)
					stream := client.Chat.Completions.NewStreaming(t.Context(), p, thinking)
					var all openai.ChatCompletionAccumulator
					var reasoning string
					for stream.Next() {
						k := stream.Current()
						if !all.AddChunk(k) {
							t.Errorf("%s: the accumulator refuses %s", name, k.RawJSON())
						}
						for _, choice := range k.Choices {
							reasoning += rawText(choice.Delta.JSON.ExtraFields["reasoning_content"].Raw())
						}
					}
					if err := stream.Err(); err != nil {
						t.Fatal(err)
					}
					got := all.Choices[0].Message.Content
					if c.Thinking {
						got, reasoning = reasoning, got
					}
					if got != want || reasoning != "" || all.Choices[0].FinishReason != finish {
						t.Errorf("%s: streamed %q and %q, %s; want %q, %s", name, got, reasoning, all.Choices[0].FinishReason, want, finish)
					}
					if u := all.Usage; int(u.PromptTokens) != len(c.Tokens) || int(u.CompletionTokens) != tokens || u.TotalTokens != u.PromptTokens+u.CompletionTokens {
						t.Errorf("%s: usage %s, want %d and %d", name, u.RawJSON(), len(c.Tokens), tokens)
					}
					p.StreamOptions = openai.ChatCompletionStreamOptionsParam{}
					whole, err := client.Chat.Completions.New(t.Context(), p, thinking)
					if err != nil {
						t.Fatal(err)
					}
					m := whole.Choices[0].Message
					got, other := m.Content, rawText(m.JSON.ExtraFields["reasoning_content"].Raw())
					if c.Thinking {
						got, other = other, got
					}
					if got != want || other != "" || whole.Choices[0].FinishReason != finish || whole.Usage.CompletionTokens != all.Usage.CompletionTokens {
						t.Errorf("%s: whole %q and %q, %s; want %q, %s", name, got, other, whole.Choices[0].FinishReason, want, finish)
					}
					if id := whole.ID; len(id) != len("chatcmpl-")+16 || id == all.ID {
						t.Errorf("%s: ids %q, %q", name, id, all.ID)
					}
				}
			})
		}
	}
}

// What the SDK makes of models, keys and refusals.
func TestOpenAIErrors(t *testing.T) {
	s := serve(t, micro, "--max-context", "256", "--api-key", "right", "--model-id", "flash")
	client := openaiClient(t, s, "right")
	page, err := client.Models.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(page.Data) != 1 || page.Data[0].ID != "flash" || page.Data[0].OwnedBy != "ninfer" {
		t.Errorf("%s", page.RawJSON())
	}
	if m, err := client.Models.Get(t.Context(), "flash"); err != nil || m.ID != "flash" {
		t.Errorf("%v, %v", m, err)
	}
	hello := openai.ChatCompletionNewParams{Model: "flash", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Hi")}, MaxTokens: openai.Int(3)}
	if _, err := client.Chat.Completions.New(t.Context(), hello); err != nil {
		t.Error(err)
	}
	for _, c := range []struct {
		name        string
		client      openai.Client
		option      option.RequestOption
		status      int
		code, param string
	}{
		{"key", openaiClient(t, s, "wrong"), option.WithHeader("a", "b"), 401, "invalid_api_key", ""},
		{"model", client, option.WithJSONSet("model", "gpt"), 404, "model_not_found", "model"},
		{"n", client, option.WithJSONSet("n", 2), 400, "n_not_supported", "n"},
		{"format", client, option.WithJSONSet("response_format", map[string]any{"type": "json_object"}), 400, "constrained_decoding_not_supported", "response_format"},
		{"type", client, option.WithJSONSet("temperature", "hot"), 400, "invalid_type", "temperature"},
		{"length", client, option.WithJSONSet("messages", []any{map[string]any{"role": "user", "content": longText()}}), 400, "context_length_exceeded", "messages"},
	} {
		_, err := c.client.Chat.Completions.New(t.Context(), hello, c.option)
		var refused *openai.Error
		if !errors.As(err, &refused) || refused.StatusCode != c.status || refused.Code != c.code || refused.Param != c.param || refused.Message == "" {
			t.Errorf("%s: %v", c.name, err)
		}
		stream := c.client.Chat.Completions.NewStreaming(t.Context(), hello, c.option)
		if stream.Next() || !errors.As(stream.Err(), &refused) || refused.StatusCode != c.status || refused.Code != c.code {
			t.Errorf("%s, streamed: %v", c.name, stream.Err())
		}
		stream.Close()
	}
}

func longText() string {
	b := make([]byte, 3000)
	for i := range b {
		b[i] = "abc de!"[i%7]
	}
	return string(b)
}

// A hundred clients, again and again, that leave at random: the server stays right, and its memory flat.
func TestOpenAIHundredClients(t *testing.T) {
	s := serve(t, micro, "--max-context", "512", "--max-concurrency", "4", "--max-pending-requests", "60")
	c := micro.conversations(t)["chat_think"]
	want, _, _ := c.visible()
	p, thinking := params(t, c)
	var right, left, refused atomic.Int32
	// Half of those who leave do so before a reply could be there, however fast this machine is.
	alone := openaiClient(t, s, "none")
	begun := time.Now()
	whole := alone.Chat.Completions.NewStreaming(t.Context(), p, thinking)
	for whole.Next() {
	}
	if err := whole.Err(); err != nil {
		t.Fatal(err)
	}
	whole.Close()
	longest := 2 * time.Since(begun)
	storm := func(seed uint64) {
		client := openaiClient(t, s, "none")
		var clients sync.WaitGroup
		for i := range 100 {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			pause, stay, leaves := time.Duration(rng.IntN(1500))*time.Millisecond, time.Duration(rng.Int64N(int64(longest))), rng.IntN(3) > 0
			clients.Go(func() {
				time.Sleep(pause)
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				if leaves {
					time.AfterFunc(stay, cancel)
				}
				stream := client.Chat.Completions.NewStreaming(ctx, p, thinking)
				defer stream.Close()
				var got string
				for stream.Next() {
					for _, choice := range stream.Current().Choices {
						got += rawText(choice.Delta.JSON.ExtraFields["reasoning_content"].Raw())
					}
				}
				var e *openai.Error
				switch err := stream.Err(); {
				case err == nil && got == want:
					right.Add(1)
				case errors.As(err, &e) && e.StatusCode == http.StatusTooManyRequests:
					refused.Add(1)
				case leaves && ctx.Err() != nil:
					left.Add(1)
				default:
					t.Errorf("%q, %v", got, err)
				}
			})
		}
		clients.Wait()
	}
	storm(0)
	storm(1)
	before := s.memory(t)
	for seed := range uint64(4) {
		storm(seed + 2)
	}
	after := s.memory(t)
	t.Logf("%d right, %d left, %d refused; memory %d to %d KiB", right.Load(), left.Load(), refused.Load(), before, after)
	if before > 0 && after > before+16<<10 {
		t.Errorf("memory grew from %d to %d KiB", before, after)
	}
	if right.Load() < 50 || left.Load() < 50 {
		t.Errorf("%d right, %d left: the storm is not one", right.Load(), left.Load())
	}
}
