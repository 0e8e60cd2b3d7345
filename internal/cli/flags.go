package cli

import (
	"slices"
	"strconv"
	"strings"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/engine"
	"ninfer/internal/front"
	"ninfer/internal/model"
)

// modelFlags are the options of run and serve that shape the model and its device.
type modelFlags struct {
	MaxContext    int    `placeholder:"N" help:"Token ceiling of a sequence, prompt and output together. Default: 8192 in serve, 2048 in run."`
	KVCapacity    string `name:"kv-capacity" placeholder:"N" help:"Tokens of the pool of all sequences, or auto. Default: the context."`
	KVDtype       string `name:"kv-dtype" default:"bf16" placeholder:"T" help:"Cache format: bf16 or fp8."`
	PrefillChunk  int    `default:"1024" placeholder:"N" help:"Most prompt tokens of a pass; a multiple of 128."`
	Spec          string `placeholder:"mtp" help:"Draft with the model's MTP head."`
	DraftTokens   int    `placeholder:"K" help:"Drafts a round, 1 to 5."`
	LMHeadDraft   bool   `name:"lm-head-draft" help:"Draft through the reduced proposal head."`
	DraftPolicy   string `default:"fixed" placeholder:"P" help:"fixed or adaptive."`
	Vision        bool   `help:"Accept images and video."`
	GDNStateDtype string `name:"gdn-state-dtype" default:"fp32" placeholder:"T" help:"Recurrent state: fp32 or bf16."`
	Device        string `placeholder:"D" help:"cpu, cuda or a device number. Default: the GPU if usable, else the CPU."`
	NoCUDAGraph   bool   `name:"no-cuda-graph" help:"Run decode without graph replay; same tokens."`
	ChatTemplate  string `placeholder:"FILE" help:"Use this template instead of the artifact's."`
	LogLevel      string `default:"info" enum:"trace,debug,info,warning,error,critical,off" placeholder:"L" help:"trace, debug, info, warning, error, critical or off."`

	made           func([]byte) ([]device.Plane, bool) // loaded.made
	reserve, slack int64                               // bytes of memory that others keep, and that auto leaves
	clamp          bool
	weights        int64 // bytes that auto keeps free for them
	pool           pool  // what open decided
	seeded         bool  // a prompt's rows do not wait for the drafter
}

// mostContext is the longest context that can be asked for.
const mostContext = 262144

// check refuses what is out of range and what this build does not have. lanes is the number of sequences at a time.
func (f *modelFlags) check(lanes int) error {
	switch {
	case f.MaxContext < 1 || f.MaxContext > mostContext:
		return usagef("--max-context is %d, need 1 to %d", f.MaxContext, mostContext)
	case f.PrefillChunk < 128 || f.PrefillChunk%128 != 0:
		return usagef("--prefill-chunk is %d, need a positive multiple of 128", f.PrefillChunk)
	case f.KVDtype != "bf16" && f.KVDtype != "fp8":
		return usagef("--kv-dtype %s: this model has bf16 and fp8", f.KVDtype)
	case f.GDNStateDtype != "fp32" && f.GDNStateDtype != "bf16":
		return usagef("--gdn-state-dtype %s: need fp32 or bf16", f.GDNStateDtype)
	case f.Spec == "dflash" || f.Spec == "dflash2":
		return usagef("--spec %s: not available for this model; use mtp", f.Spec)
	case f.Spec != "" && f.Spec != "mtp":
		return usagef("--spec %s: need mtp", f.Spec)
	case f.Spec == "" && (f.DraftTokens != 0 || f.LMHeadDraft || f.DraftPolicy != "fixed"):
		return usagef("--draft-tokens, --lm-head-draft and --draft-policy need --spec mtp")
	case f.Spec != "" && (f.DraftTokens < 1 || f.DraftTokens > 5):
		return usagef("--spec mtp needs --draft-tokens 1 to 5")
	case f.DraftPolicy != "fixed" && f.DraftPolicy != "adaptive":
		return usagef("--draft-policy %s: need fixed or adaptive", f.DraftPolicy)
	case f.Vision:
		return usagef("--vision: this build has no media support")
	}
	if err := f.checkCapacity(lanes); err != nil {
		return err
	}
	return f.checkDevice()
}

// checkCapacity holds the pool between one full sequence and all of them.
func (f *modelFlags) checkCapacity(lanes int) error {
	if f.KVCapacity == "" || f.KVCapacity == "auto" {
		return nil
	}
	most := lanes * pagesOf(f.MaxContext) * engine.PageTokens
	n, err := strconv.Atoi(f.KVCapacity)
	if err != nil || n < f.MaxContext || n > most {
		return usagef("--kv-capacity is %s, need auto or %d to %d: one full context to %d of them", f.KVCapacity, f.MaxContext, most, lanes)
	}
	return nil
}

func (f *modelFlags) checkDevice() error {
	if f.Device == "" || f.Device == "cpu" {
		return nil
	}
	if _, err := strconv.ParseUint(f.Device, 10, 16); err != nil && f.Device != "cuda" {
		return usagef("--device %s: need cpu, cuda or a device number", f.Device)
	}
	return nil
}

