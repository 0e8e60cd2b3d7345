package server

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"

	"ninfer/internal/engine"
)

// Levels beside slog's own.
const (
	LevelTrace    = slog.Level(-8)
	LevelCritical = slog.Level(12)
	levelOff      = slog.Level(100)
)

// ParseLevel reads a level by the names of --log-level.
func ParseLevel(name string) (slog.Level, bool) {
	l, ok := map[string]slog.Level{
		"trace": LevelTrace, "debug": slog.LevelDebug, "info": slog.LevelInfo, "warning": slog.LevelWarn, "error": slog.LevelError,
		"critical": LevelCritical, "off": levelOff,
	}[name]
	return l, ok
}

// NewLog returns a logger for people: local time, level and text, two blanks apart, attributes behind " | ". Control characters never
// make a second line.
func NewLog(w io.Writer, level slog.Level) *slog.Logger {
	return slog.New(&lineHandler{out: &lineWriter{w: w}, level: level})
}

type lineWriter struct {
	mu sync.Mutex // one line at a time
	w  io.Writer
}

type lineHandler struct {
	out   *lineWriter
	level slog.Level
	attrs string
}

// Enabled is of slog.Handler.
func (h *lineHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= h.level }

// WithAttrs is of slog.Handler.
func (h *lineHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	c := *h
	for _, a := range attrs {
		c.attrs += attrText(a)
	}
	return &c
}

// WithGroup is of slog.Handler; groups are not shown.
func (h *lineHandler) WithGroup(string) slog.Handler { return h }

func attrText(a slog.Attr) string { return " | " + a.Key + " " + a.Value.Resolve().String() }

// Handle is of slog.Handler.
func (h *lineHandler) Handle(_ context.Context, r slog.Record) error {
	name := map[slog.Level]string{LevelTrace: "trace", slog.LevelWarn: "warning", LevelCritical: "critical"}[r.Level]
	if name == "" {
		name = strings.ToLower(r.Level.String())
	}
	var b strings.Builder
	b.WriteString(r.Time.Local().Format("2006-01-02 15:04:05.000"))
	b.WriteString("  " + name + "  ")
	text := r.Message + h.attrs
	r.Attrs(func(a slog.Attr) bool {
		text += attrText(a)
		return true
	})
	b.WriteString(strings.Map(func(c rune) rune {
		if unicode.IsControl(c) || c == '\u2028' || c == '\u2029' {
			return ' '
		}
		return c
	}, text))
	b.WriteByte('\n')
	h.out.mu.Lock()
	defer h.out.mu.Unlock()
	_, err := io.WriteString(h.out.w, b.String())
	return err
}

// Count writes a number with thousands separators.
func Count(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// logRefusal writes a line for a request that was turned away: whose fault decides how loud. Message and field are not logged, they may
// quote the client.
func (s *Server) logRefusal(x *exchange, f *failure, err error) {
	level := slog.LevelInfo
	switch {
	case f.status == http.StatusInternalServerError:
		s.opt.Log.Error("request failed", "id", x.id, "error", err.Error())
		return
	case f.status >= 500, f.status == http.StatusTooManyRequests:
		level = slog.LevelWarn
	}
	s.opt.Log.Log(context.Background(), level, "request refused", "id", x.id, "status", f.status, "code", f.code)
}

// log writes the line of a request that ran or waited.
func (g *generation) log(protocol string, out engine.Outcome, err error) {
	log := g.server.opt.Log
	t := g.output.times()
	u := g.output.session.Usage()
	reason := string(out.Reason)
	level := slog.LevelInfo
	switch {
	case g.left || err == nil && out.Reason == engine.Cancelled:
		reason = "client_disconnected"
	case err != nil:
		f := failureOf(err)
		if reason, level = f.code, slog.LevelWarn; f.status == http.StatusInternalServerError {
			level = slog.LevelError
		}
	}
	since := func(at time.Time) time.Duration {
		if at.IsZero() {
			return 0
		}
		return at.Sub(g.start).Round(time.Millisecond)
	}
	times := g.timings(out)
	args := []any{
		"protocol", protocol, "prompt", Count(u.Prompt), "output", Count(u.Completion), "reasoning", Count(u.Reasoning),
		"cached", fmt.Sprintf("%d (0%%, root)", t.cached), "first token", since(t.first), "total", time.Since(g.start).Round(time.Millisecond),
		"prefill", fmt.Sprintf("%.1f tok/s", times.PromptPerSecond), "decode", fmt.Sprintf("%.1f tok/s", times.PredictedPerSecond),
	}
	if st := out.Stats; st.Drafted > 0 {
		args = append(args, "accepted", fmt.Sprintf("%d of %d drafts", st.Accepted, st.Drafted))
	}
	calls := g.output.session.Calls()
	if calls.Calls > 0 {
		args = append(args, "tool calls", fmt.Sprintf("%d, %d arguments omitted, %d mismatched", calls.Calls, calls.Omitted, calls.Mismatches))
	}
	if calls.Fallback != "" {
		log.Warn("tool calls left as text", "id", g.exchange.id, "reason", calls.Fallback)
	}
	if err != nil && level == slog.LevelError {
		args = append(args, "error", err.Error())
	}
	log.Log(context.Background(), level, g.exchange.id+" "+reason, args...)
}

// counters are sums since the start.
type counters struct {
	prefill, decode atomic.Int64
}

// throughput writes a line every interval in which something happened, until the context ends.
func (s *Server) throughput(ctx context.Context) {
	if s.opt.StatsInterval <= 0 {
		return
	}
	tick := time.NewTicker(s.opt.StatsInterval)
	defer tick.Stop()
	last := time.Now()
	var prefill, decode int64
	var before engine.Activity
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now, p, d := time.Now(), s.counters.prefill.Load(), s.counters.decode.Load()
		load := s.model.Queue.Load()
		if p != prefill || d != decode || load.Running+load.Waiting > 0 {
			seconds := now.Sub(last).Seconds()
			r := throughputRecord{
				Interval: seconds, Decode: d - decode, DecodeRate: float64(d-decode) / seconds, Prefill: p - prefill, PrefillRate: float64(p-prefill) / seconds,
				Running: load.Running, Waiting: load.Waiting,
			}
			line := []any{
				"interval", now.Sub(last).Round(time.Millisecond),
				"decode", fmt.Sprintf("%.1f tok/s, %s tokens", r.DecodeRate, Count(int(r.Decode))),
				"prefill", fmt.Sprintf("%.1f tok/s, %s tokens", r.PrefillRate, Count(int(r.Prefill))),
				"running", load.Running, "waiting", load.Waiting,
			}
			if s.model.Activity != nil {
				a := s.model.Activity()
				r.engine(a, before)
				before = a
				line = append(line, "prefilling", r.Prefilling, "mean batch", fmt.Sprintf("%.1f", r.MeanBatch), "host", fmt.Sprintf("%.1f %%", 100*r.HostShare))
			}
			s.opt.Log.Info("throughput", line...)
			s.opt.Journal.put("throughput", r)
		}
		last, prefill, decode = now, p, d
	}
}
