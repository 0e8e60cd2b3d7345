package cli

import (
	"fmt"
	"os"
	"time"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/model"
	"ninfer/internal/nano"
	"ninfer/internal/selftest"
)

type selftestCommand struct {
	Artifact string `arg:"" optional:"" help:"Artifact made from the golden checkpoint. Default: nano, the model inside the program."`
	Golden   string `placeholder:"DIR" help:"Folder with golden.json and golden.safetensors. Default: nano's, built in."`
	Device   string `default:"cpu" placeholder:"D" help:"cpu, cuda or a device number."`
}

func (c *selftestCommand) Run(e *environment) error {
	f := modelFlags{Device: c.Device}
	if err := f.checkDevice(); err != nil {
		return err
	}
	backends := cpuBackends
	if c.Device != "cpu" {
		backends = nil // they depend on the model
	}
	if c.Artifact != "" && c.Golden == "" {
		return usagef("--golden DIR is needed: what is built in was recorded with nano, not with %s", c.Artifact)
	}
	l, err := load(e, c.Artifact)
	if err != nil {
		return err
	}
	defer l.close()
	if c.Golden == "" {
		dir, err := nanoGolden()
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		c.Golden = dir
	}
	m, err := l.bind(model.Options{Drafter: true})
	if err != nil {
		return err
	}
	if backends == nil {
		backends = []selftest.Backend{gpuBackend(f.ordinal(), m.Config.Text.Layers)}
	}
	start := time.Now()
	ok, err := selftest.Run(e.ctx, selftest.Subject{Model: m, Tokenizer: l.tokenizer, Template: l.template}, c.Golden, backends,
		func(line selftest.Line) { fmt.Fprintln(e.out, line) })
	if err != nil {
		return err
	}
	e.say("selftest took %v", time.Since(start).Round(10*time.Millisecond))
	if !ok {
		return statusError(exitFailure)
	}
	return nil
}

// nanoGolden writes what was recorded with nano into a new folder, since recorded tensors are read as files.
func nanoGolden() (string, error) {
	files, err := nano.Golden()
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "ninfer-golden-")
	if err != nil {
		return "", err
	}
	if err := os.CopyFS(dir, files); err != nil {
		os.RemoveAll(dir)
		return "", err
	}
	return dir, nil
}

// cpuBackends are the CPU's implementations with their bounds: the exact oracle differs from the float32 reference only by the
// reference's own rounding, the fast path computes in float32 too, in another order.
var cpuBackends = []selftest.Backend{
	{Name: "exact", Bound: 1e-5, Decisions: true, Open: func(m *model.Model, tokens int) (backend.Device, error) {
		return cpu.NewOracle(cpu.Options{States: m.States, Lanes: 1, Tokens: tokens, Carry: tokens}), nil
	}},
	{Name: "fast", Bound: 1e-3, Open: func(m *model.Model, tokens int) (backend.Device, error) {
		return cpu.NewFast(cpu.Options{States: m.States, Lanes: 1, Tokens: tokens, Carry: tokens}), nil
	}},
}

// gpuBackend is a GPU with its bounds for a model of so many layers. With decisions forced 3e-3 was planned of a whole small model,
// which no float32 sum can give: of four layers the oracle that rounds alike, disturbed by a relative 1e-7 before each rounding, is off by up to
// 9.6e-3 itself, by 4.4e-3 in the median and by 5e-3 in drafts, because a value that falls on the other side of a rounding step goes on
// through every later row and layer. Of prompts the oracle rounds what they store, but sums the delta rule token by token and not in chunks, which
// adds half as much again.
func gpuBackend(ordinal, layers int) selftest.Backend {
	deep := max(1, float64(layers)/4)
	return selftest.Backend{
		Name: "cuda",
		Open: func(m *model.Model, tokens int) (backend.Device, error) {
			return device.Open(device.Options{States: m.States, Lanes: 1, Tokens: tokens, Carry: tokens, Ordinal: ordinal})
		},
		Stored: &selftest.Stored{
			Open: func(m *model.Model, tokens int) (backend.Device, error) {
				return cpu.NewOracle(cpu.Options{States: m.States, Lanes: 1, Tokens: tokens, Carry: tokens, Stored: true, Wide: device.FewRows}), nil
			},
			Worst: deep * 2e-2, Median: deep * 8e-3, Draft: deep * 1e-2, FreeMedian: 1.5e-2, Near: 2e-2, Share: 0.9,
		},
	}
}
