package convert

import (
	"encoding/json/jsontext"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
)

// hollow writes an artifact whose objects are holes: its directory is all that counts.
func hollow(t testing.TB, d *artifact.Directory, o artifact.PlanOptions) *artifact.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "x.ninfer")
	p, err := artifact.NewPlan("x.ninfer", d, o)
	if err != nil {
		t.Fatal(err)
	}
	w, err := artifact.Create(path, p, artifact.WriterOptions{NoReserve: true, ID: &[16]byte{1}})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	for _, x := range p.Directory.Objects {
		if err := w.WriteZerosAt(x.ID, 0, x.Bytes); err != nil {
			t.Fatal(err)
		}
	}
	for i, h := range p.Holes {
		if err := w.WriteHoleAt(i, 0, make([]byte, h.Bytes)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Finish(); err != nil {
		t.Fatal(err)
	}
	f, err := artifact.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// microDirectory is the directory of a variant of the micro model.
func microDirectory(t testing.TB, v arch.Variant) *artifact.Directory {
	t.Helper()
	c, err := arch.ParseConfig(microConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	specs, err := arch.Inventory(c, v, 256)
	if err != nil {
		t.Fatal(err)
	}
	desc, err := arch.Describe(c, v, specs)
	if err != nil {
		t.Fatal(err)
	}
	sizes := map[string]int64{}
	for _, r := range arch.Resources() {
		sizes[r.Object()] = 100
	}
	return directory(specs, desc, sizes)
}

// TestProfiles: every variant is recognised by what the directory holds. The directories are those of package arch, whose digests for
// the official config are those of another implementation.
func TestProfiles(t *testing.T) {
	for _, profile := range []arch.Profile{arch.Radixark, arch.Swift, arch.Mixed} {
		for i := range 8 {
			v := arch.Variant{Profile: profile, FP8PLE: i&1 > 0, FP8Proj: i&2 > 0, NVFP4MTP: i&4 > 0}
			if profile == arch.Mixed && i > 0 || profile == arch.Radixark && v.FP8PLE {
				continue
			}
			f := hollow(t, microDirectory(t, v), artifact.PlanOptions{})
			p := CheckProfile(f)
			dialect := "L"
			if profile == arch.Mixed {
				dialect = "E"
			}
			if len(p.Failures) > 0 || len(p.Notes) > 0 || p.Dialect != dialect || p.Official || p.Upgraded || v.Recipe() != arch.RecipeID+"-"+p.Profile {
				t.Errorf("%s: %+v", v.Recipe(), p)
			}
		}
	}
	// What is in the files of a real conversion, and of an upgrade.
	_, f := convert(t, Options{Model: micro, Out: filepath.Join(t.TempDir(), output)})
	if p := CheckProfile(f); len(p.Failures)+len(p.Notes) > 0 || p.Profile != "radixark" {
		t.Errorf("converted: %+v", p)
	}
	v := plainV2(t, f)
	_, g := doUpgrade(t, UpgradeOptions{In: v.save(t), Out: filepath.Join(t.TempDir(), "x.ninfer"), Config: microConfig(t)})
	if p := CheckProfile(g); len(p.Failures)+len(p.Notes) > 0 || !p.Upgraded || p.Profile != "radixark" {
		t.Errorf("upgraded: %+v", p)
	}
	m, config := randomMixed(t)
	_, g = doUpgrade(t, UpgradeOptions{In: m.save(t), Out: filepath.Join(t.TempDir(), "x.ninfer"), Config: config})
	if p := CheckProfile(g); len(p.Failures)+len(p.Notes) > 0 || p.Dialect != "E" {
		t.Errorf("upgraded mixed: %+v", p)
	}
}

func TestProfileFaults(t *testing.T) {
	plain, fp8, mixed := arch.Variant{Profile: arch.Radixark}, arch.Variant{Profile: arch.Swift, FP8Proj: true}, arch.Variant{Profile: arch.Mixed}
	object := func(d *artifact.Directory, id string) *artifact.Object {
		i := slices.IndexFunc(d.Objects, func(o artifact.Object) bool { return o.ID == id })
		if i < 0 {
			t.Fatalf("no object %s", id)
		}
		return &d.Objects[i]
	}
	use := func(d *artifact.Directory, parameter string) *artifact.Use {
		i := slices.IndexFunc(d.Uses, func(u artifact.Use) bool { return u.Parameter == parameter })
		if i < 0 {
			t.Fatalf("no use of %s", parameter)
		}
		return &d.Uses[i]
	}
	unbind := func(d *artifact.Directory, name string) {
		var out artifact.Map[artifact.Binding]
		for n, b := range d.Bindings.All() {
			if n != name {
				out.Set(n, b)
			}
		}
		d.Bindings = out
	}
	const gate = "model.language_model.layers.2.mlp.experts.gate_up"
	for name, tt := range map[string]struct {
		v      arch.Variant
		change func(d *artifact.Directory)
		says   string // a failure, or with a leading "note:" a note
	}{
		"other model": {plain, func(d *artifact.Directory) { d.Components[0].Config = jsontext.Value(`{"architectures":["Demo"]}`) }, ""},
		"bad config":  {plain, func(d *artifact.Directory) { replace(t, &d.Components[0].Config, `"num_experts":8`, `"num_experts":0`) }, "num_experts"},
		"other config": {plain, func(d *artifact.Directory) {
			replace(t, &d.Components[0].Config, `"hc_lowrank":`, `"hc_lowrank":1`)
		}, "shape"},
		"object missing": {plain, func(d *artifact.Directory) {
			d.Objects = slices.DeleteFunc(d.Objects, func(o artifact.Object) bool { return o.ID == arch.VisionPositions })
			unbind(d, arch.VisionPositions)
			d.Uses = slices.DeleteFunc(d.Uses, func(u artifact.Use) bool { return u.Parameter == arch.VisionPositions })
		}, `"vision/position_embedding" is missing`},
		"object too many": {plain, func(d *artifact.Directory) {
			d.Objects = append(d.Objects, artifact.Object{ID: "extra", Shape: []int{3}, Format: "bf16", Layout: "contiguous_le_v1"})
		}, `"extra" is not expected`},
		"order":  {plain, func(d *artifact.Directory) { d.Objects[20], d.Objects[21] = d.Objects[21], d.Objects[20] }, "the order differs"},
		"format": {plain, func(d *artifact.Directory) { object(d, arch.MTPHiddenNorm).Format = "fp32" }, "fp32"},
		"no proposal head": {plain, func(d *artifact.Directory) {
			d.Objects = slices.DeleteFunc(d.Objects, func(o artifact.Object) bool { return o.ID == arch.ProposalWeight })
			unbind(d, arch.ProposalWeight)
			d.Uses = slices.DeleteFunc(d.Uses, func(u artifact.Use) bool { return u.Parameter == arch.ProposalWeight })
		}, "optimized_proposal_head.weight"},
		"component missing": {plain, func(d *artifact.Directory) { d.Components = slices.Delete(d.Components, 1, 2) }, `component "mtp" is missing`},
		"component more": {plain, func(d *artifact.Directory) {
			d.Components = append(d.Components, artifact.Component{ID: "audio", Config: jsontext.Value("{}")})
		}, "4 components"},
		"target":      {plain, func(d *artifact.Directory) { d.Components[1].Target = "vision" }, `target "vision"`},
		"mtp config":  {plain, func(d *artifact.Directory) { d.Components[1].Config = jsontext.Value("{}") }, `"mtp": its config`},
		"proposal":    {plain, func(d *artifact.Directory) { d.Components[0].Proposal.Rows = 255 }, "proposal head differs"},
		"no proposal": {plain, func(d *artifact.Directory) { d.Components[0].Proposal = nil }, "proposal head differs"},
		"resource": {plain, func(d *artifact.Directory) {
			d.Components[2].Resources.Set("preprocessor_config.json", "frontend/video_preprocessor_config.json")
		}, `resource "preprocessor_config.json" is`},
		"binding missing": {plain, func(d *artifact.Directory) { unbind(d, gate+"_input_divisors") }, "is not bound"},
		"binding wrong": {plain, func(d *artifact.Directory) {
			d.Bindings.Set(arch.MTPHiddenNorm, artifact.Binding{Object: arch.MTPEmbeddingNorm})
		}, "bound otherwise"},
		"binding more": {plain, func(d *artifact.Directory) { d.Bindings.Set("alias", artifact.Binding{Object: arch.LMHead}) }, `"alias" is not expected`},
		"binding in parts": {mixed, func(d *artifact.Directory) {
			b, ok := d.Bindings.Lookup("vision/layers/0/attention/key")
			if !ok || len(b.Parts) != 1 {
				t.Fatal("no parts")
			}
			d.Bindings.Set("vision/layers/0/attention/key", artifact.Binding{Parts: []artifact.Part{{Object: b.Parts[0].Object, Begin: 0, End: b.Parts[0].End}}})
		}, "bound otherwise"},
		"use missing": {plain, func(d *artifact.Directory) { d.Uses = d.Uses[1:] }, "is missing"},
		"use more": {plain, func(d *artifact.Directory) {
			d.Uses = append(d.Uses, artifact.Use{Parameter: arch.LMHead, Input: "other"})
		}, `input "other" is not expected`},
		"policy":         {plain, func(d *artifact.Directory) { use(d, arch.LMHead).Policy = "AllowA8" }, "AllowA8"},
		"policy of bank": {plain, func(d *artifact.Directory) { use(d, gate).Policy = "A16Only" }, "A16Only"},
		"divisor":        {plain, func(d *artifact.Directory) { use(d, gate).Auxiliaries = artifact.Map[artifact.Binding]{} }, "other auxiliaries"},
		"divisor of mixed": {mixed, func(d *artifact.Directory) {
			use(d, "text/layers/0/mlp/experts/down").Auxiliaries.Set(arch.DivisorRole, artifact.Binding{Object: "text/layers/0/gdn/a_log"})
		}, "other auxiliaries"},
		"8-bit activations": {fp8, func(d *artifact.Directory) { use(d, arch.LMHead).Policy = "AllowA8" }, "note:FP8 rows allow"},
		"no use of the table": {fp8, func(d *artifact.Directory) {
			d.Uses = slices.DeleteFunc(d.Uses, func(u artifact.Use) bool { return strings.HasSuffix(u.Parameter, arch.PLETable) })
		}, "note:the n-gram table has no use"},
	} {
		t.Run(name, func(t *testing.T) {
			d := microDirectory(t, tt.v)
			tt.change(d)
			p := CheckProfile(hollow(t, d, artifact.PlanOptions{}))
			list := p.Failures
			says, isNote := strings.CutPrefix(tt.says, "note:")
			if isNote {
				list = p.Notes
			}
			if says == "" && (p.Dialect != "" || len(p.Failures) > 0) || !strings.Contains(strings.Join(list, "\n"), says) || isNote && len(p.Failures) > 0 || !isNote && says != "" && len(p.Failures) == 0 {
				t.Errorf("%+v, want %q", p, tt.says)
			}
		})
	}

	// Placed with more room than needed: only a note.
	d := microDirectory(t, plain)
	placed, err := artifact.NewPlan("x", d, artifact.PlanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i, o := range placed.Directory.Objects {
		d.Objects[i].Offset = o.Offset
		if i > 50 {
			d.Objects[i].Offset += 4096
		}
	}
	if p := CheckProfile(hollow(t, d, artifact.PlanOptions{Upgrade: true})); len(p.Failures) > 0 || len(p.Notes) != 1 || !strings.Contains(p.Notes[0], "lies at") {
		t.Errorf("%+v", p)
	}
}

func replace(t testing.TB, v *jsontext.Value, old, new string) {
	t.Helper()
	if !strings.Contains(string(*v), old) {
		t.Fatalf("%s has no %s", *v, old)
	}
	*v = jsontext.Value(strings.Replace(string(*v), old, new, 1))
}
