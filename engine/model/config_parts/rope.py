"""Reads the rotary embedding of each layer from config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from engine.model.checkpoint.fields import Fields, Unsupported, one_of

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional", "none"]
ROPE_TYPES = get_args(RopeType)[:-1]  # the last, for models without rotary embedding, is no type in config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One set of rotary frequencies. Fields after `factor` belong to one type each; see engine/model/layers/rope.py."""

    type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn, longrope)."""
    factors: tuple[float, ...] = ()
    """One for each wavelength (longrope)."""
    partial_rotary_factor: float = 1.0
    """Fraction of each head's values that is rotated; for every type."""


def read_ropes(raw: Fields, windows: tuple[int | None, ...], longest: int) -> tuple[RopeConfig, ...]:
    """Return the rotary embedding of each layer. longest: tokens of the longest sequence.

    transformers 5 writes `rope_parameters`, one set or one per layer type. Earlier versions wrote `rope_theta` with
    `rope_scaling`, and `rope_local_base_freq` for Gemma 3's layers with a window.
    """
    if raw.get("position_embedding_type", "rope") in (None, "nope"):
        return (RopeConfig(type="none"),) * len(windows)
    parameters = raw.get("rope_parameters") or Fields({})
    theta, local_theta = raw.get("rope_theta", 10_000.0), raw.get("rope_local_base_freq", 10_000.0)
    if "full_attention" in parameters or "sliding_attention" in parameters:
        full = _rope(parameters.get("full_attention") or Fields({}), theta, raw, longest)
        local = _rope(parameters.get("sliding_attention") or Fields({}), local_theta, raw, longest)
    else:
        full = _rope(raw.get("rope_scaling") or parameters, theta, raw, longest)
        local = RopeConfig(theta=raw["rope_local_base_freq"]) if "rope_local_base_freq" in raw else full
    return tuple(full if window is None else local for window in windows)


def _rope(parameters: Fields, theta: float, raw: Fields, longest: int) -> RopeConfig:
    """Read one set of parameters. For keys that it lacks, `theta` and the other fields of config.json are used."""
    partial = parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    proportional = parameters.get("rope_type") == "proportional"
    if partial != 1.0 and "partial_rotary_factor" not in raw and not proportional:  # the family rotates whole heads
        raise Unsupported("partial_rotary_factor", partial)
    return replace(_scaled_rope(parameters, theta, raw, longest), partial_rotary_factor=partial)


def _scaled_rope(parameters: Fields, theta: float, raw: Fields, longest: int) -> RopeConfig:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = one_of("rope_type", "longrope" if kind == "su" else kind, ROPE_TYPES)
    theta = parameters.get("rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(type="linear", theta=theta, factor=parameters["factor"])
    if kind == "proportional":
        one_of("factor", parameters.get("factor", 1.0), (1.0,))
        return RopeConfig(type="proportional", theta=theta)
    context = raw["max_position_embeddings"]
    stated = raw.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    original = stated or context
    if kind == "llama3":
        own = {key: parameters[key] for key in ("factor", "low_freq_factor", "high_freq_factor")}
        return RopeConfig(type="llama3", theta=theta, original_max_position_embeddings=original, **own)
    factor = parameters.get("factor") or context / original
    if kind == "longrope":
        return RopeConfig(
            type="longrope",
            theta=theta,
            original_max_position_embeddings=original,
            attention_factor=_longrope_attention_factor(parameters, factor, original),
            factors=tuple(parameters["long_factor" if longest > original else "short_factor"]),
        )
    return RopeConfig(
        type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        truncate=parameters.get("truncate", True),
        attention_factor=_yarn_attention_factor(parameters, factor),
    )


def _yarn_attention_factor(parameters: Fields, factor: float) -> float:
    """Return the attention factor of YaRN, arXiv:2309.00071, section 3.4. DeepSeek's is a quotient of two such
    factors."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    top, bottom = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return mscale(top) / mscale(bottom) if top and bottom else mscale(1.0)


def _longrope_attention_factor(parameters: Fields, factor: float, original: int) -> float:
    """Return the attention factor of LongRoPE, arXiv:2402.13753, as in Phi-3, arXiv:2404.14219."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def max_positions(stated: int, ropes: tuple[RopeConfig, ...]) -> int:
    """Return the context that YaRN extends to, or the stated one if larger. Qwen states the original context."""
    reached = [int(r.factor * r.original_max_position_embeddings) for r in ropes if r.type == "yarn"]
    return max([stated, *reached])


def check_factors(ropes: tuple[RopeConfig, ...], head_dim: int) -> None:
    for rope in ropes:
        if rope.type == "longrope" and len(rope.factors) != int(head_dim * rope.partial_rotary_factor) // 2:
            raise Unsupported("short_factor or long_factor", list(rope.factors))
