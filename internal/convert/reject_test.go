package convert

import (
	"context"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"ninfer/internal/artifact"
	"ninfer/internal/convert/converttest"
)

// refuse runs a conversion that must fail with the class and one line that has all the parts, and must leave in the output's
// folder exactly what was there.
func refuse(t *testing.T, o Options, class Class, parts ...string) {
	t.Helper()
	if o.Out == "" {
		o.Out = filepath.Join(t.TempDir(), output)
	}
	dir := filepath.Dir(o.Out)
	var before []string
	if info, err := os.Stat(dir); err == nil && info.IsDir() {
		before = list(t, dir)
	}
	_, err := Run(context.Background(), o)
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("error %v has no class", err)
	}
	if e.Class != class {
		t.Errorf("class %s, want %s: %v", e.Class, class, err)
	}
	if code := map[bool]int{true: 2, false: 1}[class == Usage]; e.ExitCode() != code {
		t.Errorf("exit code %d, want %d", e.ExitCode(), code)
	}
	if strings.ContainsAny(err.Error(), "\n\r") {
		t.Errorf("more than one line: %q", err)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("error %q lacks %q", err, p)
		}
	}
	if before != nil {
		if after := list(t, dir); !slices.Equal(before, after) {
			t.Errorf("left %q, there was %q", after, before)
		}
	}
}

// TestOptions is S1 to S3: refused before anything is read, so the checkpoint need not exist.
func TestOptions(t *testing.T) {
	out := func(name string) string { return filepath.Join(t.TempDir(), name) }
	for _, tt := range []struct {
		o     Options
		parts string
	}{
		{Options{Profile: "official"}, "official"},
		{Options{ProjectionFormat: "fp8"}, "fp8"},
		{Options{MTPExpertFormat: "fp8"}, "fp8"},
		{Options{PLEFormat: "fp8_e4m3fn"}, "radixark"},
		{Options{PLEFormat: "bf16"}, "radixark"},
		{Options{Profile: "swift", PLEFormat: "int4"}, "int4"},
		{Options{Out: out("model.ninfer")}, output},
		{Options{Out: out("qwen3_8_flash_next_125b_a6b_nvfp4_fp8proj.ninfer")}, output},
		{Options{Out: out(output), ProjectionFormat: "fp8_e4m3fn_row_bf16"}, "qwen3_8_flash_next_125b_a6b_nvfp4_fp8proj.ninfer"},
		{Options{MaxFileBytes: -1}, "-1"},
		{Options{Profile: "swift", Out: out(output)}, "swift_1_5_qwen3_8_flash_next_nvfp4.ninfer"},
		{
			Options{Profile: "swift", PLEFormat: "fp8_e4m3fn", ProjectionFormat: "fp8_e4m3fn_row_bf16", MTPExpertFormat: "nvfp4", Out: out("x.ninfer")},
			"swift_1_5_qwen3_8_flash_next_nvfp4_fp8ple_fp8proj_nvfp4mtp.ninfer",
		},
		{Options{Profile: "swift", PLE: "ples_int4", Out: out("swift_1_5_qwen3_8_flash_next_nvfp4.ninfer")}, "mixed"},
		{Options{PLE: "ples_int4"}, "mixed"},
		{Options{Profile: "mixed", Out: out(mixedOutput)}, "--ple"},
		{Options{Profile: "mixed", PLE: "/does/not/exist", Out: out(output)}, mixedOutput},
		{Options{Profile: "mixed", PLE: "/does/not/exist", Out: out("qwen3_8_flash_next_mixed.v3.ninfer")}, mixedOutput},
		{Options{Profile: "mixed", PLE: "/does/not/exist", Out: out(mixedOutput), PLEFormat: "fp8_e4m3fn"}, "fp8_e4m3fn"},
		{Options{Profile: "mixed", PLE: "/does/not/exist", Out: out(mixedOutput), ProjectionFormat: "fp8_e4m3fn_row_bf16"}, "projection"},
		{Options{Profile: "mixed", PLE: "/does/not/exist", Out: out(mixedOutput), MTPExpertFormat: "nvfp4"}, "mtp expert"},
		{Options{Profile: "mixed", PLE: "/does/not/exist", Out: out(mixedOutput), DraftRanking: "counts"}, "draft ranking"},
	} {
		tt.o.Model = "/does/not/exist"
		refuse(t, tt.o, Usage, tt.parts)
	}
	refuse(t, Options{}, Usage, "checkpoint folder")
	if _, err := Run(context.Background(), Options{Model: micro}); err == nil || !strings.Contains(err.Error(), "output file") {
		t.Errorf("no output: %v", err)
	}
	for _, limit := range []int64{1, 4096, 8192} {
		refuse(t, Options{Model: micro, MaxFileBytes: limit}, Usage, fmt.Sprint(limit))
	}
}

