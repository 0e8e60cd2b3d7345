package arch

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"ninfer/internal/num"
)

// officialResources are the sizes of the six files in the official repository (docs/format.md 4).
var officialResources = map[string]int64{
	"frontend/tokenizer.json": 12809320, "frontend/tokenizer_config.json": 17928, "frontend/chat_template.jinja": 8952,
	"frontend/generation_config.json": 202, "frontend/preprocessor_config.json": 390, "frontend/video_preprocessor_config.json": 385,
}

// variants are the inventories docs/format.md 4.1 gives counts, digests and offsets for.
var variants = []struct {
	v       Variant
	digest  string
	formats string // bf16, fp8 row, fp32, nvfp4, fp8, q4, q5, q6, q8, int32
	payload int64  // docs/format.md 4.1.5
}{
	{
		Variant{Profile: Radixark},
		"7d8550065385684aa81ded1373d53e0eb6ab1188a171fbc31dabc9633195422a",
		"1249 0 168 96 1 55 54 1 2 1", 134755222272,
	},
	{
		Variant{Profile: Radixark, FP8Proj: true},
		"a2512df12533ea57c921e18a29d4b8eb6d151bb984b60bc9e165deac1f24afca",
		"739 510 168 96 1 55 54 1 2 1", 130507175168,
	},
	{
		Variant{Profile: Radixark, NVFP4MTP: true},
		"94540dc5d4de5418d9f7b713e05b4005de66a0159de112849f5e1b3ac1c4ede8",
		"1247 0 170 98 1 55 54 1 2 1", 131137643264,
	},
	{
		Variant{Profile: Radixark, FP8Proj: true, NVFP4MTP: true},
		"5fc794046ef6ddedba4370b671fb280c92e789b63139d92c050bba4aa8859b5e",
		"737 510 170 98 1 55 54 1 2 1", 126889596160,
	},
	{
		Variant{Profile: Swift, FP8PLE: true},
		"7d8550065385684aa81ded1373d53e0eb6ab1188a171fbc31dabc9633195422a",
		"1249 0 168 96 1 55 54 1 2 1", 134755222272,
	},
	{
		Variant{Profile: Swift},
		"ba22124ecc134f50c9a545197d2ecd59270ed3740f350d3510decc7a1da86bdc",
		"1249 0 168 96 0 55 54 1 2 1", 185955467776,
	},
	{
		Variant{Profile: Swift, FP8Proj: true},
		"7ffa7b0e615d2c15e40ab274e83c4062821dc92e8dfda6e5713292acd79eb00f",
		"739 510 168 96 0 55 54 1 2 1", 181707420672,
	},
	{
		Variant{Profile: Swift, NVFP4MTP: true},
		"8531563a915ca33fb25a94ecc4f1ee432ab61944aeefeab7a882b5fe422c97f1",
		"1247 0 170 98 0 55 54 1 2 1", 182337888768,
	},
	{
		Variant{Profile: Swift, FP8Proj: true, NVFP4MTP: true},
		"5d5e7117fd677732e1f4ff7760a7e8b285afa010532090ad68627b52814949d7",
		"737 510 170 98 0 55 54 1 2 1", 178089841664,
	},
}

func officialInventory(t testing.TB, v Variant) []Spec {
	t.Helper()
	c := Official()
	specs, err := Inventory(c, v, c.ProposalRows(248077))
	if err != nil {
		t.Fatal(err)
	}
	return specs
}

// place gives the offsets that docs/format.md 1.5 prescribes, and the payload length.
func place(t testing.TB, specs []Spec) (offsets, sizes []int64, end int64) {
	t.Helper()
	for _, s := range specs {
		size, ok := officialResources[s.ID]
		if !s.Resource {
			var err error
			if size, err = num.EncodedSize(s.Format, s.Layout, s.Shape); err != nil {
				t.Fatalf("%s: %v", s.ID, err)
			}
			end = (end + 255) / 256 * 256
		} else if !ok {
			t.Fatalf("unexpected resource %s", s.ID)
		}
		offsets, sizes = append(offsets, end), append(sizes, size)
		end += size
	}
	return offsets, sizes, end
}

