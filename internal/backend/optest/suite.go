package optest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// Options size a device, as a backend's own options do.
type Options struct {
	States                              []backend.State
	Lanes, Saved, Tokens, Verify, Carry int
}

// Backend is a device under test, or the one it is compared with.
type Backend struct {
	// Open makes a device; the suite closes it.
	Open func(t testing.TB, o Options) backend.Device
	// Bound is the largest relative L2 error of a row of what an operation puts out: "embed", "mix", "head", "reduced head", "ple",
	// "gdn", "qsa", "moe", and "model" for a whole model with its drafter.
	Bound func(op string) float64
	// Exact says that results do not depend on chunks, batches or the rows of a pass in a single bit. Otherwise they are compared
	// within Bound("model").
	Exact bool
	// Force makes the device follow the reference's routing and selection. Devices that round activations need it: a close decision
	// that falls the other way is no error.
	Force bool
	// Shapes and Formats are what the device has kernels for; nil is Real, Odd and Wide, and all of Formats.
	Shapes  []Shape
	Formats []num.Format
}

func (b Backend) shapes() []Shape {
	if b.Shapes == nil {
		return []Shape{Real, Odd, Wide}
	}
	return b.Shapes
}

// formats are those that say something about a shape: NVFP4 stores no odd matrix. most limits them.
func (b Backend) formats(s Shape, most int) []num.Format {
	list := b.Formats
	if list == nil {
		list = Formats
	}
	var fit []num.Format
	for _, f := range list {
		if Fits(f, 2*s.Inter, s.H) {
			fit = append(fit, f)
		}
	}
	if len(fit) <= most {
		return fit
	}
	var some []num.Format // evenly spaced: neighbours are alike
	for i := range most {
		some = append(some, fit[(2*i+1)*len(fit)/(2*most)])
	}
	return some
}

// runner drives a device: it compiles programs when first needed and keeps the drafter one token behind.
type runner struct {
	t     testing.TB
	dev   backend.Device
	m     *Model
	make  func(p backend.Pass) *backend.Program
	steps map[backend.Pass]backend.Step
}

// runner opens a device for a model; make gives the programs, nil for the whole model's.
func (b Backend) runner(t testing.TB, m *Model, make func(p backend.Pass) *backend.Program) *runner {
	t.Helper()
	return b.runnerOf(t, m, 100, make)
}

func (b Backend) runnerOf(t testing.TB, m *Model, tokens int, make func(p backend.Pass) *backend.Program) *runner {
	t.Helper()
	if make == nil {
		make = m.Program
	}
	dev := b.Open(t, Options{States: m.States, Lanes: 3, Saved: 2, Tokens: tokens, Verify: 6, Carry: tokens})
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	})
	return &runner{t: t, dev: dev, m: m, make: make, steps: map[backend.Pass]backend.Step{}}
}

func (r *runner) try(kind backend.Kind, lanes ...backend.LaneRows) (backend.Result, error) {
	rows := 0
	for _, l := range lanes {
		rows += len(l.Tokens)
	}
	p := backend.Pass{Kind: kind, Lanes: len(lanes), Rows: rows}
	step, ok := r.steps[p]
	if !ok {
		var err error
		if step, err = r.dev.Compile(r.make(p)); err != nil {
			return backend.Result{}, err
		}
		r.steps[p] = step
	}
	seq, err := r.dev.Launch(step, &backend.Control{Lanes: lanes})
	if err != nil {
		return backend.Result{}, err
	}
	return r.dev.Wait(seq)
}

// launch runs a pass and returns a copy of what it gives.
func (r *runner) launch(kind backend.Kind, lanes ...backend.LaneRows) []backend.LaneResult {
	r.t.Helper()
	res, err := r.try(kind, lanes...)
	if err != nil {
		r.t.Fatal(err)
	}
	var out []backend.LaneResult
	for _, l := range res.Lanes {
		c := backend.LaneResult{Picks: slices.Clone(l.Picks)}
		for _, line := range l.Logits {
			c.Logits = append(c.Logits, slices.Clone(line))
		}
		out = append(out, c)
	}
	return out
}

// text makes rows of tokens at a lane's length, with text positions.
func (r *runner) text(lane int, want backend.Want, ids ...int32) backend.LaneRows {
	at := int32(r.dev.Lengths(backend.Lane(lane)).Target)
	l := backend.LaneRows{Lane: lane, Tokens: ids, Want: want}
	for i := range ids {
		p := at + int32(i)
		l.Positions = append(l.Positions, [3]int32{p, p, p})
	}
	return l
}

// prompt feeds tokens in chunks and seeds the drafter with all but the last; it returns the logits of every row.
func (r *runner) prompt(lane, chunk int, ids []int32) [][]float32 {
	r.t.Helper()
	var out [][]float32
	for first := 0; first < len(ids); first += chunk {
		part := ids[first:min(len(ids), first+chunk)]
		r.seed(lane, part[:1])
		out = append(out, r.launch(backend.Prefill, r.text(lane, backend.WantLogitsAll, part...))[0].Logits...)
		r.seed(lane, part[1:])
	}
	return out
}

