package server

import (
	"log/slog"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"ninfer/internal/engine"
)

// The outcomes of ninfer_requests_total: how a request of the model ended. They are labels, so there is no other.
const (
	outcomeStop     = "stop"                // a stop token or string
	outcomeLength   = "length"              // the output or the context limit
	outcomeLeft     = "client_disconnected" // the client was not there for the end
	outcomeError    = "error"               // after it had a place in the queue
	outcomeRejected = "rejected"            // before
)

// metrics is what GET /metrics tells (docs/serving.md, Metrics). What is counted here starts with the server, what the engine counts with the
// engine, which has warmed up before.
type metrics struct {
	handler  http.Handler
	requests *prometheus.CounterVec
	// In seconds since the request came, its end and its first token; and how long it waited for its turn.
	duration, firstToken, queue prometheus.Histogram
}

// newMetrics makes a registry of the server's own: nothing of the process or of a library is on it.
func newMetrics(s *Server) *metrics {
	histogram := func(name, help string, buckets ...float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets})
	}
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "ninfer_requests_total", Help: "Requests to run the model, by how they ended.",
		}, []string{"outcome"}),
		duration: histogram("ninfer_request_duration_seconds", "Time from a request's arrival to its end, of requests that got a place in the queue.",
			0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480, 960, 1920),
		firstToken: histogram("ninfer_time_to_first_token_seconds", "Time from a request's arrival to its first token.",
			0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320),
		queue: histogram("ninfer_request_queue_seconds", "Time that a request which got its turn had waited for it, prepared.",
			0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80),
	}
	for _, outcome := range []string{outcomeStop, outcomeLength, outcomeLeft, outcomeError, outcomeRejected} {
		m.requests.WithLabelValues(outcome)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(m.requests, m.duration, m.firstToken, m.queue, newGauges(s))
	m.handler = promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		DisableCompression: true, ErrorLog: slog.NewLogLogger(s.opt.Log.Handler(), slog.LevelError),
	})
	return m
}

// page serves GET /metrics: always the text format 0.0.4, whatever else a client takes.
func (m *metrics) page(x *exchange) {
	r := x.r.Clone(x.r.Context())
	r.Header.Del("Accept")
	m.handler.ServeHTTP(x.w, r)
}

// facts are read once for a scrape, so that what a scrape tells fits together. Reading them waits for no pass of the device.
type facts struct {
	model    *Model
	load     engine.Load
	activity engine.Activity
}

// gauge is one metric that is read when asked for.
type gauge struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	read  func(*facts) float64
	named bool // has the model as a label, as other servers' metrics do
}

// gauges is a prometheus.Collector.
type gauges struct {
	server      *Server
	ready, info *prometheus.Desc
	ofQueue     []gauge // known with a model
	ofEngine    []gauge // known with a model that has an activity
}

