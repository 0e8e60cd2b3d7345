package arch

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// The constants that the published checkpoint stores as tensors (docs/format.md 5.4).
func TestNgramOfficial(t *testing.T) {
	n := Official().Text.Ngram(0)
	if want := []int64{23703573157769, 20109073645365, 8052911324071}; !slices.Equal(n.Multipliers, want) {
		t.Errorf("multipliers %v, want %v", n.Multipliers, want)
	}
	var sum int64
	for i, d := range []int64{3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171} {
		if n.Sizes[i] != 20_000_000+d || n.Offsets[i] != sum {
			t.Errorf("head %d: size %d offset %d, want %d and %d", i, n.Sizes[i], n.Offsets[i], 20_000_000+d, sum)
		}
		sum += n.Sizes[i]
	}
	if n.Rows != 320_001_536 || n.HeadWidth != 160 {
		t.Errorf("rows %d width %d, want 320001536 and 160", n.Rows, n.HeadWidth)
	}
}

func TestConfigRejects(t *testing.T) {
	src, err := os.ReadFile("../../testdata/micro-radixark/checkpoint/config.json")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ParseConfig(src); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ old, new, want string }{
		{`"model_type": "qwen4_exp",
 "tie`, `"model_type": "qwen3",
 "tie`, "model_type"},
		{`"hidden_size": 128`, `"hidden_size": 0`, "hidden_size"},
		{`"hidden_size": 128`, `"hidden_size": 1.5`, "hidden_size"},
		{`"hidden_size": 128`, `"hidden_size": 99999999999`, "hidden_size"},
		{`"num_experts_per_tok": 2`, `"num_experts_per_tok": 9`, "num_experts_per_tok"},
		{`"hc_count": 4`, `"hc_count": -4`, "hc_count"},
		{`"output_gate_type": "sigmoid"`, `"output_gate_type": "silu"`, "output_gate_type"},
		{`"text_config": {`, `"text_config": 3, "x": {`, "text_config"},
		{`"vision_config": {`, `"vision_config": [], "x": {`, "vision_config"},
		{`"quantization_config": {`, `"quantization_config": 1, "x": {`, "quantization_config"},
		{`"out_hidden_size": 128`, `"out_hidden_size": 64`, "out_hidden_size"},
		{`"mrope_interleaved": true`, `"mrope_interleaved": false`, "mrope_interleaved"},
		{`"linear_attention",`, `"mamba",`, "layer_types"},
		{`"eos_token_id": 6`, `"eos_token_id": null`, "eos_token_id"},
		{`"image_token_id": 4`, `"image_token_id": 512`, "image_token_id"},
	} {
		bad := strings.Replace(string(src), c.old, c.new, 1)
		if bad == string(src) {
			t.Fatalf("case %q does not apply", c.old)
		}
		_, err := ParseConfig([]byte(bad))
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: error %v, want one line naming %s", c.new, err, c.want)
		}
	}
}
