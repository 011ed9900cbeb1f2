"""Requests of a simulated replica that the autoscaler ends go on in others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cluster.autoscaling.slo import Limits
from cluster.lab.simulator.cluster import Cluster
from cluster.lab.simulator.results import MoveUse
from cluster.lab.simulator.trace import Trace
from engine.parts.handoffs.handoffs import Handoffs
from tests.cluster.lab.simulator.small_cluster import MODEL, small_cluster

REQUESTS, PROMPT, OUTPUT = 12, 200, 400
LIMITS = Limits(
    min_replicas=3,
    max_replicas=3,
    max_num_seqs=8,
    upscale_delay_s=1e9,
    downscale_delay_s=1e9,
    scale_to_zero_delay_s=1e9,
)  # so that only the test ends a replica


def run(
    *ends_at: float, moves: bool = True, fast_forward: int = 64, seqs: int = 8, prefill: int = 0, blocks: int = 1000
) -> Cluster:
    """Run twelve requests, which replicas take in turn. ends_at: seconds at which a replica gets no more requests."""
    spec = small_cluster(prefill, replicas=3, num_blocks=blocks, router="round_robin", max_num_seqs=seqs)
    trace = Trace("steady", np.arange(REQUESTS) * 0.01, np.full(REQUESTS, PROMPT), np.full(REQUESTS, OUTPUT))
    cluster = Cluster(replace(spec, limits=LIMITS, move_requests=moves), trace, fast_forward=fast_forward)

    def end() -> None:
        cluster._drained(cluster.pools["decode"].drain(cluster.loop.now))

    for second in ends_at:
        cluster.loop.at(second, end)
    cluster.run()
    for replica in cluster.pools["decode"].replicas:
        replica.scheduler.check()
        assert not replica.scheduler.parts[Handoffs].for_others.leased, "a replica would never end"
    return cluster


def counts(cluster: Cluster) -> dict[str, int]:
    totals = [replica.scheduler.parts[Handoffs].moves for replica in cluster.pools["decode"].replicas]
    return {name: sum(moves[name] for moves in totals) for name in ("received", "failed", "released", "expired")}


def test_requests_move_with_their_kv_and_no_token_is_computed_twice():
    cluster = run(1.0)
    report = cluster.report()
    assert report.completed == REQUESTS
    assert report.moves is not None and report.moves.count == 4
    assert counts(cluster) == {"received": 4, "failed": 0, "released": 4, "expired": 0}
    schedulers = [replica.scheduler for replica in cluster.pools["decode"].replicas]
    assert sum(s.totals.generation_tokens for s in schedulers) == REQUESTS * OUTPUT
    assert 4 * PROMPT < report.moves.gigabytes * 1e9 / MODEL.kv_bytes < 4 * (PROMPT + OUTPUT)


def test_a_replica_ends_earlier_than_without_moves():
    with_moves, without = run(1.0).report(), run(1.0, moves=False).report()
    assert without.moves is None and without.completed == REQUESTS
    assert with_moves.pools["decode"].gpu_hours < without.pools["decode"].gpu_hours


def test_waiting_requests_leave_without_kv_and_keep_their_first_token():
    """A replica has room for two sequences of four."""
    cluster = run(0.5, seqs=2)
    report = cluster.report()
    assert report.completed == REQUESTS
    assert report.moves is not None
    assert np.all(cluster.results.first_at < cluster.results.last_at)


def test_requests_that_the_others_have_no_room_for_end_where_they_are():
    report = run(0.5, seqs=4).report()
    assert report.moves == MoveUse(count=0, gigabytes=0.0)
    assert report.completed == REQUESTS


@pytest.mark.parametrize("ends_at", [0.05, 0.3, 1.0, 2.5])
def test_fast_forward_is_exact_while_requests_move(ends_at):
    fast, slow = (run(ends_at, fast_forward=steps).results for steps in (64, 0))
    for name in ("first_at", "last_at", "cached"):
        assert np.array_equal(getattr(fast, name), getattr(slow, name)), name


def test_a_request_that_moves_again_before_its_kv_is_read_frees_it():
    """Each replica has blocks for one request, so what moves there waits, and moves on with the second replica."""
    cluster = run(0.5, 0.52, blocks=50)
    assert cluster.report().completed == REQUESTS
    assert counts(cluster)["received"] < counts(cluster)["released"] + counts(cluster)["expired"]


def test_with_two_pools_requests_end_where_they_are():
    cluster = run(1.0, prefill=1)
    assert cluster.report().moves is None and cluster.report().completed == REQUESTS