// checkInventory compares an inventory with its digest (docs/format.md 4.1.5), the number of tensors of each format, and its payload.
func checkInventory(t *testing.T, specs []Spec, digest, formats string, payload int64, order ...num.Format) {
	t.Helper()
	offsets, sizes, end := place(t, specs)
	var text strings.Builder
	count := map[num.Format]int{}
	for i, s := range specs {
		if s.Resource {
			fmt.Fprintf(&text, "%s\tresource\traw_bytes_v1\t%d\t%d\n", s.ID, offsets[i], sizes[i])
			continue
		}
		count[s.Format]++
		var dims []string
		for _, d := range s.Shape {
			dims = append(dims, strconv.Itoa(d))
		}
		fmt.Fprintf(&text, "%s\t%s\t%s\t%s\t%d\t%d\n", s.ID, strings.Join(dims, "x"), s.Format, s.Layout, offsets[i], sizes[i])
	}
	sum := sha256.Sum256([]byte(text.String()))
	if got := hex.EncodeToString(sum[:]); got != digest {
		t.Errorf("inventory digest %s, want %s", got, digest)
	}
	var counts []string
	for _, f := range order {
		counts = append(counts, strconv.Itoa(count[f]))
	}
	if got := strings.Join(counts, " "); got != formats {
		t.Errorf("formats %s, want %s", got, formats)
	}
	if end != payload {
		t.Errorf("payload %d bytes, want %d", end, payload)
	}
}

func TestOfficialInventory(t *testing.T) {
	for _, tt := range variants {
		t.Run(tt.v.OutputName(), func(t *testing.T) {
			checkInventory(t, officialInventory(t, tt.v), tt.digest, tt.formats, tt.payload,
				num.BF16, num.FP8RowBF16, num.FP32, num.NVFP4, num.FP8, num.Q4G64, num.Q5G64, num.Q6G64, num.Q8G32, num.Int32)
		})
	}
}

// TestOfficialOffsets checks the table of selected offsets, docs/format.md 4.1.5.
func TestOfficialOffsets(t *testing.T) {
	l0, l1 := MLPPrefix(LayerPrefix(0)), PLEPrefix(LayerPrefix(1))
	mtp := MLPPrefix(MTPLayerPrefix)
	for _, tt := range []struct {
		v  Variant
		at map[string]int64
	}{
		{Variant{Profile: Radixark}, map[string]int64{
			EmbedTokens: 12837376, l0 + BankGateUp: 1439029504, l1 + PLETableScale: 3049421824, l1 + PLETable: 3049422080,
			LMHead: 127785211648, ProposalWeight: 129056610048, ProposalIDs: 129257150208, mtp + BankGateUpBF16: 129425749248, VisionPatch: 134472041728,
		}},
		{Variant{Profile: Radixark, FP8Proj: true}, map[string]int64{
			EmbedTokens: 12837376, l0 + BankGateUp: 1363747072, l1 + PLETableScale: 2909973248, l1 + PLETable: 2909973504,
			LMHead: 124259420672, ProposalWeight: 124895616512, ProposalIDs: 125096156672, mtp + BankGateUpBF16: 125184234496, VisionPatch: 130223994624,
		}},
		{Variant{Profile: Swift}, map[string]int64{
			l1 + PLETable: 3049421824, LMHead: 178985457152, ProposalWeight: 180256855552, ProposalIDs: 180457395712,
			mtp + BankGateUpBF16: 180625994752, VisionPatch: 185672287232,
		}},
		{Variant{Profile: Swift, FP8Proj: true, NVFP4MTP: true}, map[string]int64{
			l1 + PLETable: 2909973248, LMHead: 175459666176, ProposalWeight: 176095862016, ProposalIDs: 176296402176,
			mtp + BankGateUp: 176384480000, VisionPatch: 177806661120,
		}},
		{Variant{Profile: Radixark, NVFP4MTP: true}, map[string]int64{VisionPatch: 130854462720}},
	} {
		specs := officialInventory(t, tt.v)
		offsets, _, _ := place(t, specs)
		found := 0
		for i, s := range specs {
			if want, ok := tt.at[s.ID]; ok {
				found++
				if offsets[i] != want {
					t.Errorf("%+v: %s at %d, want %d", tt.v, s.ID, offsets[i], want)
				}
			}
		}
		if found != len(tt.at) {
			t.Errorf("%+v: %d of %d objects found", tt.v, found, len(tt.at))
		}
	}
}

