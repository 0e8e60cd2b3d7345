package arch

import "strconv"

// Canonical parameter names. They are the object ids of dialect L, which are the checkpoint's own names wherever a tensor is
// stored as it came; loader and converter both take them from here. A full name is a prefix followed by a suffix:
//
//	arch.AttnPrefix(arch.LayerPrefix(3)) + arch.QProj
//
// They reached disk in published artifacts and cannot change.
const (
	EmbedTokens = "model.language_model.embed_tokens.weight" // [vocab, hidden]
	LMHead      = "lm_head.weight"                           // [vocab, hidden]
	TextMixer   = "model.language_model.hyper_connection_mixer."
	layers      = "model.language_model.layers."

	ProposalWeight = "ninfer.optimized_proposal_head.weight"    // [rows, hidden]
	ProposalIDs    = "ninfer.optimized_proposal_head.token_ids" // [rows], row r of the weight stands for this token

	MTPLayerPrefix   = "mtp.layers.0."
	MTPMixer         = "mtp.hyper_connection_mixer."
	MTPEmbeddingNorm = "mtp.pre_fc_norm_embedding.weight" // [hidden]
	MTPHiddenNorm    = "mtp.pre_fc_norm_hidden.weight"    // [streams*hidden]
	MTPFCEmbedding   = "mtp.fc_embedding.weight"          // [hidden, hidden]
	MTPFCHidden      = "mtp.fc_hidden.weight"             // [hidden, hidden]
)

// LayerPrefix is the prefix of decoder layer l (zero-based). MTPLayerPrefix is its counterpart in the drafter.
func LayerPrefix(l int) string { return layers + strconv.Itoa(l) + "." }

// Prefixes inside a layer.
func AttnHCPrefix(layer string) string { return layer + "attn_hyper_connection." } // before attention or delta net
func MLPHCPrefix(layer string) string  { return layer + "mlp_hyper_connection." }  // before the experts
func AttnPrefix(layer string) string   { return layer + "self_attn." }             // full-attention layers
func GDNPrefix(layer string) string    { return layer + "linear_attn." }           // the others
func MLPPrefix(layer string) string    { return layer + "mlp." }
func PLEPrefix(layer string) string    { return layer + "ple." } // layers of ple_layer_ids

// Suffixes of a hyper-connection; mixers have no BlockInject.
const (
	BlockInject = "block_inject_weight.weight"   // [streams, streams*hidden]
	HCNorm      = "hc_norm.weight"               // [streams*hidden]
	MixDown     = "input_mix_weight_down.weight" // [lowrank, streams*hidden]
	MixUp       = "input_mix_weight_up.weight"   // [streams*hidden, lowrank]
)

// Suffixes of sparse full attention.
const (
	QProj     = "q_proj.weight"                // [heads*2*dim, hidden]: of each head dim query rows, then dim gate rows
	KProj     = "k_proj.weight"                // [kv heads*dim, hidden]
	VProj     = "v_proj.weight"                // [kv heads*dim, hidden]
	OProj     = "o_proj.weight"                // [hidden, heads*dim]
	QNorm     = "q_norm.weight"                // [dim]
	KNorm     = "k_norm.weight"                // [dim]
	IndexQK   = "indexer.index_qk_proj.weight" // [(index heads + 1)*index dim, hidden]: query heads, then the key
	IndexQLN  = "indexer.q_layernorm.weight"   // [index dim]
	IndexKLN  = "indexer.k_layernorm.weight"   // [index dim]
	convolute = "conv1d.weight"
)

// Suffixes of the gated delta net.
const (
	GDNALog   = "A_log"              // [value heads], fp32
	GDNDTBias = "dt_bias"            // [value heads], fp32
	GDNConv   = convolute            // [taps, 2*key + value]: transposed from the checkpoint's [channels, 1, taps]
	GDNA      = "in_proj_a.weight"   // [value heads, hidden]
	GDNB      = "in_proj_b.weight"   // [value heads, hidden]
	GDNQKV    = "in_proj_qkv.weight" // [2*key + value, hidden]
	GDNZ      = "in_proj_z.weight"   // [value, hidden]
	GDNNorm   = "norm.weight"        // [value head dim]
	GDNOut    = "out_proj.weight"    // [hidden, value]
)

