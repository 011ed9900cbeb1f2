"""Tensor-parallel ranks as threads of one process, with collectives through shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from engine.distributed.tp_group import TPGroup
from engine.model.expert_split import ExpertShardPlan
from engine.model.fixed_order import in_fixed_order
from engine.model.shard import ShardPlan
from tests.batches import load_by_hand

T = TypeVar("T")


class ThreadGroup(TPGroup):
    """One rank; all ranks share `barrier` and `values`."""

    def __init__(self, rank: int, size: int, barrier: Barrier, values: list[Tensor]):
        super().__init__(rank, size)
        self.barrier, self.values = barrier, values
        self.sent_bytes = 0  #: to other ranks, except by `all_reduce`
        self.scattered_bytes = 0  #: those of them that `reduce_scatter` has sent

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        self.sent_bytes += (self.size - 1) * x.nbytes
        return torch.cat(self._exchange(x), dim=-1)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self.sent_bytes += (self.size - 1) * x[0].nbytes
        self.scattered_bytes += (self.size - 1) * x[0].nbytes
        first, *others = [other[self.rank] for other in self._exchange(x)]
        return sum(others, first)  # in the order of ranks, as through shared memory

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        sent = counts[self.rank]
        self.sent_bytes += (sum(sent) - sent[self.rank]) * x.shape[1:].numel() * x.element_size()
        others = zip(self._exchange(x), counts, strict=True)
        return torch.cat([other.split(list(row))[self.rank] for other, row in others])

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self.values[self.rank] = x
        self.barrier.wait(timeout=60)
        values = list(self.values)
        self.barrier.wait(timeout=60)  # nobody writes the next value before all have read this one
        return values


def make_ranks(size: int) -> list[TPGroup]:
    if size == 1:
        return [TPGroup.single()]
    barrier, values = Barrier(size), [torch.empty(0)] * size
    return [ThreadGroup(rank, size, barrier, values) for rank in range(size)]


def plans_of(ranks: Sequence[TPGroup], *, expert_parallel: bool = False, fixed_order: bool = False) -> list[ShardPlan]:
    plans = [ExpertShardPlan(rank, expert_parallel=expert_parallel) for rank in ranks]
    return [in_fixed_order(plan) for plan in plans] if fixed_order else plans


def make_plans(size: int, *, expert_parallel: bool = False, fixed_order: bool = False) -> list[ShardPlan]:
    return plans_of(make_ranks(size), expert_parallel=expert_parallel, fixed_order=fixed_order)


def on_all(ranks: Sequence[object], function: Callable[[int], T]) -> list[T]:
    """`function(rank)` on every rank at once; results in rank order."""

    def run(rank: int) -> T:
        with torch.inference_mode():
            return function(rank)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, range(len(ranks))))


def check_ranks(folder: Path, size: int, *, expert_parallel: bool = False) -> None:
    """Assert that each of `size` ranks has the logits of the whole model, for chunks and single tokens."""
    steps = [{0: list(range(20)), 1: [5, 6, 7]}, {0: [9], 1: [8, 11]}]
    whole = load_by_hand(folder)
    expected = [whole.step(tokens) for tokens in steps]
    plans = make_plans(size, expert_parallel=expert_parallel)
    parts = [load_by_hand(folder, plan) for plan in plans]
    for logits in on_all(plans, lambda rank: [parts[rank].step(tokens) for tokens in steps]):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
