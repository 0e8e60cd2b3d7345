package convert

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json/v2"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/hf"
	"ninfer/internal/num"
)

// v2File is a version 2 file to upgrade.
type v2File struct {
	model, weights string
	objects        []artifact.Object
	payload        []byte
}

func (f *v2File) bytes() []byte {
	text := v2Directory(f.model, f.weights, f.objects)
	b := append([]byte("NINFER\x00\x02"), binary.LittleEndian.AppendUint64(nil, uint64(len(text)))...)
	b = append(b, text...)
	return append(append(b, make([]byte, (4096-len(b)%4096)%4096)...), f.payload...)
}

func (f *v2File) object(id string) *artifact.Object {
	for i := range f.objects {
		if f.objects[i].ID == id {
			return &f.objects[i]
		}
	}
	panic(id)
}

func (f *v2File) content(id string) []byte {
	o := f.object(id)
	return f.payload[o.Offset:][:o.Bytes]
}

func (f *v2File) clone() *v2File {
	return &v2File{f.model, f.weights, slices.Clone(f.objects), bytes.Clone(f.payload)}
}

// save writes the file into a folder of its own.
func (f *v2File) save(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "in.ninfer")
	if err := os.WriteFile(path, f.bytes(), 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}

// plainV2 is the version 2 form of the artifact that a radixark checkpoint gives: the payload is the same (docs/format.md 1.7).
func plainV2(t testing.TB, f *artifact.File) *v2File {
	t.Helper()
	v := &v2File{arch.ModelID, arch.WeightsID, slices.Clone(f.Directory().Objects), make([]byte, f.PayloadBytes())}
	if _, err := f.ReadAt(v.payload, 0); err != nil {
		t.Fatal(err)
	}
	return v
}

// mixedOf is the version 2 form of a mixed artifact: the drafter's banks are what the checkpoint has.
func mixedOf(t testing.TB, c *arch.Config, sizes map[string]int64, content func(id string) []byte) *v2File {
	t.Helper()
	v := &v2File{arch.MixedModelID, arch.MixedWeightsID, placed(t, mixedV2(t, c), sizes), nil}
	last := v.objects[len(v.objects)-1]
	v.payload = make([]byte, last.Offset+last.Bytes)
	for _, o := range v.objects {
		if n := copy(v.payload[o.Offset:][:o.Bytes], content(o.ID)); int64(n) != o.Bytes {
			t.Fatalf("%s has %d bytes, want %d", o.ID, n, o.Bytes)
		}
	}
	return v
}

