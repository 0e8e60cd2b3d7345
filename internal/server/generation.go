package server

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"ninfer/internal/engine"
	"ninfer/internal/front"
)

// generation is one request that runs the model, whatever its protocol.
type generation struct {
	server   *Server
	exchange *exchange
	prepared *front.Prepared
	output   *output
	ticket   *engine.Ticket
	created  int64
	start    time.Time
	left     bool // the client could not be reached

	wanted    logprobWish
	timed     bool // timings with every piece
	draft     int  // drafts a round
	submitted time.Time
	concluded bool
}

// protocol tells a client what a generation gives, in the shapes of one API. Its methods are called by the request's goroutine: whole,
// or begin, show any number of times, and then end or broken.
type protocol interface {
	name() string // in the log
	whole(items []item, out engine.Outcome) any
	begin(ev *events) error
	show(ev *events, items []item) error
	end(ev *events, out engine.Outcome) error
	broken(ev *events, f *failure) error
	silent(ev *events) error // a sign of life, after KeepAlive without an event
}

// leaver is a protocol that keeps something of a stream whose client left.
type leaver interface{ abandoned() }

// generate serves a route that runs the model. read takes a body apart and says who tells the answer.
func (s *Server) generate(x *exchange, read func(data []byte, g *generation) (p protocol, req *front.Request, stream bool, refused *failure)) {
	g := &generation{server: s, exchange: x, start: time.Now()}
	g.created = g.start.Unix()
	if err := g.run(read); err != nil {
		f := failureOf(err)
		if g.ticket == nil {
			g.reject(f)
		}
		s.logRefusal(x, f, err)
		x.fail(f)
	}
}

// errAborted is a defect of ours while an answer was written.
var errAborted = errors.New("the answer was given up")

// run returns an error while nothing of the answer has been sent.
func (g *generation) run(read func([]byte, *generation) (protocol, *front.Request, bool, *failure)) error {
	s := g.server
	m, refused := s.available()
	if refused != nil {
		return refused
	}
	data, release, refused := s.readBody(g.exchange)
	if refused != nil {
		return refused
	}
	defer func() { release() }()
	p, req, stream, refused := read(data, g)
	if refused != nil {
		return refused
	}
	// The client's leaving ends this context, and so does our giving up on it.
	ctx, cancel := context.WithCancel(g.exchange.r.Context())
	defer cancel()
	slot, err := m.Queue.Reserve(ctx)
	if err != nil {
		return err
	}
	defer slot.Release()
	if g.prepared, err = m.Front.Prepare(*req); err != nil {
		return err
	}
	record := g.started(req, p.name(), stream)
	data, req.Messages, req.Prompt = nil, nil, nil
	release()
	release = func() {}
	if g.draft = m.Draft; g.wanted.top > 0 {
		g.draft = 0 // docs/serving.md, Log-probabilities
	}
	g.submitted = time.Now()
	g.output = newOutput(g)
	ticket, err := slot.Submit(engine.Request{
		Prompt: g.prepared.Prompt, MaxNew: g.prepared.MaxNew, Sampling: engine.Sampling(g.prepared.Sampling), StopIDs: g.prepared.StopIDs,
		Watcher: g.output, Draft: g.draft, Progress: g.output.progress, Logprobs: g.wanted.logprobs, Top: g.wanted.top,
	})
	if err != nil {
		return err
	}
	g.ticket = ticket
	if record != nil {
		s.opt.Journal.put("request_start", record)
	}
	// Whatever goes wrong, a request that started ends.
	defer func() {
		if !g.concluded {
			slot.Release()
			out, _ := ticket.Outcome()
			g.conclude(p.name(), out, errAborted)
		}
	}()
	if stream {
		g.stream(ctx, cancel, p)
		return nil
	}
	return g.whole(p)
}

