"""Rotary position embedding, arXiv:2104.09864, with the context extensions that models ship with.

Formulas and their float32 order of operations follow transformers' modeling_rope_utils.py, so that results match.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from engine.model.config_parts.rope import RopeConfig


@lru_cache(maxsize=8)  # layers share a table, as do models of one kind
def rope_table(rope: RopeConfig, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [positions, rotary_dim]: cosines of all frequencies, then sines, computed in float32, then rounded."""
    angles = torch.outer(torch.arange(positions, device=device).float(), inverse_frequencies(rope, head_dim).to(device))
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor).to(dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return [rotary_dim / 2] float32 on the CPU, radians per token. rotary_dim: rotated part of head_dim."""
    if rope.type == "proportional":  # Gemma 4 rotates whole heads, and sets the last frequencies to 0
        kept = int(head_dim * rope.partial_rotary_factor) // 2
        frequencies = inverse_frequencies(RopeConfig(theta=rope.theta), head_dim)
        return torch.cat((frequencies[:kept], torch.zeros_like(frequencies[kept:])))
    rotary_dim = int(head_dim * rope.partial_rotary_factor)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    if rope.type == "none":
        return torch.zeros_like(exponents)
    wavelengths = rope.theta**exponents
    if rope.type == "linear":
        return 1.0 / wavelengths / rope.factor
    if rope.type == "llama3":
        return _llama3(1.0 / wavelengths, rope)
    if rope.type == "yarn":
        return _yarn(wavelengths, rope, rotary_dim)
    if rope.type == "longrope":  # LongRoPE, arXiv:2402.13753: one factor for each wavelength
        return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32, device="cpu") * wavelengths)
    return 1.0 / wavelengths


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, interpolate between: Llama 3.1, arXiv:2407.21783."""
    context = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def _yarn(wavelengths: Tensor, rope: RopeConfig, rotary_dim: int) -> Tensor:
    """Interpolate dimensions that turn fewer than `beta_slow` times over the original context, keep those that turn
    more than `beta_fast` times, with a ramp between: arXiv:2309.00071, section 3.2.

    wavelengths: [rotary_dim / 2] float32 -> frequencies, [rotary_dim / 2] float32, radians per token."""

    def dimension(turns: float) -> float:
        context = rope.original_max_position_embeddings
        return rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return ramp / (rope.factor * wavelengths) + (1 - ramp) / wavelengths
