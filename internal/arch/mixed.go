package arch

import (
	"fmt"
	"strconv"
	"strings"

	"ninfer/internal/num"
)

// The ids of dialect E reached disk in published artifacts and cannot change (docs/format.md 4.2).
const (
	mixedText  = "text/"
	mixedMTP   = "mtp/"
	mixedDraft = "mtp/layer/" // its bindings have mtp/layers/0/
	mixedHC    = "hyper_connection/"
	mixedPLE   = "ple/"

	mixedEmbedding = mixedPLE + "embedding/"
	mixedShards    = mixedEmbedding + "shards/"
)

// mixedIndex are the ids of the stored hash constants below the embedding: multipliers, offsets, sizes.
var mixedIndex = []string{"layer_multipliers", "ngram_head_offsets", "ngram_head_vocab_sizes"}

// Prefix of a decoder layer in dialect E.
func mixedLayer(l int) string { return mixedText + "layers/" + strconv.Itoa(l) + "/" }

// MixedIndex is the object id of one of the hash constants of decoder layer l (zero-based): 0 multipliers, 1 offsets, 2 sizes.
func MixedIndex(l, what int) string { return mixedLayer(l) + mixedEmbedding + mixedIndex[what] }

// MixedShard is the object id of shard i of the n-gram table of decoder layer l (zero-based).
func MixedShard(l, i int) string { return mixedLayer(l) + mixedShards + strconv.Itoa(i) }

// MixedV2Inventory returns the objects of the version 2 container of dialect E, which differs from version 3 only in the drafter's
// expert banks: they are BF16 there. Formats and layouts have the spellings of version 3.
func MixedV2Inventory(c *Config) ([]Spec, error) { return mixedInventory(c, num.BF16) }

// mixedInventory is docs/format.md 4.2.1 with 5.6.
func mixedInventory(c *Config, draft num.Format) ([]Spec, error) {
	t := &c.Text
	if err := t.checkBanks(); err != nil {
		return nil, err
	}
	if len(t.PLELayerIDs) != 1 {
		return nil, fmt.Errorf("ple_layer_ids has %d layers: profile mixed has one table of shards: unsupported or inconsistent value", len(t.PLELayerIDs))
	}
	b := mixedBuilder{builder{c: c, v: Variant{Profile: Mixed}}}
	for _, r := range Resources() {
		b.specs = append(b.specs, Spec{ID: r.Object(), Resource: true, Source: Source{Op: OpResource, Name: r.Role}})
	}
	for l := range t.Layers {
		p, from := mixedLayer(l), LayerPrefix(l)
		b.block(p, from)
		b.banks(p+"mlp/experts/", MLPPrefix(from))
		b.mixer(p, from, t.Full(l), num.FP8RowFP32)
	}
	if err := b.ple(); err != nil {
		return nil, err
	}
	b.copied(mixedText+"token_embedding", EmbedTokens, t.VocabSize, t.HiddenSize)
	b.copied(mixedText+"output_head", LMHead, t.VocabSize, t.HiddenSize)
	b.hyperConnection(mixedText+mixedHC, TextMixer, false)

	b.copied(mixedMTP+"embedding_projection", MTPFCEmbedding, t.HiddenSize, t.HiddenSize)
	b.copied(mixedMTP+"hidden_projection", MTPFCHidden, t.HiddenSize, t.HiddenSize)
	b.hyperConnection(mixedMTP+mixedHC, MTPMixer, false)
	b.block(mixedDraft, MTPLayerPrefix)
	b.draftBanks(mixedDraft+"mlp/experts/", MLPPrefix(MTPLayerPrefix), draft)
	b.mixer(mixedDraft, MTPLayerPrefix, true, num.BF16)
	b.copied(mixedMTP+"embedding_norm", MTPEmbeddingNorm, t.HiddenSize)
	b.copied(mixedMTP+"hidden_norm", MTPHiddenNorm, t.StreamWidth())

	b.vision()
	return b.specs, nil
}

type mixedBuilder struct{ builder }

// hold adds an object and says which canonical parameter it is.
func (b *mixedBuilder) hold(id string, f num.Format, s Source, parameter string, shape ...int) {
	b.add(id, f, s, shape...)
	rows := 1
	for _, d := range shape[:len(shape)-1] {
		rows *= d
	}
	b.specs[len(b.specs)-1].Holds = []Run{{parameter, rows}}
}