// whole waits for the end and answers at once. A client that leaves ends the ticket through its context.
func (g *generation) whole(p protocol) error {
	out, err := g.ticket.Outcome()
	items := g.output.finish()
	if err != nil {
		g.conclude(p.name(), out, err)
		return err
	}
	if out.Reason != engine.Cancelled {
		control := http.NewResponseController(g.exchange.w)
		control.SetWriteDeadline(time.Now().Add(g.server.opt.Stall))
		defer control.SetWriteDeadline(time.Time{})
		switch answer := p.whole(items, out).(type) {
		case *failure:
			g.conclude(p.name(), out, answer)
			return answer
		default:
			g.exchange.reply(http.StatusOK, answer)
		}
		control.Flush() // under the deadline, and before the place is given back
	}
	g.conclude(p.name(), out, nil)
	return nil
}

// stream sends events as they come. It cancels the request if the client cannot be reached.
func (g *generation) stream(ctx context.Context, cancel context.CancelFunc, p protocol) {
	ev := g.server.events(g.exchange)
	defer ev.close()
	err := p.begin(ev)
	silence := time.NewTimer(g.server.opt.KeepAlive)
	defer silence.Stop()
	for err == nil {
		select {
		case <-g.output.wake:
			err = p.show(ev, g.output.take())
		case <-g.ticket.Done():
			out, failed := g.ticket.Outcome()
			err = p.show(ev, g.output.finish())
			switch {
			case err != nil:
			case failed != nil:
				err = p.broken(ev, g.exchange.spell(failureOf(failed)))
			case out.Reason == engine.Cancelled: // the client has left
			default:
				err = p.end(ev, out)
			}
			g.left = err != nil
			g.conclude(p.name(), out, failed)
			if l, ok := p.(leaver); ok && (g.left || failed == nil && out.Reason == engine.Cancelled) {
				l.abandoned()
			}
			return
		case <-silence.C:
			err = p.silent(ev)
		case <-ctx.Done():
			err = ctx.Err()
		}
		silence.Reset(g.server.opt.KeepAlive)
	}
	g.left = true
	cancel()
	out, failed := g.ticket.Outcome() // within one unit of work
	g.conclude(p.name(), out, failed)
	if l, ok := p.(leaver); ok {
		l.abandoned()
	}
}

// silent is what all protocols can do.
func (g *generation) silent(ev *events) error { return ev.comment("keep-alive") }

// told is an answer as a whole.
type told struct {
	reasoning, text string
	calls           []front.Event
	stop            string // the stop string that ended it, if one did
}

// collect puts the events of a whole answer together.
func collect(items []item) told {
	var t told
	var reasoning, text strings.Builder
	for _, it := range items {
		if it.progress {
			continue
		}
		switch it.event.Kind {
		case front.Reasoning:
			reasoning.WriteString(it.event.Text)
		case front.Answer:
			text.WriteString(it.event.Text)
		case front.Call:
			t.calls = append(t.calls, it.event)
		case front.End:
			t.stop = it.event.Text
		}
	}
	t.reasoning, t.text = reasoning.String(), text.String()
	return t
}

// usage is the count of tokens as OpenAI's older routes tell it.
func (g *generation) usage() usage {
	counts := g.output.session.Usage()
	u := usage{Prompt: counts.Prompt, Completion: counts.Completion, Total: counts.Prompt + counts.Completion}
	u.PromptDetails.Cached = g.output.times().cached
	u.CompletionDetails.Reasoning = counts.Reasoning
	return u
}

// timings are those of a finished request.
func (g *generation) timings(out engine.Outcome) *timings {
	t := g.output.times().timings()
	if n := out.Stats.Drafted; n > 0 {
		t.DraftN, t.DraftAccepted = &n, &out.Stats.Accepted
	}
	return t
}

// progress is how far the prompt was when an item came.
func (g *generation) progress(it item) *progress {
	return &progress{
		Total: len(g.prepared.Prompt), Cache: it.clock.cached, Processed: it.clock.prompt,
		TimeMS: milliseconds(it.clock.processed.Sub(it.clock.admitted)),
	}
}
