package model

import (
	"fmt"
	"math"

	"ninfer/internal/arch"
	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// Store is where a model's parameters are, by canonical name (package arch): an opened artifact, or weights made up for a test.
type Store interface {
	// Has reports whether the parameter exists.
	Has(name string) bool
	// Weight returns a parameter: rows of a tensor that may hold others as well. Its bytes stay valid until the store is closed.
	Weight(name string) (backend.Weight, error)
	// Table returns the encoding of an n-gram table and a reader of its rows, without touching the rows.
	Table(name string) (num.Format, backend.RowSource, error)
}

// Options choose what of a model is bound. What is off costs nothing.
type Options struct {
	// IDs is the number of ids the tokenizer knows; ids at or above it never win. 0 means the whole vocabulary.
	IDs int
	// Drafter binds the MTP head.
	Drafter bool
	// Proposal drafts through the proposal head instead of the full head. Needs Drafter.
	Proposal bool
}

// Model is a bound model.
type Model struct {
	Config  *arch.Config
	Options Options
	// States is the sequence image.
	States []backend.State

	embed  backend.Weight
	layers []layer
	mixer  *backend.HyperConnection
	head   *backend.HeadWeights
	mtp    *drafter
}

// layer is one decoder layer: exactly one of gdn and qsa is set.
type layer struct {
	attnHC, mlpHC *backend.HyperConnection
	ple           *backend.PLEWeights
	gdn           *backend.GDNWeights
	qsa           *backend.QSAWeights
	moe           *backend.MoEWeights

	matrix, window          backend.StateID // gdn
	planes                  planes          // qsa
	pleHistory, plePrevious backend.StateID // ple
}

// planes are the states of one sparse attention block.
type planes struct{ keys, values, rawIndex, indexKeys, positions backend.StateID }

// drafter is the MTP head.
type drafter struct {
	stem         *backend.StemWeights
	layer        layer
	mixer        *backend.HyperConnection
	head         *backend.HeadWeights
	carry, stood backend.StateID
}

// Bind looks up every parameter that the options need and checks its shape. The first thing that is missing or wrong is the error.
func Bind(c *arch.Config, s Store, opt Options) (*Model, error) {
	if opt.IDs == 0 {
		opt.IDs = c.Text.VocabSize
	}
	if opt.IDs < 1 || opt.IDs > c.Text.VocabSize {
		return nil, fmt.Errorf("model: tokenizer has %d ids, the vocabulary %d rows", opt.IDs, c.Text.VocabSize)
	}
	b := &binder{c: c, t: &c.Text, s: s}
	m := &Model{Config: c, Options: opt}
	b.m = m
	m.bind(b)
	if b.err != nil {
		return nil, fmt.Errorf("model: %w", b.err)
	}
	return m, nil
}

// DraftExperts is how the drafter's experts are stored, num.Invalid without a drafter. Only BF16 ones are exactly those of a checkpoint: all
// checkpoints have them in BF16, and other formats are made by convert.
func (m *Model) DraftExperts() num.Format {
	if m.mtp == nil {
		return num.Invalid
	}
	return m.mtp.layer.moe.GateUp.T.Format
}

func (m *Model) bind(b *binder) {
	t := b.t
	h, wide := t.HiddenSize, t.StreamWidth()
	m.embed = b.weight(arch.EmbedTokens, t.VocabSize, h)
	for l := range t.Layers {
		m.layers = append(m.layers, b.layer(l))
	}
	m.mixer = b.hyperConnection(arch.TextMixer, false)
	m.head = &backend.HeadWeights{W: b.weight(arch.LMHead, t.VocabSize, h), IDs: m.Options.IDs}
	if !m.Options.Drafter {
		return
	}
	d := &drafter{
		stem: &backend.StemWeights{
			Embed: m.embed, NormEmbed: b.weight(arch.MTPEmbeddingNorm, 1, h), NormHidden: b.weight(arch.MTPHiddenNorm, 1, wide),
			ProjEmbed: b.weight(arch.MTPFCEmbedding, h, h), ProjHidden: b.weight(arch.MTPFCHidden, h, h),
			Eps: t.RMSNormEps,
		},
		layer: layer{
			attnHC: b.hyperConnection(arch.AttnHCPrefix(arch.MTPLayerPrefix), true),
			mlpHC:  b.hyperConnection(arch.MLPHCPrefix(arch.MTPLayerPrefix), true),
			qsa:    b.attention(arch.AttnPrefix(arch.MTPLayerPrefix)),
			moe:    b.experts(arch.MLPPrefix(arch.MTPLayerPrefix)),
			planes: b.planes("mtp", backend.Drafter),
		},
		mixer: b.hyperConnection(arch.MTPMixer, false),
		head:  m.head,
		carry: b.state(backend.State{Name: "carried streams", Kind: backend.Carried, Store: backend.StoreStream, Width: wide}),
		stood: b.state(backend.State{Name: "carried positions", Kind: backend.Carried, Store: backend.StoreInt, Width: 3}),
	}
	if m.Options.Proposal {
		d.head = b.proposal()
	}
	m.mtp = d
}

// binder collects weights until the first error.
type binder struct {
	c   *arch.Config
	t   *arch.Text
	s   Store
	m   *Model
	err error
}

func (b *binder) fail(format string, args ...any) {
	if b.err == nil {
		b.err = fmt.Errorf(format, args...)
	}
}

// weight returns a parameter of rows*cols values; a vector has one row.
func (b *binder) weight(name string, rows, cols int) backend.Weight {
	if b.err != nil {
		return backend.Weight{}
	}
	w, err := b.s.Weight(name)
	if err != nil {
		b.fail("%w", err)
		return backend.Weight{}
	}
	if w.N != rows || w.Cols() != cols {
		b.fail("parameter %q has %d rows of %d, the configuration needs %d of %d", name, w.N, w.Cols(), rows, cols)
		return backend.Weight{}
	}
	return w
}

func (b *binder) state(s backend.State) backend.StateID {
	b.m.States = append(b.m.States, s)
	return backend.StateID(len(b.m.States) - 1)
}

func (b *binder) hyperConnection(p string, inject bool) *backend.HyperConnection {
	wide := b.t.StreamWidth()
	hc := &backend.HyperConnection{
		Norm: b.weight(p+arch.HCNorm, 1, wide),
		Down: b.weight(p+arch.MixDown, b.t.HCLowRank, wide),
		Up:   b.weight(p+arch.MixUp, wide, b.t.HCLowRank),
		Eps:  b.t.RMSNormEps,
	}
	if inject {
		hc.Inject = b.weight(p+arch.BlockInject, b.t.Streams, wide)
	}
	return hc
}

func (b *binder) layer(l int) layer {
	p := arch.LayerPrefix(l)
	out := layer{attnHC: b.hyperConnection(arch.AttnHCPrefix(p), true)}
	name := fmt.Sprintf("layer %d ", l)
	if b.t.Full(l) {
		out.qsa = b.attention(arch.AttnPrefix(p))
		out.planes = b.planes(name, backend.Target)
	} else {
		out.gdn = b.deltaNet(arch.GDNPrefix(p))
		out.matrix = b.state(backend.State{
			Name: name + "matrix", Kind: backend.Fixed, Store: backend.StoreMatrix,
			Width: b.t.LinearValueHeadDim, Rows: b.t.LinearValueHeads * b.t.LinearKeyHeadDim,
		})
		out.window = b.state(backend.State{
			Name: name + "window", Kind: backend.Fixed, Store: backend.StoreWindow, Width: b.t.ConvDim(), Rows: b.t.LinearConvKernel - 1,
		})
	}
	if k := b.t.PLEIndex(l); k >= 0 {
		out.ple = b.perLayerEmbedding(arch.PLEPrefix(p), k)
		out.pleHistory = b.state(backend.State{
			Name: name + "n-gram history", Kind: backend.Fixed, Store: backend.StoreInt, Width: 1, Rows: b.t.NgramSize - 1, Initial: b.t.ResetID(),
		})
		out.plePrevious = b.state(backend.State{
			Name: name + "embedding window", Kind: backend.Fixed, Store: backend.StoreWindow,
			Width: b.t.StreamWidth(), Rows: (b.t.PLEConvKernel - 1) * b.t.NgramSize,
		})
	}
	out.mlpHC = b.hyperConnection(arch.MLPHCPrefix(p), true)
	out.moe = b.experts(arch.MLPPrefix(p))
	return out
}

func (b *binder) planes(name string, c backend.Clock) planes {
	kv := b.t.KVHeads * b.t.HeadDim
	per := func(what string, s backend.Store, width int) backend.StateID {
		return b.state(backend.State{Name: name + what, Kind: backend.PerToken, Clock: c, Store: s, Width: width, Group: b.t.HeadDim})
	}
	return planes{
		keys: per("keys", backend.StoreKV, kv), values: per("values", backend.StoreKV, kv),
		rawIndex:  per("raw index keys", backend.StoreIndex, b.t.IndexHeadDim),
		positions: per("positions", backend.StoreInt, 3),
		indexKeys: b.state(backend.State{
			Name: name + "index keys", Kind: backend.PerBlock, Clock: c, Store: backend.StoreIndex, Width: b.t.IndexHeadDim, Ratio: b.t.IndexCompress,
		}),
	}
}

func (b *binder) attention(p string) *backend.QSAWeights {
	t := b.t
	h, d, kv := t.HiddenSize, t.HeadDim, t.KVHeads*t.HeadDim
	s := t.RopeParameters.Sections
	return &backend.QSAWeights{
		QueryGate: b.weight(p+arch.QProj, 2*t.Heads*d, h), Key: b.weight(p+arch.KProj, kv, h), Value: b.weight(p+arch.VProj, kv, h),
		Out: b.weight(p+arch.OProj, h, t.Heads*d), QueryNorm: b.weight(p+arch.QNorm, 1, d), KeyNorm: b.weight(p+arch.KNorm, 1, d),
		Index:          b.weight(p+arch.IndexQK, (t.IndexHeads+1)*t.IndexHeadDim, h),
		IndexQueryNorm: b.weight(p+arch.IndexQLN, 1, t.IndexHeadDim), IndexKeyNorm: b.weight(p+arch.IndexKLN, 1, t.IndexHeadDim),
		Heads: t.Heads, KVHeads: t.KVHeads, HeadDim: d, IndexHeads: t.IndexHeads, IndexDim: t.IndexHeadDim,
		Blocks: t.IndexBlocks(), Ratio: t.IndexCompress, Eps: t.RMSNormEps,
		Rotary: backend.Rotary{Dim: t.RotaryDim(), Theta: t.RopeParameters.Theta, Sections: [3]int(s)},
	}
}

func (b *binder) deltaNet(p string) *backend.GDNWeights {
	t := b.t
	h, kd, vd := t.HiddenSize, t.KeyDim(), t.ValueDim()
	qkv := b.weight(p+arch.GDNQKV, 2*kd+vd, h)
	w := &backend.GDNWeights{
		Z: b.weight(p+arch.GDNZ, vd, h), A: b.weight(p+arch.GDNA, t.LinearValueHeads, h), B: b.weight(p+arch.GDNB, t.LinearValueHeads, h),
		Conv: b.weight(p+arch.GDNConv, t.LinearConvKernel, t.ConvDim()),
		ALog: b.weight(p+arch.GDNALog, 1, t.LinearValueHeads), DtBias: b.weight(p+arch.GDNDTBias, 1, t.LinearValueHeads),
		Norm: b.weight(p+arch.GDNNorm, 1, t.LinearValueHeadDim), Out: b.weight(p+arch.GDNOut, h, vd),
		KeyHeads: t.LinearKeyHeads, ValueHeads: t.LinearValueHeads, Dim: t.LinearKeyHeadDim, Taps: t.LinearConvKernel, Eps: t.RMSNormEps,
	}
	if b.err == nil {
		w.Query, w.Key, w.Value = qkv.Rows(0, kd), qkv.Rows(kd, kd), qkv.Rows(2*kd, vd)
	}
	return w
}

func (b *binder) experts(p string) *backend.MoEWeights {
	t := b.t
	h, n, i, s := t.HiddenSize, t.Experts, t.ExpertIntermediate, t.SharedIntermediate
	gateUp, down := p+arch.BankGateUp, p+arch.BankDown
	if !b.s.Has(gateUp) { // the drafter's banks may be BF16
		gateUp, down = p+arch.BankGateUpBF16, p+arch.BankDownBF16
	}
	return &backend.MoEWeights{
		Router: b.weight(p+arch.Router, n, h), GateUp: b.weight(gateUp, n*2*i, h), Down: b.weight(down, n*h, i),
		SharedGate: b.weight(p+arch.SharedGate, s, h), SharedUp: b.weight(p+arch.SharedUp, s, h), SharedDown: b.weight(p+arch.SharedDown, h, s),
		SharedVector: b.weight(p+arch.SharedSwitch, 1, h),
		Experts:      n, TopK: t.ExpertsPerToken, Inter: i, SharedInter: s, Normalize: t.NormTopKProb,
	}
}

func (b *binder) perLayerEmbedding(p string, k int) *backend.PLEWeights {
	t := b.t
	n := t.Ngram(k)
	h, wide := t.HiddenSize, t.StreamWidth()
	w := &backend.PLEWeights{
		Table: b.table(p, n),
		Key:   b.weight(p+arch.PLEKey, wide, t.PLEEmbedDim), Value: b.weight(p+arch.PLEValue, h, t.PLEEmbedDim),
		NormKey: b.weight(p+arch.PLENormKey, 1, wide), NormQuery: b.weight(p+arch.PLENormQuery, 1, wide), NormConv: b.weight(p+arch.PLENormConv, 1, wide),
		Conv: b.weight(p+arch.PLEConv, t.PLEConvKernel, wide), Taps: t.PLEConvKernel, Dilation: t.NgramSize, Eps: t.RMSNormEps,
		Multipliers: n.Multipliers, Sizes: n.Sizes, Offsets: n.Offsets, HeadsPerNgram: t.HeadsPerNgram, Reset: t.ResetID(),
	}
	return w
}

func (b *binder) table(p string, n arch.Ngram) backend.Table {
	if b.err != nil {
		return backend.Table{}
	}
	f, src, err := b.s.Table(p + arch.PLETable)
	if err != nil {
		b.fail("%w", err)
		return backend.Table{}
	}
	t := backend.Table{Source: src, Format: f, Multiplier: 1, Width: n.HeadWidth}
	switch f {
	case num.BF16:
		t.RowBytes = 2 * t.Width
	case num.FP8:
		t.RowBytes = t.Width
		scale := b.weight(p+arch.PLETableScale, 1, 1)
		if b.err == nil {
			t.Multiplier = scale.Vector()[0]
			if !(t.Multiplier > 0) || math.IsInf(t.Multiplier, 0) {
				b.fail("parameter %q is %v, need a finite positive multiplier", p+arch.PLETableScale, t.Multiplier)
			}
		}
	case num.U4Z8G16:
		t.RowBytes = t.Width/2 + t.Width/16*2
	default:
		b.fail("parameter %q has format %v, which no n-gram table has", p+arch.PLETable, f)
	}
	return t
}

// proposal binds the reduced head. Its ids must be real, distinct, and as many as its rows.
func (b *binder) proposal() *backend.HeadWeights {
	if !b.s.Has(arch.ProposalWeight) {
		b.fail("component text has no proposal, the artifact no %s: drafting through it is not possible, leave --lm-head-draft out", arch.ProposalWeight)
		return nil
	}
	ids, err := b.s.Weight(arch.ProposalIDs)
	if err != nil {
		b.fail("%w", err)
		return nil
	}
	rows := ids.Cols()
	h := &backend.HeadWeights{W: b.weight(arch.ProposalWeight, rows, b.t.HiddenSize), IDs: b.m.Options.IDs}
	line := make([]float64, rows)
	ids.Decode(line, 0)
	seen := make(map[int32]bool, rows)
	for i, v := range line {
		id := int32(v)
		if id < 0 || int(id) >= b.m.Options.IDs || seen[id] {
			b.fail("parameter %q: row %d has id %d, which is repeated or no id of the tokenizer", arch.ProposalIDs, i, id)
			return nil
		}
		seen[id] = true
		h.Map = append(h.Map, id)
	}
	return h
}
