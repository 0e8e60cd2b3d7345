package main

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"regexp"
	"slices"

	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/kernels"
	"ninfer/internal/backend/cuda/nvml"
)

// The sizes of the official model.
const (
	hidden  = 2560
	rank    = 320
	vocab   = 248320
	realIDs = 248077
	heads   = 6144
	experts = 512
	topk    = 10
	inner   = 640
	draft   = 147456
	tokens  = 8192 // context the rows belong to
)

type bench struct {
	*rig
	match   *regexp.Regexp
	sweep   bool
	commit  string
	command string
	smi     *nvml.Library
	batches []uint32
	read    float64 // bytes a microsecond of the read stream of this run
	rows    []row
}

func (b *bench) all() {
	if b.wanted("yardsticks") {
		b.yardsticks()
	}
	for _, v := range []string{"bf16", "fp8", "mixed"} {
		b.dense("gdn_in", v, []uint32{10240, 6144}, []uint32{48, 48}, hidden)
		b.dense("gdn_out", v, []uint32{hidden}, nil, heads)
		b.dense("qsa_in", v, []uint32{12288, 512, 512}, []uint32{640}, hidden)
	}
	for _, v := range []string{"bf16", "fp8"} {
		b.head("head", v)
		b.hyper(v)
		b.experts(v)
	}
	b.proposal()
}

func (b *bench) wanted(name string) bool { return b.match.MatchString(name) }

// report adds a row for a launch that moved bytes and prints it with what a row does not hold.
func (b *bench) report(name, variant string, batch int, bytes uint64, t timing, distinct int, note string) {
	ratio := 0.0
	if b.read > 0 {
		ratio = float64(bytes) / b.read / t.median
	}
	power := ""
	if b.smi != nil {
		if d, err := b.smi.Device(b.c.Device.Bus); err == nil {
			s := d.Read()
			power = fmt.Sprintf("%4.0f W %4d MHz", s.PowerWatts, s.SMClockMHz)
		}
	}
	fmt.Fprintf(os.Stderr, "%-18s %-6s R=%d %9.3f us (%.3f..%.3f) %8.2f MB %6.3f TB/s ratio %.3f %s %s\n", name, variant, batch, t.median, t.min, t.max,
		float64(bytes)/1e6, float64(bytes)/t.median/1e6, ratio, power, note)
	if note != "" {
		return // a trial of the sweep, not a row
	}
	b.rows = append(b.rows, row{
		What: "kernel", Name: name, Variant: variant, Context: tokens, Batch: batch, Us: t.median, Bytes: bytes,
		FloorMs: float64(bytes) / max(b.read, 1) / 1000, Ratio: ratio, ReadGbps: b.read / 1000, DistinctExperts: float64(distinct), Commit: b.commit, Command: b.command,
	})
}

func (b *bench) yardsticks() {
	for _, g := range []uint32{1, b.set.Limits.SMs, 8 * b.set.Limits.SMs} {
		plan := kernels.Plan{Kernel: kernels.Empty, Grid: g}
		t := b.chain(400, func(int) { launch(b.rig, plan, &kernels.EmptyParams{Wait: 1}) })
		note := fmt.Sprintf("%d blocks", g)
		if g == b.set.Limits.SMs {
			note = ""
		}
		b.report("empty", "bf16", 1, 0, t, 0, note)
	}
	const size = 4 << 30
	src := b.alloc(size)
	b.fill(src, size, fillBytes, 0)
	sink := b.alloc(64)
	best := timing{}
	for _, v := range []struct {
		name          string
		k             kernels.ID
		blocks        uint32
		stages, bytes uint32
	}{
		{"loads x2", kernels.ReadLoads, 2, 0, 0},
		{"bulk 8x16K", kernels.ReadBulk, 1, 8, 16 << 10},
		{"bulk 12x16K", kernels.ReadBulk, 1, 12, 16 << 10},
		{"bulk 6x8K x2", kernels.ReadBulk, 2, 6, 8 << 10},
		{"bulk 6x32K", kernels.ReadBulk, 1, 6, 32 << 10},
	} {
		plan := kernels.Plan{Kernel: v.k, Grid: v.blocks * b.set.Limits.SMs, Shared: v.stages*v.bytes + 128}
		t := b.chain(3, func(int) {
			launch(b.rig, plan, &kernels.ReadParams{Src: src, Bytes: size, Sink: sink, Stages: v.stages, StageBytes: v.bytes})
		})
		b.report("read_stream", "bf16", 1, size, t, 0, v.name)
		if best.median == 0 || t.median < best.median {
			best = t
		}
	}
	b.read = size / best.median
	b.report("read_stream", "bf16", 1, size, best, 0, "")
	t := b.chain(3, func(int) {
		launch(b.rig, kernels.Plan{Kernel: kernels.Copy, Grid: 4 * b.set.Limits.SMs}, &kernels.CopyParams{Src: src, Dst: src + size/2, Bytes: size / 2})
	})
	b.report("copy", "bf16", 1, size, t, 0, "")
	b.reset()
}