// seed appends drafter rows for carried rows whose following tokens are given.
func (r *runner) seed(lane int, following []int32) {
	r.t.Helper()
	at := r.dev.Lengths(backend.Lane(lane))
	if n := at.Target - at.Drafter; n > 0 && len(following) > 0 {
		r.launch(backend.Seed, backend.LaneRows{Lane: lane, Tokens: following[:min(n, len(following))]})
	}
}

// drafts are the logits of chained drafts after the lane's last token and the following ones. They read the whole image of the
// drafter.
func (r *runner) drafts(lane, n int, following ...int32) [][]float32 {
	r.t.Helper()
	var out [][]float32
	rows := backend.LaneRows{Lane: lane, Tokens: following, Want: backend.WantLogits}
	for range n {
		l := r.launch(backend.Draft, rows)[0]
		out = append(out, l.Logits...)
		rows = backend.LaneRows{Lane: lane, Tokens: l.Picks[len(l.Picks)-1:], Want: backend.WantLogits, Chain: true}
	}
	return out
}

func (m *Model) tokens(r *rand.Rand, n int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(r.IntN(m.Shape.Vocab))
		if r.IntN(10) == 0 {
			ids[i] = m.ple.Reset
		}
	}
	return ids
}

// distance is the largest relative L2 distance of corresponding rows, infinite if they do not correspond.
func distance[A, B float32 | float64](got [][]A, want [][]B) float64 {
	if len(got) != len(want) {
		return math.Inf(1)
	}
	worst := 0.0
	for r := range want {
		if len(got[r]) != len(want[r]) {
			return math.Inf(1)
		}
		var d, n float64
		for i, v := range want[r] {
			e := float64(got[r][i]) - float64(v)
			d += e * e
			n += float64(v) * float64(v)
		}
		e := math.Sqrt(d / n)
		if d == 0 {
			e = 0
		}
		if !(e <= worst) { // NaN is worst
			worst = e
		}
	}
	return worst
}

// within reports how far a device's values are from the reference's.
func within(t testing.TB, what string, bound float64, got, want [][]float32) {
	t.Helper()
	if e := distance(got, want); !(e <= bound) {
		t.Errorf("%s: off by %.2g, bound %.2g", what, e, bound)
	}
}

// same compares two ways to the same values on one device.
func (b Backend) same(t testing.TB, what string, got, want [][]float32) {
	t.Helper()
	if !b.Exact {
		within(t, what, b.Bound("model"), got, want)
	} else if !slices.EqualFunc(got, want, slices.Equal[[]float32]) {
		t.Errorf("%s: not the same bits, off by %.2g", what, distance(got, want))
	}
}

// Run runs the suite: dev against ref, which is taken as right.
func Run(t *testing.T, ref, dev Backend) {
	t.Run("Operations", func(t *testing.T) { operations(t, ref, dev) })
	t.Run("Long", func(t *testing.T) { long(t, ref, dev) })
	t.Run("Model", func(t *testing.T) { wholeModel(t, ref, dev) })
	t.Run("Chunks", func(t *testing.T) { chunks(t, dev) })
	t.Run("Lanes", func(t *testing.T) { lanes(t, dev) })
	t.Run("Rounds", func(t *testing.T) { rounds(t, dev) })
	t.Run("Refuses", func(t *testing.T) { refuses(t, dev) })
}

