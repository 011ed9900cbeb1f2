"""A row travels only to the ranks that have one of its experts.

Ranks first tell each other how many rows they send to whom, and the host waits for these numbers. So CUDA graphs cannot
hold it. What comes back for a row is added up in the order of ranks, with the bits of reduce-scatter through shared
memory, which adds zeros for all other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.distributed.exchange.members import PER_RANK, Counts, Members
from engine.distributed.exchange.rows import pack, unpack
from engine.errors import EngineUnavailable


@dataclass(frozen=True, slots=True)
class SentRows:
    """The rows that have come to this rank, by the rank that has sent them, and in its order."""

    x: Tensor
    places: Tensor
    weights: Tensor
    members: Members
    holders: Tensor  #: [engine's rows, k], the rank of each expert
    here: Tensor  #: [rows, k], whether an expert is on this rank
    sent: Sequence[Tensor]  #: the engine's rows that this rank has sent to each rank
    rows: list[list[int]]  #: numbers of rows, by sender and receiver
    pairs: list[list[int]]  #: numbers of pairs of a row and an expert, likewise

    def combine(self, sums: Tensor) -> Tensor:
        returned = self.members.ranks.all_to_all(sums.contiguous(), transposed(self.rows))
        out = sums.new_zeros(len(self.holders), *sums.shape[1:])
        for rows, found in zip(self.sent, returned.split([len(rows) for rows in self.sent]), strict=True):
            out[rows] += found
        return out

    def combine_pairs(self, parts: Tensor) -> Tensor:
        members, width = self.members, self.members.width
        of_ranks = [row[members.ranks.rank] for row in self.rows]
        of_engines = [sum(of_ranks[first : first + width]) for first in range(0, len(of_ranks), width)]
        of_engine = zip(parts.split(of_engines, dim=1), self.here.split(of_engines), strict=True)
        sent = torch.cat([part[here] for found, here in of_engine for part in found])
        # each rank of an engine gets its part of all pairs of the engine
        by_engine = [
            [sum(column[first : first + width]) for first in range(0, len(column), width) for _ in range(width)]
            for column in transposed(self.pairs)
        ]
        returned = members.ranks.all_to_all(sent, by_engine)
        out = parts.new_zeros(*self.holders.shape, *parts.shape[3:])
        out.flatten(0, 1)[self.holders.flatten().sort(stable=True).indices] = returned
        return out


class AllToAll:
    """All-to-all of torch.distributed or through shared memory."""

    can_be_captured = False

    def __init__(self, members: Members):
        self._members = members

    def dispatch(self, x: Tensor, places: Tensor, weights: Tensor, counts: Counts) -> SentRows:
        members, ranks = self._members, self._members.ranks
        holders = places // PER_RANK
        size = -(-len(x) // members.width)
        first = members.place * size
        share = holders[first : first + size]
        needs = torch.full((len(share), ranks.size), members.measured, device=x.device).scatter_(1, share, True)
        rows = first + needs.T.nonzero()[:, 1]  # by receiver
        told = torch.stack([needs.sum(0), share.flatten().bincount(minlength=ranks.size)])
        numbers = ranks.all_gather(told.flatten()).view(ranks.size, 2, ranks.size)
        num_rows, num_pairs = (of_ranks.tolist() for of_ranks in numbers.unbind(1))
        check(num_rows, max(counts))
        check(num_pairs, max(counts) * places.shape[1])
        packed = pack(x, places, weights)[rows]
        found = unpack(ranks.all_to_all(packed, num_rows), places.shape[1], x.dtype)
        here = found[1] // PER_RANK == ranks.rank
        return SentRows(*found, members, holders, here, rows.split(num_rows[ranks.rank]), num_rows, num_pairs)


def check(numbers: list[list[int]], most: int) -> None:
    """Raise EngineUnavailable unless ranks can have told these numbers. A collective that is aborted on a GPU yields
    any."""
    if not all(0 <= count <= most for row in numbers for count in row):
        raise EngineUnavailable("an exchange of rows was aborted, perhaps because another rank has died")


def transposed(counts: Sequence[Counts]) -> list[list[int]]:
    return [list(column) for column in zip(*counts, strict=True)]
