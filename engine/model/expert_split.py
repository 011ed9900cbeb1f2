"""How the experts of a layer are divided among ranks.

Ordinarily each rank of a tensor-parallel group has a slice of every expert. With `expert_parallel`, each rank has some
experts whole. All ranks have all tokens in either case, since attention is tensor parallel. So no token is sent to its
experts. Each rank computes its own experts' part of a token, and the ranks add these parts up.

With `data_parallel` the ranks belong to several engines, each with its own tokens. Then the tokens are exchanged too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.device import copy_to
from engine.distributed.expert_exchange import ExpertExchange
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model.expert_parallel import check_count, check_shared

TOKENS_AT_ONCE = 256
"""Tokens of an exchange of rows. It takes memory for ranks x k rows of each token, twice."""


class Products(Protocol):
    """The products of a layer with this rank's experts: layers/moe.py. `experts` are numbers among these, unless
    otherwise said."""

    def mix(self, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]: ...

    def pair_rows(self, part: int, x: Tensor, experts: Tensor) -> Tensor: ...

    def combine_rows(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor: ...


class ExpertLoad:
    """Counts the tokens of each expert of a layer, on the layer's device."""

    def __init__(self, counts: Tensor, real: Tensor):
        """counts: [num_experts] int64, to which tokens are added. real: int64, 1 for each token of a step, in its
        order, and 0 for padding."""
        self._counts, self._real = counts, real

    def add(self, experts: Tensor) -> None:
        """Count the tokens of a step. experts: of each token, [tokens, k]."""
        tokens, k = experts.shape
        self._counts.index_add_(0, experts.flatten(), self._real[:tokens, None].expand(tokens, k).flatten())


class NoLoad(ExpertLoad):
    """Stand-in for ExpertLoad where nothing is counted."""

    def __init__(self) -> None:
        pass

    def add(self, experts: Tensor) -> None:
        pass


class ExpertSlots:
    """Which slot of this rank holds an expert. Slots hold the rank's own experts, in order."""

    movable = False  #: whether experts change while the engine runs

    def __init__(self, num_experts: int, own: range):
        self.count = len(own)
        self.held = list(own)  #: the expert in each slot, -1 in an empty one
        #: [num_experts] int64: the expert's slot on this rank; `count` if another rank has it.
        self._table = torch.full((num_experts,), self.count, dtype=torch.int64)
        self._table[own.start : own.stop] = torch.arange(len(own))

    def local(self, experts: Tensor) -> Tensor:
        """Return the slot of each expert [tokens, k]: `count` if another rank computes the pair."""
        return self._table[experts]

    def place(self, placement: Sequence[Sequence[int]], rank: int) -> None:
        """Take another placement into use: the expert in each slot of each rank, of which this one is `rank`. If
        several ranks hold an expert, the first of them computes it."""
        self.held = list(placement[rank])
        self.count = len(self.held)
        first: dict[int, int] = {}
        for holder, held in enumerate(placement):
            for expert in held:
                first.setdefault(expert, holder)
        slots = {expert: slot for slot, expert in enumerate(self.held) if first[expert] == rank}
        table = np.array([slots.get(expert, self.count) for expert in range(len(self._table))])
        self._table.copy_(copy_to(table, self._table.device))


class MovableSlots(ExpertSlots):
    """Slots whose experts change while the engine runs. Some experts have copies on several ranks, which take turns
    over the tokens of a step. Each rank has the same number of slots, at first some of them empty."""

    movable = True

    def __init__(self, num_experts: int, own: range, ranks: TPGroup | ExpertExchange, redundant: int):
        super().__init__(num_experts, own)
        self.count = (num_experts + redundant) // ranks.size
        self.held += [-1] * (self.count - len(own))
        self._rank = ranks.rank
        #: [num_experts, ranks] int64: the slot of each copy if it is on this rank, else `count`.
        self._table = torch.full((num_experts, ranks.size), self.count, dtype=torch.int64)
        self._table[own.start : own.stop, 0] = torch.arange(len(own))
        self._copies = torch.ones(num_experts, dtype=torch.int64)

    def local(self, experts: Tensor) -> Tensor:
        turn = torch.arange(len(experts), device=experts.device)[:, None] % self._copies[experts]
        return self._table[experts, turn]

    def set(self, placement: Sequence[Sequence[int]]) -> None:
        """Take another placement into use: the expert in each slot of each rank, -1 in an empty one."""
        self.held = list(placement[self._rank])
        table = np.full(self._table.shape, self.count)
        copies = np.zeros(len(table), dtype=np.int64)
        for rank, held in enumerate(placement):
            for slot, expert in enumerate(held):
                if expert >= 0:
                    if rank == self._rank:
                        table[expert, copies[expert]] = slot
                    copies[expert] += 1
        for target, values in ((self._table, table), (self._copies, copies)):
            target.copy_(copy_to(values, target.device))

    def place(self, placement: Sequence[Sequence[int]], rank: int) -> None:
        self._rank, self.count = rank, len(placement[rank])
        self.set(placement)