// tunings of the streaming kernel a sweep tries.
func (b *bench) tunings(row uint32) []kernels.Tuning {
	list := []kernels.Tuning{{}}
	if !b.sweep {
		return list
	}
	sms := b.set.Limits.SMs
	for v := kernels.Ten; v <= kernels.Small; v++ {
		for _, blocks := range []uint32{sms, 2 * sms, 3 * sms, 4 * sms} {
			if v == kernels.Deep && blocks > sms || v != kernels.Small && blocks > 2*sms {
				continue
			}
			list = append(list, kernels.Tuning{Variant: v, Blocks: blocks}, kernels.Tuning{Variant: v, Blocks: blocks, Trigger: 2})
		}
	}
	return list
}

// dense times matrices of own rows in the variant's format and plain rows in BF16, all over the same input of k.
func (b *bench) dense(name, variant string, own, plain []uint32, k uint32) {
	if !b.wanted(name) {
		return
	}
	f := kernels.FormatE4M3
	if variant == "bf16" {
		f = kernels.FormatBF16
	}
	const maxBatch = 8
	var bytes uint64
	for _, n := range own {
		bytes += rowBytes(f, variant, k) * uint64(n)
	}
	for _, n := range plain {
		bytes += 2 * uint64(k) * uint64(n)
	}
	sets := make([][]kernels.Part, b.copies(bytes))
	out := b.alloc(maxBatch * 2 * 20000)
	for i := range sets {
		at := uint64(0)
		add := func(f kernels.Format, n uint32) {
			sets[i] = append(sets[i], b.part(f, variant, n, k, out+driver.Ptr(2*at)))
			at += uint64(n) * maxBatch
		}
		for _, n := range own {
			add(f, n)
		}
		for _, n := range plain {
			add(kernels.FormatBF16, n)
		}
	}
	x := b.bf16(maxBatch*uint64(k), 1)
	last := len(own)
	if f == kernels.FormatBF16 {
		last += len(plain)
	}
	for _, batch := range b.batches {
		for i, tune := range b.tunings(uint32(rowBytes(f, "", k))) {
			if batch > 1 && i > 0 {
				break
			}
			plan, p, err := b.set.Limits.Gemv(f, batch, k, sets[0], last, tune)
			if err != nil {
				continue
			}
			p.X, p.XLd = x, k
			t := b.chain(max(40, 2*len(sets)), func(i int) {
				copy(p.Part[:], sets[i%len(sets)])
				launch(b.rig, plan, &p)
			})
			b.report(name, variant, int(batch), bytes, t, 0, tuneNote(i, tune, p.Piece, p.Stages))
		}
	}
	b.reset()
}

func tuneNote(i int, t kernels.Tuning, piece, stages uint32) string {
	if i == 0 {
		return ""
	}
	return fmt.Sprintf("v%d t%d w%d b%d", t.Variant, t.Trigger, t.Window, t.Blocks)
}

// rowBytes is the bytes a row moves, scale included when the variant is named.
func rowBytes(f kernels.Format, variant string, k uint32) uint64 {
	n := uint64(k)
	switch {
	case f == kernels.FormatBF16:
		return 2 * n
	case f == kernels.FormatQ4:
		return n/2 + n/32
	case variant == "mixed":
		return n + 4
	case variant == "fp8":
		return n + 2
	}
	return n
}

