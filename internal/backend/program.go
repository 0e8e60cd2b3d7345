package backend

import "fmt"

// Kind is what a pass is for.
type Kind uint8

// The kinds of pass.
const (
	Prefill Kind = iota // rows of one prompt, committed whole
	Decode              // one row a lane, committed
	Verify              // a ragged number of rows a lane; Commit keeps the first n of each
	Draft               // MTP rows from carried streams, with logits
	Seed                // MTP rows from carried streams, only to fill the drafter's planes
)

func (k Kind) String() string {
	return [...]string{"prefill", "decode", "verify", "draft", "seed"}[k]
}

// Pass is the shape a program is compiled for.
type Pass struct {
	Kind  Kind
	Lanes int
	Rows  int // most rows of all lanes together
}

// Buf names an activation of a program: a matrix with one row for each row of the pass.
type Buf uint16

// BufSpec declares one activation.
type BufSpec struct {
	Name  string
	Width int
}

// StateID names a declared [State].
type StateID uint16

// StateKind says how a state grows with its sequence.
type StateKind uint8

// The kinds of state.
const (
	PerToken StateKind = iota // one row a token; rows at and above the length are garbage
	PerBlock                  // one row for each complete block of Ratio tokens
	Fixed                     // Rows rows, whatever the length
	Carried                   // one row for each target row that the drafter has not seen yet
)

// Clock is the length a state follows.
type Clock uint8

// The two lengths of a lane.
const (
	Target  Clock = iota // tokens committed by the target
	Drafter              // tokens whose MTP rows are in place: Target minus the carried rows
)

// Store is the storage class of a state: what a backend may round it to.
type Store uint8

// The storage classes.
const (
	StoreKV     Store = iota // key and value planes: BF16, or FP8 where configured
	StoreIndex               // indexer keys: BF16
	StoreMatrix              // delta-net matrices: FP32, or BF16 where configured
	StoreWindow              // convolution inputs: BF16
	StoreStream              // residual streams: BF16
	StoreInt                 // integers: exact
)

// State declares one piece of a sequence's image.
type State struct {
	Name  string
	Kind  StateKind
	Clock Clock
	Store Store
	Width int // values of a row
	Rows  int // of a Fixed state
	Ratio int // tokens of a PerBlock row
	Group int // values of a row of StoreKV that share a scale in FP8: those of a head
	// Initial is what every value of a Fixed state is in an empty image.
	Initial int32
}

// Streams names the residual streams of the rows of a pass and the injection weights of their last hyper-connection.
type Streams struct {
	X      Buf // [S*H]
	Inject Buf // [S]
}

// Op is a block-level operation. The set is closed.
type Op interface {
	isOp()
	String() string
}

// Embed starts the streams: every stream of a row is the embedding of its token, or the row's media vector.
type Embed struct {
	W Weight // [vocab, H]
	X Streams
}

// PLEStart hashes the rows' n-grams, gathers the table rows and dequantises them: Out is [heads*width]. It reads the history but
// does not advance it. A backend may run it beside the operations up to the matching PLEJoin.
type PLEStart struct {
	W       *PLEWeights
	History StateID // Fixed, ngram-1 ids, oldest first
	Out     Buf
}

// PLEJoin projects the embedding, gates it with the streams, convolves it and adds it to the streams; it advances history and window.
type PLEJoin struct {
	W       *PLEWeights
	In      Buf
	X       Streams
	History StateID
	Window  StateID // Fixed, (taps-1)*dilation rows of S*H values, oldest first
}

// Mix adds the pending injection to the streams, normalises them and mixes them into one vector a row. With injection weights
// present it also leaves the weights for the next Defer.
type Mix struct {
	W   *HyperConnection
	X   Streams
	Out Buf
}

// Defer leaves Y, scaled by the last Mix's injection weights, as the pending injection of X. It is no work of its own: the next
// Mix, Carry or Tap adds it.
type Defer struct {
	X Streams
	Y Buf
}

// GDN is the gated delta net block.
type GDN struct {
	Layer   int
	W       *GDNWeights
	In, Out Buf
	Matrix  StateID // Fixed, ValueHeads*Dim rows (key index) of Dim values
	Window  StateID // Fixed, taps-1 rows of channels, oldest first
}

// QSA is the sparse attention block. AppendOnly fills the planes and produces no output.
type QSA struct {
	Layer      int
	W          *QSAWeights
	In, Out    Buf
	Keys       StateID // PerToken, KVHeads*HeadDim, rotated
	Values     StateID // PerToken, KVHeads*HeadDim
	RawIndex   StateID // PerToken, IndexDim: keys before mean, norm and rotation
	IndexKeys  StateID // PerBlock, IndexDim
	Positions  StateID // PerToken, 3 integers
	AppendOnly bool
}

// MoE is the mixture-of-experts block.
type MoE struct {
	Layer   int
	W       *MoEWeights
	In, Out Buf
}

// Stem starts the MTP streams from carried streams and the rows' tokens.
type Stem struct {
	W         *StemWeights
	Carry     StateID // Carried, S*H values
	Positions StateID // Carried, 3 integers: the rows' rotary positions
	X         Streams
}

// Carry materialises the streams into the lane's carried rows, for the MTP head. Of a Draft pass only the last row is kept, apart
// from the carried rows of the target: a chained draft starts from it.
type Carry struct {
	X         Streams
	Out       StateID // Carried, S*H values
	Positions StateID // Carried, 3 integers
}

// Head computes logits of the rows that want them, and their greedy picks.
type Head struct {
	W  *HeadWeights
	In Buf
}

// Tap copies the materialised streams to the trace under Name, if a trace is attached. It is how tests look inside.
type Tap struct {
	Name string
	X    Streams
}

func (Embed) isOp()    {}
func (PLEStart) isOp() {}
func (PLEJoin) isOp()  {}
func (Mix) isOp()      {}
func (Defer) isOp()    {}
func (GDN) isOp()      {}
func (QSA) isOp()      {}
func (MoE) isOp()      {}
func (Stem) isOp()     {}
func (Carry) isOp()    {}
func (Head) isOp()     {}
func (Tap) isOp()      {}

func (Embed) String() string    { return "embed" }
func (PLEStart) String() string { return "ple start" }
func (PLEJoin) String() string  { return "ple join" }
func (Mix) String() string      { return "mix" }
func (Defer) String() string    { return "defer" }
func (o GDN) String() string    { return fmt.Sprintf("gdn %d", o.Layer) }
func (o QSA) String() string    { return fmt.Sprintf("qsa %d", o.Layer) }
func (o MoE) String() string    { return fmt.Sprintf("moe %d", o.Layer) }
func (Stem) String() string     { return "stem" }
func (Carry) String() string    { return "carry" }
func (Head) String() string     { return "head" }
func (o Tap) String() string    { return "tap " + o.Name }

// Program is the order of operations of one pass.
type Program struct {
	Pass Pass
	Bufs []BufSpec
	Ops  []Op
}
