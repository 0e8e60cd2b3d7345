package server_test

import (
	"bufio"
	"context"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"ninfer/internal/backend/cpu"
	"ninfer/internal/engine"
	"ninfer/internal/front"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
	"ninfer/internal/server"
)

// steady replaces what differs between two runs.
func steady(body string) string {
	for pattern, with := range map[string]string{
		`"id":"chatcmpl-[0-9a-f]{16}"`: `"id":"ID"`, `"created":\d+`: `"created":0`, `_(ms|second)":[0-9.e+-]+`: `_$1":0`,
	} {
		body = regexp.MustCompile(pattern).ReplaceAllString(body, with)
	}
	return body
}

const (
	prefix   = `data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"m","choices":[`
	zeroTime = `"prompt_ms":0,"prompt_per_token_ms":0,"prompt_per_second":0,`
)

func frame(delta, finish, rest string) string {
	return prefix + `{"index":0,"delta":` + delta + `,"logprobs":null,"finish_reason":` + finish + `}]` + rest + "}\n\n"
}

func timings(prompt, output int) string {
	return fmt.Sprintf(`"timings":{"cache_n":0,"prompt_n":%d,`+zeroTime+`"predicted_n":%d,"predicted_ms":0,"predicted_per_token_ms":0,"predicted_per_second":0}`, prompt, output)
}

func usageOf(prompt, output, reasoning int) string {
	return fmt.Sprintf(`"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":%d}}`,
		prompt, output, prompt+output, reasoning)
}

// Every event of a stream, to the letter, in OpenAI's order (docs/serving.md, Streams), and the answer as a whole.
func TestChatShapes(t *testing.T) {
	tok := tokenizer()
	think, answer := tok.Encode("ab"), tok.Encode("cd")
	shut, _ := tok.ID("</think>")
	end, _ := tok.ID("<|im_end|>")
	gen := &script{}
	s := start(t, setup{gen: gen})
	role := frame(`{"role":"assistant","content":""}`, "null", "")
	ids := func(parts ...[]int32) (out []int32) {
		for _, p := range parts {
			out = append(out, p...)
		}
		return out
	}
	pieces := func(kind string, of []int32, rest string) (out string) {
		for _, id := range of {
			out += frame(fmt.Sprintf(`{%q:%q}`, kind, tok.Decode([]int32{id})), "null", rest)
		}
		return out
	}
	const n = 30 // of the prompt, by golden.json
	whole := ids(think, []int32{shut}, tok.Encode("\n\n"), answer, []int32{end})
	count := len(whole)
	for _, c := range []struct {
		name, members string
		ids           []int32
		stream, want  string
	}{
		{
			name: "thinking and answer", ids: whole,
			stream: role + pieces("reasoning_content", think, "") + pieces("content", answer, "") + frame(`{}`, `"stop"`, ","+timings(n, count)) + "data: [DONE]\n\n",
			want:   `[{"index":0,"message":{"role":"assistant","content":"cd","refusal":null,"reasoning_content":"ab"},"logprobs":null,"finish_reason":"stop"}],` + usageOf(n, count, len(think)+1) + "," + timings(n, count),
		},
		{
			name: "usage", members: `,"stream_options":{"include_usage":true}`, ids: whole,
			stream: frame(`{"role":"assistant","content":""}`, "null", `,"usage":null`) + pieces("reasoning_content", think, `,"usage":null`) + pieces("content", answer, `,"usage":null`) +
				frame(`{}`, `"stop"`, `,"usage":null`) + prefix + `],` + usageOf(n, count, len(think)+1) + "," + timings(n, count) + "}\n\n" + "data: [DONE]\n\n",
		},
		{
			name: "no thinking", members: `,"enable_thinking":false`, ids: answer,
			stream: role + pieces("content", answer, "") + frame(`{}`, `"length"`, ","+timings(n+4, len(answer))) + "data: [DONE]\n\n",
			want:   `[{"index":0,"message":{"role":"assistant","content":"cd","refusal":null},"logprobs":null,"finish_reason":"length"}],` + usageOf(n+4, len(answer), 0) + "," + timings(n+4, len(answer)),
		},
		{
			name: "ends inside thinking", ids: ids(think, []int32{end}),
			stream: role + pieces("reasoning_content", think, "") + frame(`{}`, `"stop"`, ","+timings(n, len(think)+1)) + "data: [DONE]\n\n",
			want:   `[{"index":0,"message":{"role":"assistant","content":"","refusal":null,"reasoning_content":"ab"},"logprobs":null,"finish_reason":"stop"}],` + usageOf(n, len(think)+1, len(think)+1) + "," + timings(n, len(think)+1),
		},
		{
			name: "nothing at all", members: `,"max_tokens":0`, ids: whole,
			stream: role + frame(`{}`, `"length"`, ","+timings(n, 0)) + "data: [DONE]\n\n",
			want:   `[{"index":0,"message":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":"length"}],` + usageOf(n, 0, 0) + "," + timings(n, 0),
		},
		{
			name: "stop string", members: `,"enable_thinking":false,"stop":"d"`, ids: ids(answer, tok.Encode("xyz")),
			stream: role + frame(`{"content":"c"}`, "null", "") + frame(`{}`, `"stop"`, ","+timings(n+4, len(answer))) + "data: [DONE]\n\n",
			want:   `[{"index":0,"message":{"role":"assistant","content":"c","refusal":null},"logprobs":null,"finish_reason":"stop"}],` + usageOf(n+4, len(answer), 0) + "," + timings(n+4, len(answer)),
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			gen.ids = c.ids
			body := `{"messages":[{"role":"user","content":"Hello, how are you?"}]` + c.members + "}"
			a := s.chat(t, `{"stream":true,`+body[1:])
			if got := steady(a.body); a.status != 200 || got != c.stream {
				t.Errorf("%d\n%s\nwant\n%s", a.status, got, c.stream)
			}
			for name, want := range map[string]string{"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"} {
				if a.header.Get(name) != want {
					t.Errorf("%s: %q", name, a.header.Get(name))
				}
			}
			if c.want == "" {
				return
			}
			a = s.chat(t, body)
			if got, want := steady(a.body), `{"id":"ID","object":"chat.completion","created":0,"model":"m","choices":`+c.want+"}"; a.status != 200 || got != want {
				t.Errorf("%d\n%s\nwant\n%s", a.status, got, want)
			}
		})
	}
}

