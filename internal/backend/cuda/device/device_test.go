package device_test

import (
	"encoding/binary"
	"encoding/json/v2"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/optest"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
	"ninfer/internal/num"
)

var codeFlag = flag.String("code", "", "folder with a subfolder fatbin to test instead of the committed machine code")

// open makes a device, or skips with the reason.
func open(t testing.TB, o device.Options) *device.Device {
	t.Helper()
	if *codeFlag != "" {
		o.Code = os.DirFS(*codeFlag)
	}
	if *tunedFlag != "" {
		o.Tuned = os.DirFS(*tunedFlag)
	}
	if *gemmFlag != "" {
		o.Gemm = os.DirFS(*gemmFlag)
	}
	if *chunkFlag != "" {
		o.Chunk = os.DirFS(*chunkFlag)
	}
	d, err := device.Open(o)
	if device.Absent(err) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// compiled is a program's step.
func compiled(t testing.TB, d *device.Device, p *backend.Program) backend.Step {
	t.Helper()
	st, err := d.Compile(p)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// launched is what a step gives these lanes.
func launched(t testing.TB, d *device.Device, st backend.Step, in ...backend.LaneRows) backend.Result {
	t.Helper()
	q, err := d.Launch(st, &backend.Control{Lanes: in})
	if err != nil {
		t.Fatal(err)
	}
	res, err := d.Wait(q)
	if err != nil {
		t.Fatal(err)
	}
	return res
}

// stored is what kernels are compared with: exact arithmetic, rounded where a kernel stores BF16.
var stored = optest.Backend{
	Open: func(_ testing.TB, o optest.Options) backend.Device {
		return cpu.NewOracle(cpu.Options{States: o.States, Lanes: o.Lanes, Saved: o.Saved, Tokens: o.Tokens, Verify: o.Verify, Carry: o.Carry, Stored: true})
	},
	Bound: func(string) float64 { return 0 },
}

var gpu = optest.Backend{
	Open: func(t testing.TB, o optest.Options) backend.Device {
		return scattered(t, device.Options{States: o.States, Lanes: o.Lanes, Saved: o.Saved, Tokens: o.Tokens, Verify: o.Verify, Carry: o.Carry, Plain: true})
	},
	// Outputs stored in BF16 are within 3e-3 of the stored oracle. FP32 sums fall on the other side of a rounding step
	// here and there, and a step is 2^-8 of the value.
	// The operands of experts and attention are stored too: where one flips in an outlier, the whole row is off by up to one step of it. The
	// stored oracle against itself, disturbed by a relative 1e-7 before each rounding, is at up to 5.3e-3 in the attention of these tests.
	Bound: func(op string) float64 {
		if op == "moe" || op == "qsa" {
			return 6e-3
		}
		return 3e-3
	},
	Exact: true,
	Force: true,
}

func TestConformance(t *testing.T) {
	open(t, device.Options{}).Close()
	optest.Run(t, stored, gpu)
}

// allFew keeps prompts on the kernels of decoding.
const allFew = 1 << 20

// tuned is the device with the kernels of cuda/kernels, on a shape and formats that they take.
func tuned() optest.Backend {
	b := gpu
	b.Open = func(t testing.TB, o optest.Options) backend.Device {
		return scattered(t, device.Options{States: o.States, Lanes: o.Lanes, Saved: o.Saved, Tokens: o.Tokens, Verify: o.Verify, Carry: o.Carry, Few: allFew})
	}
	s := optest.Real
	s.Name, s.H, s.LowRank, s.Inter, s.SharedInter = "tuned", 256, 64, 128, 128
	b.Shapes = []optest.Shape{s}
	b.Formats = []num.Format{num.BF16, num.FP8RowBF16, num.FP8RowFP32, num.Q4G64}
	return b
}

func TestTunedConformance(t *testing.T) {
	open(t, device.Options{}).Close()
	optest.Run(t, stored, tuned())
}

// As many heads as the official model has: the delta rule's blocks of a verify pass do not fit on the GPU at once.
func TestTunedHeads(t *testing.T) {
	open(t, device.Options{}).Close()
	b := tuned()
	b.Shapes[0].Name, b.Shapes[0].KeyHeads, b.Shapes[0].ValueHeads = "heads", 16, 48
	b.Formats = []num.Format{num.BF16, num.FP8RowBF16}
	optest.Run(t, stored, b)
}

// Caches and states in fewer bytes, on plain and tuned kernels: the oracle rounds them at the same points. A value that falls to the other side
// of a rounding point is off by up to 2^-3 in FP8: the oracle disturbed by a relative 1e-6 is at up to 1.5e-2 with such a cache, by 1e-5 at
// 3.4e-2. A state that is rounded once a pass depends on the rows of passes.
func TestConformancePacked(t *testing.T) {
	open(t, device.Options{}).Close()
	for _, c := range []struct {
		name  string
		kv    backend.Cache
		state bool
		bound float64
	}{
		{"kv fp8", backend.CacheFP8, false, 2e-2},
		{"state bf16", backend.CacheBF16, true, 6e-3},
	} {
		for _, plain := range []bool{true, false} {
			t.Run(fmt.Sprint(c.name, " plain ", plain), func(t *testing.T) {
				ref, dev := stored, gpu
				ref.Open = func(_ testing.TB, o optest.Options) backend.Device {
					return cpu.NewOracle(cpu.Options{
						States: o.States, Lanes: o.Lanes, Saved: o.Saved, Tokens: o.Tokens, Verify: o.Verify, Carry: o.Carry, Stored: true, KV: c.kv, BF16State: c.state,
					})
				}
				if dev.Shapes, dev.Formats = []optest.Shape{optest.Real, optest.Wide}, []num.Format{num.FP8RowFP32}; !plain {
					dev = tuned()
					dev.Formats = []num.Format{num.BF16, num.FP8RowFP32}
				}
				dev.Open = func(t testing.TB, o optest.Options) backend.Device {
					return scattered(t, device.Options{
						States: o.States, Lanes: o.Lanes, Saved: o.Saved, Tokens: o.Tokens, Verify: o.Verify, Carry: o.Carry, Plain: plain, KV: c.kv, BF16State: c.state, Few: allFew,
					})
				}
				dev.Exact = plain && !c.state // the tuned kernels may add in another order for another number of rows, which a code in FP8 can tell
				dev.Bound = func(op string) float64 {
					switch {
					case op == "model" && c.state: // a state that is rounded at other rows goes on through BF16 values
						return 5e-2
					case op == "qsa" || op == "gdn" || op == "model":
						return c.bound
					}
					return gpu.Bound(op)
				}
				optest.Run(t, ref, dev)
			})
		}
	}
}

// experts is a program of one mixture of experts with NVFP4 banks behind a hyper-connection, its output shown by an identity head.
func experts(h, inner, count, topk int, f num.Format) func(backend.Pass) *backend.Program {
	r := rand.New(rand.NewPCG(uint64(h), 5))
	w := func(f num.Format, rows, cols int) backend.Weight { return optest.Weight(r, f, rows, cols) }
	hc := &backend.HyperConnection{Norm: w(num.BF16, 4, h), Down: w(f, 64, 4*h), Up: w(f, 4*h, 64), Inject: w(num.BF16, 4, 4*h), Eps: 1e-6}
	moe := &backend.MoEWeights{
		Router: w(f, count, h), GateUp: backend.Whole(optest.Tensor(r, num.NVFP4, count, 2*inner, h)), Down: backend.Whole(optest.Tensor(r, num.NVFP4, count, h, inner)),
		SharedGate: w(f, inner, h), SharedUp: w(f, inner, h), SharedDown: w(num.BF16, h, inner), SharedVector: w(num.BF16, 1, h),
		Experts: count, TopK: topk, Inter: inner, SharedInter: inner, Normalize: true,
	}
	data := make([]byte, 2*h*h)
	for i := range h {
		binary.LittleEndian.PutUint16(data[2*(i*h+i):], num.ToBF16(1))
	}
	eye, err := num.NewTensor(num.BF16, num.Contiguous, []int{h, h}, data)
	if err != nil {
		panic(err)
	}
	embed := w(num.BF16, 300, h)
	return func(p backend.Pass) *backend.Program {
		x := backend.Streams{X: 0, Inject: 1}
		return &backend.Program{
			Pass: p, Bufs: []backend.BufSpec{{Name: "streams", Width: 4 * h}, {Name: "inject", Width: 4}, {Name: "mix", Width: h}, {Name: "out", Width: h}},
			Ops: []backend.Op{
				backend.Embed{W: embed, X: x},
				backend.Mix{W: hc, X: x, Out: 2},
				backend.MoE{W: moe, In: 2, Out: 3},
				backend.Head{W: &backend.HeadWeights{W: backend.Whole(eye), IDs: h}, In: 3},
			},
		}
	}
}

// The tuned experts against the stored oracle: groups of rows, forced and free.
func TestTunedExperts(t *testing.T) {
	open(t, device.Options{}).Close()
	for _, f := range []num.Format{num.BF16, num.FP8RowBF16, num.FP8RowFP32} {
		for _, s := range []struct{ h, inner, count, topk int }{{256, 128, 24, 5}, {2560, 640, 16, 10}} {
			program := experts(s.h, s.inner, s.count, s.topk, f)
			ref := stored.Open(t, optest.Options{Lanes: 1, Tokens: 200})
			d := open(t, device.Options{Lanes: 1, Tokens: 200})
			for _, n := range []int{1, 2, 5, 8, 13} {
				in := backend.LaneRows{Tokens: make([]int32, n), Positions: make([][3]int32, n), Want: backend.WantLogitsAll, Trace: &backend.Trace{}}
				for i := range n {
					in.Tokens[i] = int32(17*n+31*i) % 300
				}
				run := func(dev backend.Device, in backend.LaneRows) [][]float32 {
					st, err := dev.Compile(program(backend.Pass{Kind: backend.Prefill, Lanes: 1, Rows: n}))
					if err != nil {
						t.Fatal(err)
					}
					q, err := dev.Launch(st, &backend.Control{Lanes: []backend.LaneRows{in}})
					if err != nil {
						t.Fatal(err)
					}
					res, err := dev.Wait(q)
					if err != nil {
						t.Fatal(err)
					}
					return res.Lanes[0].Logits
				}
				want := run(ref, in)
				trace := in.Trace
				in.Trace = &backend.Trace{}
				free := run(d, in)
				same := 0
				for r := range n {
					if slices.Equal(trace.Experts[0][r], in.Trace.Experts[0][r]) {
						same++
						if e := distances(t, free[r:r+1], want[r:r+1])[0]; !(e <= 6e-3) {
							t.Errorf("%v h %d, row %d of %d, free: off by %.2g", f, s.h, r, n, e)
						}
					}
				}
				in.Trace, in.Force = nil, &backend.Force{Experts: trace.Experts}
				list := distances(t, run(d, in), want)
				t.Logf("%v h %d, %d rows: worst %.2g, %d routed alike", f, s.h, n, worst(list), same)
				if !(worst(list) <= 6e-3) || same*10 < n*8 {
					t.Errorf("%v h %d, %d rows: beyond 6e-3, or %d of %d rows routed otherwise", f, s.h, n, n-same, n)
				}
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
			ref.Close()
		}
	}
}

// distances are the relative L2 distances of corresponding rows.
func distances[A, B float32 | float64](t *testing.T, got [][]A, want [][]B) (list []float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d rows, want %d", len(got), len(want))
	}
	for r := range want {
		if len(got[r]) != len(want[r]) {
			t.Fatalf("row of %d values, want %d", len(got[r]), len(want[r]))
		}
		var d, n float64
		for i, v := range want[r] {
			d += (float64(got[r][i]) - float64(v)) * (float64(got[r][i]) - float64(v))
			n += float64(v) * float64(v)
		}
		list = append(list, math.Sqrt(d/n))
	}
	return list
}

// worst is the largest distance; NaN is larger than any.
func worst(list []float64) float64 {
	for _, v := range list {
		if v != v {
			return math.Inf(1)
		}
	}
	return slices.Max(list)
}

var folder = modeltest.Folder{Dir: "../../../../testdata/micro-radixark", IDs: 480}

type golden struct {
	Tokens []int32 `json:"tokens"`
	Next   int32   `json:"next"`
	Drafts []int32 `json:"drafts"`
}

func goldenCases(t *testing.T) (map[string]golden, map[string]modeltest.Safetensor) {
	raw, err := os.ReadFile(filepath.Join(folder.Dir, "golden.json"))
	if err != nil {
		t.Skip(err)
	}
	var meta struct {
		Cases map[string]golden `json:"cases"`
	}
	if err := json.Unmarshal(raw, &meta); err != nil {
		t.Fatal(err)
	}
	for name, g := range meta.Cases {
		if strings.HasPrefix(name, "image") || len(g.Tokens) == 0 {
			delete(meta.Cases, name)
		}
	}
	tensors := map[string]modeltest.Safetensor{}
	modeltest.OpenSafetensors(t, filepath.Join(folder.Dir, "golden.safetensors"), tensors)
	return meta.Cases, tensors
}

func micro(t *testing.T, m *model.Model, tokens int, noGraph bool) *device.Device {
	d := open(t, device.Options{States: m.States, Lanes: 3, Saved: 1, Tokens: tokens, Verify: 6, Carry: tokens, NoGraph: noGraph})
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// drafts are k chained draft passes; each is told what to force and traces.
func drafts(t *testing.T, r *model.Runner, following []int32, k int, force []*backend.Force) (out [][]float32, did []*backend.Force) {
	t.Helper()
	rows := backend.LaneRows{Tokens: following, Want: backend.WantLogits}
	for i := range k {
		rows.Trace, rows.Force = &backend.Trace{}, nil
		if force != nil {
			rows.Force, rows.Trace = force[i], nil
		}
		res, err := r.Launch(backend.Draft, &backend.Control{Lanes: []backend.LaneRows{rows}})
		if err != nil {
			t.Fatal(err)
		}
		if force == nil {
			did = append(did, &backend.Force{Experts: rows.Trace.Experts, Selected: rows.Trace.Selected})
		}
		l := res.Lanes[0]
		out = append(out, slices.Clone(l.Logits[len(l.Logits)-1]))
		rows = backend.LaneRows{Tokens: following[:1], Want: backend.WantLogits, Chain: true} // the same token for both devices
	}
	return out, did
}

// Every golden case of the micro model against the stored oracle, routing and selection forced: a prompt in chunks, then drafts.
func TestForcedModel(t *testing.T) {
	m, _ := folder.Model(t)
	open(t, device.Options{}).Close()
	cases, _ := goldenCases(t)
	for name, g := range cases {
		n := len(g.Tokens)
		ref := model.NewRunner(m, cpu.NewOracle(cpu.Options{States: m.States, Lanes: 1, Tokens: n + 8, Carry: n, Stored: true}), n)
		trace := &backend.Trace{}
		want, err := ref.Prompt(backend.LaneRows{Tokens: g.Tokens, Want: backend.WantLogitsAll, Trace: trace})
		if err != nil {
			t.Fatal(err)
		}
		r := model.NewRunner(m, micro(t, m, n+8, false), 40)
		force := &backend.Force{Experts: trace.Experts, Selected: trace.Selected}
		got, err := r.Prompt(backend.LaneRows{Tokens: g.Tokens, Want: backend.WantLogitsAll, Force: force})
		if err != nil {
			t.Fatal(err)
		}
		list := distances(t, got.Logits, want.Logits)
		wantDrafts, did := drafts(t, ref, []int32{g.Next}, 3, nil)
		gotDrafts, _ := drafts(t, r, []int32{g.Next}, 3, did)
		list2 := distances(t, gotDrafts, wantDrafts)
		sorted := slices.Sorted(slices.Values(list))
		t.Logf("%-11s %4d rows: logits worst %.2g median %.2g, drafts worst %.2g", name, n, worst(list), sorted[n/2], worst(list2))
		// 3e-3 was planned. On this model no float32 kernel can: the stored oracle against itself, with every value off by
		// a relative 1e-7 before it is rounded (float32's own error), gives a worst row of 9.6e-3, medians up to 4.4e-3 and drafts of
		// 5.0e-3, because a value that falls on the other side of a BF16 step goes on through every later row.
		if !(worst(list) <= 1.2e-2) || !(sorted[n/2] <= 6e-3) || !(worst(list2) <= 8e-3) {
			t.Errorf("%s: beyond what float32 sums explain", name)
		}
	}
}

// The micro model by itself against the reference's float32: statistics, since BF16 storage flips close decisions.
func TestFreeModel(t *testing.T) {
	m, _ := folder.Model(t)
	open(t, device.Options{}).Close()
	cases, tensors := goldenCases(t)
	var all, oracle []float64
	for name, g := range cases {
		n := len(g.Tokens)
		v := tensors[name+".logits"].Values()
		var want [][]float32
		for r := range n {
			want = append(want, v[r*len(v)/n:(r+1)*len(v)/n])
		}
		r := model.NewRunner(m, micro(t, m, n+8, false), 64)
		got, err := r.Prompt(backend.LaneRows{Tokens: g.Tokens, Want: backend.WantLogitsAll})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, distances(t, got.Logits, want)...)
		ref := model.NewRunner(m, cpu.NewOracle(cpu.Options{States: m.States, Lanes: 1, Tokens: n + 8, Carry: n, Stored: true}), n)
		res, err := ref.Prompt(backend.LaneRows{Tokens: g.Tokens, Want: backend.WantLogitsAll})
		if err != nil {
			t.Fatal(err)
		}
		oracle = append(oracle, distances(t, res.Logits, want)...)
	}
	report := func(what string, list []float64) (median, within float64) {
		slices.Sort(list)
		for _, v := range list {
			if v <= 2e-2 {
				within++
			}
		}
		within /= float64(len(list))
		t.Logf("%s: %d rows, median %.2g, worst %.2g, %.1f%% within 2e-2", what, len(list), list[len(list)/2], worst(list), 100*within)
		return list[len(list)/2], within
	}
	_, most := report("stored oracle", oracle)
	if median, within := report("device", all); !(median <= 1.5e-2) || within < min(.9, most-.02) {
		t.Error("median beyond 1.5e-2, or fewer rows within 2e-2 than the stored oracle has")
	}
}

// Replayed graphs give the same bits as launches one by one; so do two replays.
func TestGraphs(t *testing.T) {
	m, _ := folder.Model(t)
	cases, _ := goldenCases(t)
	var tokens []int32
	for _, g := range cases {
		if len(g.Tokens) > len(tokens) {
			tokens = g.Tokens
		}
	}
	tokens = tokens[:min(len(tokens), 60)]
	var want [][]float32
	for i, noGraph := range []bool{true, false, false} {
		r := model.NewRunner(m, micro(t, m, 100, noGraph), 16)
		if _, err := r.Prompt(backend.LaneRows{Tokens: tokens[:20]}); err != nil {
			t.Fatal(err)
		}
		var got [][]float32
		for p := 20; p < len(tokens); p++ {
			if err := r.Seed(0, tokens[p:p+1]); err != nil {
				t.Fatal(err)
			}
			in := backend.LaneRows{Tokens: tokens[p : p+1], Positions: model.Positions(p, 1), Want: backend.WantLogits}
			res, err := r.Launch(backend.Decode, &backend.Control{Lanes: []backend.LaneRows{in}})
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, slices.Clone(res.Lanes[0].Logits[0]))
		}
		_, logits, err := r.Draft(0, tokens[:1], 4, backend.WantLogits)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, logits...)
		if i == 0 {
			want = got
		} else if !slices.EqualFunc(got, want, slices.Equal[[]float32]) {
			t.Errorf("run %d: other bits, off by %.2g", i, worst(distances(t, got, want)))
		}
	}
}

