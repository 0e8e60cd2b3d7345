package server

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"net/http"
	"strings"
	"time"
)

// events writes a stream of server-sent events, one flush for each. A write that makes no way for Stall fails, and so do all after it.
type events struct {
	w       http.ResponseWriter
	control *http.ResponseController
	stall   time.Duration
	until   time.Time // the deadline that is set
	buf     []byte
}

// events sends the header of a stream. close must follow in the end.
func (s *Server) events(x *exchange) *events {
	h := x.w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no")
	x.w.WriteHeader(http.StatusOK)
	return &events{w: x.w, control: http.NewResponseController(x.w), stall: s.opt.Stall}
}

// send sends a value as a data event.
func (e *events) send(v any) error { return e.sendAs("", v) }

// sendAs sends a value as a data event of a name; an empty one is none.
func (e *events) sendAs(name string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		panic("server: an event is not JSON: " + err.Error())
	}
	e.buf = append(append(append(e.buf[:0], opening(name)...), b...), "\n\n"...)
	return e.write(e.buf)
}

// opening is what stands before the value of an event.
func opening(name string) string {
	if name == "" {
		return "data: "
	}
	return "event: " + name + "\ndata: "
}

// frame is a data event of which only one string changes from one to the next.
type frame struct{ head, tail string }

// newFrame takes apart an event, with a name or without, whose only string "\x00" is the one that changes.
func newFrame(name string, v any) frame {
	b, err := json.Marshal(v)
	if err != nil {
		panic("server: an event is not JSON: " + err.Error())
	}
	const mark = `"\u0000"`
	at := strings.LastIndex(string(b), mark)
	if at < 0 {
		panic("server: an event has no string that changes")
	}
	return frame{opening(name) + string(b[:at]), string(b[at+len(mark):]) + "\n\n"}
}

// sendText sends a frame with its string.
func (e *events) sendText(f frame, text string) error {
	e.buf = append(e.buf[:0], f.head...)
	e.buf, _ = jsontext.AppendQuote(e.buf, text) // the text is UTF-8
	e.buf = append(e.buf, f.tail...)
	return e.write(e.buf)
}

// comment sends a line that clients skip.
func (e *events) comment(text string) error { return e.write([]byte(": " + text + "\n\n")) }

// done ends a stream of Chat Completions.
func (e *events) done() error { return e.write([]byte("data: [DONE]\n\n")) }

// write sends an event. The deadline is set anew when a quarter of the time is over: to set it for each event would cost as much as to
// write one.
func (e *events) write(text []byte) error {
	if now := time.Now(); e.until.Sub(now) < e.stall*3/4 {
		e.until = now.Add(e.stall)
		e.control.SetWriteDeadline(e.until)
	}
	if _, err := e.w.Write(text); err != nil {
		return err
	}
	return e.control.Flush()
}

// close leaves the connection without a deadline.
func (e *events) close() { e.control.SetWriteDeadline(time.Time{}) }
