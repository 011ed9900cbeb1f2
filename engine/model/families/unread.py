"""Refuses fields of config.json that would change the result and that nobody reads.

transformers' configuration class of a family says which fields there are: one that it declares, whose value is another
than its default, and that was not read, would be computed otherwise than the file says. Models that transformers' own
code computes are not checked, since that code reads their fields.
"""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from engine.model.checkpoint.fields import Fields, Unsupported
from engine.model.config_parts.moe import MoEConfig
from engine.model.config_parts.rope import RopeConfig
from engine.model.families.family import HEADS

logger = logging.getLogger(__name__)
DECLARED = Path(__file__).with_name("declared_fields.json")
"""Written by tools/config_fields.py: for each class, its fields with their defaults."""
COMMON = "PreTrainedConfig"
"""The class whose fields all have: names, labels and what `forward` returns."""
MAX_NAMED = 20
# Fields that do not change what is computed, by the reason.
HARMLESS: dict[str, frozenset[str]] = {
    "only in training": frozenset({
        "attention_dropout", "attention_probs_dropout_prob", "classifier_dropout", "embd_pdrop", "embedding_dropout",
        "hidden_dropout", "hidden_dropout_prob", "mlp_dropout", "resid_pdrop", "altup_coef_clip", "initializer_range",
        "initializer_cutoff_factor", "output_router_logits", "rescale_prenorm_residual", "router_aux_loss_coef",
        "router_jitter_noise", "sparse_prediction", "sparse_pred_ignore_index", "time_step_floor", "time_step_max",
        "z_loss_coefficient",
    }),
    "how it is computed, not what": frozenset({
        "chunk_size", "deterministic_flash_attn", "mamba_chunk_size", "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap", "num_logits_to_keep", "pretraining_tp", "residual_in_fp32", "use_cache",
        "use_mamba_kernels",
    }),
    "the tokenizer adds these tokens": frozenset({"bos_token_id", "cls_token_id", "pad_token_id", "sep_token_id"}),
    "only in a head that is not loaded": frozenset({
        "classifier_pooling", "decoder_bias", "mtp_layers_block_type", "num_mtp_layers", "num_nextn_predict_layers",
    }),
}  # fmt: skip
# Fields that a family's class declares, although its model does not use them.
UNUSED: dict[str, frozenset[str]] = {
    "NemotronHForCausalLM": frozenset({"expand", "mamba_proj_bias", "n_shared_experts", "sliding_window"}),
}
# Fields that mean nothing where another is set.
REPLACED = {
    "attn_layer_indices": "layer_types",
    "full_attn_idxs": "layer_types",
    "intermediate_size": "shared_intermediate_size",
    "layer_types": "layers_block_type",
    "layers_block_type": "layer_types",
    "mamba_expand": "mamba_d_ssm",
    "max_window_layers": "layer_types",
}
WINDOWS = ("sliding_window", "max_window_layers")
LAYERS = ("full_attention", "sliding_attention")
EXPERTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "num_experts_per_token",
    "top_k_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size",
    "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "n_shared_experts", "decoder_sparse_step",
    "mlp_only_layers",
)  # fmt: skip
RECURRENT = ("mamba_", "linear_", "conv_", "time_step_", "ssm_")  # beginnings of names
# Written into config.json by transformers or its users; none belongs to a class.
NOTES = frozenset({
    "_name_or_path", "auto_map", "model_type", "torch_dtype", "quantization_config", "compression_config",
    "sentence_transformers", "matryoshka_dimensions", "text_config", "vision_config", "rope_theta", "rope_scaling",
})  # fmt: skip


class Model(Protocol):
    """What was read, of which some fields mean nothing in some models: a ModelConfig."""

    @property
    def architecture(self) -> str: ...
    @property
    def moe(self) -> MoEConfig | None: ...
    @property
    def recurrent(self) -> object | None: ...
    @property
    def latent(self) -> object | None: ...
    @property
    def rope(self) -> tuple[RopeConfig, ...]: ...
    @property
    def window(self) -> tuple[int | None, ...]: ...


@cache
def declared_fields() -> dict[str, dict[str, Any]]:
    """Return the fields and their defaults, by architecture; those of a text part by its model_type."""
    tables: dict[str, dict[str, Any]] = json.loads(DECLARED.read_text())
    return tables


def check_unread(whole: Fields, fields: Fields, cfg: Model, folder: Path) -> None:
    """Raise Unsupported for a field that should have been read. Warn of fields that no class declares.

    whole: the contents of config.json. fields: those of the text part, of which `cfg` was made.
    """
    tables, part = declared_fields(), whole.get("text_config") if fields is not whole else None
    declared = tables.get(fields.get("model_type", "")) or tables[_class_of(cfg.architecture)]
    own = {key: value for key, value in fields.items() if key in (part or whole) and key not in fields.used}
    if part:
        own.pop("tie_word_embeddings", None)  # the whole model's counts
    for key, value in own.items():
        if key in declared and not _equal(value, declared[key]) and not _is_harmless(key, value, fields, cfg):
            shown = json.dumps(declared[key])
            raise Unsupported(key, value, f"{shown}, as nothing else is computed for {cfg.architecture}")
    given = {key for key, value in own.items() if value is not None}
    others = sorted(given - declared.keys() - tables[COMMON].keys() - NOTES)
    if others:
        _warn(str(folder), ", ".join(others[:MAX_NAMED]) + (", …" if len(others) > MAX_NAMED else ""))


def _class_of(architecture: str) -> str:
    """Return the declared architecture to which a base model or a model with a score head belongs."""
    base = architecture.removesuffix(next(filter(architecture.endswith, HEADS), "")).removesuffix("ForCausalLM")
    return f"{base}ForCausalLM" if f"{base}ForCausalLM" in declared_fields() else f"{base}Model"


def _equal(value: Any, default: Any) -> bool:
    return value == default or (not value and not default)


def _is_harmless(key: str, value: Any, fields: Fields, cfg: Model) -> bool:
    """Return whether a field means nothing in this model."""
    if any(key in names for names in HARMLESS.values()) or key in UNUSED.get(cfg.architecture, ()):
        return True
    plain = isinstance(value, list) and all(kind in LAYERS for kind in value)
    if key == "layer_types" and plain and not any(cfg.window):
        return True
    if (other := REPLACED.get(key)) in fields.used and dict.get(fields, other):
        return True
    if key in EXPERTS:
        return cfg.moe is None or value == cfg.moe.num_experts  # under another name
    if key.startswith(RECURRENT):
        return cfg.recurrent is None
    if key in WINDOWS:
        return not any(cfg.window)
    if key in ("num_key_value_heads", "layer_types"):
        return cfg.latent is not None  # it has one of a kind
    types = {rope.type for rope in cfg.rope}
    if key == "original_max_position_embeddings":
        return types <= {"default", "none"}
    return key == "rope_parameters" and types == {"none"}


@cache
def _warn(folder: str, names: str) -> None:
    """Say it once in a process."""
    logger.warning("model %r: config.json has fields that are not used: %s", folder, names)