var speedFlag = flag.Bool("speed", false, "time operations of full size")

// The official model's layers with few experts and a small vocabulary, one of each kind: how long each operation takes.
func TestSpeed(t *testing.T) {
	if !*speedFlag {
		t.Skip("-speed is not set")
	}
	s := optest.Shape{
		Name: "full", H: 2560, Streams: 4, LowRank: 320, Vocab: 4096, KeyHeads: 16, ValueHeads: 48, Dim: 128, Taps: 4, Heads: 24, KVHeads: 2, HeadDim: 256,
		IndexHeads: 4, IndexDim: 128, Blocks: 512, Ratio: 4, Rotary: 64, Experts: 32, TopK: 10, Inter: 640, SharedInter: 640,
		Ngram: 3, HeadsPerNgram: 8, TableWidth: 160,
	}
	for _, f := range []num.Format{num.FP8RowFP32, num.BF16} {
		d := open(t, device.Options{Lanes: 1, Tokens: 200})
		st := compiled(t, d, experts(2560, 640, 32, 10, f)(backend.Pass{Kind: backend.Prefill, Lanes: 1, Rows: 1}))
		for i := range 3 {
			times, err := d.Profile(func() error {
				_, err := d.Launch(st, &backend.Control{Lanes: []backend.LaneRows{{Tokens: []int32{int32(i)}, Positions: make([][3]int32, 1), Want: backend.WantLast}}})
				return err
			})
			t.Log(f, times, err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, f := range []num.Format{num.FP8RowFP32, num.BF16} {
		m := optest.NewModel(s, f, 3)
		d := open(t, device.Options{States: m.States, Lanes: 8, Tokens: 9000, Verify: 6, Carry: 1100})
		row := func(lane, n int) backend.LaneRows {
			in := backend.LaneRows{Lane: lane, Tokens: make([]int32, n), Positions: make([][3]int32, n), Want: backend.WantLast}
			at := d.Lengths(backend.Lane(lane)).Target
			for i := range n {
				in.Tokens[i] = int32((at+i)*7919) % 4096
				in.Positions[i] = [3]int32{int32(at + i), int32(at + i), int32(at + i)}
			}
			return in
		}
		seed := compiled(t, d, m.Program(backend.Pass{Kind: backend.Seed, Lanes: 1, Rows: 256}))
		prompt := compiled(t, d, m.Program(backend.Pass{Kind: backend.Prefill, Lanes: 1, Rows: 256}))
		begin := time.Now()
		n := 0
		for ; n < 2304 && time.Since(begin) < 8*time.Second; n += 256 {
			launched(t, d, prompt, row(0, 256))
			launched(t, d, seed, backend.LaneRows{Lane: 0, Tokens: make([]int32, 256)})
		}
		t.Logf("%v: %d prompt rows in %v", f, n, time.Since(begin))
		for _, lanes := range []int{1, 4} {
			st := compiled(t, d, m.Program(backend.Pass{Kind: backend.Decode, Lanes: lanes, Rows: lanes}))
			step := func() {
				var in []backend.LaneRows
				for l := range lanes {
					in = append(in, row(l, 1))
				}
				launched(t, d, st, in...)
			}
			for range 4 {
				step()
			}
			begin := time.Now()
			for range 50 {
				step()
			}
			t.Logf("%v: %d lanes: step %.0f us with launch and wait", f, lanes, float64(time.Since(begin).Microseconds())/50)
			times, err := d.Profile(func() error { step(); return nil })
			if err != nil {
				t.Fatal(err)
			}
			line := ""
			for _, o := range times {
				line += fmt.Sprintf(" %s %.0f", o.Op, o.Microseconds)
			}
			t.Logf("%v: %d lanes:%s", f, lanes, line)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestMain keeps the GPU's context alive while tests open and close devices.
func TestMain(m *testing.M) {
	flag.Parse()
	if drv, err := driver.Open(); err == nil {
		if o, err := driver.StartOwner(drv, 0); err == nil {
			defer o.Close()
		}
	}
	m.Run()
}
