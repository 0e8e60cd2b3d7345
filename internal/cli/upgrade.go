package cli

import (
	"fmt"
	"os"
	"time"

	"ninfer/internal/convert"
)

type upgradeCommand struct {
	In           string `arg:"" help:"Version 2 file."`
	Out          string `arg:"" help:"Entry file of the artifact to write."`
	ReleaseInput bool   `help:"Give the input's disk space back while reading it, which destroys it (Linux)."`
	Report       string `placeholder:"FILE" help:"Report to write; default: OUT.upgrade.json."`
	Config       string `placeholder:"FILE" help:"config.json of the model, if it is not the published 125B."`
	MaxFileBytes int64  `placeholder:"N" help:"Largest file; the payload continues in parts. Default 32000000000."`
	Quiet        bool   `help:"No progress."`
}

func (c *upgradeCommand) Run(e *environment) error {
	if c.MaxFileBytes < 0 {
		return usagef("--max-file-bytes is %d, need a positive number", c.MaxFileBytes)
	}
	o := convert.UpgradeOptions{In: c.In, Out: c.Out, ReleaseInput: c.ReleaseInput, Report: c.Report, MaxFileBytes: c.MaxFileBytes}
	if c.Config != "" {
		var err error
		if o.Config, err = os.ReadFile(c.Config); err != nil {
			return usageError{err}
		}
	}
	if !c.Quiet {
		last := time.Now()
		o.Progress = func(s convert.UpgradeStep) {
			if now := time.Now(); s.Done == s.All || now.Sub(last) >= 5*time.Second {
				last = now
				fmt.Fprintf(e.err, "%.1f of %.1f GB  %.1f MB/s  %v left\n", float64(s.Done)/1e9, float64(s.All)/1e9, s.Rate()/1e6,
					time.Duration(float64(s.All-s.Done)/max(s.Rate(), 1)*float64(time.Second)).Round(time.Second))
			}
		}
	}
	r, err := convert.Upgrade(e.ctx, o)
	if err != nil {
		if c.ReleaseInput {
			return hintedError{err, "if reading had begun, " + c.In + " is damaged and must be downloaded again"}
		}
		return err
	}
	fmt.Fprintf(e.out, "%s: %d objects, %d bytes in %d files, id %s, %.1f s\n", r.Output, r.Objects, r.FileBytes, len(r.Files), r.ArtifactID, r.Seconds)
	if r.Published {
		e.say("the input was the published file, to the byte")
	}
	return nil
}