// part makes one random matrix of n rows.
func (b *bench) part(f kernels.Format, variant string, n, k uint32, out driver.Ptr) kernels.Part {
	p := kernels.Part{Rows: n, Out: out, OutLd: n}
	count := uint64(n) * uint64(k)
	switch f {
	case kernels.FormatBF16:
		p.W = b.bf16(count, 0.05)
	case kernels.FormatE4M3:
		p.W = b.fill(b.alloc(count), count, fillE4M3, 0)
		if variant == "mixed" {
			p.Flags = kernels.PartScaleF32
			p.Scale = b.fill(b.alloc(4*uint64(n)), uint64(n), fillF32, 1e-4)
		} else {
			p.Scale = b.fill(b.alloc(2*uint64(n)), uint64(n), fillPositiveBF16, 1e-4)
		}
	case kernels.FormatQ4:
		p.W = b.fill(b.alloc(count/2), count/2, fillBytes, 0)
		p.Scale = b.fill(b.alloc(count/32), count/64, fillPositiveF16, 0)
	}
	return p
}

// head times the full head with the argmax of every row, merge kernel included.
func (b *bench) head(name, variant string) {
	if !b.wanted(name) {
		return
	}
	f := kernels.FormatE4M3
	if variant == "bf16" {
		f = kernels.FormatBF16
	}
	b.argmax(name, variant, f, vocab, realIDs, 0)
}

func (b *bench) proposal() {
	if b.wanted("proposal_head") {
		ids := b.fill(b.alloc(4*draft), 4*draft, fillBytes, 0)
		b.argmax("proposal_head", "bf16", kernels.FormatQ4, draft, draft, ids)
	}
}

func (b *bench) argmax(name, variant string, f kernels.Format, n, valid uint32, ids driver.Ptr) {
	bytes := rowBytes(f, variant, hidden) * uint64(n)
	sets := make([]kernels.Part, 2)
	for i := range sets {
		sets[i] = b.part(f, variant, n, hidden, 0)
	}
	x := b.bf16(8*hidden, 1)
	best, out := b.alloc(8*8*1024), b.alloc(64)
	for _, batch := range b.batches {
		for i, tune := range b.tunings(uint32(rowBytes(f, "", hidden))) {
			if batch > 1 && i > 0 {
				break
			}
			plan, p, err := b.set.Limits.Gemv(f, batch, hidden, sets[:1], 1, tune)
			if err != nil {
				continue
			}
			p.X, p.XLd, p.Best, p.ValidRows = x, hidden, best, valid
			t := b.chain(12, func(i int) {
				p.Part[0] = sets[i%len(sets)]
				launch(b.rig, plan, &p)
				launch(b.rig, kernels.Plan{Kernel: kernels.BestMerge, Grid: batch}, &kernels.BestParams{Best: best, Ids: ids, Out: out, N: plan.Grid, R: batch})
			})
			b.report(name, variant, int(batch), bytes, t, 0, tuneNote(i, tune, p.Piece, p.Stages))
		}
	}
	b.reset()
}

// hyper times the two halves of a hyper-connection site, alone and as a pair.
func (b *bench) hyper(variant string) {
	if !b.wanted("hc_pair") {
		return
	}
	fp8 := variant == "fp8"
	f := kernels.FormatBF16
	if fp8 {
		f = kernels.FormatE4M3
	}
	const maxBatch = 8
	downBytes := rowBytes(f, variant, 4*hidden)*rank + 2*4*4*hidden
	upBytes := rowBytes(f, variant, rank) * 4 * hidden
	type site struct{ down, up, inject, norm kernels.Part }
	sites := make([]site, b.copies(min(downBytes, upBytes)))
	for i := range sites {
		sites[i] = site{
			down: b.part(f, variant, rank, 4*hidden, 0), up: b.part(f, variant, 4*hidden, rank, 0),
			inject: b.part(kernels.FormatBF16, "", 4, 4*hidden, 0), norm: b.part(kernels.FormatBF16, "", 4, hidden, 0),
		}
	}
	x := [2]driver.Ptr{b.bf16(maxBatch*4*hidden, 1), b.bf16(maxBatch*4*hidden, 1)}
	mix, y := b.bf16(maxBatch*hidden, 1), b.bf16(maxBatch*hidden, 1)
	inject := b.fill(b.alloc(maxBatch*4*4), maxBatch*4, fillF32, 0.01)
	outInject := b.alloc(maxBatch * 4 * 4)
	partial, square := b.alloc(maxBatch*kernels.HyperParts*(rank+4)*4), b.fill(b.alloc(maxBatch*kernels.HyperParts*4), maxBatch*kernels.HyperParts, fillF32, 400)
	b.fill(partial, maxBatch*kernels.HyperParts*(rank+4), fillF32, 0.1)
	for _, batch := range b.batches {
		downPlan, dp, err := b.set.Limits.HcDown(fp8, batch, hidden, rank)
		must(err)
		upPlan, up, err := b.set.Limits.HcUp(fp8, batch, hidden, rank)
		must(err)
		down := func(i int) {
			s := &sites[i%len(sites)]
			dp.X, dp.XOut, dp.Y, dp.Inject, dp.Norm = x[i%2], x[1-i%2], y, inject, s.norm.W
			dp.Down, dp.DownScale, dp.InjW, dp.Partial, dp.Square = s.down.W, s.down.Scale, s.inject.W, partial, square
			launch(b.rig, downPlan, &dp)
		}
		upHalf := func(i int) {
			s := &sites[i%len(sites)]
			up.X, up.Norm, up.Partial, up.Square = x[1-i%2], s.norm.W, partial, square
			up.Up, up.UpScale, up.Mix, up.Inject = s.up.W, s.up.Scale, mix, outInject
			launch(b.rig, upPlan, &up)
		}
		n := max(200, 2*len(sites))
		pair := func(i int) { down(i); upHalf(i) }
		b.report("hc_down", variant, int(batch), downBytes, b.chain(n, down), 0, "")
		b.report("hc_up_mix", variant, int(batch), upBytes, b.chain(n, upHalf), 0, "")
		b.report("hc_pair", variant, int(batch), downBytes+upBytes, b.chain(n, pair), 0, "")
		if b.sweep && batch == 1 {
			for i := range uint32(9) {
				dp.Trigger, up.Trigger = i/3, i%3
				b.report("hc_pair", variant, 1, downBytes+upBytes, b.chain(n, pair), 0, fmt.Sprintf("triggers %d %d", dp.Trigger, up.Trigger))
			}
		}
	}
	b.reset()
}

