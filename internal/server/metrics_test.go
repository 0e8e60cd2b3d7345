package server_test

import (
	"context"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"ninfer/internal/backend/cpu"
	"ninfer/internal/engine"
	"ninfer/internal/front"
	flash "ninfer/internal/model"
	"ninfer/internal/model/modeltest"
	"ninfer/internal/server"
)

// metrics are what a scrape gives: kinds by name, and values by name and labels. Of a histogram the value is the count.
type metrics struct {
	kinds  map[string]string
	values map[string]float64
}

// scrape reads the metrics with Prometheus' own parser.
func (s *site) scrape(t testing.TB, header ...string) metrics {
	t.Helper()
	a := send(t, "GET", s.url+"/metrics", "", header...)
	if a.status != 200 || !strings.HasPrefix(a.header.Get("Content-Type"), "text/plain; version=0.0.4") {
		t.Fatalf("%d, %s: %s", a.status, a.header.Get("Content-Type"), a.body)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(a.body))
	if err != nil {
		t.Fatal(err)
	}
	out := metrics{map[string]string{}, map[string]float64{}}
	for name, f := range families {
		out.kinds[name] = strings.ToLower(f.GetType().String())
		if f.GetHelp() == "" {
			t.Errorf("%s has no help", name)
		}
		for _, m := range f.Metric {
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			key := name
			if labels != nil {
				key += "{" + strings.Join(labels, ",") + "}"
			}
			switch f.GetType() {
			case dto.MetricType_COUNTER:
				out.values[key] = m.Counter.GetValue()
			case dto.MetricType_HISTOGRAM:
				out.values[key] = float64(m.Histogram.GetSampleCount())
				if sum := m.Histogram.GetSampleSum(); sum < 0 || sum > 1000*out.values[key] {
					t.Errorf("%s: %v seconds", key, sum)
				}
			default:
				out.values[key] = m.Gauge.GetValue()
			}
		}
	}
	return out
}

