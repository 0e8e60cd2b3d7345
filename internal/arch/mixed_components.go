package arch

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"slices"
	"strconv"
)

// The strings by which dialect E is recognised; they reached disk.
const (
	mixedTextArchitecture = "Qwen4ExpForCausalLM"
	mixedTextModelType    = "qwen4_exp_text"
	mixedMTPArchitecture  = "Qwen4ExpMTP"
	mixedVisionModelType  = "qwen4_exp_vision"
)

// describeMixed is Describe for dialect E (docs/format.md 4.2.2 to 4.2.5).
func describeMixed(c *Config, v Variant, specs []Spec) (*Description, error) {
	text, err := c.mixedText()
	if err != nil {
		return nil, err
	}
	vision, err := c.mixedVision()
	if err != nil {
		return nil, err
	}
	res := Resources()
	d := &Description{Components: []Component{
		{ID: "text", Config: text, Resources: res[:4]},
		{ID: "vision", Config: vision, Target: "text", Resources: res[4:]},
		{ID: "mtp", Config: jsontext.Value(`{"architectures":["` + mixedMTPArchitecture + `"]}`), Target: "text"},
	}}
	for _, s := range specs {
		if s.Resource {
			continue
		}
		for _, b := range mixedBindings(s) {
			d.Bindings = append(d.Bindings, b)
			d.Uses = append(d.Uses, mixedUses(b.Name, s.Format)...)
		}
	}
	d.origin(c, v)
	return d, nil
}

// mixedMembers are the members that every artifact of dialect E records of text_config, normalized, in their order.
func (c *Config) mixedMembers() ([]member, error) {
	t := &c.Text
	kinds := make([]string, t.Layers)
	for l := range kinds {
		if kinds[l] = "linear_attention"; t.Full(l) {
			kinds[l] = "full_attention"
		}
	}
	layerTypes, err := json.Marshal(kinds)
	if err != nil {
		return nil, err
	}
	ids, err := json.Marshal(t.PLELayerIDs)
	if err != nil {
		return nil, err
	}
	sections, err := json.Marshal(t.RopeParameters.Sections)
	if err != nil {
		return nil, err
	}
	rope, err := object([]member{
		{"rope_theta", float(t.RopeParameters.Theta)}, {"partial_rotary_factor", float(t.PartialRotary)}, {"mrope_section", sections},
	})
	if err != nil {
		return nil, err
	}
	return []member{
		{"architectures", jsontext.Value(`["` + mixedTextArchitecture + `"]`)},
		{"model_type", jsontext.Value(`"` + mixedTextModelType + `"`)},
		{"hidden_size", number(t.HiddenSize)},
		{"vocab_size", number(t.VocabSize)},
		{"num_hidden_layers", number(t.Layers)},
		{"max_position_embeddings", number(t.MaxPositions)},
		{"num_attention_heads", number(t.Heads)},
		{"num_key_value_heads", number(t.KVHeads)},
		{"head_dim", number(t.HeadDim)},
		{"linear_num_key_heads", number(t.LinearKeyHeads)},
		{"linear_key_head_dim", number(t.LinearKeyHeadDim)},
		{"linear_num_value_heads", number(t.LinearValueHeads)},
		{"linear_value_head_dim", number(t.LinearValueHeadDim)},
		{"linear_conv_kernel_dim", number(t.LinearConvKernel)},
		{"num_experts", number(t.Experts)},
		{"num_experts_per_tok", number(t.ExpertsPerToken)},
		{"moe_intermediate_size", number(t.ExpertIntermediate)},
		{"shared_expert_intermediate_size", number(t.SharedIntermediate)},
		{"hc_count", number(t.Streams)},
		{"hc_lowrank", number(t.HCLowRank)},
		{"indexer_n_heads", number(t.IndexHeads)},
		{"indexer_kv_heads", number(t.IndexKVHeads)},
		{"indexer_head_dim", number(t.IndexHeadDim)},
		{"indexer_compress_ratio", number(t.IndexCompress)},
		{"indexer_budget", number(t.IndexBudget)},
		{"ple_embed_dim", number(t.PLEEmbedDim)},
		{"ple_conv_kernel_size", number(t.PLEConvKernel)},
		{"ngram_size", number(t.NgramSize)},
		{"heads_per_ngram", number(t.HeadsPerNgram)},
		{"split_ngram_parts", number(t.NgramParts)},
		{"tie_word_embeddings", jsontext.Value(strconv.FormatBool(t.TieWordEmbeddings))},
		{"rms_norm_eps", float(float64(float32(t.RMSNormEps)))},
		{"layer_types", layerTypes},
		{"rope_parameters", rope},
		{"ple_layer_ids", ids},
	}, nil
}

