"""One poll for all viewers, and none without a viewer."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec
import pytest

from deployments.parts.console import feed
from deployments.parts.console.cluster_watcher import ClusterState
from deployments.parts.console.feed import ClusterFeed
from tests.deployments.fake_api import until


class FakeWatcher:
    """Counts its polls. fails: polls, counted from 1, that raise."""

    def __init__(self, fails: tuple[int, ...] = ()):
        self.polls, self._fails = 0, fails

    async def poll(self) -> ClusterState:
        self.polls += 1
        if self.polls in self._fails:
            raise RuntimeError("a bug")
        return ClusterState(at=self.polls, models=[], waiting={}, requests=[], events=[], scaling=[])


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("INTERVAL_S", 0.01), ("LINGER_S", 0.05), ("STREAM_S", 5.0)):
        monkeypatch.setattr(feed, name, seconds)


def number_of(event: bytes) -> float:
    return msgspec.json.decode(event.removeprefix(b"data: "), type=ClusterState).at


async def watch(shared: ClusterFeed, count: int) -> list[float]:
    """The numbers of the first polls that a viewer sees."""
    seen = []
    async with aclosing(shared.events(with_requests=True)) as events:
        async for event in events:
            seen.append(number_of(event))
            if len(seen) == count:
                break
    return seen


async def test_ten_viewers_share_each_poll():
    watcher = FakeWatcher()
    shared = ClusterFeed(watcher)  # type: ignore[arg-type]
    assert await asyncio.gather(*(watch(shared, 3) for _ in range(10))) == [[1, 2, 3]] * 10
    assert watcher.polls == 3


async def test_the_cluster_is_not_polled_before_the_first_viewer_nor_long_after_the_last():
    watcher = FakeWatcher()
    shared = ClusterFeed(watcher)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert watcher.polls == 0
    assert await watch(shared, 1) == [1]
    await until(lambda: shared._polling is None)
    polls = watcher.polls
    assert await watch(shared, 1) == [polls + 1], "the next viewer gets no old state"


async def test_a_poll_that_fails_costs_a_viewer_nothing_but_time():
    assert await watch(ClusterFeed(FakeWatcher(fails=(1, 3))), 2) == [2, 4]  # type: ignore[arg-type]


async def test_a_stream_ends_by_itself_so_that_a_server_can_stop(monkeypatch):
    monkeypatch.setattr(feed, "STREAM_S", 0.02)
    shared = ClusterFeed(FakeWatcher())  # type: ignore[arg-type]
    assert [number_of(event) async for event in shared.events(with_requests=True)]


async def test_a_viewer_that_comes_just_before_polling_ends_is_shown_the_next_one(monkeypatch):
    monkeypatch.setattr(feed, "LINGER_S", 0.0)
    watcher = FakeWatcher()
    shared = ClusterFeed(watcher)  # type: ignore[arg-type]
    assert await watch(shared, 1) == [1]
    assert await watch(shared, 2) == [1, 2]
