package optest

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"

	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// Shape is the size of a made-up model. Zero members of the last group mean that the model has no such part.
type Shape struct {
	Name                                        string
	H, Streams, LowRank, Vocab                  int
	KeyHeads, ValueHeads, Dim, Taps             int // gated delta net
	Heads, KVHeads, HeadDim                     int // attention
	IndexHeads, IndexDim, Blocks, Ratio, Rotary int
	Experts, TopK, Inter, SharedInter           int
	Ngram, HeadsPerNgram, TableWidth            int // n-gram embedding
}

// Shapes are what the suite runs by default: Real has the head widths, streams and taps of the family, which kernels may be made
// for, Odd has sizes that no vector width divides.
var (
	Real = Shape{
		Name: "real", H: 128, Streams: 4, LowRank: 32, Vocab: 200, KeyHeads: 1, ValueHeads: 3, Dim: 128, Taps: 4,
		Heads: 4, KVHeads: 2, HeadDim: 256, IndexHeads: 4, IndexDim: 128, Blocks: 4, Ratio: 4, Rotary: 64,
		Experts: 6, TopK: 3, Inter: 64, SharedInter: 64, Ngram: 3, HeadsPerNgram: 2, TableWidth: 32,
	}
	Odd = Shape{
		Name: "odd", H: 37, Streams: 3, LowRank: 5, Vocab: 53, KeyHeads: 2, ValueHeads: 4, Dim: 24, Taps: 3,
		Heads: 3, KVHeads: 1, HeadDim: 20, IndexHeads: 2, IndexDim: 12, Blocks: 3, Ratio: 5, Rotary: 10,
		Experts: 5, TopK: 2, Inter: 19, SharedInter: 7, Ngram: 2, HeadsPerNgram: 3, TableWidth: 16,
	}
	Wide = Shape{
		Name: "wide", H: 640, Streams: 4, LowRank: 48, Vocab: 130, KeyHeads: 2, ValueHeads: 2, Dim: 64, Taps: 4,
		Heads: 2, KVHeads: 2, HeadDim: 64, IndexHeads: 1, IndexDim: 32, Blocks: 2, Ratio: 4, Rotary: 32,
		Experts: 3, TopK: 2, Inter: 192, SharedInter: 72, Ngram: 3, HeadsPerNgram: 1, TableWidth: 48,
	}
)

// Model is a made-up model of one layer of each kind, with everything a Device knows: n-gram embedding, delta net, attention and
// experts, drafter. Its parts also serve alone, as tests of one operation.
type Model struct {
	Shape  Shape
	States []backend.State

	embed              backend.Weight
	hc                 [4]*backend.HyperConnection
	mixer, draftMixer  *backend.HyperConnection
	ple                *backend.PLEWeights
	gdn                *backend.GDNWeights
	qsa                [2]*backend.QSAWeights // target, drafter
	moe                *backend.MoEWeights
	stem               *backend.StemWeights
	head, half, eye    *backend.HeadWeights // the whole one, a reduced one with its own ids, and one that shows its input
	matrix, window     backend.StateID
	planes             [2]backend.QSA
	history, previous  backend.StateID
	carry, carriedRows backend.StateID
}

// weights makes random weights of a model, matrices in format f where it can store them and in BF16 elsewhere.
type weights struct {
	r *rand.Rand
	f num.Format
}

func (w weights) matrix(rows, cols int) backend.Weight {
	f := w.f
	if !Fits(f, rows, cols) {
		f = num.BF16
	}
	return Weight(w.r, f, rows, cols)
}

// bank is a bank of experts.
func (w weights) bank(experts, rows, cols int) backend.Weight {
	if w.f == num.NVFP4 && Fits(num.NVFP4, rows, cols) {
		return backend.Whole(Tensor(w.r, num.NVFP4, experts, rows, cols))
	}
	return w.matrix(experts*rows, cols)
}

// vector has values of size about size around center.
func (w weights) vector(n int, center, size float64) backend.Weight {
	data := make([]byte, 2*n)
	for i := range n {
		binary.LittleEndian.PutUint16(data[2*i:], num.ToBF16(float32(center+w.r.NormFloat64()*size)))
	}
	t, err := num.NewTensor(num.BF16, num.Contiguous, []int{1, n}, data)
	if err != nil {
		panic(err)
	}
	return backend.Whole(t)
}

