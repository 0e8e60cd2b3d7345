// Package arch knows the qwen4_exp model family: its configuration, the shapes that follow from it, the canonical names of its
// parameters and the exact inventory of objects that an artifact of a given configuration holds.
//
// Everything follows config.json. No dimension of the 125B model is a constant here; the official configuration is data
// (official.json) like any other.
package arch

import (
	_ "embed"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"slices"
	"strconv"
)

//go:embed official.json
var officialJSON []byte

// Official returns the published configuration of Qwen3.8-Flash-Next 125B-A6B. The caller owns the result.
func Official() *Config {
	c, err := ParseConfig(officialJSON)
	if err != nil {
		panic("arch: built-in configuration: " + err.Error())
	}
	return c
}

// Config is one model of the family. Members absent from the source have the defaults of the reference configuration class
// (transformers, configuration_qwen4_exp.py and the qwen3_5_moe classes below it).
type Config struct {
	Text   Text
	Vision Vision

	ImageTokenID       int32
	VideoTokenID       int32
	VisionStartTokenID int32
	VisionEndTokenID   int32

	// TextSource and VisionSource are the text_config and vision_config objects as they stood in the source, spelling and order
	// kept: the artifact of a configuration other than the official one records them.
	TextSource, VisionSource jsontext.Value
	// Quantization is quantization_config as it stood in the source, nil when absent.
	Quantization jsontext.Value
}

// Text is text_config: the decoder. Sizes are element counts.
type Text struct {
	HiddenSize            int     `json:"hidden_size"`
	Layers                int     `json:"num_hidden_layers"`
	VocabSize             int     `json:"vocab_size"` // rows of the embedding; the tokenizer may have fewer ids
	Heads                 int     `json:"num_attention_heads"`
	KVHeads               int     `json:"num_key_value_heads"`
	HeadDim               int     `json:"head_dim"`
	FullAttentionInterval int     `json:"full_attention_interval"`
	HiddenAct             string  `json:"hidden_act"`
	AttentionBias         bool    `json:"attention_bias"`
	OutputGateType        string  `json:"output_gate_type"`
	MaxPositions          int     `json:"max_position_embeddings"`
	RMSNormEps            float64 `json:"rms_norm_eps"`
	TieWordEmbeddings     bool    `json:"tie_word_embeddings"`

	LinearKeyHeads     int `json:"linear_num_key_heads"`
	LinearKeyHeadDim   int `json:"linear_key_head_dim"`
	LinearValueHeads   int `json:"linear_num_value_heads"`
	LinearValueHeadDim int `json:"linear_value_head_dim"`
	LinearConvKernel   int `json:"linear_conv_kernel_dim"`

	Experts            int  `json:"num_experts"`
	ExpertsPerToken    int  `json:"num_experts_per_tok"`
	ExpertIntermediate int  `json:"moe_intermediate_size"`
	SharedIntermediate int  `json:"shared_expert_intermediate_size"`
	NormTopKProb       bool `json:"norm_topk_prob"`

	Streams   int `json:"hc_count"`
	HCLowRank int `json:"hc_lowrank"`

	IndexHeads    int `json:"indexer_n_heads"`
	IndexKVHeads  int `json:"indexer_kv_heads"`
	IndexHeadDim  int `json:"indexer_head_dim"`
	IndexBudget   int `json:"indexer_budget"`         // tokens selected from complete blocks
	IndexCompress int `json:"indexer_compress_ratio"` // tokens of one block

	PLELayerIDs      []int  `json:"ple_layer_ids"` // one-based
	PLEEmbedDim      int    `json:"ple_embed_dim"`
	PLEConvKernel    int    `json:"ple_conv_kernel_size"`
	NgramSize        int    `json:"ngram_size"`
	HeadsPerNgram    int    `json:"heads_per_ngram"`
	NgramVocabBase   int    `json:"ngram_vocab_size_base"`
	NgramDivisor     int    `json:"make_ngram_vocab_size_divisible_by"`
	NgramParts       int    `json:"split_ngram_parts"` // shards of the table in a checkpoint
	Seed             uint64 `json:"seed"`
	PLEEmbedDType    string `json:"ple_embedding_dtype"`
	EOSTokenID       tokens `json:"eos_token_id"`
	MTPLayers        int    `json:"mtp_num_hidden_layers"`
	MTPDedicated     bool   `json:"mtp_use_dedicated_embeddings"`
	MambaSSMDType    string `json:"mamba_ssm_dtype"`
	PartialRotary    float64
	LayerTypes       []string `json:"layer_types"`
	RopeParameters   Rope     `json:"rope_parameters"`
	TopPartialRotary *float64 `json:"partial_rotary_factor"`
}

