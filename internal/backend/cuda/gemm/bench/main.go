// Command bench times the products of a prompt on one GPU: dense ones through cuBLASLt and by this repository's kernels, E4M3 ones, experts,
// hyper-connections, at the official model's sizes.
//
//	bench [-code DIR] [-library FILE] [-rows 512,2048,8192] [-match REGEXP] [-out rows.json] [-commit HASH]
//
// A figure is the median of nine rounds of some launches one after the other on a stream, each round some milliseconds, after three that are
// not counted. Ratios are against what cuBLASLt reached in the same run for 8,192 rows of 16384 x 2560. Contents are random; experts are
// chosen independently, as random routers do, which spreads rows more evenly than real ones.
package main

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/gemm"
	"ninfer/internal/backend/cuda/gemm/kernels"
	"ninfer/internal/backend/cuda/nvml"
)

// The sizes of the official model.
const (
	hidden  = 2560
	rank    = 320
	heads   = 6144
	experts = 512
	topk    = 10
	inner   = 640
)

// row is one figure.
type row struct {
	Name    string  `json:"name"`
	Variant string  `json:"variant"`
	Rows    int     `json:"rows"`
	Us      float64 `json:"us"`
	Tflops  float64 `json:"tflops"`
	Ratio   float64 `json:"ratio,omitzero"`
	Commit  string  `json:"commit,omitzero"`
	Command string  `json:"command"`
}

type bench struct {
	c        *driver.Context
	s        driver.Stream
	from, to driver.Event
	lib, own *gemm.Set // with and without the library; lib may be nil
	fillers  *kernels.Set
	match    *regexp.Regexp
	room     gemm.Workspace
	taken    []driver.Ptr
	seed     uint32
	best     float64 // TFLOP/s of the yardstick
	smi      *nvml.Library
	out      []row
}

var (
	code     = flag.String("code", "", "folder with a subfolder fatbin to use instead of the built-in machine code")
	library  = flag.String("library", "", "file of cuBLASLt, or none")
	rowsFlag = flag.String("rows", "512,2048,8192", "activation rows to time")
	match    = flag.String("match", "", "time only products whose name matches")
	out      = flag.String("out", "", "write the figures to this file")
	commit   = flag.String("commit", "", "commit to note")
	device   = flag.Int("device", 0, "GPU")
	portable = flag.Bool("portable", false, "the code was compiled with -DNINFER_PORTABLE")
)

