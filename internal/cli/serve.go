package cli

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json/v2"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"ninfer/internal/backend"
	"ninfer/internal/engine"
	"ninfer/internal/front"
	"ninfer/internal/server"
	"ninfer/internal/web"
)

type serveCommand struct {
	Artifact string `arg:"" optional:"" help:"Entry file. Default: nano, the model inside the program."`
	syntheticFlags

	Host       string `default:"127.0.0.1" placeholder:"H" help:"Address to listen on."`
	Port       int    `default:"8080" placeholder:"N" help:"Port; 0 picks a free one and prints it."`
	APIKey     string `name:"api-key" placeholder:"KEY" help:"Ask clients for this key."`
	APIKeyFile string `name:"api-key-file" placeholder:"FILE" help:"Read the key from a file."`
	CORS       bool   `name:"cors" help:"Let pages of any origin use the server."`
	ModelID    string `name:"model-id" placeholder:"ID" help:"Public model name. Default: the artifact's name."`

	MaxConcurrency        int    `default:"1" placeholder:"C" help:"Sequences at a time, 1 to 8."`
	MaxPendingRequests    int    `default:"16" placeholder:"N" help:"Requests that may wait."`
	PendingTimeoutMS      int64  `name:"pending-timeout-ms" default:"30000" placeholder:"N" help:"Longest wait for a turn."`
	DefaultMaxTokens      int    `default:"8192" placeholder:"N" help:"Output limit of requests that give none."`
	DefaultThinkingBudget *int   `placeholder:"N" help:"Thinking limit of requests that give none."`
	MaxRequestMiB         int64  `name:"max-request-mib" default:"384" placeholder:"N" help:"Largest request body."`
	ResponseStoreRecords  int    `name:"response-store-max-records" default:"1024" placeholder:"N" help:"Most responses kept for clients to go on from."`
	ResponseStoreMiB      int64  `name:"response-store-max-mib" default:"256" placeholder:"N" help:"Most memory of kept responses."`
	RequestLogJSONL       string `name:"request-log-jsonl" placeholder:"FILE" help:"Append a JSON object a line for every event to this file."`
	LogStatsIntervalMS    int64  `name:"log-stats-interval-ms" default:"5000" placeholder:"N" help:"Time between throughput lines; 0 is none."`

	modelFlags    `embed:""`
	samplingFlags `embed:""`
	reserveFlags  `embed:""`
	plannedFlags  `embed:""`
}

// plannedFlags are options of serve whose feature this build does not have. Those that only say how much may be kept for later requests
// are accepted and reported: nothing is kept. Others are refused unless they ask for nothing, because they would change results.
type plannedFlags struct {
	NoPrefixReuse           bool     `help:"Keep nothing for later requests, as this build always does."`
	DeviceStateSlots        *int64   `hidden:""`
	HostStateSlots          *int64   `hidden:""`
	HostKVMiB               *int64   `name:"host-kv-mib" hidden:""`
	HostContextMiB          *int64   `name:"host-context-mib" hidden:""`
	MaxPrivateContinuations *int64   `hidden:""`
	MaxSharedPrefixes       *int64   `hidden:""`
	MaxLongAnchors          *int64   `name:"max-long-anchors-per-continuation" hidden:""`
	ContextCostPresets      string   `hidden:""`
	MediaCacheMiB           *int64   `name:"media-cache-mib" hidden:""`
	MediaLiveMiB            *int64   `name:"media-live-mib" hidden:""`
	MediaPreprocessThreads  *int64   `hidden:""`
	AllowRemoteMedia        bool     `hidden:""`
	NoLocalMediaURLs        bool     `name:"no-local-media-urls" hidden:""`
	RepetitionPenalty       *float64 `hidden:""`
}

// limit is an option that says how much may be kept for later requests.
type limit struct {
	name string
	v    *int64
}

func (f *plannedFlags) kept() []limit {
	return []limit{
		{"device-state-slots", f.DeviceStateSlots},
		{"host-state-slots", f.HostStateSlots},
		{"host-kv-mib", f.HostKVMiB},
		{"host-context-mib", f.HostContextMiB},
		{"max-private-continuations", f.MaxPrivateContinuations},
		{"max-shared-prefixes", f.MaxSharedPrefixes},
		{"max-long-anchors-per-continuation", f.MaxLongAnchors},
	}
}

