"""Adapters: a request with one has KV and tokens of its own. The weights are modelled: KV begins with the adapter's
digest. They take time to get into a slot (adapter_loader.py)."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.parts.lora.adapter_slots import AdapterSlots
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.parts.speculation import Prediction
from tests.days.model import alone
from tests.days.part import Part

if TYPE_CHECKING:
    from tests.days.day import Ask, Day
    from tests.days.world import World


@dataclass(frozen=True)
class Adapters:
    """slots: of each engine."""

    slots: int

    def open(self, world: World) -> Part:
        return AdapterPart(world)


class AdapterPart(Part):
    def __init__(self, world: World):
        self._cluster = world.cluster

    def check_end(self) -> None:
        for engine in self._cluster.engines.values():
            slots = engine.core.scheduler.parts.get(AdapterSlots)
            if slots is not None and engine.alive and not engine.paused:
                assert not slots.loading, f"{engine.engine_id}: an adapter loads for ever"


def add(day: Day, rng: random.Random) -> Day:
    """Give some days adapters, often more of them than an engine has slots."""
    if rng.random() < 0.75:
        return day
    plan = Adapters(rng.choice([1, 2, 4]))
    digests = ["", *(f"{rng.getrandbits(62) + 1:x}" for _ in range(rng.choice([1, 3, 6])))]
    chance = rng.random()  # a request that is sent twice has the same adapter
    asks = tuple(_with_adapter(ask, digests, chance, day.size.max_model_len) for ask in day.asks)
    return replace(day, size=replace(day.size, adapters=plan.slots), asks=asks, parts=(*day.parts, plan))


def _with_adapter(ask: Ask, digests: list[str], chance: float, max_model_len: int) -> Ask:
    digest = random.Random(f"{chance} {ask.requests[0].request_id}").choice(digests)
    if not digest:
        return ask

    def changed(request: GenerateRequest) -> GenerateRequest:
        request = request.asking(ModelAdapter(f"a{digest[:3]}", digest=digest))
        if request.record(Prediction) is not None:
            request = request.asking(Prediction(alone(request, max_model_len)[0]))
        return request

    return replace(ask, requests=tuple(map(changed, ask.requests)))