// The metrics of docs/serving.md, Metrics; each is what it says.
func TestMetricNames(t *testing.T) {
	gen := &script{text: "ab", step: make(chan struct{})}
	activity := func() engine.Activity {
		return engine.Activity{
			DeviceWait: 2500 * time.Millisecond, PromptWork: 125 * time.Millisecond, RoundWork: 250 * time.Millisecond,
			Lanes: 4, Running: 3, Waiting: 1, Prefilling: 1, DecodeReady: 2, Pages: 8, Reserved: 6, PromptTokens: 101, PrefillTokens: 103,
			GeneratedTokens: 107, DecodeTokens: 109, Rounds: 113, FallbackSteps: 127, Drafted: 131, Accepted: 137,
		}
	}
	s := start(t, setup{gen: gen, activity: activity, opt: server.Options{APIKey: "k"}})
	stop := make(chan struct{})
	for range 2 { // one runs, one waits; scraping waits for neither
		go func() {
			send(t, "POST", s.url+"/v1/chat/completions", with(`"max_tokens":1`), "x-api-key", "k")
			stop <- struct{}{}
		}()
	}
	eventually(t, "one runs and one waits", func() bool { return s.queue.Load() == engine.Load{Running: 1, Waiting: 1, Places: 2} })
	got := s.scrape(t, "x-api-key", "k", "Accept", "application/openmetrics-text;version=1.0.0,application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.9", "Accept-Encoding", "gzip")
	type entry struct {
		kind  string
		value float64
	}
	want := map[string]entry{
		"ninfer_engine_ready":                                {"gauge", 1},
		"ninfer_model_info{file=x.ninfer,model=m}":           {"gauge", 1},
		"ninfer_max_concurrency":                             {"gauge", 3},
		"ninfer_max_context_tokens":                          {"gauge", 512},
		"ninfer_requests_running":                            {"gauge", 1},
		"ninfer_requests_waiting":                            {"gauge", 1},
		"ninfer_requests_prefilling":                         {"gauge", 1},
		"ninfer_requests_decode_ready":                       {"gauge", 2},
		"ninfer_device_kv_used_pages":                        {"gauge", 6},
		"ninfer_device_kv_capacity_pages":                    {"gauge", 8},
		"ninfer_prompt_tokens_total":                         {"counter", 101},
		"ninfer_prefill_tokens_total":                        {"counter", 103},
		"ninfer_generation_tokens_total":                     {"counter", 107},
		"ninfer_decode_tokens_total":                         {"counter", 109},
		"ninfer_spec_decode_rounds_total":                    {"counter", 113},
		"ninfer_spec_decode_fallback_steps_total":            {"counter", 127},
		"ninfer_spec_decode_draft_tokens_total":              {"counter", 131},
		"ninfer_spec_decode_accepted_tokens_total":           {"counter", 137},
		"ninfer_device_state_used_slots":                     {"gauge", 3},
		"ninfer_device_state_capacity_slots":                 {"gauge", 4},
		"ninfer_device_wait_seconds_total":                   {"counter", 2.5},
		"ninfer_host_work_seconds_total{phase=prefill}":      {"counter", 0.125},
		"ninfer_host_work_seconds_total{phase=decode}":       {"counter", 0.25},
		"ninfer_requests_total{outcome=stop}":                {"counter", 0},
		"ninfer_requests_total{outcome=length}":              {"counter", 0},
		"ninfer_requests_total{outcome=client_disconnected}": {"counter", 0},
		"ninfer_requests_total{outcome=error}":               {"counter", 0},
		"ninfer_requests_total{outcome=rejected}":            {"counter", 0},
		"ninfer_time_to_first_token_seconds":                 {"histogram", 0},
		"ninfer_request_duration_seconds":                    {"histogram", 0},
		"ninfer_request_queue_seconds":                       {"histogram", 1},
		"vllm:num_requests_running{model_name=m}":            {"gauge", 1},
		"vllm:num_requests_waiting{model_name=m}":            {"gauge", 1},
		"vllm:kv_cache_usage_perc{model_name=m}":             {"gauge", 0.75},
		"vllm:gpu_cache_usage_perc{model_name=m}":            {"gauge", 0.75},
	}
	for key, e := range want {
		name, _, _ := strings.Cut(key, "{")
		if v, ok := got.values[key]; !ok || v != e.value || got.kinds[name] != e.kind {
			t.Errorf("%s: %v %s, want %v", key, v, got.kinds[name], e)
		}
	}
	if len(got.values) != len(want) {
		t.Errorf("%d series, want %d: %v", len(got.values), len(want), slices.Sorted(maps.Keys(got.values)))
	}
	close(gen.step)
	<-stop
	<-stop
	if a := send(t, "GET", s.url+"/metrics", ""); a.status != 401 {
		t.Errorf("without a key: %d", a.status)
	}
	if a := send(t, "HEAD", s.url+"/metrics/", "", "x-api-key", "k"); a.status != 200 || a.body != "" {
		t.Errorf("HEAD: %d %q", a.status, a.body)
	}
}

// Metrics answer while the model is loading and after the engine has failed.
func TestMetricsStates(t *testing.T) {
	gen := &script{text: "ab", step: make(chan struct{}), err: errors.New("lost")}
	c := setup{gen: gen, loading: true, opt: server.Options{Grace: 2 * time.Second}}
	s := start(t, c)
	s.chat(t, with(`"user":"a"`)) // 503
	got := s.scrape(t)
	if v, ok := got.values["ninfer_engine_ready"]; !ok || v != 0 || got.values["ninfer_requests_total{outcome=rejected}"] != 1 {
		t.Errorf("loading: %v", got.values)
	}
	for name := range got.kinds {
		if strings.HasPrefix(name, "vllm:") || strings.HasPrefix(name, "ninfer_max") || strings.HasPrefix(name, "ninfer_device") {
			t.Errorf("%s is told of a model that is not there", name)
		}
	}
	s.ready(t, c)
	if got := s.scrape(t); got.values["ninfer_engine_ready"] != 1 || got.kinds["ninfer_device_kv_used_pages"] != "" {
		t.Errorf("ready: %v", got.values)
	}
	close(gen.step)
	s.chat(t, with(`"user":"a"`))
	<-s.served
	s.served <- nil
	w := httptest.NewRecorder()
	r, _ := http.NewRequest("GET", "/metrics", nil)
	s.ServeHTTP(w, r)
	if body := w.Body.String(); w.Code != 200 || !strings.Contains(body, "\nninfer_engine_ready 0\n") || !strings.Contains(body, `ninfer_requests_total{outcome="error"} 1`) {
		t.Errorf("after a failure: %d\n%s", w.Code, body)
	}
}

