package model_test

import (
	"context"
	"encoding/binary"
	"encoding/json/jsontext"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/convert"
	"ninfer/internal/convert/converttest"
	"ninfer/internal/model"
)

const micro = "../../testdata/micro-radixark/checkpoint"

// rewritten copies an artifact after changes to its directory and to the bytes of objects.
func rewritten(t *testing.T, f *artifact.File, edit func(d *artifact.Directory), bytes map[string]func([]byte)) *artifact.File {
	t.Helper()
	old := f.Directory()
	d := &artifact.Directory{Metadata: old.Metadata, Provenance: old.Provenance}
	d.Components = slices.Clone(old.Components)
	d.Objects = slices.Clone(old.Objects)
	for name, b := range old.Bindings.All() {
		d.Bindings.Set(name, b)
	}
	d.Uses = slices.Clone(old.Uses)
	if edit != nil {
		edit(d)
	}
	for i := range d.Objects {
		if o := &d.Objects[i]; !o.Resource {
			o.Bytes = 0 // planned anew
		}
	}
	p, err := artifact.NewPlan("edited.ninfer", d, artifact.PlanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "edited.ninfer")
	w, err := artifact.Create(path, p, artifact.WriterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	for _, o := range p.Directory.Objects {
		data := make([]byte, o.Bytes)
		if err := f.ReadObjectAt(o.ID, data, 0); err != nil {
			t.Fatal(err)
		}
		if change := bytes[o.ID]; change != nil {
			change(data)
		}
		if err := w.WriteAt(o.ID, 0, data); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Finish(); err != nil {
		t.Fatal(err)
	}
	g, err := artifact.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Close() })
	return g
}

