package server

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"ninfer/internal/engine"
	"ninfer/internal/front"
)

// The schema of the machine log. A member that changes its meaning or goes away makes a new version, one that is added does not.
const (
	journalSchema  = "ninfer.request_log"
	journalVersion = 1
)

// Journal is the log for machines (docs/serving.md, Machine log): a JSON object a line for every event, written at once. There are no texts in it of
// prompts, output or errors; the ids of the output's tokens are, and whoever has the tokenizer can read those. A nil Journal does nothing.
type Journal struct {
	log      *slog.Logger
	instance string
	key      string

	mu     sync.Mutex // one line at a time
	w      io.Writer
	broken bool // an error was told
}

// NewJournal returns a journal that writes to w, every event with one call. The key is never in it; what cannot be written is told once.
func NewJournal(w io.Writer, key string, log *slog.Logger) *Journal {
	return &Journal{log: log, instance: randomHex(16), key: key, w: w}
}

// journalHead starts every event.
type journalHead struct {
	Schema   string `json:"schema"`
	Version  int    `json:"schema_version"`
	Time     int64  `json:"timestamp_unix_ms"`
	Instance string `json:"server_instance_id"`
	Event    string `json:"event"`
}

// put writes an event. members is a struct.
func (j *Journal) put(event string, members any) {
	if j == nil {
		return
	}
	j.mu.Lock() // with it times never go back
	defer j.mu.Unlock()
	head, err := json.Marshal(journalHead{journalSchema, journalVersion, time.Now().UnixMilli(), j.instance, event})
	if err == nil {
		var more []byte
		more, err = json.Marshal(members)
		head = append(append(head[:len(head)-1], ','), more[min(1, len(more)):]...)
	}
	if err != nil {
		panic("server: an event of the journal is not JSON: " + err.Error())
	}
	if _, err = j.w.Write(append(head, '\n')); err != nil && !j.broken {
		j.log.Error("the request log cannot be written", "error", err)
	}
	j.broken = err != nil
}

// clean makes a client's text fit to be kept.
func (j *Journal) clean(text string) string {
	const most = 256
	text = strings.ToValidUTF8(text, "\ufffd")
	if j.key != "" {
		text = strings.ReplaceAll(text, j.key, "***")
	}
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "")
	}
	return text
}

// StartRecord is what server_start tells.
type StartRecord struct {
	Version        string `json:"version"`
	Arguments      string `json:"arguments"` // without the key
	Model          string `json:"model"`
	File           string `json:"file"`
	Address        string `json:"address"`
	Device         string `json:"device"`
	MaxContext     int    `json:"max_context"`
	MaxConcurrency int    `json:"max_concurrency"`
	MaxPending     int    `json:"max_pending_requests"`
	KVPages        int    `json:"kv_pages"`
	PageTokens     int    `json:"kv_page_tokens"`
	DraftWindow    int    `json:"draft_window"`
}

// Start notes that a server begins. Call it before any request.
func (j *Journal) Start(r StartRecord) { j.put("server_start", r) }

// rejectedRecord is a request that never got a place in the queue.
type rejectedRecord struct {
	ID     string `json:"request_id"`
	Route  string `json:"route"`
	Status int    `json:"status"`
	Code   string `json:"code"`
}

// startedRecord is a request that has its place.
type startedRecord struct {
	ID       string        `json:"request_id"`
	Route    string        `json:"route"`
	Protocol string        `json:"protocol"`
	Stream   bool          `json:"stream"`
	Prompt   int           `json:"prompt_tokens"`
	MaxNew   int           `json:"max_new_tokens"`
	Sampler  samplerRecord `json:"sampler"`
	Seed     uint64        `json:"seed"`
	Effort   *string       `json:"reasoning_effort"` // null: the template's default
	Thinking bool          `json:"thinking"`
	Budget   *int          `json:"thinking_budget"` // null: nothing will be inserted
	Shape    shapeRecord   `json:"shape"`
	Agent    string        `json:"user_agent"`
	Tools    *string       `json:"tool_digest"` // SHA-256 of the declarations as received, null without
}

