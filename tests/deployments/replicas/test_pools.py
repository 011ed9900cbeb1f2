"""The status of a replica is that of its engine, and more."""

from __future__ import annotations

import msgspec

from deployments.replicas.pools import ReplicaStatus
from deployments.routing.stats import RoutingStats
from engine.wire.messages import Notice, kinds_of
from engine.wire.stats.handoff_stats import PeerPool
from tests.deployments.replicas.fake_prefill import status


def test_status_of_an_engine_is_kept_and_read_back_with_what_prefill_requests_count():
    engine = status("decode-m-1", queued_tokens=3)
    routing: dict[PeerPool, RoutingStats] = {"encode": RoutingStats(policy="round_robin", cached_tokens=5)}
    found = ReplicaStatus.of(engine, routing)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=ReplicaStatus) == found
    assert (found.stats, found.routing) == (engine.stats, routing)


def test_either_kind_of_status_is_read_as_the_other():
    """Both are read while replicas of an older version run, and when the control actor reads its engine."""
    plain = status("decode-m-1")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=ReplicaStatus).routing == {}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ReplicaStatus.of(plain, {})), type=kinds_of(Notice)) == plain
