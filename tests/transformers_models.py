"""Tiny models with random weights of the architectures that transformers' own code computes, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file

from tests.models import COMMON, EOS, LATENT, randomise

# Fields of experts and windows; a configuration class takes those that it knows.
MORE: dict[str, Any] = {
    "sliding_window": 8,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA4 = {
    "intermediate_size_mlp": 80,
    "attention_chunk_size": 8,
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    "no_rope_layers": [1, 0, 1],
    "interleave_moe_layer_step": 2,
}
# What makes a model of an architecture tiny, or brings out what is special about it.
SPECIAL: dict[str, dict[str, Any]] = {
    "CohereForCausalLM": {"use_qk_norm": False, "logit_scale": 0.5},
    "Cohere2ForCausalLM": {"layer_types": LAYERS},
    "GPT2LMHeadModel": {"n_inner": 80},
    "GPTBigCodeForCausalLM": {"n_inner": 80},
    "HeliumForCausalLM": {"head_dim": 12},
    "Llama4ForCausalLM": LLAMA4,
    "MiniMaxM2ForCausalLM": {"intermediate_size": 32},
    "OPTForCausalLM": {"ffn_dim": 80, "word_embed_proj_dim": 48},
    "ModernBertDecoderForCausalLM with a tied head": {"tie_word_embeddings": True},
    "Olmo3ForCausalLM": {"layer_types": LAYERS},
    "SmolLM3ForCausalLM with a dynamic rope": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    },
    "VaultGemmaForCausalLM": {"layer_types": LAYERS, "attn_logit_softcapping": 2.0},
}
TEXT_PARTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "Gemma3TextConfig",
        {"sliding_window": 8, "layer_types": LAYERS, "query_pre_attn_scalar": 24},
        {"vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                           "num_attention_heads": 2, "image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4},
    ),
    **{
        f"{name}ForConditionalGeneration": (
            "LlamaConfig",
            {},
            {"vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                               "num_attention_heads": 2, "image_size": 28, "patch_size": 14}, "scale_factor": 2},
        )
        for name in ("Idefics3", "SmolVLM")
    },
    "InternVLForConditionalGeneration": (
        "Qwen3Config",
        {},
        {"vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                           "num_attention_heads": 2, "image_size": [28, 28], "patch_size": [14, 14]}},
    ),
    "Kimi_K25ForConditionalGeneration": (
        "DeepseekV3Config",
        {**LATENT, "head_dim": 8, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
        {"vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                           "num_attention_heads": 2, "patch_size": 14, "pos_emb_height": 4, "pos_emb_width": 4,
                           "pos_emb_time": 1}, "projection_hidden_size": 16, "tie_word_embeddings": False},
    ),
    "Llama4ForConditionalGeneration": (
        "Llama4TextConfig",
        {**LLAMA4, "num_local_experts": 6},
        {"vision_config": {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1,
                           "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_output_dim": 16,
                           "projector_input_dim": 16, "projector_output_dim": 16}},
    ),
    **{
        f"LlavaNextForConditionalGeneration with {name}": (
            f"{name}Config",
            {"sliding_window": None},
            {"vision_config": {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16,
                               "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
                               "projection_dim": 16}},
        )
        for name in ("Llama", "Mistral", "Qwen2")
    },
    "Mistral3ForConditionalGeneration": (
        "Ministral3Config",
        {},
        {"vision_config": {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16,
                           "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
                           "head_dim": 8}},
    ),
    "Mistral3ForConditionalGeneration with Mistral": (
        "MistralConfig",
        {"sliding_window": None},
        {"vision_config": {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16,
                           "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
                           "head_dim": 8}},
    ),
    "Qwen2VLForConditionalGeneration": (
        "Qwen2VLTextConfig",
        {"head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}},
        {"vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2}},
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VLTextConfig",
        {"head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}},
        {"vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
                           "out_hidden_size": 48}},
    ),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3VLTextConfig",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
        {"vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
                           "out_hidden_size": 48, "deepstack_visual_indexes": []}},
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "Qwen3VLMoeTextConfig",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
         "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
        {"vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
                           "out_hidden_size": 48, "deepstack_visual_indexes": []}},
    ),
}  # fmt: skip


def make_transformers_model(folder: Path, architecture: str, **overrides: Any) -> Path:
    """Write a model of `architecture` (of engine/model/families/, or SPECIAL) and return its folder."""
    config = transformers_config(architecture, **overrides)
    model = getattr(transformers, architecture.split()[0])(config).eval()
    randomise(model, tied=bool(config.tie_word_embeddings), seed=0)
    model.generation_config = transformers.GenerationConfig(eos_token_id=EOS, pad_token_id=0)
    model.save_pretrained(folder)
    if architecture.startswith("Kimi_K25"):
        as_published(folder / "model.safetensors")
    return folder


def as_published(file: Path) -> None:
    """Rename the layers of Kimi K2.5's text part, which transformers 5.23 reads as `layers` and writes as `blocks`."""
    tensors = {name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
               for name, tensor in load_file(file).items()}  # fmt: skip
    save_file(tensors, file, {"format": "pt"})


def transformers_config(architecture: str, **overrides: Any) -> Any:
    """Return the configuration of such a model."""
    cls = getattr(transformers, architecture.split()[0])
    if architecture in TEXT_PARTS:
        text_class, text, rest = TEXT_PARTS[architecture]
        text = known_fields(getattr(transformers, text_class), {**COMMON, **text, **overrides})
        return cls.config_class(text_config=getattr(transformers, text_class)(**text).to_dict(), **rest)
    fields = {**COMMON, **MORE, **SPECIAL.get(architecture, {}), **overrides}
    return cls.config_class(**known_fields(cls.config_class, fields))


def known_fields(cls: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Those of `fields` that a configuration class has, under its own names."""
    names = set(cls.__dataclass_fields__)
    others = cls.attribute_map or {}
    own = {name if name in names else others.get(name, name): value for name, value in fields.items()}
    return {name: value for name, value in own.items() if name in names}