// options are what to bind of the model.
func (f *modelFlags) options() model.Options {
	return model.Options{Drafter: f.Spec != "", Proposal: f.LMHeadDraft}
}

// engine makes a device with so many lanes for the model, and a batch on it that lets so many requests wait. Close the device after use.
// The pool may have room for fewer lanes, if that was asked for: f.pool tells.
func (f *modelFlags) engine(e *environment, m *model.Model, lanes, pending int) (*engine.Batch, backend.Device, error) {
	if most := m.Config.Text.MaxPositions; f.MaxContext > most {
		return nil, nil, usagef("--max-context is %d, the model has %d positions", f.MaxContext, most)
	}
	dev, chunk, err := f.open(e, m, lanes)
	if err != nil {
		return nil, nil, err
	}
	r := model.NewRunner(m, dev, chunk)
	if r.Lanes, r.Round = lanes, f.round(); !f.seeded {
		r.Carry = f.carry()
	}
	if err := r.Prepare(); err != nil {
		dev.Close()
		return nil, nil, err
	}
	if d, ok := dev.(*device.Device); ok && d.Library() != "" {
		f.milestone(e, "prompts on the GPU: %s", d.Library())
	}
	if d, ok := dev.(*device.Device); ok && f.pages() == 0 {
		if err := f.stock(d, lanes); err != nil {
			dev.Close()
			return nil, nil, err
		}
	}
	lanes = f.pool.lanes
	b, err := engine.NewBatch(r, engine.BatchOptions{
		Limits:  engine.Limits{Lanes: lanes, Pages: f.pool.pages, Pending: pending, GapRows: min(chunk, gapRows), Passes: lanes},
		Context: f.MaxContext, Adaptive: f.DraftPolicy == "adaptive",
	})
	if err != nil {
		dev.Close()
		return nil, nil, err
	}
	return b, dev, nil
}

// gapRows is the most prompt rows of a pass while other sequences are generating.
const gapRows = 256

func pagesOf(tokens int) int { return (tokens + engine.PageTokens - 1) / engine.PageTokens }

// samplingFlags are the options of run and serve that shape the draw. Nil is the default of the model and mode.
type samplingFlags struct {
	NoThinking       bool     `help:"Answer without thinking."`
	PreserveThinking bool     `help:"Keep the reasoning of finished turns in the prompt."`
	Greedy           bool     `help:"Always the most likely token; overrides every temperature."`
	Temperature      *float64 `placeholder:"F" help:"0 to 2; 0 is greedy."`
	TopP             *float64 `placeholder:"F" help:"0 to 1."`
	TopK             *int     `placeholder:"N" help:"0 to 20; 0 is 20."`
	MinP             *float64 `placeholder:"F" help:"0 to 1."`
	PresencePenalty  *float64 `placeholder:"F" help:"-2 to 2."`
	FrequencyPenalty *float64 `placeholder:"F" help:"-2 to 2."`
	Seed             *uint64  `placeholder:"N" help:"Seed of the draws."`
}

func (f *samplingFlags) check() error {
	for _, r := range f.settings().Ranges() {
		if !r.Holds() {
			return usagef("--%s is %v, need %v to %v", strings.ReplaceAll(r.Param, "_", "-"), *r.Value, r.Low, r.High)
		}
	}
	if f.TopK != nil && (*f.TopK < 0 || *f.TopK > engine.TopKLimit) {
		return usagef("--top-k is %d, need 0 to %d", *f.TopK, engine.TopKLimit)
	}
	return nil
}

// small makes the defaults those of nano, which is better off without the draws and penalties that suit the real model.
func (f *samplingFlags) small() {
	zero := 0.0
	if f.Temperature == nil {
		f.Temperature = &zero
	}
	if f.PresencePenalty == nil {
		f.PresencePenalty = &zero
	}
}

// front are these options as settings of the text side.
func (f *samplingFlags) front(context int) front.Options {
	return front.Options{
		Context: context, NoThinking: f.NoThinking, PreserveThinking: f.PreserveThinking, Greedy: f.Greedy,
		Sampling: f.settings(),
	}
}

func (f *samplingFlags) settings() front.Settings {
	return front.Settings{
		Temperature: f.Temperature, TopP: f.TopP, TopK: f.TopK, MinP: f.MinP,
		Presence: f.PresencePenalty, Frequency: f.FrequencyPenalty, Seed: f.Seed,
	}
}

// parseIDs reads a list of token ids separated by commas or white space.
func parseIDs(list string) ([]int32, error) {
	var ids []int32
	for _, w := range strings.FieldsFunc(list, func(r rune) bool { return r == ',' || slices.Contains([]rune(" \t\r\n"), r) }) {
		id, err := strconv.ParseInt(w, 10, 32)
		if err != nil || id < 0 {
			return nil, usagef("%q is not a token id", w)
		}
		ids = append(ids, int32(id))
	}
	return ids, nil
}
