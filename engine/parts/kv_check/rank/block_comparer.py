"""Compares blocks of the KV cache on a rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.devices.device import StagedCopy
from engine.parts.kv_check.messages import EQUAL, BlockCompared, BlockPair
from engine.runner.rank_part import RankPart
from engine.runner.step import LaunchedStep, StepMemory
from engine.runner.step_layout import StepLayout
from engine.wire.plan import StepPlan


class BlockComparer(RankPart):
    """Compares this rank's part of two blocks bit by bit, as soon as a step has computed one of them."""

    name = BlockPair.part

    def __init__(self, layers: Sequence[int]):
        """layers: of the model, whose KV this rank has."""
        self._layers = layers
        self._found = deque[BlockCompared]()
        self._due = 0

    @property
    def busy(self) -> bool:
        return self._due > 0

    def allocate(self, memory: StepMemory) -> None:
        (self._cache,) = memory.kv_caches

    def prepare(self, plan: StepPlan, layout: StepLayout, staged: StagedCopy) -> None:
        self._due += plan.record(BlockPair) is not None

    def after(self, step: LaunchedStep, out: Tensor, tokens: Tensor) -> None:
        if (pair := step.inputs.plan.record(BlockPair)) is not None:
            self._found.append(BlockCompared(pair.number, self._first_different(pair)))

    def answers(self) -> Iterable[BlockCompared]:
        found = [self._found.popleft() for _ in range(len(self._found))]
        self._due -= len(found)
        return found

    def _first_different(self, pair: BlockPair) -> int:
        computed, cached = (self._cache[block].view(torch.uint8).flatten(1) for block in (pair.computed, pair.cached))
        different = (computed != cached).any(1).nonzero()
        return self._layers[int(different[0])] if len(different) else EQUAL