// TestOfficialSources checks the number of tensors a checkpoint's index lists, docs/format.md 5.2.2, and one table row of each kind.
func TestOfficialSources(t *testing.T) {
	for _, tt := range []struct {
		v     Variant
		index int
	}{
		{Variant{Profile: Radixark}, 296475},
		{Variant{Profile: Swift, FP8PLE: true}, 296474},
	} {
		specs := officialInventory(t, tt.v)
		have := map[string]string{}
		for _, s := range SourceTensors(specs) {
			have[s.Name] = fmt.Sprint(s.DType, s.Shape)
		}
		for _, s := range Official().IndexTensors() {
			have[s.Name] = fmt.Sprint(s.DType, s.Shape)
		}
		if len(have) != tt.index {
			t.Errorf("%+v: %d source tensors, the index has %d", tt.v, len(have), tt.index)
		}
		table := "F8_E4M3[2500012 160]"
		if tt.v.Profile == Swift {
			table = "BF16[2500012 160]"
		}
		const l = "model.language_model.layers."
		for name, want := range map[string]string{
			l + "0.mlp.experts.511.gate_proj.weight":                   "U8[640 1280]",
			l + "47.mlp.experts.0.up_proj.weight_scale":                "F8_E4M3[640 160]",
			l + "47.mlp.experts.0.down_proj.weight":                    "U8[2560 320]",
			l + "47.mlp.experts.9.down_proj.weight_scale":              "F8_E4M3[2560 40]",
			l + "5.mlp.experts.9.down_proj.weight_scale_2":             "F32[]",
			l + "5.mlp.experts.9.up_proj.input_scale":                  "F32[]",
			l + "1.ple.ple_embedding.ngram_embedding.shard_127.weight": table,
			l + "1.ple.ple_embedding.layer_multipliers":                "I64[3]",
			l + "1.ple.ple_embedding.ngram_heads_vocab_sizes":          "I64[16]",
			l + "1.ple.conv1d.weight":                                  "BF16[10240 1 4]",
			l + "2.linear_attn.A_log":                                  "BF16[48]",
			l + "3.self_attn.q_proj.weight":                            "BF16[12288 2560]",
			l + "3.self_attn.indexer.index_qk_proj.weight":             "BF16[640 2560]",
			"mtp.layers.0.mlp.experts.down_proj":                       "BF16[512 2560 640]",
			"model.visual.patch_embed.proj.weight":                     "BF16[1152 3 2 16 16]",
			"model.visual.merger.linear_fc2.weight":                    "BF16[2560 4608]",
			"model.visual.pos_embed.weight":                            "BF16[2304 1152]",
		} {
			if have[name] != want {
				t.Errorf("%+v: %s is %q, want %q", tt.v, name, have[name], want)
			}
		}
	}
}

func TestProposalRows(t *testing.T) {
	for _, tt := range []struct{ vocab, ids, want int }{
		{248320, 248077, 147456}, {248320, 1000, 0}, {512, 480, 256}, {2048, 2000, 1152}, {512, 106, 0}, {512, 107, 64},
	} {
		c := Official()
		c.Text.VocabSize = tt.vocab
		if got := c.ProposalRows(tt.ids); got != tt.want {
			t.Errorf("%d ids of %d: %d rows, want %d", tt.ids, tt.vocab, got, tt.want)
		}
	}
}