// chunkOf is what tests read of an event.
type chunkOf struct {
	Choices []struct {
		Delta struct {
			Content   string `json:"content"`
			Reasoning string `json:"reasoning_content"`
		} `json:"delta"`
		FinishReason *string `json:"finish_reason"`
	} `json:"choices"`
	Progress *struct {
		Total, Cache, Processed int
		TimeMS                  float64 `json:"time_ms"`
	} `json:"prompt_progress"`
	Timings map[string]float64 `json:"timings"`
	Error   jsontext.Value     `json:"error"`
}

// readStream takes a stream apart; done says that it ended as it should.
func readStream(t testing.TB, body string) (chunks []chunkOf, done bool) {
	t.Helper()
	for part := range strings.SplitSeq(strings.TrimSuffix(body, "\n\n"), "\n\n") {
		if strings.HasPrefix(part, ": ") {
			continue
		}
		data, ok := strings.CutPrefix(part, "data: ")
		if !ok || done {
			t.Fatalf("event %q in %q", part, body)
		}
		if done = data == "[DONE]"; done {
			continue
		}
		var c chunkOf
		if err := json.Unmarshal([]byte(data), &c, json.MatchCaseInsensitiveNames(true)); err != nil {
			t.Fatalf("event %q: %v", part, err)
		}
		chunks = append(chunks, c)
	}
	return chunks, done
}

func TestProgressAndTimings(t *testing.T) {
	gen := &script{text: "abcdef", delay: 2 * time.Millisecond}
	s := start(t, setup{gen: gen})
	chunks, done := readStream(t, s.chat(t, with(`"stream":true,"return_progress":true,"timings_per_token":true,"max_tokens":4`)).body)
	if !done {
		t.Fatal("no end")
	}
	n := len(gen.last().Prompt)
	var progress []int
	output := 0
	for i, c := range chunks {
		switch {
		case c.Progress != nil:
			if output > 0 || c.Progress.Total != n || c.Progress.Cache != 0 || c.Progress.TimeMS < 0 {
				t.Errorf("progress %+v after %d pieces", c.Progress, output)
			}
			progress = append(progress, c.Progress.Processed)
		case c.Choices[0].Delta.Reasoning != "":
			output++
			if c.Timings["predicted_n"] != float64(output) || c.Timings["prompt_n"] != float64(n) {
				t.Errorf("%d: timings %v", output, c.Timings)
			}
		case i == len(chunks)-1:
			if ms := c.Timings["predicted_ms"]; c.Timings["predicted_n"] != 4 || ms < 6 || c.Timings["predicted_per_token_ms"] != ms/3 || c.Timings["prompt_per_second"] <= 0 {
				t.Errorf("timings %v", c.Timings)
			}
		}
	}
	if fmt.Sprint(progress) != fmt.Sprint([]int{0, n}) || output != 4 {
		t.Errorf("progress %v, %d pieces", progress, output)
	}
}