// TestOutput is S17, and folders that cannot be used: before the checkpoint is read.
func TestOutput(t *testing.T) {
	for _, name := range []string{output, output + ".part-0001", output + ".part-0007"} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, name), []byte("mine"), 0o666); err != nil {
			t.Fatal(err)
		}
		refuse(t, Options{Model: "/does/not/exist", Out: filepath.Join(dir, output)}, Exists, name)
		if string(read(t, filepath.Join(dir, name))) != "mine" {
			t.Errorf("%s was changed", name)
		}
	}
	dir := t.TempDir()
	convert(t, Options{Model: micro, Out: filepath.Join(dir, output)})
	before := read(t, filepath.Join(dir, output))
	refuse(t, Options{Model: micro, Out: filepath.Join(dir, output)}, Exists, output)
	if digest(read(t, filepath.Join(dir, output))) != digest(before) {
		t.Error("the existing artifact was changed")
	}

	// What a killed conversion left of its report goes with the next one, even if that is refused.
	if err := os.WriteFile(reportTemp(artifact.ReportPath(filepath.Join(dir, output))), []byte("{"), 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(context.Background(), Options{Model: micro, Out: filepath.Join(dir, output)}); err == nil {
		t.Error("converted over an existing artifact")
	}
	if left := list(t, dir); !slices.Equal(left, []string{output, artifact.ReportPath(output)}) {
		t.Errorf("left %q", left)
	}

	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	refuse(t, Options{Model: micro, Out: filepath.Join(file, output)}, IO, file)
	refuse(t, Options{Model: micro, Out: filepath.Join(file, "below", output)}, IO, file)
	refuse(t, Options{Model: micro, Out: filepath.Join(filepath.Dir(file), "missing", output)}, IO, "missing")
	taken := t.TempDir()
	if err := os.Mkdir(filepath.Join(taken, output+".conversion.json"), 0o777); err != nil {
		t.Fatal(err)
	}
	refuse(t, Options{Model: micro, Out: filepath.Join(taken, output)}, IO, output+".conversion.json")

	// Unreadable model folders.
	refuse(t, Options{Model: filepath.Join(file, "model")}, IO, file)
	refuse(t, Options{Model: file}, IO, file)
	refuse(t, Options{Model: filepath.Join(taken, "missing")}, IO, "config.json")
	refuse(t, Options{Model: taken}, IO, "config.json")
}

// TestReport: a report that cannot be written takes nothing from the artifact, and the message says so.
func TestReport(t *testing.T) {
	dir := t.TempDir()
	o := Options{Model: micro, Out: filepath.Join(dir, output)}
	o.Progress = func(Step) { os.Mkdir(artifact.ReportPath(o.Out), 0o777) }
	_, err := Run(context.Background(), o)
	var e *Error
	if !errors.As(err, &e) || e.Class != IO || !strings.Contains(err.Error(), "the artifact is complete, but its report is not") {
		t.Errorf("%v", err)
	}
	if left := list(t, dir); !slices.Equal(left, []string{output, artifact.ReportPath(output)}) {
		t.Errorf("left %q", left)
	}
	f, err := artifact.Open(o.Out)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
}

