package cli

import (
	"fmt"
	"time"

	"ninfer/internal/convert"
)

type convertCommand struct {
	Model            string `required:"" placeholder:"DIR" help:"Checkpoint folder (config.json, safetensors)."`
	Out              string `required:"" placeholder:"FILE" help:"Artifact to write; its name is fixed by the options."`
	SourceProfile    string `default:"radixark" placeholder:"P" help:"Layout of the checkpoint: radixark, swift or mixed."`
	PLE              string `name:"ple" placeholder:"DIR" help:"Folder of the INT4 n-gram table (ples_int4); profile mixed only."`
	PLEFormat        string `name:"ple-format" placeholder:"F" help:"Re-encode the n-gram table: fp8_e4m3fn."`
	ProjectionFormat string `placeholder:"F" help:"Re-encode the 16-bit matrices: fp8_e4m3fn_row_bf16."`
	MTPExpertFormat  string `name:"mtp-expert-format" placeholder:"F" help:"Re-encode the drafter's experts: nvfp4."`
	MaxFileBytes     int64  `placeholder:"N" help:"Largest file; the payload continues in parts. Default 32000000000."`
	DraftRanking     string `placeholder:"FILE" help:"Token counts that choose the proposal head's rows."`
	Device           string `default:"cuda" enum:"cpu,cuda" hidden:"" help:"Accepted for older command lines; the arithmetic always runs on the CPU."`
	Quiet            bool   `help:"No line per object."`
}

func (c *convertCommand) Run(e *environment) error {
	if c.MaxFileBytes < 0 {
		return usagef("--max-file-bytes is %d, need a positive number", c.MaxFileBytes)
	}
	report, err := convert.Run(e.ctx, convert.Options{
		Model: c.Model, Out: c.Out, PLE: c.PLE, Profile: c.SourceProfile, PLEFormat: c.PLEFormat, ProjectionFormat: c.ProjectionFormat,
		MTPExpertFormat: c.MTPExpertFormat, MaxFileBytes: c.MaxFileBytes, DraftRanking: c.DraftRanking,
		Progress: func(s convert.Step) {
			if c.Quiet {
				return
			}
			line := fmt.Sprintf("%s  %.1f%%  %.1f MB/s  %v left", s.Name, 100*float64(s.Done)/float64(s.All), s.Rate()/1e6, s.Left().Round(time.Second))
			if s.Partial {
				line = "... " + line
			} else {
				line = fmt.Sprintf("[%d/%d] %s", s.Index, s.Total, line)
			}
			fmt.Fprintln(e.err, line)
		},
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(e.out, "%s: %d objects, %d bytes in %d files, id %s, %.1f s\n",
		report.Output, report.Objects.Count, report.FileBytes, len(report.Files), report.ArtifactID, report.ElapsedSeconds)
	return nil
}