// float spells a number as Python does: the shortest digits that read back, with a point or an exponent of at least two digits.
// These spellings are in published directories.
func float(x float64) jsontext.Value {
	out := strconv.FormatFloat(x, 'e', -1, 64)
	i := slices.Index([]byte(out), 'e')
	if e, err := strconv.Atoi(out[i+1:]); err == nil && (e < -4 || e >= 16) {
		return jsontext.Value(out)
	}
	out = strconv.FormatFloat(x, 'f', -1, 64)
	if !slices.Contains([]byte(out), '.') {
		out += ".0"
	}
	return jsontext.Value(out)
}

func (c *Config) mixedText() (jsontext.Value, error) {
	list, err := c.mixedMembers()
	if err != nil {
		return nil, err
	}
	if !c.IsOfficial() {
		if list, err = c.appendOther(list); err != nil {
			return nil, err
		}
	}
	return object(list)
}

// mixedVisionMembers are the members that every artifact of dialect E records of vision_config.
func (c *Config) mixedVisionMembers() []member {
	v := &c.Vision
	return []member{
		{"model_type", jsontext.Value(`"` + mixedVisionModelType + `"`)},
		{"depth", number(v.Depth)},
		{"hidden_size", number(v.HiddenSize)},
		{"intermediate_size", number(v.IntermediateSize)},
		{"num_heads", number(v.Heads)},
		{"patch_size", number(v.PatchSize)},
		{"temporal_patch_size", number(v.TemporalPatchSize)},
		{"spatial_merge_size", number(v.SpatialMergeSize)},
		{"num_position_embeddings", number(v.PositionEmbeddings)},
		{"out_hidden_size", number(v.OutHiddenSize)},
	}
}

func (c *Config) mixedVision() (jsontext.Value, error) {
	list := c.mixedVisionMembers()
	if !c.IsOfficial() {
		var err error
		if list, err = appendRest(list, c.VisionSource); err != nil {
			return nil, fmt.Errorf("vision_config: %w", err)
		}
	}
	return object(list)
}

// fromMixed is FromComponents for dialect E. Its config lacks what only the official model may leave out: the id that resets the
// n-gram history, the token ids of pictures, and what the hash of the table needs. So a config without image_token_id must be the
// official one, member by member.
func fromMixed(text, vision jsontext.Value) (*Config, error) {
	list, err := members(text)
	if err != nil {
		return nil, fmt.Errorf("component text: config: %w", err)
	}
	if slices.ContainsFunc(list, func(m member) bool { return m.name == "image_token_id" }) {
		if text, err = interleaved(list); err != nil {
			return nil, fmt.Errorf("component text: config: %w", err)
		}
		return fromOther(text, vision)
	}
	if vision.Kind() != '{' {
		return nil, errors.New("component vision is missing: its config is needed")
	}
	c := Official()
	need, err := c.mixedMembers()
	if err != nil {
		return nil, err
	}
	if err := sameMembers("text", list, need); err != nil {
		return nil, err
	}
	if list, err = members(vision); err != nil {
		return nil, fmt.Errorf("component vision: config: %w", err)
	}
	return c, sameMembers("vision", list, c.mixedVisionMembers())
}

// sameMembers compares a config with the official one; the order of members and the spelling of numbers are free.
func sameMembers(component string, have, need []member) error {
	for _, n := range need {
		i := slices.IndexFunc(have, func(m member) bool { return m.name == n.name })
		if i < 0 {
			return fmt.Errorf("component %s: config lacks %s", component, n.name)
		}
		a, b := have[i].value.Clone(), n.value.Clone()
		if err := errors.Join(a.Canonicalize(), b.Canonicalize()); err != nil {
			return fmt.Errorf("component %s: config: %s: %w", component, n.name, err)
		}
		if string(a) != string(b) {
			return fmt.Errorf("component %s: %s is %s, need %s: a config without image_token_id is the official one", component, n.name, a, b)
		}
	}
	for _, m := range have {
		if !slices.ContainsFunc(need, func(n member) bool { return n.name == m.name }) {
			return fmt.Errorf("component %s: config member %q is not one of the official config, and image_token_id is missing", component, m.name)
		}
	}
	return nil
}

// interleaved says of the rotation what dialect E leaves out because there it is always so.
func interleaved(list []member) (jsontext.Value, error) {
	for i, m := range list {
		if m.name != "rope_parameters" {
			continue
		}
		rope, err := members(m.value)
		if err != nil {
			return nil, fmt.Errorf("rope_parameters: %w", err)
		}
		if slices.ContainsFunc(rope, func(m member) bool { return m.name == "mrope_interleaved" }) {
			break
		}
		value, err := object(append(rope, member{"mrope_interleaved", jsontext.Value("true")}))
		if err != nil {
			return nil, err
		}
		list = slices.Clone(list)
		list[i].value = value
	}
	return object(list)
}
