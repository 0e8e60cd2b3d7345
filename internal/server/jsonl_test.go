package server_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"ninfer/internal/engine"
	"ninfer/internal/server"
)

// lines counts writes: every event is one, and a whole line.
type lines struct {
	mu  sync.Mutex
	all []string
	err error
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return 0, l.err
	}
	l.all = append(l.all, string(p))
	return len(p), nil
}

func (l *lines) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.all, "")
}

// plain replaces what differs between two runs.
func plainEvents(text string) string {
	for pattern, with := range map[string]string{
		`"timestamp_unix_ms":\d{13}`: `"timestamp_unix_ms":0`, `"server_instance_id":"[0-9a-f]{32}"`: `"server_instance_id":"I"`,
		`"request_id":"req_[0-9a-f]{32}"`: `"request_id":"R"`, `(prepare|queue|prefill|decode|ttft|total)":[0-9.e-]+`: `$1":0`,
		`"seed":\d+`: `"seed":0`,
	} {
		text = regexp.MustCompile(pattern).ReplaceAllString(text, with)
	}
	return text
}

func eventHead(event string) string {
	return `{"schema":"ninfer.request_log","schema_version":1,"timestamp_unix_ms":0,"server_instance_id":"I","event":"` + event + `",`
}

// Every event to the letter, one write each (docs/serving.md, Machine log).
func TestJournal(t *testing.T) {
	tok := tokenizer()
	end, _ := tok.ID("<|im_end|>")
	shut, _ := tok.ID("</think>")
	gen := &script{}
	out := &lines{}
	j := server.NewJournal(out, "secretkey", slog.New(slog.DiscardHandler))
	j.Start(server.StartRecord{Version: "v", Arguments: "serve x --api-key ***", Model: "m", File: "x.ninfer", Address: "a", Device: "cpu", MaxContext: 512, MaxConcurrency: 3, MaxPending: 14, KVPages: 8, PageTokens: 64})
	s := start(t, setup{gen: gen, draft: 3, opt: server.Options{Journal: j, APIKey: "secretkey"}})
	ask := func(body string, agent string) string {
		t.Helper()
		before := len(out.text())
		send(t, "POST", s.url+"/v1/chat/completions", body, "x-api-key", "secretkey", "User-Agent", agent)
		eventually(t, "an end", func() bool {
			return strings.Contains(out.text()[before:], `"request_done"`) || strings.Contains(out.text()[before:], `"request_rejected"`)
		})
		return plainEvents(out.text()[before:])
	}
	if got, want := plainEvents(out.text()), eventHead("server_start")+`"version":"v","arguments":"serve x --api-key ***","model":"m","file":"x.ninfer","address":"a","device":"cpu","max_context":512,"max_concurrency":3,"max_pending_requests":14,"kv_pages":8,"kv_page_tokens":64,"draft_window":0}`+"\n"; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	// Thinking, with a call of a tool.
	text := "promptword</think>\n\n" + called("x", "1")
	gen.ids = append(tok.Encode(text), end)
	think := 0
	for i, id := range gen.ids {
		if id == shut {
			think = i + 1
		}
	}
	got := ask(with(weather+`,"temperature":0.5,"top_p":0.25,"top_k":7,"min_p":0.125,"presence_penalty":1,"frequency_penalty":-1,"max_tokens":150,"stop":["zz"]`), "client secretkey/1")
	prompt := len(gen.last().Prompt)
	ids, _ := json.Marshal(gen.ids)
	var declared struct {
		Tools []struct{} `json:"tools"`
	}
	if err := json.Unmarshal([]byte("{"+weather+"}"), &declared); err != nil || len(declared.Tools) != 1 {
		t.Fatal(err)
	}
	raw := strings.TrimSuffix(strings.TrimPrefix(weather, `"tools":[`), `]`)
	want := eventHead("request_start") + fmt.Sprintf(`"request_id":"R","route":"/v1/chat/completions","protocol":"chat","stream":false,"prompt_tokens":%d,"max_new_tokens":150,`+
		`"sampler":{"temperature":0.5,"top_p":0.25,"top_k":7,"min_p":0.125,"presence_penalty":1,"frequency_penalty":-1},"seed":0,"reasoning_effort":null,"thinking":true,"thinking_budget":null,`+
		`"shape":{"messages":1,"tools":1,"stops":1,"logprobs":false,"top_logprobs":0},"user_agent":"client ***/1","tool_digest":"%x"}`+"\n", prompt, sha256.Sum256([]byte(raw+"\n"))) +
		eventHead("request_done") + fmt.Sprintf(`"request_id":"R","protocol":"chat","finish_reason":"stop","prompt_tokens":%d,"completion_tokens":%d,"cached_tokens":0,"computed_tokens":%d,"reuse_path":"root",`+
		`"tool_parse":{"marker_seen":true,"calls":1,"omitted_arguments":0,"mismatched_arguments":0,"fallback_reason":null},"thinking":{"budget":null,"tokens":%d},`+
		`"timings_seconds":{"prepare":0,"queue":0,"prefill":0,"decode":0,"ttft":0,"total":0},`+
		`"speculative":{"backend":"mtp","draft_window":3,"rounds":0,"drafted_tokens":0,"accepted_tokens":0,"fallback_steps":0,"accepted_per_position":[]},"generated_token_ids":%s}`+"\n",
		prompt, len(gen.ids), prompt, think, ids)
	if got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	// No thinking, no tools, no drafts, nothing but the prompt.
	got = ask(with(`"enable_thinking":false,"max_tokens":0,"logprobs":true,"top_logprobs":1,"user":"promptword"`), "b")
	prompt = len(gen.last().Prompt)
	if want := `"finish_reason":"length","prompt_tokens":` + fmt.Sprint(prompt) + `,"completion_tokens":0,"cached_tokens":0,"computed_tokens":` + fmt.Sprint(prompt) + `,"reuse_path":"root","tool_parse":null,"thinking":{"budget":null,"tokens":0},"timings_seconds":{"prepare":0,"queue":0,"prefill":null,"decode":null,"ttft":null,"total":0},"speculative":null,"generated_token_ids":[]}` + "\n"; !strings.HasSuffix(got, want) {
		t.Errorf("%s\nwant %s", got, want)
	}
	// Refused.
	if got, want := ask(`{"messages":["promptword"]}`, "promptword"), eventHead("request_rejected")+`"request_id":"R","route":"/v1/chat/completions","status":400,"code":"invalid_type"}`+"\n"; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	all := out.text()
	for _, word := range []string{"promptword", "secretkey"} {
		if strings.Contains(all, word) {
			t.Errorf("%q is in the journal:\n%s", word, all)
		}
	}
	if len(out.all) != strings.Count(all, "\n") {
		t.Errorf("%d writes for %d lines", len(out.all), strings.Count(all, "\n"))
	}
}