// idle are the options that were given and have no effect.
func (f *plannedFlags) idle() string {
	var names []string
	for _, s := range f.kept() {
		if s.v != nil && *s.v > 0 {
			names = append(names, "--"+s.name)
		}
	}
	return strings.Join(names, " ")
}

func (f *plannedFlags) check() error {
	const reuse = "reuse of prompts between requests"
	for _, s := range f.kept() {
		switch {
		case s.v == nil:
		case *s.v < 0:
			return usagef("--%s is %d, need at least 0", s.name, *s.v)
		case f.NoPrefixReuse && s.name != "host-context-mib":
			return usagef("--no-prefix-reuse excludes --%s", s.name)
		}
	}
	if f.HostContextMiB != nil && (f.HostStateSlots != nil || f.HostKVMiB != nil) {
		return usagef("--host-context-mib excludes --host-state-slots and --host-kv-mib")
	}
	const media = "image and video input"
	for _, n := range []struct {
		name    string
		v       *int64
		zero    bool // 0 asks for nothing
		missing string
	}{
		{"media-cache-mib", f.MediaCacheMiB, true, media},
		{"media-live-mib", f.MediaLiveMiB, false, media},
		{"media-preprocess-threads", f.MediaPreprocessThreads, true, media},
	} {
		switch {
		case n.v == nil, *n.v == 0 && n.zero:
		case *n.v < 0:
			return usagef("--%s is %d, need at least 0", n.name, *n.v)
		default:
			return usagef("--%s: this build does not have %s", n.name, n.missing)
		}
	}
	for _, s := range []struct {
		name    string
		given   bool
		missing string
	}{
		{"context-cost-presets", f.ContextCostPresets != "", reuse},
		{"allow-remote-media", f.AllowRemoteMedia, media},
		{"repetition-penalty", f.RepetitionPenalty != nil && *f.RepetitionPenalty != 1, "a repetition penalty; it has --presence-penalty and --frequency-penalty"},
	} {
		if s.given {
			return usagef("--%s: this build does not have %s", s.name, s.missing)
		}
	}
	return nil
}

func (c *serveCommand) check() error {
	switch {
	case c.Host == "":
		return usagef("--host is empty")
	case c.Port < 0 || c.Port > 65535:
		return usagef("--port is %d, need 0 to 65535", c.Port)
	case c.APIKey != "" && c.APIKeyFile != "":
		return usagef("--api-key excludes --api-key-file")
	case c.MaxConcurrency < 1 || c.MaxConcurrency > 8:
		return usagef("--max-concurrency is %d, need 1 to 8", c.MaxConcurrency)
	case c.MaxPendingRequests < 0 || c.MaxPendingRequests > 1<<20:
		return usagef("--max-pending-requests is %d, need 0 to %d", c.MaxPendingRequests, 1<<20)
	case c.PendingTimeoutMS < 1 || c.PendingTimeoutMS > 1<<40:
		return usagef("--pending-timeout-ms is %d, need at least 1", c.PendingTimeoutMS)
	case c.DefaultMaxTokens < 1:
		return usagef("--default-max-tokens is %d, need at least 1", c.DefaultMaxTokens)
	case c.DefaultThinkingBudget != nil && *c.DefaultThinkingBudget < 1:
		return usagef("--default-thinking-budget is %d, need at least 1", *c.DefaultThinkingBudget)
	case c.MaxRequestMiB < 1 || c.MaxRequestMiB > 1<<30:
		return usagef("--max-request-mib is %d, need at least 1", c.MaxRequestMiB)
	case c.ResponseStoreRecords < 1:
		return usagef("--response-store-max-records is %d, need at least 1", c.ResponseStoreRecords)
	case c.ResponseStoreMiB < 1 || c.ResponseStoreMiB > 1<<30:
		return usagef("--response-store-max-mib is %d, need at least 1", c.ResponseStoreMiB)
	case c.LogStatsIntervalMS < 0 || c.LogStatsIntervalMS > 1<<40:
		return usagef("--log-stats-interval-ms is %d, need at least 0", c.LogStatsIntervalMS)
	}
	if err := c.plannedFlags.check(); err != nil {
		return err
	}
	if err := c.reserveFlags.apply(&c.modelFlags); err != nil {
		return err
	}
	c.MaxContext = cmp.Or(c.MaxContext, 8192)
	if err := c.modelFlags.check(c.MaxConcurrency); err != nil {
		return err
	}
	return c.samplingFlags.check()
}