const epsilon = 1e-6

func (w weights) hyper(s Shape, inject bool) *backend.HyperConnection {
	wide := s.Streams * s.H
	hc := &backend.HyperConnection{Norm: w.vector(wide, 0, .3), Down: w.matrix(s.LowRank, wide), Up: w.matrix(wide, s.LowRank), Eps: epsilon}
	if inject {
		hc.Inject = w.matrix(s.Streams, wide)
	}
	return hc
}

// table is an n-gram table in memory.
type table struct {
	rowBytes int
	data     []byte
}

func (t *table) Rows(ids []int64, dst []byte) error {
	for i, id := range ids {
		if id < 0 || int(id+1)*t.rowBytes > len(t.data) {
			return fmt.Errorf("optest: table row %d of %d", id, len(t.data)/t.rowBytes)
		}
		copy(dst[i*t.rowBytes:(i+1)*t.rowBytes], t.data[int(id)*t.rowBytes:])
	}
	return nil
}

// table makes a table of rows in one of the three formats.
func (w weights) table(f num.Format, rows, width int) backend.Table {
	t := backend.Table{Format: f, Width: width, Multiplier: 1}
	switch f {
	case num.BF16:
		t.RowBytes = 2 * width
	case num.FP8:
		t.RowBytes, t.Multiplier = width, 1./128
	case num.U4Z8G16:
		t.RowBytes = width/2 + width/8
	}
	data := make([]byte, rows*t.RowBytes)
	for i := range rows {
		row := data[i*t.RowBytes:][:t.RowBytes]
		switch f {
		case num.BF16:
			for c := range width {
				binary.LittleEndian.PutUint16(row[2*c:], num.ToBF16(float32(w.r.NormFloat64())))
			}
		case num.FP8:
			for c := range row {
				if row[c] = byte(w.r.Uint32()); row[c]&0x7f == 0x7f {
					row[c] ^= 0x40
				}
			}
		case num.U4Z8G16:
			for c := range width / 2 {
				row[c] = byte(w.r.Uint32())
			}
			for c := width / 2; c < len(row); c += 2 {
				binary.LittleEndian.PutUint16(row[c:], num.ToF16(float32(.1+.2*w.r.Float64())))
			}
		}
	}
	t.Source = &table{t.RowBytes, data}
	return t
}

// TableFormats are the formats that an n-gram table may have.
var TableFormats = []num.Format{num.BF16, num.FP8, num.U4Z8G16}

// identity is a matrix that gives its input back.
func identity(n int) backend.Weight {
	data := make([]byte, 2*n*n)
	for i := range n {
		binary.LittleEndian.PutUint16(data[2*(i*n+i):], num.ToBF16(1))
	}
	t, err := num.NewTensor(num.BF16, num.Contiguous, []int{n, n}, data)
	if err != nil {
		panic(err)
	}
	return backend.Whole(t)
}

