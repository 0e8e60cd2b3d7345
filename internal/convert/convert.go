package convert

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/hf"
	"ninfer/internal/text/token"
)

// Options say what to convert and into what. Spellings are those of the command line; an empty string is an absent option.
type Options struct {
	Model string // checkpoint folder
	Out   string // entry file; its name is fixed by the variant

	PLE string // folder of the INT4 n-gram table, for profile mixed only

	Profile          string
	PLEFormat        string
	ProjectionFormat string
	MTPExpertFormat  string

	MaxFileBytes int64  // largest file in bytes, 0 for the default
	DraftRanking string // file of token counts for the proposal head, or empty: see shortlist

	// Progress is called after each object, and about once a second while one takes long, by one goroutine at a time. It may be nil.
	Progress func(Step)

	fault   func(object string, off int64) error // tests: an error to meet instead of a write
	workers int                                  // tests: pieces in work at once
	chunk   int                                  // tests: bytes of a piece's source
}

// Step is how far the work has come.
type Step struct {
	Index, Total int  // Index counts finished objects
	Partial      bool // the object Name is not finished
	Name         string
	Bytes        int64         // size of the object
	Done, All    int64         // bytes on disk, and of all objects
	Elapsed      time.Duration // since writing began
}

// Rate is the mean speed so far in bytes per second.
func (s Step) Rate() float64 { return float64(s.Done) / max(s.Elapsed.Seconds(), 1e-9) }

// Left is the time the rest takes at that speed.
func (s Step) Left() time.Duration {
	return time.Duration(float64(s.All-s.Done) / max(s.Rate(), 1) * float64(time.Second))
}

// conversion is the state of one Run.
type conversion struct {
	Options
	variant arch.Variant
	config  *arch.Config

	resources map[string][]byte // by object id
	tokenizer *token.Tokenizer
	plan      *artifact.Plan
	specs     []arch.Spec
	model     *hf.Checkpoint
	ple       []*hf.Checkpoint         // the INT4 table, a file for each shard
	divisors  [][]float32              // by object: divisors of banks, activation divisors of their siblings
	tables    map[string]*encodedTable // by the prefix of its shards
	chosen    []int32                  // token ids of the proposal head, by row
	ranking   string                   // SHA-256 of the ranking file, or empty

	writer *artifact.Writer
}

// Run converts. A failure is an *Error and leaves nothing behind; the only exception is a report that cannot be written after the
// artifact was published, whose error says so. Existing files are never overwritten, except an old report.
func Run(ctx context.Context, o Options) (*Report, error) {
	defer ignoreFileSizeSignal()()
	c := conversion{Options: o}
	r, err := c.run(ctx)
	for _, m := range append(c.ple, c.model) {
		if m != nil {
			m.Close()
		}
	}
	if err != nil {
		return nil, classify(IO, fmt.Errorf("convert: %w", err))
	}
	return r, nil
}

