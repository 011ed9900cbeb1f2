"""A replica that is out of KV blocks gives requests to one that has many."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from deployments.replicas import rebalancing
from deployments.replicas.departure import GROUP
from deployments.replicas.pools import ReplicaStatus
from deployments.replicas.rebalancing import FILLED_USAGE, IDLE_USAGE, rebalance, requests_to_move, room
from engine.core.output import Event
from engine.errors import EngineUnavailable
from engine.parts.handoffs.inputs import MovesAsked
from engine.wire.messages import EngineStatus
from engine.wire.stats.engine_stats import EngineStats
from tests.deployments.replicas.fake_prefill import status
from tests.engine.kv_transfer.moving import Movers
from tests.engine.kv_transfer.test_moves import check, make_config, start_all
from tests.rank_pool import RankPool

SLOTS = 8


def stats(used: int = 0, running: int = 0, waiting: int = 0, **fields: int) -> EngineStats:
    """Of an engine with 100 blocks."""
    blocks = {"blocks_total": 100, "blocks_used": used, "blocks_free": 100 - used, "blocks_cached": 0}
    counts = {"running": running, "waiting": waiting, "receiving": 0, "preemptions": 0}
    return msgspec.structs.replace(status("a").stats, **blocks, **counts, **fields)


FULL = stats(used=100, running=5, waiting=3)


def test_as_many_leave_as_were_preempted_and_an_idle_engine_has_blocks_for():
    assert requests_to_move(1, FULL, [stats()], SLOTS) == 1
    assert requests_to_move(3, FULL, [stats()], SLOTS) == 3, "a fifth of the blocks each, up to three quarters"
    assert requests_to_move(9, FULL, [stats(used=30, running=2)], SLOTS) == 2
    assert requests_to_move(9, FULL, [stats(), stats()], SLOTS) == GROUP


def test_none_leave_an_engine_that_has_preempted_none():
    assert requests_to_move(0, FULL, [stats()], SLOTS) == 0


def test_none_leave_for_an_engine_that_is_not_idle():
    for other in (stats(used=51, running=3), stats(used=10, running=8, waiting=1), stats(used=10, running=8)):
        assert requests_to_move(3, FULL, [other], SLOTS) == 0
    assert requests_to_move(3, FULL, [], SLOTS) == 0


def test_the_last_request_stays():
    assert requests_to_move(3, stats(used=100, running=1), [stats()], SLOTS) == 0
    assert requests_to_move(3, stats(), [stats()], SLOTS) == 0, "all have ended meanwhile"


@given(used=st.integers(0, 100), running=st.integers(0, SLOTS), share=st.floats(0.001, 1.0))
def test_an_engine_is_never_filled_so_far_that_it_has_to_preempt_for_it(used, running, share):
    found = room(stats(used, running), share, SLOTS)
    assert 0 <= found <= SLOTS - running
    assert not found or (used / 100 <= IDLE_USAGE and used / 100 + found * share <= FILLED_USAGE + 1e-9)


class Engine:
    """preemptions: total at each look."""

    def __init__(self, *preemptions: int | None):
        self.left, self.moved = list(preemptions), list[int]()

    def status(self) -> ReplicaStatus:
        if not self.left:
            raise asyncio.CancelledError
        if (total := self.left.pop(0)) is None:
            raise EngineUnavailable("silent")
        found = msgspec.structs.replace(FULL, preemptions=total)
        return ReplicaStatus.of(msgspec.structs.replace(status("own"), fingerprint="same", stats=found), {})

    def move_requests(self, count: int) -> None:
        self.moved.append(count)


def test_requests_leave_after_each_period_with_preemptions_to_engines_of_the_same_model(monkeypatch):
    monkeypatch.setattr(rebalancing, "PERIOD_S", 0.0)
    asked = 0

    def replica(name: str, fingerprint: str) -> EngineStatus:
        return msgspec.structs.replace(status(name), fingerprint=fingerprint, stats=stats())

    async def statuses() -> Sequence[EngineStatus]:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise RuntimeError("Serve's controller is gone")
        return [replica("own", "same"), replica("new", "other"), *([replica("idle", "same")] if asked > 2 else [])]

    engine = Engine(0, 0, 1, None, 3, 5, 5)
    with suppress(asyncio.CancelledError):
        asyncio.run(rebalance(engine, statuses, SLOTS))  # type: ignore[arg-type]
    assert asked == 3, "only after preemptions"
    assert engine.moved == [2]


@pytest.mark.slow  # requests of real engines move in engine/kv_transfer/test_moves.py, too
def test_requests_move_from_a_real_engine_without_blocks_to_an_idle_one_and_keep_their_texts():
    """The engine is asked after its first step with preemptions, in its own thread: later, too few may be left."""
    small, large = (make_config("pocket", num_gpu_blocks_override=blocks, max_model_len=256) for blocks in (20, 200))
    with Movers(small, large, (RankPool(), RankPool())) as movers:
        full, idle, moved = movers.decode.server._core, movers.prefill.server._core.stats(), 0
        step = full.step

        def step_and_rebalance() -> list[Event]:
            nonlocal moved
            events, stats = step(), full.stats()
            if not moved:
                moved = requests_to_move(stats.preemptions, stats, [idle], SLOTS)
                if moved:
                    full.apply(MovesAsked(moved))
                    events = [*events, *full.take_events()]
            return events

        full.step = step_and_rebalance  # type: ignore[method-assign]
        start_all(movers, lengths=(15, 16, 17, 31, 32, 33), max_tokens=50)
        movers.listen(0, movers.ended)
        gone = movers.stopped()
        assert len(gone) == moved > 0
        movers.arrive(1)
        movers.listen(1, movers.ended)
        assert movers.prefill.scheduler.totals.preemptions == 0
        check(movers, make_config("pocket", moves=False))