// NewModel makes a model with random weights; the format of the n-gram table follows from the seed.
func NewModel(s Shape, f num.Format, seed uint64) *Model {
	w := weights{rand.New(rand.NewPCG(seed, 99)), f}
	m := &Model{Shape: s}
	wide := s.Streams * s.H
	m.embed = w.matrix(s.Vocab, s.H)
	for i := range m.hc {
		m.hc[i] = w.hyper(s, true)
	}
	m.mixer, m.draftMixer = w.hyper(s, false), w.hyper(s, false)

	const reset = 3
	heads := (s.Ngram - 1) * s.HeadsPerNgram
	m.ple = &backend.PLEWeights{
		Key: w.matrix(wide, heads*s.TableWidth), Value: w.matrix(s.H, heads*s.TableWidth),
		NormKey: w.vector(wide, 0, .3), NormQuery: w.vector(wide, 0, .3), NormConv: w.vector(wide, 0, .3),
		Conv: w.vectors(s.Taps, wide), Taps: s.Taps, Dilation: s.Ngram, Eps: epsilon, HeadsPerNgram: s.HeadsPerNgram, Reset: reset,
	}
	for range s.Ngram {
		m.ple.Multipliers = append(m.ple.Multipliers, w.r.Int64()|1) // products wrap around, and are negative half of the time
	}
	rows := int64(0)
	for i := range heads {
		n := int64(17 + 6*i)
		m.ple.Sizes, m.ple.Offsets = append(m.ple.Sizes, n), append(m.ple.Offsets, rows)
		rows += n
	}
	m.ple.Table = w.table(TableFormats[seed%3], int(rows), s.TableWidth)

	m.gdn = &backend.GDNWeights{
		Query: w.matrix(s.KeyHeads*s.Dim, s.H), Key: w.matrix(s.KeyHeads*s.Dim, s.H), Value: w.matrix(s.ValueHeads*s.Dim, s.H),
		Z: w.matrix(s.ValueHeads*s.Dim, s.H), A: w.matrix(s.ValueHeads, s.H), B: w.matrix(s.ValueHeads, s.H),
		Conv: w.vectors(s.Taps, (2*s.KeyHeads+s.ValueHeads)*s.Dim), ALog: w.vector(s.ValueHeads, 0, .5), DtBias: w.vector(s.ValueHeads, -2, .5),
		Norm: w.vector(s.Dim, 1, .2), Out: w.matrix(s.H, s.ValueHeads*s.Dim),
		KeyHeads: s.KeyHeads, ValueHeads: s.ValueHeads, Dim: s.Dim, Taps: s.Taps, Eps: epsilon,
	}
	for i := range m.qsa {
		third := s.Rotary / 6
		m.qsa[i] = &backend.QSAWeights{
			QueryGate: w.matrix(2*s.Heads*s.HeadDim, s.H), Key: w.matrix(s.KVHeads*s.HeadDim, s.H), Value: w.matrix(s.KVHeads*s.HeadDim, s.H),
			Out: w.matrix(s.H, s.Heads*s.HeadDim), QueryNorm: w.vector(s.HeadDim, .5, .3), KeyNorm: w.vector(s.HeadDim, .5, .3),
			Index: w.matrix((s.IndexHeads+1)*s.IndexDim, s.H), IndexQueryNorm: w.vector(s.IndexDim, 0, .3), IndexKeyNorm: w.vector(s.IndexDim, 0, .3),
			Heads: s.Heads, KVHeads: s.KVHeads, HeadDim: s.HeadDim, IndexHeads: s.IndexHeads, IndexDim: s.IndexDim, Blocks: s.Blocks, Ratio: s.Ratio,
			Rotary: backend.Rotary{Dim: s.Rotary, Theta: 1e4, Sections: [3]int{s.Rotary/2 - 2*third, third, third}}, Eps: epsilon,
		}
	}
	m.moe = &backend.MoEWeights{
		Router: w.ties(s.Experts, s.H), GateUp: w.bank(s.Experts, 2*s.Inter, s.H), Down: w.bank(s.Experts, s.H, s.Inter),
		SharedGate: w.matrix(s.SharedInter, s.H), SharedUp: w.matrix(s.SharedInter, s.H), SharedDown: w.matrix(s.H, s.SharedInter),
		SharedVector: w.matrix(1, s.H), Experts: s.Experts, TopK: s.TopK, Inter: s.Inter, SharedInter: s.SharedInter, Normalize: seed%2 == 0,
	}
	m.stem = &backend.StemWeights{
		Embed: m.embed, NormEmbed: w.vector(s.H, 0, .3), NormHidden: w.vector(wide, 0, .3), ProjEmbed: w.matrix(s.H, s.H), ProjHidden: w.matrix(s.H, s.H),
		Eps: epsilon,
	}
	m.head = &backend.HeadWeights{W: w.matrix(s.Vocab, s.H), IDs: s.Vocab - 3}
	m.half = &backend.HeadWeights{W: w.matrix(s.Vocab/2, s.H), IDs: s.Vocab}
	for _, id := range w.r.Perm(s.Vocab)[:s.Vocab/2] {
		m.half.Map = append(m.half.Map, int32(id))
	}
	m.eye = &backend.HeadWeights{W: identity(s.H), IDs: s.H}
	m.declare()
	return m
}

// ties is a matrix whose last row repeats its first, so that the two logits are equal.
func (w weights) ties(rows, cols int) backend.Weight {
	t := Tensor(w.r, num.BF16, rows, cols)
	copy(t.Data[2*(rows-1)*cols:], t.Data[:2*cols])
	return backend.Whole(t)
}

