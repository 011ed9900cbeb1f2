"""Attention of transformers' models over the paged KV cache, and the trial forward pass that shows how they call it.

transformers calls the attention function registered as `_attn_implementation`, with queries and keys that are rotated
or still to be rotated (rope.py). In a trial, on the meta device, that function is `record`, and masks are `Mask`s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.ops import attention
from engine.model.shard import ShardPlan
from engine.model.transformers_backend.rope import Rotate, is_plain

NAME, TRIAL = "manta", "manta_trial"
USED = ("scaling", "sliding_window", "softcap", "s_aux")
# Keywords that do not affect the result of attention in inference.
WITHOUT_EFFECT = (
    "dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits",
    "cache_position",
)  # fmt: skip


class AttentionError(Exception):
    """Raised when a model's attention needs something that is not supported. Its message becomes the reason of an
    UnsupportedArchitecture."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The tokens that a token sees besides itself: all before it, or only those in its `window`, or in its `chunk`."""

    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One layer's call of attention in the trial."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: Mask
    rotated: bool
    """Whether queries and keys are direct results of an `apply_rotary_pos_emb` that our kernel can replace."""


class CurrentStep:
    """The current step, shared by all layers of a model."""

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        self._symmetric: bool | None = None

    def begin(self, batch: Batch) -> None:
        rows = torch.arange(len(batch.positions), device=batch.positions.device)
        self.batch = replace(batch, positions=rows)  # tables have the angles of each row of the step
        self._tables.clear()

    def table(self, cos: Tensor, sin: Tensor) -> Tensor | None:
        """Return cosines and sines as our kernels read them, [tokens, rotary_dim]; None if halves of cos or sin differ.
        cos, sin: transformers' tables, [1, tokens, rotary_dim]."""
        if id(cos) not in self._tables:  # layers of one kind are given the same tensors
            if self._symmetric is None:  # in the first step, before any graph is captured
                self._symmetric = all(torch.equal(*x.chunk(2, dim=-1)) for x in (cos, sin))
            half = cos.shape[-1] // 2
            self._tables[id(cos)] = cos, torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
        return self._tables[id(cos)][1] if self._symmetric else None

    def no_rotation(self, q: Tensor) -> Tensor:
        """Return a table [tokens, head_dim] that leaves q [1, heads, tokens, head_dim] unchanged."""
        if 0 not in self._tables:
            table = q.new_zeros(q.shape[2], q.shape[3])
            table[:, : q.shape[3] // 2] = 1
            self._tables[0] = table, table
        return self._tables[0][1]


class PagedAttention:
    """Paged attention of one layer: q [1, heads, tokens, head_dim] and k, v [1, kv_heads, tokens, head_dim] ->
    [1, tokens, heads, head_dim].

    If the model computes all heads on each rank, a rank attends with its own heads and gathers the other heads from the
    other ranks.
    """

    def __init__(
        self, call: Call, cfg: ModelConfig, tp: ShardPlan, step: CurrentStep, dtype: torch.dtype, device: torch.device
    ):
        self.mask, self.tp, self.step = call.mask, tp, step
        self.group, self.layer = cfg.kv_place(call.layer)
        self.ops = attention.select(dtype, device)
        self.table: Tensor | None = None
        """Cosines and sines with which the next call rotates q and k; None if they are rotated already."""
        self.heads, self.kv_heads = cfg.num_heads // tp.size, cfg.kv_heads_per_rank(tp.size)
        self.first_head, self.first_kv_head = tp.rank * self.heads, tp.rank * cfg.num_kv_heads // tp.size
        self.scale = cfg.attention_scale

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        batch = self.step.batch
        assert batch is not None, "attention outside of a step"
        batch = batch.of_group(self.group)
        gather, first = q.shape[1] > self.heads, self.first_head
        table, self.table = self.step.no_rotation(q) if self.table is None else self.table, None
        q = self._rows(q, first, self.heads)
        k, v = (self._rows(x, self.first_kv_head, self.kv_heads) for x in (k, v))
        q = self.ops.rotate_and_write(q, k, v, table, batch, self.layer)
        sinks = None if sinks is None else sinks[first : first + self.heads]
        given = {"softcap": softcap, "sinks": sinks, "chunk": self.mask.chunk}
        more = {name: value for name, value in given.items() if value is not None}
        scale = self.scale if scaling is None else scaling
        out = self.ops.paged_attention(q, batch, self.layer, scale, self.mask.window, **more)
        if gather:
            out = self.tp.ranks.all_gather(out.flatten(1)).unflatten(1, (-1, out.shape[2]))
        return out[None]

    def rotate_later(self, theirs: Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k unrotated, and let our kernel rotate them. Replaces `theirs`, if only this attention uses its
        result."""
        table = self.step.table(cos, sin) if cos.dtype == q.dtype else None
        if table is None:
            return theirs(q, k, cos, sin)
        self.table = table
        return q, k

    @staticmethod
    def _rows(x: Tensor, first: int, count: int) -> Tensor:
        """Return `count` heads of x [1, heads, tokens, head_dim], from `first` on: [tokens, count, head_dim]. Each
        token's values are contiguous."""
        if x.shape[1] > count:
            x = x[:, first : first + count]
        x = x[0].transpose(0, 1)
        dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
        return x if dense else x.contiguous()


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Implement transformers' attention interface. The trial has checked the keywords."""
    return module.paged_attention(query, key, value, scaling, softcap, s_aux), None  # type: ignore[operator]


class Trial:
    """A record of how each module calls attention. A process runs one trial at a time."""

    calls: dict[nn.Module, Call]
    rotated: tuple[Tensor, Tensor] | None = None
    """Queries and keys of the last rotation, if our kernel can replace it."""


_trial = Trial()


def record_rotation(
    theirs: Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys in a trial, and note whether our kernel can replace this rotation."""
    rotated = theirs(q, k, cos, sin, *more)
    plain = not more and cos.dim() == 3 and is_plain(theirs, q.shape[-1], cos.shape[-1])
    _trial.rotated = rotated if plain else None
    return rotated


def record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **kwargs: Any
) -> tuple[Tensor, None]:
    """Record and check a call of attention in a trial; return a result of the right shape without values.

    query: [1, heads, tokens, head_dim]; key, value: [1, kv_heads, tokens, head_dim] -> [1, tokens, heads, head_dim].
    """
    for name, given in kwargs.items():
        if given is not None and name not in USED + WITHOUT_EFFECT and (name, given) != ("is_causal", True):
            raise AttentionError(f"its attention has the keyword {name!r}, which is not known here")
    if not getattr(module, "is_causal", True):
        raise AttentionError("its attention is not causal")
    if not isinstance(attention_mask, Mask):
        raise AttentionError("its attention mask is neither causal nor a window nor a chunk")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise AttentionError("its keys and values differ in size")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise AttentionError("its attention does not say which layer it belongs to")
    if module in _trial.calls:
        raise AttentionError("a layer attends twice")
    mask = attention_mask
    if (window := kwargs.get("sliding_window")) is not None and mask.window is None and mask.chunk is None:
        mask = Mask(window=int(window))
    rotated = _trial.rotated is not None and query is _trial.rotated[0] and key is _trial.rotated[1]
    _trial.calls[module] = Call(layer, query.shape[1], key.shape[1], query.shape[3], mask, rotated)
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3]), None


class WithValues(TorchFunctionMode):
    """Replaces tensors on the meta device by zeros. Mask functions read values from tensors, which meta tensors do not
    have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [torch.zeros_like(x, device="cpu") if isinstance(x, Tensor) and x.is_meta else x for x in args]
        return func(*plain, **(kwargs or {}))


def find_mask(mask_function: Callable[..., Tensor], local_size: int | None = None, **_: object) -> Mask | None:
    """Implement transformers' mask interface in a trial: try which tokens a token far from the start sees.

    mask_function: (sequence, head, query [], keys [n]) -> [n] bool, or [] if all keys are alike. Returns None for an
    unknown mask, which matters only if a layer uses it.
    """
    size = local_size or 8
    row = 2 * size
    with torch.device("cpu"), WithValues():
        seen = mask_function(0, 0, torch.tensor(row), torch.arange(row + 2))
    positions = seen.expand(row + 2).nonzero().flatten().tolist()
    for mask, first in ((Mask(), 0), (Mask(window=size), row - size + 1), (Mask(chunk=size), row)):
        if positions == list(range(first, row + 1)):
            return mask
    return None


def run_trial(forward: Callable[[], object]) -> dict[nn.Module, Call]:
    """Run `forward` and return how each module calls attention. The model's attention must be `TRIAL`."""
    _trial.calls = {}
    try:
        forward()
        return _trial.calls
    finally:
        _trial.calls, _trial.rotated = {}, None


AttentionInterface.register(NAME, attend)
AttentionInterface.register(TRIAL, record)
AttentionMaskInterface.register(TRIAL, find_mask)