// experts times router, routed gate/up and down, alone and as the triple of a layer. Inputs are random and independent of the chain, so
// every launch routes differently.
func (b *bench) experts(variant string) {
	if !b.wanted("expert_triple") {
		return
	}
	fp8 := variant == "fp8"
	f := kernels.FormatBF16
	if fp8 {
		f = kernels.FormatE4M3
	}
	const maxBatch, inputs, banks = 8, 16, 2
	routerBytes := rowBytes(f, variant, hidden)*(experts+2*inner) + 2*hidden
	upBytes, downBytes := uint64(2*inner*hidden)*9/16, uint64(hidden*inner)*9/16
	type layer struct{ router, gate, up, shared, down kernels.Part }
	layers := make([]layer, b.copies(routerBytes))
	for i := range layers {
		layers[i] = layer{
			router: b.part(f, variant, experts, hidden, 0), gate: b.part(f, variant, inner, hidden, 0), up: b.part(f, variant, inner, hidden, 0),
			shared: b.part(kernels.FormatBF16, "", 1, hidden, 0), down: b.part(kernels.FormatBF16, "", hidden, inner, 0),
		}
	}
	var upBank, downBank [banks]driver.Ptr
	for i := range upBank {
		upBank[i] = b.fill(b.alloc(experts*upBytes), experts*upBytes, fillScaleWords, 0)
		downBank[i] = b.fill(b.alloc(experts*downBytes), experts*downBytes, fillScaleWords, 0)
	}
	divisor := b.fill(b.alloc(4*experts), experts, fillF32, 400)
	var x [inputs]driver.Ptr
	for i := range x {
		x[i] = b.bf16(maxBatch*hidden, 1)
	}
	logits := [2]driver.Ptr{b.alloc(4 * maxBatch * experts), b.alloc(4 * maxBatch * experts)}
	gated := b.bf16(maxBatch*topk*inner, 1)
	sharedHidden, sharedLogit, sharedOut := b.bf16(maxBatch*inner, 1), b.alloc(4*maxBatch), b.alloc(4*maxBatch*hidden)
	out := b.alloc(2 * maxBatch * hidden)
	for _, batch := range b.batches {
		type tuning struct {
			slots, trigger uint32 // of gate/up for one row; trigger 1 means the first tile
			router         uint32 // its trigger, plus 1
			late           bool   // down waits before it asks for weights
			early          uint32 // of several rows: experts that down asks for before it waits
		}
		tunes := []tuning{{}}
		if b.sweep && batch == 1 {
			for router := uint32(1); router <= 3; router += 2 {
				for slots := uint32(2); slots <= 3; slots++ {
					for _, trigger := range []uint32{1, 2, 4} {
						tunes = append(tunes, tuning{slots: slots, trigger: trigger, router: router})
					}
				}
			}
			tunes = append(tunes, tuning{late: true}, tuning{slots: 6, trigger: 1})
		}
		if b.sweep && batch > 1 {
			for _, early := range []uint32{1, 2, 6, 9} {
				tunes = append(tunes, tuning{early: early}, tuning{early: early, trigger: 2})
			}
			tunes = append(tunes, tuning{trigger: 2}, tuning{trigger: 4}, tuning{slots: 3}, tuning{late: true}, tuning{router: 1}, tuning{router: 3})
		}
		for i, tune := range tunes {
			rPlan, rp, err := b.set.Limits.Router(fp8, batch, hidden, experts, inner)
			must(err)
			if tune.router > 0 {
				rp.Trigger = tune.router - 1
			}
			uPlan, up, err := b.set.Limits.ExpertUp(batch, hidden, experts, topk, inner, kernels.Tuning{Stages: tune.slots})
			must(err)
			if tune.trigger > 0 {
				up.Trigger = tune.trigger - 1
			}
			dPlan, dp, err := b.set.Limits.ExpertDown(batch, hidden, experts, topk, inner, !tune.late)
			must(err)
			if tune.early > 0 {
				dp.Early = tune.early
			}
			router := func(i int) {
				l := &layers[i%len(layers)]
				rp.X, rp.Router, rp.RouterScale, rp.Gate, rp.GateScale = x[i%inputs], l.router.W, l.router.Scale, l.gate.W, l.gate.Scale
				rp.Up, rp.UpScale, rp.Shared, rp.Logits, rp.Hidden = l.up.W, l.up.Scale, l.shared.W, logits[i%2], sharedHidden
				rp.SharedLogit = sharedLogit
				launch(b.rig, rPlan, &rp)
			}
			gateUp := func(i int) {
				up.X, up.Logits, up.Bank, up.Divisor, up.Hidden = x[i%inputs], logits[i%2], upBank[i%banks], divisor, gated
				up.SharedW, up.SharedHidden, up.SharedLogit, up.SharedOut = layers[i%len(layers)].down.W, sharedHidden, sharedLogit, sharedOut
				launch(b.rig, uPlan, &up)
			}
			down := func(i int) {
				dp.Logits, dp.Hidden, dp.Bank, dp.Divisor = logits[i%2], gated, downBank[i%banks], divisor
				dp.SharedW, dp.SharedHidden, dp.SharedLogit, dp.SharedOut, dp.Out = layers[i%len(layers)].down.W, sharedHidden, sharedLogit, sharedOut, out
				launch(b.rig, dPlan, &dp)
			}
			const n = 96
			note := ""
			if i > 0 {
				note = fmt.Sprintf("%+v", tune)
			} else {
				b.report("router_shared", variant, int(batch), routerBytes, b.chain(n, router), 0, "")
			}
			triple := b.chain(n, func(i int) { router(i); gateUp(i); down(i) })
			d := distinct(b.download(logits[(n-1)%2], 4*experts*int(batch)), int(batch))
			if i == 0 {
				pair := b.chain(n, func(i int) { router(i); gateUp(i) })
				b.report("router+gate_up", variant, int(batch), routerBytes+uint64(d)*upBytes, pair, d, "pair")
				b.report("gate_up", variant, int(batch), uint64(d)*upBytes, b.chain(n, gateUp), d, "alone")
				b.report("down", variant, int(batch), 2*hidden*inner+uint64(d)*downBytes, b.chain(n, down), d, "alone")
				b.chain(n, func(i int) { router(i); gateUp(i); down(i) }) // stamps are of the last
			}
			b.report("expert_triple", variant, int(batch), routerBytes+2*hidden*inner+uint64(d)*(upBytes+downBytes), triple, d, note)
		}
	}
	b.reset()
}

// distinct counts the experts that rows of logits choose.
func distinct(raw []byte, rows int) int {
	chosen := map[int]bool{}
	for r := range rows {
		ids := make([]int, experts)
		for e := range ids {
			ids[e] = e
		}
		logit := func(e int) float32 { return math.Float32frombits(binary.LittleEndian.Uint32(raw[4*(r*experts+e):])) }
		slices.SortStableFunc(ids, func(a, b int) int { return cmp.Compare(logit(b), logit(a)) })
		for _, e := range ids[:topk] {
			chosen[e] = true
		}
	}
	return len(chosen)
}