// Throughput is told as in the log.
func TestJournalThroughput(t *testing.T) {
	gen := &script{text: strings.Repeat("ab ", 40), delay: time.Millisecond}
	out := &lines{}
	// Of ten rounds between two looks three are of one sequence and seven of two; a quarter of the time is the host's.
	var looks atomic.Int64
	activity := func() engine.Activity {
		n := looks.Add(1)
		return engine.Activity{Prefilling: 3, DecodeUnits: 10 * n, DecodeLanes: 17 * n, DeviceWait: time.Duration(3 * n), PromptWork: time.Duration(n) / 2, RoundWork: time.Duration(n - n/2)}
	}
	s := start(t, setup{gen: gen, activity: activity, opt: server.Options{Journal: server.NewJournal(out, "", slog.New(slog.DiscardHandler)), StatsInterval: 5 * time.Millisecond}})
	a := s.chat(t, with(`"user":"a"`))
	var told struct {
		Usage struct {
			Prompt     float64 `json:"prompt_tokens"`
			Completion float64 `json:"completion_tokens"`
		} `json:"usage"`
	}
	if err := json.Unmarshal([]byte(a.body), &told); err != nil {
		t.Fatal(err)
	}
	var decode, prefill float64
	eventually(t, "all is told", func() bool {
		decode, prefill = 0, 0
		for l := range strings.Lines(out.text()) {
			var e struct {
				Event       string
				Interval    float64 `json:"interval_seconds"`
				Decode      float64 `json:"decode_tokens"`
				DecodeRate  float64 `json:"decode_tokens_per_second"`
				Prefill     float64 `json:"prefill_tokens"`
				PrefillRate float64 `json:"prefill_tokens_per_second"`
				Running     *int    `json:"running"`
				Waiting     *int    `json:"waiting"`
				Prefilling  int     `json:"prefilling"`
				MeanBatch   float64 `json:"mean_batch"`
				HostShare   float64 `json:"host_share"`
			}
			if err := json.Unmarshal([]byte(l), &e, json.MatchCaseInsensitiveNames(true)); err != nil {
				t.Fatalf("%q: %v", l, err)
			}
			if e.Event != "throughput" {
				continue
			}
			if e.Interval <= 0 || e.Running == nil || e.Waiting == nil || e.DecodeRate != e.Decode/e.Interval || e.PrefillRate != e.Prefill/e.Interval {
				t.Fatalf("%s", l)
			}
			if e.Prefilling != 3 || e.MeanBatch != 1.7 || e.HostShare != 0.25 {
				t.Fatalf("%s", l)
			}
			decode, prefill = decode+e.Decode, prefill+e.Prefill
		}
		return decode == told.Usage.Completion && prefill == told.Usage.Prompt
	})
}