// TestLocked: two conversions to one place do not disturb each other.
func TestLocked(t *testing.T) {
	dir := t.TempDir()
	o := Options{Model: micro, Out: filepath.Join(dir, output)}
	first := o
	first.Progress = func(s Step) {
		if s.Index == 10 {
			refuse(t, o, Exists, "another process")
		}
	}
	convert(t, first)
	if left := list(t, dir); !slices.Equal(left, []string{output, artifact.ReportPath(output)}) {
		t.Errorf("left %q", left)
	}
}

// editJSON changes a JSON file: the text of the member at path is replaced, or the member removed where value is "".
func editJSON(t *testing.T, file, value string, path ...string) {
	t.Helper()
	var edit func(v jsontext.Value, path []string) jsontext.Value
	edit = func(v jsontext.Value, path []string) jsontext.Value {
		if len(path) == 0 {
			return jsontext.Value(value)
		}
		var m map[string]jsontext.Value
		if err := json.Unmarshal(v, &m); err != nil {
			t.Fatal(err)
		}
		if value == "" && len(path) == 1 {
			delete(m, path[0])
		} else {
			m[path[0]] = edit(m[path[0]], path[1:])
		}
		out, err := json.Marshal(m, json.Deterministic(true))
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	if err := os.WriteFile(file, edit(read(t, file), path), 0o666); err != nil {
		t.Fatal(err)
	}
}

// TestConfig is S4 and S5, each member that docs/format.md 5.3 lists. Sizes may be any that fit each other; what does not fit the
// other members is refused as config, what does not fit the weights as source.
func TestConfig(t *testing.T) {
	text, vision := "text_config", "vision_config"
	for _, tt := range []struct {
		path  []string
		value string
		class Class
		part  string
	}{
		{[]string{"architectures"}, `["Qwen3ForCausalLM"]`, Config, "architectures"},
		{[]string{"model_type"}, `"qwen3"`, Config, "model_type"},
		{[]string{"tie_word_embeddings"}, `true`, Config, "tie_word_embeddings"},
		{[]string{text}, `[]`, Config, "text_config"},
		{[]string{text}, ``, Config, "text_config"},
		{[]string{vision}, `1`, Config, "vision_config"},
		{[]string{"quantization_config"}, ``, Config, "quantization_config"},
		{[]string{"quantization_config"}, `"modelopt"`, Config, "quantization_config"},
		{[]string{"quantization_config", "quant_method"}, `"fp8"`, Config, "quant_method"},
		{[]string{"quantization_config", "quant_algo"}, `"MIXED_PRECISION"`, Config, "quant_algo"},
		{[]string{text, "ple_embedding_dtype"}, `"bfloat16"`, Config, "ple_embedding_dtype"},
		{[]string{text, "ple_embedding_dtype"}, ``, Config, "ple_embedding_dtype"},
		{[]string{text, "tie_word_embeddings"}, `true`, Config, "tie_word_embeddings"},
		{[]string{text, "mtp_num_hidden_layers"}, `2`, Config, "mtp_num_hidden_layers"},
		{[]string{text, "full_attention_interval"}, `2`, Config, "full_attention_interval"},
		{[]string{text, "num_hidden_layers"}, `5`, Config, "layer_types"},
		{[]string{text, "num_key_value_heads"}, `3`, Config, "num_key_value_heads"},
		{[]string{text, "num_experts_per_tok"}, `9`, Config, "num_experts_per_tok"},
		{[]string{text, "max_position_embeddings"}, `0`, Config, "max_position_embeddings"},
		{[]string{text, "hidden_size"}, `256`, Config, "out_hidden_size"},
		{[]string{text, "hidden_size"}, `"128"`, Config, "hidden_size"},
		{[]string{text, "moe_intermediate_size"}, `96`, Config, "moe_intermediate_size"},
		{[]string{text, "ngram_size"}, `1`, Config, "ngram_size"},
		{[]string{text, "split_ngram_parts"}, `7`, Config, "split_ngram_parts"},
		{[]string{vision, "out_hidden_size"}, `256`, Config, "out_hidden_size"},
		{[]string{vision, "num_heads"}, `5`, Config, "num_heads"},
		{[]string{text, "num_attention_heads"}, `3`, Source, "o_proj.weight"},
		{[]string{text, "head_dim"}, `128`, Config, "mrope_section"},
		{[]string{text, "hc_count"}, `2`, Source, "hyper_connection"},
		{[]string{text, "hc_lowrank"}, `16`, Source, "input_mix_weight"},
		{[]string{text, "num_experts"}, `7`, Source, "experts.7."},
		{[]string{text, "moe_intermediate_size"}, `64`, Source, "_proj"},
		{[]string{text, "shared_expert_intermediate_size"}, `64`, Source, "shared_expert"},
		{[]string{text, "heads_per_ngram"}, `4`, Source, "ngram"},
		{[]string{text, "split_ngram_parts"}, `2`, Source, "shard_2"},
		{[]string{text, "seed"}, `99`, Source, "layer_multipliers"},
		{[]string{text, "vocab_size"}, `576`, Source, "layer_multipliers"},
		{[]string{text, "vocab_size"}, `479`, Source, "480 ids"},
		{[]string{vision, "depth"}, `2`, Source, "blocks.1."},
		{[]string{vision, "hidden_size"}, `144`, Source, "model.visual."},
		{[]string{vision, "intermediate_size"}, `256`, Source, "linear_fc1"},
	} {
		dir := converttest.Clone(t, micro)
		editJSON(t, filepath.Join(dir, "config.json"), tt.value, tt.path...)
		t.Run(strings.Join(tt.path, ".")+"="+tt.value, func(t *testing.T) { refuse(t, Options{Model: dir}, tt.class, tt.part) })
	}
	for _, bad := range []string{``, `{`, `[]`, "{\"model_type\":\"a\",\"model_type\":\"a\"}", "\xff"} {
		dir := converttest.Clone(t, micro)
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(bad), 0o666); err != nil {
			t.Fatal(err)
		}
		refuse(t, Options{Model: dir}, Config, "config.json")
	}
}

