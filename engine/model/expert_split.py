"""How the experts of a layer are divided among the ranks of a tensor-parallel group.

Ordinarily each rank has a slice of every expert. With `expert_parallel`, each rank has some experts whole. All ranks
have all tokens in either case, since attention is tensor parallel. So no token is sent to its experts. Each rank
computes its own experts' part of a token, and the ranks add these parts up.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.distributed.tp_group import TPGroup
from engine.model.expert_parallel import check_count

TOKENS_AT_ONCE = 256
"""Tokens of an exchange of rows. It takes memory for ranks x k rows of each token, twice."""


class Products(Protocol):
    """The products of a layer with this rank's experts: layers/moe.py. `experts` are numbers among these, unless
    otherwise said."""

    def mix(self, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]: ...

    def pair_rows(self, part: int, x: Tensor, experts: Tensor) -> Tensor: ...

    def combine_rows(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor: ...


class SlicedExperts:
    """Each rank has a slice of every expert, so ranks have equal work whatever the router chooses."""

    spread = False  #: whether other ranks have experts that this rank lacks

    def __init__(self, num_experts: int, tp: TPGroup):
        self.own = range(num_experts)  #: the experts of this rank, whole or sliced
        self.slices = tp  #: the group whose ranks have the slices of each of these experts

    def partials(self, layer: Products, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]:
        """Return this rank's summands of the result. See Experts."""
        return layer.mix(x, experts, weights)


class SpreadExperts(SlicedExperts):
    """Each rank has some whole experts: neighbours, in the order of ranks. A rank sums what its experts contribute to a
    token, so the ranks exchange as much as with slices."""

    spread = True

    def __init__(self, num_experts: int, tp: TPGroup):
        super().__init__(num_experts, tp)
        self.tp = tp
        self.own = range(num_experts * tp.rank // tp.size, num_experts * (tp.rank + 1) // tp.size)
        self.slices = TPGroup.single()
        self.slices.parts = tp.parts * tp.size

    def local(self, experts: Tensor) -> Tensor:
        """Return each expert's number among those of this rank. An expert of another rank has the number len(own)."""
        local = experts - self.own.start
        return torch.where((local >= 0) & (local < len(self.own)), local, len(self.own))

    def partials(self, layer: Products, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]:
        return layer.mix(x, self.local(experts), weights)


class ExchangedExperts(SpreadExperts):
    """Whole experts whose sums have a fixed order (fixed_order.py). The bits are those of SlicedExperts.

    Each product with a `down` weight is cut into the same parts as with slices. Each rank gets the rows that all
    experts of a token have in its own parts, and adds them up in the router's order.
    """

    def partials(self, layer: Products, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]:
        chunks = zip(*(part.split(TOKENS_AT_ONCE) for part in (x, experts, weights)), strict=True)
        parts = zip(*(self._partials(layer, *chunk) for chunk in chunks), strict=True)
        return [torch.cat(chunks) for chunks in parts]

    def _partials(self, layer: Products, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]:
        local, ranks, parts = self.local(experts), range(self.tp.size), self.tp.parts
        sums = []
        for i in range(parts):
            rows = torch.stack([layer.pair_rows(rank * parts + i, x, local) for rank in ranks])
            sums.append(layer.combine_rows(self.tp.reduce_scatter(rows), experts, weights))
        return sums


def row_bytes(tp: TPGroup, experts_per_token: int, hidden_size: int, item_bytes: int) -> int:
    """Return the bytes that a rank sends for each token and layer in an exchange of rows."""
    return (tp.size - 1) * tp.parts * experts_per_token * hidden_size * item_bytes


def split_experts(num_experts: int, tp: TPGroup) -> SlicedExperts:
    """Raises ConfigError if there are fewer experts than ranks."""
    if not tp.expert_parallel or tp.size == 1:
        return SlicedExperts(num_experts, tp)
    check_count(num_experts, tp.size)
    return (ExchangedExperts if tp.fixed_order else SpreadExperts)(num_experts, tp)
