package cli

import (
	"fmt"
	"time"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/model"
	"ninfer/internal/selftest"
)

type selftestCommand struct {
	Artifact string `arg:"" optional:"" help:"Artifact made from the golden checkpoint."`
	Golden   string `placeholder:"DIR" help:"Folder with golden.json and golden.safetensors."`
	Device   string `default:"cpu" placeholder:"D" help:"cpu, cuda or a device number."`
}

func (c *selftestCommand) Run(e *environment) error {
	if err := cpuOnly(c.Device); err != nil {
		return err
	}
	l, err := load(c.Artifact)
	if err != nil {
		return err
	}
	defer l.close()
	if c.Golden == "" {
		return usagef("--golden DIR is needed: this build has no recorded results of its own")
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