func main() {
	flag.Parse()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func run() error {
	re, err := regexp.Compile(*match)
	if err != nil {
		return err
	}
	var list []int
	for _, s := range strings.Split(*rowsFlag, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 || n > 16384 {
			return fmt.Errorf("rows %q: not numbers from 1 to 16384", *rowsFlag)
		}
		list = append(list, n)
	}
	d, err := driver.Open()
	if err != nil {
		return err
	}
	o, err := driver.StartOwner(d, *device)
	if err != nil {
		return err
	}
	defer o.Close()
	var folder fs.FS
	if *code != "" {
		folder = os.DirFS(*code)
	}
	b := &bench{match: re}
	b.smi, _ = nvml.Open()
	err = o.Try(func(c *driver.Context) {
		b.c = c
		b.own, err = gemm.Load(c, gemm.Options{Library: "none", Code: folder, Portable: *portable})
		must(err)
		b.lib, err = gemm.Load(c, gemm.Options{Library: *library, Code: folder, Portable: *portable})
		must(err)
		fmt.Fprintf(os.Stderr, "%s, %d SMs, CUDA %v; %s\n", c.Device.Name, c.Device.SMs, d.Version(), b.lib.Library())
		if strings.Contains(b.lib.Library(), "own kernels") {
			b.lib = nil
		}
		b.fillers, err = kernels.Load(c, folder)
		must(err)
		b.s, err = c.NewStream()
		must(err)
		b.from, err = c.NewEvent(true)
		must(err)
		b.to, err = c.NewEvent(true)
		must(err)
		for i, m := range slices.Backward(list) {
			b.all(m, i == len(list)-1)
		}
	})
	if err != nil || *out == "" {
		return err
	}
	text, err := json.Marshal(b.out, jsontext.WithIndent("  "))
	if err != nil {
		return err
	}
	return os.WriteFile(*out, append(text, '\n'), 0o644)
}

func (b *bench) alloc(n int) driver.Ptr {
	p, err := b.c.Alloc("benchmark", uint64(n))
	must(err)
	b.taken = append(b.taken, p)
	return p
}

func (b *bench) reset() {
	must(b.c.Synchronize())
	for _, p := range b.taken {
		must(b.c.Free(p))
	}
	b.taken = b.taken[:0]
}

// kinds of contents, as route.cu numbers them.
const (
	normal = iota
	anyByte
	e4m3
	aboutOne
	blockScale
)

func (b *bench) fill(n, size int, kind uint32, scale float32) driver.Ptr {
	p := b.alloc(n * size)
	b.seed++
	must(b.fillers.Run(b.c, b.s, kernels.Fill, [3]uint32{2048, 1, 1}, 0, &kernels.FillParams{Dst: p, Count: uint64(n), Kind: kind, Seed: b.seed, Scale: scale}, false))
	return p
}

// time is the median time of f in microseconds.
func (b *bench) time(f func() error) float64 {
	must(f())
	must(b.c.SyncStream(b.s))
	var t []float64
	n := 1
	for i := 0; len(t) < 9; i++ {
		must(b.c.Record(b.from, b.s))
		for range n {
			must(f())
		}
		must(b.c.Record(b.to, b.s))
		must(b.c.Sync(b.to))
		us, err := b.c.Elapsed(b.from, b.to)
		must(err)
		if i == 0 {
			n = max(1, min(200, int(4000/us)))
		} else if i >= 3 {
			t = append(t, us/float64(n))
		}
	}
	slices.Sort(t)
	return t[len(t)/2]
}

func (b *bench) report(name, variant string, rows int, flops float64, f func() error) {
	us := b.time(f)
	r := row{Name: name, Variant: variant, Rows: rows, Us: us, Tflops: flops / us / 1e6, Commit: *commit, Command: strings.Join(os.Args[1:], " ")}
	if b.best > 0 {
		r.Ratio = r.Tflops / b.best
	}
	power := ""
	if b.smi != nil {
		if d, err := b.smi.Device(b.c.Device.Bus); err == nil {
			s := d.Read()
			power = fmt.Sprintf("%4.0f W %4d MHz", s.PowerWatts, s.SMClockMHz)
		}
	}
	fmt.Fprintf(os.Stderr, "%-16s %-14s M=%-5d %10.2f us %8.1f TFLOP/s ratio %.3f %s\n", name, variant, rows, us, r.Tflops, r.Ratio, power)
	b.out = append(b.out, r)
}

// stages prints how long each launch of f takes, the median of nine runs.
func (b *bench) stages(name string, rows int, set *gemm.Set, f func() error) {
	var events []driver.Event
	var names []string
	var times [][]float64
	for run := range 9 {
		at := 0
		mark := func(kernel string) {
			if run == 0 {
				e, err := b.c.NewEvent(true)
				must(err)
				events, names, times = append(events, e), append(names, kernel), append(times, nil)
			}
			must(b.c.Record(events[at], b.s))
			at++
		}
		mark("start")
		set.Trace = mark
		must(f())
		set.Trace = nil
		must(b.c.SyncStream(b.s))
		for i := 1; i < at; i++ {
			us, err := b.c.Elapsed(events[i-1], events[i])
			must(err)
			times[i] = append(times[i], us)
		}
	}
	for i := 1; i < len(names); i++ {
		slices.Sort(times[i])
		fmt.Fprintf(os.Stderr, "    %s M=%d %-20s %9.2f us\n", name, rows, names[i], times[i][4])
	}
	for _, e := range events {
		must(b.c.DestroyEvent(e))
	}
}

func (b *bench) wanted(name string) bool { return b.match.MatchString(name) }

func (b *bench) matrix(f gemm.Format, n, k int) gemm.Matrix {
	m := gemm.Matrix{Format: f, N: n, K: k}
	if f == gemm.BF16 {
		m.Data = b.fill(n*k, 2, normal, 0.02)
		return m
	}
	m.Data, m.Scale, m.ScaleF32 = b.fill(n*k, 1, e4m3, 1), b.fill(n, 4, aboutOne, 1e-4), true
	return m
}

func (b *bench) all(rows int, first bool) {
	for i, q := range []struct {
		name string
		n, k int
		f32  bool
	}{
		{"yardstick", 16384, hidden, false},
		{"gdn_out", hidden, heads, false},
		{"qsa_in", 13312, hidden, false},
		{"hc_down", rank, 4 * hidden, false},
		{"hc_up", 4 * hidden, rank, false},
		{"router", experts, hidden, true},
		{"shared_gate", inner, hidden, true},
		{"shared_down", hidden, inner, true},
		{"ab", 48, hidden, false},
	} {
		if !b.wanted(q.name) && !(i == 0 && first) {
			continue
		}
		x := b.fill(rows*q.k, 2, normal, 1)
		out := b.alloc(4 * rows * q.n)
		flops := 2 * float64(rows) * float64(q.n) * float64(q.k)
		for _, f := range []gemm.Format{gemm.BF16, gemm.E4M3} {
			p := gemm.Product{W: b.matrix(f, q.n, q.k), Out: out, OutLd: q.n, OutF32: q.f32}
			b.room.Bytes = gemm.Bytes(rows, []gemm.Product{p})
			b.room.At = b.alloc(int(b.room.Bytes))
			for _, s := range []struct {
				name string
				set  *gemm.Set
			}{{"library", b.lib}, {"own", b.own}} {
				if s.set == nil || f == gemm.E4M3 && s.name == "library" && rows < 256 {
					continue
				}
				b.report(q.name, [...]string{"bf16 ", "e4m3 "}[f]+s.name, rows, flops, func() error { return s.set.Multiply(b.c, b.s, x, q.k, rows, p, b.room) })
				if i == 0 && first && f == gemm.BF16 && b.best == 0 {
					b.best = b.out[len(b.out)-1].Tflops
				}
			}
		}
		b.reset()
	}
	b.mixture(rows)
	b.site(rows)
}

func (b *bench) mixture(rows int) {
	if !b.wanted("experts") {
		return
	}
	m := gemm.Mixture{Experts: experts, TopK: topk, Hidden: hidden, Inter: inner, Normalize: true}
	m.Down.Layout = gemm.Tiles8
	for i, bank := range []*gemm.Bank{&m.GateUp, &m.Down} {
		n, k := 2*inner, hidden
		if i == 1 {
			n, k = hidden, inner
		}
		bank.Data, bank.Divisors = b.fill(experts*n*k/16*9, 1, blockScale, 1), b.fill(experts, 4, aboutOne, 3000)
	}
	x, logits := b.fill(rows*hidden, 2, normal, 1), b.logits(rows)
	chosen, weight := b.alloc(4*rows*topk), b.alloc(4*rows*topk)
	shared, logit := b.fill(rows*hidden, 4, aboutOne, 1), b.fill(rows, 4, aboutOne, 1)
	out := b.alloc(2 * rows * hidden)
	b.room.Bytes = m.Bytes(rows)
	b.room.At = b.alloc(int(b.room.Bytes))
	flops := 2 * float64(rows) * topk * 3 * inner * hidden
	must(b.own.Route(b.c, b.s, m, logits, rows, chosen, weight))
	b.report("experts", "nvfp4", rows, flops, func() error {
		return b.own.Experts(b.c, b.s, m, x, rows, chosen, weight, shared, logit, out, b.room)
	})
	b.report("route", "", rows, 0, func() error { return b.own.Route(b.c, b.s, m, logits, rows, chosen, weight) })
	b.stages("experts", rows, b.own, func() error {
		return b.own.Experts(b.c, b.s, m, x, rows, chosen, weight, shared, logit, out, b.room)
	})
	b.reset()
}

// logits are random numbers that differ from row to row.
func (b *bench) logits(rows int) driver.Ptr { return b.fill(rows*experts, 4, aboutOne, 1) }

func (b *bench) site(rows int) {
	if !b.wanted("site") {
		return
	}
	for _, f := range []gemm.Format{gemm.BF16, gemm.E4M3} {
		m := gemm.Site{Hidden: hidden, Rank: rank, Eps: 1e-6, Norm: b.fill(4*hidden, 2, normal, 0.1), Down: b.matrix(f, rank, 4*hidden), Up: b.matrix(f, 4*hidden, rank)}
		m.InjectW = b.fill(16*hidden, 2, normal, 0.01)
		x, y, inject, mix := b.fill(rows*4*hidden, 2, normal, 1), b.fill(rows*hidden, 2, normal, 1e-3), b.fill(rows*4, 4, aboutOne, 1), b.alloc(2*rows*hidden)
		b.room.Bytes = m.Bytes(rows)
		b.room.At = b.alloc(int(b.room.Bytes))
		flops := 2 * float64(rows) * 2 * rank * 4 * hidden
		for _, s := range []struct {
			name string
			set  *gemm.Set
		}{{"library", b.lib}, {"own", b.own}} {
			if s.set != nil {
				mix := func() error { return s.set.Mix(b.c, b.s, m, x, y, inject, rows, mix, b.room) }
				b.report("site", [...]string{"bf16 ", "e4m3 "}[f]+s.name, rows, flops, mix)
				b.stages("site", rows, s.set, mix)
			}
		}
		b.reset()
	}
}