// Rope is rope_parameters: one rotation shared by attention and indexer heads.
type Rope struct {
	Theta         float64  `json:"rope_theta"`
	PartialRotary *float64 `json:"partial_rotary_factor"`
	Sections      []int    `json:"mrope_section"` // frequencies of the time, height and width axes
	Interleaved   *bool    `json:"mrope_interleaved"`
	Type          string   `json:"rope_type"`
}

// Vision is vision_config: the image and video tower. Sizes are element counts.
type Vision struct {
	Depth              int    `json:"depth"`
	HiddenSize         int    `json:"hidden_size"`
	IntermediateSize   int    `json:"intermediate_size"`
	Heads              int    `json:"num_heads"`
	InChannels         int    `json:"in_channels"`
	PatchSize          int    `json:"patch_size"`
	TemporalPatchSize  int    `json:"temporal_patch_size"`
	SpatialMergeSize   int    `json:"spatial_merge_size"`
	PositionEmbeddings int    `json:"num_position_embeddings"`
	OutHiddenSize      int    `json:"out_hidden_size"`
	HiddenAct          string `json:"hidden_act"`
	Deepstack          []int  `json:"deepstack_visual_indexes"`
}

// tokens is a member that is one id, a list of ids, or null.
type tokens []int32

func (t *tokens) UnmarshalJSONFrom(d *jsontext.Decoder) error {
	switch d.PeekKind() {
	case '[':
		var list []int32
		if err := json.UnmarshalDecode(d, &list); err != nil {
			return err
		}
		*t = list
		return nil
	case 'n':
		*t = nil
		return d.SkipValue()
	default:
		var one int32
		if err := json.UnmarshalDecode(d, &one); err != nil {
			return err
		}
		*t = tokens{one}
		return nil
	}
}

func defaultText() Text {
	return Text{
		FullAttentionInterval: 4, HiddenAct: "silu", OutputGateType: "", RMSNormEps: 1e-6, HeadDim: 256,
		LinearConvKernel: 4, LinearKeyHeadDim: 128, LinearValueHeadDim: 128, LinearKeyHeads: 16, LinearValueHeads: 32,
		Experts: 512, ExpertsPerToken: 10, NormTopKProb: true, Streams: 4, HCLowRank: 320, PLEConvKernel: 4, NgramSize: 3,
		HeadsPerNgram: 8, NgramVocabBase: 20_000_000, NgramDivisor: 128, NgramParts: 512, Seed: 1234,
		MTPLayers: 1, MaxPositions: 32768, MambaSSMDType: "float32",
	}
}

func defaultVision() Vision {
	return Vision{
		InChannels: 3, PatchSize: 16, TemporalPatchSize: 2, SpatialMergeSize: 2, PositionEmbeddings: 2304,
		HiddenAct: "gelu_pytorch_tanh",
	}
}