// copied adds a BF16 tensor of the same shape as in the checkpoint.
func (b *mixedBuilder) copied(id, from string, shape ...int) {
	b.hold(id, num.BF16, Source{Op: OpCopy, Name: from, DType: "BF16", Shape: shape}, from, shape...)
}

func (b *mixedBuilder) convolution(id, from string, channels, taps int) {
	b.hold(id, num.BF16, Source{Op: OpTranspose, Name: from, DType: "BF16", Shape: []int{channels, 1, taps}}, from, taps, channels)
}

// fused adds matrices one below the other: row-scaled FP8 or BF16, as in the checkpoint.
func (b *mixedBuilder) fused(id string, f num.Format, cols int, runs ...Run) {
	s := Source{Op: OpCopy}
	dtype := "BF16"
	if f == num.FP8RowFP32 {
		s.Op, dtype = OpRowScaled, "F8_E4M3"
	}
	rows := 0
	for _, r := range runs {
		s.Parts = append(s.Parts, SourceTensor{r.Parameter, dtype, []int{r.Rows, cols}})
		rows += r.Rows
	}
	b.add(id, f, s, rows, cols)
	b.specs[len(b.specs)-1].Holds = runs
}

func (b *mixedBuilder) hyperConnection(p, from string, inject bool) {
	t := &b.c.Text
	w := t.StreamWidth()
	if inject {
		b.copied(p+"block_inject", from+BlockInject, t.Streams, w)
	}
	b.copied(p+"norm", from+HCNorm, w)
	b.copied(p+"input_mix/down", from+MixDown, t.HCLowRank, w)
	b.copied(p+"input_mix/up", from+MixUp, w, t.HCLowRank)
}

// block adds a layer's hyper-connections and what is dense of its mixture of experts.
func (b *mixedBuilder) block(p, from string) {
	t := &b.c.Text
	b.hyperConnection(p+"attention/"+mixedHC, AttnHCPrefix(from), true)
	m := MLPPrefix(from)
	b.copied(p+"mlp/router", m+Router, t.Experts, t.HiddenSize)
	b.copied(p+"mlp/shared_expert/down", m+SharedDown, t.HiddenSize, t.SharedIntermediate)
	b.copied(p+"mlp/shared_expert/gate", m+SharedGate, t.SharedIntermediate, t.HiddenSize)
	b.copied(p+"mlp/shared_expert/up", m+SharedUp, t.SharedIntermediate, t.HiddenSize)
	b.copied(p+"mlp/shared_expert_gate", m+SharedSwitch, 1, t.HiddenSize)
	b.hyperConnection(p+"mlp/"+mixedHC, MLPHCPrefix(from), true)
}

// mixer adds a layer's attention or delta net.
func (b *mixedBuilder) mixer(p, from string, full bool, f num.Format) {
	t := &b.c.Text
	if full {
		p, from = p+"attention/", AttnPrefix(from)
		q, kv := t.Heads*t.HeadDim, t.KVHeads*t.HeadDim
		b.copied(p+"indexer/query_key", from+IndexQK, (t.IndexHeads+t.IndexKVHeads)*t.IndexHeadDim, t.HiddenSize)
		b.copied(p+"indexer/key_norm", from+IndexKLN, t.IndexHeadDim)
		b.copied(p+"indexer/query_norm", from+IndexQLN, t.IndexHeadDim)
		b.copied(p+"key_norm", from+KNorm, t.HeadDim)
		b.copied(p+"query_norm", from+QNorm, t.HeadDim)
		b.fused(p+"query_gate_key_value", f, t.HiddenSize, Run{from + QProj, 2 * q}, Run{from + KProj, kv}, Run{from + VProj, kv})
		b.fused(p+"output", f, q, Run{from + OProj, t.HiddenSize})
		return
	}
	p, from = p+"gdn/", GDNPrefix(from)
	b.copied(p+"a_log", from+GDNALog, t.LinearValueHeads)
	b.convolution(p+"convolution", from+GDNConv, t.ConvDim(), t.LinearConvKernel)
	b.copied(p+"dt_bias", from+GDNDTBias, t.LinearValueHeads)
	b.fused(p+"a_b_projection", num.BF16, t.HiddenSize, Run{from + GDNA, t.LinearValueHeads}, Run{from + GDNB, t.LinearValueHeads})
	b.copied(p+"norm", from+GDNNorm, t.LinearValueHeadDim)
	b.fused(p+"query_key_value_z", f, t.HiddenSize, Run{from + GDNQKV, t.ConvDim()}, Run{from + GDNZ, t.ValueDim()})
	b.fused(p+"output", f, t.ValueDim(), Run{from + GDNOut, t.HiddenSize})
}