func newGauges(s *Server) *gauges {
	g := &gauges{
		server: s,
		ready:  prometheus.NewDesc("ninfer_engine_ready", "1 if a new request would be taken, 0 while the model is loading, after a failure and at the end.", nil, nil),
		info:   prometheus.NewDesc("ninfer_model_info", "The model served: 1.", []string{"model", "file"}, nil),
	}
	of := func(list *[]gauge, kind prometheus.ValueType, name, help string, read func(*facts) float64) {
		*list = append(*list, gauge{desc: prometheus.NewDesc(name, help, nil, nil), kind: kind, read: read})
	}
	alias := func(list *[]gauge, name, help string, read func(*facts) float64) {
		*list = append(*list, gauge{prometheus.NewDesc(name, help, []string{"model_name"}, nil), prometheus.GaugeValue, read, true})
	}
	const gaugeValue, counter = prometheus.GaugeValue, prometheus.CounterValue
	running := func(f *facts) float64 { return float64(f.load.Running) }
	waiting := func(f *facts) float64 { return float64(f.load.Waiting) }
	of(&g.ofQueue, gaugeValue, "ninfer_max_concurrency", "Most requests that run at a time.", func(f *facts) float64 { return float64(f.model.Concurrency) })
	of(&g.ofQueue, gaugeValue, "ninfer_max_context_tokens", "Most tokens of a sequence, prompt and output together.", func(f *facts) float64 { return float64(f.model.Front.Context()) })
	of(&g.ofQueue, gaugeValue, "ninfer_requests_running", "Requests that run.", running)
	of(&g.ofQueue, gaugeValue, "ninfer_requests_waiting", "Requests that wait for their turn.", waiting)
	alias(&g.ofQueue, "vllm:num_requests_running", "ninfer_requests_running, by the name that inference gateways look for.", running)
	alias(&g.ofQueue, "vllm:num_requests_waiting", "ninfer_requests_waiting, by the name that inference gateways look for.", waiting)

	used := func(f *facts) float64 { return float64(f.activity.Reserved) / float64(f.activity.Pages) }
	of(&g.ofEngine, gaugeValue, "ninfer_requests_prefilling", "Running requests of whose prompt a part has still to run.", func(f *facts) float64 { return float64(f.activity.Prefilling) })
	of(&g.ofEngine, gaugeValue, "ninfer_requests_decode_ready", "Running requests that take part in the next decoding round.", func(f *facts) float64 { return float64(f.activity.DecodeReady) })
	of(&g.ofEngine, gaugeValue, "ninfer_device_kv_used_pages", "Pages of the cache that running requests have reserved.", func(f *facts) float64 { return float64(f.activity.Reserved) })
	of(&g.ofEngine, gaugeValue, "ninfer_device_kv_capacity_pages", "Pages of the cache.", func(f *facts) float64 { return float64(f.activity.Pages) })
	alias(&g.ofEngine, "vllm:kv_cache_usage_perc", "Reserved part of the cache, 0 to 1, by the name that inference gateways look for.", used)
	alias(&g.ofEngine, "vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc, by its older name.", used)
	for _, c := range []struct {
		name, help string
		read       func(*engine.Activity) int64
	}{
		{"ninfer_prompt_tokens_total", "Tokens of the prompts of requests that got their turn.", func(a *engine.Activity) int64 { return a.PromptTokens }},
		{"ninfer_prefill_tokens_total", "Tokens that ran in passes over prompts and over text inserted into output.", func(a *engine.Activity) int64 { return a.PrefillTokens }},
		{"ninfer_generation_tokens_total", "Tokens of output, inserted ones included.", func(a *engine.Activity) int64 { return a.GeneratedTokens }},
		{"ninfer_decode_tokens_total", "Tokens of output that came from decoding rounds, accepted drafts included.", func(a *engine.Activity) int64 { return a.DecodeTokens }},
		{"ninfer_spec_decode_rounds_total", "Decoding rounds with drafts, counted for each request.", func(a *engine.Activity) int64 { return a.Rounds }},
		{"ninfer_spec_decode_draft_tokens_total", "Drafted tokens.", func(a *engine.Activity) int64 { return a.Drafted }},
		{"ninfer_spec_decode_accepted_tokens_total", "Drafted tokens that became output.", func(a *engine.Activity) int64 { return a.Accepted }},
		{"ninfer_spec_decode_fallback_steps_total", "Decoding rounds without drafts of requests that draft, counted for each request.", func(a *engine.Activity) int64 { return a.FallbackSteps }},
	} {
		of(&g.ofEngine, counter, c.name, c.help, func(f *facts) float64 { return float64(c.read(&f.activity)) })
	}
	of(&g.ofEngine, gaugeValue, "ninfer_device_state_used_slots", "Slots for the state of a sequence that running requests hold.", func(f *facts) float64 { return float64(f.activity.Running) })
	of(&g.ofEngine, gaugeValue, "ninfer_device_state_capacity_slots", "Slots for the state of a sequence.", func(f *facts) float64 { return float64(f.activity.Lanes) })
	of(&g.ofEngine, counter, "ninfer_device_wait_seconds_total", "Time in which the engine launched passes of the device and waited for them.", func(f *facts) float64 { return f.activity.DeviceWait.Seconds() })
	const host = "ninfer_host_work_seconds_total"
	for _, c := range []struct {
		phase string
		read  func(*engine.Activity) time.Duration
	}{
		{"prefill", func(a *engine.Activity) time.Duration { return a.PromptWork }},
		{"decode", func(a *engine.Activity) time.Duration { return a.RoundWork }},
	} {
		g.ofEngine = append(g.ofEngine, gauge{
			desc: prometheus.NewDesc(host, "Time of the engine's units of work apart from waiting for the device.", nil, prometheus.Labels{"phase": c.phase}),
			kind: counter, read: func(f *facts) float64 { return c.read(&f.activity).Seconds() },
		})
	}
	return g
}

// Describe is of prometheus.Collector.
func (g *gauges) Describe(out chan<- *prometheus.Desc) {
	out <- g.ready
	out <- g.info
	for _, list := range [][]gauge{g.ofQueue, g.ofEngine} {
		for _, m := range list {
			out <- m.desc
		}
	}
}

// Collect is of prometheus.Collector. While the model is loading only its absence is known.
func (g *gauges) Collect(out chan<- prometheus.Metric) {
	ready := 0.0
	if g.server.state() == "ready" {
		ready = 1
	}
	out <- prometheus.MustNewConstMetric(g.ready, prometheus.GaugeValue, ready)
	f := facts{model: g.server.serving()}
	if f.model == nil {
		return
	}
	name := g.server.opt.ModelID
	out <- prometheus.MustNewConstMetric(g.info, prometheus.GaugeValue, 1, name, f.model.File)
	f.load = f.model.Queue.Load()
	lists := [][]gauge{g.ofQueue}
	if f.model.Activity != nil {
		f.activity = f.model.Activity()
		lists = append(lists, g.ofEngine)
	}
	for _, list := range lists {
		for _, m := range list {
			var labels []string
			if m.named {
				labels = []string{name}
			}
			out <- prometheus.MustNewConstMetric(m.desc, m.kind, m.read(&f), labels...)
		}
	}
}