// ParseConfig reads a checkpoint's config.json. Errors name the member.
func ParseConfig(data []byte) (*Config, error) {
	var top struct {
		Architectures []string       `json:"architectures"`
		ModelType     string         `json:"model_type"`
		Tie           bool           `json:"tie_word_embeddings"`
		Text          jsontext.Value `json:"text_config"`
		Vision        jsontext.Value `json:"vision_config"`
		Quantization  jsontext.Value `json:"quantization_config"`
		Image         int32          `json:"image_token_id"`
		Video         int32          `json:"video_token_id"`
		VisionStart   int32          `json:"vision_start_token_id"`
		VisionEnd     int32          `json:"vision_end_token_id"`
	}
	if err := json.Unmarshal(data, &top); err != nil {
		return nil, fmt.Errorf("config.json: %w", err)
	}
	switch {
	case !slices.Equal(top.Architectures, []string{"Qwen4ExpForConditionalGeneration"}):
		return nil, fmt.Errorf("config.json: architectures is %q, need [\"Qwen4ExpForConditionalGeneration\"]", top.Architectures)
	case top.ModelType != "qwen4_exp":
		return nil, fmt.Errorf("config.json: model_type is %q, need \"qwen4_exp\"", top.ModelType)
	case top.Tie:
		return nil, errors.New("config.json: tie_word_embeddings is true, need false")
	case top.Text.Kind() != '{':
		return nil, errors.New("config.json: text_config is not an object")
	case top.Vision.Kind() != '{':
		return nil, errors.New("config.json: vision_config is not an object")
	case top.Quantization != nil && top.Quantization.Kind() != '{':
		return nil, errors.New("config.json: quantization_config is not an object")
	}
	c := &Config{
		ImageTokenID: top.Image, VideoTokenID: top.Video, VisionStartTokenID: top.VisionStart, VisionEndTokenID: top.VisionEnd,
		TextSource: top.Text, VisionSource: top.Vision, Quantization: top.Quantization,
	}
	if err := c.parse(); err != nil {
		return nil, fmt.Errorf("config.json: %w", err)
	}
	return c, nil
}

// parse fills Text and Vision from their sources, applies defaults and checks that the configuration is one this program can run.
func (c *Config) parse() error {
	c.Text, c.Vision = defaultText(), defaultVision()
	if err := json.Unmarshal(c.TextSource, &c.Text); err != nil {
		return fmt.Errorf("text_config: %w", err)
	}
	if err := json.Unmarshal(c.VisionSource, &c.Vision); err != nil {
		return fmt.Errorf("vision_config: %w", err)
	}
	t := &c.Text
	if t.PLEEmbedDim == 0 {
		t.PLEEmbedDim = t.HiddenSize
	}
	if t.OutputGateType == "" {
		t.OutputGateType = t.HiddenAct
	}
	if err := c.checkAgreement(); err != nil {
		return err
	}
	t.PartialRotary = 0.25
	if p := t.RopeParameters.PartialRotary; p != nil {
		t.PartialRotary = *p
	} else if p := t.TopPartialRotary; p != nil {
		t.PartialRotary = *p
	}
	if t.LayerTypes == nil && t.FullAttentionInterval > 0 && t.Layers <= maxLayers {
		for i := range t.Layers {
			kind := "linear_attention"
			if (i+1)%t.FullAttentionInterval == 0 {
				kind = "full_attention"
			}
			t.LayerTypes = append(t.LayerTypes, kind)
		}
	}
	return c.check()
}

// checkAgreement compares members that say the same thing twice, where both are present.
func (c *Config) checkAgreement() error {
	var twice struct {
		Interval *int `json:"full_attention_interval"`
		MTP      *struct {
			Layers     *int     `json:"num_hidden_layers"`
			LayerTypes []string `json:"layer_types"`
		} `json:"mtp"`
	}
	if err := json.Unmarshal(c.TextSource, &twice); err != nil {
		return fmt.Errorf("text_config: %w", err)
	}
	t := &c.Text
	if twice.Interval != nil && *twice.Interval > 0 {
		for i, kind := range t.LayerTypes {
			if full := kind != "linear_attention"; full != ((i+1)%*twice.Interval == 0) {
				return fmt.Errorf("full_attention_interval is %d, but layer_types[%d] is %q: unsupported or inconsistent value", *twice.Interval, i, kind)
			}
		}
	}
	if p, q := t.RopeParameters.PartialRotary, t.TopPartialRotary; p != nil && q != nil && *p != *q {
		return fmt.Errorf("partial_rotary_factor is %v, but rope_parameters has %v: unsupported or inconsistent value", *q, *p)
	}
	if m := twice.MTP; m != nil {
		if m.Layers != nil && *m.Layers != t.MTPLayers {
			return fmt.Errorf("mtp.num_hidden_layers is %d, but mtp_num_hidden_layers is %d: unsupported or inconsistent value", *m.Layers, t.MTPLayers)
		}
		if len(m.LayerTypes) > 0 && (len(m.LayerTypes) != 1 || m.LayerTypes[0] == "linear_attention") {
			return fmt.Errorf("mtp.layer_types is %q, need one full_attention: unsupported or inconsistent value", m.LayerTypes)
		}
	}
	return nil
}

