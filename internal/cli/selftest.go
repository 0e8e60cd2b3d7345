package cli

import (
	"fmt"
	"os"
	"time"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
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
	if err := cpuOnly(c.Device); err != nil {
		return err
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
	start := time.Now()
	ok, err := selftest.Run(e.ctx, selftest.Subject{Model: m, Tokenizer: l.tokenizer, Template: l.template}, c.Golden, cpuBackends,
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

// cpuOnly refuses devices that selftest cannot judge: BF16 storage moves single rows by more than an error would.
func cpuOnly(device string) error {
	if device == "cpu" {
		return nil
	}
	return usagef("--device %s: selftest has no bounds for a GPU yet; use --device cpu", device)
}
