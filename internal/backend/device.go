package backend

// Step is a compiled program.
type Step interface {
	Pass() Pass
}

// Seq numbers launches.
type Seq uint64

// Want says which rows of a lane a Head works on.
type Want uint8

// What a Head returns for a lane.
const (
	WantNone      Want = iota
	WantLast           // greedy pick of the last row
	WantAll            // greedy pick of every row
	WantLogits         // pick and logits of the last row
	WantLogitsAll      // picks and logits of every row
	WantLikely         // pick and most likely ids of the last row, or its logits
	WantLikelyAll      // picks and most likely ids of every row, or their logits
)

// All reports whether every row is wanted.
func (w Want) All() bool { return w == WantAll || w == WantLogitsAll || w == WantLikelyAll }

// Logits reports whether logits answer the want.
func (w Want) Logits() bool { return w >= WantLogits }

// Likely reports whether the most likely ids are enough.
func (w Want) Likely() bool { return w >= WantLikely }

// LaneRows are one lane's rows of a launch.
type LaneRows struct {
	Lane int
	// Tokens has one id a row. For Draft and Seed passes it is the token after the carried position.
	Tokens []int32
	// Positions has the three rotary axes of each row (time, height, width); equal for text. Not for Draft and Seed passes: the
	// device remembers where the carried rows stood, and a chained draft stands one further.
	Positions [][3]int32
	Want      Want
	// Ahead, of a prompt, are tokens that are likely to come in the lane's next pass: a device may fetch for them what it will need.
	Ahead []int32
	// Chain starts a Draft pass from the previous draft's streams instead of the carried rows.
	Chain bool
	// Media replaces the embeddings of rows: Media[i] is nil or H values.
	Media [][]float32
	// Force and Trace look inside, for tests; nil otherwise.
	Force *Force
	Trace *Trace
}

// Control is what a launch is told. The device copies what it needs before Launch returns, traces excepted.
type Control struct {
	Lanes []LaneRows
}

// Force replaces discrete decisions, keyed by layer: the experts of each row, and the visible tokens each row attends to.
type Force struct {
	Experts  map[int][][]int32
	Selected map[int][][]bool
}

// From returns the decisions for the rows from first on.
func (f *Force) From(first int) *Force {
	if f == nil {
		return nil
	}
	g := &Force{Experts: map[int][][]int32{}, Selected: map[int][][]bool{}}
	for l, v := range f.Experts {
		g.Experts[l] = v[min(first, len(v)):]
	}
	for l, v := range f.Selected {
		g.Selected[l] = v[min(first, len(v)):]
	}
	return g
}

// Trace collects what happened, keyed by layer or tap name, rows appended launch after launch.
type Trace struct {
	Streams  map[string][][]float64
	Experts  map[int][][]int32 // ascending
	Selected map[int][][]bool  // [row][token]
}

// LaneResult is one lane's outcome: entries for the wanted rows, in order.
type LaneResult struct {
	Picks  []int32     // largest BF16-rounded logit among the real ids, lowest id on ties
	Logits [][]float32 // by id; only if wanted
	// Likely has the ids with the largest logits of each row, in order of id: all that are larger than the least of them, and of those that
	// equal it the lower ids. In place of logits, where they are enough and the device has a way to find them.
	Likely [][]Likely
	// Recall returns the logits of a row of which Likely was given after all, until the next launch of the step. It may be called by one
	// goroutine at a time, which need not be the device's while that waits.
	Recall func(row int) ([]float32, error)
}

// Likely is an id with its logit, rounded to BF16.
type Likely struct {
	Value float32
	ID    int32
}

// Result is a launch's outcome, lanes in the order of its Control.
type Result struct {
	Lanes []LaneResult
}

// Image names a sequence image: a lane's own, or a saved one.
type Image struct {
	Saved bool
	Index int
}

// Lane is the image that lane i works on.
func Lane(i int) Image { return Image{Index: i} }

// Saved is the i-th saved image.
func Saved(i int) Image { return Image{Saved: true, Index: i} }

// Lengths are the committed lengths of an image in tokens.
type Lengths struct {
	Target  int
	Drafter int
}

// Device runs programs. See the package comment for the contract.
type Device interface {
	// Compile prepares a program. Weights are read here, or kept as views: they must stay valid until Close.
	Compile(*Program) (Step, error)
	// Launch queues a step. Rows are appended at each lane's committed length; a Verify pass of T rows commits all T unless
	// Commit lowers it before the lane's next launch.
	Launch(Step, *Control) (Seq, error)
	// Wait returns the result of a launch. It may be overwritten by the next launch of the same step.
	Wait(Seq) (Result, error)
	// Commit keeps the first n rows of the lane's last Verify launch.
	Commit(lane, n int) error
	// Reset makes the image empty.
	Reset(Image) error
	// Move copies an image: all of it. Lanes are flushed first.
	Move(dst, src Image) error
	// Lengths tells an image's committed lengths.
	Lengths(Image) Lengths
	Close() error
}

// Chainer is a device that drafts several tokens without the host in between.
type Chainer interface {
	// Chain queues a Draft step whose lanes want the pick of their last row, and then so many passes of a row a lane, each of which takes the
	// pick of the one before. Wait gives a lane's picks in order, one of each pass.
	Chain(s Step, c *Control, more int) (Seq, error)
	// Behind queues a Verify step behind the chain that was queued last and has not been waited for. Its first lanes are the chain's in the same
	// order; they have one of Tokens, and as many more rows as there are further Positions take the chain's first picks. Other lanes may follow. It
	// returns the picks of the chain's lanes as soon as they are known, and Wait gives the result of the verifying.
	Behind(s Step, c *Control) ([][]int32, Seq, error)
}