// maxLayers bounds what a config can make the program allocate.
const maxLayers = 4096

// limit is one requirement on an integer member.
type limit struct {
	member string
	value  int
	max    int
}

// check refuses what the program cannot represent or run: the upper limits keep every product of dimensions inside int64 and
// every index inside int.
func (c *Config) check() error {
	t, v := &c.Text, &c.Vision
	const big = 1 << 20
	for _, l := range []limit{
		{"hidden_size", t.HiddenSize, big},
		{"num_hidden_layers", t.Layers, maxLayers},
		{"vocab_size", t.VocabSize, 1 << 28},
		{"num_attention_heads", t.Heads, 4096},
		{"num_key_value_heads", t.KVHeads, 4096},
		{"head_dim", t.HeadDim, 4096},
		{"full_attention_interval", t.FullAttentionInterval, 4096},
		{"max_position_embeddings", t.MaxPositions, 1 << 30},
		{"linear_num_key_heads", t.LinearKeyHeads, 4096},
		{"linear_key_head_dim", t.LinearKeyHeadDim, 4096},
		{"linear_num_value_heads", t.LinearValueHeads, 4096},
		{"linear_value_head_dim", t.LinearValueHeadDim, 4096},
		{"linear_conv_kernel_dim", t.LinearConvKernel, 64},
		{"num_experts", t.Experts, 1 << 16},
		{"num_experts_per_tok", t.ExpertsPerToken, t.Experts},
		{"moe_intermediate_size", t.ExpertIntermediate, big},
		{"shared_expert_intermediate_size", t.SharedIntermediate, big},
		{"hc_count", t.Streams, 64},
		{"hc_lowrank", t.HCLowRank, big},
		{"indexer_n_heads", t.IndexHeads, 4096},
		{"indexer_kv_heads", t.IndexKVHeads, 1},
		{"indexer_head_dim", t.IndexHeadDim, 4096},
		{"indexer_budget", t.IndexBudget, 1 << 30},
		{"indexer_compress_ratio", t.IndexCompress, 1 << 10},
		{"ple_embed_dim", t.PLEEmbedDim, big},
		{"ple_conv_kernel_size", t.PLEConvKernel, 64},
		{"ngram_size", t.NgramSize, 16},
		{"heads_per_ngram", t.HeadsPerNgram, 1024},
		{"ngram_vocab_size_base", t.NgramVocabBase, 1 << 32},
		{"make_ngram_vocab_size_divisible_by", t.NgramDivisor, 1 << 24},
		{"split_ngram_parts", t.NgramParts, 1 << 20},
		{"vision_config.depth", v.Depth, 4096},
		{"vision_config.hidden_size", v.HiddenSize, big},
		{"vision_config.intermediate_size", v.IntermediateSize, big},
		{"vision_config.num_heads", v.Heads, 4096},
		{"vision_config.in_channels", v.InChannels, 16},
		{"vision_config.patch_size", v.PatchSize, 1024},
		{"vision_config.temporal_patch_size", v.TemporalPatchSize, 64},
		{"vision_config.spatial_merge_size", v.SpatialMergeSize, 64},
		{"vision_config.num_position_embeddings", v.PositionEmbeddings, 1 << 24},
	} {
		if l.value < 1 || l.value > l.max {
			return fmt.Errorf("%s is %d, need 1..%d: unsupported or inconsistent value", l.member, l.value, l.max)
		}
	}
	bad := func(member string, has any, need string) error {
		if s, ok := has.(string); ok { // from the file: it may hold anything
			has = strconv.Quote(s)
		}
		return fmt.Errorf("%s is %v, need %s: unsupported or inconsistent value", member, has, need)
	}
	switch {
	case t.HiddenAct != "silu":
		return bad("hidden_act", t.HiddenAct, "silu")
	case t.OutputGateType != "sigmoid":
		return bad("output_gate_type", t.OutputGateType, "sigmoid")
	case t.AttentionBias:
		return bad("attention_bias", true, "false")
	case t.TieWordEmbeddings:
		return bad("tie_word_embeddings", true, "false")
	case t.MambaSSMDType != "float32":
		return bad("mamba_ssm_dtype", t.MambaSSMDType, "float32")
	case t.MTPLayers != 1:
		return bad("mtp_num_hidden_layers", t.MTPLayers, "1")
	case t.MTPDedicated:
		return bad("mtp_use_dedicated_embeddings", true, "false")
	case !(float32(t.RMSNormEps) > 0 && float32(t.RMSNormEps) < 1): // dialect E records it in that precision
		return bad("rms_norm_eps", t.RMSNormEps, "a value between 0 and 1")
	case len(t.LayerTypes) != t.Layers:
		return bad("layer_types", len(t.LayerTypes), fmt.Sprintf("%d entries", t.Layers))
	case t.Heads%t.KVHeads != 0:
		return bad("num_attention_heads", t.Heads, "a multiple of num_key_value_heads")
	case t.LinearValueHeads%t.LinearKeyHeads != 0:
		return bad("linear_num_value_heads", t.LinearValueHeads, "a multiple of linear_num_key_heads")
	case t.LinearKeyHeadDim != t.LinearValueHeadDim:
		return bad("linear_value_head_dim", t.LinearValueHeadDim, "linear_key_head_dim")
	case t.IndexBudget%t.IndexCompress != 0:
		return bad("indexer_budget", t.IndexBudget, "a multiple of indexer_compress_ratio")
	case t.NgramSize < 2:
		return bad("ngram_size", t.NgramSize, "at least 2")
	case t.PLEEmbedDim%t.PLEHeads() != 0:
		return bad("ple_embed_dim", t.PLEEmbedDim, "a multiple of the number of n-gram heads")
	case len(t.PLELayerIDs) == 0 || !slices.IsSorted(t.PLELayerIDs) || len(slices.Compact(slices.Clone(t.PLELayerIDs))) != len(t.PLELayerIDs):
		return bad("ple_layer_ids", t.PLELayerIDs, "ascending layer numbers")
	case t.PLELayerIDs[0] < 1 || t.PLELayerIDs[len(t.PLELayerIDs)-1] > t.Layers:
		return bad("ple_layer_ids", t.PLELayerIDs, "numbers from 1 to num_hidden_layers")
	case len(t.EOSTokenID) == 0 || t.EOSTokenID[0] < 0 || int(t.EOSTokenID[0]) >= t.VocabSize:
		return bad("eos_token_id", []int32(t.EOSTokenID), "an id below vocab_size: it resets the n-gram history")
	case t.RopeParameters.Type != "" && t.RopeParameters.Type != "default":
		return bad("rope_parameters.rope_type", t.RopeParameters.Type, "default")
	case !(t.RopeParameters.Theta > 1):
		return bad("rope_parameters.rope_theta", t.RopeParameters.Theta, "a value above 1")
	case t.RopeParameters.Interleaved == nil || !*t.RopeParameters.Interleaved:
		return bad("rope_parameters.mrope_interleaved", t.RopeParameters.Interleaved != nil, "true")
	case len(t.RopeParameters.Sections) != 3 || slices.Min(t.RopeParameters.Sections) < 0:
		return bad("rope_parameters.mrope_section", t.RopeParameters.Sections, "three counts")
	case t.RotaryDim() < 2 || t.RotaryDim()%2 != 0 || t.RotaryDim() > min(t.HeadDim, t.IndexHeadDim):
		return bad("rope_parameters.partial_rotary_factor", t.PartialRotary, "an even rotary width inside head_dim and indexer_head_dim")
	case 2*(t.RopeParameters.Sections[0]+t.RopeParameters.Sections[1]+t.RopeParameters.Sections[2]) != t.RotaryDim():
		return bad("rope_parameters.mrope_section", t.RopeParameters.Sections, fmt.Sprintf("counts summing to half the rotary width %d", t.RotaryDim()))
	case t.VocabSize < 2:
		return bad("vocab_size", t.VocabSize, "at least 2")
	case v.HiddenAct != "gelu_pytorch_tanh":
		return bad("vision_config.hidden_act", v.HiddenAct, "gelu_pytorch_tanh")
	case len(v.Deepstack) != 0:
		return bad("vision_config.deepstack_visual_indexes", v.Deepstack, "none")
	case v.OutHiddenSize != t.HiddenSize:
		return bad("vision_config.out_hidden_size", v.OutHiddenSize, fmt.Sprintf("the text hidden_size %d", t.HiddenSize))
	case v.HiddenSize%v.Heads != 0 || v.HiddenSize/v.Heads%4 != 0:
		return bad("vision_config.num_heads", v.Heads, "heads whose width is a multiple of 4")
	}
	for i, k := range t.LayerTypes {
		switch k {
		case "linear_attention", "full_attention", "qwen_sparse_attention", "deepseek_sparse_attention", "hybrid_indexed":
		default:
			return bad(fmt.Sprintf("layer_types[%d]", i), k, "linear_attention or full_attention")
		}
	}
	for _, id := range []struct {
		member string
		id     int32
	}{
		{"image_token_id", c.ImageTokenID},
		{"video_token_id", c.VideoTokenID},
		{"vision_start_token_id", c.VisionStartTokenID},
		{"vision_end_token_id", c.VisionEndTokenID},
	} {
		if id.id < 0 || int(id.id) >= t.VocabSize {
			return bad(id.member, id.id, "an id below vocab_size")
		}
	}
	return nil
}

