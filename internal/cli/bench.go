package cli

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/csv"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"text/tabwriter"

	"ninfer/internal/bench"
)

type benchCommand struct {
	Weights     string `placeholder:"PATH" help:"Entry file. Default: nano, the model inside the program."`
	Corpus      string `placeholder:"FILE" help:"Text file of token ids that prompts are cut from. Default: a built-in sequence."`
	NPrompt     string `short:"p" name:"n-prompt" placeholder:"LIST" help:"Prompt tests: P,P,..."`
	NGen        string `short:"n" name:"n-gen" placeholder:"LIST" help:"Generation tests: G,G,..."`
	PromptGen   string `name:"prompt-gen" placeholder:"LIST" help:"Prompt then generation: P,G;P,G;... Also -pg."`
	Repetitions int    `short:"r" default:"5" placeholder:"N" help:"Measured runs of a test."`
	Warmup      int    `default:"1" placeholder:"N" help:"Unmeasured runs before them."`
	MaxCtx      int    `name:"max-ctx" placeholder:"N" help:"Context. Default: what the largest test needs."`

	PrefillChunk   int    `default:"1024" placeholder:"N" help:"Most prompt tokens of a pass; a multiple of 128."`
	KVDtype        string `name:"kv-dtype" default:"bf16" placeholder:"T" help:"Cache format: bf16 or fp8."`
	Spec           string `placeholder:"mtp" help:"Draft with the model's MTP head."`
	DraftTokens    int    `placeholder:"K" help:"Drafts a round, 1 to 5."`
	MTPDraftTokens *int   `name:"mtp-draft-tokens" placeholder:"K" help:"Older spelling: 1 to 5 drafts, 0 for none."`
	LMHeadDraft    bool   `name:"lm-head-draft" help:"Draft through the reduced proposal head."`
	GDNStateDtype  string `name:"gdn-state-dtype" default:"fp32" placeholder:"T" help:"Recurrent state: fp32 or bf16."`
	Device         string `placeholder:"D" help:"cpu, cuda or a device number."`
	NoCUDAGraph    bool   `name:"no-cuda-graph" help:"Run decode without graph replay."`

	Output     string `short:"o" default:"table" enum:"table,json,csv" placeholder:"F" help:"table, json or csv."`
	OutputFile string `placeholder:"PATH" help:"Write the report there; its folder is created."`
}

// benchReport is the JSON form.
type benchReport struct {
	Device    string      `json:"device"`
	Threads   int         `json:"threads"`
	Version   string      `json:"version"`
	Artifact  string      `json:"artifact"`
	Bytes     int64       `json:"artifact_bytes"`
	Context   int         `json:"context"`
	KVDtype   string      `json:"kv_dtype"`
	Drafting  bool        `json:"drafting"`
	Window    int         `json:"draft_window"`
	Benchmark []bench.Row `json:"benchmarks"`
}

// flags are the model's options as run and serve spell them.
func (c *benchCommand) flags(tests []bench.Test) (modelFlags, error) {
	f := modelFlags{
		MaxContext: c.MaxCtx, KVDtype: c.KVDtype, PrefillChunk: c.PrefillChunk, Spec: c.Spec, DraftTokens: c.DraftTokens,
		LMHeadDraft: c.LMHeadDraft, DraftPolicy: "fixed", GDNStateDtype: c.GDNStateDtype, Device: c.Device, NoCUDAGraph: c.NoCUDAGraph,
	}
	if n := c.MTPDraftTokens; n != nil {
		if c.Spec != "" || c.DraftTokens != 0 {
			return f, usagef("--mtp-draft-tokens and --spec exclude each other")
		}
		if *n != 0 {
			f.Spec, f.DraftTokens = "mtp", *n
		}
	}
	need := 0
	for _, t := range tests {
		need = max(need, t.Tokens())
	}
	f.MaxContext = cmp.Or(f.MaxContext, need+2*f.DraftTokens)
	if f.MaxContext < need {
		return f, usagef("--max-ctx is %d, the largest test needs %d", f.MaxContext, need)
	}
	return f, f.check(1)
}

