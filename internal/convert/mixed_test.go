package convert

import (
	"bytes"
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/convert/converttest"
	"ninfer/internal/hf"
)

// mixedNames turns object ids of dialect E into the checkpoint's tensor names.
var mixedNames = strings.NewReplacer(
	"text/token_embedding", "model.language_model.embed_tokens.weight", "text/output_head", "lm_head.weight",
	"text/hyper_connection/", "model.language_model.hyper_connection_mixer.", "mtp/hyper_connection/", "mtp.hyper_connection_mixer.",
	"text/layers/", "model.language_model.layers.", "mtp/layer/", "mtp.layers.0.",
	"mtp/embedding_projection", "mtp.fc_embedding.weight", "mtp/hidden_projection", "mtp.fc_hidden.weight",
	"mtp/embedding_norm", "mtp.pre_fc_norm_embedding.weight", "mtp/hidden_norm", "mtp.pre_fc_norm_hidden.weight",
	"attention/hyper_connection/", "attn_hyper_connection.", "mlp/hyper_connection/", "mlp_hyper_connection.",
	"block_inject", "block_inject_weight.weight", "input_mix/down", "input_mix_weight_down.weight", "input_mix/up", "input_mix_weight_up.weight",
	"attention/output", "self_attn.o_proj.weight", "attention/query_norm", "self_attn.q_norm.weight", "attention/key_norm", "self_attn.k_norm.weight",
	"attention/indexer/query_key", "self_attn.indexer.index_qk_proj.weight", "attention/indexer/query_norm", "self_attn.indexer.q_layernorm.weight",
	"attention/indexer/key_norm", "self_attn.indexer.k_layernorm.weight",
	"gdn/a_log", "linear_attn.A_log", "gdn/dt_bias", "linear_attn.dt_bias", "gdn/convolution", "linear_attn.conv1d.weight",
	"gdn/norm", "linear_attn.norm.weight", "gdn/output", "linear_attn.out_proj.weight",
	"mlp/router", "mlp.gate.weight", "mlp/shared_expert_gate", "mlp.shared_expert_gate.weight",
	"mlp/shared_expert/gate", "mlp.shared_expert.gate_proj.weight", "mlp/shared_expert/up", "mlp.shared_expert.up_proj.weight",
	"mlp/shared_expert/down", "mlp.shared_expert.down_proj.weight",
	"ple/convolution", "ple.conv1d.weight", "ple/key_projection", "ple.key_proj.weight", "ple/value_projection", "ple.value_proj.weight",
	"ple/conv_norm", "ple.norm_conv.weight", "ple/key_norm", "ple.norm_key.weight", "ple/query_norm", "ple.norm_query.weight",
	"ple/embedding/layer_multipliers", "ple.ple_embedding.layer_multipliers", "ple/embedding/ngram_head_offsets", "ple.ple_embedding.ngram_heads_offsets",
	"ple/embedding/ngram_head_vocab_sizes", "ple.ple_embedding.ngram_heads_vocab_sizes",
	"/", ".", "norm", "hc_norm.weight", // what is left: layer numbers, and the norm of a hyper-connection
)

