package cpu

import (
	"fmt"
	"math"
	"slices"

	"ninfer/internal/backend"
)

type moeWeights struct {
	router, gateUp, down                         matrix
	sharedGate, sharedUp, sharedDown, sharedGain matrix
}

// moeOp is the mixture of experts. Rows are grouped by expert, in the order of their numbers, so that each expert's weights are read
// once; a row adds its experts' outputs in the order of their ranks.
type moeOp struct {
	f  *fast
	op backend.MoE
	w  *moeWeights

	p      *pass[float32]
	stage  int
	chosen []int32   // [rows][TopK], -1 where a forced row has fewer
	weight []float32 // of each
	pair   []int32   // [rows][TopK]: where the pair of row and rank is in expert order
	rowOf  []int32   // [pairs]: and back
	first  []int32   // [experts+1]: pairs of each expert

	logits, gu, act, y, shared, gain, out []float32
	sg, su                                []float32
	h                                     int
}

func newMoE(f *fast, op backend.MoE) *moeOp {
	w := op.W
	return &moeOp{f: f, op: op, w: prepared(f, w, func() *moeWeights {
		return &moeWeights{
			router: f.matrix(w.Router), gateUp: f.matrix(w.GateUp), down: f.matrix(w.Down),
			sharedGate: f.matrix(w.SharedGate), sharedUp: f.matrix(w.SharedUp), sharedDown: f.matrix(w.SharedDown), sharedGain: f.matrix(w.SharedVector),
		}
	})}
}

// The stages of moeOp.do.
const (
	moeRoute = iota
	moeActivate
	moeCombine
)

func (o *moeOp) run(p *pass[float32]) error {
	f, w, op, rows := o.f, o.w, o.op.W, len(p.rows)
	f.arena.reset()
	o.p = p
	in, h := p.buf(o.op.In)
	o.out, _ = p.buf(o.op.Out)
	o.h = h
	o.logits = f.arena.take(rows * op.Experts)
	o.sg, o.su, o.gain = f.arena.take(rows*op.SharedInter), f.arena.take(rows*op.SharedInter), f.arena.take(rows)
	x := newOperand(in, h, h, rows)
	f.job.add(&w.router, &x, o.logits, op.Experts)
	f.job.add(&w.sharedGate, &x, o.sg, op.SharedInter)
	f.job.add(&w.sharedUp, &x, o.su, op.SharedInter)
	f.job.add(&w.sharedGain, &x, o.gain, 1)
	f.job.run()

	o.chosen, o.weight, o.pair = grow(o.chosen, rows*op.TopK), grow(o.weight, rows*op.TopK), grow(o.pair, rows*op.TopK)
	if err := o.force(); err != nil {
		return err
	}
	o.stage = moeRoute
	f.each(o, rows, 4*len(o.logits))
	o.trace()
	pairs := o.group()

	o.gu, o.act, o.y = f.arena.take(pairs*2*op.Inter), f.arena.take(pairs*op.Inter), f.arena.take(pairs*h)
	o.shared = f.arena.take(rows * h)
	f.level.siluMul(o.sg, o.sg, o.su)
	all := x.in(&f.arena, &w.gateUp)
	for e := range op.Experts {
		if a, b := o.first[e], o.first[e+1]; a < b {
			part := all
			part.idx, part.rows = o.rowOf[a:b], int(b-a)
			f.job.addRows(w.gateUp.sub(e*2*op.Inter, 2*op.Inter), part, o.gu[int(a)*2*op.Inter:], 2*op.Inter)
		}
	}
	s := newOperand(o.sg, op.SharedInter, op.SharedInter, rows)
	f.job.add(&w.sharedDown, &s, o.shared, h)
	f.job.run()
	o.stage = moeActivate
	f.each(o, pairs, 8*len(o.act))
	act := newOperand(o.act, op.Inter, op.Inter, pairs)
	all = act.in(&f.arena, &w.down)
	for e := range op.Experts {
		if a, b := o.first[e], o.first[e+1]; a < b {
			part := all
			part.data, part.rows = all.data[int(a)*all.ld:], int(b-a)
			f.job.addRows(w.down.sub(e*h, h), part, o.y[int(a)*h:], h)
		}
	}
	f.job.run()
	o.stage = moeCombine
	f.each(o, rows, (op.TopK+1)*len(o.out))
	return nil
}

