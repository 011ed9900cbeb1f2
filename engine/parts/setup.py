"""What the parts of an engine are made of."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from engine.clock import Clock
from engine.config import EngineConfig
from engine.core.door.journal import Journal
from engine.core.door.offers import ComputeSeconds
from engine.core.door.part import Part
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.loop_observer import LoopObserver
from engine.core.mail.courier import Courier
from engine.core.mail.ranks import PlanMarks
from engine.core.scheduler import Scheduler
from engine.costs.block_usage import BlockUsage
from engine.costs.step_cost import StepTimes
from engine.distributed.no_broadcaster import NoBroadcaster
from engine.distributed.tp_group import TPGroup
from engine.model.config import ModelConfig
from engine.runner.kv_cache import group_needs
from engine.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from engine.costs.tier_usage import TierUsage
    from engine.distributed.plan_broadcast import PlanBroadcaster

P = TypeVar("P", bound=Part)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model on all ranks of an engine, from which the other parts are built."""

    config: EngineConfig
    model: ModelConfig
    folder: Path
    runner: ModelRunner

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of a block of each KV cache group, on all ranks of all stages together. If there are snapshots of
        recurrent states, the bytes of one come last."""
        model, runner, tp = self.model, self.runner, self.runner.tp
        needs = group_needs(self.config, runner.block_size, model, runner.kv_dtype, tp)
        sizes = [need.block_bytes for need in needs]
        sizes += runner.memory.more_block_bytes
        return [size * tp.size for size in sizes]


@dataclass(frozen=True, slots=True)
class Made:
    """A feature of one engine: nothing if the engine does not have it."""

    parts: Sequence[Part] = ()
    couriers: Sequence[Courier] = ()
    observers: Sequence[LoopObserver] = ()
    marks: Sequence[PlanMarks] = ()
    journal: Callable[[Scheduler], Journal] | None = None
    """Makes what listens to the scheduler, once it is there."""


@dataclass(kw_only=True)
class PartSetup:
    """Makes the features of one engine, each when it is first asked for, as some need others."""

    table: Sequence[str]
    """Folders of engine/parts, in the order in which their parts are asked."""
    loaded: Loaded
    kv_cache: KVCacheManager
    step_times: StepTimes
    clock: Clock
    group: TPGroup
    broadcaster: PlanBroadcaster | NoBroadcaster
    engine_id: str
    host: str
    wake: Callable[[], None]
    """Called from another thread when an idle engine has something to do again."""
    compute_s: ComputeSeconds
    """What offers are compared with. A part may replace it."""
    usages: list[BlockUsage] = field(default_factory=list)
    """Of the pool of each KV cache group, by which holds are paid for; empty if nobody pays."""
    tier_usages: list[TierUsage] = field(default_factory=list)
    """Use of tiers below the KV cache, for which requests pay."""
    made: dict[str, Made] = field(default_factory=dict)

    def all(self) -> list[Made]:
        """Return all features, in the order of the table."""
        return [self.get(name) for name in self.table]

    def get(self, name: str) -> Made:
        """Return a feature by its folder."""
        if name not in self.made:
            made = Made()
            if name in self.table:
                made = importlib.import_module(f"{__package__}.{name}.make").make(self)
            self.made[name] = made
        return self.made[name]

    def part(self, name: str, kind: type[P]) -> P | None:
        """Return a feature's part of this class; None in an engine without it."""
        return next((part for part in self.get(name).parts if isinstance(part, kind)), None)