// TestResources is S6.
func TestResources(t *testing.T) {
	for _, name := range []string{
		"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "preprocessor_config.json",
		"video_preprocessor_config.json",
	} {
		dir := converttest.Clone(t, micro)
		path := filepath.Join(dir, name)
		if err := os.Truncate(path, 0); err != nil {
			t.Fatal(err)
		}
		refuse(t, Options{Model: dir}, Source, name, "empty")
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		refuse(t, Options{Model: dir}, IO, name)
	}
	dir := converttest.Clone(t, micro)
	if err := os.WriteFile(filepath.Join(dir, "tokenizer.json"), []byte("{}"), 0o666); err != nil {
		t.Fatal(err)
	}
	refuse(t, Options{Model: dir}, Source, "tokenizer")

	// The official config with a tokenizer that is too small for its proposal head.
	dir = converttest.Clone(t, micro)
	config := filepath.Join(dir, "config.json")
	if err := os.WriteFile(config, read(t, "../arch/official.json"), 0o666); err != nil {
		t.Fatal(err)
	}
	editJSON(t, config, `{"quant_method": "modelopt", "quant_algo": "NVFP4"}`, "quantization_config")
	editJSON(t, config, `"float8_e4m3fn"`, "text_config", "ple_embedding_dtype")
	refuse(t, Options{Model: dir}, Source, "480 ids", "too few")
}

const layer0 = "model.language_model.layers.0."

func scalar(x float64) []byte { return converttest.F32(float32(x)) }

