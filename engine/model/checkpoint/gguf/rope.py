"""Rotary scaling of GGUF files."""

from __future__ import annotations

from collections.abc import Callable

from engine.model.checkpoint.gguf.keys import Fields, GGUFError
from engine.model.checkpoint.gguf.source import GGUFSource


def rope_fields(source: GGUFSource, yarn: Callable[[GGUFSource], Fields] | None) -> Fields:
    """Return the fields of a rotary embedding that all layers share. yarn: reads fields of YaRN that only few families
    have."""
    return {
        "rope_theta": source.keys.number("rope.freq_base", 10_000.0),
        "rope_scaling": _scaling(source, yarn),
    }


def _scaling(source: GGUFSource, yarn: Callable[[GGUFSource], Fields] | None) -> Fields | None:
    """Return the rotary scaling. Rotary factors in the file are read as factors of `longrope`, even if they were
    computed by Llama 3's rule."""
    keys, factors = source.keys, source.factors
    context = keys.size("context_length")
    original = keys.size("rope.scaling.original_context_length", context)
    if same := factors.get("rope_freqs.weight"):
        return {
            "rope_type": "longrope", "short_factor": same, "long_factor": same, "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }  # fmt: skip
    if long := factors.get("rope_factors_long.weight"):
        scaling = {
            "rope_type": "longrope", "short_factor": factors["rope_factors_short.weight"], "long_factor": long,
            "original_max_position_embeddings": original,
        }  # fmt: skip
        factor = keys.get("rope.scaling.attn_factor")
        return scaling if factor is None else scaling | {"attention_factor": factor}
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise GGUFError(f"{keys.prefix}.rope.scaling.type = {kind!r} is not supported: must be none, linear or yarn")
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling |= {"original_max_position_embeddings": original, "truncate": keys.prefix != "gpt-oss"}
        for name in ("beta_fast", "beta_slow"):
            if (value := keys.get(f"rope.scaling.yarn_{name}")) is not None:
                scaling[name] = value
        if yarn is not None:
            scaling |= yarn(source)
    return scaling


def deepseek_yarn(source: GGUFSource) -> Fields:
    """Return YaRN's fields of DeepSeek, where the file states a tenth of `mscale_all_dim`. `mscale` is taken to be
    equal, as in all published models."""
    weight = source.keys.get("rope.scaling.yarn_log_multiplier")
    if weight is None:
        return {}
    weight = source.keys.number("rope.scaling.yarn_log_multiplier") * 10
    return {"mscale": weight, "mscale_all_dim": weight}


def ministral_yarn(source: GGUFSource) -> Fields:
    """Return YaRN's fields of Ministral 3. `mscale` is taken to be 1, as in llama.cpp."""
    keys = source.keys
    weight = keys.get("rope.scaling.yarn_log_multiplier")
    return {
        **({} if weight is None else {"mscale": 1.0, "mscale_all_dim": weight}),
        "llama_4_scaling_beta": keys.number("attention.temperature_scale"),
    }
