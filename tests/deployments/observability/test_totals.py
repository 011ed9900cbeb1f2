from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from deployments.observability import totals
from deployments.observability.telemetry import Telemetry
from deployments.observability.timeline import SequenceTimeline
from deployments.observability.totals import TotalsLog
from deployments.replicas.pools import ReplicaStatus
from engine.wire.messages import EngineStatus
from engine.wire.stats.handoff_stats import PeerPool
from tests.deployments.fake_api import until
from tests.engine_stats import engine_stats


class FakePool:
    """One replica with these totals."""

    def __init__(self) -> None:
        self.stats = engine_stats()
        self.asked = 0

    async def statuses(self) -> list[ReplicaStatus]:
        self.asked += 1
        return [ReplicaStatus.of(EngineStatus(engine_id="e", ended=[], stats=self.stats, last_step_age_s=0.0), {})]

    async def peer_statuses(self) -> dict[PeerPool, list[ReplicaStatus]]:
        return {}


@pytest.fixture
def lines() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("deployments.observability.totals")
    level, logger.level = logger.level, logging.INFO
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_rates_are_those_since_the_line_before(lines):
    async def scenario() -> None:
        pool = FakePool()
        log = TotalsLog({"m": pool}, Telemetry("i"))  # type: ignore[dict-item]  as much as is asked
        for prompt, output in ((100, 10), (300, 40)):
            pool.stats = engine_stats(
                prompt_tokens=prompt, generation_tokens=output, running=1, blocks_used=5,
                prefix_queried_tokens=prompt, prefix_hit_tokens=prompt // 2,
            )  # fmt: skip
            await log.log()

    asyncio.run(scenario())
    assert lines == [
        "totals prompt_tokens_per_s=10.0 output_tokens_per_s=1.0 running=1 waiting=0 kv_use=0.500 hit_rate=0.500",
        "totals prompt_tokens_per_s=20.0 output_tokens_per_s=3.0 running=1 waiting=0 kv_use=0.500 hit_rate=0.500",
    ]


async def test_engines_are_asked_only_after_an_interval_with_a_request(lines, monkeypatch):
    monkeypatch.setattr(totals, "INTERVAL_S", 0.01)
    pool, telemetry = FakePool(), Telemetry("i")
    running = asyncio.create_task(TotalsLog({"m": pool}, telemetry).run())  # type: ignore[dict-item]
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert (pool.asked, lines) == (0, [])
    timeline = SequenceTimeline(request_id="r", model="m", prompt_tokens=1, arrived_at=0.0)
    telemetry.timelines.begin(timeline)
    await until(lambda: bool(lines))
    running.cancel()


def test_what_other_ingresses_had_while_this_one_was_idle_does_not_count(lines, monkeypatch):
    async def scenario() -> None:
        monkeypatch.setattr(totals, "INTERVAL_S", 0.01)
        pool, telemetry = FakePool(), Telemetry("i")
        running = asyncio.create_task(TotalsLog({"m": pool}, telemetry).run())  # type: ignore[dict-item]
        for _ in range(20):  # turns of the loop, in which it may look
            await asyncio.sleep(0)
        pool.stats = engine_stats(generation_tokens=1_000_000)
        telemetry.timelines.begin(SequenceTimeline(request_id="r", model="m", prompt_tokens=1, arrived_at=0.0))
        await until(lambda: bool(lines))
        running.cancel()

    asyncio.run(scenario())
    assert "output_tokens_per_s=0.0" in lines[0]


async def test_a_look_that_fails_is_not_the_last(lines, monkeypatch):
    monkeypatch.setattr(totals, "INTERVAL_S", 0.01)
    pool, telemetry = FakePool(), Telemetry("i")
    stats, pool.stats = pool.stats, None  # type: ignore[assignment]  no status can be made of it
    telemetry.timelines.begin(SequenceTimeline(request_id="r", model="m", prompt_tokens=1, arrived_at=0.0))
    running = asyncio.create_task(TotalsLog({"m": pool}, telemetry).run())  # type: ignore[dict-item]
    await until(lambda: bool(lines))
    assert "the totals are unknown" in lines[0]
    pool.stats = stats
    await until(lambda: lines[-1].startswith("totals "))
    running.cancel()
