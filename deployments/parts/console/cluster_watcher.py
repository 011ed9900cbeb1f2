"""Polls all replicas and ingresses, and reports the changes between two polls. No HTTP, no Ray."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Literal

import msgspec

from deployments.observability.telemetry import Telemetry
from deployments.observability.timeline import SequenceTimeline
from deployments.replicas.pools import EnginePool, ModelReplicas, ReplicaStatus
from deployments.replicas.scaling_report import ScalingChange

MAX_EVENTS = 100
MISSES = 2  # consecutive polls without an answer after which a replica is gone: a busy one may be late once

EventKind = Literal["up", "gone", "replay"]


class ClusterEvent(msgspec.Struct, frozen=True):
    """Something that happened to a replica or a request."""

    at: float
    """Seconds since 1970."""
    kind: EventKind
    model: str
    name: str
    """Id of the replica, or of the request that resumes in another replica."""


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the console shows of a cluster at one time. Counts are totals, from which a viewer computes
    rates."""

    at: float
    """Seconds since 1970."""
    models: list[ModelReplicas]
    waiting: dict[str, int]
    """Number of sequences waiting for admission in all ingresses, by model."""
    requests: list[SequenceTimeline]
    """The newest sequences, newest first, without their events."""
    events: list[ClusterEvent]
    """Events since the first poll, newest last."""
    scaling: list[ScalingChange]
    """Scaling changes, newest last."""

    def without_requests(self) -> ClusterState:
        """Return a copy without what tells of single requests: their ids, sizes and times."""
        events = [event for event in self.events if event.kind != "replay"]
        models = [_without_handoffs(model) for model in self.models]
        return msgspec.structs.replace(self, requests=[], events=events, models=models)


class ClusterWatcher:
    """Watches a cluster by comparing each poll with the previous one."""

    def __init__(self, pools: Mapping[str, EnginePool], telemetry: Telemetry):
        """pools: by model name."""
        self._pools, self._telemetry = pools, telemetry
        self._events: deque[ClusterEvent] = deque(maxlen=MAX_EVENTS)
        self._replicas: dict[str, str] | None = None  # replica id -> model; None before the first poll
        self._missed: dict[str, int] = {}  # consecutive missed polls, by replica
        self._replays: dict[str, int] = {}  # number of replays, by request

    async def poll(self) -> ClusterState:
        """Return the state of all replicas and ingresses that answer within a few seconds."""
        models, overviews, scaling = await asyncio.gather(
            ModelReplicas.of_all(self._pools),
            self._telemetry.overviews(),
            self._telemetry.scaling_changes(),
        )
        requests = sorted((r for overview in overviews for r in overview.requests), key=lambda r: -r.arrived_at)
        now = time.time()
        self._compare_replicas(models, now)
        self._compare_requests(requests, now)
        return ClusterState(
            at=now,
            models=[_brief(model) for model in models],
            waiting={name: sum(o.waiting.get(name, 0) for o in overviews) for name in self._pools},
            requests=requests,
            events=list(self._events),
            scaling=scaling,
        )

    def _compare_replicas(self, models: list[ModelReplicas], now: float) -> None:
        up = {status.engine_id: model.model for model in models for status in model.all}
        known = up if self._replicas is None else self._replicas
        for replica in up.keys() - known.keys():
            self._events.append(ClusterEvent(now, "up", up[replica], replica))
        self._missed = {replica: self._missed.get(replica, 0) + 1 for replica in known.keys() - up.keys()}
        gone = {replica for replica, misses in self._missed.items() if misses >= MISSES}
        for replica in gone:
            self._events.append(ClusterEvent(now, "gone", known[replica], replica))
        self._replicas = {replica: model for replica, model in {**known, **up}.items() if replica not in gone}

    def _compare_requests(self, requests: list[SequenceTimeline], now: float) -> None:
        for request in requests:
            if request.replays > self._replays.get(request.request_id, 0):
                self._events.append(ClusterEvent(now, "replay", request.model, request.request_id))
        self._replays = {request.request_id: request.replays for request in requests if request.replays}


def _brief(model: ModelReplicas) -> ModelReplicas:
    """Return a copy without what the console does not show: histograms, and requests that ended since the previous
    status."""
    brief = {role: [_brief_status(status) for status in statuses] for role, statuses in model.by_role.items()}
    return msgspec.structs.replace(model, **brief)


def _without_handoffs(model: ModelReplicas) -> ModelReplicas:
    hidden = {
        role: [msgspec.structs.replace(status, live_handoffs=[]) for status in statuses]
        for role, statuses in model.by_role.items()
    }
    return msgspec.structs.replace(model, **hidden)


def _brief_status(status: ReplicaStatus) -> ReplicaStatus:
    parts = {name: as_json(record) for name, record in status.stats.parts.items()}
    stats = msgspec.structs.replace(status.stats, histograms={}, parts=parts)
    return msgspec.structs.replace(status, ended=[], stats=stats)


def as_json(record: msgspec.Raw) -> msgspec.Raw:
    """Return a record of a part, which is in msgpack, as it stands in JSON."""
    return msgspec.Raw(msgspec.json.encode(msgspec.msgpack.decode(record)))
