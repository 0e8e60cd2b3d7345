package arch

import (
	"os"
	"strings"
	"testing"
)

// TestDescribeOfficial: docs/format.md 4.1.4's components, and the numbers of uses of 4.1.5.
func TestDescribeOfficial(t *testing.T) {
	for _, tt := range []struct {
		v                Variant
		uses             int
		name, provenance string
	}{
		{
			Variant{Profile: Radixark},
			1042, `{"name":"qwen3.8-flash-next-125b-a6b"}`,
			`{"source":"RadixArk/Qwen3.8-Flash-Next-NVFP4","recipe":"qwen3_8_flash_next_125b_a6b_nvfp4-v3-radixark"}`,
		},
		{
			Variant{Profile: Swift, FP8Proj: true, NVFP4MTP: true},
			1043, `{"name":"ukisai/Swift-1.5-Qwen3.8-Flash-Next-NVFP4"}`,
			`{"source":"ukisai/Swift-1.5-Qwen3.8-Flash-Next-NVFP4","recipe":"qwen3_8_flash_next_125b_a6b_nvfp4-v3-swift-fp8proj-nvfp4mtp"}`,
		},
	} {
		d, err := Describe(Official(), tt.v, officialInventory(t, tt.v))
		if err != nil {
			t.Fatal(err)
		}
		if len(d.Uses) != tt.uses || string(d.Metadata) != tt.name || string(d.Provenance) != tt.provenance {
			t.Errorf("%+v: %d uses, %s, %s", tt.v, len(d.Uses), d.Metadata, d.Provenance)
		}
		for i, want := range []string{
			`{"architectures":["Qwen3_8FlashNextForCausalLM"],"model_type":"qwen3_8_flash_next_text",` +
				`"hidden_size":2560,"num_hidden_layers":48,"vocab_size":248320,"num_experts":512}`,
			`{"architectures":["Qwen3_8FlashNextMTP"]}`,
			`{"model_type":"qwen3_8_flash_next_vision"}`,
		} {
			if got := string(d.Components[i].Config); got != want {
				t.Errorf("component %d: %s", i, got)
			}
		}
		if text := d.Components[0]; text.ProposalRows != 147456 || len(text.Resources) != 4 || text.Target != "" {
			t.Errorf("text component: %+v", text)
		}
		c, mixed, err := FromComponents(d.Components[0].Config, d.Components[2].Config)
		if err != nil || mixed || !c.IsOfficial() {
			t.Errorf("official components give %v", err)
		}
	}
}

func microConfig(t *testing.T) []byte {
	t.Helper()
	data, err := os.ReadFile("../../testdata/micro-radixark/checkpoint/config.json")
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestAgreement: members that say the same thing twice must agree.
func TestAgreement(t *testing.T) {
	micro := string(microConfig(t))
	for _, tt := range []struct{ old, new, message string }{
		{`"full_attention_interval": 4`, `"full_attention_interval": 2`, "full_attention_interval"},
		{`"full_attention_interval": 4,`, ``, ""},
		{`"partial_rotary_factor": 0.25,
  "attention`, `"partial_rotary_factor": 0.5, "attention`, "partial_rotary_factor"},
		{`"dtype"`, `"mtp": {"num_hidden_layers": 2}, "dtype"`, "mtp.num_hidden_layers"},
		{`"dtype"`, `"mtp": {"layer_types": ["linear_attention"]}, "dtype"`, "mtp.layer_types"},
		{`"dtype"`, `"mtp": {"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "dtype"`, ""},
	} {
		if !strings.Contains(micro, tt.old) {
			t.Fatalf("config.json lacks %s", tt.old)
		}
		_, err := ParseConfig([]byte(strings.Replace(micro, tt.old, tt.new, 1)))
		if (tt.message == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), tt.message) {
			t.Errorf("%s: %v, want %q", tt.new, err, tt.message)
		}
	}
}

