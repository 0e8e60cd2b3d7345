package cli

import (
	"bufio"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"golang.org/x/term"

	"ninfer/internal/artifact"
	"ninfer/internal/model"
	"ninfer/internal/quality"
)

type perplexityCommand struct {
	Artifact string `arg:"" optional:"" help:"Entry file. Default: nano, the model inside the program."`

	Corpus        string `placeholder:"FILE" help:"Manifest: a list of texts with names, domains, paths and SHA-256."`
	Quick         bool   `help:"Of the manifest, one text of each domain."`
	Text          string `placeholder:"FILE" help:"One UTF-8 text."`
	Reference     string `hidden:""`
	DumpPositions string `hidden:""`

	Context     int    `default:"4096" placeholder:"N" help:"Most tokens of a window, at least 2."`
	Stride      int    `default:"2048" placeholder:"N" help:"Tokens that a window moves on by, less than the context."`
	Output      string `placeholder:"DIR" help:"New or empty folder for the report. Default: one below profiles, named by the time."`
	TokenScores bool   `help:"Also write the log-probability of every token."`

	storageFlags `embed:""`
}

// storageFlags are the options of perplexity and compare that shape a device of one lane.
type storageFlags struct {
	KVDtype       string `name:"kv-dtype" default:"bf16" placeholder:"T" help:"Cache format: bf16 or fp8."`
	GDNStateDtype string `name:"gdn-state-dtype" default:"fp32" placeholder:"T" help:"Recurrent state: fp32 or bf16."`
	PrefillChunk  int    `default:"1024" placeholder:"N" help:"Most tokens of a pass; a multiple of 128."`
	Device        string `placeholder:"D" help:"cpu, cuda or a device number. Default: the GPU if usable, else the CPU."`
	LogLevel      string `default:"info" enum:"trace,debug,info,warning,error,critical,off" placeholder:"L" help:"trace, debug, info, warning, error, critical or off."`
}

// flags are these options as run and serve have them.
func (f *storageFlags) flags(context int) (modelFlags, error) {
	m := modelFlags{
		MaxContext: context, KVDtype: f.KVDtype, GDNStateDtype: f.GDNStateDtype, PrefillChunk: f.PrefillChunk, Device: f.Device,
		LogLevel: f.LogLevel, DraftPolicy: "fixed",
	}
	return m, m.check(1)
}

// subject makes a model ready to be measured. Call the function in the end.
func (f *modelFlags) subject(e *environment, l *loaded) (*quality.Subject, func() error, error) {
	if most := l.config.Text.MaxPositions; f.MaxContext > most {
		return nil, nil, usagef("a context of %d tokens, the model has %d positions", f.MaxContext, most)
	}
	m, err := l.bind(model.Options{})
	if err != nil {
		return nil, nil, err
	}
	dev, chunk, err := f.open(e, m, 1)
	if err != nil {
		return nil, nil, err
	}
	return &quality.Subject{Runner: model.NewRunner(m, dev, chunk), IDs: l.tokenizer.Count()}, dev.Close, nil
}

// perplexityReport is report.json.
type perplexityReport struct {
	Schema   string             `json:"schema"`
	Version  string             `json:"version"`
	Time     time.Time          `json:"time"`
	Artifact artifactIdentity   `json:"artifact"`
	Corpus   string             `json:"corpus,omitzero"`
	Quick    bool               `json:"quick"`
	Settings perplexitySettings `json:"settings"`
	*quality.Perplexity
	Seconds float64 `json:"seconds"`
}

type artifactIdentity struct {
	File  string `json:"file"`
	ID    string `json:"id"`
	Bytes int64  `json:"bytes"`
}

func (l *loaded) identity() artifactIdentity {
	f := l.store.File
	return artifactIdentity{filepath.Base(f.Path()), artifact.FormatID(f.ID()), f.FileBytes()}
}

type perplexitySettings struct {
	Context       int    `json:"context"`
	Stride        int    `json:"stride"`
	PrefillChunk  int    `json:"prefill_chunk"`
	KVDtype       string `json:"kv_dtype"`
	GDNStateDtype string `json:"gdn_state_dtype"`
	Device        string `json:"device"`
}

func (c *perplexityCommand) check() error {
	given := 0
	for _, s := range []string{c.Corpus, c.Text, c.Reference} {
		if s != "" {
			given++
		}
	}
	switch {
	case c.Reference != "" || c.DumpPositions != "":
		return usagef("--reference: this build does not have the comparison with stored probabilities; ninfer compare compares two artifacts")
	case given != 1:
		return usagef("need exactly one of --corpus and --text")
	case c.Quick && c.Corpus == "":
		return usagef("--quick needs --corpus")
	case c.Context < 2 || c.Context > 262144:
		return usagef("--context is %d, need 2 to 262144", c.Context)
	case c.Stride < 1 || c.Stride >= c.Context:
		return usagef("--stride is %d, need 1 to %d, less than the context", c.Stride, c.Context-1)
	}
	return nil
}