// force marks the rows whose experts are given: their list is in chosen already, others begin with -2.
func (o *moeOp) force() error {
	op := o.op.W
	for r, row := range o.p.rows {
		chosen := o.chosen[r*op.TopK : (r+1)*op.TopK]
		chosen[0] = -2
		force := o.p.lanes[row.lane].in.Force
		if force == nil || force.Experts[o.op.Layer] == nil {
			continue
		}
		lists := force.Experts[o.op.Layer]
		if len(lists) <= row.index {
			return fmt.Errorf("forced routing lacks row %d", row.index)
		}
		list := lists[row.index]
		if len(list) == 0 || len(list) > op.TopK {
			return fmt.Errorf("forced routing of row %d has %d experts, need 1 to %d", row.index, len(list), op.TopK)
		}
		for _, e := range list {
			if e < 0 || int(e) >= op.Experts {
				return fmt.Errorf("expert %d of %d", e, op.Experts)
			}
		}
		for i := copy(chosen, list); i < op.TopK; i++ {
			chosen[i] = -1
		}
	}
	return nil
}

func (o *moeOp) trace() {
	for r, row := range o.p.rows {
		t := o.p.lanes[row.lane].in.Trace
		if t == nil {
			continue
		}
		if t.Experts == nil {
			t.Experts = map[int][][]int32{}
		}
		var list []int32
		for _, e := range o.chosen[r*o.op.W.TopK : (r+1)*o.op.W.TopK] {
			if e >= 0 {
				list = append(list, e)
			}
		}
		slices.Sort(list)
		t.Experts[o.op.Layer] = append(t.Experts[o.op.Layer], list)
	}
}

// group sorts the pairs of row and rank by expert, rows ascending, and returns their number.
func (o *moeOp) group() int {
	op := o.op.W
	o.first = grow(o.first, op.Experts+1)
	clear(o.first)
	pairs := 0
	for _, e := range o.chosen {
		if e >= 0 {
			o.first[e+1]++
			pairs++
		}
	}
	for e := range op.Experts {
		o.first[e+1] += o.first[e]
	}
	o.rowOf = grow(o.rowOf, max(pairs, len(o.chosen)))
	for i, e := range o.chosen {
		if e >= 0 {
			at := o.first[e]
			o.first[e]++
			o.pair[i], o.rowOf[at] = at, int32(i/op.TopK)
		}
	}
	copy(o.first[1:], o.first[:op.Experts]) // each moved to its successor's beginning
	o.first[0] = 0
	return pairs
}

func (o *moeOp) do(_, unit int) {
	op, l := o.op.W, o.f.level
	switch o.stage {
	case moeRoute:
		o.route(unit)
	case moeActivate:
		g := o.gu[unit*2*op.Inter:][:2*op.Inter]
		l.siluMul(o.act[unit*op.Inter:][:op.Inter], g[:op.Inter], g[op.Inter:])
	case moeCombine:
		out := o.out[unit*o.h:][:o.h]
		for k := range op.TopK {
			i := unit*op.TopK + k
			if o.chosen[i] < 0 {
				break
			}
			y := o.y[int(o.pair[i])*o.h:][:o.h]
			if k == 0 {
				l.scale(out, y, o.weight[i])
			} else {
				l.axpy(out, y, o.weight[i])
			}
		}
		l.axpy(out, o.shared[unit*o.h:][:o.h], sigmoid32(o.gain[unit]))
	}
}

// route chooses the TopK largest logits of a row, equal ones by number, and weighs them by their soft-max.
func (o *moeOp) route(r int) {
	op := o.op.W
	logits := o.logits[r*op.Experts : (r+1)*op.Experts]
	chosen, weight := o.chosen[r*op.TopK:(r+1)*op.TopK], o.weight[r*op.TopK:(r+1)*op.TopK]
	if chosen[0] == -2 {
		n := 0
		for e, v := range logits {
			if n == op.TopK && !(v > logits[chosen[n-1]]) {
				continue
			}
			n = min(n+1, op.TopK)
			i := n - 1
			for ; i > 0 && v > logits[chosen[i-1]]; i-- {
				chosen[i] = chosen[i-1]
			}
			chosen[i] = int32(e)
		}
	}
	most := float64(slices.Max(logits))
	var sum, all float64
	for i, e := range chosen {
		if e >= 0 {
			w := math.Exp(float64(logits[e]) - most)
			weight[i] = float32(w)
			sum += w
		}
	}
	if !op.Normalize { // the share of all, not of the chosen
		for _, v := range logits {
			all += math.Exp(float64(v) - most)
		}
		sum = all
	}
	for i, e := range chosen {
		if e >= 0 {
			weight[i] = float32(float64(weight[i]) / sum)
		}
	}
}
