"""Holds: prompts that stay cached for a time, and move to other replicas when theirs departs. Only sockets are
modelled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec

import deployments.parts.holds.hold_moves as hold_moves_module
from deployments.replicas.departure import Statuses
from deployments.replicas.engine_control import EngineControl
from engine.parts.holds.holds import Holds
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.holds import HoldMark, PromptHold
from engine.wire.token_delta import TokenBatch
from tests.days.part import Part

if TYPE_CHECKING:
    from tests.days.day import Ask, Day
    from tests.days.world import World

LEAST_BLOCKS = 40  # of an engine: holds leave enough for one request of the maximum length
NAMES = ("one", "two", "three")  # of conversations
BATCH = msgspec.msgpack.Decoder(TokenBatch)


class Answers:
    """Has the methods of PullSocket that `move_holds` calls."""

    def __init__(self, part: HoldPart, node: str):
        self._cluster, self._node = part.cluster, node
        part.num_moves += 1
        self.address = f"moves:{node}:{part.num_moves}"

    async def serve(self, take: Callable[[TokenBatch], None]) -> None:
        self._cluster.seen["holds move"] += 1
        self._cluster.addresses[self.address] = self._node, lambda data: take(BATCH.decode(data))
        await asyncio.get_running_loop().create_future()


@dataclass(frozen=True)
class Held:
    """share, share_per_client: of each engine's blocks."""

    share: float
    share_per_client: float

    def open(self, world: World) -> Part:
        return HoldPart(world)


class HoldPart(Part):
    def __init__(self, world: World):
        self.cluster, self.num_moves = world.cluster, 0
        rng = random.Random(f"{world.day.seed} holds")
        sockets = SimpleNamespace(Context=lambda: SimpleNamespace(destroy=lambda linger: None))
        for name, value in (
            ("PullSocket", lambda context, node, *_, **__: Answers(self, node)),
            ("zmq", SimpleNamespace(asyncio=sockets)),
            ("secrets", SimpleNamespace(token_hex=lambda size: f"{rng.getrandbits(8 * size):0{2 * size}x}")),
            ("time", SimpleNamespace(monotonic=world.loop.time)),
        ):
            world.patches.enter_context(mock.patch.object(hold_moves_module, name, value))

    def check_end(self) -> None:
        """Check that all holds end, and give back their blocks."""
        for engine in self.cluster.engines.values():
            holds = engine.core.scheduler.parts.get(Holds)
            if holds is not None and engine.alive and not engine.paused:
                holds.update(engine.clock.monotonic())
                assert not holds.table.by_end, f"{engine.engine_id}: a hold lasts longer than its time"
                left = engine.core.scheduler.kv_cache.pool.num_used
                assert not left, f"{engine.engine_id}: blocks are held by nobody"

    def count(self) -> None:
        for engine in self.cluster.engines.values():
            if (holds := engine.core.scheduler.parts.get(Holds)) is not None:
                stats = holds.report()
                self.cluster.seen["hold granted"] += stats.granted
                for why, count in (*stats.refused.items(), *stats.ended.items()):
                    self.cluster.seen[f"hold {why}"] += count


async def move_holds(replica: EngineControl, node: str, statuses: Statuses, send: Callable[..., Any]) -> None:
    """As ReplicaHolds does when its replica is about to stop. send: to other replicas."""
    others: Any = SimpleNamespace(statuses=statuses, send=send, model=None, host=node, key=None)
    await hold_moves_module.move_holds(replica, others)


def add(day: Day, rng: random.Random) -> Day:
    """Give some days holds, and faults that release them."""
    if rng.random() < 0.75:
        return day
    plan = Held(rng.choice([0.3, 0.5]), rng.choice([0.15, 0.5]))
    ttl_s, chance = rng.choice([0.5, 3.0, 10.0]), rng.random()  # a request that is sent twice has the same holds
    asks = tuple(_with_holds(ask, ttl_s, random.Random(f"{chance} {ask.requests[0].request_id}")) for ask in day.asks)
    faults = day.faults
    if faults:
        from tests.days.day import Fault

        at = [rng.choice(asks).at + rng.uniform(0, 2.0) for _ in range(rng.choice([0, 1, 3]))]
        faults += tuple(Fault(each, "release holds", rng.randrange(100), rng.randrange(100), 0.0) for each in at)
        if not (day.scales or day.only_losses or day.size.roles) and rng.random() < 0.5:
            faults += (Fault(rng.choice(asks).at + 1.0, "drain", rng.randrange(100), 0, 0.0),)
    size = replace(day.size, held=plan, num_blocks=max(day.size.num_blocks, LEAST_BLOCKS))
    return replace(day, size=size, asks=asks, faults=faults, parts=(*day.parts, plan))


def _with_holds(ask: Ask, ttl_s: float, rng: random.Random) -> Ask:
    prompt, client = ask.requests[0].prompt, ask.client
    if rng.random() < 0.3:
        return ask
    ends = sorted({len(prompt), rng.randrange(1, len(prompt) + 1)}) if rng.random() < 0.3 else [len(prompt)]
    marks = [HoldMark(end, ttl_s * rng.choice([0.3, 1.0])) for end in ends]
    holds = PromptHold(marks=marks, name=rng.choice(["", *NAMES]), response_id=ask.requests[0].request_id)

    def changed(request: GenerateRequest) -> GenerateRequest:
        return msgspec.structs.replace(request, client=client).asking(holds)

    return replace(ask, requests=tuple(map(changed, ask.requests)))
