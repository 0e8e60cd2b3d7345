package convert

import (
	"context"
	"encoding/json/jsontext"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/num"
)

// UpgradeOptions say which version 2 file to turn into an artifact.
type UpgradeOptions struct {
	In  string // version 2 file
	Out string // entry file of the artifact
	// Config is the text of config.json, as version 2 files do not say of which model they are; nil is the published one.
	Config []byte
	Report string // where the report goes; empty: beside the artifact

	// ReleaseInput gives the input's disk space back while it is read, and so destroys it (Linux only).
	ReleaseInput bool
	MaxFileBytes int64 // largest file in bytes, 0 for the default

	Progress func(UpgradeStep) // called now and then, by one goroutine; may be nil

	fault func(off int64) error // tests: an error to meet once so many bytes of the input were read
	pins  *pins                 // tests: digests to demand as if the input were published
}

// UpgradeStep is how far an upgrade has come.
type UpgradeStep struct {
	Done, All int64 // bytes of the input
	Elapsed   time.Duration
}

// Rate is the mean speed so far in bytes per second.
func (s UpgradeStep) Rate() float64 { return float64(s.Done) / max(s.Elapsed.Seconds(), 1e-9) }

// upgrade is the state of one Upgrade.
type upgrade struct {
	UpgradeOptions
	config *arch.Config
	mixed  bool
	in     *artifact.V2
	pins   *pins // nil unless the input has the length of the published file
	plan   *artifact.Plan

	writer   *artifact.Writer
	segments []segment
	banks    []*bank
	template []byte // of the dialect L output, which stores it a second time
	r        UpgradeReport
}

const chatTemplate = "frontend/chat_template.jinja"

// The banks that the upgrade of a mixed file encodes.
const (
	mixedGateUp = "mtp/layer/mlp/experts/gate_up"
	mixedDown   = "mtp/layer/mlp/experts/down"
)

// pins are the SHA-256 digests of a published version 2 file and of what its upgrade makes of it, lower-case hex.
type pins struct {
	file     string
	template string            // of the chat template
	banks    map[string]string // of the encoded banks, by id
}

// mixedPins are those of the published mixed artifact (docs/format.md 1.8.1), but for the file's own.
var mixedPins = pins{
	template: "c3cf9e34abf4f9e36c2d72165aa9c132d3e2a725b6c2586aaa3a8af9d7a81041",
	banks: map[string]string{
		mixedGateUp: "9e25663a0c5435ac498c8f3032db9c745909eeded17aba853f36685a2087b1f6",
		mixedDown:   "fa78245bce9efe1073a7eaef0a4f6f294ce521ce1094d6d69f846f46fb8c9f60",
	},
}

// Upgrade turns a version 2 file of either dialect into an artifact (docs/format.md 1.8, 1.9), in one pass over the input. Every object
// is copied byte for byte, except the two expert banks of the mixed artifact's drafter, which are encoded as NVFP4. The digests of the
// published mixed file are demanded exactly if the input has its length.
//
// A failure is an *Error and leaves nothing behind but, with ReleaseInput, a destroyed input; the only exception is a report that
// cannot be written after the artifact was published, whose error says so. Existing files are never overwritten.
func Upgrade(ctx context.Context, o UpgradeOptions) (*UpgradeReport, error) {
	defer ignoreFileSizeSignal()()
	u := &upgrade{UpgradeOptions: o}
	err := u.run(ctx)
	if u.in != nil {
		u.in.Close()
	}
	if err != nil {
		return nil, classify(IO, fmt.Errorf("upgrade: %w", err))
	}
	return &u.r, nil
}

func (u *upgrade) run(ctx context.Context) error {
	start := time.Now()
	for _, step := range []func() error{u.checkOptions, u.open, u.makePlan} {
		if err := step(); err != nil {
			return err
		}
	}
	release := (*artifact.Releaser)(nil)
	if u.ReleaseInput {
		var err error
		if release, err = u.in.Releaser(); err != nil {
			return &Error{IO, err}
		}
		defer release.Close()
	}
	var err error
	// With a released input there need not be room for both at once.
	if u.writer, err = artifact.Create(u.Out, u.plan, artifact.WriterOptions{NoReserve: u.ReleaseInput}); err != nil {
		return classify(IO, err)
	}
	defer u.writer.Abort()
	u.makeSegments()
	if err := u.pass(ctx, release); err != nil {
		return err
	}
	if err := u.finish(); err != nil {
		return err
	}
	receipt, err := u.writer.Finish()
	if err != nil {
		return classify(IO, err)
	}
	file, err := artifact.Open(u.Out)
	if err != nil {
		return fail(IO, "the artifact was published, but cannot be opened: %w", err)
	}
	file.Close()
	u.complete(receipt, time.Since(start))
	if err := u.r.write(u.Report); err != nil {
		return fail(IO, "the artifact is complete, but its report is not: %w", err)
	}
	return nil
}

