package server

import (
	"encoding/json/v2"
	"net/http"
	"time"
)

// events writes a stream of server-sent events, one flush for each. A write that makes no way for Stall fails, and so do all after it.
type events struct {
	w       http.ResponseWriter
	control *http.ResponseController
	stall   time.Duration
}

// events sends the header of a stream.
func (s *Server) events(x *exchange) *events {
	h := x.w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no")
	x.w.WriteHeader(http.StatusOK)
	return &events{x.w, http.NewResponseController(x.w), s.opt.Stall}
}

// send sends a value as a data event.
func (e *events) send(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		panic("server: an event is not JSON: " + err.Error())
	}
	return e.write("data: " + string(b) + "\n\n")
}

// comment sends a line that clients skip.
func (e *events) comment(text string) error { return e.write(": " + text + "\n\n") }

// done ends a stream of Chat Completions.
func (e *events) done() error { return e.write("data: [DONE]\n\n") }

func (e *events) write(text string) error {
	e.control.SetWriteDeadline(time.Now().Add(e.stall))
	defer e.control.SetWriteDeadline(time.Time{})
	if _, err := e.w.Write([]byte(text)); err != nil {
		return err
	}
	return e.control.Flush()
}