// key is what clients must send, or empty.
func (c *serveCommand) key() (string, error) {
	if c.APIKeyFile == "" {
		return strings.TrimSpace(c.APIKey), nil
	}
	b, err := os.ReadFile(c.APIKeyFile)
	if err != nil {
		return "", fmt.Errorf("--api-key-file: %w", err)
	}
	key := string(bytes.TrimSpace(b))
	if key == "" {
		return "", fmt.Errorf("--api-key-file: %s is empty", c.APIKeyFile)
	}
	return key, nil
}

func (c *serveCommand) Run(e *environment) error {
	if err := c.check(); err != nil {
		return err
	}
	key, err := c.key()
	if err != nil {
		return err
	}
	level, _ := server.ParseLevel(c.LogLevel)
	log := server.NewLog(e.err, level)
	log.Info("start", "version", version(), "arguments", redacted(os.Args[1:]))
	if names := c.idle(); names != "" {
		log.Warn("without effect: this build keeps nothing for later requests", "options", names)
	}
	listener, err := listen(net.JoinHostPort(c.Host, strconv.Itoa(c.Port)))
	if err != nil {
		return hintedError{err, "--port and --host name another place; --port 0 takes any free port"}
	}
	ctx, cancel := c.signals(log)
	defer cancel()
	start := time.Now()
	l, err := c.syntheticFlags.load(e, c.Artifact, &c.modelFlags)
	if err != nil {
		listener.Close()
		return err
	}
	defer l.close()
	if c.Artifact == "" && c.Synthetic == "" {
		c.ModelID = cmp.Or(c.ModelID, "nano")
		c.small()
	}
	c.ModelID = cmp.Or(c.ModelID, l.name())
	journal, closeJournal, err := c.journal(l, key, log)
	if err != nil {
		listener.Close()
		return err
	}
	defer closeJournal()
	s := server.New(server.Options{
		ModelID: c.ModelID, APIKey: key, CORS: c.CORS, MaxBody: c.MaxRequestMiB << 20, Log: log, Journal: journal,
		StoreRecords: c.ResponseStoreRecords, StoreBytes: c.ResponseStoreMiB << 20,
		StatsInterval: time.Duration(c.LogStatsIntervalMS) * time.Millisecond, Page: web.File,
	})
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, listener) }()
	// The server answers that it is loading; a signal ends it even then.
	opened := make(chan opening, 1)
	go func() { opened <- c.open(e, l) }()
	var o opening
	select {
	case err := <-served:
		return err // the process ends with the loading unfinished
	case o = <-opened:
	}
	if o.err != nil {
		cancel()
		<-served
		return o.err
	}
	defer o.dev.Close()
	log.Info("memory", c.pool.report()...)
	if n := c.pool.lanes; n < c.MaxConcurrency {
		log.Info("fewer sequences at a time: the pool holds so many full contexts", "concurrency", n)
		c.MaxConcurrency = n
	}
	if journal != nil {
		c.started(journal, l, listener.Addr().String(), deviceName(o.dev))
	}
	s.Ready(server.Model{
		Front: o.front, Draft: c.DraftTokens, Concurrency: c.MaxConcurrency, File: filepath.Base(l.store.File.Path()), Activity: o.batch.Activity,
		Queue: engine.NewQueue(o.batch, c.MaxConcurrency+c.MaxPendingRequests, time.Duration(c.PendingTimeoutMS)*time.Millisecond),
	})
	address := "http://" + listener.Addr().String()
	if c.Port == 0 && !log.Enabled(ctx, slog.LevelInfo) {
		e.say("listening on %s", address)
	}
	defaults := o.front.Defaults(!c.NoThinking)
	log.Info("ready", "model", c.ModelID, "address", address, "context", server.Count(c.MaxContext), "device", deviceName(o.dev),
		"concurrency", c.MaxConcurrency, "waiting places", c.MaxPendingRequests, "drafts", c.DraftTokens,
		"cache", fmt.Sprintf("%s in %s pages of %d tokens", c.KVDtype, server.Count(c.pool.pages), engine.PageTokens), "state", c.GDNStateDtype, "weights", inUnits(l.store.File.FileBytes())+" mapped",
		"temperature", defaults.Temperature, "top-p", defaults.TopP, "top-k", defaults.TopK, "presence penalty", defaults.Presence,
		"load", time.Since(start).Round(time.Millisecond))
	if err := <-served; err != nil {
		log.Log(context.Background(), server.LevelCritical, "the server has failed", "error", err)
		return fmt.Errorf("serve: %w", err)
	}
	log.Info("stopped")
	return nil
}

