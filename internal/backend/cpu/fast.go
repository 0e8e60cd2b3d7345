package cpu

import (
	"fmt"
	"runtime"

	"ninfer/internal/backend"
)

// NewFast returns a device that computes in float32 on all cores, with the instructions of Options.Level. Every reduction has an order
// that depends on its own row only: results are the same bits whatever the batch, the chunks, the rows of a Verify pass and the number
// of workers. Levels differ from each other in the last bits.
//
// After the first launch of a step nothing is allocated, unless logits of a Prefill or Draft pass are wanted. Picks and lanes of a
// Result, and the logits of Decode and Verify passes, are overwritten by the next launch of the same step.
func NewFast(opt Options) backend.Device {
	f := &fast{level: opt.Level, threads: opt.Threads, cache: map[any]any{}, inverse: map[backend.Rotary][]float32{}}
	if f.level == Best || f.level > best() {
		f.level = best()
	}
	if f.threads <= 0 {
		f.threads = runtime.GOMAXPROCS(0)
	}
	f.pool = newPool(f.threads)
	f.scratches = make([][]float32, f.threads)
	f.kernels = kernelsOf(f.level)
	f.job.f, f.injector.f, f.folder.f = f, f, f
	return newMachine(opt, f)
}

// fast is the float32 implementation.
type fast struct {
	level     Level
	threads   int
	kernels   *kernels
	pool      *pool
	scratches [][]float32 // one a worker
	arena     arena
	job       job
	weighed   int64       // bytes of weights read
	cache     map[any]any // prepared weights by the identity of what they were made from
	inverse   map[backend.Rotary][]float32
	angles    angles
	injector  injector
	folder    folder
}

// scratch returns memory of worker w, good until its next call.
func (f *fast) scratch(w, n int) []float32 {
	if len(f.scratches[w]) < n {
		f.scratches[w] = make([]float32, n)
	}
	return f.scratches[w][:n]
}

func (f *fast) close() { f.pool.close() }

// each runs units 0 to n-1 of t, on other workers too if all of them together are work enough. work counts element-wise operations.
func (f *fast) each(t task, n, work int) {
	if work < 4*inline {
		for u := range n {
			t.do(0, u)
		}
		return
	}
	f.pool.run(t, n)
}

// recorded: of windows, the row that is appended; of a delta-net matrix, for each head the decay, the key and the correction. Heads
// have as many keys as values.
func (f *fast) recorded(s backend.State) int {
	if s.Store == backend.StoreMatrix {
		return s.Rows / s.Width * (1 + 2*s.Width)
	}
	return s.Width
}

func (f *fast) packed() bool { return true }

func (f *fast) weightBytes() int64 { return f.weighed }

func (f *fast) fold(s backend.State, img *image[float32], id backend.StateID, records []float32) {
	if s.Store == backend.StoreMatrix {
		f.folder.run(img.states[id], img.halves[id], records, s.Rows/s.Width, s.Width)
		return
	}
	shift(img.states[id], records)
}

// shift appends rows to a window: it keeps the last ones.
func shift(window, rows []float32) {
	if n := len(rows); n < len(window) {
		copy(window, window[n:])
		copy(window[len(window)-n:], rows)
	} else {
		copy(window, rows[n-len(window):])
	}
}

// folder brings delta-net matrices forward, in FP32 or, if half is not nil, in BF16.
type folder struct {
	f              *fast
	state, records []float32
	half           []uint16
	heads, dim     int
}

func (o *folder) run(state []float32, half []uint16, records []float32, heads, dim int) {
	o.state, o.half, o.records, o.heads, o.dim = state, half, records, heads, dim
	o.f.each(o, heads, dim*dim*len(records)/(1+2*dim))
}

func (o *folder) do(worker, head int) {
	n := o.dim * o.dim
	var s []float32
	if o.half != nil {
		s = o.f.scratch(worker, n)
		o.f.level.expandBF16(s, o.half[head*n:])
	} else {
		s = o.state[head*n:][:n]
	}
	size := 1 + 2*o.dim
	for at := head * size; at < len(o.records); at += o.heads * size {
		r := o.records[at:][:size]
		o.f.level.deltaFold(s, r[1:1+o.dim], r[1+o.dim:], r[0])
	}
	if o.half != nil {
		o.f.level.shrinkBF16(o.half[head*n:][:n], s)
	}
}

// matrix prepares a weight for multiplication.
func (f *fast) matrix(w backend.Weight) matrix {
	if !w.Present() {
		return matrix{}
	}
	return newMatrix(w, f.kernels)
}

// vector decodes all values of a weight, row after row, and adds offset to each.
func vector(w backend.Weight, offset float32) []float32 {
	c := w.Cols()
	v := make([]float32, w.N*c)
	for i := range w.N {
		w.Decode32(v[i*c:(i+1)*c], i)
	}
	if offset != 0 {
		for i := range v {
			v[i] += offset
		}
	}
	return v
}

// prepared returns what build makes of key, made once a device.
func prepared[T any](f *fast, key any, build func() *T) *T {
	if v, ok := f.cache[key]; ok {
		return v.(*T)
	}
	v := build()
	f.cache[key] = v
	return v
}

func (f *fast) prepare(s *step[float32], op backend.Op) (func(*pass[float32]) error, error) {
	switch op := op.(type) {
	case backend.Embed:
		return (&embedOp{f: f, op: op}).run, nil
	case backend.PLEStart:
		return newPLEStart(f, op).run, nil
	case backend.PLEJoin:
		return newPLEJoin(f, op).run, nil
	case backend.Mix:
		return newMix(f, op).run, nil
	case backend.Defer:
		return func(p *pass[float32]) error {
			p.pend(op.X.X, op.Y)
			return nil
		}, nil
	case backend.GDN:
		return newGDN(f, op).run, nil
	case backend.QSA:
		return newQSA(f, op).run, nil
	case backend.MoE:
		return newMoE(f, op).run, nil
	case backend.Stem:
		return newStem(f, op).run, nil
	case backend.Carry:
		return func(p *pass[float32]) error {
			f.inject(p, op.X)
			p.carry(op)
			return nil
		}, nil
	case backend.Head:
		return newHead(f, op).run, nil
	case backend.Tap:
		return func(p *pass[float32]) error { return f.tap(p, op) }, nil
	}
	return nil, fmt.Errorf("unknown operation %T", op)
}