class SlicedExperts:
    """Each rank has a slice of every expert, so ranks have equal work whatever the router chooses."""

    spread = False  #: whether other ranks have experts that this rank lacks
    shared = False  #: whether this rank computes its experts for tokens of other engines too
    load: ExpertLoad = NoLoad()

    def __init__(self, num_experts: int, tp: TPGroup):
        self.own = range(num_experts)  #: the experts of this rank when it starts, whole or sliced
        self.num_slots = num_experts  #: experts for which this rank has room
        self.slices = tp  #: the group whose ranks have the slices of each of these experts

    def count(self, experts: Tensor) -> None:
        """Count the tokens of a step. experts: of each token, [tokens, k]."""
        self.load.add(experts)

    def partials(self, layer: Products, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]:
        """Return this rank's summands of the result. See Experts."""
        return layer.mix(x, experts, weights)


class SpreadExperts(SlicedExperts):
    """Each rank has some whole experts: at first neighbours, in the order of ranks. A rank sums what its experts
    contribute to a token, so the ranks exchange as much as with slices."""

    spread = True

    def __init__(self, num_experts: int, tp: TPGroup, spread_over: TPGroup | ExpertExchange | None = None):
        """spread_over: the ranks that have the experts; those of `tp` by default."""
        super().__init__(num_experts, tp)
        self.tp, ranks = tp, spread_over or tp
        self.own = range(num_experts * ranks.rank // ranks.size, num_experts * (ranks.rank + 1) // ranks.size)
        self.slices = TPGroup.single()
        self.slices.parts = tp.parts * tp.size
        self.slots = ExpertSlots(num_experts, self.own)
        if tp.redundant_experts is not None:
            self.slots = MovableSlots(num_experts, self.own, ranks, tp.redundant_experts)
        self.num_slots = self.slots.count

    def partials(self, layer: Products, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]:
        return layer.mix(x, self.slots.local(experts), weights)


class ExchangedExperts(SpreadExperts):
    """Whole experts whose sums have a fixed order (fixed_order.py). The bits are those of SlicedExperts.

    Each product with a `down` weight is cut into the same parts as with slices. Each rank gets the rows that all
    experts of a token have in its own parts, and adds them up in the router's order.
    """

    def partials(self, layer: Products, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]:
        local = self.slots.local(experts)
        chunks = zip(*(part.split(TOKENS_AT_ONCE) for part in (x, experts, local, weights)), strict=True)
        parts = zip(*(self._partials(layer, *chunk) for chunk in chunks), strict=True)
        return [torch.cat(chunks) for chunks in parts]

    def _partials(self, layer: Products, x: Tensor, experts: Tensor, local: Tensor, weights: Tensor) -> list[Tensor]:
        ranks, parts, sums = range(self.tp.size), self.tp.parts, []
        for i in range(parts):
            rows = torch.stack([layer.pair_rows(rank * parts + i, x, local) for rank in ranks])
            sums.append(layer.combine_rows(self.tp.reduce_scatter(rows), experts, weights))
        return sums


class MovingExperts(ExchangedExperts):
    """Whole experts that move between ranks, on a CPU, whose sums have no fixed order otherwise. The bits of a token do
    not depend on where its experts are: each rank gets the rows of all experts of a token in its own columns, and adds
    them up in the router's order."""

    def _partials(self, layer: Products, x: Tensor, experts: Tensor, local: Tensor, weights: Tensor) -> list[Tensor]:
        rows = layer.pair_rows(0, x, local)
        columns = self.tp.reduce_scatter(torch.stack(rows.chunk(self.tp.size, dim=-1)))
        out = rows.new_zeros(len(x), x.shape[1])
        out.chunk(self.tp.size, dim=-1)[self.tp.rank].copy_(layer.combine_rows(columns, experts, weights))
        return [out]


class SharedExperts(SpreadExperts):
    """Whole experts spread over the ranks of several engines. Every rank gets the tokens of all engines, and computes
    what its experts contribute to each. The ranks of an engine get the sums of a share of its tokens each."""

    shared = True
    at_once = sys.maxsize  #: tokens of an exchange

    def __init__(self, num_experts: int, tp: TPGroup, exchange: ExpertExchange):
        super().__init__(num_experts, tp, exchange)
        self.num_experts, self.exchange = num_experts, exchange

    def count(self, experts: Tensor) -> None:
        """Do nothing: these tokens are counted with those of all engines."""

    def partials(self, layer: Products, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]:
        found = []
        for start, counts in self.exchange.chunks(len(x), self.at_once):
            own = slice(start, start + self.at_once)
            found.append(self._partials(layer, counts, x[own], experts[own], weights[own]))
        return [torch.cat(chunks) for chunks in zip(*found, strict=True)]

    def _partials(
        self, layer: Products, counts: list[int], x: Tensor, experts: Tensor, weights: Tensor
    ) -> list[Tensor]:
        """Return the summands of some rows. counts: numbers of these rows in each engine."""
        mixed = layer.mix(*self._gather(counts, x, experts, weights))
        return [self.exchange.scatter(part, counts) for part in mixed]

    def _gather(self, counts: list[int], x: Tensor, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, experts and weights of all engines' rows. The experts are numbers among those of this rank."""
        parts = x, weights.to(x.dtype), experts.int()
        packed = [part.contiguous().view(torch.uint8) for part in parts]  # one exchange is faster than three
        found = self.exchange.gather(torch.cat(packed, dim=1), counts)
        columns = found.split([part.shape[1] for part in packed], dim=1)
        every_x, every_weights, every_expert = (
            column.clone(memory_format=torch.contiguous_format).view(part.dtype)  # a view needs an aligned address
            for column, part in zip(columns, parts, strict=True)
        )
        # clamped, since a collective that is aborted on a GPU yields any numbers
        chosen = every_expert.long().clamp_(0, self.num_experts - 1)
        self.load.add(chosen)
        return every_x, self.slots.local(chosen), every_weights


class SharedExpertsInOrder(SharedExperts):
    """Experts of several engines, whose sums have a fixed order (fixed_order.py). The bits are those of one engine that
    has all experts: it would add up the same rows in the same order."""

    at_once = TOKENS_AT_ONCE

    def _partials(
        self, layer: Products, counts: list[int], x: Tensor, experts: Tensor, weights: Tensor
    ) -> list[Tensor]:
        every_x, local, _ = self._gather(counts, x, experts, weights)
        ranks, parts, sums = range(self.tp.size), self.tp.parts, []
        for i in range(parts):
            rows = torch.stack([layer.pair_rows(rank * parts + i, every_x, local) for rank in ranks])
            own = self.exchange.scatter_parts(rows, counts)
            sums.append(layer.combine_rows(own, experts, weights) if len(x) else x)
        return sums


class MovingSharedExperts(SharedExperts):
    """Experts of several engines that move between ranks, on a CPU, whose sums have no fixed order otherwise. The bits
    of a token do not depend on where its experts are: its engine gets the rows of all of them, and adds them up in the
    router's order."""

    at_once = TOKENS_AT_ONCE

    def _partials(
        self, layer: Products, counts: list[int], x: Tensor, experts: Tensor, weights: Tensor
    ) -> list[Tensor]:
        every_x, local, _ = self._gather(counts, x, experts, weights)
        rows = self.exchange.scatter(layer.pair_rows(0, every_x, local), counts)
        return [layer.combine_rows(rows, experts, weights) if len(x) else x]


def row_bytes(tp: TPGroup, experts_per_token: int, hidden_size: int, item_bytes: int) -> int:
    """Return the bytes that a rank sends for each token and layer in an exchange of rows."""
    return (tp.size - 1) * tp.parts * experts_per_token * hidden_size * item_bytes


def split_experts(num_experts: int, hidden_size: int, tp: TPGroup) -> SlicedExperts:
    """Raises ConfigError if the experts cannot be spread over the ranks."""
    moves_on_cpu = tp.redundant_experts is not None and torch.get_default_device().type == "cpu"
    if (exchange := tp.expert_exchange) is not None:
        check_shared(num_experts, exchange.engines, tp.size, tp.redundant_experts)
        if tp.fixed_order:
            return SharedExpertsInOrder(num_experts, tp, exchange)
        return (MovingSharedExperts if moves_on_cpu else SharedExperts)(num_experts, tp, exchange)
    if not tp.expert_parallel or tp.size == 1:
        return SlicedExperts(num_experts, tp)
    check_count(num_experts, tp.size, tp.redundant_experts)
    if tp.fixed_order:
        return ExchangedExperts(num_experts, tp)
    if not moves_on_cpu:
        return SpreadExperts(num_experts, tp)
    if hidden_size % tp.size:
        limit = f"a divisor of the model's hidden_size ({hidden_size}) with enable_eplb"
        raise ConfigError("tensor_parallel", tp.size, limit)
    return MovingExperts(num_experts, tp)
