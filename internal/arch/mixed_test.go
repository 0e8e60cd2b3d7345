package arch

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/num"
)

// mixedInventories are the two containers of dialect E: digests, counts, sizes and offsets of docs/format.md 4.1.5, 4.2 and 1.8.3.
var mixedInventories = []struct {
	name      string
	inventory func(*Config) ([]Spec, error)
	digest    string
	formats   string // bf16, nvfp4, fp8 row fp32, u4z8, int64
	payload   int64
	offsets   map[string]int64
}{
	{
		"v2", MixedV2Inventory, "2061e4a6d22b552b3e0763dd729e78363d2824afb5e8ce02fc8af15b753288b7", "1237 96 96 128 3", 113298135808,
		map[string]int64{
			"mtp/layer/mlp/experts/down": 110619630848, "mtp/layer/attention/indexer/query_key": 112297352448,
			"vision/patch_embedding": 112400271104, "vision/merger/norm/bias": 113298133504,
		},
	},
	{
		"v3", func(c *Config) ([]Spec, error) { return Inventory(c, Variant{Profile: Mixed}, 0) },
		"f5b2f2c093979389de42b6357acf46d90ba4585cac6283e0274e98af7591f81f", "1235 98 96 128 3", 109680552704,
		map[string]int64{
			"mtp/layer/mlp/experts/down": 108207908096, "mtp/layer/attention/indexer/query_key": 108679769344,
			"vision/patch_embedding": 108782688000, "vision/merger/norm/bias": 109680550400,
		},
	},
}

func TestMixedInventory(t *testing.T) {
	same := map[string]int64{
		"text/layers/0/attention/hyper_connection/block_inject": 12837376,
		"text/layers/0/mlp/experts/gate_up":                     51713536, "text/layers/0/mlp/experts/down": 995433984,
		"text/layers/0/gdn/query_key_value_z": 1467869440, "text/layers/3/attention/query_gate_key_value": 6008912128,
		MixedShard(1, 0): 72629864704, MixedShard(1, 127): 104380043520,
		"text/token_embedding": 104630044928, "text/output_head": 105901443328, "mtp/layer/mlp/experts/gate_up": 107264187648,
	}
	for _, tt := range mixedInventories {
		t.Run(tt.name, func(t *testing.T) {
			specs, err := tt.inventory(Official())
			if err != nil {
				t.Fatal(err)
			}
			checkInventory(t, specs, tt.digest, tt.formats, tt.payload, num.BF16, num.NVFP4, num.FP8RowFP32, num.U4Z8G16, num.Int64)
			offsets, sizes, _ := place(t, specs)
			found := 0
			var table, banks, other int64
			for i, s := range specs {
				for _, at := range []map[string]int64{same, tt.offsets} {
					if want, ok := at[s.ID]; ok {
						if found++; offsets[i] != want {
							t.Errorf("%s at %d, want %d", s.ID, offsets[i], want)
						}
					}
				}
				switch {
				case s.Resource:
				case s.Format == num.U4Z8G16 || s.Format == num.Int64:
					table += sizes[i]
				case strings.HasPrefix(s.ID, "mtp/layer/mlp/experts/"):
					banks += sizes[i]
				default:
					other += sizes[i]
				}
			}
			if found != len(same)+len(tt.offsets) {
				t.Errorf("%d of %d offsets found", found, len(same)+len(tt.offsets))
			}
			want := map[string]int64{"v2": 5033164800, "v3": 1415581696}[tt.name]
			if table != 32000162072 || banks != want || other != 76251938528 {
				t.Errorf("table %d, banks %d, other %d bytes", table, banks, other)
			}
		})
	}
}