func converted(t *testing.T, o convert.Options, name string) *artifact.File {
	t.Helper()
	o.Out = filepath.Join(t.TempDir(), name)
	if _, err := convert.Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	f, err := artifact.Open(o.Out)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func without(d *artifact.Directory, names ...string) {
	var kept artifact.Map[artifact.Binding]
	for name, b := range d.Bindings.All() {
		if !slices.Contains(names, name) {
			kept.Set(name, b)
		}
	}
	d.Bindings = kept
	d.Uses = slices.DeleteFunc(d.Uses, func(u artifact.Use) bool { return slices.Contains(names, u.Parameter) })
}

// use finds a use of a parameter to change it.
func use(t *testing.T, d *artifact.Directory, parameter string) *artifact.Use {
	t.Helper()
	i := slices.IndexFunc(d.Uses, func(u artifact.Use) bool { return u.Parameter == parameter })
	if i < 0 {
		t.Fatalf("no use of %s", parameter)
	}
	return &d.Uses[i]
}

// A table in INT4 is read whole, codes and scales of all shards; one in FP8 is left alone.
func TestWarmTable(t *testing.T) {
	dir, ple := converttest.Mixed(t, micro)
	for _, f := range []*artifact.File{
		converted(t, convert.Options{Profile: "mixed", Model: dir, PLE: ple}, "qwen3_8_flash_next_mixed.ninfer"),
		converted(t, convert.Options{Model: micro}, "qwen3_8_flash_next_125b_a6b_nvfp4.ninfer"),
	} {
		a, err := model.NewArtifact(f)
		if err != nil {
			t.Fatal(err)
		}
		want := int64(0)
		if strings.Contains(f.Path(), "mixed") {
			want = a.TableBytes()
		}
		ctx, cancel := context.WithCancel(context.Background())
		if n, err := a.WarmTable(ctx); n != want || err != nil {
			t.Errorf("%s: %d bytes, %v; want %d", f.Path(), n, err, want)
		}
		cancel()
		if n, err := a.WarmTable(ctx); want > 0 && (n != 0 || err == nil) {
			t.Errorf("%s: %d bytes, %v after the end", f.Path(), n, err)
		}
	}
}

// The system is told that rows are single places: with its usual read-ahead a row that is not in memory costs 512 KB of a table that memory
// may not hold.
func TestTableAdvice(t *testing.T) {
	advised := func(f *artifact.File) bool {
		maps, err := os.ReadFile("/proc/self/smaps")
		if err != nil || !strings.Contains(string(maps), "VmFlags:") {
			t.Skip("only Linux tells what was advised")
		}
		ours := false
		for line := range strings.Lines(string(maps)) {
			switch fields := strings.Fields(line); {
			case strings.Contains(fields[0], "-"):
				ours = strings.HasSuffix(strings.TrimSpace(line), f.Path())
			case ours && fields[0] == "VmFlags:" && slices.Contains(fields, "rr"):
				return true
			}
		}
		return false
	}
	l := converted(t, convert.Options{Model: micro}, "qwen3_8_flash_next_125b_a6b_nvfp4.ninfer")
	a, err := model.NewArtifact(l)
	if err != nil {
		t.Fatal(err)
	}
	before := advised(l)
	if _, _, err := a.Table(arch.PLEPrefix(arch.LayerPrefix(1)) + arch.PLETable); err != nil {
		t.Fatal(err)
	}
	if before || !advised(l) {
		t.Errorf("one table: advised before %v, after %v", before, advised(l))
	}
	dir, ple := converttest.Mixed(t, micro)
	e := converted(t, convert.Options{Profile: "mixed", Model: dir, PLE: ple}, "qwen3_8_flash_next_mixed.ninfer")
	if a, err = model.NewArtifact(e); err != nil {
		t.Fatal(err)
	}
	if _, err := a.WarmTable(t.Context()); err != nil || !advised(e) {
		t.Errorf("shards: advised %v, %v", advised(e), err)
	}
}

// TestArtifactRefusals is docs/format.md 4.4: what a loader must check.
func TestArtifactRefusals(t *testing.T) {
	dir, ple := converttest.Mixed(t, micro)
	mixed := converted(t, convert.Options{Profile: "mixed", Model: dir, PLE: ple}, "qwen3_8_flash_next_mixed.ninfer")
	plain := converted(t, convert.Options{Model: micro}, "qwen3_8_flash_next_125b_a6b_nvfp4.ninfer")
	open := func(f *artifact.File) error {
		a, err := model.NewArtifact(f)
		if err != nil {
			return err
		}
		_, err = model.Bind(a.Config(), a, model.Options{Drafter: true, Proposal: f.Path() == plain.Path()})
		return err
	}
	for _, f := range []*artifact.File{mixed, plain, rewritten(t, mixed, nil, nil), rewritten(t, plain, nil, nil)} {
		if err := open(f); err != nil {
			t.Error(err)
		}
	}
	const (
		gdn      = "text/layers/0/gdn/"
		bank     = "text/layers/0/mlp/experts/gate_up"
		l        = "model.language_model.layers.0.mlp.experts.down"
		divisors = l + "_input_divisors"
	)
	auxiliary := func(u *artifact.Use, object string) {
		var m artifact.Map[artifact.Binding]
		m.Set("activation_divisor", artifact.Binding{Object: object})
		u.Auxiliaries = m
	}
	for _, tt := range []struct {
		name  string
		file  *artifact.File
		edit  func(d *artifact.Directory)
		bytes map[string]func([]byte)
		parts []string
	}{
		{"E: binding missing", mixed, func(d *artifact.Directory) { without(d, gdn+"norm") }, nil, []string{gdn + "norm"}},
		{"E: part missing", mixed, func(d *artifact.Directory) { without(d, "vision/layers/0/attention/key") }, nil, []string{"vision/layers/0/attention/key"}},
		{"E: parts in another order", mixed, func(d *artifact.Directory) {
			q, _ := d.Bindings.Lookup("vision/layers/0/attention/query")
			k, _ := d.Bindings.Lookup("vision/layers/0/attention/key")
			d.Bindings.Set("vision/layers/0/attention/query", k)
			d.Bindings.Set("vision/layers/0/attention/key", q)
		}, nil, []string{"vision/layers/0/attention/", "one run"}},
		{"E: binding too many", mixed, func(d *artifact.Directory) {
			d.Bindings.Set("text/extra", artifact.Binding{Object: gdn + "norm"})
		}, nil, []string{"text/extra"}},
		{"E: use missing", mixed, func(d *artifact.Directory) { d.Uses = d.Uses[1:] }, nil, []string{"lacks its use"}},
		{"E: use too many", mixed, func(d *artifact.Directory) {
			d.Uses = append(d.Uses, artifact.Use{Parameter: gdn + "norm", Input: "x"})
		}, nil, []string{gdn + "norm", `"x"`}},
		{"E: policy", mixed, func(d *artifact.Directory) { use(t, d, bank).Policy = "A16Only" }, nil, []string{bank, "A16Only", "AllowA4"}},
		{"E: divisors", mixed, func(d *artifact.Directory) { auxiliary(use(t, d, bank), gdn+"norm") }, nil, []string{bank, "activation_divisor"}},
		{"E: shape", mixed, func(d *artifact.Directory) {
			i := slices.IndexFunc(d.Objects, func(o artifact.Object) bool { return o.ID == gdn+"a_b_projection" })
			d.Objects[i].Shape = []int{128, 6}
		}, nil, []string{"a_b_projection", "[128 6]", "[6 128]"}},
		{"E: format", mixed, func(d *artifact.Directory) {
			i := slices.IndexFunc(d.Objects, func(o artifact.Object) bool { return o.ID == "text/layers/1/ple/embedding/layer_multipliers" })
			d.Objects[i].Format, d.Objects[i].Shape = "fp32", []int{6}
		}, nil, []string{"layer_multipliers", "fp32", "int64"}},
		{"E: constants", mixed, nil, map[string]func([]byte){
			"text/layers/1/ple/embedding/ngram_head_offsets": func(p []byte) { p[8]++ },
		}, []string{"ngram_head_offsets"}},
		{"E: target", mixed, func(d *artifact.Directory) {
			i := slices.IndexFunc(d.Components, func(c artifact.Component) bool { return c.ID == "vision" })
			d.Components[i].Target = "mtp"
		}, nil, []string{"vision", "mtp"}},
		{"E: config", mixed, func(d *artifact.Directory) {
			d.Components[0].Config = jsontext.Value(strings.Replace(string(d.Components[0].Config), `"num_experts":8`, `"num_experts":16`, 1))
		}, nil, []string{"mlp/router"}},
		{"another model", mixed, func(d *artifact.Directory) {
			d.Components[0].Config = jsontext.Value(`{"architectures":["Other"],"model_type":"other"}`)
		}, nil, []string{"Other"}},
		{"L: weight missing", plain, func(d *artifact.Directory) { without(d, "lm_head.weight") }, nil, []string{"lm_head.weight"}},
		{"L: no divisors", plain, func(d *artifact.Directory) { use(t, d, l).Auxiliaries = artifact.Map[artifact.Binding]{} }, nil, []string{l, "activation_divisor"}},
		{"L: policy", plain, func(d *artifact.Directory) { use(t, d, l).Policy = "A16Only" }, nil, []string{l, "A16Only"}},
		{"L: other divisors", plain, func(d *artifact.Directory) {
			auxiliary(use(t, d, l), "model.language_model.layers.0.linear_attn.A_log")
		}, nil, []string{"A_log", "fp32 [8]"}},
		{"L: divisor zero", plain, nil, map[string]func([]byte){divisors: func(p []byte) { clear(p[8:12]) }}, []string{divisors, "expert 2"}},
		{"L: divisor nan", plain, nil, map[string]func([]byte){
			divisors: func(p []byte) { binary.LittleEndian.PutUint32(p, math.Float32bits(float32(math.NaN()))) },
		}, []string{divisors, "NaN"}},
		{"L: parts of rows", plain, func(d *artifact.Directory) {
			d.Bindings.Set("lm_head.weight", artifact.Binding{Parts: []artifact.Part{{Object: "lm_head.weight", Begin: 64, End: 512*128 - 64}}})
		}, nil, []string{"lm_head.weight", "inside a row"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := open(rewritten(t, tt.file, tt.edit, tt.bytes))
			if err == nil {
				t.Fatal("accepted")
			}
			for _, p := range tt.parts {
				if !strings.Contains(err.Error(), p) || strings.Contains(err.Error(), "\n") {
					t.Errorf("error %q lacks %q", err, p)
				}
			}
		})
	}

	// A parameter made of parts that follow each other is read like a whole one.
	g := rewritten(t, plain, func(d *artifact.Directory) {
		d.Bindings.Set("lm_head.weight", artifact.Binding{Parts: []artifact.Part{
			{Object: "lm_head.weight", Begin: 0, End: 100 * 128}, {Object: "lm_head.weight", Begin: 100 * 128, End: 512 * 128},
		}})
	}, nil)
	if err := open(g); err != nil {
		t.Error(err)
	}
}