// checkMixed compares every object of dialect E with what the checkpoint and the table's folder hold.
func checkMixed(t *testing.T, o Options, f *artifact.File) {
	t.Helper()
	src, err := hf.Open(o.Model)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	used := map[string]bool{}
	get := func(name string) hf.Tensor {
		t.Helper()
		x, err := src.Tensor(name)
		if err != nil {
			t.Fatal(err)
		}
		used[name] = true
		return x
	}
	join := func(names ...string) []byte {
		var out []byte
		for _, n := range names {
			out = append(out, get(n).Data...)
		}
		return out
	}
	formats := map[string]int{}
	for _, b := range f.Directory().Objects {
		if b.Resource {
			data, err := f.Resource(b.ID)
			if err != nil || !bytes.Equal(data, read(t, filepath.Join(o.Model, strings.TrimPrefix(b.ID, "frontend/")))) {
				t.Errorf("%s differs from its file: %v", b.ID, err)
			}
			continue
		}
		formats[b.Format]++
		x, err := f.Tensor(b.ID)
		if err != nil {
			t.Fatal(err)
		}
		if err := x.Validate(); err != nil {
			t.Errorf("%s: %v", b.ID, err)
		}
		p := mixedNames.Replace(b.ID)
		var parts []string
		switch cut := func(s string) string { return strings.TrimSuffix(b.ID, s) }; {
		case strings.HasSuffix(b.ID, "query_gate_key_value"):
			p = mixedNames.Replace(cut("attention/query_gate_key_value")) + "self_attn."
			parts = []string{p + "q_proj.weight", p + "k_proj.weight", p + "v_proj.weight"}
		case strings.HasSuffix(b.ID, "query_key_value_z"):
			p = mixedNames.Replace(cut("gdn/query_key_value_z")) + "linear_attn."
			parts = []string{p + "in_proj_qkv.weight", p + "in_proj_z.weight"}
		case strings.HasSuffix(b.ID, "a_b_projection"):
			p = mixedNames.Replace(cut("gdn/a_b_projection")) + "linear_attn."
			parts = []string{p + "in_proj_a.weight", p + "in_proj_b.weight"}
		case strings.HasPrefix(b.ID, "vision/"):
			parts = []string{visionSource(b.ID)}
		default:
			parts = []string{p}
		}
		switch {
		case strings.Contains(b.ID, "/shards/"):
			i := b.ID[strings.LastIndex(b.ID, "/")+1:]
			file := converttest.File(t, filepath.Join(o.PLE, "shard_"+i+".safetensors"))
			codes, scales := file["weight_i4"].Data, file["weight_scale"].Data
			at := (len(codes) + 255) / 256 * 256
			if !bytes.Equal(x.Data[:len(codes)], codes) || !bytes.Equal(x.Data[at:], scales) {
				t.Errorf("%s is not its shard", b.ID)
			}
		case strings.HasPrefix(b.ID, "mtp/") && b.Format == "nvfp4":
			bank := "gate_up_proj"
			if strings.HasSuffix(b.ID, "down") {
				bank = "down_proj"
			}
			checkEncodedBank(t, b, x, get("mtp.layers.0.mlp.experts."+bank), true)
		case b.Format == "nvfp4":
			checkPackedBank(t, b, x.DecodeRow, get)
		case b.Format == "fp8_e4m3fn_row_fp32":
			codes := join(parts...)
			for i := range parts {
				parts[i] += "_scale"
			}
			scales, at := join(parts...), (len(codes)+255)/256*256
			if !bytes.Equal(x.Data[:len(codes)], codes) || !bytes.Equal(x.Data[at:], scales) {
				t.Errorf("%s is not %q", b.ID, parts)
			}
		case strings.HasSuffix(b.ID, "convolution"):
			s := get(parts[0])
			c, taps := s.Shape[0], s.Shape[2]
			for i := range c {
				for j := range taps {
					if !bytes.Equal(x.Data[2*(j*c+i):][:2], s.Data[2*(i*taps+j):][:2]) {
						t.Fatalf("%s tap %d of channel %d differs", b.ID, j, i)
					}
				}
			}
		default:
			if !bytes.Equal(x.Data, join(parts...)) {
				t.Errorf("%s is not %q", b.ID, parts)
			}
		}
	}
	if formats["int64"] != 3 || formats["u4z8_g16_fp16"] != 4 || formats["nvfp4"] != 10 || formats["fp8_e4m3fn_row_fp32"] != 8 {
		t.Errorf("formats %v", formats)
	}
	for _, name := range src.Names() {
		if !used[name] && !strings.HasSuffix(name, "input_global_scale") {
			t.Errorf("%s went nowhere", name)
		}
	}
}