func TestVariant(t *testing.T) {
	for _, tt := range []struct {
		args         [4]string
		name, recipe string
	}{
		{[4]string{}, "qwen3_8_flash_next_125b_a6b_nvfp4.ninfer", "qwen3_8_flash_next_125b_a6b_nvfp4-v3-radixark"},
		{
			[4]string{"swift", "bf16", "bf16", "bf16"},
			"swift_1_5_qwen3_8_flash_next_nvfp4.ninfer",
			"qwen3_8_flash_next_125b_a6b_nvfp4-v3-swift",
		},
		{
			[4]string{"swift", "fp8_e4m3fn", "fp8_e4m3fn_row_bf16", "nvfp4"},
			"swift_1_5_qwen3_8_flash_next_nvfp4_fp8ple_fp8proj_nvfp4mtp.ninfer",
			"qwen3_8_flash_next_125b_a6b_nvfp4-v3-swift-fp8ple-fp8proj-nvfp4mtp",
		},
		{
			[4]string{"radixark", "", "fp8_e4m3fn_row_bf16", ""},
			"qwen3_8_flash_next_125b_a6b_nvfp4_fp8proj.ninfer",
			"qwen3_8_flash_next_125b_a6b_nvfp4-v3-radixark-fp8proj",
		},
		{[4]string{"radixark", "bf16"}, "", ""},
		{[4]string{"radixark", "fp8_e4m3fn"}, "", ""},
		{[4]string{"swift", "int4"}, "", ""},
		{[4]string{"mixed"}, "qwen3_8_flash_next_mixed.ninfer", "qwen3_8_flash_next_125b_a6b_nvfp4-v3-mixed"},
		{[4]string{"mixed", "bf16"}, "", ""},
		{[4]string{"mixed", "", "bf16"}, "", ""},
		{[4]string{"mixed", "", "", "nvfp4"}, "", ""},
		{[4]string{"official"}, "", ""},
		{[4]string{"", "", "fp8", ""}, "", ""},
		{[4]string{"", "", "", "fp8"}, "", ""},
	} {
		v, err := ParseVariant(tt.args[0], tt.args[1], tt.args[2], tt.args[3])
		if tt.name == "" {
			if err == nil {
				t.Errorf("%q accepted", tt.args)
			}
			continue
		}
		if err != nil || v.OutputName() != tt.name || v.Recipe() != tt.recipe {
			t.Errorf("%q: %q %q %v", tt.args, v.OutputName(), v.Recipe(), err)
		}
	}
}

// TestInventoryRefusals: shapes the bank layout or the table cannot have are errors, not panics.
func TestInventoryRefusals(t *testing.T) {
	for member, edit := range map[string]func(*Text){
		"hidden_size":           func(t *Text) { t.HiddenSize = 2600 },
		"moe_intermediate_size": func(t *Text) { t.ExpertIntermediate = 650 },
		"split_ngram_parts":     func(t *Text) { t.NgramParts = 7 },
	} {
		c := Official()
		edit(&c.Text)
		if _, err := Inventory(c, Variant{Profile: Radixark}, 64); err == nil || !strings.Contains(err.Error(), member) {
			t.Errorf("%s: %v", member, err)
		}
	}
	for _, rows := range []int{0, -1, 248321} {
		if _, err := Inventory(Official(), Variant{Profile: Radixark}, rows); err == nil {
			t.Errorf("%d proposal rows accepted", rows)
		}
	}
}

func BenchmarkInventory(b *testing.B) {
	c := Official()
	for b.Loop() {
		if _, err := Inventory(c, Variant{Profile: Radixark}, 147456); err != nil {
			b.Fatal(err)
		}
	}
}