type samplerRecord struct {
	Temperature float64 `json:"temperature"`
	TopP        float64 `json:"top_p"`
	TopK        int     `json:"top_k"`
	MinP        float64 `json:"min_p"`
	Presence    float64 `json:"presence_penalty"`
	Frequency   float64 `json:"frequency_penalty"`
}

// shapeRecord is what a request is made of.
type shapeRecord struct {
	Messages int  `json:"messages"` // 0: the prompt came without a conversation
	Tools    int  `json:"tools"`
	Stops    int  `json:"stops"`
	Logprobs bool `json:"logprobs"`
	Top      int  `json:"top_logprobs"`
}

// started takes what a request is made of, before its parts are dropped.
func (g *generation) started(req *front.Request, protocol string, stream bool) *startedRecord {
	j := g.server.opt.Journal
	if j == nil {
		return nil
	}
	p := g.prepared
	s := p.Sampling
	r := &startedRecord{
		ID: g.exchange.id, Route: g.exchange.r.URL.Path, Protocol: protocol, Stream: stream, Prompt: len(p.Prompt), MaxNew: p.MaxNew, Seed: s.Seed, Thinking: p.Thinking,
		Sampler: samplerRecord{s.Temperature, s.TopP, s.TopK, s.MinP, s.Presence, s.Frequency},
		Shape:   shapeRecord{len(req.Messages), len(req.Tools), len(req.Stop), g.wanted.logprobs, g.wanted.top},
		Agent:   j.clean(g.exchange.r.UserAgent()),
	}
	if p.Effort != "" {
		r.Effort = &p.Effort
	}
	if p.Budget > 0 {
		r.Budget = &p.Budget
	}
	if len(req.Tools) > 0 {
		digest := toolDigest(req.Tools)
		r.Tools = &digest
	}
	return r
}