func visionSource(id string) string {
	switch id {
	case "vision/patch_embedding":
		return "model.visual.patch_embed.proj.weight"
	case "vision/patch_embedding_bias":
		return "model.visual.patch_embed.proj.bias"
	case "vision/position_embedding":
		return "model.visual.pos_embed.weight"
	}
	name := strings.NewReplacer("vision/layers/", "model.visual.blocks.", "vision/merger/norm/", "model.visual.merger.norm.",
		"vision/merger/", "model.visual.merger.linear_", "/attention/qkv", ".attn.qkv", "/attention/output", ".attn.proj",
		"/mlp/", ".mlp.linear_", "/norm1/", ".norm1.", "/norm2/", ".norm2.").Replace(id)
	if bias, ok := strings.CutSuffix(name, "_bias"); ok {
		return bias + ".bias"
	}
	if strings.Contains(name, "norm") {
		return name
	}
	return name + ".weight"
}

// checkPackedBank: every value is e2m1 * scale / divisor.
func checkPackedBank(t *testing.T, b artifact.Object, decode func([]float64, int), get func(string) hf.Tensor) {
	t.Helper()
	at, k := 0, b.Shape[2]
	row := make([]float64, k)
	layer := strings.Split(b.ID, "/")[2]
	for e := range b.Shape[0] {
		for _, p := range projections(b.ID) {
			name := "model.language_model.layers." + layer + ".mlp.experts." + strconv.Itoa(e) + "." + p + "_proj."
			codes, scales, d := get(name+"weight_packed"), get(name+"weight_scale"), f32(get(name+"weight_global_scale").Data, 0)
			for r := range codes.Shape[0] {
				decode(row, at)
				at++
				for c, got := range row {
					code := codes.Data[(r*k+c)/2] >> (c % 2 * 4)
					if want := e2m1(code&15) * e4m3(scales.Data[r*k/16+c/16]) / d; got != want {
						t.Fatalf("%s expert %d %s[%d,%d] = %v, source %v", b.ID, e, p, r, c, got, want)
					}
				}
			}
		}
	}
}

