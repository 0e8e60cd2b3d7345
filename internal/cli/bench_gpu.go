package cli

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/bench"
	"ninfer/internal/engine"
	"ninfer/internal/model"
)

// measured sets a prompt's rate against that of the products it consists of, and says where the time goes if that was asked for.
func (c *benchCommand) measured(e *environment, m *model.Model, gpu *device.Device, b *engine.Batch, t bench.Test, f modelFlags, corpus []int32, row *bench.Row, report *benchReport) error {
	if row.Prefill != nil && gpu.Library() != "" {
		if report.Library = gpu.Library(); report.Products == 0 {
			var err error
			if report.Products, err = gpu.ProductRate(); err != nil {
				return err
			}
		}
		products := 0.0
		for _, kind := range []backend.Kind{backend.Prefill, backend.Seed} {
			if p, err := m.Program(backend.Pass{Kind: kind, Lanes: 1, Rows: 1}, false); err == nil { // none to seed without a drafter
				products += bench.Products(p)
			}
		}
		row.GEMM = products * row.Prefill.Mean / report.Products
		e.say("%.1f prompt tokens/s: %.3f of %.0f TFLOP/s by %s", row.Prefill.Mean, row.GEMM, report.Products/1e12, report.Library)
	}
	if !c.Kernels {
		return nil
	}
	return profile(e, gpu, func() error {
		_, err := bench.Run(e.ctx, b, t, bench.Options{Repetitions: 1, Draft: f.DraftTokens, Corpus: corpus})
		return err
	})
}

// profile says how long the GPU works on each kind of operation while f runs.
func profile(e *environment, gpu *device.Device, f func() error) error {
	list, err := gpu.Profile(f)
	if err != nil {
		return err
	}
	sums, counts, all := map[string]float64{}, map[string]int{}, 0.0
	for _, o := range list {
		kind := strings.TrimRight(o.Op, " 0123456789")
		sums[kind] += o.Microseconds
		counts[kind]++
		all += o.Microseconds
	}
	for _, kind := range slices.SortedFunc(maps.Keys(sums), func(a, b string) int { return cmp.Compare(sums[b], sums[a]) }) {
		e.say("%-10s %6d times %12.0f us, %5.1f %%", kind, counts[kind], sums[kind], 100*sums[kind]/all)
	}
	return nil
}

// rounds measures rounds of one draft up to all that a round may have.
func (c *benchCommand) rounds(e *environment, l *loaded, m *model.Model, f modelFlags, dev *device.Device, t bench.Round, rate *float64, corpus []int32, report *benchReport) error {
	for t.Drafts = 1; t.Drafts <= f.DraftTokens; t.Drafts++ {
		e.say("rounds of %d drafts at %d tokens, %d at a time: %d runs of %d rounds and %d before them", t.Drafts, t.Context, t.Batch, t.Repetitions, t.Rounds, t.Warmup)
		row, err := t.Measure(e.ctx, m, dev, rate, corpus)
		if err != nil {
			return err
		}
		if report.Device == "" {
			*report = c.report(l, &f, dev)
			report.Stored, report.ReadGBps = int64(dev.Stored()), *rate/1e9
		}
		report.Rounds = append(report.Rounds, row)
		e.say("%.1f us a round, %.1f to verify, floor %.1f: %.3f of %.0f GB/s, %.1f experts", row.Microseconds, row.Verify, row.FloorMs*1000, row.Ratio, row.ReadGBps, row.Distinct)
	}
	return nil
}

// rounds is the table of Round rows.
func (r benchReport) rounds(w io.Writer) error {
	fmt.Fprintf(w, "memory read at %.0f GB/s\n\n", r.ReadGBps)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "tokens\tbatch\tdrafts\tus a round\tverify\tdrafting\texperts\tof a draft\tMB\tfloor us\tratio\tverify on the GPU\tdraft")
	for _, d := range r.Rounds {
		fmt.Fprintf(t, "%d\t%d\t%d\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.0f\t%.1f\t%.3f\t%.1f\t%.1f\n", d.Context, d.Batch, d.Drafts, d.Microseconds, d.Verify, d.Drafting, d.Distinct,
			d.DraftDistinct, d.Bytes/1e6, d.FloorMs*1000, d.Ratio, d.VerifyGPU, d.DraftGPU)
	}
	for _, d := range r.Rounds {
		pass := fmt.Sprintf("%d tokens, %d at a time, %d drafts", d.Context, d.Batch, d.Drafts)
		kernelTable(t, pass+": verify", d.VerifyKernels, d.VerifyGPU)
		kernelTable(t, pass+": a draft", d.DraftKernels, d.DraftGPU)
	}
	return t.Flush()
}