func (b *mixedBuilder) banks(p, from string) {
	t := &b.c.Text
	s := Source{
		Op: OpPackedBank, Name: from + expertsOfSource, Shape: []int{t.ExpertIntermediate, t.HiddenSize},
		Projections: []string{"gate", "up"}, Count: t.Experts,
	}
	b.hold(p+"gate_up", num.NVFP4, s, from+BankGateUp, t.Experts, 2*t.ExpertIntermediate, t.HiddenSize)
	s.Shape, s.Projections = []int{t.HiddenSize, t.ExpertIntermediate}, []string{"down"}
	b.hold(p+"down", num.NVFP4, s, from+BankDown, t.Experts, t.HiddenSize, t.ExpertIntermediate)
}

// draftBanks adds the drafter's experts: BF16 in version 2, encoded in version 3.
func (b *mixedBuilder) draftBanks(p, from string, f num.Format) {
	t := &b.c.Text
	for _, k := range []struct {
		id, source, bank string
		shape            []int
	}{
		{"gate_up", BankGateUpBF16, BankGateUp, []int{t.Experts, 2 * t.ExpertIntermediate, t.HiddenSize}},
		{"down", BankDownBF16, BankDown, []int{t.Experts, t.HiddenSize, t.ExpertIntermediate}},
	} {
		s := Source{Op: OpEncodeBank, Name: from + k.source, DType: "BF16", Shape: k.shape, Encoder: num.ProfileA}
		name := from + k.bank
		if f == num.BF16 {
			s.Op, name = OpCopy, from+k.source
		}
		b.hold(p+k.id, f, s, name, k.shape...)
	}
}

func (b *mixedBuilder) ple() error {
	t := &b.c.Text
	g := t.Ngram(0)
	if err := t.checkParts(g); err != nil {
		return err
	}
	if g.HeadWidth%16 != 0 {
		return fmt.Errorf("ple_embed_dim gives rows of %d values: the INT4 table needs a multiple of 16", g.HeadWidth)
	}
	l := t.PLELayerIDs[0] - 1
	p, from, w := mixedLayer(l)+mixedPLE, PLEPrefix(LayerPrefix(l)), t.StreamWidth()
	b.convolution(p+"convolution", from+PLEConv, w, t.PLEConvKernel)
	b.copied(p+"key_projection", from+PLEKey, w, t.PLEEmbedDim)
	b.copied(p+"conv_norm", from+PLENormConv, w)
	b.copied(p+"key_norm", from+PLENormKey, w)
	b.copied(p+"query_norm", from+PLENormQuery, w)
	b.copied(p+"value_projection", from+PLEValue, t.HiddenSize, t.PLEEmbedDim)
	for i, x := range b.c.IndexTensors() {
		b.add(MixedIndex(l, i), num.Int64, Source{Op: OpCopy, Name: x.Name, DType: x.DType, Shape: x.Shape}, x.Shape...)
	}
	rows := int(g.Rows) / t.NgramParts
	for i := range t.NgramParts {
		b.add(MixedShard(l, i), num.U4Z8G16, Source{Op: OpPackedTable, Index: i, Shape: []int{rows, g.HeadWidth}}, rows, g.HeadWidth)
	}
	return nil
}

// mixedBindings are the logical parameters that an object of dialect E is bound to (docs/format.md 4.2.3).
func mixedBindings(s Spec) []Binding {
	name := s.ID
	if rest, ok := strings.CutPrefix(name, mixedDraft); ok {
		name = mixedMTP + "layers/0/" + rest
	}
	if !strings.HasPrefix(name, "vision/") {
		return []Binding{{Name: name, Object: s.ID}}
	}
	if prefix, ok := strings.CutSuffix(name, VisionQKV); ok {
		return split(s, prefix+"attention/", "")
	}
	if prefix, ok := strings.CutSuffix(name, VisionQKVBias); ok {
		return split(s, prefix+"attention/", "_bias")
	}
	for _, n := range []string{"norm", "norm1", "norm2"} {
		name = strings.Replace(name, "/"+n+"/", "/"+n+"_", 1)
	}
	return []Binding{{Name: name, Object: s.ID}}
}