// TestMixedRefusals is S20: each case changes one thing of checkpoint or table.
func TestMixedRefusals(t *testing.T) {
	t.Parallel()
	model, ple := converttest.Mixed(t, micro)
	gate, up := layer0+"mlp.experts.3.gate_proj.", layer0+"mlp.experts.3.up_proj."
	scales := layer0 + "linear_attn.in_proj_z.weight_scale"
	set := func(name string, at int, data []byte) func(map[string]converttest.Raw) {
		return func(m map[string]converttest.Raw) {
			x, ok := m[name]
			if !ok {
				t.Fatalf("no tensor %s", name)
			}
			x.Data = slices.Clone(x.Data)
			copy(x.Data[at:], data)
			m[name] = x
		}
	}
	all := converttest.Tensors(t, model)
	for _, tt := range []struct {
		name  string
		edit  func(map[string]converttest.Raw)
		parts []string
	}{
		{"input scale", set(gate+"input_global_scale", 0, scalar(2)), []string{gate + "input_global_scale", "2", "1"}},
		{"divisors differ", set(up+"weight_global_scale", 0, scalar(2)), []string{up + "weight_global_scale", gate + "weight_global_scale", "differs"}},
		{"zero divisor", set(layer0+"mlp.experts.0.down_proj.weight_global_scale", 0, scalar(0)), []string{"down_proj.weight_global_scale", "divisor 0"}},
		{"infinite divisor", set(layer0+"mlp.experts.0.down_proj.weight_global_scale", 0, scalar(math.Inf(1))), []string{"down_proj.weight_global_scale", "Inf"}},
		{"block scale", set(up+"weight_scale", 9, []byte{0x80}), []string{up + "weight_scale", "0x80", "row 1 group 1"}},
		{"zero multiplier", set(scales, 8, scalar(0)), []string{scales, "multiplier 0 of row 2"}},
		{"negative multiplier", set(scales, 0, scalar(-1)), []string{scales, "multiplier -1 of row 0"}},
		{"nan multiplier", set(scales, 4, scalar(math.NaN())), []string{scales, "NaN"}},
		{"infinite multiplier", set(scales, 4, scalar(math.Inf(1))), []string{scales, "Inf"}},
		{"fp8 nan", set(layer0+"linear_attn.in_proj_z.weight", 128*3+5, []byte{0xff}), []string{"in_proj_z.weight", "0xff of row 3 column 5"}},
		{"no multipliers", func(m map[string]converttest.Raw) { delete(m, scales) }, []string{scales + `" is missing`}},
		{"no constants", func(m map[string]converttest.Raw) {
			delete(m, "model.language_model.layers.1.ple.ple_embedding.ngram_heads_offsets")
		}, []string{`ngram_heads_offsets" is missing`}},
		{"other constants", set("model.language_model.layers.1.ple.ple_embedding.ngram_heads_offsets", 8, []byte{1}), []string{"ngram_heads_offsets"}},
		{"bf16 projection", func(m map[string]converttest.Raw) {
			x := m[layer0+"linear_attn.in_proj_z.weight"]
			m[layer0+"linear_attn.in_proj_z.weight"] = converttest.Raw{DType: "BF16", Shape: x.Shape, Data: append(x.Data, x.Data...)}
		}, []string{"in_proj_z.weight", "BF16", "F8_E4M3"}},
		{"extra", func(m map[string]converttest.Raw) {
			m["lm_head.weight_scale"] = converttest.Raw{DType: "F32", Shape: []int{1}, Data: scalar(1)}
		}, []string{`"lm_head.weight_scale" is not expected`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := converttest.Clone(t, model)
			m := map[string]converttest.Raw{}
			for k, v := range all {
				m[k] = v
			}
			tt.edit(m)
			converttest.Save(t, dir, m)
			refuse(t, Options{Profile: "mixed", Model: dir, PLE: ple, Out: filepath.Join(t.TempDir(), mixedOutput)}, Source, tt.parts...)
		})
	}
	meta := func(old, new string) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			path := filepath.Join(dir, "META.json")
			text := string(read(t, path))
			if !strings.Contains(text, old) {
				t.Fatalf("no %s in %s", old, text)
			}
			if err := os.WriteFile(path, []byte(strings.Replace(text, old, new, 1)), 0o666); err != nil {
				t.Fatal(err)
			}
		}
	}
	shard := func(edit func(m map[string]converttest.Raw)) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			path := filepath.Join(dir, "shard_2.safetensors")
			m := converttest.File(t, path)
			edit(m)
			converttest.SaveFile(t, path, m)
		}
	}
	word := func(group int, w uint16) func(t *testing.T, dir string) {
		return shard(func(m map[string]converttest.Raw) { binary.LittleEndian.PutUint16(m["weight_scale"].Data[2*group:], w) })
	}
	for _, tt := range []struct {
		name  string
		edit  func(t *testing.T, dir string)
		parts []string
	}{
		{"layout", meta("lownibblefirst", "highnibblefirst"), []string{"META.json", "layout"}},
		{"shards", meta(`"shards": 4`, `"shards": 8`), []string{"META.json", "shards is 8, need 4"}},
		{"rows", meta(`"rows": 9088`, `"rows": 9000`), []string{"META.json", "rows is 9000, need 9088"}},
		{"width", meta(`"width": 16`, `"width": 32`), []string{"META.json", "width is 32, need 16"}},
		{"not json", meta(`{`, `[`), []string{"META.json"}},
		{"negative scale", word(7, 0x8001), []string{"shard_2.safetensors", "0x8001", "row 7"}},
		{"infinite scale", word(0, 0x7c00), []string{"shard_2.safetensors", "0x7c00"}},
		{"codes under scale zero", word(1, 0), []string{"shard_2.safetensors", "row 1", "scale is zero"}},
		{"extra tensor", shard(func(m map[string]converttest.Raw) {
			m["more"] = converttest.Raw{DType: "U8", Shape: []int{1}, Data: []byte{0}}
		}), []string{"shard_2.safetensors", "3 tensors"}},
		{"other shape", shard(func(m map[string]converttest.Raw) {
			x := m["weight_i4"]
			x.Shape = []int{x.Shape[0] / 2, x.Shape[1] * 2}
			m["weight_i4"] = x
		}), []string{"weight_i4", "shape"}},
		{"other dtype", shard(func(m map[string]converttest.Raw) {
			x := m["weight_scale"]
			x.DType = "BF16"
			m["weight_scale"] = x
		}), []string{"weight_scale", "BF16", "F16"}},
		{"missing shard", func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, "shard_3.safetensors")); err != nil {
				t.Fatal(err)
			}
		}, []string{"shard_3.safetensors"}},
		{"short shard", func(t *testing.T, dir string) {
			if err := truncate(filepath.Join(dir, "shard_0.safetensors"), 1); err != nil {
				t.Fatal(err)
			}
		}, []string{"shard_0.safetensors", "not inside"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := converttest.Clone(t, ple)
			tt.edit(t, dir)
			refuse(t, Options{Profile: "mixed", Model: model, PLE: dir, Out: filepath.Join(t.TempDir(), mixedOutput)}, Source, tt.parts...)
		})
	}
	refuse(t, Options{Profile: "mixed", Model: model, PLE: t.TempDir(), Out: filepath.Join(t.TempDir(), mixedOutput)}, IO, "META.json")
	// Each profile's checkpoint given as another profile's.
	swift := converttest.Swift(t, micro)
	refuse(t, Options{Profile: "mixed", Model: micro, PLE: ple, Out: filepath.Join(t.TempDir(), mixedOutput)}, Config, "quant_method")
	refuse(t, Options{Profile: "mixed", Model: swift, PLE: ple, Out: filepath.Join(t.TempDir(), mixedOutput)}, Config, "quant_method")
	refuse(t, Options{Profile: "radixark", Model: model}, Config, "quant_method")
	refuse(t, Options{Profile: "radixark", Model: swift}, Config, "ple_embedding_dtype")
	const swiftOutput = "swift_1_5_qwen3_8_flash_next_nvfp4.ninfer"
	refuse(t, Options{Profile: "swift", Model: model, Out: filepath.Join(t.TempDir(), swiftOutput)}, Config, "quant_method")
	refuse(t, Options{Profile: "swift", Model: micro, Out: filepath.Join(t.TempDir(), swiftOutput)}, Config, "ple_embedding_dtype")
}

