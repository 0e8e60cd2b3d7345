package cli

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/csv"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/bench"
	"ninfer/internal/engine"
	"ninfer/internal/model"
)

type benchCommand struct {
	Weights string `placeholder:"PATH" help:"Entry file. Default: nano, the model inside the program."`
	syntheticFlags
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

	Depth   string `placeholder:"LIST" help:"On a GPU: decode at these lengths, or draft and verify with --spec, with sequences of random data instead of prompts."`
	Batch   string `default:"1" placeholder:"LIST" help:"Of --depth: so many sequences at a time."`
	Steps   int    `default:"256" placeholder:"N" help:"Of --depth: steps or rounds of a run."`
	Kernels bool   `help:"On a GPU: also what each kind of kernel costs, of prompts each kind of operation."`
	Engine  bool   `help:"Of --depth: also through the engine, which reads prompts of these lengths; greedy and drawn."`

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
	State     string      `json:"gdn_state_dtype"`
	Benchmark []bench.Row `json:"benchmarks,omitzero"`
	Library   string      `json:"library,omitzero"`         // that multiplies the matrices of prompts on a GPU
	Products  float64     `json:"product_flops_s,omitzero"` // and how fast it does

	// Of a GPU.
	Driver string        `json:"driver_version,omitzero"`
	CUDA   string        `json:"cuda_version,omitzero"`
	Limit  float64       `json:"power_limit_watts,omitzero"`
	Memory *bench.Ledger `json:"memory,omitzero"`
	// Rows of n-gram tables that all runs asked for, and how many of them seem not to have been in memory.
	TableRows   uint64 `json:"table_rows,omitzero"`
	TableMissed uint64 `json:"table_rows_missed,omitzero"`

	Stored    int64             `json:"device_weight_bytes,omitzero"` // of tensors on the GPU
	Predicted int64             `json:"predicted_weight_bytes,omitzero"`
	ReadGBps  float64           `json:"read_gbps,omitzero"`
	Decode    []bench.DecodeRow `json:"decode,omitzero"`
	Rounds    []bench.RoundRow  `json:"rounds,omitzero"`
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
	f.MaxContext = cmp.Or(f.MaxContext, min(need+2*f.DraftTokens, mostContext))
	switch {
	case need > mostContext:
		return f, usagef("the largest test needs a context of %d, at most %d are possible", need, mostContext)
	case f.MaxContext > mostContext:
		return f, usagef("--max-ctx is %d, need 1 to %d", f.MaxContext, mostContext)
	case f.MaxContext < need:
		return f, usagef("--max-ctx is %d, the largest test needs %d", f.MaxContext, need)
	}
	return f, f.check(1)
}

func (c *benchCommand) Run(e *environment) error {
	if c.Repetitions < 1 || c.Warmup < 0 {
		return usagef("--repetitions needs at least 1, --warmup at least 0")
	}
	if c.Depth != "" {
		return c.depths(e)
	}
	if c.Engine {
		return usagef("--engine needs --depth")
	}
	tests, err := bench.ParseTests(c.NPrompt, c.NGen, c.PromptGen)
	if err != nil {
		return usageError{err}
	}
	f, err := c.flags(tests)
	if err != nil {
		return err
	}
	l, err := c.load(e, c.Weights, &f)
	if err != nil {
		return err
	}
	defer l.close()
	corpus, err := c.corpus(l)
	if err != nil {
		return err
	}
	m, err := l.bind(f.options())
	if err != nil {
		return err
	}
	f.seeded = true // a prompt's time has the drafter's part of it
	batch, dev, err := f.engine(e, m, 1, 0)
	if err != nil {
		return err
	}
	defer dev.Close()
	report := c.report(l, &f, dev)
	gpu, _ := dev.(*device.Device)
	rate := 0.0
	if gpu != nil {
		if rate, err = gpu.ReadRate(); err != nil {
			e.say("without a roofline: %v", err)
		}
		report.ReadGBps = rate / 1e9
	}
	for _, t := range tests {
		e.say("%s: %d runs and %d before them", t.Name(), c.Repetitions, c.Warmup)
		row, err := bench.Run(e.ctx, batch, t, bench.Options{
			Repetitions: c.Repetitions, Warmup: c.Warmup, Draft: f.DraftTokens, Corpus: corpus, KeepIDs: os.Getenv("NINFER_BENCH_PRINT_TOKEN_IDS") != "",
		})
		if err != nil {
			return err
		}
		if rate > 0 {
			if err := row.Roof(m, gpu, bench.Formats{KV: f.cache(), BF16State: f.GDNStateDtype == "bf16", Behind: device.StepsBehind}, rate); err != nil {
				return err
			}
			if err := c.measured(e, m, gpu, batch, t, f, corpus, &row, &report); err != nil {
				return err
			}
		}
		report.Benchmark = append(report.Benchmark, row)
	}
	if gpu != nil {
		ledger := bench.LedgerOf(gpu, tests)
		report.Memory = &ledger
		report.TableRows, report.TableMissed = gpu.Gathered()
	}
	return c.write(e, report)
}