func (u *upgrade) checkOptions() error {
	switch {
	case u.In == "" || u.Out == "":
		return fail(Usage, "an input and an output file are needed")
	case u.MaxFileBytes < 0:
		return fail(Usage, "a file limit of %d bytes is not positive", u.MaxFileBytes)
	}
	a, err := os.Stat(u.In)
	if err != nil {
		return classify(Source, err)
	}
	if b, err := os.Stat(u.Out); err == nil && os.SameFile(a, b) || u.In == u.Out {
		return fail(Usage, "input and output are the same file %s", u.In)
	}
	if u.Report == "" {
		u.Report = artifact.UpgradeReportPath(u.Out)
	}
	if _, err := os.Lstat(u.Report); err == nil {
		return fail(Exists, "the report %s exists and is never overwritten", u.Report)
	}
	if dir, err := os.Stat(filepath.Dir(u.Report)); err != nil || !dir.IsDir() {
		return fail(IO, "no folder for the report %s", u.Report)
	}
	u.config = arch.Official()
	if u.Config != nil {
		if u.config, err = arch.ParseConfig(u.Config); err != nil {
			return &Error{Config, err}
		}
	}
	return nil
}

// open checks the input without reading its payload (docs/format.md 1.8.2, 1.9).
func (u *upgrade) open() error {
	var err error
	if u.in, err = artifact.OpenV2(u.In); err != nil {
		return classify(Source, err)
	}
	var specs []arch.Spec
	switch {
	case u.in.ModelID == arch.MixedModelID && u.in.WeightsID == arch.MixedWeightsID:
		u.mixed = true
		specs, err = arch.MixedV2Inventory(u.config)
	case u.in.ModelID == arch.ModelID && u.in.WeightsID == arch.WeightsID:
		var rows int
		if rows, err = u.proposalRows(); err == nil {
			specs, err = arch.Inventory(u.config, arch.Variant{Profile: arch.Radixark}, rows)
		}
	default:
		return fail(Source, "%s: identity %q / %q is not one that can be upgraded", u.In, u.in.ModelID, u.in.WeightsID)
	}
	hint := ""
	if u.Config == nil {
		hint = " (without a config.json the published 125B model is expected)"
	}
	if err != nil {
		return &Error{Config, fmt.Errorf("%s: %w%s", u.In, err, hint)}
	}
	// The identity alone fixes what is in the file: pins hold wherever the length is the published one.
	u.pins = u.UpgradeOptions.pins
	if sum, ok := u.in.Published(); ok && u.config.IsOfficial() {
		published := mixedPins
		published.file = sum
		u.pins = &published
	}
	if err := sameInventory(specs, u.in.Objects); err != nil {
		return fail(Source, "%s: %w%s", u.In, err, hint)
	}
	return nil
}

// proposalRows are the rows of the proposal head that a dialect L input has.
func (u *upgrade) proposalRows() (int, error) {
	o, ok := u.in.Object(arch.ProposalWeight)
	if !ok || len(o.Shape) != 2 {
		return 0, fmt.Errorf("tensor %q is missing or not a matrix", arch.ProposalWeight)
	}
	if need := u.config.ProposalRows(o.Shape[0]); u.config.IsOfficial() && o.Shape[0] != need {
		return 0, fmt.Errorf("tensor %q has %d rows", arch.ProposalWeight, o.Shape[0])
	}
	return o.Shape[0], nil
}

// sameInventory compares the objects of a file with an inventory: names, order, shapes, formats and layouts.
func sameInventory(specs []arch.Spec, objects []artifact.Object) error {
	need, have := map[string]bool{}, map[string]bool{}
	for i := range specs {
		need[specs[i].ID] = true
	}
	var differ []string
	for i := range objects {
		id := objects[i].ID
		have[id] = true
		if !need[id] {
			differ = append(differ, fmt.Sprintf("object %q is not expected", id))
		}
	}
	for i := range specs {
		if !have[specs[i].ID] {
			differ = append(differ, fmt.Sprintf("object %q is missing", specs[i].ID))
		}
	}
	if n := len(differ); n > 0 {
		text := strings.Join(differ[:min(n, 3)], ", ")
		if n > 3 {
			text += fmt.Sprintf(" (and %d more)", n-3)
		}
		return fmt.Errorf("%s", text)
	}
	for i := range specs {
		s, o := &specs[i], &objects[i]
		switch {
		case s.ID != o.ID:
			return fmt.Errorf("object %d is %q, need %q: the order differs", i, o.ID, s.ID)
		case s.Resource != o.Resource:
			return fmt.Errorf("object %q is of the wrong kind", o.ID)
		case s.Resource:
		case !slices.Equal(s.Shape, o.Shape):
			return fmt.Errorf("tensor %q has shape %v, need %v", o.ID, o.Shape, s.Shape)
		case s.Format.String() != o.Format || s.Layout.String() != o.Layout:
			return fmt.Errorf("tensor %q is %s %s, need %s %s", o.ID, o.Format, o.Layout, s.Format, s.Layout)
		}
	}
	return nil
}