// TestMixedFolders: the INT4 table may be named by the repository that has its folder, and what the index says of a BF16 table need not be
// there.
func TestMixedFolders(t *testing.T) {
	t.Parallel()
	model, ple := converttest.Mixed(t, micro)
	_, want := convert(t, Options{Profile: "mixed", Model: model, PLE: ple, Out: filepath.Join(t.TempDir(), mixedOutput)})
	repository := t.TempDir()
	if err := os.CopyFS(filepath.Join(repository, "ples_int4"), os.DirFS(ple)); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(model, "model.safetensors.index.json")
	text := string(read(t, path))
	const map0 = `"weight_map":{`
	if !strings.Contains(text, map0) {
		t.Fatalf("index begins %.60q", text)
	}
	entry := `"model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_3.weight":"carry-model-bf16-00002.safetensors",`
	if err := os.WriteFile(path, []byte(strings.Replace(text, map0, map0+entry, 1)), 0o666); err != nil {
		t.Fatal(err)
	}
	_, got := convert(t, Options{Profile: "mixed", Model: model, PLE: repository, Out: filepath.Join(t.TempDir(), mixedOutput)})
	if want.ID() != got.ID() {
		t.Error("another artifact")
	}
	// A shard that the table does not have is not expected.
	bad := strings.Replace(entry, "shard_3", "shard_4", 1)
	if err := os.WriteFile(path, []byte(strings.Replace(text, map0, map0+bad, 1)), 0o666); err != nil {
		t.Fatal(err)
	}
	refuse(t, Options{Profile: "mixed", Model: model, PLE: repository, Out: filepath.Join(t.TempDir(), mixedOutput)}, Source, "carry-model-bf16-00002.safetensors")
}