// vectors are the taps of a convolution. They make its output large: small values of a delta net drown in the epsilon of its norm,
// and what is left depends on how the products of queries and keys cancel.
func (w weights) vectors(rows, cols int) backend.Weight {
	data := make([]byte, 2*rows*cols)
	for i := range rows * cols {
		binary.LittleEndian.PutUint16(data[2*i:], num.ToBF16(float32(4*w.r.NormFloat64()/math.Sqrt(float64(rows)))))
	}
	t, err := num.NewTensor(num.BF16, num.Contiguous, []int{rows, cols}, data)
	if err != nil {
		panic(err)
	}
	return backend.Whole(t)
}

// declare lists the states.
func (m *Model) declare() {
	s := m.Shape
	wide := s.Streams * s.H
	add := func(st backend.State) backend.StateID {
		m.States = append(m.States, st)
		return backend.StateID(len(m.States) - 1)
	}
	m.history = add(backend.State{Name: "history", Kind: backend.Fixed, Store: backend.StoreInt, Width: 1, Rows: s.Ngram - 1, Initial: m.ple.Reset})
	m.previous = add(backend.State{Name: "embedding window", Kind: backend.Fixed, Store: backend.StoreWindow, Width: wide, Rows: (s.Taps - 1) * s.Ngram})
	m.matrix = add(backend.State{Name: "matrix", Kind: backend.Fixed, Store: backend.StoreMatrix, Width: s.Dim, Rows: s.ValueHeads * s.Dim})
	m.window = add(backend.State{
		Name: "window", Kind: backend.Fixed, Store: backend.StoreWindow, Width: (2*s.KeyHeads + s.ValueHeads) * s.Dim, Rows: s.Taps - 1,
	})
	for i, c := range []backend.Clock{backend.Target, backend.Drafter} {
		per := func(name string, store backend.Store, width int) backend.StateID {
			return add(backend.State{Name: fmt.Sprint(name, " ", i), Kind: backend.PerToken, Clock: c, Store: store, Width: width, Group: s.HeadDim})
		}
		m.planes[i] = backend.QSA{
			Layer: i, W: m.qsa[i],
			Keys: per("keys", backend.StoreKV, s.KVHeads*s.HeadDim), Values: per("values", backend.StoreKV, s.KVHeads*s.HeadDim),
			RawIndex: per("raw index keys", backend.StoreIndex, s.IndexDim), Positions: per("positions", backend.StoreInt, 3),
			IndexKeys: add(backend.State{
				Name: fmt.Sprint("index keys ", i), Kind: backend.PerBlock, Clock: c, Store: backend.StoreIndex, Width: s.IndexDim, Ratio: s.Ratio,
			}),
		}
	}
	m.carry = add(backend.State{Name: "carried streams", Kind: backend.Carried, Store: backend.StoreStream, Width: wide})
	m.carriedRows = add(backend.State{Name: "carried positions", Kind: backend.Carried, Store: backend.StoreInt, Width: 3})
}

// builder writes programs.
type builder struct {
	m       *Model
	p       *backend.Program
	x       backend.Streams
	mix, y  backend.Buf
	gathers backend.Buf
}

func (m *Model) builder(p backend.Pass) *builder {
	b := &builder{m: m, p: &backend.Program{Pass: p}}
	buf := func(name string, width int) backend.Buf {
		b.p.Bufs = append(b.p.Bufs, backend.BufSpec{Name: name, Width: width})
		return backend.Buf(len(b.p.Bufs) - 1)
	}
	s := m.Shape
	b.x = backend.Streams{X: buf("streams", s.Streams*s.H), Inject: buf("inject", s.Streams)}
	b.mix, b.y = buf("mix", s.H), buf("block output", s.H)
	b.gathers = buf("n-gram embedding", len(m.ple.Sizes)*s.TableWidth)
	return b
}

func (b *builder) add(ops ...backend.Op) { b.p.Ops = append(b.p.Ops, ops...) }

func (b *builder) mixer(hc *backend.HyperConnection) backend.Mix {
	return backend.Mix{W: hc, X: b.x, Out: b.mix}
}