// TestTensors is S7 to S9, S11 to S15: each case changes one thing of the checkpoint.
func TestTensors(t *testing.T) {
	t.Parallel()
	golden := converttest.Tensors(t, micro)
	gate, up := layer0+"mlp.experts.3.gate_proj.", layer0+"mlp.experts.3.up_proj."
	patch := func(name string, f func(*converttest.Raw)) func(map[string]converttest.Raw) {
		return func(m map[string]converttest.Raw) {
			x, ok := m[name]
			if !ok {
				t.Fatalf("no tensor %s", name)
			}
			x.Data, x.Shape = slices.Clone(x.Data), slices.Clone(x.Shape)
			f(&x)
			m[name] = x
		}
	}
	set := func(name string, data []byte) func(map[string]converttest.Raw) {
		return patch(name, func(x *converttest.Raw) { x.Data = data })
	}
	both := func(a, b func(map[string]converttest.Raw)) func(map[string]converttest.Raw) {
		return func(m map[string]converttest.Raw) { a(m); b(m) }
	}
	const nan, inf = "\xc0\x7f", "\x80\xff" // BF16 words
	word := func(name string, at int, bf16 string) func(map[string]converttest.Raw) {
		return patch(name, func(x *converttest.Raw) { copy(x.Data[2*at:], bf16) })
	}
	for _, tt := range []struct {
		name  string
		edit  func(map[string]converttest.Raw)
		class Class
		parts []string
	}{
		{"extra", func(m map[string]converttest.Raw) {
			m["lm_head.bias"] = converttest.Raw{DType: "BF16", Shape: []int{1}, Data: []byte{0, 0}}
		}, Source, []string{`"lm_head.bias" is not expected`}},
		{"two extra", func(m map[string]converttest.Raw) {
			m["zz"] = converttest.Raw{DType: "BF16", Shape: []int{1}, Data: []byte{0, 0}}
			m["aa"] = converttest.Raw{DType: "BF16", Shape: []int{1}, Data: []byte{0, 0}}
		}, Source, []string{`"aa" is not expected`, "1 more"}},
		{"missing", func(m map[string]converttest.Raw) { delete(m, gate+"weight_scale") }, Source, []string{gate + `weight_scale" is missing`}},
		{"two missing", func(m map[string]converttest.Raw) { delete(m, gate+"weight"); delete(m, up+"weight") }, Source, []string{gate + `weight" is missing`, "1 more"}},
		{"no multiplier", func(m map[string]converttest.Raw) {
			delete(m, "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.weight_scale")
		}, Source, []string{`ngram_embedding.weight_scale" is missing`}},
		{"renamed", func(m map[string]converttest.Raw) {
			m["lm_head.weights"] = m["lm_head.weight"]
			delete(m, "lm_head.weight")
		}, Source, []string{`"lm_head.weight" is missing`}},
		{"dtype", patch(layer0+"mlp.gate.weight", func(x *converttest.Raw) { x.DType = "F16" }), Source, []string{layer0 + "mlp.gate.weight", "F16", "BF16", "model-0000"}},
		{"unknown dtype", patch(layer0+"mlp.gate.weight", func(x *converttest.Raw) { x.DType = "I16" }), Source, []string{layer0 + "mlp.gate.weight", "I16"}},
		{"bf16 table", patch("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight", func(x *converttest.Raw) {
			x.DType, x.Data = "BF16", append(x.Data, x.Data...)
		}), Source, []string{"shard_0", "BF16"}},
		{"shape", patch(layer0+"mlp.gate.weight", func(x *converttest.Raw) { x.Shape[0], x.Shape[1] = x.Shape[1], x.Shape[0] }), Source, []string{layer0 + "mlp.gate.weight", "shape"}},
		{"scale of rank 1", patch(gate+"weight_scale_2", func(x *converttest.Raw) { x.Shape = []int{1} }), Source, []string{gate + "weight_scale_2", "[1]"}},
		{"gate and up weight_scale_2", set(gate+"weight_scale_2", scalar(0.25)), Source, []string{up + "weight_scale_2", gate + "weight_scale_2", "differs"}},
		{"gate and up input_scale", set(up+"input_scale", scalar(0.25)), Source, []string{up + "input_scale", gate + "input_scale", "differs"}},
		{"zero weight_scale_2", set(gate+"weight_scale_2", scalar(0)), Source, []string{gate + "weight_scale_2", "multiplier 0"}},
		{"negative input_scale", set(gate+"input_scale", scalar(-1)), Source, []string{gate + "input_scale", "-1"}},
		{"nan weight_scale_2", both(set(gate+"weight_scale_2", scalar(math.NaN())), set(up+"weight_scale_2", scalar(math.NaN()))), Source, []string{gate + "weight_scale_2", "NaN"}},
		{"infinite input_scale", set(layer0+"mlp.experts.0.down_proj.input_scale", scalar(math.Inf(1))), Source, []string{"down_proj.input_scale", "Inf"}},
		{"tiny weight_scale_2", set(layer0+"mlp.experts.0.down_proj.weight_scale_2", scalar(1e-40)), Source, []string{"down_proj.weight_scale_2", "reciprocal"}},
		{"signed block scale", patch(up+"weight_scale", func(x *converttest.Raw) { x.Data[9] = 0x80 }), Source, []string{up + "weight_scale", "0x80", "row 1 group 1"}},
		{"nan block scale", patch(layer0+"mlp.experts.7.down_proj.weight_scale", func(x *converttest.Raw) { x.Data[len(x.Data)-1] = 0x7f }), Source, []string{"experts.7.down_proj.weight_scale", "0x7f"}},
		{"nan head", word("lm_head.weight", 128*5+7, nan), Encode, []string{"lm_head.weight", "row 5 column 7", "NaN"}},
		{"infinite vision", word("model.visual.blocks.0.attn.qkv.weight", 0, inf), Encode, []string{"blocks.0.attn.qkv.weight", "Inf"}},
		{"overflow vision", word("model.visual.merger.linear_fc1.weight", 0, "\x7f\x7f"), Encode, []string{"merger.linear_fc1.weight", "row 0 column 0"}},
		{"other index constants", patch("model.language_model.layers.1.ple.ple_embedding.ngram_heads_offsets", func(x *converttest.Raw) { x.Data[8]++ }), Source, []string{"ngram_heads_offsets"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := converttest.Clone(t, micro)
			m := map[string]converttest.Raw{}
			for k, v := range golden {
				m[k] = v
			}
			tt.edit(m)
			converttest.Save(t, dir, m)
			refuse(t, Options{Model: dir}, tt.class, tt.parts...)
		})
	}

	// The int64 tensors may be absent; NaN words in what is only copied are kept.
	dir := converttest.Clone(t, micro)
	m := converttest.Tensors(t, micro)
	for name, x := range m {
		if x.DType == "I64" {
			delete(m, name)
		}
	}
	word("model.language_model.embed_tokens.weight", 3, nan)(m)
	converttest.Save(t, dir, m)
	_, f := convert(t, Options{Model: dir, Out: filepath.Join(t.TempDir(), output)})
	if x, err := f.Tensor("model.language_model.embed_tokens.weight"); err != nil || string(x.Data[6:8]) != nan {
		t.Errorf("NaN word was not kept: %v", err)
	}
}