// Suffixes of the mixture of experts. The last four are banks and their activation divisors; BankGateUpBF16 and BankDownBF16 are
// the drafter's banks when they stay BF16.
const (
	Router          = "gate.weight"                    // [experts, hidden]
	SharedGate      = "shared_expert.gate_proj.weight" // [shared inner, hidden]
	SharedUp        = "shared_expert.up_proj.weight"   // [shared inner, hidden]
	SharedDown      = "shared_expert.down_proj.weight" // [hidden, shared inner]
	SharedSwitch    = "shared_expert_gate.weight"      // [1, hidden]
	BankGateUp      = "experts.gate_up"                // [experts, 2*inner, hidden]: gate rows, then up rows
	BankDown        = "experts.down"                   // [experts, hidden, inner]
	DivisorsSuffix  = "_input_divisors"                // appended to a bank's id: [experts], fp32
	BankGateUpBF16  = "experts.gate_up_proj"
	BankDownBF16    = "experts.down_proj"
	expertsOfSource = "experts."
)

// Suffixes of per-layer embeddings.
const (
	PLEConv       = convolute                                    // [taps, streams*hidden]
	PLEKey        = "key_proj.weight"                            // [streams*hidden, ple dim]
	PLENormConv   = "norm_conv.weight"                           // [streams*hidden]
	PLENormKey    = "norm_key.weight"                            // [streams*hidden]
	PLENormQuery  = "norm_query.weight"                          // [streams*hidden]
	PLEValue      = "value_proj.weight"                          // [hidden, ple dim]
	PLETableScale = "ple_embedding.ngram_embedding.weight_scale" // [1] bf16, exactly when the table is fp8_e4m3fn
	PLETable      = "ple_embedding.ngram_embedding.weight"       // [rows, head width]
	pleShard      = "ple_embedding.ngram_embedding.shard_"       // + index + ".weight" in a checkpoint
	pleIndexMul   = "ple_embedding.layer_multipliers"            // int64, derived from the config instead
	pleIndexOff   = "ple_embedding.ngram_heads_offsets"          // likewise
	pleIndexSize  = "ple_embedding.ngram_heads_vocab_sizes"      // likewise
)

// Vision object names; blocks have VisionBlockPrefix.
const (
	VisionPatch     = "vision/patch_embedding"      // [hidden, channels*frames*patch*patch]
	VisionPatchBias = "vision/patch_embedding_bias" // [hidden]
	VisionPositions = "vision/position_embedding"   // [positions, hidden]

	VisionQKV      = "attention/qkv"         // [3*hidden, hidden]
	VisionQKVBias  = "attention/qkv_bias"    // [3*hidden]
	VisionOut      = "attention/output"      // [hidden, hidden]
	VisionOutBias  = "attention/output_bias" // [hidden]
	VisionFC1      = "mlp/fc1"               // [inner, hidden]
	VisionFC1Bias  = "mlp/fc1_bias"          // [inner]
	VisionFC2      = "mlp/fc2"               // [hidden, inner]
	VisionFC2Bias  = "mlp/fc2_bias"          // [hidden]
	VisionNorm1    = "norm1/weight"          // [hidden]
	VisionNorm1B   = "norm1/bias"            // [hidden]
	VisionNorm2    = "norm2/weight"          // [hidden]
	VisionNorm2B   = "norm2/bias"            // [hidden]
	MergerFC1      = "vision/merger/fc1"     // [hidden*merge*merge, hidden*merge*merge]
	MergerFC1Bias  = "vision/merger/fc1_bias"
	MergerFC2      = "vision/merger/fc2" // [text hidden, hidden*merge*merge]
	MergerFC2Bias  = "vision/merger/fc2_bias"
	MergerNorm     = "vision/merger/norm/weight" // [hidden]
	MergerNormBias = "vision/merger/norm/bias"   // [hidden]
)

// VisionBlockPrefix is the prefix of block b (zero-based) of the vision tower.
func VisionBlockPrefix(b int) string { return "vision/layers/" + strconv.Itoa(b) + "/" }