func doUpgrade(t testing.TB, o UpgradeOptions) (*UpgradeReport, *artifact.File) {
	t.Helper()
	r, err := Upgrade(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	f, err := artifact.Open(o.Out)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return r, f
}

func contentOf(t testing.TB, f *artifact.File, id string) []byte {
	t.Helper()
	o, ok := f.Object(id)
	if !ok {
		t.Fatalf("no object %s", id)
	}
	b := make([]byte, o.Bytes)
	if err := f.ReadObjectAt(id, b, 0); err != nil {
		t.Fatal(err)
	}
	return b
}

// checkUpgraded verifies an artifact with its report and compares the report with the input.
func checkUpgraded(t *testing.T, v *v2File, r *UpgradeReport, path, kind string) {
	t.Helper()
	res, err := artifact.Verify(path, artifact.Options{})
	if err != nil || !res.Passed || res.ReportEqual != len(v.objects) || res.IDKind != kind || len(res.Unchecked) > 0 {
		t.Errorf("verify: %+v, %v", res, err)
	}
	text := read(t, artifact.UpgradeReportPath(path))
	at := 0
	for _, name := range []string{
		"v2_sha256", "v2_objects", "mtp_banks", "timings", "input", "output", "artifact_id", "files", "payload_bytes", "seconds",
	} {
		i := bytes.Index(text[at:], []byte("\n \""+name+"\": "))
		if i < 0 {
			t.Fatalf("the report has no member %s after %d", name, at)
		}
		at += i
	}
	var got struct {
		V2      string            `json:"v2_sha256"`
		Objects map[string]string `json:"v2_objects"`
		Banks   map[string]struct {
			SHA256 string
			Bytes  int64
			Oracle struct {
				Experts []int
				Exact   bool    `json:"divisors_and_signs_exact"`
				Scale   float64 `json:"max_scale_error_e4m3_steps"`
				Excess  float64 `json:"max_code_excess"`
				Passed  bool
			} `json:"fp64_oracle"`
		} `json:"mtp_banks"`
		ID    string `json:"artifact_id"`
		Files []string
	}
	if err := json.Unmarshal(text, &got, json.MatchCaseInsensitiveNames(true)); err != nil || !bytes.HasSuffix(text, []byte("}\n")) {
		t.Fatalf("report: %v", err)
	}
	if got.V2 != digest(v.bytes()) || got.ID != r.ArtifactID || len(got.Objects) != len(v.objects) || len(got.Files) != res.Files {
		t.Errorf("report: v2 %s, id %s, %d objects, files %q", got.V2, got.ID, len(got.Objects), got.Files)
	}
	for _, o := range v.objects {
		if got.Objects[o.ID] != digest(v.content(o.ID)) {
			t.Errorf("report: digest of %s", o.ID)
		}
	}
	for id, b := range got.Banks {
		if o := b.Oracle; !o.Passed || !o.Exact || len(o.Experts) != 3 || o.Scale > 0.50001 || o.Excess > 1e-5 || b.SHA256 == got.Objects[id] {
			t.Errorf("report: bank %s: %+v", id, b)
		}
	}
}

func microConfig(t testing.TB) []byte { return read(t, filepath.Join(micro, "config.json")) }

func TestUpgrade(t *testing.T) {
	_, f := convert(t, Options{Model: micro, Out: filepath.Join(t.TempDir(), output)})
	v := plainV2(t, f)
	in := v.save(t)
	before := read(t, in)
	for _, limit := range []int64{0, 1 << 20} {
		out := filepath.Join(t.TempDir(), "new.ninfer")
		var steps []UpgradeStep
		r, g := doUpgrade(t, UpgradeOptions{
			In: in, Out: out, Config: microConfig(t), MaxFileBytes: limit, Progress: func(s UpgradeStep) { steps = append(steps, s) },
		})
		checkUpgraded(t, v, r, out, "content")
		for _, o := range f.Directory().Objects {
			p, _ := g.Object(o.ID)
			moved := o.ID == chatTemplate
			if !bytes.Equal(contentOf(t, g, o.ID), contentOf(t, f, o.ID)) || moved == (p.Offset == o.Offset) {
				t.Errorf("%s at %d differs from the original at %d", o.ID, p.Offset, o.Offset)
			}
		}
		// The old payload byte for byte, then zeros to a multiple of 256, then the template.
		payload := make([]byte, g.PayloadBytes())
		if _, err := g.ReadAt(payload, 0); err != nil {
			t.Fatal(err)
		}
		n := len(v.payload)
		at := (n + 255) / 256 * 256
		if !bytes.Equal(payload[:n], v.payload) || len(bytes.Trim(payload[n:at], "\x00")) > 0 || !bytes.Equal(payload[at:], v.content(chatTemplate)) {
			t.Error("the payload is not the old one and the template")
		}
		if f.ID() == g.ID() {
			t.Error("the id ignores the hole")
		}
		if last := steps[len(steps)-1]; last.Done != last.All || last.All != int64(len(before)) || last.Rate() <= 0 {
			t.Errorf("last step %+v", last)
		}
		// The same directory but for what 1.9 changes.
		a, b := f.Directory(), g.Directory()
		if a.Bindings.Len() != b.Bindings.Len() || len(a.Uses) != len(b.Uses) || string(a.Components[0].Config) != string(b.Components[0].Config) {
			t.Error("bindings, uses or components differ")
		}
	}
	if !bytes.Equal(before, read(t, in)) {
		t.Error("the input was changed")
	}
	if r, err := artifact.VerifyV2(in, artifact.Options{}); err != nil || !r.Passed {
		t.Errorf("the input: %+v, %v", r, err)
	}

	// Bytes after the last object, which belong to nothing, stay.
	w := v.clone()
	w.payload = append(w.payload, bytes.Repeat([]byte("tail"), 100)...)
	out := filepath.Join(t.TempDir(), "new.ninfer")
	r, g := doUpgrade(t, UpgradeOptions{In: w.save(t), Out: out, Config: microConfig(t)})
	checkUpgraded(t, w, r, out, "content")
	payload := make([]byte, len(w.payload))
	if _, err := g.ReadAt(payload, 0); err != nil || !bytes.Equal(payload, w.payload) {
		t.Errorf("the payload differs: %v", err)
	}
}

// TestUpgradeMixed upgrades the version 2 form of the mixed reference model: the result holds the objects that the converter makes
// of the same checkpoint.
func TestUpgradeMixed(t *testing.T) {
	root := further(t, "micro-mixed")
	model := filepath.Join(root, "checkpoint")
	_, f := convert(t, Options{Model: model, Out: filepath.Join(t.TempDir(), "qwen3_8_flash_next_mixed.ninfer"), Profile: "mixed", PLE: filepath.Join(root, "ples_int4")})
	src, err := hf.Open(model)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	config := read(t, filepath.Join(model, "config.json"))
	c, err := arch.ParseConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	sizes := map[string]int64{}
	for _, o := range f.Directory().Objects {
		sizes[o.ID] = o.Bytes
	}
	v := mixedOf(t, c, sizes, func(id string) []byte {
		from := map[string]string{mixedGateUp: "mtp.layers.0.mlp.experts.gate_up_proj", mixedDown: "mtp.layers.0.mlp.experts.down_proj"}[id]
		if from == "" {
			return contentOf(t, f, id)
		}
		x, err := src.Tensor(from)
		if err != nil {
			t.Fatal(err)
		}
		return x.Data
	})
	in := v.save(t)
	var ids [][16]byte
	for _, limit := range []int64{0, 1 << 20} {
		out := filepath.Join(t.TempDir(), "any name.ninfer")
		r, g := doUpgrade(t, UpgradeOptions{In: in, Out: out, Config: config, MaxFileBytes: limit})
		checkUpgraded(t, v, r, out, "content")
		ids = append(ids, g.ID())
		for i, o := range f.Directory().Objects {
			p := g.Directory().Objects[i]
			if p.ID != o.ID || p.Offset != o.Offset || p.Format != o.Format || !bytes.Equal(contentOf(t, g, o.ID), contentOf(t, f, o.ID)) {
				t.Errorf("%s differs from the converter's", o.ID)
			}
		}
		if r.Published {
			t.Error("the report calls it published")
		}
	}
	if ids[0] != ids[1] {
		t.Error("the id depends on the split")
	}
}

// randomMixed is a mixed version 2 file of the micro config with random words.
func randomMixed(t testing.TB) (*v2File, []byte) {
	t.Helper()
	config := microConfig(t)
	c, err := arch.ParseConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	sizes := map[string]int64{}
	resources := map[string][]byte{}
	for _, r := range arch.Resources() {
		resources[r.Object()] = read(t, filepath.Join(micro, r.Role))
		sizes[r.Object()] = int64(len(resources[r.Object()]))
	}
	specs := mixedV2(t, c)
	n := byte(1)
	return mixedOf(t, c, sizes, func(id string) []byte {
		if b, ok := resources[id]; ok {
			return b
		}
		for _, s := range specs {
			if s.ID != id {
				continue
			}
			size, _ := num.EncodedSize(s.Format, s.Layout, s.Shape)
			b := make([]byte, size)
			if s.Format == num.BF16 { // values up to 2 with both signs
				for i := range len(b) / 2 {
					n = n*5 + 3
					binary.LittleEndian.PutUint16(b[2*i:], uint16(n&0x80)<<8|0x3e80|uint16(i*7+int(n))&0x17f)
				}
			}
			if s.Format == num.NVFP4 {
				for i := len(b) - 4*s.Shape[0]; i < len(b); i += 4 {
					binary.LittleEndian.PutUint32(b[i:], math.Float32bits(1))
				}
			}
			if s.Format == num.U4Z8G16 {
				for i := range s.Shape[0] * s.Shape[1] / 2 {
					b[i] = 0x88
				}
			}
			return b
		}
		return nil
	}), config
}

// TestUpgradePinned: with pins the input and what is made of it must have the published digests, and the id is the derived one.
func TestUpgradePinned(t *testing.T) {
	v, config := randomMixed(t)
	in := v.save(t)
	r, _ := doUpgrade(t, UpgradeOptions{In: in, Out: filepath.Join(t.TempDir(), "a.ninfer"), Config: config})
	right := func() *pins {
		p := &pins{file: digest(v.bytes()), template: digest(v.content(chatTemplate)), banks: map[string]string{}}
		for id, b := range r.Banks.All() {
			p.banks[id] = b.SHA256
		}
		return p
	}
	out := filepath.Join(t.TempDir(), "a.ninfer")
	p, g := doUpgrade(t, UpgradeOptions{In: in, Out: out, Config: config, pins: right()})
	checkUpgraded(t, v, p, out, "upgrade")
	if !p.Published || !bytes.Contains(g.Directory().Provenance, []byte(`"sha256":"`+right().file+`"`)) {
		t.Errorf("published %v, provenance %s", p.Published, g.Directory().Provenance)
	}
	for name, change := range map[string]func(p *pins){
		"its sha256 is":                    func(p *pins) { p.file = digest(nil) },
		`"frontend/chat_template.jinja" `:  func(p *pins) { p.template = digest(nil) },
		`"` + mixedDown + `": the encoded`: func(p *pins) { p.banks[mixedDown] = digest(nil) },
	} {
		pins := right()
		change(pins)
		refuseUpgrade(t, UpgradeOptions{In: in, Config: config, pins: pins}, name)
	}
}

// refuseUpgrade expects an error that says something, and an output folder as it was.
func refuseUpgrade(t *testing.T, o UpgradeOptions, says string) *Error {
	t.Helper()
	dir := t.TempDir()
	if o.Out == "" {
		o.Out = filepath.Join(dir, "new.ninfer")
	}
	_, err := Upgrade(context.Background(), o)
	var e *Error
	if !errors.As(err, &e) || !strings.Contains(err.Error(), says) || strings.ContainsAny(err.Error(), "\r\n") {
		t.Errorf("%v, want %q", err, says)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("%s was left", left[0].Name())
	}
	return e
}

func TestUpgradeReject(t *testing.T) {
	v, config := randomMixed(t)
	_, f := convert(t, Options{Model: micro, Out: filepath.Join(t.TempDir(), output)})
	plain := plainV2(t, f)

	for _, tt := range []struct {
		name   string
		from   *v2File
		change func(v *v2File)
		says   string
	}{
		{"identity", v, func(v *v2File) { v.weights = "nvfp4-fp8-proj" }, "not one that can be upgraded"},
		{"identity of the other dialect", v, func(v *v2File) { v.model, v.weights = arch.ModelID, arch.WeightsID }, "optimized_proposal_head"},
		{"object missing", v, func(v *v2File) { v.objects = slices.Delete(v.objects, 20, 21) }, "is missing"},
		{"object too many", v, func(v *v2File) { v.objects[30].ID = "text/other" }, `"text/other" is not expected`},
		{"many differ", v, func(v *v2File) { v.objects = v.objects[:30] }, "more)"},
		{"shape", v, func(v *v2File) {
			o := v.object("text/token_embedding")
			o.Shape = []int{o.Shape[1], o.Shape[0]}
		}, "text/token_embedding"},
		{"format", v, func(v *v2File) { // the same size
			o := v.object("text/token_embedding")
			o.Format, o.Shape = "fp32", []int{o.Shape[0], o.Shape[1] / 2}
		}, "text/token_embedding"},
		{"kind", v, func(v *v2File) {
			v.object("text/layers/1/ple/conv_norm").Resource = true
		}, "wrong kind"},
		{"bank already encoded", v, func(v *v2File) {
			o := v.object(mixedGateUp)
			o.Format, o.Layout = "nvfp4", "expert_block_scale_k16_m128x4_v1"
			size, err := num.EncodedSize(num.NVFP4, num.ExpertBlockScale, o.Shape)
			if err != nil {
				t.Fatal(err)
			}
			o.Bytes = size
		}, mixedGateUp},
		{"bank not finite", v, func(v *v2File) {
			binary.LittleEndian.PutUint16(v.content(mixedDown)[77_777*2:], 0x7f80)
		}, `"` + mixedDown + `" expert`},
		{"plain: object missing", plain, func(v *v2File) { v.objects = slices.Delete(v.objects, 9, 10) }, "is missing"},
		{"plain: divisors missing", plain, func(v *v2File) {
			v.objects = slices.DeleteFunc(v.objects, func(o artifact.Object) bool {
				return strings.HasSuffix(o.ID, "layers.2.mlp.experts.down_input_divisors")
			})
		}, "down_input_divisors"},
		{"plain: no proposal head", plain, func(v *v2File) {
			v.objects = slices.DeleteFunc(v.objects, func(o artifact.Object) bool { return o.ID == arch.ProposalWeight })
		}, "optimized_proposal_head"},
		{"plain: padding", plain, func(v *v2File) {
			o := v.object("frontend/video_preprocessor_config.json")
			v.payload[o.Offset+o.Bytes+1] = 7
		}, "is 0x07, want zero"},
		{"plain: order", plain, func(v *v2File) { // of two objects of equal size
			a, b := v.object("vision/layers/0/norm1/weight"), v.object("vision/layers/0/norm1/bias")
			a.ID, b.ID = b.ID, a.ID
		}, "the order differs"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := tt.from.clone()
			tt.change(w)
			refuseUpgrade(t, UpgradeOptions{In: w.save(t), Config: config}, tt.says)
		})
	}

	in := v.save(t)
	t.Run("without the config", func(t *testing.T) { refuseUpgrade(t, UpgradeOptions{In: in}, "the published 125B model is expected") })
	t.Run("bad config", func(t *testing.T) {
		if e := refuseUpgrade(t, UpgradeOptions{In: in, Config: []byte("{}")}, "architectures"); e.Class != Config {
			t.Errorf("class %s", e.Class)
		}
	})
	t.Run("no input", func(t *testing.T) { refuseUpgrade(t, UpgradeOptions{In: in + "x", Config: config}, "in.ninferx") })
	t.Run("version 3", func(t *testing.T) { refuseUpgrade(t, UpgradeOptions{In: f.Path(), Config: config}, "needs no upgrade") })
	t.Run("no output", func(t *testing.T) {
		_, err := Upgrade(context.Background(), UpgradeOptions{In: in})
		var e *Error
		if !errors.As(err, &e) || e.ExitCode() != 2 {
			t.Errorf("%v", err)
		}
	})
	t.Run("same file", func(t *testing.T) {
		link := filepath.Join(filepath.Dir(in), "link")
		if err := os.Link(in, link); err != nil {
			t.Skip(err)
		}
		defer os.Remove(link)
		if e := refuseUpgrade(t, UpgradeOptions{In: in, Out: link, Config: config}, "same file"); e.Class != Usage {
			t.Errorf("class %s", e.Class)
		}
	})
	t.Run("small limit", func(t *testing.T) {
		if e := refuseUpgrade(t, UpgradeOptions{In: in, Config: config, MaxFileBytes: 5000}, "limit"); e.Class != Usage {
			t.Errorf("class %s", e.Class)
		}
	})
	for _, name := range []string{"new.ninfer", "new.ninfer.part-0001", "new.ninfer.upgrade.json"} {
		t.Run("exists "+name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, name), []byte("mine"), 0o666); err != nil {
				t.Fatal(err)
			}
			_, err := Upgrade(context.Background(), UpgradeOptions{In: in, Out: filepath.Join(dir, "new.ninfer"), Config: config, MaxFileBytes: 1 << 20})
			var e *Error
			if !errors.As(err, &e) || e.Class != Exists || !strings.Contains(err.Error(), name) {
				t.Errorf("%v", err)
			}
			if left, _ := os.ReadDir(dir); len(left) != 1 || string(read(t, filepath.Join(dir, name))) != "mine" {
				t.Errorf("%v left", left)
			}
		})
	}
	t.Run("cancelled", func(t *testing.T) {
		dir := t.TempDir()
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_, err := Upgrade(ctx, UpgradeOptions{In: in, Out: filepath.Join(dir, "new.ninfer"), Config: config})
		var e *Error
		if !errors.As(err, &e) || e.Class != Cancelled {
			t.Errorf("%v", err)
		}
		if left, _ := os.ReadDir(dir); len(left) > 0 {
			t.Errorf("%v left", left)
		}
	})
	t.Run("fault", func(t *testing.T) {
		refuseUpgrade(t, UpgradeOptions{In: in, Config: config, fault: func(off int64) error { return errors.New("disk on fire") }}, "disk on fire")
	})
	t.Run("no folder for the report", func(t *testing.T) {
		refuseUpgrade(t, UpgradeOptions{In: in, Config: config, Report: filepath.Join(t.TempDir(), "no", "r")}, "report")
	})
}

