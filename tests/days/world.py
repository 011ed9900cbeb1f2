"""A day as it passes: clients, faults, and what must hold."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from deployments.jobs import job as job_module
from deployments.quotas.key_quota import RequestQuota
from engine.errors import ServingError
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.kv_fetching.kv_fetching import KVFetching
from engine.parts.speculation.speculator import Speculator
from engine.wire import timeline
from engine.wire.generate_request import GenerateRequest
from tests.days.client import Client
from tests.days.cluster import Cluster
from tests.days.day import Ask, Day
from tests.days.ingress import Ingress
from tests.days.keys import Computation, KeyedClient, check_jobs
from tests.days.loop import VirtualLoop
from tests.days.model import alone
from tests.days.remains import check_that_nothing_failed, check_that_nothing_is_left
from tests.days.states import states_of
from tests.days.stills import StillLoop
from tests.days.strike import strike

SETTLE_S = 20.0  # after the last request: longer than a lease
FORGET_S = 60.0  # more on every eighth day: what has ended is remembered for a minute
LIMIT_S = 200.0  # after the last request or fault, until all must have ended
WATCH_S = 0.1  # between two looks at the queues of the ingresses


@dataclass
class Outcome:
    seconds: float = 0.0
    """Simulated."""
    error: BaseException | None = None
    log: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    digest: int = 0
    """Of all messages."""
    steps: int = 0

    @property
    def kind(self) -> str:
        """What is wrong, without names."""
        if self.error is None:
            return ""
        text = str(self.error).split("\n")[0]
        return f"{type(self.error).__name__}: {''.join(c for c in text if not c.isdigit())[:60]}"


def run(day: Day, states: set[Hashable] | None = None) -> Outcome:
    """Live through a day. states: takes those in which the cluster is whenever it is looked at."""
    loop, outcome = (StillLoop if day.stands_still else VirtualLoop)(), Outcome()
    asyncio.set_event_loop(loop)
    gc.disable()  # a day is short
    worlds: list[World] = []

    async def live() -> None:
        worlds.append(World(loop, day, patches, states))
        await worlds[0].live()

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(timeline, "time", SimpleNamespace(time=loop.time)))
        patches.enter_context(mock.patch.object(job_module, "LiveGeneration", Computation))
        try:
            loop.run_until(asyncio.ensure_future(live(), loop=loop))
        except Exception as error:  # noqa: BLE001 - it is the outcome
            outcome.error = error
        finally:
            outcome.seconds = loop.time()
            for world in worlds:
                world.tell(outcome)
            _end(loop)
            asyncio.set_event_loop(None)
            loop.close()
            gc.enable()
    return outcome


def _end(loop: VirtualLoop) -> None:
    """Cancel what still runs, and look away."""
    loop.failure = None
    loop.set_exception_handler(lambda *_: None)
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    with suppress(Exception):
        loop.run_until(asyncio.ensure_future(asyncio.wait(tasks, timeout=1.0), loop=loop))


class World:
    def __init__(self, loop: VirtualLoop, day: Day, patches: ExitStack, states: set[Hashable] | None):
        """patches: what replaces clocks and chance of the real code until the day ends. states: as for `run`."""
        self.loop, self.day, self.patches, self._states = loop, day, patches, states
        self.cluster = cluster = Cluster(loop, random.Random(day.seed + 1), day.size)
        cluster.network.loss, cluster.network.repeats = day.loss, day.repeats
        cluster.network.late_s, cluster.network.late = day.late_s, day.late
        cluster.network.busy = day.busy
        cluster.only_losses = day.only_losses
        self.quota_of: Callable[[Ingress, Ask], RequestQuota | None] = lambda ingress, ask: None
        self.is_refusal: Callable[[Ask, ServingError], bool] = lambda ask, error: False
        """Checks a refusal by the limits of an API key. Returns whether the error is one."""
        self.parts = [plan.open(self) for plan in day.parts]
        self._alone: dict[tuple[str, str], tuple[list[int], str, str]] = {}

    async def live(self) -> None:
        cluster, day = self.cluster, self.day
        cluster.start()
        names = [ask.requests[0].request_id for ask in day.asks]
        clients = [
            asyncio.ensure_future((KeyedClient if ask.key else Client)(self, ask).live(), loop=self.loop)
            for ask in day.asks
        ]
        for part in self.parts:
            clients += [asyncio.ensure_future(client, loop=self.loop) for client in part.clients()]
        names += ["a part of the day"] * (len(clients) - len(names))
        watch = asyncio.ensure_future(self._watch())
        for fault in day.faults:
            self.loop.call_at(fault.at, strike, self, fault)
        _, late = await asyncio.wait(clients, timeout=day.last_at + LIMIT_S) if clients else (None, None)
        if late:
            never = [name for name, client in zip(names, clients, strict=True) if client in late]
            raise AssertionError(f"never ended: {' '.join(never)}")
        for client in clients:
            client.result()
        if watch.done():
            watch.result()  # it has failed
        watch.cancel()
        cluster.network.loss = cluster.network.repeats = cluster.network.busy = 0.0
        await asyncio.sleep(max(0.0, day.last_at - self.loop.time()))
        await self._orphans_end()
        forgets = day.seed % 8 == 0
        more_s = max((part.settle_s for part in self.parts), default=0.0)
        await asyncio.sleep(SETTLE_S + max(more_s, FORGET_S * forgets))
        check_jobs(cluster)
        check_that_nothing_is_left(cluster, forgets)
        for part in self.parts:
            part.check_end()
        if day.is_calm:
            check_that_nothing_failed(cluster, day.scales)

    async def _orphans_end(self) -> None:
        """Wait for the calls of ingresses that have died, and for what a part works on without a client. A process that
        is gone cancels nothing, so its requests run to their end or their timeout."""
        until = self.loop.time() + LIMIT_S
        while self._has_orphans() and self.loop.time() < until:
            await asyncio.sleep(1.0)

    def _has_orphans(self) -> bool:
        orphaned_calls = self.cluster.has_lost_ingress and self.cluster.num_calls > 0
        return orphaned_calls or any(part.works_on for part in self.parts)

    def rng_of(self, ask: Ask) -> random.Random:
        """Return random numbers that do not depend on other requests."""
        return random.Random(f"{self.day.seed} {ask.key} {ask.client} {ask.at}")

    def alone(self, name: str, request: GenerateRequest) -> tuple[list[int], str, str]:
        """Return what `alone` does, computed once. name: of the request."""
        key = name, request.request_id
        if key not in self._alone:
            self._alone[key] = alone(request, self.day.size.max_model_len)
        return self._alone[key]

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self.check_queues()
            for part in self.parts:
                part.check()
            if self._states is not None:
                self._states.update(states_of(self.cluster))

    def check_queues(self) -> None:
        """Check that no request waits in an ingress that may send it."""
        for ingress in [ingress for ingress in self.cluster.ingresses if ingress.up and not ingress.is_behind]:
            queue = ingress.admission._queue
            waits = queue.num_waiting and queue.num_running < queue.window
            assert not waits, "a request waits although it may start"

    def tell(self, outcome: Outcome) -> None:
        """Add up what has happened."""
        cluster = self.cluster
        seen = outcome.seen = cluster.seen
        outcome.log, outcome.digest = cluster.log, cluster.digest
        for ingress in cluster.ingresses:
            for reason, count in ingress.stats.replays.items():
                seen[f"replay {reason}"] += count
        for engine in cluster.engines.values():
            scheduler = engine.core.scheduler
            outcome.steps += scheduler.totals.steps
            seen["role change"] += scheduler.parts[Handoffs].role_changes
            seen["preemption"] += scheduler.totals.preemptions
            if (speculator := scheduler.parts.get(Speculator)) is not None:
                drafts = speculator.totals
                seen["draft accepted"] += drafts.num_accepted_tokens
                seen["draft rejected"] += drafts.num_draft_tokens - drafts.num_accepted_tokens
            for result, count in scheduler.parts[Handoffs].moves.items():
                seen[f"move {result}"] += count
            fetching = scheduler.parts.get(KVFetching)
            for result, count in ({} if fetching is None else fetching.fetches).items():
                seen[f"fetch {result}"] += count
            for name, value in _counts(engine.channel.endpoint.stats()).items():
                seen[f"handoff {name}"] += value
        for part in self.parts:
            part.count()


def _counts(stats: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in stats.__struct_fields__:
        value = getattr(stats, name)
        if name == "results":
            found |= {f"{what} {why}".strip(): n for what, counts in value.items() for why, n in counts.items()}
        elif isinstance(value, dict):
            found |= {f"{name} {key}": count for key, count in value.items() if isinstance(count, int)}
        elif isinstance(value, int):
            found[name] = value
    return found