// streams reads what is to be scored.
func (c *perplexityCommand) streams() ([]quality.Stream, error) {
	if c.Corpus != "" {
		return quality.ReadCorpus(c.Corpus, c.Quick)
	}
	s, err := quality.ReadText(c.Text)
	return []quality.Stream{s}, err
}

func (c *perplexityCommand) Run(e *environment) (err error) {
	if err := c.check(); err != nil {
		return err
	}
	f, err := c.flags(c.Context)
	if err != nil {
		return err
	}
	streams, err := c.streams()
	if err != nil {
		return usageError{err}
	}
	start := time.Now()
	dir, err := reportFolder(c.Output, start)
	if err != nil {
		return err
	}
	l, err := load(e, c.Artifact)
	if err != nil {
		return err
	}
	defer l.close()
	s, closeDevice, err := f.subject(e, l)
	if err != nil {
		return err
	}
	defer closeDevice()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	o := quality.PerplexityOptions{Context: c.Context, Stride: c.Stride, Progress: e.scoring(start)}
	var scores *bufio.Writer
	if c.TokenScores {
		file, err := os.Create(filepath.Join(dir, "token_scores.jsonl"))
		if err != nil {
			return err
		}
		defer file.Close()
		scores = bufio.NewWriter(file)
		o.Token = func(t quality.TokenScore) error {
			if err := json.MarshalWrite(scores, t); err != nil {
				return err
			}
			return scores.WriteByte('\n')
		}
	}
	p, err := quality.Measure(e.ctx, s, streams, l.tokenizer.EncodePlain, o)
	if e.ctx.Err() != nil {
		e.say("interrupted; there is no report")
		return statusError(exitInterrupted)
	}
	if err != nil {
		return err
	}
	if scores != nil {
		if err := scores.Flush(); err != nil {
			return err
		}
	}
	report := perplexityReport{
		Schema: "ninfer/perplexity/1", Version: version(), Time: start.UTC(), Artifact: l.identity(), Corpus: c.Corpus, Quick: c.Quick, Perplexity: p,
		Settings: perplexitySettings{c.Context, c.Stride, f.PrefillChunk, f.KVDtype, f.GDNStateDtype, deviceName(s.Runner.Dev)},
		Seconds:  time.Since(start).Seconds(),
	}
	raw, err := json.Marshal(report, jsontext.WithIndent(" "))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "report.json"), append(raw, '\n'), 0o644); err != nil {
		return err
	}
	printPerplexity(e.out, p)
	e.say("%d tokens in %.1f s; report in %s", p.Overall.Scored, report.Seconds, dir)
	return nil
}

func printPerplexity(w io.Writer, p *quality.Perplexity) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "domain\tstreams\ttokens\tscored\tmean nll\tperplexity\t")
	row := func(name string, streams int, s quality.Score) {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%.6f\t%.4f\t\n", name, streams, s.Tokens, s.Scored, s.NLL/float64(s.Scored), s.Perplexity)
	}
	for _, d := range p.Domains {
		row(d.Domain, d.Streams, d.Score)
	}
	row("overall", len(p.Streams), p.Overall)
	t.Flush()
}

// reportFolder names the folder of a report: the given one, which must be new or empty, or one named by the time.
func reportFolder(dir string, now time.Time) (string, error) {
	if dir == "" {
		return filepath.Join("profiles", "perplexity-"+now.UTC().Format("20060102T150405Z")), nil
	}
	switch entries, err := os.ReadDir(dir); {
	case errors.Is(err, fs.ErrNotExist):
		return dir, nil
	case err != nil:
		return "", usageError{err}
	case len(entries) > 0:
		return "", usagef("--output: %s is not empty", dir)
	}
	return dir, nil
}

// scoring tells how far a measurement is: on one line that is written over on a terminal, else on a line every ten seconds.
func (e *environment) scoring(start time.Time) func(done, all int) {
	f, ok := e.err.(*os.File)
	live := ok && term.IsTerminal(int(f.Fd()))
	every := 10 * time.Second
	if live {
		every = 200 * time.Millisecond
	}
	last := start
	return func(done, all int) {
		now := time.Now()
		if now.Sub(last) < every && (done < all || !live) {
			return
		}
		last = now
		rate := float64(done) / max(now.Sub(start).Seconds(), 1e-9)
		text := fmt.Sprintf("%d of %d tokens  %.0f tokens/s  %v left", done, all, rate, time.Duration(float64(all-done)/rate*float64(time.Second)).Round(time.Second))
		switch {
		case !live:
			fmt.Fprintln(e.err, text)
		case done == all:
			fmt.Fprint(e.err, "\r\x1b[K")
		default:
			fmt.Fprintf(e.err, "\r\x1b[K%s", text)
		}
	}
}