// Through a real engine with drafts: counters are the sums of what clients were told.
func TestMetricValues(t *testing.T) {
	m := modeltest.Micro(t)
	dev := cpu.NewFast(cpu.Options{States: m.States, Lanes: 2, Tokens: 256, Verify: 4, Carry: 68})
	t.Cleanup(func() { dev.Close() }) // after the server's end
	batch, err := engine.NewBatch(flash.NewRunner(m, dev, 64), engine.BatchOptions{Limits: engine.Limits{Lanes: 2, Pages: 8, Pending: 20}, Context: 256})
	if err != nil {
		t.Fatal(err)
	}
	s := start(t, setup{worker: batch, front: front.Options{Context: 256}, draft: 3, activity: batch.Activity})
	type told struct {
		Choices []struct {
			FinishReason string `json:"finish_reason"`
		} `json:"choices"`
		Usage struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
		} `json:"usage"`
		Timings struct {
			Draft    int `json:"draft_n"`
			Accepted int `json:"draft_n_accepted"`
		} `json:"timings"`
	}
	want := map[string]float64{}
	answers := make(chan answer)
	const clients = 6
	for i := range clients {
		go func() {
			answers <- s.chat(t, with(fmt.Sprintf(`"max_tokens":%d,"temperature":0,"enable_thinking":%v`, 5+7*i, i%2 == 0)))
		}()
	}
	for range clients {
		a := <-answers
		var got told
		if err := json.Unmarshal([]byte(a.body), &got); err != nil || a.status != 200 {
			t.Fatalf("%d %s: %v", a.status, a.body, err)
		}
		want["ninfer_requests_total{outcome="+got.Choices[0].FinishReason+"}"]++
		want["ninfer_prompt_tokens_total"] += float64(got.Usage.Prompt)
		want["ninfer_prefill_tokens_total"] += float64(got.Usage.Prompt)
		want["ninfer_generation_tokens_total"] += float64(got.Usage.Completion)
		want["ninfer_decode_tokens_total"] += float64(got.Usage.Completion - 1)
		want["ninfer_spec_decode_draft_tokens_total"] += float64(got.Timings.Draft)
		want["ninfer_spec_decode_accepted_tokens_total"] += float64(got.Timings.Accepted)
	}
	if want["ninfer_spec_decode_draft_tokens_total"] == 0 {
		t.Error("nothing was drafted")
	}
	s.chat(t, `{"messages":[]}`)
	// One leaves before it is answered.
	ctx, leave := context.WithCancel(t.Context())
	r, _ := http.NewRequestWithContext(ctx, "POST", s.url+"/v1/chat/completions", strings.NewReader(with(`"max_tokens":150,"stream":true`)))
	res, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	io.ReadFull(res.Body, make([]byte, 10))
	leave()
	res.Body.Close()
	// The queue has given it up before the engine has finished the unit that it was in.
	eventually(t, "it is gone", func() bool {
		a := batch.Activity()
		return s.queue.Load() == engine.Load{} && a.Running+a.Waiting == 0
	})
	want["ninfer_requests_total{outcome=rejected}"] = 1
	want["ninfer_requests_total{outcome=client_disconnected}"] = 1
	want["ninfer_requests_total{outcome=error}"] = 0
	want["ninfer_request_duration_seconds"] = clients + 1
	want["ninfer_device_kv_used_pages"] = 0
	want["ninfer_device_kv_capacity_pages"] = 8
	got := s.scrape(t)
	for name, v := range want {
		// The one that left ran for a while.
		if got.values[name] != v && !(strings.Contains(name, "_tokens_total") && got.values[name] > v) {
			t.Errorf("%s: %v, want %v", name, got.values[name], v)
		}
	}
	if n := got.values["ninfer_request_queue_seconds"]; n < clients || n > clients+1 {
		t.Errorf("%v requests got a turn", n)
	}
	if n := got.values["ninfer_time_to_first_token_seconds"]; n < clients || n > clients+1 {
		t.Errorf("%v requests had a first token", n)
	}
}
