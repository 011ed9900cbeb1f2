"""Every rank gets the rows of all engines, and computes its experts for those that have some.

Rows are padded to the engine with most, since every backend can gather and scatter equal parts, and some can do nothing
else. All sizes follow from the numbers of rows, so CUDA graphs can hold it. Results are added up by reduce-scatter: in
the order of ranks through shared memory, in NCCL's and gloo's own order otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.distributed.exchange.members import Counts, Members
from engine.distributed.exchange.rows import pack, unpack


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """The rows of all engines, in their order."""

    x: Tensor
    places: Tensor
    weights: Tensor
    members: Members
    counts: Counts

    def combine(self, sums: Tensor) -> Tensor:
        members, counts = self.members, self.counts
        padded = sums.new_zeros(members.engines, members.width * members.share_size(counts), *sums.shape[1:])
        for part, found in zip(padded, sums.split(list(counts)), strict=True):
            part[: len(found)] = found
        share = members.ranks.reduce_scatter(padded.view(members.ranks.size, -1, *sums.shape[1:]))
        return members.of_engine(share, counts)

    def combine_pairs(self, parts: Tensor) -> Tensor:
        members, counts = self.members, self.counts
        padded = parts.new_zeros(members.engines, members.width, max(counts), *parts.shape[2:])
        for part, found in zip(padded, parts.split(list(counts), dim=1), strict=True):
            part[:, : found.shape[1]] = found
        return members.ranks.reduce_scatter(padded.flatten(0, 1))[: counts[members.engine]]


class AllGather:
    """All-gather, and reduce-scatter for the way back."""

    can_be_captured = True

    def __init__(self, members: Members):
        self._members = members

    def dispatch(self, x: Tensor, places: Tensor, weights: Tensor, counts: Counts) -> GatheredRows:
        members, rows = self._members, pack(x, places, weights)
        share = rows[members.share_of(counts)]
        padded = rows.new_zeros(members.share_size(counts), rows.shape[1])
        padded[: len(share)] = share
        found = members.ranks.all_gather(padded.flatten()).view(members.engines, -1, rows.shape[1])
        every = torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])
        return GatheredRows(*unpack(every, places.shape[1], x.dtype), members, counts)
