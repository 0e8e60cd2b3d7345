// Package server is the HTTP side: OpenAI's Chat Completions, Completions and Responses, Anthropic's Messages, what serves them (models,
// tokens, rendering, health, the page), over one model and one queue. openapi.yaml describes every route.
//
// A protocol reads its body into a front.Request and tells what the generation gives (type protocol). What lies between is the same for
// all: the same conversation is the same prompt, and the same output has the same text, calls and counts.
//
// A Server answers from the moment its socket is open. Until Ready is called it says that it is loading; after its context has ended it
// refuses new requests, lets those that run finish within a grace time and cancels the rest, each with an answer. A failure of the engine
// ends it with an error.
//
// What a client sends never changes what another one gets: bodies, places in the queue and buffered output are bounded, answers are
// written outside the engine's goroutine, and a client that leaves or stops reading ends its own request only. Texts of clients and of
// the model are never logged.
package server

import (
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"ninfer/internal/engine"
	"ninfer/internal/front"
)

// Options are the settings of a server. Zero durations and MaxBody mean the product's values.
type Options struct {
	ModelID string
	APIKey  string // empty: no authentication
	CORS    bool
	MaxBody int64 // most bytes of a request's body
	Log     *slog.Logger

	// Journal is the log for machines; nil is none.
	Journal *Journal

	// Page returns the handler of a file of the chat page, nil if it has none at that path. Nil is no page.
	Page func(path string) http.Handler

	// The store of Responses: most responses, and most bytes of all they hold. Zero means the product's values.
	StoreRecords int
	StoreBytes   int64

	StatsInterval time.Duration // between throughput lines while active; 0 is none
	KeepAlive     time.Duration // silence in a stream after which a comment is sent
	Grace         time.Duration // time that requests have to finish when the server ends
	Stall         time.Duration // a client that takes or sends nothing for so long is given up
}

// Model is what a server serves.
type Model struct {
	Front *front.Front
	Queue *engine.Queue
	Draft int // drafts a round

	// Activity tells what the engine is doing, without waiting for it; nil leaves that out of the metrics.
	Activity func() engine.Activity

	Concurrency int    // sequences at a time
	File        string // name of the artifact's entry file, without folders
}

// Server answers HTTP requests. Make one with New.
type Server struct {
	opt     Options
	key     [sha256.Size]byte
	created int64
	ready   chan struct{} // closed by Ready, after model is set
	model   Model

	routes    map[string]handlers
	preparing chan struct{} // holds one for each preparation under way outside of generations
	ending    atomic.Bool

	bodies   atomic.Int64 // bytes of bodies in memory
	store    *responseStore
	counters counters
	metrics  *metrics
}

// New returns a server that is loading.
func New(opt Options) *Server {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&opt.KeepAlive, 5*time.Second)
	def(&opt.Grace, 10*time.Second)
	def(&opt.Stall, 30*time.Second)
	if opt.MaxBody == 0 {
		opt.MaxBody = 384 << 20
	}
	if opt.StoreRecords == 0 {
		opt.StoreRecords = 1024
	}
	if opt.StoreBytes == 0 {
		opt.StoreBytes = 256 << 20
	}
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		opt: opt, key: sha256.Sum256([]byte(opt.APIKey)), created: time.Now().Unix(), ready: make(chan struct{}),
		preparing: make(chan struct{}, runtime.GOMAXPROCS(0)), store: newResponseStore(opt.StoreRecords, opt.StoreBytes),
	}
	s.metrics = newMetrics(s)
	s.routes = s.fixed()
	return s
}

// Ready makes the server accept requests for the model. Call it once. The server drains the queue when it ends.
func (s *Server) Ready(m Model) {
	s.model = m
	close(s.ready)
}

// serving returns the model, or nil while loading.
func (s *Server) serving() *Model {
	select {
	case <-s.ready:
		return &s.model
	default:
		return nil
	}
}

// Serve answers on a listener until the context ends, and returns nil when all requests have their answers; or until the engine or the
// listener fails, and returns why. It closes the listener.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	hs := &http.Server{
		Handler: s, ReadTimeout: s.opt.Stall, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(s.opt.Log.Handler(), slog.LevelDebug),
	}
	broken := make(chan error, 1)
	go func() { broken <- hs.Serve(l) }()

	var stats sync.WaitGroup
	statsEnd, stopStats := context.WithCancel(context.Background())
	defer stats.Wait()
	defer stopStats()
	// The end of the server may come before the model is there.
	var failed <-chan struct{}
	ready := s.ready
	var err error
	for wait := true; wait; {
		wait = false
		select {
		case <-ready:
			ready, failed, wait = nil, s.model.Queue.Failed(), true
			stats.Go(func() { s.throughput(statsEnd) })
		case <-ctx.Done():
		case <-failed:
			err = s.model.Queue.Failure()
		case err = <-broken:
			broken <- http.ErrServerClosed
		}
	}
	s.finish(hs)
	if e := <-broken; err == nil && !errors.Is(e, http.ErrServerClosed) {
		err = e
	}
	return err
}

// finish ends requests and connections. Connections that have no request do not delay it.
func (s *Server) finish(hs *http.Server) {
	s.ending.Store(true)
	end, cancel := context.WithCancel(context.Background())
	defer cancel()
	closed := make(chan error, 1)
	go func() { closed <- hs.Shutdown(end) }() // closes the listener at once
	if m := s.serving(); m != nil {
		grace, cancel := context.WithTimeout(context.Background(), s.opt.Grace)
		defer cancel()
		m.Queue.Drain(grace)
	}
	// All answers are written; their handlers have yet to return.
	select {
	case <-closed:
	case <-time.After(500 * time.Millisecond):
		hs.Close()
		cancel()
		<-closed
	}
}