// TestPins: the official model must come from the published revisions, where the folders tell, and have the published files (S20).
func TestPins(t *testing.T) {
	t.Parallel()
	dir := converttest.Clone(t, micro)
	if err := os.WriteFile(filepath.Join(dir, "config.json"), read(t, "../arch/official.json"), 0o666); err != nil {
		t.Fatal(err)
	}
	ple := t.TempDir()
	meta := `{"layout": "group16_int4_fp16scale_lownibblefirst", "shards": 128, "rows": 320001536, "width": 160}`
	if err := os.WriteFile(filepath.Join(ple, "META.json"), []byte(meta), 0o666); err != nil {
		t.Fatal(err)
	}
	note := func(dir, file, revision string) {
		t.Helper()
		path := filepath.Join(dir, ".cache", "huggingface", "download", file+".metadata")
		if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(revision+"\netag\n1.0\n"), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	o := Options{Profile: "mixed", Model: dir, PLE: ple, Out: filepath.Join(t.TempDir(), mixedOutput)}
	const other = "7b719225242aacd3dbd3f9407468c2ee9a9d2594"
	refuse(t, o, Source, "shard_0.safetensors") // nothing tells
	note(dir, "config.json", other)
	refuse(t, o, Source, other, "a4e813ed3cfbbcc61e2929699eccb864a4dfa843")
	note(dir, "config.json", "a4e813ed3cfbbcc61e2929699eccb864a4dfa843")
	note(ple, "META.json", other)
	refuse(t, o, Source, other, "da8b39586016d8325ac619be28ad77d6296625ec")
	note(ple, "META.json", "da8b39586016d8325ac619be28ad77d6296625ec")
	refuse(t, o, Source, "shard_0.safetensors")
	for _, tt := range []struct{ dir, file, want string }{
		{filepath.Join(t.TempDir(), "snapshots", other), "config.json", other},
		{t.TempDir(), "config.json", ""},
	} {
		if got := revision(tt.dir, tt.file); got != tt.want {
			t.Errorf("%s: revision %q", tt.dir, got)
		}
	}
	repository := t.TempDir()
	note(repository, "ples_int4/META.json", other)
	if got := revision(filepath.Join(repository, "ples_int4"), "META.json"); got != other {
		t.Errorf("folder of a repository: revision %q", got)
	}

	files := func(edit func(map[string]int)) error {
		count := map[string]int{"fp8-tail-00.safetensors": 312}
		for _, n := range []string{"00001", "00010", "00011", "00012"} {
			count["carry-model-bf16-"+n+".safetensors"] = 300
		}
		for l := range arch.Official().Text.Layers {
			count["ct-experts-layer"+string(rune('0'+l/10))+string(rune('0'+l%10))+".safetensors"] = 6144
		}
		edit(count)
		return checkFileSet(count, 48)
	}
	for _, tt := range []struct {
		edit func(map[string]int)
		part string
	}{
		{func(map[string]int) {}, ""},
		{func(m map[string]int) { m["ct-experts-layer07.safetensors"]-- }, "ct-experts-layer07.safetensors: 6143"},
		{func(m map[string]int) { delete(m, "fp8-tail-00.safetensors") }, "fp8-tail-00.safetensors"},
		{func(m map[string]int) { delete(m, "ct-experts-layer47.safetensors") }, "ct-experts-layer47.safetensors"},
		{func(m map[string]int) { m["model.safetensors"] = 1 }, "model.safetensors"},
	} {
		if err := files(tt.edit); (err == nil) != (tt.part == "") || err != nil && !strings.Contains(err.Error(), tt.part) {
			t.Errorf("%v, want %q", err, tt.part)
		}
	}
}