// TestShards is S10 and the missing index of S7.
func TestShards(t *testing.T) {
	const index, first = "model.safetensors.index.json", "model-00001-of-00002.safetensors"
	for _, tt := range []struct {
		name  string
		edit  func(dir string) error
		parts []string
	}{
		{"truncated by a byte", func(dir string) error { return truncate(filepath.Join(dir, first), 1) }, []string{first, "not inside"}},
		{"truncated in the header", func(dir string) error { return os.Truncate(filepath.Join(dir, first), 1000) }, []string{first, "does not fit"}},
		{"empty shard", func(dir string) error { return os.Truncate(filepath.Join(dir, first), 0) }, []string{first, "too short"}},
		{"missing shard", func(dir string) error { return os.Remove(filepath.Join(dir, first)) }, []string{first}},
		{"missing index", func(dir string) error { return os.Remove(filepath.Join(dir, index)) }, []string{index}},
		{"broken index", func(dir string) error { return truncate(filepath.Join(dir, index), 10) }, []string{index}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := converttest.Clone(t, micro)
			if err := tt.edit(dir); err != nil {
				t.Fatal(err)
			}
			refuse(t, Options{Model: dir}, Source, tt.parts...)
		})
	}
}

func truncate(path string, by int64) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	return os.Truncate(path, info.Size()-by)
}

