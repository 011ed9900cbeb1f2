"""The activations that only some families have, beside those of ops/activation.py.

`relu2` has no gate: [tokens, n] -> [tokens, n].
`swigluoai` (vLLM's name) is gpt-oss's, arXiv:2508.10925: gate and value alternate, and both are clamped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.config_parts.moe import SWIGLU_ALPHA, SWIGLU_LIMIT
from engine.model.ops import activation, dispatch


def swigluoai_mul(x: Tensor) -> Tensor:
    gate, value = x[..., ::2].clamp(max=SWIGLU_LIMIT), x[..., 1::2].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (value + 1)


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {**activation.PLAIN, "swigluoai": swigluoai_mul, "relu2": relu2}


def select(name: str, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the fastest version of the activation that config.json names."""
    return dispatch.fastest(PLAIN[name], dtype, device, cpu="activation", gpu="activation")
