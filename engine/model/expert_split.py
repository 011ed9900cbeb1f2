"""How the experts of a layer are divided among ranks.

Ordinarily each rank of a tensor-parallel group has a slice of every expert. With `enable_expert_parallel`, each rank
has some experts whole. All ranks have all tokens in either case, since attention is tensor parallel. So no token is
sent to its experts. Each rank computes its own experts' part of a token, and the ranks add these parts up.

With `data_parallel_size` the ranks belong to several engines, each with its own tokens. Then tokens are sent to ranks
that have their experts (engine/distributed/exchange).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.devices.device import copy_to
from engine.distributed.exchange.all_gather import AllGather
from engine.distributed.exchange.all_to_all import AllToAll
from engine.distributed.exchange.expert_exchange import ExpertExchange
from engine.distributed.exchange.members import PER_RANK, AllRanks, Counts
from engine.distributed.part_group import PartGroup
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model.expert_parallel import check_count, check_shared, choose_backend
from engine.model.shard import ShardPlan

logger = logging.getLogger(__name__)

TOKENS_AT_ONCE = 256
"""Tokens of an exchange of rows. It takes memory for ranks x k rows of each token, twice."""


@dataclass(frozen=True, slots=True)
class ExpertShardPlan(ShardPlan):
    """A plan in which ranks may have whole experts, instead of a slice of every expert."""

    expert_parallel: bool = False  #: whether each rank has some whole experts
    redundant_experts: int | None = None  #: slots of a layer beyond one for each expert; None if experts do not move
    expert_exchange: ExpertExchange | None = None  #: spreads the experts over the ranks of several engines

    @classmethod
    def of(cls, config: EngineConfig, ranks: TPGroup) -> ExpertShardPlan:
        """Return the plan of a rank of an engine with these options."""
        return cls(
            ranks,
            expert_parallel=config.enable_expert_parallel,
            redundant_experts=config.redundant_experts,
            expert_exchange=exchange_of(ranks),
        )


def exchange_of(ranks: TPGroup) -> ExpertExchange | None:
    """Return the exchange of rows with the ranks of other engines that share experts; None if there are none."""
    return ranks.expert_exchange if isinstance(ranks, PartGroup) else None


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
    """Which slots of the ranks hold an expert. At first ranks hold neighbours, in the order of ranks. If several ranks
    hold an expert, the first of them computes it."""

    most_copies = 1  #: of an expert that are used

    def __init__(self, num_experts: int, ranks: AllRanks, count: int | None = None):
        """count: slots of each rank; by default as many as it has experts."""
        self._rank = ranks.rank
        own = [first_experts(num_experts, rank, ranks.size) for rank in range(ranks.size)]
        #: [num_experts, copies] int64: the place of each copy, see `Exchange.dispatch`, and its slot on this rank, or
        #: `count` if it is on another rank.
        self._places = torch.zeros(num_experts, self.most_copies, dtype=torch.int64)
        self._table = torch.zeros_like(self._places)
        self.set([[*held, *[-1] * ((count or 0) - len(held))] for held in own])

    def local(self, experts: Tensor) -> Tensor:
        """Return the slot of each expert [tokens, k]: `count` if another rank computes the pair."""
        return self._table[experts, 0]

    def places(self, experts: Tensor) -> Tensor:
        """Return the place of each expert [tokens, k]."""
        return self._places[experts, 0]

    def at(self, places: Tensor) -> Tensor:
        """Return the slot of each place: `count` if it is on another rank. Any numbers are allowed, since a collective
        that is aborted on a GPU yields any."""
        slots = places.long() - self._rank * PER_RANK
        return torch.where((slots >= 0) & (slots < self.count), slots, self.count)

    def set(self, placement: Sequence[Sequence[int]]) -> None:
        """Take another placement into use: the expert in each slot of each rank, -1 in an empty one."""
        self.count = len(placement[self._rank])
        table = np.full(self._table.shape, self.count)
        places = np.full(table.shape, len(placement) * PER_RANK)  # nowhere
        copies = np.zeros(len(table), dtype=np.int64)
        for rank, held in enumerate(placement):
            for slot, expert in enumerate(held):
                if expert < 0:
                    continue
                if copies[expert] < self.most_copies:
                    places[expert, copies[expert]] = rank * PER_RANK + slot
                    if rank == self._rank:
                        table[expert, copies[expert]] = slot
                copies[expert] += 1
        self._use(places, table, copies)

    def _use(self, *values: np.ndarray) -> None:
        for target, value in zip((self._places, self._table), values, strict=False):
            target.copy_(copy_to(value, target.device))


class MovableSlots(ExpertSlots):
    """Slots whose experts change while the engine runs. Some experts have copies on several ranks, which take turns
    over the tokens of an engine's step. Each rank has the same number of slots, at first some of them empty."""

    def __init__(self, num_experts: int, ranks: AllRanks, redundant: int):
        self.most_copies = ranks.size
        self._copies = torch.ones(num_experts, dtype=torch.int64)
        super().__init__(num_experts, ranks, (num_experts + redundant) // ranks.size)

    def local(self, experts: Tensor) -> Tensor:
        return self._table[experts, self._turns(experts)]

    def places(self, experts: Tensor) -> Tensor:
        return self._places[experts, self._turns(experts)]

    def _turns(self, experts: Tensor) -> Tensor:
        return torch.arange(len(experts), device=experts.device)[:, None] % self._copies[experts]

    def _use(self, *values: np.ndarray) -> None:
        super()._use(*values)
        self._copies.copy_(copy_to(values[-1], self._copies.device))


def first_experts(num_experts: int, rank: int, ranks: int) -> range:
    """Return the experts that a rank has at first."""
    return range(num_experts * rank // ranks, num_experts * (rank + 1) // ranks)


class SlicedExperts:
    """Each rank has a slice of every expert, so ranks have equal work whatever the router chooses."""

    spread = False  #: whether other ranks have experts that this rank lacks
    shared = False  #: whether this rank computes its experts for tokens of other engines too
    load: ExpertLoad = NoLoad()

    def __init__(self, num_experts: int, tp: ShardPlan):
        self.own = range(num_experts)  #: the experts of this rank when it starts, whole or sliced
        self.num_slots = num_experts  #: experts for which this rank has room
        self.slices = tp  #: over which ranks each of these experts is sliced

    def scatters_sums(self) -> bool:
        """Return whether the step decides which rank has a token's sum, while the others have 0. Then whatever is added
        has to be summed over the ranks by itself: else its bits would depend on the step."""
        return False

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

    def __init__(self, num_experts: int, tp: ExpertShardPlan, spread_over: AllRanks | None = None):
        """spread_over: the ranks that have the experts; those of `tp` by default."""
        super().__init__(num_experts, tp)
        self.tp, ranks = tp, spread_over or tp.ranks
        self.own = first_experts(num_experts, ranks.rank, ranks.size)
        self.slices = ShardPlan(parts=tp.parts * tp.size)
        self.slots = ExpertSlots(num_experts, ranks)
        if tp.redundant_experts is not None:
            self.slots = MovableSlots(num_experts, ranks, tp.redundant_experts)
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
            sums.append(layer.combine_rows(self.tp.ranks.reduce_scatter(rows), experts, weights))
        return sums


class MovingExperts(ExchangedExperts):
    """Whole experts that move between ranks, on a CPU, whose sums have no fixed order otherwise. The bits of a token do
    not depend on where its experts are: each rank gets the rows of all experts of a token in its own columns, and adds
    them up in the router's order."""

    def _partials(self, layer: Products, x: Tensor, experts: Tensor, local: Tensor, weights: Tensor) -> list[Tensor]:
        rows = layer.pair_rows(0, x, local)
        columns = self.tp.ranks.reduce_scatter(torch.stack(rows.chunk(self.tp.size, dim=-1)))
        out = rows.new_zeros(len(x), x.shape[1])
        out.chunk(self.tp.size, dim=-1)[self.tp.rank].copy_(layer.combine_rows(columns, experts, weights))
        return [out]


class SharedExperts(SpreadExperts):
    """Whole experts spread over the ranks of several engines. A rank gets the tokens of all engines that need its
    experts, and sends back what these contribute. The ranks of an engine get the sums of a share of its tokens each."""

    shared = True
    at_once = sys.maxsize  #: tokens of an exchange

    def __init__(self, num_experts: int, tp: ExpertShardPlan, exchange: ExpertExchange):
        super().__init__(num_experts, tp, exchange.members.ranks)
        self.exchange = exchange

    def scatters_sums(self) -> bool:
        return self.tp.size > 1

    def partials(self, layer: Products, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]:
        found = []
        for start, counts in self.exchange.chunks(len(x), self.at_once):
            own = slice(start, start + self.at_once)
            found.append(self._partials(layer, counts, x[own], experts[own], weights[own]))
        return [torch.cat(chunks) for chunks in zip(*found, strict=True)]

    def _partials(self, layer: Products, counts: Counts, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]:
        """Return the summands of some rows. counts: numbers of these rows in each engine."""
        rows = self.exchange.dispatch(x, self.slots.places(experts), weights, counts)
        if not len(rows.x):  # kernels do not compute nothing
            return [rows.combine(rows.x)]
        return [rows.combine(part) for part in layer.mix(rows.x, self.slots.at(rows.places), rows.weights)]


class SharedExpertsInOrder(SharedExperts):
    """Experts of several engines, whose sums have a fixed order (fixed_order.py). The bits are those of one engine that
    has all experts: it would add up the same rows in the same order."""

    at_once = TOKENS_AT_ONCE

    def scatters_sums(self) -> bool:
        return False

    def _partials(self, layer: Products, counts: Counts, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]:
        rows = self.exchange.dispatch(x, self.slots.places(experts), weights, counts)
        local, parts, sums = self.slots.at(rows.places), self.tp.parts, []
        for i in range(parts):
            pairs = torch.stack([layer.pair_rows(rank * parts + i, rows.x, local) for rank in range(self.tp.size)])
            own = rows.combine_pairs(pairs)
            sums.append(layer.combine_rows(own, experts, weights) if len(x) else x)
        return sums


class MovingSharedExperts(SharedExperts):
    """Experts of several engines that move between ranks, on a CPU, whose sums have no fixed order otherwise. The bits
    of a token do not depend on where its experts are: each rank of its engine gets the rows of all of them in its own
    columns, and adds them up in the router's order."""

    at_once = TOKENS_AT_ONCE

    def scatters_sums(self) -> bool:
        return False

    def _partials(self, layer: Products, counts: Counts, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]:
        rows = self.exchange.dispatch(x, self.slots.places(experts), weights, counts)
        pairs = layer.pair_rows(0, rows.x, self.slots.at(rows.places))
        columns = rows.combine_pairs(torch.stack(pairs.chunk(self.tp.size, dim=-1)))
        if not len(x):
            return [x]
        out = torch.zeros_like(x)
        out.chunk(self.tp.size, dim=-1)[self.tp.rank].copy_(layer.combine_rows(columns, experts, weights))
        return [out]


def row_bytes(tp: ShardPlan, experts_per_token: int, hidden_size: int, item_bytes: int) -> int:
    """Return the bytes that a rank sends for each token and layer in an exchange of rows."""
    return (tp.size - 1) * tp.parts * experts_per_token * hidden_size * item_bytes


def choose_exchange(config: EngineConfig, exchange: ExpertExchange, *, on_gpu: bool) -> None:
    """Choose how tokens travel to experts, and log why. Every rank has to call this at the same time."""
    ranks = exchange.members.ranks.size
    backend, why = choose_backend(config.all2all_backend, ranks, on_gpu=on_gpu)
    exchange.choose(AllToAll if backend == "alltoall" else AllGather)
    logger.info("experts exchanged by all2all_backend=%s ranks=%d, because %s", backend, ranks, why)


def split_experts(num_experts: int, hidden_size: int, tp: ShardPlan) -> SlicedExperts:
    """Raises ConfigError if the experts cannot be spread over the ranks."""
    if not isinstance(tp, ExpertShardPlan):
        return SlicedExperts(num_experts, tp)
    moves_on_cpu = tp.redundant_experts is not None and torch.get_default_device().type == "cpu"
    if moves_on_cpu and not tp.fixed_order and hidden_size % tp.size:
        limit = f"a divisor of the model's hidden_size ({hidden_size}) with enable_eplb"
        raise ConfigError("tensor_parallel_size", tp.size, limit)
    if (exchange := tp.expert_exchange) is not None:
        check_shared(num_experts, exchange.members.engines, tp.size, tp.redundant_experts)
        if tp.fixed_order:
            return SharedExpertsInOrder(num_experts, tp, exchange)
        return (MovingSharedExperts if moves_on_cpu else SharedExperts)(num_experts, tp, exchange)
    if not tp.expert_parallel or tp.size == 1:
        return SlicedExperts(num_experts, tp)
    check_count(num_experts, tp.size, tp.redundant_experts)
    if tp.fixed_order:
        return ExchangedExperts(num_experts, tp)
    return (MovingExperts if moves_on_cpu else SpreadExperts)(num_experts, tp)
