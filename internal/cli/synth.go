package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/convert"
	"ninfer/internal/synth"
	"ninfer/internal/text/token"
)

type synthCommand struct {
	Config           string `default:"official" placeholder:"FILE" help:"config.json, or official."`
	Out              string `required:"" placeholder:"FILE" help:"Artifact to write; any name."`
	SourceProfile    string `default:"radixark" placeholder:"P" help:"Inventory to make: radixark, swift or mixed."`
	PLEFormat        string `name:"ple-format" placeholder:"F" help:"As in convert."`
	ProjectionFormat string `placeholder:"F" help:"As in convert."`
	MTPExpertFormat  string `name:"mtp-expert-format" placeholder:"F" help:"As in convert."`
	SparseTable      bool   `help:"Zeros for the n-gram table, left as holes in the files."`
	Seed             uint64 `default:"1" placeholder:"N" help:"Seed of the weights."`
	Frontend         string `placeholder:"DIR" help:"Folder with tokenizer and template; default: generated ones."`
	MaxFileBytes     int64  `placeholder:"N" help:"Largest file; the payload continues in parts. Default 32000000000."`
	Quiet            bool   `help:"No progress."`
}

// config reads the model's configuration.
func (c *synthCommand) config() (*arch.Config, error) {
	if c.Config == "official" {
		return arch.Official(), nil
	}
	text, err := os.ReadFile(c.Config)
	if err != nil {
		return nil, usageError{err}
	}
	return arch.ParseConfig(text)
}

// frontend gives the six embedded files and the number of token ids.
func (c *synthCommand) frontend(config *arch.Config) (map[string][]byte, int, error) {
	if c.Frontend == "" {
		files, err := synth.Frontend(config)
		return files, synth.IDs(config), err
	}
	files := map[string][]byte{}
	for _, r := range arch.Resources() {
		data, err := os.ReadFile(filepath.Join(c.Frontend, r.Role))
		if err != nil {
			return nil, 0, usageError{err}
		}
		files[r.Object()] = data
	}
	t, err := token.Load(files["frontend/tokenizer.json"], files["frontend/tokenizer_config.json"])
	if err != nil {
		return nil, 0, fmt.Errorf("%s: %w", c.Frontend, err)
	}
	if t.Count() > config.Text.VocabSize {
		return nil, 0, fmt.Errorf("%s: the tokenizer has %d ids, vocab_size is %d", c.Frontend, t.Count(), config.Text.VocabSize)
	}
	return files, t.Count(), nil
}

func (c *synthCommand) Run(e *environment) error {
	v, err := arch.ParseVariant(c.SourceProfile, c.PLEFormat, c.ProjectionFormat, c.MTPExpertFormat)
	if err != nil {
		return usageError{err}
	}
	if c.MaxFileBytes < 0 {
		return usagef("--max-file-bytes is %d, need a positive number", c.MaxFileBytes)
	}
	config, err := c.config()
	if err != nil {
		return err
	}
	files, ids, err := c.frontend(config)
	if err != nil {
		return err
	}
	specs, plan, err := convert.PlanSynthetic(filepath.Base(c.Out), config, v, config.ProposalRows(ids), files, c.Seed, c.MaxFileBytes)
	if err != nil {
		return err
	}
	var progress func(synth.Step)
	if !c.Quiet {
		last := time.Now()
		progress = func(s synth.Step) {
			if now := time.Now(); s.Done == s.All || now.Sub(last) >= 5*time.Second {
				last = now
				fmt.Fprintf(e.err, "%.1f of %.1f GB  %.1f MB/s  %v left\n", float64(s.Done)/1e9, float64(s.All)/1e9, s.Rate()/1e6,
					time.Duration(float64(s.All-s.Done)/max(s.Rate(), 1)*float64(time.Second)).Round(time.Second))
			}
		}
	}
	start := time.Now()
	r, err := synth.Write(e.ctx, c.Out, plan, specs, config, files, synth.Options{Seed: c.Seed, SparseTable: c.SparseTable, IDs: ids}, progress)
	if err != nil {
		return err
	}
	fmt.Fprintf(e.out, "%s: %d objects, %d bytes in %d files, id %s, %.1f s\n",
		c.Out, len(specs), r.FileBytes, len(r.Files), artifact.FormatID(r.ID), time.Since(start).Seconds())
	return nil
}
