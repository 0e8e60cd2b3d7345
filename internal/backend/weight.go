package backend

import (
	"fmt"
	"math"

	"ninfer/internal/num"
)

// Weight is a run of rows of an encoded tensor: rows [First, First+N) of T, counted over its flattened leading dimensions.
// Two artifact dialects store the same parameters alone or fused with others; a Weight hides which. The zero Weight is absent.
type Weight struct {
	T     num.Tensor
	First int
	N     int
}

// Whole is the weight that is all of t.
func Whole(t num.Tensor) Weight { return Weight{T: t, N: t.Rows()} }

// Rows returns the sub-range [first, first+n) of w.
func (w Weight) Rows(first, n int) Weight {
	if first < 0 || n < 0 || first+n > w.N {
		panic(fmt.Sprintf("backend: rows %d+%d of a weight with %d", first, n, w.N))
	}
	return Weight{T: w.T, First: w.First + first, N: n}
}

// Present reports whether the weight exists.
func (w Weight) Present() bool { return w.N > 0 }

// Cols is the contraction length.
func (w Weight) Cols() int { return w.T.Cols() }

// Decode writes the exact values of row i, in float64, to dst (Cols values).
func (w Weight) Decode(dst []float64, i int) { w.T.DecodeRow(dst, w.First+i) }

// Decode32 writes the values of row i, rounded once to float32, to dst (Cols values).
func (w Weight) Decode32(dst []float32, i int) { w.T.DecodeRow32(dst, w.First+i) }

// Vector returns all values of w, row after row, in float64.
func (w Weight) Vector() []float64 {
	c := w.Cols()
	v := make([]float64, w.N*c)
	for i := range w.N {
		w.Decode(v[i*c:(i+1)*c], i)
	}
	return v
}

// HyperConnection holds one site's weights: S streams of H values, rank L.
type HyperConnection struct {
	Norm   Weight // S*H values, one norm weight a stream and channel (unit offset)
	Down   Weight // [L, S*H]
	Up     Weight // [S*H, L]
	Inject Weight // [S, S*H]; absent in the final mixers
	Eps    float64
}

// GDNWeights holds one gated delta net. Value head v uses key head v/(ValueHeads/KeyHeads).
type GDNWeights struct {
	Query, Key, Value Weight // [KeyHeads*Dim, H], same, [ValueHeads*Dim, H]
	Z                 Weight // [ValueHeads*Dim, H]
	A, B              Weight // [ValueHeads, H]
	Conv              Weight // [Taps, channels]: channels are queries, keys, values
	ALog, DtBias      Weight // ValueHeads values
	Norm              Weight // Dim values, plain (no unit offset)
	Out               Weight // [H, ValueHeads*Dim]

	KeyHeads, ValueHeads, Dim, Taps int
	Eps                             float64
}

// Rotary describes the rotation of the first Dim values of a head. Frequency i is Theta^(-2i/Dim); it turns by the position on
// the axis that the interleaved sections give it (transformers, apply_interleaved_mrope).
type Rotary struct {
	Dim      int
	Theta    float64
	Sections [3]int
}

// Axis returns the position axis of frequency i: 1 (height) and 2 (width) take every third frequency up to three times their
// section, everything else belongs to 0 (time).
func (r Rotary) Axis(i int) int {
	if a := i % 3; a != 0 && i < 3*r.Sections[a] {
		return a
	}
	return 0
}