func (c *benchCommand) Run(e *environment) error {
	tests, err := bench.ParseTests(c.NPrompt, c.NGen, c.PromptGen)
	if err != nil {
		return usageError{err}
	}
	if c.Repetitions < 1 || c.Warmup < 0 {
		return usagef("--repetitions needs at least 1, --warmup at least 0")
	}
	f, err := c.flags(tests)
	if err != nil {
		return err
	}
	l, err := load(e, c.Weights)
	if err != nil {
		return err
	}
	defer l.close()
	corpus := bench.Corpus(1<<14, l.tokenizer.Count())
	if c.Corpus != "" {
		if corpus, err = readCorpus(c.Corpus, l.tokenizer.Count()); err != nil {
			return usageError{err}
		}
	}
	m, err := l.bind(f.options())
	if err != nil {
		return err
	}
	batch, dev, err := f.engine(e, m, 1, 0)
	if err != nil {
		return err
	}
	defer dev.Close()
	report := benchReport{
		Device: deviceName(dev), Threads: runtime.GOMAXPROCS(0), Version: version(), Artifact: filepath.Base(l.store.File.Path()), Bytes: l.store.File.FileBytes(),
		Context: f.MaxContext, KVDtype: f.KVDtype, Drafting: f.Spec != "", Window: f.DraftTokens,
	}
	for _, t := range tests {
		e.say("%s: %d runs and %d before them", t.Name(), c.Repetitions, c.Warmup)
		row, err := bench.Run(e.ctx, batch, t, bench.Options{
			Repetitions: c.Repetitions, Warmup: c.Warmup, Draft: f.DraftTokens, Corpus: corpus, KeepIDs: os.Getenv("NINFER_BENCH_PRINT_TOKEN_IDS") != "",
		})
		if err != nil {
			return err
		}
		report.Benchmark = append(report.Benchmark, row)
	}
	return c.write(e, report)
}

// readCorpus reads token ids separated by white space or commas.
func readCorpus(path string, ids int) ([]int32, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	corpus, err := parseIDs(string(raw))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(corpus) == 0 {
		return nil, fmt.Errorf("%s: no token ids", path)
	}
	for _, id := range corpus {
		if int(id) >= ids {
			return nil, fmt.Errorf("%s: id %d is not one of the tokenizer's %d", path, id, ids)
		}
	}
	return corpus, nil
}

// write puts the report where it belongs, in one piece.
func (c *benchCommand) write(e *environment, r benchReport) error {
	var b bytes.Buffer
	w := bufio.NewWriter(&b)
	var err error
	switch c.Output {
	case "json":
		err = json.MarshalWrite(w, r, jsontext.WithIndent(" "))
		fmt.Fprintln(w)
	case "csv":
		err = r.csv(w)
	default:
		err = r.table(w)
	}
	if err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if c.OutputFile == "" {
		_, err := e.out.Write(b.Bytes())
		return err
	}
	if err := os.MkdirAll(filepath.Dir(c.OutputFile), 0o755); err != nil {
		return err
	}
	return os.WriteFile(c.OutputFile, b.Bytes(), 0o644)
}

// cells are a row's rates as text; empty where a test has none.
func cells(r bench.Row) (prefill, decode, length string) {
	show := func(x *bench.Rate) string {
		if x == nil {
			return ""
		}
		return fmt.Sprintf("%.2f ± %.2f", x.Mean, x.Deviation)
	}
	if r.Speculation.Enabled {
		length = fmt.Sprintf("%.2f", r.Speculation.AcceptanceLength)
	}
	return show(r.Prefill), show(r.Decode), length
}

func (r benchReport) table(w io.Writer) error {
	fmt.Fprintf(w, "%s, %d threads, ninfer %s\n%s, %d bytes, context %d, %s cache, drafts %d\n\n", r.Device, r.Threads, r.Version, r.Artifact, r.Bytes, r.Context, r.KVDtype, r.Window)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "test\tprefill tokens/s\tdecode tokens/s\ttokens a round")
	for _, row := range r.Benchmark {
		p, d, l := cells(row)
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", row.Test, p, d, l)
		for i, x := range row.Repetitions {
			if x.IDs != nil {
				fmt.Fprintf(t, "ids of run %d: %s\n", i, strings.Trim(fmt.Sprint(x.IDs), "[]"))
			}
		}
	}
	return t.Flush()
}

func (r benchReport) csv(w io.Writer) error {
	c := csv.NewWriter(w)
	c.Write([]string{"test", "prompt_tokens", "generated_tokens", "prefill_mean", "prefill_deviation", "decode_mean", "decode_deviation", "rounds", "drafted", "accepted"})
	for _, row := range r.Benchmark {
		num := func(x *bench.Rate) (string, string) {
			if x == nil {
				return "", ""
			}
			return fmt.Sprint(x.Mean), fmt.Sprint(x.Deviation)
		}
		pm, pd := num(row.Prefill)
		dm, dd := num(row.Decode)
		s := row.Speculation
		c.Write([]string{row.Test, fmt.Sprint(row.Prompt), fmt.Sprint(row.Gen), pm, pd, dm, dd, fmt.Sprint(s.Rounds), fmt.Sprint(s.Drafted), fmt.Sprint(s.Accepted)})
	}
	c.Flush()
	return c.Error()
}