// TestMixedSources: the published converter reads 1,278 direct tensors, 312 FP8 tensors and 294,912 expert tensors.
func TestMixedSources(t *testing.T) {
	specs, err := Inventory(Official(), Variant{Profile: Mixed}, 0)
	if err != nil {
		t.Fatal(err)
	}
	direct, row, expert := 0, 0, 0
	have := map[string]string{}
	for _, s := range SourceTensors(specs) {
		have[s.Name] = fmt.Sprint(s.DType, s.Shape)
		switch {
		case strings.Contains(s.Name, ".mlp.experts.") && strings.HasPrefix(s.Name, layers):
			expert++
		case s.DType == "F8_E4M3" || s.DType == "F32":
			row++
		default:
			direct++
		}
	}
	if direct != 1278 || row != 312 || expert != 294912 {
		t.Errorf("%d direct, %d row-scaled, %d expert tensors, want 1278, 312, 294912", direct, row, expert)
	}
	for name, want := range map[string]string{
		layers + "0.mlp.experts.511.gate_proj.weight_packed":        "U8[640 1280]",
		layers + "47.mlp.experts.0.down_proj.weight_scale":          "F8_E4M3[2560 40]",
		layers + "5.mlp.experts.9.up_proj.weight_global_scale":      "F32[1]",
		layers + "5.mlp.experts.9.up_proj.input_global_scale":       "F32[1]",
		layers + "3.self_attn.q_proj.weight":                        "F8_E4M3[12288 2560]",
		layers + "3.self_attn.q_proj.weight_scale":                  "F32[12288 1]",
		layers + "2.linear_attn.out_proj.weight_scale":              "F32[2560 1]",
		layers + "2.linear_attn.A_log":                              "BF16[48]",
		layers + "1.ple.ple_embedding.ngram_heads_vocab_sizes":      "I64[16]",
		"mtp.layers.0.self_attn.q_proj.weight":                      "BF16[12288 2560]",
		"mtp.layers.0.mlp.experts.down_proj":                        "BF16[512 2560 640]",
		"model.visual.patch_embed.proj.weight":                      "BF16[1152 3 2 16 16]",
		layers + "1.ple.ple_embedding.ngram_embedding.weight_scale": "",
	} {
		if have[name] != want {
			t.Errorf("%s is %q, want %q", name, have[name], want)
		}
	}
}

// TestMixedHolds: every parameter of the dialect L loader but table, divisors and proposal is found once, whole.
func TestMixedHolds(t *testing.T) {
	c := Official()
	rows := map[string]int{}
	specs, err := Inventory(c, Variant{Profile: Mixed}, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range specs {
		n := 0
		for _, r := range s.Holds {
			if rows[r.Parameter] != 0 {
				t.Errorf("%s is held twice", r.Parameter)
			}
			rows[r.Parameter] = r.Rows
			n += r.Rows
		}
		if len(s.Holds) > 0 {
			if g, err := num.NewGeometry(s.Format, s.Layout, s.Shape); err != nil || g.Rows != n {
				t.Errorf("%s has %d rows and holds %d: %v", s.ID, g.Rows, n, err)
			}
		}
		if len(s.Holds) == 0 && !s.Resource {
			rows[s.ID] = -1
		}
	}
	for _, s := range officialInventory(t, Variant{Profile: Radixark, NVFP4MTP: true}) {
		if s.Resource || strings.HasSuffix(s.ID, DivisorsSuffix) || strings.HasPrefix(s.ID, "ninfer.") || strings.Contains(s.ID, "ngram_embedding") {
			continue
		}
		g, err := num.NewGeometry(s.Format, s.Layout, s.Shape)
		if n, ok := rows[s.ID]; err != nil || !ok || n >= 0 && n != g.Rows {
			t.Errorf("%s has %d rows in dialect L, %d in E: %v", s.ID, g.Rows, n, err)
		}
		delete(rows, s.ID)
	}
	for name := range rows {
		if !strings.Contains(name, "/ple/embedding/") {
			t.Errorf("%s is not in dialect L", name)
		}
	}
}

// TestDescribeMixed: numbers and samples of docs/format.md 4.2.2 to 4.2.4; the bytes are compared by their digests in package convert.
func TestDescribeMixed(t *testing.T) {
	v := Variant{Profile: Mixed}
	specs, err := Inventory(Official(), v, 0)
	if err != nil {
		t.Fatal(err)
	}
	d, err := Describe(Official(), v, specs)
	if err != nil {
		t.Fatal(err)
	}
	if len(d.Bindings) != 1668 || len(d.Uses) != 959 {
		t.Errorf("%d bindings, %d uses", len(d.Bindings), len(d.Uses))
	}
	for _, b := range []Binding{
		{"mtp/layers/0/attention/query_gate_key_value", "mtp/layer/attention/query_gate_key_value", 0, 0},
		{"vision/layers/26/attention/value", "vision/layers/26/attention/qkv", 2654208, 3981312},
		{"vision/layers/0/attention/key_bias", "vision/layers/0/attention/qkv_bias", 1152, 2304},
		{"vision/layers/3/norm2_bias", "vision/layers/3/norm2/bias", 0, 0},
		{"vision/merger/norm_weight", "vision/merger/norm/weight", 0, 0},
	} {
		if !slices.Contains(d.Bindings, b) {
			t.Errorf("no binding %+v", b)
		}
	}
	for _, u := range []Use{
		{"text/output_head", "mtp/final_hidden", "A16Only", ""},
		{"mtp/layers/0/mlp/experts/down", "mtp/layers/0/mlp/experts/product", "AllowA4", ""},
		{"text/layers/0/gdn/query_key_value_z", "text/layers/0/mixer_input", "AllowA8", ""},
		{"vision/layers/0/attention/query", "vision/layers/0/attention_input", "A16Only", ""},
	} {
		if !slices.Contains(d.Uses, u) {
			t.Errorf("no use %+v", u)
		}
	}
	c, mixed, err := FromComponents(d.Components[0].Config, d.Components[1].Config)
	if err != nil || !mixed || !c.IsOfficial() {
		t.Errorf("official components give %v", err)
	}
	// Without the token ids the config must be the official one to the last member.
	text, vision := string(d.Components[0].Config), string(d.Components[1].Config)
	for _, tt := range []struct{ old, new, message string }{
		{`"hidden_size":2560`, `"hidden_size":2048`, "hidden_size is 2048"},
		{`"hc_count":4,`, ``, "lacks hc_count"},
		{`"hc_count":4,`, `"hc_count":4,"seed":1,`, "seed"},
		{`9.999999974752427e-07`, `1e-6`, "rms_norm_eps"},
		{`"rope_theta":10000000.0`, `"rope_theta":1e7`, ""},
		{`"depth":27`, `"depth":28`, "depth is 28"},
	} {
		if !strings.Contains(text+vision, tt.old) {
			t.Fatalf("no %s", tt.old)
		}
		_, _, err := FromComponents([]byte(strings.Replace(text, tt.old, tt.new, 1)), []byte(strings.Replace(vision, tt.old, tt.new, 1)))
		if (tt.message == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), tt.message) {
			t.Errorf("%s: %v, want %q", tt.new, err, tt.message)
		}
	}
}

