package bench

import (
	"fmt"
	"strings"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// Traffic is the fewest bytes that a decoding step moves through device memory: every weight it needs once, states that it reads and
// writes, the keys and values of the tokens it attends to. Activations stay in caches and are not counted.
type Traffic struct {
	Dense   float64 `json:"dense"`   // projections, hyper-connections, routers, shared experts
	Experts float64 `json:"experts"` // the distinct ones that the rows chose
	Head    float64 `json:"head"`
	States  float64 `json:"states"` // delta-net matrices, their records and windows, read and written
	Cache   float64 `json:"cache"`  // keys, values, index keys
}

// Total is all of it.
func (t Traffic) Total() float64 { return t.Dense + t.Experts + t.Head + t.States + t.Cache }

// stored is the size of a weight's rows in memory.
func stored(w backend.Weight) float64 {
	if !w.Present() {
		return 0
	}
	g := w.T.Geometry()
	row := float64(g.Codes.Stride + g.High.Stride + g.Scales.Stride)
	if g.Divisors.Len > 0 { // block scales are swizzled, not in rows
		row += float64(g.Cols) / 16
	}
	return float64(w.N) * row
}

func all(list ...backend.Weight) (n float64) {
	for _, w := range list {
		n += stored(w)
	}
	return n
}

// Formats are what sequences are kept in.
type Formats struct {
	KV        backend.Cache
	BF16State bool
	// Behind is in how many decoding steps a delta-net matrix is written once, device.StepsBehind; 0 is in each. The steps between leave records of FP32 keys,
	// corrections and decays instead, by which the following ones bring the matrix forward.
	Behind int
}

// Moved counts a decoding step of a program: so many lanes, each of a row at the given length, whose experts are distinct ones a mixture
// on average.
func Moved(p *backend.Program, states []backend.State, f Formats, lanes, length int, distinct float64) (t Traffic) {
	matrix := 4
	if f.BF16State {
		matrix = 2
	}
	fixed := func(id backend.StateID, bytes int) float64 {
		s := states[id]
		return 2 * float64(lanes*s.Rows*s.Width*bytes)
	}
	state := func(id backend.StateID) float64 {
		all := fixed(id, matrix)
		if n := float64(f.Behind); n > 1 && p.Pass.Kind == backend.Decode {
			s := states[id]
			record := 4 * float64(lanes*s.Rows/s.Width*(2*s.Width+1))
			return all/2*(1+1/n) + record*((n-1)/2+(n-1)/n)
		}
		return all
	}
	row := func(id backend.StateID) float64 {
		s := states[id]
		if s.Store == backend.StoreKV && f.KV == backend.CacheFP8 {
			return float64(s.Width + 2*s.Width/s.Group)
		}
		return 2 * float64(s.Width)
	}
	for _, op := range p.Ops {
		switch op := op.(type) {
		case backend.Embed:
			t.Dense += float64(lanes) * stored(op.W.Rows(0, 1))
		case backend.PLEStart:
			t.Dense += float64(lanes * len(op.W.Sizes) * op.W.Table.RowBytes)
		case backend.PLEJoin:
			w := op.W
			t.Dense += all(w.Key, w.Value, w.NormKey, w.NormQuery, w.NormConv, w.Conv)
			t.States += fixed(op.Window, 2)
		case backend.Stem:
			w := op.W
			t.Dense += float64(lanes)*stored(w.Embed.Rows(0, 1)) + all(w.NormEmbed, w.NormHidden, w.ProjEmbed, w.ProjHidden)
		case backend.Mix:
			t.Dense += all(op.W.Norm, op.W.Down, op.W.Up, op.W.Inject)
		case backend.GDN:
			w := op.W
			t.Dense += all(w.Query, w.Key, w.Value, w.Z, w.A, w.B, w.Conv, w.ALog, w.DtBias, w.Norm, w.Out)
			t.States += state(op.Matrix) + fixed(op.Window, 2)
		case backend.QSA:
			w := op.W
			t.Dense += all(w.QueryGate, w.Key, w.Value, w.Out, w.QueryNorm, w.KeyNorm, w.Index, w.IndexQueryNorm, w.IndexKeyNorm)
			blocks, seen := length/w.Ratio, length
			if blocks > w.Blocks { // all index keys are scored, the best blocks and the tail attended to
				t.Cache += float64(lanes*blocks) * row(op.IndexKeys)
				seen = w.Blocks*w.Ratio + length%w.Ratio
			}
			t.Cache += float64(lanes*seen) * (row(op.Keys) + row(op.Values))
		case backend.MoE:
			w := op.W
			t.Dense += all(w.Router, w.SharedGate, w.SharedUp, w.SharedDown, w.SharedVector)
			t.Experts += distinct / float64(w.Experts) * all(w.GateUp, w.Down)
		case backend.Head:
			t.Head += stored(op.W.W)
		}
	}
	return t
}

// Resident is the bytes of an artifact's tensors that a device holds: those of the text component without the n-gram table and what
// belongs to it alone, without the proposal head, and of the drafter if there is one.
func Resident(d *artifact.Directory, drafter bool) (n int64) {
	for i := range d.Objects {
		o := &d.Objects[i]
		id := o.ID
		switch {
		case o.Resource, strings.HasPrefix(id, "vision/"), id == arch.ProposalWeight, id == arch.ProposalIDs:
		case strings.HasPrefix(id, "mtp") && !drafter, o.Format == num.U4Z8G16.String(), o.Format == num.Int64.String(), strings.HasSuffix(id, arch.PLETable):
		default:
			n += o.Bytes
		}
	}
	return n
}

// CheckResident compares what is on a device with what should be there. It does not hold what kernels with 16-bit
// activations have no use for, the experts' activation divisors.
func CheckResident(have, want int64) error {
	if diff := have - want; diff > want/1000 || -diff > want/1000 {
		return fmt.Errorf("bench: tensors of %d bytes are on the device, the artifact's size predicts %d", have, want)
	}
	return nil
}

// Products are the floating-point operations of a program's matrices for one row, two for each weight that the row meets: of experts the
// chosen ones, and without the head, of which a prompt needs one row.
func Products(p *backend.Program) (n float64) {
	size := func(list ...backend.Weight) (n float64) {
		for _, w := range list {
			if w.Present() {
				n += 2 * float64(w.N) * float64(w.Cols())
			}
		}
		return n
	}
	for _, op := range p.Ops {
		switch op := op.(type) {
		case backend.PLEJoin:
			n += size(op.W.Key, op.W.Value)
		case backend.Stem:
			n += size(op.W.ProjEmbed) + float64(p.Bufs[op.X.X].Width/op.W.Embed.Cols())*size(op.W.ProjHidden)
		case backend.Mix:
			n += size(op.W.Down, op.W.Up, op.W.Inject)
		case backend.GDN:
			w := op.W
			n += size(w.Query, w.Key, w.Value, w.Z, w.A, w.B, w.Out)
		case backend.QSA:
			w := op.W
			if n += size(w.Key, w.Value, w.Index); !op.AppendOnly {
				n += size(w.QueryGate, w.Out)
			}
		case backend.MoE:
			w := op.W
			n += size(w.Router, w.SharedGate, w.SharedUp, w.SharedDown, w.SharedVector)
			n += float64(w.TopK) / float64(w.Experts) * size(w.GateUp, w.Down)
		}
	}
	return n
}