// split binds the thirds of an object.
func split(s Spec, prefix, suffix string) []Binding {
	n := int64(1)
	for _, d := range s.Shape {
		n *= int64(d)
	}
	n /= 3
	var out []Binding
	for i, part := range []string{"query", "key", "value"} {
		out = append(out, Binding{Name: prefix + part + suffix, Object: s.ID, Begin: int64(i) * n, End: int64(i+1) * n})
	}
	return out
}

// What a parameter is applied to (docs/format.md 4.2.4): in a layer of text or drafter, in a vision block, elsewhere.
var (
	mixedLayerInputs = map[string]string{
		"attention/hyper_connection/input_mix/down": "attention/hyper_connection/normalized_state",
		"attention/hyper_connection/block_inject":   "attention/hyper_connection/normalized_state",
		"attention/hyper_connection/input_mix/up":   "attention/hyper_connection/low_rank",
		"mlp/hyper_connection/input_mix/down":       "mlp/hyper_connection/normalized_state",
		"mlp/hyper_connection/block_inject":         "mlp/hyper_connection/normalized_state",
		"mlp/hyper_connection/input_mix/up":         "mlp/hyper_connection/low_rank",
		"attention/query_gate_key_value":            "mixer_input",
		"attention/indexer/query_key":               "mixer_input",
		"gdn/query_key_value_z":                     "mixer_input",
		"gdn/a_b_projection":                        "mixer_input",
		"attention/output":                          "attention/gated_output",
		"gdn/output":                                "gdn/gated_output",
		"mlp/router":                                "ffn_input",
		"mlp/shared_expert_gate":                    "ffn_input",
		"mlp/shared_expert/gate":                    "ffn_input",
		"mlp/shared_expert/up":                      "ffn_input",
		"mlp/experts/gate_up":                       "ffn_input",
		"mlp/shared_expert/down":                    "mlp/shared_expert/product",
		"mlp/experts/down":                          "mlp/experts/product",
		"ple/key_projection":                        "ple/embedding",
		"ple/value_projection":                      "ple/embedding",
	}
	mixedBlockInputs = map[string]string{
		"attention/query":  "attention_input",
		"attention/key":    "attention_input",
		"attention/value":  "attention_input",
		"attention/output": "attention_output",
		"mlp/fc1":          "mlp_input",
		"mlp/fc2":          "mlp_activation",
	}
	mixedInputs = map[string][]string{
		"text/hyper_connection/input_mix/down": {"text/hyper_connection/normalized_state"},
		"text/hyper_connection/input_mix/up":   {"text/hyper_connection/low_rank"},
		"mtp/hyper_connection/input_mix/down":  {"mtp/hyper_connection/normalized_state"},
		"mtp/hyper_connection/input_mix/up":    {"mtp/hyper_connection/low_rank"},
		"mtp/embedding_projection":             {"mtp/normalized_embedding"},
		"mtp/hidden_projection":                {"mtp/normalized_hidden"},
		"text/output_head":                     {"text/final_hidden", "mtp/final_hidden"},
		VisionPatch:                            {"vision/patch_input"},
		MergerFC1:                              {"vision/merger/input"},
		MergerFC2:                              {"vision/merger/activation"},
	}
)

// mixedUses are the uses of one binding of an object of the format.
func mixedUses(name string, f num.Format) []Use {
	policy := "A16Only"
	switch f {
	case num.NVFP4:
		policy = "AllowA4"
	case num.FP8RowFP32:
		policy = "AllowA8"
	}
	inputs := mixedInputs[name]
	if parts := strings.SplitN(name, "/", 4); len(parts) == 4 && parts[1] == "layers" {
		table := mixedLayerInputs
		if parts[0] == "vision" {
			table = mixedBlockInputs
		}
		if input, ok := table[parts[3]]; ok {
			inputs = []string{strings.TrimSuffix(name, parts[3]) + input}
		}
	}
	var out []Use
	for _, input := range inputs {
		out = append(out, Use{Parameter: name, Input: input, Policy: policy})
	}
	return out
}
