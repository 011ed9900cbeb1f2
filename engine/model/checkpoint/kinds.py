"""The values that fields of config.json may have, whatever family reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_NUMBER = 1e30
INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class Kind:
    """Values that a field may have. Of lists, these are the entries."""

    types: tuple[type, ...]
    limit: str
    least: float = -MAX_NUMBER
    most: float = MAX_NUMBER
    null: bool = False
    lists: bool = False
    """Whether the value is a list."""
    alone: bool = True
    """Whether the value may be no list."""
    most_entries: int = 1 << 16
    names: tuple[str, ...] = field(default=(), kw_only=True)

    def accepts(self, value: Any) -> bool:
        if value is None:
            return self.null
        if isinstance(value, list | tuple):
            return self.lists and len(value) <= self.most_entries and all(map(self._accepts, value))
        return self.alone and self._accepts(value)

    def _accepts(self, value: Any) -> bool:
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            return False
        return not isinstance(value, int | float) or self.least <= value <= self.most


def _whole(least: int, most: int, names: str, **options: Any) -> Kind:
    entries = "a list of whole numbers" if options.get("lists") else "a whole number"
    return Kind((int,), f"{entries} from {least:,} to {most:,}", least, most, names=tuple(names.split()), **options)


def _number(least: float, most: float, names: str, **options: Any) -> Kind:
    entries = "a list of numbers" if options.get("lists") else "a number"
    limit = f"{entries} from {least:g} to {most:g}"
    return Kind((int, float), limit, least, most, names=tuple(names.split()), **options)


def _other(types: type | tuple[type, ...], limit: str, names: str, **options: Any) -> Kind:
    return Kind(types if isinstance(types, tuple) else (types,), limit, names=tuple(names.split()), **options)


TINY, SIZE, COUNT, LAYERS = 1e-30, 1 << 28, 1 << 16, 1 << 12
NULL: dict[str, Any] = {"null": True}
LIST: dict[str, Any] = {"lists": True, "alone": False, "null": True}
KINDS: dict[str, Kind] = {
    name: kind
    for kind in (
        _whole(1, LAYERS, "num_hidden_layers num_layers"),
        _whole(
            1, COUNT,
            "num_attention_heads index_n_heads linear_num_key_heads linear_num_value_heads num_heads mamba_n_heads "
            "mamba_num_heads mamba_n_groups n_groups conv_kernel linear_conv_kernel_dim short_conv_kernel_size "
            "conv_L_cache mamba_d_conv moe_topk decoder_sparse_step global_attn_every_n_layers num_experts_per_tok "
            "num_experts_per_token altup_num_inputs block_multiple_of mamba_expand num_labels spatial_merge_size",
        ),
        _whole(
            1, COUNT,
            "num_key_value_heads num_global_key_value_heads sliding_window_pattern full_attention_interval "
            "top_k_experts", **NULL,
        ),
        _whole(
            0, COUNT,
            "num_experts num_local_experts n_routed_experts n_shared_experts num_shared_experts n_group topk_group "
            "num_expert_group zero_expert_num num_nextn_predict_layers mtp_num_hidden_layers index_topk_freq", **NULL,
        ),
        _whole(
            0, COUNT,
            "first_k_dense_replace num_dense_layers num_kv_shared_layers max_window_layers index_skip_topk_offset "
            "altup_active_idx type_vocab_size pad_token_id",
        ),
        _whole(
            1, SIZE,
            "hidden_size vocab_size global_head_dim index_head_dim max_position_embeddings model_max_length "
            "linear_key_head_dim linear_value_head_dim mamba_d_state mamba_head_dim ssm_state_size qk_nope_head_dim "
            "qk_rope_head_dim v_head_dim local_attention vocab_size_per_layer_input laurel_rank block_ff_dim "
            "ffn_hidden_size expert_ffn_hidden_size "
            "mm_tokens_per_image vision_soft_tokens_per_image target_hidden_size in_features out_features",
        ),
        _whole(1, SIZE, "head_dim original_max_position_embeddings dim_model_base draft_vocab_size embedding_dim "
               "truncated_vocab_size max_seq_length", **NULL),
        _whole(
            0, SIZE,
            "shared_expert_intermediate_size shared_intermediate_size moe_latent_size "
            "moe_shared_expert_intermediate_size kv_lora_rank q_lora_rank hidden_size_per_layer_input sliding_window "
            "mamba_d_ssm index_topk sliding_window_size image_token_id image_token_index", **NULL,
        ),
        _whole(0, SIZE, "moe_intermediate_size idx true_token_id"),
        _whole(0, SIZE, "false_token_id", **NULL),
        _whole(0, SIZE, "intermediate_size", lists=True),
        _whole(0, SIZE, "eos_token_id", lists=True, null=True),
        _whole(0, SIZE, "matryoshka_dimensions mrope_section deepstack_visual_indexes", **LIST),
        _whole(0, LAYERS, "mlp_only_layers attn_layer_indices full_attn_idxs full_attn_layers "
               "hybrid_layer_pattern moe_layer_freq eagle_aux_hidden_state_layer_ids", **LIST),
        _number(TINY, MAX_NUMBER, "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps "
                "rope_theta rope_local_base_freq global_rope_theta swa_rope_theta factor low_freq_factor "
                "high_freq_factor logits_scaling block_ffn_dim_multiplier"),
        _number(TINY, MAX_NUMBER, "local_rope_theta beta_fast beta_slow query_pre_attn_scalar", **NULL),
        _number(TINY, 1.0, "partial_rotary_factor", **NULL),
        _number(-1e6, 1e6, "embedding_multiplier residual_multiplier lm_head_multiplier key_multiplier "
                "attention_in_multiplier attention_out_multiplier ssm_in_multiplier ssm_out_multiplier "
                "swiglu_alpha scale_emb"),
        _number(-1e6, 1e6, "attention_multiplier scale_depth mscale mscale_all_dim attention_factor swiglu_limit "
                "routed_scaling_factor attention_value_scale",
                **NULL),
        _number(0, 1e6, "attn_logit_softcapping final_logit_softcapping", **NULL),
        _number(-1e6, 1e6, "mlp_multipliers ssm_multipliers activation_sparsity_pattern", **LIST),
        _number(0, INFINITE, "time_step_limit", **LIST),
        _number(TINY, MAX_NUMBER, "short_factor long_factor", **LIST),
        _other(bool, "true or false", "use_sliding_window enable_moe_block mamba_conv_bias use_conv_bias conv_bias "
               "mamba_rms_norm mamba_norm_before_gate use_bias rope_interleave norm_topk_prob moe_renormalize "
               "norm_bias classifier_bias tie_embedding truncate altup_correct_scale is_decoder bias include_prompt "
               "use_residual"),
        _other(bool, "true or false", "attention_bias mlp_bias qkv_bias tie_word_embeddings use_qk_norm "
               "mamba_proj_bias projectors_bias use_double_wide_mlp attention_k_eq_v block_auto_adjust_ff_dim "
               "norm_before_residual original_lm_head", **NULL),
        _other((bool, str), "true, false or 'vision'", "use_bidirectional_attention", **NULL),
        _other(str, "a text", "hidden_act model_type classifier_pooling path activation_function module_input_name"),
        _other(str, "a text", "hidden_activation dtype torch_dtype position_embedding_type topk_method rope_type type "
               "hybrid_override_pattern activation_fn problem_type sbert_ce_default_activation_function "
               "default_prompt_name", **NULL),
        _other((int, str), "'auto' or a whole number", "mamba_d_head"),
        _other(str, "a list of texts", "architectures", **LIST),
        _other(str, "a list of texts, one for each layer", "layer_types layers_block_type mlp_layer_types "
               "indexer_types", **LIST, most_entries=LAYERS),
        _other(str, "a text or a list of texts, one for each layer", "index_topk_pattern", lists=True, null=True),
        _other(dict, "an object", "rope_parameters rope_scaling linear_attn_config per_layer_config text_config "
               "vision_config quantization_config compression_config full_attention sliding_attention id2label "
               "sentence_transformers transformer_layer_config eagle_config prompts", **NULL),
    )
    for name in kind.names
}  # fmt: skip


def exceeded(key: str, value: Any) -> str:
    """Return the limit of a field that a value exceeds; empty if it may have the value."""
    kind = KINDS.get(key)
    return "" if kind is None or kind.accepts(value) else kind.limit