func (c *benchCommand) corpus(l *loaded) ([]int32, error) {
	if c.Corpus == "" {
		return bench.Corpus(1<<14, l.tokenizer.Count()), nil
	}
	corpus, err := readCorpus(c.Corpus, l.tokenizer.Count())
	if err != nil {
		return nil, usageError{err}
	}
	return corpus, nil
}

func (c *benchCommand) report(l *loaded, f *modelFlags, dev backend.Device) benchReport {
	r := benchReport{
		Device: deviceName(dev), Threads: runtime.GOMAXPROCS(0), Version: version(), Artifact: filepath.Base(l.store.File.Path()), Bytes: l.store.File.FileBytes(),
		Context: f.MaxContext, KVDtype: f.KVDtype, Drafting: f.Spec != "", Window: f.DraftTokens, State: f.GDNStateDtype,
	}
	if gpu, ok := dev.(*device.Device); ok {
		r.Driver, r.CUDA = gpu.Versions()
		if s, ok := gpu.Status(); ok {
			r.Limit = s.LimitWatts
		}
	}
	return r
}

// depths measures decoding at given lengths without reading texts of them.
func (c *benchCommand) depths(e *environment) error {
	if c.NPrompt != "" || c.NGen != "" || c.PromptGen != "" {
		return usagef("--depth has tests of its own: leave -p, -n and -pg out")
	}
	lengths, err := counts("--depth", c.Depth, 262144)
	if err != nil {
		return err
	}
	batches, err := counts("--batch", c.Batch, 8)
	if err != nil {
		return err
	}
	if c.Steps < 1 {
		return usagef("--steps is %d, need at least 1", c.Steps)
	}
	const beyond = 64 // steps that are launched outside of the time
	steps := c.Steps + beyond
	if c.Spec != "" {
		steps *= c.DraftTokens + 1
	}
	longest := bench.Test{Prompt: slices.Max(lengths), Gen: steps}
	if c.Engine {
		longest.Gen = max(longest.Gen, c.through(longest.Prompt, slices.Max(batches)).MostNew())
	}
	f, err := c.flags([]bench.Test{longest})
	if err != nil {
		return err
	}
	if f.Device == "cpu" {
		return usagef("--depth measures single steps on a GPU: leave --device cpu out")
	}
	if c.Engine && f.Spec != "" {
		return usagef("--engine measures rounds without drafts: leave --spec out")
	}
	f.Device = cmp.Or(f.Device, "cuda")
	l, err := c.load(e, c.Weights, &f)
	if err != nil {
		return err
	}
	defer l.close()
	corpus, err := c.corpus(l)
	if err != nil {
		return err
	}
	m, err := l.bind(f.options())
	if err != nil {
		return err
	}
	var report benchReport
	for _, b := range batches {
		if err := c.depth(e, l, m, f, b, lengths, corpus, &report); err != nil {
			return err
		}
	}
	return c.write(e, report)
}