// TestDescribeOther: any other config is recorded whole, in the order and spelling of its source, and comes back the same.
func TestDescribeOther(t *testing.T) {
	c, err := ParseConfig(microConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	v := Variant{Profile: Radixark}
	specs, err := Inventory(c, v, c.ProposalRows(480))
	if err != nil {
		t.Fatal(err)
	}
	d, err := Describe(c, v, specs)
	if err != nil {
		t.Fatal(err)
	}
	text := string(d.Components[0].Config)
	for _, part := range []string{
		`{"architectures":["Qwen3_8FlashNextForCausalLM"],"model_type":"qwen3_8_flash_next_text","hidden_size":128,` +
			`"num_hidden_layers":4,"vocab_size":512,"num_experts":8,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":256,`,
		`"rms_norm_eps":1e-06,`,
		`"rope_parameters":{"rope_type":"default","rope_theta":10000000,"partial_rotary_factor":0.25,"mrope_section":[11,11,10],"mrope_interleaved":true},`,
		`"ple_embedding_dtype":"float8_e4m3fn","image_token_id":4,"video_token_id":5,"vision_start_token_id":2,"vision_end_token_id":3}`,
	} {
		if !strings.Contains(text, part) {
			t.Errorf("text component lacks %s:\n%s", part, text)
		}
	}
	if strings.Contains(text, "qwen4_exp_text") {
		t.Errorf("text component keeps the checkpoint's model_type:\n%s", text)
	}
	const vision = `{"model_type":"qwen3_8_flash_next_vision","depth":1,"hidden_size":72,"intermediate_size":128,"num_heads":1,` +
		`"in_channels":3,"patch_size":16,"spatial_merge_size":2,"temporal_patch_size":2,"out_hidden_size":128,` +
		`"num_position_embeddings":2304,"hidden_act":"gelu_pytorch_tanh","deepstack_visual_indexes":[]}`
	if got := string(d.Components[2].Config); got != vision {
		t.Errorf("vision component %s", got)
	}
	if string(d.Metadata) != `{"name":"qwen4_exp"}` || string(d.Provenance) != `{"recipe":"qwen3_8_flash_next_125b_a6b_nvfp4-v3-radixark"}` {
		t.Errorf("%s %s", d.Metadata, d.Provenance)
	}
	back, _, err := FromComponents(d.Components[0].Config, d.Components[2].Config)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Inventory(back, v, d.Components[0].ProposalRows)
	if err != nil || len(again) != len(specs) {
		t.Fatalf("%d objects, %d again: %v", len(specs), len(again), err)
	}
	twice, err := Describe(back, v, again)
	if err != nil || string(twice.Components[0].Config) != text || string(twice.Components[2].Config) != vision {
		t.Errorf("described again: %v\n%s", err, twice.Components[0].Config)
	}
}

// TestIsOfficial: spelling and profile do not matter, every value that is read does.
func TestIsOfficial(t *testing.T) {
	for _, tt := range []struct {
		old, new string
		official bool
	}{
		{`"use_cache": true,`, ``, true},
		{`"rms_norm_eps": 1e-6`, `"rms_norm_eps": 0.000001`, true},
		{`"use_cache": true,`, `"ple_embedding_dtype": "float8_e4m3fn",`, true},
		{`"rope_type": "default"`, `"rope_type": null`, true},
		{`"max_position_embeddings": 262144`, `"max_position_embeddings": 131072`, false},
		{`"num_experts_per_tok": 10`, `"num_experts_per_tok": 8`, false},
		{`"rope_theta": 10000000,
      "rope_type"`, `"rope_theta": 5000000, "rope_type"`, false},
		{`"image_token_id": 248056`, `"image_token_id": 248055`, false},
		{`"depth": 27`, `"depth": 26`, false},
	} {
		text := string(officialJSON)
		if !strings.Contains(text, tt.old) {
			t.Fatalf("official.json lacks %s", tt.old)
		}
		c, err := ParseConfig([]byte(strings.Replace(text, tt.old, tt.new, 1)))
		if err != nil {
			t.Errorf("%s: %v", tt.new, err)
			continue
		}
		if c.IsOfficial() != tt.official {
			t.Errorf("%s for %s: official is %v", tt.new, tt.old, c.IsOfficial())
		}
	}
}

func TestFromComponentsRefusals(t *testing.T) {
	const head = `{"architectures":["Qwen3_8FlashNextForCausalLM"],"model_type":"qwen3_8_flash_next_text",`
	for _, tt := range []struct{ text, vision, message string }{
		{head + `"hidden_size":2048,"num_hidden_layers":48,"vocab_size":248320,"num_experts":512}`, `{}`, "hidden_size is 2048"},
		{head + `"hidden_size":2560,"num_hidden_layers":48,"vocab_size":248320,"num_experts":512,"x":1}`, `{}`, "image_token_id"},
		{`{"architectures":["Qwen3_8FlashNextForCausalLM"],"model_type":"qwen4_exp_text"}`, `{}`, "qwen4_exp_text"},
		{`{"architectures":["Qwen4ExpForCausalLM"],"model_type":"qwen4_exp_text"}`, `{}`, "lacks hidden_size"},
		{`{"architectures":["Qwen4ExpForCausalLM"],"model_type":"qwen4_exp_text"}`, ``, "vision is missing"},
		{`[]`, `{}`, "component text"},
		{head + `"hidden_size":2560,"hidden_size":2560}`, `{}`, "component text"},
		{head + `"hidden_size":2560,"image_token_id":1,"video_token_id":1,"vision_start_token_id":1,"vision_end_token_id":1}`, ``, "vision"},
		{head + `"hidden_size":2560,"image_token_id":1,"video_token_id":1,"vision_start_token_id":1,"vision_end_token_id":1}`, `{}`, "num_hidden_layers"},
	} {
		if _, _, err := FromComponents([]byte(tt.text), []byte(tt.vision)); err == nil || !strings.Contains(err.Error(), tt.message) {
			t.Errorf("%s: %v, want %q", tt.text, err, tt.message)
		}
	}
}

func TestCheckProfile(t *testing.T) {
	micro := string(microConfig(t))
	for _, tt := range []struct {
		old, new string
		v        Variant
		message  string
	}{
		{"", "", Variant{Profile: Radixark}, ""},
		{"", "", Variant{Profile: Swift}, "ple_embedding_dtype"},
		{`"float8_e4m3fn"`, `"bfloat16"`, Variant{Profile: Swift}, ""},
		{`"float8_e4m3fn"`, `null`, Variant{Profile: Swift}, ""},
		{`"float8_e4m3fn"`, `null`, Variant{Profile: Radixark}, "ple_embedding_dtype"},
		{`"modelopt"`, `"fp8"`, Variant{Profile: Radixark}, "quant_method"},
		{`"NVFP4"`, `"MIXED_PRECISION"`, Variant{Profile: Radixark}, "quant_algo"},
		{`"quantization_config"`, `"quantisation_config"`, Variant{Profile: Radixark}, "quantization_config"},
		{"", "", Variant{Profile: Mixed}, "quant_method"},
		{`"modelopt"`, `"compressed-tensors"`, Variant{Profile: Mixed}, ""},
		{`"modelopt"`, `"compressed-tensors"`, Variant{Profile: Radixark}, "quant_method"},
		{`"quantization_config"`, `"quantisation_config"`, Variant{Profile: Mixed}, ""},
	} {
		c, err := ParseConfig([]byte(strings.Replace(micro, tt.old, tt.new, 1)))
		if err != nil {
			t.Fatal(err)
		}
		err = c.CheckProfile(tt.v)
		if (tt.message == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), tt.message) {
			t.Errorf("%s %v: %v, want %q", tt.new, tt.v, err, tt.message)
		}
	}
}