// TestDescribeMixedOther: another config's normalized members come first, then the rest of its source, then the token ids.
func TestDescribeMixedOther(t *testing.T) {
	dir := filepath.Join(os.Getenv("NINFER_GOLDEN"), "micro-mixed", "checkpoint")
	data, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		data = microConfig(t) // the same model but for what tells profiles apart
	}
	c, err := ParseConfig(data)
	if err != nil {
		t.Fatal(err)
	}
	v := Variant{Profile: Mixed}
	specs, err := Inventory(c, v, 0)
	if err != nil {
		t.Fatal(err)
	}
	d, err := Describe(c, v, specs)
	if err != nil {
		t.Fatal(err)
	}
	text := string(d.Components[0].Config)
	for _, part := range []string{
		`{"architectures":["Qwen4ExpForCausalLM"],"model_type":"qwen4_exp_text","hidden_size":128,"vocab_size":512,"num_hidden_layers":4,`,
		`"rms_norm_eps":9.999999974752427e-07,"layer_types":["linear_attention","linear_attention","linear_attention","full_attention"],` +
			`"rope_parameters":{"rope_theta":10000000.0,"partial_rotary_factor":0.25,"mrope_section":[11,11,10]},"ple_layer_ids":[2],"hidden_act":"silu",`,
		`"eos_token_id":6,`,
		`"image_token_id":4,"video_token_id":5,"vision_start_token_id":2,"vision_end_token_id":3}`,
	} {
		if !strings.Contains(text, part) {
			t.Errorf("text component lacks %s:\n%s", part, text)
		}
	}
	if string(d.Metadata) != `{"name":"qwen4_exp"}` || string(d.Provenance) != `{"recipe":"qwen3_8_flash_next_125b_a6b_nvfp4-v3-mixed"}` {
		t.Errorf("%s %s", d.Metadata, d.Provenance)
	}
	back, mixed, err := FromComponents(d.Components[0].Config, d.Components[1].Config)
	if err != nil || !mixed {
		t.Fatal(err)
	}
	again, err := Inventory(back, v, 0)
	if err != nil || len(again) != len(specs) {
		t.Fatalf("%d objects, %d again: %v", len(specs), len(again), err)
	}
	twice, err := Describe(back, v, again)
	if err != nil || len(twice.Bindings) != len(d.Bindings) || back.Text.ResetID() != 6 || back.ImageTokenID != 4 {
		t.Errorf("described again: %v", err)
	}
	if again, back := string(twice.Components[0].Config), d.Components[0].Config; again != string(back) {
		t.Errorf("described again: %s", again)
	}
}

func TestFloat(t *testing.T) {
	for x, want := range map[float64]string{1e7: "10000000.0", 0.25: "0.25", float64(float32(1e-6)): "9.999999974752427e-07", 1e16: "1e+16", 1e15: "1000000000000000.0", 1e-4: "0.0001", 1.5e-5: "1.5e-05"} {
		if got := string(float(x)); got != want {
			t.Errorf("%v is %s, Python writes %s", x, got, want)
		}
	}
}