// QSAWeights holds one sparse attention block with its indexer.
type QSAWeights struct {
	QueryGate Weight // [Heads*2*HeadDim, H]; rows of a head: HeadDim query, then HeadDim gate
	Key       Weight // [KVHeads*HeadDim, H]
	Value     Weight // [KVHeads*HeadDim, H]
	Out       Weight // [H, Heads*HeadDim]
	QueryNorm Weight // HeadDim values (unit offset)
	KeyNorm   Weight // HeadDim values (unit offset)

	Index          Weight // [(IndexHeads+1)*IndexDim, H]: query heads, then the key
	IndexQueryNorm Weight // IndexDim values (unit offset)
	IndexKeyNorm   Weight // IndexDim values (unit offset)

	Heads, KVHeads, HeadDim int
	IndexHeads, IndexDim    int
	Blocks                  int // complete blocks a query may select
	Ratio                   int // tokens of a block
	Rotary                  Rotary
	Eps                     float64
}

// MoEWeights holds one mixture of experts with its shared expert.
type MoEWeights struct {
	Router       Weight // [Experts, H]
	GateUp       Weight // [Experts*2*Inter, H]: rows of an expert: Inter gate, then Inter up
	Down         Weight // [Experts*H, Inter]
	SharedGate   Weight // [SharedInter, H]
	SharedUp     Weight // [SharedInter, H]
	SharedDown   Weight // [H, SharedInter]
	SharedVector Weight // [1, H]: the logit of the shared expert's gate

	Experts, TopK, Inter, SharedInter int
	Normalize                         bool // divide the chosen weights by their sum
}

// RowSource reads rows of the n-gram table on the host, wherever they are.
type RowSource interface {
	// Rows writes the encoded rows ids, one after the other, to dst: len(ids) times the table's row size in bytes.
	Rows(ids []int64, dst []byte) error
}

// Enterer is a RowSource whose rows lie in files that are mapped.
type Enterer interface {
	// Enter makes the first look at each row that is in memory cheaper, until stop says so. It may take seconds, beside calls of Rows, and what it
	// cannot do it leaves.
	Enter(stop func() bool)
}

// Table is the n-gram table: Rows of Width values. It stays on the host.
type Table struct {
	Source     RowSource
	Format     num.Format // BF16, FP8 (times Multiplier) or U4Z8G16 (codes, then binary16 scales)
	Multiplier float64    // of an FP8 table
	Width      int
	RowBytes   int
}

// PLEWeights holds one per-layer embedding: S streams of H values, an embedding of Heads table rows.
type PLEWeights struct {
	Table     Table
	Key       Weight // [S*H, Heads*Width]
	Value     Weight // [H, Heads*Width]
	NormKey   Weight // S*H values (unit offset)
	NormQuery Weight // S*H values (unit offset)
	NormConv  Weight // S*H values (unit offset)
	Conv      Weight // [Taps, S*H]
	Taps      int
	Dilation  int
	Eps       float64

	Multipliers    []int64 // one a token of the n-gram, newest first
	Sizes, Offsets []int64 // one a head: heads of the shortest n-gram first
	HeadsPerNgram  int
	Reset          int32 // the token after which history is empty, and what empty history holds
}

// StemWeights holds the entry of the MTP head: the embedding of a token and the target's streams, projected and added
// (vLLM, qwen4_exp MTP module).
type StemWeights struct {
	Embed      Weight // [vocab, H], the target's
	NormEmbed  Weight // H values (unit offset)
	NormHidden Weight // S*H values (unit offset); one norm over all of them
	ProjEmbed  Weight // [H, H]
	ProjHidden Weight // [H, H], applied to each stream
	Eps        float64
}

// HeadWeights is an output head. IDs bounds the ids that may win; Map, if not nil, gives the id of each row.
type HeadWeights struct {
	W   Weight // [rows, H]
	IDs int
	Map []int32
}

// Angle returns the angle in radians by which frequency i turns at a position. The reference computes inverse frequency and product
// in float32 (transformers, Qwen3_5TextRotaryEmbedding), which far positions can tell from exact arithmetic; so do we.
func (r Rotary) Angle(i int, position int32) float64 {
	exponent := float32(2*i) / float32(r.Dim)
	inverse := 1 / float32(math.Pow(r.Theta, float64(exponent)))
	return float64(float32(position) * inverse)
}