// toolDigest is the SHA-256 of declarations, each as received and followed by a line break.
func toolDigest(tools []jsontext.Value) string {
	sum := sha256.New()
	for _, t := range tools {
		sum.Write(t)
		sum.Write([]byte{'\n'})
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// endedRecord is the end of a started request: of request_done, and with status and code of request_error.
type endedRecord struct {
	ID          string           `json:"request_id"`
	Protocol    string           `json:"protocol"`
	Reason      string           `json:"finish_reason"`
	Status      int              `json:"status,omitzero"` // of an error
	Code        string           `json:"code,omitzero"`
	Prompt      int              `json:"prompt_tokens"`
	Completion  int              `json:"completion_tokens"`
	Cached      int              `json:"cached_tokens"`
	Computed    int              `json:"computed_tokens"` // of the prompt
	ReusePath   string           `json:"reuse_path"`
	Tools       *toolRecord      `json:"tool_parse"` // null: calls were not looked for
	Thinking    thinkingRecord   `json:"thinking"`
	Timings     timingRecord     `json:"timings_seconds"`
	Speculative *speculateRecord `json:"speculative"` // null: the request did not draft
	IDs         []int32          `json:"generated_token_ids"`
}

type toolRecord struct {
	Marker     bool    `json:"marker_seen"`
	Calls      int     `json:"calls"`
	Omitted    int     `json:"omitted_arguments"`
	Mismatches int     `json:"mismatched_arguments"`
	Fallback   *string `json:"fallback_reason"`
}

// thinkingRecord is the use of the budget.
type thinkingRecord struct {
	Budget *int `json:"budget"`
	Used   int  `json:"tokens"` // reasoning, closing marker included
}

// timingRecord has times since the step before; null where it was not reached.
type timingRecord struct {
	Prepare *float64 `json:"prepare"` // arrival to a place in the queue
	Queue   *float64 `json:"queue"`   // to its turn
	Prefill *float64 `json:"prefill"` // to the first token
	Decode  *float64 `json:"decode"`  // to the last
	TTFT    *float64 `json:"ttft"`    // arrival to the first token
	Total   *float64 `json:"total"`   // arrival to the end
}

type speculateRecord struct {
	Backend     string `json:"backend"`
	Window      int    `json:"draft_window"`
	Rounds      int    `json:"rounds"`
	Drafted     int    `json:"drafted_tokens"`
	Accepted    int    `json:"accepted_tokens"`
	Fallback    int    `json:"fallback_steps"`
	PerPosition []int  `json:"accepted_per_position"`
}

// seconds is the time between two moments, nil if one has not come.
func seconds(from, to time.Time) *float64 {
	if from.IsZero() || to.IsZero() {
		return nil
	}
	s := to.Sub(from).Seconds()
	return &s
}

// conclude notes the end of a request that was submitted, in the log, the metrics and the journal. It does so once.
func (g *generation) conclude(protocol string, out engine.Outcome, err error) {
	if g.concluded {
		return
	}
	g.concluded = true
	g.log(protocol, out, err)
	outcome := outcomeStop
	switch {
	case g.left || err == nil && out.Reason == engine.Cancelled:
		outcome = outcomeLeft
	case err != nil:
		outcome = outcomeError
	case out.Reason != engine.Stop:
		outcome = outcomeLength
	}
	m := g.server.metrics
	m.requests.WithLabelValues(outcome).Inc()
	end := time.Now()
	m.duration.Observe(end.Sub(g.start).Seconds())
	j := g.server.opt.Journal
	if j == nil {
		return
	}
	t, u := g.output.times(), g.output.session.Usage()
	r := endedRecord{
		ID: g.exchange.id, Protocol: protocol, Reason: outcome, Prompt: u.Prompt, Completion: u.Completion, Cached: t.cached,
		Computed: t.prompt - t.cached, ReusePath: "root", Thinking: thinkingRecord{Used: u.Reasoning}, IDs: out.IDs,
		Timings: timingRecord{
			Prepare: seconds(g.start, g.submitted), Queue: seconds(g.submitted, t.admitted), Prefill: seconds(t.admitted, t.first),
			Decode: seconds(t.first, t.last), TTFT: seconds(g.start, t.first), Total: seconds(g.start, end),
		},
	}
	if g.prepared.Budget > 0 {
		r.Thinking.Budget = &g.prepared.Budget
	}
	if g.prepared.ReadsCalls() {
		calls := g.output.session.Calls()
		r.Tools = &toolRecord{Marker: calls.Marker, Calls: calls.Calls, Omitted: calls.Omitted, Mismatches: calls.Mismatches}
		if why := string(calls.Fallback); why != "" {
			r.Tools.Fallback = &why
		}
	}
	if st := out.Stats; g.draft > 0 {
		r.Speculative = &speculateRecord{"mtp", g.draft, st.Rounds, st.Drafted, st.Accepted, st.FallbackSteps, st.AcceptedAt}
	}
	if outcome != outcomeError {
		j.put("request_done", r)
		return
	}
	f := failureOf(err)
	r.Status, r.Code = f.status, f.code
	j.put("request_error", r)
}

// reject notes a request that never got a place in the queue.
func (g *generation) reject(f *failure) {
	g.server.metrics.requests.WithLabelValues(outcomeRejected).Inc()
	g.server.opt.Journal.put("request_rejected", rejectedRecord{g.exchange.id, g.exchange.r.URL.Path, f.status, f.code})
}

// throughputRecord is the work of an interval.
type throughputRecord struct {
	Interval    float64 `json:"interval_seconds"`
	Decode      int64   `json:"decode_tokens"`
	DecodeRate  float64 `json:"decode_tokens_per_second"`
	Prefill     int64   `json:"prefill_tokens"`
	PrefillRate float64 `json:"prefill_tokens_per_second"`
	Running     int     `json:"running"`
	Waiting     int     `json:"waiting"`
	Prefilling  int     `json:"prefilling"`
	MeanBatch   float64 `json:"mean_batch"` // sequences of a decoding round
	HostShare   float64 `json:"host_share"` // of the engine's time, what it did not wait for the device
}

// engine adds what the engine did between two looks at it.
func (r *throughputRecord) engine(now, before engine.Activity) {
	r.Prefilling = now.Prefilling
	if n := now.DecodeUnits - before.DecodeUnits; n > 0 {
		r.MeanBatch = float64(now.DecodeLanes-before.DecodeLanes) / float64(n)
	}
	host := now.PromptWork + now.RoundWork - before.PromptWork - before.RoundWork
	if all := host + now.DeviceWait - before.DeviceWait; all > 0 {
		r.HostShare = host.Seconds() / all.Seconds()
	}
}
