package convert

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/convert/converttest"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
	"ninfer/internal/num"
)

// bound binds an artifact, its drafter included.
func bound(t *testing.T, f *artifact.File) *model.Model {
	t.Helper()
	a, err := model.NewArtifact(f)
	if err != nil {
		t.Fatal(err)
	}
	m, err := model.Bind(a.Config(), a, model.Options{Drafter: true})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// run computes the target's logits of a text, and the drafter's, on the oracle.
func run(t *testing.T, m *model.Model, tokens []int32) (target, drafter [][]float32) {
	t.Helper()
	dev := cpu.NewOracle(cpu.Options{States: m.States, Lanes: 1, Tokens: len(tokens) + 4, Carry: len(tokens)})
	defer dev.Close()
	r := model.NewRunner(m, dev, len(tokens))
	res, err := r.Launch(backend.Prefill, &backend.Control{Lanes: []backend.LaneRows{
		{Tokens: tokens, Positions: model.Positions(0, len(tokens)), Want: backend.WantLogitsAll},
	}})
	if err != nil {
		t.Fatal(err)
	}
	target = res.Lanes[0].Logits
	if res, err = r.Launch(backend.Draft, &backend.Control{Lanes: []backend.LaneRows{{Tokens: tokens[1:], Want: backend.WantLogitsAll}}}); err != nil {
		t.Fatal(err)
	}
	return target, res.Lanes[0].Logits
}

// logProbabilities are those of a row of logits.
func logProbabilities(row []float32) []float64 {
	most := float64(slices.Max(row))
	sum := 0.
	for _, x := range row {
		sum += math.Exp(float64(x) - most)
	}
	out := make([]float64, len(row))
	for i, x := range row {
		out[i] = float64(x) - most - math.Log(sum)
	}
	return out
}

// change adds up how far the log-probability of each following token moves.
func change(a, b [][]float32, next []int32) (sum float64) {
	for r, id := range next {
		sum += math.Abs(logProbabilities(a[r])[id] - logProbabilities(b[r])[id])
	}
	return sum
}

// TestOptionEffect: what each format option changes in what the model says of recorded texts, against the artifact without options. The
// drafter's experts do not touch the target at all.
func TestOptionEffect(t *testing.T) {
	t.Parallel()
	folder := filepath.Join(os.Getenv("NINFER_GOLDEN"), "micro-swift")
	dir := filepath.Join(folder, "checkpoint")
	if _, err := os.Stat(folder); err != nil {
		folder, dir = filepath.Dir(micro), converttest.Swift(t, micro)
	}
	golden, _ := modeltest.Golden(t, folder)
	cases := []string{"short", "chat_think", "chat_plain"}
	type said struct{ target, drafter [][]float32 }
	say := func(o Options) (out []said) {
		o.Profile, o.Model = "swift", dir
		o.Out = filepath.Join(t.TempDir(), variant(t, o).OutputName())
		_, f := convert(t, o)
		m := bound(t, f)
		for _, name := range cases {
			target, drafter := run(t, m, golden[name].Tokens)
			out = append(out, said{target, drafter})
		}
		return out
	}
	plain := say(Options{})
	for _, tt := range []struct {
		name     string
		o        Options
		limit    float64
		bitEqual bool // the target's logits
	}{
		{"--ple-format fp8_e4m3fn", Options{PLEFormat: "fp8_e4m3fn"}, 0.1, false},
		{"--projection-format fp8_e4m3fn_row_bf16", Options{ProjectionFormat: "fp8_e4m3fn_row_bf16"}, 0.1, false},
		{"--mtp-expert-format nvfp4", Options{MTPExpertFormat: "nvfp4"}, 0.1, true},
		{"all three", Options{PLEFormat: "fp8_e4m3fn", ProjectionFormat: "fp8_e4m3fn_row_bf16", MTPExpertFormat: "nvfp4"}, 0.1, false},
	} {
		got := say(tt.o)
		var target, drafter, n float64
		for i, name := range cases {
			tokens := golden[name].Tokens
			target += change(got[i].target, plain[i].target, tokens[1:])
			drafter += change(got[i].drafter, plain[i].drafter, tokens[2:])
			n += float64(len(tokens) - 1)
			if same := slices.EqualFunc(got[i].target, plain[i].target, slices.Equal[[]float32]); same != tt.bitEqual {
				t.Errorf("%s: %s: the target's logits are the same bits: %v", tt.name, name, same)
			}
		}
		target, drafter = target/n, drafter/n
		t.Logf("%-40s mean absolute change of log-probability over %.0f tokens: target %.4f, drafter %.4f", tt.name, n, target, drafter)
		if !(target < tt.limit && drafter < tt.limit) || drafter == 0 {
			t.Errorf("%s: changes of %.4f and %.4f, limit %.2f", tt.name, target, drafter, tt.limit)
		}
	}
}

// TestMixedViews: every parameter of dialect L that the checkpoint holds unencoded is the same values in dialect E, as rows of whatever object.
func TestMixedViews(t *testing.T) {
	t.Parallel()
	dir, ple := sources(t, arch.Mixed)
	_, f := convert(t, Options{Profile: "mixed", Model: dir, PLE: ple, Out: filepath.Join(t.TempDir(), mixedOutput), MaxFileBytes: 1 << 20})
	a, err := model.NewArtifact(f)
	if err != nil {
		t.Fatal(err)
	}
	source := converttest.Tensors(t, dir)
	c := a.Config()
	specs, err := arch.Inventory(c, arch.Variant{Profile: arch.Radixark, NVFP4MTP: true}, 256)
	if err != nil {
		t.Fatal(err)
	}
	compared := 0
	for _, s := range specs {
		x, ok := source[s.ID]
		if !ok || s.Source.Op == arch.OpTranspose || s.Source.Op == arch.OpTableScale {
			continue
		}
		w, err := a.Weight(s.ID)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		scales := source[s.ID+"_scale"].Data
		for i := range w.N {
			row := make([]float64, w.Cols())
			w.Decode(row, i)
			for _, got := range row {
				want := 0.
				if x.DType == "BF16" {
					want = bf16(x.Data, n)
				} else {
					want = e4m3(x.Data[n]) * f32(scales, i)
				}
				if got != want {
					t.Fatalf("%s: value %d of row %d is %v, want %v", s.ID, n, i, got, want)
				}
				n++
			}
		}
		if n != num64(x.Shape) {
			t.Errorf("%s has %d values, the checkpoint %v", s.ID, n, x.Shape)
		}
		compared++
	}
	if compared < 120 {
		t.Errorf("%d parameters compared", compared)
	}

	// Rows of the table, from all shards, codes first: u4z8 with one scale in 16.
	format, rows, err := a.Table("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.weight")
	if err != nil || format.String() != "u4z8_g16_fp16" {
		t.Fatalf("%v: %v", format, err)
	}
	n := 9088 / 4
	ids := []int64{0, 1, int64(n) - 1, int64(n), 3*int64(n) - 1, 9087, 5000}
	got := make([]byte, len(ids)*10)
	if err := rows.Rows(ids, got); err != nil {
		t.Fatal(err)
	}
	for i, id := range ids {
		file := converttest.File(t, filepath.Join(ple, "shard_"+string(rune('0'+id/int64(n)))+".safetensors"))
		r := int(id) % n
		if want := append(slices.Clone(file["weight_i4"].Data[8*r:][:8]), file["weight_scale"].Data[2*r:][:2]...); !slices.Equal(got[10*i:][:10], want) {
			t.Errorf("row %d is %x, want %x", id, got[10*i:][:10], want)
		}
	}
	for _, id := range []int64{-1, 9088} {
		if err := rows.Rows([]int64{id}, got); err == nil {
			t.Errorf("row %d accepted", id)
		}
	}

	// No proposal head.
	if _, err := model.Bind(c, a, model.Options{Drafter: true, Proposal: true}); err == nil {
		t.Error("drafting through a proposal head was accepted")
	} else {
		t.Log(err)
	}
	if m := bound(t, f); m.DraftExperts().String() != "nvfp4" {
		t.Errorf("drafter's experts are %v", m.DraftExperts())
	}
}

// recoded gives the drafter's experts as the checkpoint has them.
type recoded struct {
	*model.Artifact
	banks map[string]backend.Weight
}

func (r recoded) Weight(name string) (backend.Weight, error) {
	if w, ok := r.banks[name]; ok {
		return w, nil
	}
	return r.Artifact.Weight(name)
}

// TestGoldenLogits: bound to the artifacts of the golden checkpoints, the oracle says what the reference said, target and drafter, to 1e-5 of
// each row. The recorded drafter of profile mixed has the BF16 experts of the checkpoint, which artifacts do not keep, so they are put in.
func TestGoldenLogits(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ folder, profile string }{{"micro-swift", "swift"}, {"micro-mixed", "mixed"}} {
		t.Run(tt.folder, func(t *testing.T) {
			dir := further(t, tt.folder)
			o := Options{Profile: tt.profile, Model: filepath.Join(dir, "checkpoint")}
			if tt.profile == "mixed" {
				o.PLE = filepath.Join(dir, "ples_int4")
			}
			o.Out = filepath.Join(t.TempDir(), variant(t, o).OutputName())
			_, f := convert(t, o)
			a, err := model.NewArtifact(f)
			if err != nil {
				t.Fatal(err)
			}
			store := recoded{a, map[string]backend.Weight{}}
			if tt.profile == "mixed" {
				p := arch.MLPPrefix(arch.MTPLayerPrefix)
				all := converttest.Tensors(t, o.Model)
				for name, source := range map[string]string{p + arch.BankGateUp: p + arch.BankGateUpBF16, p + arch.BankDown: p + arch.BankDownBF16} {
					x, err := num.NewTensor(num.BF16, num.Contiguous, all[source].Shape, all[source].Data)
					if err != nil {
						t.Fatal(err)
					}
					store.banks[name] = backend.Whole(x)
				}
			}
			m, err := model.Bind(a.Config(), store, model.Options{Drafter: true})
			if err != nil {
				t.Fatal(err)
			}
			golden, recorded := modeltest.Golden(t, dir)
			for _, name := range []string{"short", "eos"} {
				target, drafter := run(t, m, golden[name].Tokens)
				for _, x := range []struct {
					what string
					got  [][]float32
				}{{name + ".logits", target}, {name + ".mtp_logits", drafter}} {
					want := recorded[x.what]
					if len(x.got) != want.Shape[0] {
						t.Fatalf("%s: %d rows, recorded are %d", x.what, len(x.got), want.Shape[0])
					}
					worst := modeltest.Worst(t, x.got, want.Values())
					t.Logf("%-22s %.1e", x.what, worst)
					if !(worst <= 1e-5) {
						t.Errorf("%s is off by %.2g", x.what, worst)
					}
				}
			}
		})
	}
}