// TestOracle: the check in binary64 sees every kind of mistake in a bank.
func TestOracle(t *testing.T) {
	const n, k = 128, 64
	src := make([]byte, 2*n*k)
	for i := range n * k {
		binary.LittleEndian.PutUint16(src[2*i:], num.ToBF16(float32(math.Sin(float64(i)))))
	}
	codes, scales := make([]byte, n*k/2), make([]byte, n*k/16)
	d, err := num.EncodeNVFP4(num.ProfileA, n, k, src, codes, scales)
	if err != nil {
		t.Fatal(err)
	}
	run := func(codes, scales []byte, d float32) OracleReport {
		o := oracle{exact: true}
		o.check(n, k, src, codes, scales, d)
		return o.report()
	}
	if r := run(codes, scales, d); !r.Passed || r.MaxScaleError > 0.5000001 {
		t.Fatalf("the encoder's own: %+v", r)
	}
	changed := func(b []byte, at int, x byte) []byte {
		b = bytes.Clone(b)
		b[at] ^= x
		return b
	}
	for name, r := range map[string]OracleReport{
		"divisor":        run(codes, scales, math.Nextafter32(d, 0)),
		"sign":           run(changed(codes, 100, 8), scales, d),
		"code":           run(changed(codes, 100, 1), scales, d),
		"scale":          run(codes, changed(scales, 33, 2), d),
		"negative scale": run(codes, changed(scales, 33, 0x80), d),
	} {
		if r.Passed {
			t.Errorf("a wrong %s passed: %+v", name, r)
		}
	}
	// An expert of zeros has divisor 1.
	src, codes, scales = make([]byte, 2*n*k), make([]byte, n*k/2), make([]byte, n*k/16)
	if r := run(codes, scales, 1); !r.Passed {
		t.Errorf("zeros: %+v", r)
	}
	if r := run(codes, scales, 2); r.Passed {
		t.Error("zeros with divisor 2 passed")
	}
}