// depth measures a batch size at all lengths on a device of its own, since room for a batch of the longest may be more than there is.
func (c *benchCommand) depth(e *environment, l *loaded, m *model.Model, f modelFlags, batch int, lengths []int, corpus []int32, report *benchReport) error {
	f.KVCapacity = strconv.Itoa(batch * pagesOf(f.MaxContext) * engine.PageTokens)
	var b *engine.Batch
	var opened backend.Device
	var err error
	if c.Engine {
		b, opened, err = f.engine(e, m, batch, batch)
	} else {
		opened, _, err = f.open(e, m, batch)
	}
	if err != nil {
		return err
	}
	defer opened.Close()
	dev := opened.(*device.Device)
	rate := 0.0
	for _, n := range lengths {
		formats := bench.Formats{KV: f.cache(), BF16State: f.GDNStateDtype == "bf16", Behind: device.StepsBehind}
		if f.Spec != "" {
			if err := c.rounds(e, l, m, f, dev, bench.Round{Context: n, Batch: batch, Rounds: c.Steps, Repetitions: c.Repetitions, Warmup: c.Warmup, Kernels: c.Kernels, Formats: formats}, &rate, corpus, report); err != nil {
				return err
			}
			continue
		}
		e.say("decode at %d tokens, %d at a time: %d runs of %d steps and %d before them", n, batch, c.Repetitions, c.Steps, c.Warmup)
		t := bench.Decode{Context: n, Batch: batch, Steps: c.Steps, Repetitions: c.Repetitions, Warmup: c.Warmup, Kernels: c.Kernels, Formats: formats}
		row, err := t.Measure(e.ctx, m, dev, &rate, corpus)
		if err != nil {
			return err
		}
		if report.Device == "" {
			*report = c.report(l, &f, dev)
			report.Stored, report.Predicted, report.ReadGBps = int64(dev.Stored()), bench.Resident(l.store.File.Directory(), f.Spec != ""), rate/1e9
			if err := bench.CheckResident(report.Stored, report.Predicted); err != nil {
				return err
			}
		}
		report.Decode = append(report.Decode, row)
		ledger := bench.LedgerOf(dev, []bench.Test{{Prompt: n, Gen: c.Steps}})
		report.Memory = &ledger
		e.say("%.1f us a step, %.1f on the GPU, floor %.1f: %.3f of %.0f GB/s, %.1f experts", row.Microseconds, row.GPU, row.Roof.FloorMs*1000, row.Roof.Ratio, row.Roof.ReadGBps, row.Roof.Distinct)
		if c.Engine {
			if err := c.byEngine(e, b, dev, &report.Decode[len(report.Decode)-1], corpus); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *benchCommand) through(prompt, batch int) bench.Through {
	return bench.Through{Prompt: prompt, Batch: batch, Steps: c.Steps}
}

// byEngine adds to a row what its rounds take through the engine.
func (c *benchCommand) byEngine(e *environment, b *engine.Batch, dev backend.Device, row *bench.DecodeRow, corpus []int32) error {
	for i := range row.Batch { // the steps have filled them
		if err := dev.Reset(backend.Lane(i)); err != nil {
			return err
		}
	}
	t := c.through(row.Context, row.Batch)
	for _, way := range []struct {
		to       *bench.ThroughRow
		sampling engine.Sampling
	}{{&row.Engine.Greedy, engine.Sampling{}}, {&row.Engine.Drawn, engine.Sampling{Temperature: 1, TopP: 0.95, TopK: engine.TopKLimit, Presence: 1.5}}} {
		q := engine.NewQueue(b, row.Batch, time.Hour)
		t.Sampling = way.sampling
		var err error
		*way.to, err = t.Measure(e.ctx, q, corpus)
		q.Drain(context.Background()) // the device is free after it
		if err != nil {
			return err
		}
	}
	g, d := row.Engine.Greedy, row.Engine.Drawn
	e.say("through the engine %.1f us a round greedy, %.1f drawn: %.3f and %.3f times the step", g.Microseconds, d.Microseconds, g.Microseconds/row.Microseconds, d.Microseconds/row.Microseconds)
	return nil
}

// counts reads a list of whole numbers from 1 to most.
func counts(option, list string, most int) ([]int, error) {
	var out []int
	for _, w := range strings.Split(list, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(w))
		if err != nil || n < 1 || n > most {
			return nil, usagef("%s: %q is not a number from 1 to %d", option, w, most)
		}
		out = append(out, n)
	}
	return out, nil
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

// decodes is the table of Decode rows.
func (r benchReport) decodes(w io.Writer) error {
	fmt.Fprintf(w, "weights %d bytes on the GPU, %d predicted; memory read at %.0f GB/s\n\n", r.Stored, r.Predicted, r.ReadGBps)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "tokens\tbatch\tus a step\ton the GPU\ttokens/s\texperts\tMB\tfloor us\tratio\tpower W\tof\tMHz\tmemory")
	for _, d := range r.Decode {
		f := d.Roof
		fmt.Fprintf(t, "%d\t%d\t%.1f\t%.1f\t%.1f\t%.1f\t%.0f\t%.1f\t%.3f\t%.0f\t%.0f\t%d\t%d\n", d.Context, d.Batch, d.Microseconds, d.GPU, d.Rate, f.Distinct,
			f.Bytes/1e6, f.FloorMs*1000, f.Ratio, f.PowerWatts, f.LimitWatts, f.SMClock, f.MemClock)
	}
	for _, d := range r.Decode {
		kernelTable(t, fmt.Sprintf("%d tokens, %d at a time", d.Context, d.Batch), d.Kernels, d.GPU)
	}
	return t.Flush()
}

// kernelTable tells where the time of a pass goes, if that was measured.
func kernelTable(w io.Writer, pass string, list []device.KernelTime, whole float64) {
	if list == nil {
		return
	}
	fmt.Fprintf(w, "\n%s\tlaunches\tus each\tus together\tstep less without\n", pass)
	sum, less := 0.0, 0.0
	for _, k := range list {
		fmt.Fprintf(w, "%s\t%d\t%.2f\t%.1f\t%.1f\n", k.Name, k.Launches, k.Microseconds/float64(k.Launches), k.Microseconds, k.Without)
		sum, less = sum+k.Microseconds, less+k.Without
	}
	fmt.Fprintf(w, "sum\t\t\t%.1f\t%.1f\nwhole\t\t\t%.1f\n", sum, less, whole)
}

func (r benchReport) table(w io.Writer) error {
	fmt.Fprintf(w, "%s, %d threads, ninfer %s\n%s, %d bytes, context %d, %s cache, drafts %d\n", r.Device, r.Threads, r.Version, r.Artifact, r.Bytes, r.Context, r.KVDtype, r.Window)
	if m := r.Memory; m != nil {
		fmt.Fprintf(w, "driver %s, CUDA %s, power limit %.0f W, memory read at %.0f GB/s\nweights %s, sequence %s of %s, workspace %s, GPU %s\n", r.Driver, r.CUDA, r.Limit,
			r.ReadGBps, inUnits(m.Weights.Used), inUnits(m.Sequence.Peak), inUnits(m.Sequence.Capacity), inUnits(m.Workspace.Used), inUnits(m.Total))
	}
	fmt.Fprintln(w)
	if r.Decode != nil {
		return r.decodes(w)
	}
	if r.Rounds != nil {
		return r.rounds(w)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, "test\tprefill tokens/s\tdecode tokens/s\ttokens a round")
	if r.ReadGBps > 0 {
		fmt.Fprint(t, "\tof the floor\tpower W\tof\tMHz\tmemory")
	}
	fmt.Fprintln(t)
	for _, row := range r.Benchmark {
		p, d, l := cells(row)
		fmt.Fprintf(t, "%s\t%s\t%s\t%s", row.Test, p, d, l)
		if f := cmp.Or(row.DecodeRoof, row.PrefillRoof); f != nil {
			fmt.Fprintf(t, "\t%.3f\t%.0f\t%.0f\t%d\t%d", f.Ratio, f.PowerWatts, f.LimitWatts, f.SMClock, f.MemClock)
		}
		fmt.Fprintln(t)
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
	if r.Rounds != nil {
		c.Write([]string{"tokens", "batch", "drafts", "us", "us_verify", "us_drafting", "distinct_experts", "bytes", "floor_ms", "read_gbps", "ratio"})
		for _, d := range r.Rounds {
			c.Write([]string{
				fmt.Sprint(d.Context), fmt.Sprint(d.Batch), fmt.Sprint(d.Drafts), fmt.Sprint(d.Microseconds), fmt.Sprint(d.Verify), fmt.Sprint(d.Drafting),
				fmt.Sprint(d.Distinct), fmt.Sprint(d.Bytes), fmt.Sprint(d.FloorMs), fmt.Sprint(d.ReadGBps), fmt.Sprint(d.Ratio),
			})
		}
		c.Flush()
		return c.Error()
	}
	if r.Decode != nil {
		c.Write([]string{"tokens", "batch", "us", "us_gpu", "tokens_per_s", "distinct_experts", "bytes", "floor_ms", "read_gbps", "ratio"})
		for _, d := range r.Decode {
			f := d.Roof
			c.Write([]string{
				fmt.Sprint(d.Context), fmt.Sprint(d.Batch), fmt.Sprint(d.Microseconds), fmt.Sprint(d.GPU), fmt.Sprint(d.Rate), fmt.Sprint(f.Distinct),
				fmt.Sprint(f.Bytes), fmt.Sprint(f.FloorMs), fmt.Sprint(f.ReadGBps), fmt.Sprint(f.Ratio),
			})
		}
		c.Flush()
		return c.Error()
	}
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