func (c *conversion) run(ctx context.Context) (*Report, error) {
	start := time.Now()
	for _, check := range []func(context.Context) error{
		c.checkOptions, c.checkOutput, c.readConfig, c.readResources, c.makePlan, c.readTable, c.checkPins, c.openTable, c.openModel, c.checkTensors,
		c.checkScales, c.choose,
	} {
		if err := check(ctx); err != nil {
			return nil, err
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
	var err error
	if c.writer, err = artifact.Create(c.Out, c.plan, artifact.WriterOptions{}); err != nil {
		return nil, classify(IO, err)
	}
	defer c.writer.Abort()
	if err := c.write(ctx); err != nil {
		return nil, err
	}
	receipt, err := c.writer.Finish()
	if err != nil {
		return nil, classify(IO, err)
	}
	file, err := artifact.Open(c.Out)
	if err != nil {
		return nil, fail(IO, "the artifact was published, but cannot be opened: %w", err)
	}
	defer file.Close()
	r := c.report(receipt, time.Since(start))
	if err := r.write(artifact.ReportPath(c.Out)); err != nil {
		return nil, fail(IO, "the artifact is complete, but its report is not: %w", err)
	}
	return r, nil
}

// checkOptions is S1 to S3: nothing has been read yet.
func (c *conversion) checkOptions(context.Context) error {
	var err error
	if c.variant, err = arch.ParseVariant(c.Profile, c.PLEFormat, c.ProjectionFormat, c.MTPExpertFormat); err != nil {
		return &Error{Usage, err}
	}
	switch name := c.variant.OutputName(); {
	case c.Model == "":
		return fail(Usage, "no checkpoint folder is given")
	case c.Out == "":
		return fail(Usage, "no output file is given")
	case filepath.Base(c.Out) != name:
		return fail(Usage, "output %s must be named %s for these options", c.Out, name)
	case c.MaxFileBytes < 0:
		return fail(Usage, "a file limit of %d bytes is not positive", c.MaxFileBytes)
	case c.variant.Profile == arch.Mixed && c.PLE == "":
		return fail(Usage, "profile mixed needs the folder of the INT4 n-gram table (--ple)")
	case c.variant.Profile == arch.Mixed && c.DraftRanking != "":
		return fail(Usage, "profile mixed has no proposal head, so a draft ranking has no use")
	case c.variant.Profile != arch.Mixed && c.PLE != "":
		return fail(Usage, "a folder of the INT4 n-gram table (--ple) belongs to profile mixed, not %s", c.variant.Profile)
	}
	return nil
}

// checkOutput is S17, and what can be told early of S18. Space is reserved when the output is created, once its size is known.
func (c *conversion) checkOutput(context.Context) error {
	dir, name := filepath.Split(c.Out)
	if dir == "" {
		dir = "."
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return classify(IO, fmt.Errorf("output folder: %w", err))
	}
	// What a killed writer left is the business of artifact.Create, which can tell its own files from others.
	killed := false
	var there string
	for _, e := range entries {
		switch {
		case e.Name() == "."+name+".lock":
			killed = true
		case e.Name() == filepath.Base(reportTemp(artifact.ReportPath(name))):
			os.Remove(filepath.Join(dir, e.Name()))
		case e.Name() == name || strings.HasPrefix(e.Name(), name+".part-"):
			there = cmp.Or(there, e.Name()) // the entry comes before its parts
		case e.Name() == artifact.ReportPath(name) && e.IsDir():
			return fail(IO, "the report's name %s is taken by a folder", artifact.ReportPath(c.Out))
		}
	}
	if there != "" && !killed {
		return fail(Exists, "%s exists and is never overwritten", filepath.Join(dir, there))
	}
	return nil
}

// readConfig is S4 and S5.
func (c *conversion) readConfig(context.Context) error {
	text, err := os.ReadFile(filepath.Join(c.Model, hf.ConfigName))
	if err != nil {
		return classify(IO, err)
	}
	if c.config, err = arch.ParseConfig(text); err != nil {
		return &Error{Config, fmt.Errorf("%s: %w", c.Model, err)}
	}
	if err := c.config.CheckProfile(c.variant); err != nil {
		return &Error{Config, fmt.Errorf("%s: %w", c.Model, err)}
	}
	return nil
}

// readResources is S6.
func (c *conversion) readResources(context.Context) error {
	c.resources = map[string][]byte{}
	for _, r := range arch.Resources() {
		path := filepath.Join(c.Model, r.Role)
		data, err := os.ReadFile(path)
		switch {
		case err != nil:
			return classify(IO, err)
		case len(data) == 0:
			return fail(Source, "%s is empty", path)
		}
		c.resources[r.Object()] = data
	}
	var err error
	c.tokenizer, err = token.Load(c.resources["frontend/tokenizer.json"], c.resources["frontend/tokenizer_config.json"])
	if err != nil {
		return fail(Source, "%s: %w", c.Model, err)
	}
	return nil
}

// makePlan fixes the output's size and text.
func (c *conversion) makePlan(context.Context) error {
	ids := c.tokenizer.Count()
	rows := 0
	if c.variant.Profile != arch.Mixed {
		rows = c.config.ProposalRows(ids)
	}
	switch {
	case ids > c.config.Text.VocabSize:
		return fail(Source, "%s: tokenizer has %d ids, but vocab_size is %d", c.Model, ids, c.config.Text.VocabSize)
	case rows == 0 && c.variant.Profile != arch.Mixed:
		return fail(Source, "%s: tokenizer has %d ids, too few for a proposal head", c.Model, ids)
	}
	sizes := map[string]int64{}
	for id, data := range c.resources {
		sizes[id] = int64(len(data))
	}
	var err error
	name := filepath.Base(c.Out)
	if c.specs, c.plan, err = Plan(name, c.config, c.variant, rows, sizes, c.MaxFileBytes); err != nil {
		if _, _, err2 := Plan(name, c.config, c.variant, rows, sizes, 0); err2 == nil {
			return &Error{Usage, err}
		}
		return &Error{Config, fmt.Errorf("%s: %w", c.Model, err)}
	}
	return nil
}

// openModel is S10 and the first half of S7.
func (c *conversion) openModel(context.Context) error {
	var err error
	// Profile mixed takes the table from elsewhere; what the index says of another one need not even be there.
	c.model, err = hf.OpenWithout(c.Model, func(name string) bool {
		return c.variant.Profile == arch.Mixed && c.config.IsTableShard(name)
	})
	if errors.Is(err, fs.ErrNotExist) { // the index; config.json was there
		return &Error{Source, err}
	}
	return classify(Source, err)
}
