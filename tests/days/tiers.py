"""Host memory and disk below the KV cache of a simulated engine. Copies take time, and a disk fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.clock import Clock
from engine.core.kv_cache_manager import KVCacheManager
from engine.costs.step_cost import StepTimes
from engine.kv_offload.tier_index import TierIndex
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.parts.kv_tiers.tier import Tier
from engine.wire.parts.kv_offload import (
    DropBlocks,
    LoadBlocks,
    StopLoad,
    StoreBlocks,
    StoreListing,
    TierAnswer,
    TierBlock,
    TierCommand,
)
from tests.days.checks import checks_of
from tests.days.model import Flipped

if TYPE_CHECKING:
    from tests.days.cluster import Size
    from tests.days.engine import Engine

TIMEOUT_S = 1.0  # for which a request waits for blocks
STALL_S = 1.5  # longest stall of a load
FAILS = 0.02  # share of the blocks that a disk cannot write, or has lost when they are read


def make_offloading(size: Size, kv_cache: KVCacheManager, times: StepTimes, clock: Clock) -> KVOffloading | None:
    found = []
    if size.host:
        found.append(Tier("host", [TierIndex(size.host, size.tier_ttl_s, slots=True)], [1], [1000]))
    if size.disk:
        found.append(Tier("disk", [TierIndex(size.disk, size.tier_ttl_s)], [1], [1000]))
    if not found:
        return None
    return KVOffloading(
        kv_cache,
        found,
        name_of=lambda group, block_hash: block_hash,
        times=times,
        timeout_s=TIMEOUT_S,
        block_bytes=[1000],
        min_tokens=kv_cache.pool.block_size,
    )


@dataclass(eq=False)
class Loading:
    command: LoadBlocks
    written: set[int] = field(default_factory=set)


class Tiers:
    """Has the methods of GroupTiers."""

    def __init__(self, engine: Engine):
        self._engine, self._rng = engine, random.Random(engine.rng.getrandbits(64))
        self._named_kv, self._seen = engine.named_kv, engine.cluster.seen
        self._block_s = engine.cluster.size.block_s
        self._host: dict[int, list[int | None]] = {}  # by slot
        self._disk: dict[bytes, list[int | None]] = {}
        self._loads: dict[int, Loading] = {}
        self._answers: list[TierAnswer | StoreListing] = []
        self.flips = False  #: whether bytes flip on their way up

    def submit(self, commands: list[TierCommand]) -> None:
        for command in commands:
            self._engine.outbox.append(partial(self._begin, command))

    @property
    def answered(self) -> bool:
        return bool(self._answers)

    def answers(self) -> list[TierAnswer | StoreListing]:
        answers, self._answers = self._answers, []
        return answers

    def content(self, tier: str, index: TierIndex, name: bytes) -> list[int | None] | None:
        """Return the KV of a block, by its name in a tier."""
        return self._host.get(index.slot(name)) if tier == "host" else self._disk.get(name)

    def _answer(self, answer: TierAnswer) -> None:
        self._answers.append(answer)
        self._engine.wake()

    def _later(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        """Call a function, unless the engine has died. It waits while the engine is paused."""

        def go_on() -> None:
            if self._engine.alive:
                if self._engine.paused:
                    self._later(0.05, call, *args)
                else:
                    call(*args)

        self._engine.loop.call_later(seconds, go_on)

    def _begin(self, command: TierCommand) -> None:
        match command:
            case StoreBlocks(_, blocks):
                self._later(self._seconds(blocks), self._copy, command)
            case LoadBlocks(number, blocks):
                checks = checks_of(self._engine)
                for tier in self._engine.core.scheduler.parts[KVOffloading].tiers:
                    is_wrong = tier.name in checks and checks[tier.name]["different"] > 0
                    assert not (is_wrong and any(map(tier.takes, blocks))), "a wrong tier is read"
                self._loads[number] = Loading(command)
                self._load(number, 0)
            case StopLoad(number) if number in self._loads:
                self._seen["a load is stopped"] += 1
                self._end_load(number)
            case DropBlocks(names):
                for name in names:
                    self._disk.pop(name, None)

    def _seconds(self, blocks: list[TierBlock]) -> float:
        return self._block_s * self._rng.uniform(0.2, 1.0) * len(blocks)

    def _copy(self, command: StoreBlocks) -> None:
        engine, copies = self._engine, []
        for block in command.blocks:
            copies.append(kv := engine.runner.read(block.block, engine.loop.time()))
            assert kv == self._named_kv[block.name], "a block that goes to a tier has other KV than its name says"
        self._answer(TierAnswer(command.number, copied=True))
        self._later(self._seconds(command.blocks), self._write, command, copies)

    def _write(self, command: StoreBlocks, copies: list[list[int | None]]) -> None:
        failed = []
        for i, (block, kv) in enumerate(zip(command.blocks, copies, strict=True)):
            if block.on_disk and self._rng.random() < FAILS:
                failed.append(i)
                continue
            if block.slot >= 0:
                self._host[block.slot] = kv
            if block.on_disk:
                self._disk[block.name] = kv
        self._seen["block stored"] += len(copies) - len(failed)
        self._answer(TierAnswer(command.number, failed=failed))

    def _load(self, number: int, index: int) -> None:
        if (loading := self._loads.get(number)) is None:
            return
        blocks = loading.command.blocks
        if index == len(blocks):
            self._end_load(number)
            return
        seconds = self._block_s * self._rng.uniform(0.2, 1.0)
        if self._rng.random() < self._engine.cluster.size.stalls:
            seconds += self._rng.uniform(0, STALL_S)
        self._later(seconds, self._load_block, number, index)

    def _load_block(self, number: int, index: int) -> None:
        if (loading := self._loads.get(number)) is None:
            return
        block = loading.command.blocks[index]
        kv = self._host[block.slot] if block.slot >= 0 else self._disk.get(block.name)
        if block.on_disk and self._rng.random() < FAILS:
            kv = None
        if kv is not None:
            assert kv == self._named_kv[block.name], "a tier has other KV than its name says"
            if self.flips:
                self._seen["block flipped"] += 1
                kv = [None if cell is None else Flipped(cell) for cell in kv]
            self._engine.runner.write(block.block, kv, self._engine.loop.time())
            loading.written.add(index)
        self._load(number, index + 1)

    def _end_load(self, number: int) -> None:
        loading = self._loads.pop(number)
        failed = set(range(len(loading.command.blocks))) - loading.written
        self._seen["block loaded"] += len(loading.written)
        self._answer(TierAnswer(number, failed=sorted(failed)))


def check_content(engine: Engine) -> None:
    """Check that each block of a tier has the KV of its name, and that nothing moves."""
    if (offloading := engine.core.scheduler.parts.get(KVOffloading)) is None:
        return
    assert not offloading.moving, "blocks move for ever"
    for tier in offloading.tiers:
        for name in tier.index(0).names:
            kv = engine.tiers.content(tier.name, tier.index(0), name)  # type: ignore[union-attr]
            if tier.has(0, name) and kv is not None:  # a disk may have lost it
                assert kv == engine.named_kv[name], f"a block of {tier.name} has other KV than its name says"