// TestRanking is S16.
func TestRanking(t *testing.T) {
	dir := t.TempDir()
	file := func(name string, n int) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, make([]byte, n), 0o666); err != nil {
			t.Fatal(err)
		}
		return path
	}
	refuse(t, Options{Model: micro, DraftRanking: filepath.Join(dir, "none")}, Source, "none")
	for _, n := range []int{0, 1, 512*8 - 1, 512*8 + 8, 480 * 8} {
		refuse(t, Options{Model: micro, DraftRanking: file(fmt.Sprint("size", n), n)}, Source, "size", fmt.Sprint(n), "4096")
	}
	refuse(t, Options{Model: micro, DraftRanking: dir}, Source, dir, "not a file")
}

// TestWriteError is S18 in the middle: the disk fills at each of many places.
func TestWriteError(t *testing.T) {
	writes := 0
	var mu sync.Mutex
	convert(t, Options{Model: micro, Out: filepath.Join(t.TempDir(), output), fault: func(string, int64) error {
		mu.Lock()
		defer mu.Unlock()
		writes++
		return nil
	}})
	for n := 1; n <= writes; n = max(n+1, min(2*n, writes)) {
		left := n
		refuse(t, Options{Model: micro, MaxFileBytes: 1 << 20, fault: func(string, int64) error {
			mu.Lock()
			defer mu.Unlock()
			if left--; left > 0 {
				return nil
			}
			return &os.PathError{Op: "write", Path: output, Err: syscall.ENOSPC}
		}}, IO, "no space left on device")
	}
}

// TestSourceShrinks: files of the checkpoint lose their ends while it is converted, before one object and then another.
func TestSourceShrinks(t *testing.T) {
	t.Parallel()
	for _, o := range []Options{
		{Profile: "radixark"},
		{Profile: "swift", PLEFormat: "fp8_e4m3fn", ProjectionFormat: "fp8_e4m3fn_row_bf16", MTPExpertFormat: "nvfp4"},
		{Profile: "mixed"},
	} {
		v := variant(t, o)
		model, ple := sources(t, v.Profile)
		for n := 3; n < 160; n += 31 {
			o.Model, o.workers, o.chunk = converttest.Clone(t, model), 1, 4096
			o.Out = filepath.Join(t.TempDir(), v.OutputName())
			if ple != "" {
				o.PLE = converttest.Clone(t, ple)
			}
			seen := map[string]bool{}
			o.fault = func(object string, _ int64) error {
				if seen[object] = true; len(seen) != n {
					return nil
				}
				for _, dir := range []string{o.Model, o.PLE} {
					files, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
					if err != nil {
						return err
					}
					for _, name := range files {
						if err := os.Truncate(name, 10_000); err != nil {
							return err
						}
					}
				}
				return nil
			}
			refuse(t, o, Source, "safetensors")
			if len(seen) < n {
				t.Fatalf("%s: ended at object %d, before anything was cut off", v.OutputName(), len(seen))
			}
		}
	}
}

// TestCancel: a context that ends stops the work and leaves nothing.
func TestCancel(t *testing.T) {
	for _, after := range []int{0, 1, 50} {
		ctx, cancel := context.WithCancel(context.Background())
		out := filepath.Join(t.TempDir(), output)
		if after == 0 {
			cancel()
		}
		_, err := Run(ctx, Options{Model: micro, Out: out, Progress: func(s Step) {
			if s.Index == after {
				cancel()
			}
		}})
		cancel()
		var e *Error
		if !errors.As(err, &e) || e.Class != Cancelled || !errors.Is(err, context.Canceled) {
			t.Errorf("after %d objects: %v", after, err)
		}
		if left := list(t, filepath.Dir(out)); len(left) > 0 {
			t.Errorf("after %d objects: left %q", after, left)
		}
	}
}