// The reference's continuations through a real model, as a stream and as a whole.
func TestGoldenChat(t *testing.T) {
	var golden struct {
		Cases map[string]struct {
			Tokens   []int32        `json:"tokens"`
			Greedy   []int32        `json:"greedy"`
			Messages jsontext.Value `json:"messages"`
			Thinking bool           `json:"enable_thinking"`
		} `json:"cases"`
	}
	if err := json.Unmarshal(read(t, filepath.Join(micro, "golden.json")), &golden); err != nil {
		t.Fatal(err)
	}
	m := modeltest.Micro(t)
	dev := cpu.NewFast(cpu.Options{States: m.States, Lanes: 1, Tokens: 256, Verify: 4, Carry: 68})
	t.Cleanup(func() { dev.Close() }) // after the server, which start stops
	batch, err := engine.NewBatch(model.NewRunner(m, dev, 64), engine.BatchOptions{Limits: engine.Limits{Lanes: 1, Pages: 4, Pending: 4}, Context: 256})
	if err != nil {
		t.Fatal(err)
	}
	s := start(t, setup{worker: batch, front: front.Options{Context: 256}, draft: 3})
	n := 0
	for name, c := range golden.Cases {
		if c.Messages == nil {
			continue
		}
		n++
		// What a client may see of the reference's ids: up to the end id, divided at </think>.
		var reasoning, content string
		ids, finish := c.Greedy, "length"
		for i, id := range c.Greedy {
			if id == 1 || id == 6 {
				ids, finish = c.Greedy[:i+1], "stop"
				break
			}
		}
		text := tokenizer().Decode(ids)
		if finish == "stop" {
			text = tokenizer().Decode(ids[:len(ids)-1])
		}
		if content = text; c.Thinking {
			if reasoning, content = text, ""; strings.Contains(text, "</think>") {
				t.Fatal("the reference closes the block; divide its text")
			}
		}
		body := fmt.Sprintf(`{"messages":%s,"chat_template_kwargs":{"enable_thinking":%v},"temperature":0,"max_tokens":%d}`, c.Messages, c.Thinking, len(c.Greedy))
		a := s.chat(t, body)
		var got struct {
			Choices []struct {
				Message struct {
					Content   string `json:"content"`
					Reasoning string `json:"reasoning_content"`
				} `json:"message"`
				FinishReason string `json:"finish_reason"`
			} `json:"choices"`
			Usage struct {
				Prompt     int `json:"prompt_tokens"`
				Completion int `json:"completion_tokens"`
			} `json:"usage"`
			Timings map[string]float64 `json:"timings"`
		}
		if err := json.Unmarshal([]byte(a.body), &got); err != nil || len(got.Choices) != 1 {
			t.Fatalf("%s: %v", a.body, err)
		}
		if k := got.Choices[0]; k.Message.Content != content || k.Message.Reasoning != reasoning || k.FinishReason != finish {
			t.Errorf("%s: %+v\nwant %q, %q, %s", name, k, reasoning, content, finish)
		}
		if got.Usage.Prompt != len(c.Tokens) || got.Usage.Completion != len(ids) {
			t.Errorf("%s: usage %+v, want %d and %d", name, got.Usage, len(c.Tokens), len(ids))
		}
		if got.Timings["draft_n"] == 0 {
			t.Errorf("%s: drafting left no trace in %v", name, got.Timings)
		}
		chunks, done := readStream(t, s.chat(t, `{"stream":true,`+body[1:]).body)
		var streamed [2]string
		for _, k := range chunks {
			streamed[0] += k.Choices[0].Delta.Reasoning
			streamed[1] += k.Choices[0].Delta.Content
		}
		if !done || streamed != [2]string{reasoning, content} {
			t.Errorf("%s: streamed %q", name, streamed)
		}
	}
	if n < 2 {
		t.Errorf("%d conversations", n)
	}
}

// open starts a stream and returns its reader.
func (s *site) open(t testing.TB, body string) (*bufio.Reader, context.CancelFunc) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, "POST", s.url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	res, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close() })
	if res.StatusCode != 200 {
		t.Fatalf("status %d", res.StatusCode)
	}
	return bufio.NewReader(res.Body), cancel
}