// Full reports whether decoder layer i (zero-based) has sparse full attention; the others have a gated delta net.
func (t *Text) Full(i int) bool { return t.LayerTypes[i] != "linear_attention" }

// PLEIndex returns which PLE module (zero-based) decoder layer i (zero-based) carries, or -1.
func (t *Text) PLEIndex(i int) int { return slices.Index(t.PLELayerIDs, i+1) }

// RotaryDim is the number of leading values of a head that rotate.
func (t *Text) RotaryDim() int { return int(float64(t.HeadDim) * t.PartialRotary) }

// StreamWidth is the width of all residual streams of a token together.
func (t *Text) StreamWidth() int { return t.Streams * t.HiddenSize }

// KeyDim is the width of a delta-net layer's queries, and of its keys.
func (t *Text) KeyDim() int { return t.LinearKeyHeads * t.LinearKeyHeadDim }

// ValueDim is the width of a delta-net layer's values, and of its output gate.
func (t *Text) ValueDim() int { return t.LinearValueHeads * t.LinearValueHeadDim }

// ConvDim is the number of channels of a delta-net layer's convolution: queries, keys, values.
func (t *Text) ConvDim() int { return 2*t.KeyDim() + t.ValueDim() }

// IndexBlocks is how many complete blocks a query may attend to.
func (t *Text) IndexBlocks() int { return t.IndexBudget / t.IndexCompress }

// ResetID is the token after which the n-gram history is empty: the first eos_token_id.
func (t *Text) ResetID() int32 { return t.EOSTokenID[0] }
