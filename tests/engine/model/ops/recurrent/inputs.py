"""Inputs of linear attention, of each kind that there is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.state import CHUNK, StateSpec

K_HEADS, HEADS, D_K, D_V, EPS = 2, 4, 16, 32, 1e-6
KINDS = ("gated delta rule", "a decay per channel", "without delta rule")


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None
    eps: float | None

    def rows(self, first: int, last: int) -> Inputs:
        return Inputs(*(x[first:last] if isinstance(x, Tensor) else x for x in self))

    def beside(self, other: Inputs) -> Inputs:
        both = zip(self, other, strict=True)
        return Inputs(*(torch.cat((a, b)) if isinstance(a, Tensor) else a for a, b in both))


def inputs(kind: str, tokens: int, dtype: torch.dtype, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator)

    channels = D_K if kind == "a decay per channel" else 1
    k_heads = HEADS if kind == "a decay per channel" else K_HEADS
    decay = -0.3 * noise(HEADS, channels).abs()
    q, k, v = (noise(*shape).to(dtype) for shape in ((k_heads, D_K), (k_heads, D_K), (HEADS, D_V)))
    if kind == "without delta rule":
        return Inputs(q, k, v, decay, None, None)
    return Inputs(q, k, v, decay, noise(HEADS).sigmoid(), EPS)


def spec_of(x: Inputs) -> StateSpec:
    f32, k_heads, channels = "float32", x.k.shape[1], x.decay.shape[2]
    return StateSpec(
        {"state": ((HEADS, D_K, D_V), f32)},
        {
            "keys": ((k_heads, CHUNK, D_K), f32),
            "values": ((HEADS, CHUNK, D_V), f32),
            "decays": ((HEADS, CHUNK, channels), f32),
        },
    )
