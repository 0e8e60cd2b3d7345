"""The shapes of nano: everything the other files need to know about the model."""

TEXT = dict(
    vocab_size=2560, hidden_size=256, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1, head_dim=256, hidden_act="silu",
    max_position_embeddings=16384, rms_norm_eps=1e-6, tie_word_embeddings=False,
    rope_parameters=dict(rope_type="default", rope_theta=10000000, partial_rotary_factor=0.25, mrope_section=[11, 11, 10], mrope_interleaved=True),
    partial_rotary_factor=0.25, attention_bias=False,
    linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=1, linear_num_value_heads=3,
    moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts_per_tok=4, num_experts=16,
    hc_count=4, hc_lowrank=32, ple_layer_ids=[2], ple_embed_dim=256, ple_conv_kernel_size=4, ngram_size=3, heads_per_ngram=8, ngram_vocab_size_base=2000,
    make_ngram_vocab_size_divisible_by=128, seed=1234, split_ngram_parts=8,
    indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=128, indexer_budget=2048, indexer_compress_ratio=4,
    output_gate_type="sigmoid", eos_token_id=6, pad_token_id=6)
VISION = dict(depth=1, hidden_size=72, intermediate_size=128, num_heads=1, in_channels=3, patch_size=16, spatial_merge_size=2, temporal_patch_size=2,
              out_hidden_size=256, num_position_embeddings=576, hidden_act="gelu_pytorch_tanh")   # untrained: nano cannot see
IM_START, IM_END, EOT, THINK, END_THINK = 0, 1, 6, 7, 8
TOP = dict(tie_word_embeddings=False, image_token_id=4, video_token_id=5, vision_start_token_id=2, vision_end_token_id=3)
IDS = 2560   # the tokenizer fills the table


def published():
    """config.json of the checkpoint"""
    layers = TEXT["num_hidden_layers"]
    text = dict(TEXT, model_type="qwen4_exp_text", full_attention_interval=4, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, mamba_ssm_dtype="float32",
                layer_types=["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)], dtype="bfloat16", ple_embedding_dtype="float8_e4m3fn")
    return dict(architectures=["Qwen4ExpForConditionalGeneration"], model_type="qwen4_exp", **TOP, text_config=text, vision_config=dict(VISION, model_type="qwen4_exp", deepstack_visual_indexes=[]),
                quantization_config=dict(quant_method="modelopt", quant_algo="NVFP4", kv_cache_quant_algo=None))