// event reads up to the next empty line.
func event(t testing.TB, r *bufio.Reader) string {
	t.Helper()
	line, err := r.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	return line
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// A client that leaves ends its request within a token, in every state, and the next one is served.
func TestDisconnect(t *testing.T) {
	gen := &script{text: strings.Repeat("ab ", 60), step: make(chan struct{})}
	s := start(t, setup{gen: gen, places: 3})
	idle := func() bool { running, _ := gen.state(); return running == 0 && s.queue.Load() == engine.Load{} }

	// Decoding, as a stream.
	r, leave := s.open(t, with(`"stream":true`))
	event(t, r)
	gen.step <- struct{}{}
	event(t, r)
	_, before := gen.state()
	leave()
	eventually(t, "the stream's request ends", idle)
	if _, said := gen.state(); said > before+1 {
		t.Errorf("%d tokens after the client left", said-before)
	}

	// Decoding, as a whole, and one that waits behind it.
	leaveWhole := make([]context.CancelFunc, 2)
	for i := range leaveWhole {
		ctx, cancel := context.WithCancel(context.Background())
		leaveWhole[i] = cancel
		go func() {
			r, _ := http.NewRequestWithContext(ctx, "POST", s.url+"/v1/chat/completions", strings.NewReader(with(`"user":"a"`)))
			if res, err := client.Do(r); err == nil {
				res.Body.Close()
			}
		}()
		eventually(t, "both are there", func() bool { return s.queue.Load().Places == i+1 && s.queue.Load().Running == 1 })
	}
	eventually(t, "one waits", func() bool { return s.queue.Load().Waiting == 1 })
	leaveWhole[1]()
	eventually(t, "the waiting one is gone", func() bool { return s.queue.Load() == engine.Load{Running: 1, Places: 1} })
	leaveWhole[0]()
	eventually(t, "the running one is gone", idle)
	if runs := len(gen.requests); runs != 2 {
		t.Errorf("%d requests ran", runs)
	}

	close(gen.step)
	if a := s.chat(t, with(`"max_tokens":5`)); a.status != 200 || !strings.Contains(a.body, `"completion_tokens":5`) {
		t.Errorf("after: %d %s", a.status, a.body)
	}
	if log := s.log.String(); strings.Count(log, "client_disconnected") != 3 {
		t.Errorf("log:\n%s", log)
	}
}

// Silence is filled; a queued stream that is dropped says so; a whole answer gets the status.
func TestWaiting(t *testing.T) {
	gen := &script{text: "ab", step: make(chan struct{})}
	s := start(t, setup{gen: gen, places: 3, timeout: 150 * time.Millisecond, opt: server.Options{KeepAlive: 20 * time.Millisecond}})
	r, _ := s.open(t, with(`"stream":true,"max_tokens":1`))
	event(t, r)
	if got := event(t, r); got != ": keep-alive\n" {
		t.Errorf("%q", got)
	}
	waiting, _ := s.open(t, with(`"stream":true`))
	whole := make(chan answer)
	go func() { whole <- s.chat(t, with(`"user":"a"`)) }()
	eventually(t, "all places are taken", func() bool { return s.queue.Load().Places == 3 })
	a := s.chat(t, with(`"user":"a"`))
	if _, kind, _, code := errorIn(t, a.body); a.status != 429 || kind != "rate_limit_error" || code != "server_overloaded" || a.header.Get("Retry-After") == "" {
		t.Errorf("%d %s", a.status, a.body)
	}
	if h := send(t, "GET", s.url+"/health", ""); h.status != 200 {
		t.Errorf("a full queue is no illness: %d", h.status)
	}
	a = <-whole
	if _, kind, _, code := errorIn(t, a.body); a.status != 503 || kind != "server_error" || code != "request_queue_timeout" {
		t.Errorf("%d %s", a.status, a.body)
	}
	rest, err := io.ReadAll(waiting)
	if err != nil {
		t.Fatal(err)
	}
	chunks, done := readStream(t, string(rest))
	if last := chunks[len(chunks)-1]; done || last.Error == nil || !strings.Contains(string(last.Error), `"code":"request_queue_timeout"`) || strings.Contains(string(rest), "finish_reason\":\"") {
		t.Errorf("%s", rest)
	}
	gen.step <- struct{}{}
	rest, err = io.ReadAll(r)
	if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Errorf("%q, %v", rest, err)
	}
}

