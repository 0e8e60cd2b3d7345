package cpu_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"ninfer/internal/artifact"
	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/convert"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

// The golden folders, seen from here.
var micro, mini = golden{"../../../testdata/micro-radixark", 480}, golden{filepath.Join(os.Getenv("NINFER_GOLDEN"), "mini-radixark"), 2000}

type golden struct {
	dir string
	ids int
}

// artifact converts the folder's checkpoint and binds it: weights in the formats that users have.
func (g golden) artifact(t testing.TB, projections string) *model.Model {
	t.Helper()
	dir := filepath.Join(g.dir, "checkpoint")
	if _, err := os.Stat(dir); err != nil {
		t.Skip(err)
	}
	out := filepath.Join(t.TempDir(), "qwen3_8_flash_next_125b_a6b_nvfp4.ninfer")
	if projections != "" {
		out = filepath.Join(t.TempDir(), "qwen3_8_flash_next_125b_a6b_nvfp4_fp8proj.ninfer")
	}
	if _, err := convert.Run(context.Background(), convert.Options{Model: dir, Out: out, ProjectionFormat: projections}); err != nil {
		t.Fatal(err)
	}
	f, err := artifact.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	store, err := model.NewArtifact(f)
	if err != nil {
		t.Fatal(err)
	}
	m, err := model.Bind(store.Config(), store, model.Options{Drafter: true, IDs: g.ids})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// The fast path computes what the reference computes, on the checkpoint's values and on the converted ones: logits of all positions
// and the chained drafts.
func TestFastGolden(t *testing.T) {
	for _, g := range []golden{micro, mini} {
		t.Run(filepath.Base(g.dir), func(t *testing.T) {
			cases, values := modeltest.Golden(t, g.dir)
			m := g.artifact(t, "")
			levels := cpu.Levels()
			if g == mini {
				levels = levels[len(levels)-1:]
			}
			for _, level := range levels {
				dev := cpu.NewFast(cpu.Options{States: m.States, Lanes: 1, Tokens: 320, Verify: 4, Carry: 320, Level: level})
				r := model.NewRunner(m, dev, 320)
				for name, c := range cases {
					if err := dev.Reset(backend.Lane(0)); err != nil {
						t.Fatal(err)
					}
					res, err := r.Prompt(backend.LaneRows{Tokens: c.Tokens, Want: backend.WantLogitsAll})
					if err != nil {
						t.Fatal(err)
					}
					e := modeltest.Worst(t, res.Logits, values[name+".logits"].Values())
					drafts, logits, err := r.Draft(0, []int32{c.Next}, len(c.Drafts), backend.WantLogits)
					if err != nil {
						t.Fatal(err)
					}
					d := modeltest.Worst(t, logits, values[name+".draft_logits"].Values())
					t.Logf("%v %-11s logits %.2g drafts %.2g", level, name, e, d)
					if !(e < 1e-3) || !(d < 1e-3) || fmt.Sprint(drafts) != fmt.Sprint(c.Drafts) {
						t.Errorf("%v %s: logits off by %.2g, drafts by %.2g, %v, want %v", level, name, e, d, drafts, c.Drafts)
					}
				}
				if err := dev.Close(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// Whatever the number of workers, the same bits; and Close ends them all.
func TestFastThreads(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	f := micro.artifact(t, "fp8_e4m3fn_row_bf16")
	cases, _ := modeltest.Golden(t, micro.dir)
	ids := cases["budget"].Tokens
	var want [][]float32
	var wantDrafts []int32
	for _, threads := range []int{1, 2, 3, 5} {
		dev := cpu.NewFast(cpu.Options{States: f.States, Lanes: 1, Tokens: 320, Verify: 4, Carry: 320, Threads: threads})
		r := model.NewRunner(f, dev, 41)
		res, err := r.Prompt(backend.LaneRows{Tokens: ids, Want: backend.WantLogitsAll})
		if err != nil {
			t.Fatal(err)
		}
		logits := res.Logits
		drafts, more, err := r.Draft(0, []int32{9}, 3, backend.WantLogits)
		if err != nil {
			t.Fatal(err)
		}
		logits = append(logits, more...)
		if want == nil {
			want, wantDrafts = logits, drafts
		}
		if !slices.EqualFunc(logits, want, slices.Equal[[]float32]) || !slices.Equal(drafts, wantDrafts) {
			t.Errorf("%d threads: not the bits of one", threads)
		}
		if err := dev.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// Decoding, verifying and drafting allocate nothing, whatever the context length, and with logits wanted where a round uses them.
func TestFastAllocatesNothing(t *testing.T) {
	m := micro.artifact(t, "fp8_e4m3fn_row_bf16")
	dev := cpu.NewFast(cpu.Options{States: m.States, Lanes: 2, Tokens: 1 << 10, Verify: 4, Carry: 1 << 10})
	defer dev.Close()
	compile := func(kind backend.Kind, rows int) backend.Step {
		p, err := m.Program(backend.Pass{Kind: kind, Lanes: 1, Rows: rows}, false)
		if err != nil {
			t.Fatal(err)
		}
		s, err := dev.Compile(p)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	launch := func(s backend.Step, c *backend.Control) {
		seq, err := dev.Launch(s, c)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := dev.Wait(seq); err != nil {
			t.Fatal(err)
		}
	}
	decode, verify, seed, draft := compile(backend.Decode, 1), compile(backend.Verify, 4), compile(backend.Seed, 4), compile(backend.Draft, 4)
	one := &backend.Control{Lanes: []backend.LaneRows{{Tokens: []int32{7}, Positions: make([][3]int32, 1), Want: backend.WantLogits}}}
	four := &backend.Control{Lanes: []backend.LaneRows{{Tokens: []int32{1, 6, 3, 4}, Positions: make([][3]int32, 4), Want: backend.WantLogitsAll}}}
	follow := &backend.Control{Lanes: []backend.LaneRows{{Tokens: []int32{7}}}}
	first := &backend.Control{Lanes: []backend.LaneRows{{Tokens: []int32{7}, Want: backend.WantLast}}}
	chained := &backend.Control{Lanes: []backend.LaneRows{{Tokens: []int32{8}, Want: backend.WantLast, Chain: true}}}
	steps := map[string]func(){
		"decode": func() {
			launch(decode, one)
			launch(seed, follow)
		},
		"round": func() {
			launch(verify, four)
			if err := dev.Commit(0, 1); err != nil {
				t.Fatal(err)
			}
			launch(draft, first)
			launch(draft, chained)
		},
	}
	for name, step := range steps {
		if n := testing.AllocsPerRun(150, step); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// BenchmarkDecode is tokens a second of one sequence on the mini model in its formats: the fast device beside the oracle.
func BenchmarkDecode(b *testing.B) {
	for _, projections := range []string{"", "fp8_e4m3fn_row_bf16"} {
		m := mini.artifact(b, projections)
		for name, open := range map[string]func(cpu.Options) backend.Device{"fast": cpu.NewFast, "oracle": cpu.NewOracle} {
			b.Run(strings.TrimPrefix(projections+"/"+name, "/"), func(b *testing.B) {
				const prompt, window = 64, 128
				dev := open(cpu.Options{States: m.States, Lanes: 1, Tokens: prompt + window + 1, Verify: 4, Carry: prompt + window + 1, Saved: 1})
				defer dev.Close()
				r := model.NewRunner(m, dev, prompt)
				ids := make([]int32, prompt)
				for i := range ids {
					ids[i] = int32(20 + 31*i%1900)
				}
				if _, err := r.Prompt(backend.LaneRows{Tokens: ids, Want: backend.WantLast}); err != nil {
					b.Fatal(err)
				}
				if err := dev.Move(backend.Saved(0), backend.Lane(0)); err != nil {
					b.Fatal(err)
				}
				p, err := m.Program(backend.Pass{Kind: backend.Decode, Lanes: 1, Rows: 1}, false)
				if err != nil {
					b.Fatal(err)
				}
				step, err := dev.Compile(p)
				if err != nil {
					b.Fatal(err)
				}
				n := 0
				row := backend.LaneRows{Tokens: []int32{17}, Positions: make([][3]int32, 1), Want: backend.WantLast}
				c := &backend.Control{Lanes: []backend.LaneRows{row}}
				for b.Loop() {
					if n++; n%window == 0 {
						if err := dev.Move(backend.Lane(0), backend.Saved(0)); err != nil {
							b.Fatal(err)
						}
					}
					at := int32(dev.Lengths(backend.Lane(0)).Target)
					c.Lanes[0].Positions[0] = [3]int32{at, at, at}
					seq, err := dev.Launch(step, c)
					if err != nil {
						b.Fatal(err)
					}
					res, err := dev.Wait(seq)
					if err != nil {
						b.Fatal(err)
					}
					c.Lanes[0].Tokens[0] = res.Lanes[0].Picks[0]
				}
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "tok/s")
			})
		}
	}
}

// BenchmarkPrefill is tokens a second of a prompt in one pass, on the mini model.
func BenchmarkPrefill(b *testing.B) {
	m := mini.artifact(b, "")
	for _, rows := range []int{16, 256} {
		b.Run(fmt.Sprint(rows), func(b *testing.B) {
			dev := cpu.NewFast(cpu.Options{States: m.States, Lanes: 1, Tokens: rows, Verify: 4, Carry: rows})
			defer dev.Close()
			r := model.NewRunner(m, dev, rows)
			ids := make([]int32, rows)
			for i := range ids {
				ids[i] = int32(20 + 31*i%1900)
			}
			for b.Loop() {
				if err := dev.Reset(backend.Lane(0)); err != nil {
					b.Fatal(err)
				}
				if _, err := r.Prompt(backend.LaneRows{Tokens: ids, Want: backend.WantLast}); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(rows*b.N)/b.Elapsed().Seconds(), "tok/s")
		})
	}
}
