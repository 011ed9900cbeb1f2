"""Moves rotary embedding (see engine/model/ops/rope.py) from transformers' function into the kernel that writes keys.

transformers' layers call `apply_rotary_pos_emb` of their module, and most pass its results straight to attention. A
trial finds the layers that do so and whose function computes what our kernel does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from engine.model.ops.rope import rotate_plain

NAME = "apply_rotary_pos_emb"
Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""q [1, heads, tokens, head_dim], k, cos and sin [1, tokens, rotary_dim] -> q and k rotated."""


def replace_rotation(module: nn.Module, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Make this one module call `function` to rotate, if it rotates. Its first argument is transformers' function."""
    forward: Any = type(module).forward
    if not isinstance(forward, FunctionType) or NAME not in forward.__code__.co_names:
        return
    known = forward.__globals__ | {NAME: partial(function, forward.__globals__[NAME])}
    own = FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(own, module)


@cache
def is_plain(function: Rotate, head_dim: int, rotary_dim: int) -> bool:
    """Return whether a function of transformers rotates as our kernels do. Found by trying."""
    generator = torch.Generator("cpu").manual_seed(0)
    q, k = (torch.randn(1, n, 3, head_dim, generator=generator, dtype=torch.float32, device="cpu") for n in (4, 2))
    cos, sin = torch.rand(2, 3, rotary_dim // 2, generator=generator, dtype=torch.float32, device="cpu")
    table, positions = torch.cat((cos, sin), dim=-1), torch.arange(3, device="cpu")
    try:
        theirs = function(q.clone(), k.clone(), *(torch.cat((x, x), dim=-1)[None] for x in (cos, sin)))
    except RuntimeError:  # shapes of another kind
        return False
    ours = (rotate_plain(x[0].transpose(0, 1), table, positions).transpose(0, 1)[None] for x in (q, k))
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(theirs, ours, strict=True))