// Ending lets requests finish, then cancels them, each with an answer; nothing new is taken.
func TestDrain(t *testing.T) {
	gen := &script{text: strings.Repeat("ab ", 60), step: make(chan struct{}, 1)}
	s := start(t, setup{gen: gen, opt: server.Options{Grace: 300 * time.Millisecond}})
	r, _ := s.open(t, with(`"stream":true,"max_tokens":1`))
	event(t, r)
	eventually(t, "the first runs", func() bool { return s.queue.Load().Running == 1 })
	long, _ := s.open(t, with(`"stream":true`))
	event(t, long)
	whole := make(chan answer)
	go func() { whole <- s.chat(t, with(`"user":"a"`)) }()
	eventually(t, "two wait", func() bool { return s.queue.Load().Waiting == 2 })
	begin := time.Now()
	s.stop()
	eventually(t, "the socket is closed", func() bool {
		c, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
		if err == nil {
			c.Close()
		}
		return err != nil
	})
	gen.step <- struct{}{}
	rest, err := io.ReadAll(r)
	if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Errorf("a request that could finish: %q, %v", rest, err)
	}
	rest, err = io.ReadAll(long)
	if err != nil || !strings.Contains(string(rest), `"code":"service_unavailable"`) || strings.Contains(string(rest), "[DONE]") {
		t.Errorf("a request that could not: %q, %v", rest, err)
	}
	a := <-whole
	if _, _, _, code := errorIn(t, a.body); a.status != 503 || code != "service_unavailable" {
		t.Errorf("a request that never ran: %d %s", a.status, a.body)
	}
	if err := <-s.served; err != nil {
		t.Error(err)
	}
	s.served <- nil
	if took := time.Since(begin); took < 250*time.Millisecond || took > 2*time.Second {
		t.Errorf("ending took %v", took)
	}
}

// A failure of the engine fails every request, shows in health, and ends the server with its error.
func TestEngineFailure(t *testing.T) {
	lost := errors.New("device lost")
	gen := &script{text: "ab", step: make(chan struct{}), err: lost}
	s := start(t, setup{gen: gen})
	r, _ := s.open(t, with(`"stream":true`))
	event(t, r)
	eventually(t, "the first runs", func() bool { return s.queue.Load().Running == 1 })
	whole := make(chan answer)
	go func() { whole <- s.chat(t, with(`"user":"a"`)) }()
	eventually(t, "one waits", func() bool { return s.queue.Load().Waiting == 1 })
	kept, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	close(gen.step)
	rest, err := io.ReadAll(r)
	if err != nil || !strings.Contains(string(rest), `"type":"server_error","param":null,"code":"internal_error"`) || strings.Contains(string(rest), "[DONE]") {
		t.Errorf("the one that was hit: %q, %v", rest, err)
	}
	a := <-whole
	if _, kind, _, code := errorIn(t, a.body); a.status != 503 || kind != "server_error" || code != "service_unavailable" {
		t.Errorf("the one behind: %d %s", a.status, a.body)
	}
	if err := <-s.served; !errors.Is(err, lost) {
		t.Errorf("the server ended with %v", err)
	}
	s.served <- nil
	if strings.Contains(string(rest)+a.body, "device lost") {
		t.Error("clients see the engine's words")
	}
}

// Nothing that a client or the model says is in the log, nor the key.
func TestLogIsSilent(t *testing.T) {
	gen := &script{text: "modelword"}
	s := start(t, setup{gen: gen, opt: server.Options{APIKey: "keyword"}})
	bodies := []string{
		`{"messages":[{"role":"user","content":"promptword"}],"stream":true}`, `{"messages":[{"role":"user","content":"promptword"}]}`,
		`{"messages":[{"role":"promptword","content":"promptword"}]}`, `{"promptword`, with(`"model":"promptword"`), with(`"guided_promptword":1`),
		with(`"chat_template_kwargs":{"eos_token":"promptword"}`), with(`"logit_bias":{"promptword":"x"}`),
	}
	for _, body := range bodies {
		send(t, "POST", s.url+"/v1/chat/completions", body, "x-api-key", "keyword", "User-Agent", "promptword")
		send(t, "POST", s.url+"/v1/chat/completions?promptword", body, "Authorization", "Bearer wrongword")
	}
	log := s.log.String()
	for _, word := range []string{"promptword", "modelword", "keyword", "wrongword"} {
		if strings.Contains(log, word) {
			t.Errorf("%q is in the log:\n%s", word, log)
		}
	}
	line := regexp.MustCompile(`^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}  (info|warning|debug|error)  \S.*\n$`)
	n := 0
	for l := range strings.Lines(log) {
		n++
		if !line.MatchString(l) {
			t.Errorf("log line %q", l)
		}
	}
	if n != 2*len(bodies)-len(bodies) {
		t.Errorf("%d lines for %d requests, of which half had no key", n, 2*len(bodies))
	}
}