// makePlan fixes the output.
func (u *upgrade) makePlan() error {
	var err error
	entry := filepath.Base(u.Out)
	sizes := map[string]int64{}
	for i := range u.in.Objects {
		if o := &u.in.Objects[i]; o.Resource {
			sizes[o.ID] = o.Bytes
		}
	}
	if u.mixed {
		sum := ""
		if u.pins != nil {
			sum = u.pins.file
		}
		u.plan, err = planMixedUpgrade(entry, u.config, sizes, sum, u.MaxFileBytes)
	} else {
		var rows int
		if rows, err = u.proposalRows(); err != nil {
			return &Error{Source, err}
		}
		if u.template, err = u.in.Resource(chatTemplate); err != nil {
			return &Error{Source, err}
		}
		u.plan, err = planUpgrade(entry, u.config, rows, u.in.Objects, u.in.PayloadBytes(), u.MaxFileBytes)
	}
	if err != nil {
		return &Error{Usage, err} // the inventory was right: a name or a limit is not
	}
	return nil
}

// planMixedUpgrade is what the upgrade of a mixed file writes (docs/format.md 1.8.3, 4.2). v2 is the input's SHA-256 where it is known
// beforehand, which is for the published file only.
func planMixedUpgrade(entry string, c *arch.Config, resources map[string]int64, v2 string, limit int64) (*artifact.Plan, error) {
	v := arch.Variant{Profile: arch.Mixed}
	specs, err := arch.Inventory(c, v, 0)
	if err != nil {
		return nil, err
	}
	desc, err := arch.Describe(c, v, specs)
	if err != nil {
		return nil, err
	}
	desc.Provenance = jsontext.Value(mixedProvenance(v2))
	return artifact.NewPlan(entry, directory(specs, desc, resources), artifact.PlanOptions{Limit: limit})
}

// mixedProvenance is docs/format.md 4.2.5. Of another file than the published one it says only what is true of that.
func mixedProvenance(v2 string) string {
	banks := `"mtp_expert_banks":{"objects":["` + mixedGateUp + `","` + mixedDown + `"],` +
		`"encoder":"NVFP4_MAXABS_DIVISOR_RNE_V1 with one FP32 divisor per expert",` +
		`"source":"the v2 BF16 banks; bytes equal the v2 loader's NVFP4 device banks"}`
	from := `{"upgraded_from":{"version":2,"model_id":"` + arch.MixedModelID + `","weights_id":"` + arch.MixedWeightsID + `"`
	if v2 == "" {
		return from + `},` + banks + `}`
	}
	return from + `,"repository":"igorls/Qwen3.8-Flash-Next-mixed-NInfer","revision":"5f0ee7e24279cbadf8d4a90c93c2ff5ea6b00688",` +
		`"file":"qwen3_8_flash_next_mixed.ninfer","sha256":"` + v2 + `"},` +
		`"config":{"repository":"Qwen/Qwen3.8-Flash-Next","revision":"de4b8e4d43b917e7706784d8bb445c9af86a3540"},` +
		`"sources":{"mixed":"primitive-ai/Qwen3.8-Flash-Next-mixed-NVFP4-FP8@a4e813ed3cfbbcc61e2929699eccb864a4dfa843 (without the BF16 PLE table)",` +
		`"ple":"primitive-ai/Qwen3.8-Flash-Next-PLE-quant@da8b39586016d8325ac619be28ad77d6296625ec (ples_int4)",` +
		`"recipe":"qwen3_8_flash_next_mixed-v1"},` + banks + `}`
}

// planUpgrade is what the upgrade of a dialect L file writes (docs/format.md 1.9): all objects where they were, but the chat template
// after the old payload, and a hole where it was.
func planUpgrade(entry string, c *arch.Config, rows int, old []artifact.Object, payload, limit int64) (*artifact.Plan, error) {
	v := arch.Variant{Profile: arch.Radixark}
	specs, err := arch.Inventory(c, v, rows)
	if err != nil {
		return nil, err
	}
	desc, err := arch.Describe(c, v, specs)
	if err != nil {
		return nil, err
	}
	desc.Provenance = jsontext.Value(`{"upgraded_from":{"version":2,"model_id":"` + arch.ModelID + `","weights_id":"` + arch.WeightsID + `"}}`)
	d := directory(specs, desc, nil)
	d.Objects = nil
	var template artifact.Object
	for _, o := range old {
		if o.ID == chatTemplate {
			template = o
			template.Offset = (payload + num.Alignment - 1) / num.Alignment * num.Alignment
			continue
		}
		d.Objects = append(d.Objects, o)
	}
	d.Objects = append(d.Objects, template)
	return artifact.NewPlan(entry, d, artifact.PlanOptions{Limit: limit, Upgrade: true})
}