// FuzzConfig: no config.json and no component config makes the parser panic, and what it accepts is described and read back alike.
func FuzzConfig(f *testing.F) {
	micro, err := os.ReadFile("../../testdata/micro-radixark/checkpoint/config.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(micro)
	f.Add(officialJSON)
	f.Add([]byte(`{"architectures":["Qwen4ExpForConditionalGeneration"],"model_type":"qwen4_exp","text_config":{"num_hidden_layers":9000000000000000},"vision_config":{}}`))
	f.Add([]byte(`{"architectures":["Qwen4ExpForConditionalGeneration"],"model_type":"qwen4_exp","text_config":{},"vision_config":{}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		_, _, other := FromComponents(data, data)
		c, err := ParseConfig(data)
		for _, err := range []error{err, other} {
			if err != nil && strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("error of more than one line: %q", err)
			}
		}
		if err != nil {
			return
		}
		for _, v := range []Variant{{Profile: Radixark}, {Profile: Mixed}} {
			d, err := Describe(c, v, nil)
			if err != nil {
				t.Fatal(err)
			}
			part := map[string][]byte{}
			for _, c := range d.Components {
				part[c.ID] = c.Config
			}
			back, mixed, err := FromComponents(part["text"], part["vision"])
			if err != nil {
				t.Fatalf("accepted, but its description is not: %v", err)
			}
			if mixed != (v.Profile == Mixed) || back.Text.HiddenSize != c.Text.HiddenSize || back.Text.ResetID() != c.Text.ResetID() {
				t.Errorf("read back as another config")
			}
			if !mixed && back.IsOfficial() != c.IsOfficial() {
				t.Errorf("official is %v, read back %v", c.IsOfficial(), back.IsOfficial())
			}
		}
	})
}