// opening is what loading leads to.
type opening struct {
	front *front.Front
	batch *engine.Batch
	dev   backend.Device
	err   error
}

// open binds the model and makes its text side.
func (c *serveCommand) open(e *environment, l *loaded) (o opening) {
	if c.ChatTemplate != "" {
		if o.err = l.override(c.ChatTemplate); o.err != nil {
			return o
		}
	}
	m, err := l.bind(c.options())
	if err != nil {
		return opening{err: err}
	}
	if o.front, err = c.front(l); err != nil {
		return opening{err: fmt.Errorf("%s: %w", l.store.File.Path(), err)}
	}
	c.weights = l.weightBytes()
	if o.err = l.warm(e, &c.modelFlags); o.err != nil {
		return o
	}
	o.batch, o.dev, o.err = c.engine(e, m, c.MaxConcurrency, c.MaxConcurrency+c.MaxPendingRequests)
	return o
}

// front makes the text side with the process's settings.
func (c *serveCommand) front(l *loaded) (*front.Front, error) {
	opt := c.samplingFlags.front(c.MaxContext)
	opt.MaxTokens, opt.FreshSeeds = c.DefaultMaxTokens, true
	if c.DefaultThinkingBudget != nil {
		opt.ThinkingBudget = *c.DefaultThinkingBudget
	}
	return l.front(opt)
}

// name is what an artifact calls its model.
func (l *loaded) name() string {
	var meta struct {
		Name string `json:"name"`
	}
	d := l.store.File.Directory()
	if json.Unmarshal(d.Metadata, &meta) == nil && meta.Name != "" {
		return meta.Name
	}
	var config struct {
		Architectures []string `json:"architectures"`
	}
	if text, ok := d.Component("text"); ok && json.Unmarshal(text.Config, &config) == nil && len(config.Architectures) > 0 {
		return config.Architectures[0]
	}
	return "qwen4_exp"
}

// signals returns a context that the first interrupt or termination ends; the second ends the process.
func (c *serveCommand) signals(log *slog.Logger) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	caught := make(chan os.Signal, 2)
	signal.Notify(caught, os.Interrupt, syscall.SIGTERM)
	go func() {
		defer signal.Stop(caught)
		select {
		case s := <-caught:
			log.Info("stopping: requests have 10 s to finish; a second signal ends them at once", "signal", s)
			cancel()
		case <-ctx.Done():
			return
		}
		<-caught
		os.Exit(exitInterrupted)
	}()
	return ctx, cancel
}

// redacted is the command line without the key.
func redacted(args []string) string {
	out := make([]string, len(args))
	hide := false
	for i, a := range args {
		name, _, inline := strings.Cut(a, "=")
		switch {
		case hide:
			a = "***"
		case name == "--api-key" && inline:
			a = name + "=***"
		}
		hide = a == "--api-key"
		out[i] = strconv.Quote(a)
		if !strings.ContainsAny(a, " \"'\\\t\n") {
			out[i] = a
		}
	}
	return strings.Join(out, " ")
}