// Whatever clients do, each request that started has exactly one end, and the metrics count the same.
func TestJournalPairs(t *testing.T) {
	gen := &script{text: "the quick brown fox", delay: 100 * time.Microsecond}
	out := &lines{}
	s := start(t, setup{gen: gen, places: 20, timeout: 40 * time.Millisecond, opt: server.Options{
		Log: server.NewLog(io.Discard, server.LevelTrace), Journal: server.NewJournal(out, "", slog.New(slog.DiscardHandler)),
	}})
	var clients sync.WaitGroup
	transport := &http.Transport{}
	for i := range 200 {
		rng := rand.New(rand.NewPCG(7, uint64(i)))
		pause, stay := time.Duration(rng.IntN(150))*time.Millisecond, time.Duration(rng.IntN(40_000))*time.Microsecond
		body := with(fmt.Sprintf(`"enable_thinking":false,"stream":%v`, rng.IntN(2) == 0))
		if rng.IntN(10) == 0 {
			body = body[:len(body)/2]
		}
		leaves := rng.IntN(2) == 0
		clients.Go(func() {
			time.Sleep(pause)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			if leaves {
				time.AfterFunc(stay, cancel)
			}
			r, _ := http.NewRequestWithContext(ctx, "POST", s.url+"/v1/chat/completions", strings.NewReader(body))
			if res, err := (&http.Client{Transport: transport}).Do(r); err == nil {
				io.Copy(io.Discard, res.Body)
				res.Body.Close()
			}
		})
	}
	clients.Wait()
	transport.CloseIdleConnections()
	s.stop()
	if err := <-s.served; err != nil { // all handlers are done
		t.Fatal(err)
	}
	s.served <- nil
	w := newRecorder()
	r, _ := http.NewRequest("GET", "/metrics", nil)
	s.ServeHTTP(w, r)
	state := map[string]string{}
	count := map[string]int{}
	for l := range strings.Lines(out.text()) {
		var e struct {
			Event  string `json:"event"`
			ID     string `json:"request_id"`
			Reason string `json:"finish_reason"`
			Code   string `json:"code"`
			Status int    `json:"status"`
		}
		if err := json.Unmarshal([]byte(l), &e); err != nil {
			t.Fatalf("%q: %v", l, err)
		}
		before := state[e.ID]
		state[e.ID] = e.Event
		switch e.Event {
		case "request_start":
			if before != "" {
				t.Errorf("%s starts after %s", e.ID, before)
			}
			continue
		case "request_rejected":
			if before != "" || e.Code == "" || e.Status < 400 {
				t.Errorf("%s is rejected after %q: %s", e.ID, before, l)
			}
			count["rejected"]++
			continue
		case "request_error":
			if e.Reason != "error" || e.Code != "request_queue_timeout" || e.Status != 503 {
				t.Errorf("%s", l)
			}
		case "request_done":
			if e.Code != "" || e.Status != 0 {
				t.Errorf("%s", l)
			}
		}
		if before != "request_start" {
			t.Errorf("%s ends after %q", e.ID, before)
		}
		count[e.Reason]++
	}
	for id, last := range state {
		if last == "request_start" {
			t.Errorf("%s has no end", id)
		}
	}
	for _, outcome := range []string{"stop", "length", "client_disconnected", "error", "rejected"} {
		if want := fmt.Sprintf("ninfer_requests_total{outcome=%q} %d\n", outcome, count[outcome]); !strings.Contains(w.String(), want) {
			t.Errorf("metrics do not have %s", want)
		}
	}
	if count["client_disconnected"] == 0 || count["rejected"] == 0 || count["length"] == 0 {
		t.Errorf("%v: the storm is not one", count)
	}
}

// A request whose answer meets a defect ends too, and a journal that cannot be written says so once and harms nobody.
func TestJournalFailures(t *testing.T) {
	gen := &script{text: "ab"}
	out := &lines{}
	s := start(t, setup{gen: gen, opt: server.Options{Journal: server.NewJournal(out, "", slog.New(slog.DiscardHandler))}})
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		r, _ := http.NewRequest("POST", "/v1/chat/completions", strings.NewReader(with(`"user":"a"`)))
		s.ServeHTTP(&brokenWriter{newRecorder()}, r)
	}()
	if got := plainEvents(out.text()); strings.Count(got, "\n") != 2 || !strings.Contains(got, eventHead("request_error")) || !strings.Contains(got, `"status":500,"code":"internal_error"`) {
		t.Errorf("%s", got)
	}
	eventually(t, "its place is free", func() bool { return s.queue.Load() == engine.Load{} })

	log := &safeBuffer{}
	s = start(t, setup{gen: gen, opt: server.Options{Journal: server.NewJournal(&lines{err: errors.New("disk full")}, "", server.NewLog(log, slog.LevelError))}})
	for range 3 {
		if a := s.chat(t, with(`"user":"a"`)); a.status != 200 {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	if got := log.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "error  the request log cannot be written | error disk full") {
		t.Errorf("log %q", got)
	}
}

// recorder is a ResponseWriter in memory.
type recorder struct {
	bytes.Buffer
	header http.Header
}

func newRecorder() *recorder { return &recorder{header: http.Header{}} }

func (r *recorder) Header() http.Header { return r.header }

func (r *recorder) WriteHeader(int) {}

// brokenWriter panics where an answer is written.
type brokenWriter struct{ *recorder }

func (*brokenWriter) Write([]byte) (int, error) { panic("broken") }