func (b *builder) defers() backend.Defer { return backend.Defer{X: b.x, Y: b.y} }

func (b *builder) attention(i int, appendOnly bool) backend.QSA {
	q := b.m.planes[i]
	q.In, q.Out, q.AppendOnly = b.mix, b.y, appendOnly
	return q
}

func (b *builder) delta() backend.GDN {
	return backend.GDN{Layer: 0, W: b.m.gdn, In: b.mix, Out: b.y, Matrix: b.m.matrix, Window: b.m.window}
}

func (b *builder) experts() backend.MoE { return backend.MoE{W: b.m.moe, In: b.mix, Out: b.y} }

func (b *builder) start() backend.PLEStart {
	return backend.PLEStart{W: b.m.ple, History: b.m.history, Out: b.gathers}
}

func (b *builder) join() backend.PLEJoin {
	return backend.PLEJoin{W: b.m.ple, In: b.gathers, X: b.x, History: b.m.history, Window: b.m.previous}
}

func (b *builder) carries() backend.Carry {
	return backend.Carry{X: b.x, Out: b.m.carry, Positions: b.m.carriedRows}
}

func (b *builder) stem() backend.Stem {
	return backend.Stem{W: b.m.stem, Carry: b.m.carry, Positions: b.m.carriedRows, X: b.x}
}

// Program is the whole model's order of operations.
func (m *Model) Program(p backend.Pass) *backend.Program {
	b := m.builder(p)
	switch p.Kind {
	case backend.Seed:
		b.add(b.stem(), b.mixer(m.hc[0]), b.attention(1, true))
	case backend.Draft:
		b.add(b.stem(), b.mixer(m.hc[0]), b.attention(1, false), b.defers(), b.mixer(m.hc[1]), b.experts(), b.defers(),
			b.carries(), b.mixer(m.draftMixer), backend.Head{W: m.half, In: b.mix})
	default:
		b.add(backend.Embed{W: m.embed, X: b.x}, b.start(), b.mixer(m.hc[0]), b.delta(), b.defers(), b.join(),
			b.mixer(m.hc[1]), b.experts(), b.defers(), b.mixer(m.hc[2]), b.attention(0, false), b.defers(),
			backend.Tap{Name: "streams", X: b.x}, b.mixer(m.hc[3]), b.experts(), b.defers(),
			b.carries(), b.mixer(m.mixer), backend.Head{W: m.head, In: b.mix})
	}
	return b.p
}

// part is the program that shows what one operation does: "mix", "gdn" and so on put their result through an identity head, "embed"
// and "ple" through a tap named "streams", which follows everywhere.
func (m *Model) part(name string, p backend.Pass) *backend.Program {
	b := m.builder(p)
	b.add(backend.Embed{W: m.embed, X: b.x})
	out := b.y
	switch name {
	case "embed":
		b.add(b.mixer(m.hc[0]))
		out = b.mix
	case "mix": // of streams that differ
		b.add(b.mixer(m.hc[0]), backend.Defer{X: b.x, Y: b.mix}, b.mixer(m.hc[1]))
		out = b.mix
	case "head":
		b.add(b.mixer(m.hc[0]), backend.Head{W: m.head, In: b.mix}, backend.Tap{Name: "streams", X: b.x})
		return b.p
	case "reduced head":
		b.add(b.mixer(m.hc[0]), backend.Head{W: m.half, In: b.mix}, backend.Tap{Name: "streams", X: b.x})
		return b.p
	case "ple":
		b.add(b.start(), b.mixer(m.hc[0]), backend.Defer{X: b.x, Y: b.mix}, b.join(), b.mixer(m.hc[1]))
		out = b.mix
	case "gdn":
		b.add(b.mixer(m.hc[0]), b.delta())
	case "qsa":
		b.add(b.mixer(m.hc[0]), b.attention(0, false))
	case "moe":
		b.add(b.mixer(m.hc[0]), b.experts())
	default:
		panic("optest: no part " + name)
	}
	b.add(backend.Tap{Name: "streams", X: b.x}, backend.Head{W: m.eye, In: out})
	return b.p
}

// parts are the operations that part shows.
var parts = []string{"embed", "mix", "head", "reduced head", "ple", "gdn", "qsa", "moe"}