// operations compares each operation alone, in every format, fed with media rows: a prompt of one row and one of many, decoding, and
// a pass over two lanes.
func operations(t *testing.T, ref, dev Backend) {
	for _, s := range dev.shapes() {
		most := len(Formats)
		if s.H > 500 {
			most = 3
		}
		for i, f := range dev.formats(s, most) {
			m := NewModel(s, f, uint64(i))
			for _, part := range parts {
				t.Run(fmt.Sprintf("%s/%v/%s", s.Name, f, part), func(t *testing.T) {
					make := func(p backend.Pass) *backend.Program { return m.part(part, p) }
					want, got := ref.runner(t, m, make), dev.runner(t, m, make)
					r := rand.New(rand.NewPCG(uint64(i), 7))
					compare := func(kind backend.Kind, rows ...int) {
						t.Helper()
						var in []backend.LaneRows
						for lane, n := range rows {
							l := want.text(lane, backend.WantLogitsAll, m.tokens(r, n)...)
							for j := range n {
								row := random(r, s.H, math.Exp(r.NormFloat64()))
								if r.IntN(3) == 0 {
									row[r.IntN(s.H)] *= 30 // an outlier
								}
								if r.IntN(5) == 0 {
									row = nil // a token
								}
								l.Media = append(l.Media, row)
								if r.IntN(2) == 0 { // the axes part
									l.Positions[j][1] += 5
									l.Positions[j][2] += 1 << 17
								}
							}
							l.Trace = &backend.Trace{}
							in = append(in, l)
						}
						wants := want.launch(kind, in...)
						traces := []*backend.Trace{}
						for j := range in {
							traces = append(traces, in[j].Trace)
							if dev.Force {
								in[j].Force = &backend.Force{Experts: in[j].Trace.Experts, Selected: in[j].Trace.Selected}
							}
							in[j].Trace = &backend.Trace{}
						}
						for j, l := range got.launch(kind, in...) {
							name := fmt.Sprintf("%v of %v rows, lane %d", kind, rows, j)
							within(t, name, dev.Bound(part), l.Logits, wants[j].Logits)
							if e := distance(in[j].Trace.Streams["streams"], traces[j].Streams["streams"]); !(e <= dev.Bound(part)) {
								t.Errorf("%s: streams off by %.2g", name, e)
							}
							if dev.Exact && !slices.Equal(l.Picks, wants[j].Picks) && part != "embed" {
								picksAgree(t, name, l, wants[j])
							}
						}
					}
					compare(backend.Prefill, 1)
					if i%3 == 0 { // the reference is slow
						compare(backend.Prefill, 48)
					} else {
						compare(backend.Prefill, 11)
					}
					compare(backend.Decode, 1)
					compare(backend.Verify, 3, 4)
				})
			}
		}
	}
}

// long attends to some hundred tokens, all of them and a selection: a prompt, one row more, and a few. On an exact device the rows must
// not depend on how they came.
func long(t *testing.T, ref, dev Backend) {
	s := dev.shapes()[0]
	s.Blocks = 160 / s.Ratio
	m := NewModel(s, dev.formats(s, 1)[0], 30)
	make := func(p backend.Pass) *backend.Program { return m.part("qsa", p) }
	want, got, other := ref.runnerOf(t, m, 320, make), dev.runnerOf(t, m, 320, make), dev.runnerOf(t, m, 320, make)
	ids := m.tokens(rand.New(rand.NewPCG(30, 7)), 300)
	step := func(kind backend.Kind, n int) (out [][]float32) {
		in := want.text(0, backend.WantLogitsAll, ids[:n]...)
		in.Trace = &backend.Trace{}
		ids = ids[n:]
		wants := want.launch(kind, in)[0].Logits
		if dev.Force {
			in.Force = &backend.Force{Selected: in.Trace.Selected}
		}
		in.Trace = nil
		out = got.launch(kind, in)[0].Logits
		within(t, fmt.Sprintf("%v of %d rows", kind, n), dev.Bound("qsa"), out, wants)
		return out
	}
	all := ids
	rows := step(backend.Prefill, 290)
	rows = append(rows, step(backend.Decode, 1)...)
	rows = append(rows, step(backend.Verify, 6)...)
	rows = append(rows, step(backend.Prefill, 3)...)
	if dev.Exact {
		dev.same(t, "in one prompt", other.launch(backend.Prefill, other.text(0, backend.WantLogitsAll, all...))[0].Logits, rows)
	}
}

// picksAgree allows a pick to differ where rounding of the logits to BF16 may fall the other way.
func picksAgree(t testing.TB, what string, got, want backend.LaneResult) {
	t.Helper()
	for i, id := range got.Picks {
		if id != want.Picks[i] && len(want.Logits) > i {
			line := want.Logits[i]
			a, b := float64(slices.Max(line)), math.Inf(-1)
			if int(id) < len(line) {
				b = float64(line[id])
			}
			if a-b > math.Abs(a)/128 {
				t.Errorf("%s: row %d picks %d, want %d", what, i, id, want.Picks[i])
			}
		}
	}
}

func random(r *rand.Rand, n int, size float64) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(r.NormFloat64() * size)
	}
	return v
}

// wholeModel compares a prompt and drafts on all operations together.
func wholeModel(t *testing.T, ref, dev Backend) {
	for _, s := range dev.shapes() {
		for i, f := range dev.formats(s, 3) {
			t.Run(fmt.Sprintf("%s/%v", s.Name, f), func(t *testing.T) {
				if dev.Force {
					t.Skip("free running is compared statistically elsewhere")
				}
				m := NewModel(s, f, uint64(i)+20)
				r := rand.New(rand.NewPCG(uint64(i), 8))
				ids := m.tokens(r, 50)
				want, got := ref.runner(t, m, nil), dev.runner(t, m, nil)
				within(t, "prompt", dev.Bound("model"), got.prompt(0, 50, ids), want.prompt(0, 50, ids))
				within(t, "drafts", dev.Bound("model"), got.drafts(0, 3, 9), want.drafts(0, 3, 9))
			})
		}
	}
}
