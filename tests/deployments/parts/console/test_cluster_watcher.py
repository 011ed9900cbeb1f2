"""What the console makes of two looks at a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from deployments.observability.telemetry import NoPeers, Telemetry
from deployments.observability.timeline import IngressOverview, SequenceTimeline
from deployments.parts.console.cluster_watcher import ClusterWatcher
from deployments.replicas.pools import ReplicaStatus
from deployments.replicas.scaling_report import ScalingChange
from engine.errors import EngineUnavailable
from engine.wire.messages import EngineStatus
from engine.wire.part_record import encoded
from engine.wire.parts.handoffs import HandoffTotals
from engine.wire.stats.handoff_stats import PeerPool
from engine.wire.stats.histogram import SECONDS, Histogram
from engine.wire.timeline import TimelineEvent
from tests.engine_stats import engine_stats


@dataclass
class FakePool:
    """The replicas that answer, by their ids."""

    up: list[str] = field(default_factory=list)

    async def statuses(self) -> list[ReplicaStatus]:
        if not self.up:
            raise EngineUnavailable("none is up")
        stats = engine_stats(
            histograms={"inter_token_latency_seconds": Histogram.over(SECONDS)},
            parts=encoded(HandoffTotals(moves={"received": 2})),
        )
        found = [EngineStatus(engine_id=name, ended=["r"], stats=stats, last_step_age_s=0.0) for name in self.up]
        return [ReplicaStatus.of(status, {}) for status in found]

    async def peer_statuses(self) -> dict[PeerPool, list[ReplicaStatus]]:
        return {}

    async def asleep(self) -> bool:
        return False


@dataclass
class FakePeers(NoPeers):
    """Another ingress."""

    overview: IngressOverview
    changes: list[ScalingChange] = field(default_factory=list)

    async def ask(self, what: str, kind: type[Any], *args: str) -> list[Any]:
        return [self.overview]

    async def scaling_changes(self) -> list[ScalingChange]:
        return self.changes


def timeline(request_id: str, **fields: Any) -> SequenceTimeline:
    return SequenceTimeline(request_id=request_id, model="m", prompt_tokens=3, **{"arrived_at": 1.0, **fields})


async def test_a_replica_that_comes_is_told_of_once_and_those_of_the_first_look_never():
    pool = FakePool(["a"])
    watcher = ClusterWatcher({"m": pool}, Telemetry("i"))
    assert (await watcher.poll()).events == []
    pool.up = ["a", "b"]
    for _ in range(2):
        (event,) = (await watcher.poll()).events
        assert (event.kind, event.model, event.name) == ("up", "m", "b")


async def test_a_replica_counts_as_gone_only_when_it_misses_two_looks_in_a_row():
    pool = FakePool(["a", "b"])
    watcher = ClusterWatcher({"m": pool}, Telemetry("i"))
    for up, gone in ((["a", "b"], []), (["a"], []), (["a", "b"], []), (["a"], []), ([], ["b"]), ([], ["b", "a"])):
        pool.up = up
        events = (await watcher.poll()).events
        assert [event.name for event in events if event.kind == "gone"] == gone
    assert [event.kind for event in events] == ["gone", "gone"]


async def test_each_replay_of_a_request_is_an_event():
    telemetry = Telemetry("i")
    request = timeline("r-0")
    telemetry.timelines.begin(request)
    watcher = ClusterWatcher({"m": FakePool(["a"])}, telemetry)
    kinds = []
    for replays in (0, 1, 1, 2):
        request.replays = replays
        kinds.append([event.name for event in (await watcher.poll()).events if event.kind == "replay"])
    assert kinds == [[], ["r-0"], ["r-0"], ["r-0", "r-0"]]


async def test_requests_and_queues_of_all_ingresses_are_in_one_state():
    change = ScalingChange(at=1.0, model="m", pool="decode", before=1, after=2, reason="itl", desired=2, inputs={})
    theirs = IngressOverview("other", {"m": 4}, [timeline("theirs", arrived_at=2.0)])
    telemetry = Telemetry("i", peers=FakePeers(theirs, [change]))
    telemetry.stats.model("m").waiting = 3
    telemetry.timelines.begin(timeline("ours"))
    state = await ClusterWatcher({"m": FakePool(["a"])}, telemetry).poll()
    assert state.waiting == {"m": 7}
    assert [request.request_id for request in state.requests] == ["theirs", "ours"]
    assert state.scaling == [change]


async def test_nobody_is_sent_histograms_or_events_of_requests():
    telemetry = Telemetry("i")
    telemetry.timelines.begin(timeline("r", events=[TimelineEvent.now("queued")]))
    state = await ClusterWatcher({"m": FakePool(["a"])}, telemetry).poll()
    (replica,) = state.models[0].decode
    assert (replica.stats.histograms, replica.ended, state.requests[0].events) == ({}, [], [])


async def test_viewers_are_sent_what_parts_report():
    """Engines report it in msgpack, and viewers read JSON."""
    state = await ClusterWatcher({"m": FakePool(["a"])}, Telemetry("i")).poll()
    sent = msgspec.json.decode(msgspec.json.encode(state))
    assert sent["models"][0]["decode"][0]["stats"]["parts"]["handoffs"]["moves"] == {"received": 2}
