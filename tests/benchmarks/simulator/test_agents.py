from __future__ import annotations

import pytest

from benchmarks.simulator.agents import measure, tokens_at_a_time
from cluster.lab.simulator.trace import make_trace
from engine.errors import InvalidParameter


def test_a_tier_keeps_what_small_caches_lose():
    trace = make_trace("agents", 500, 10.0).scaled(0.01).with_active(12)
    report = measure(trace, 12, replicas=2, overcommit=2.5, block_size=16, router="prefix_aware")
    endless, small, with_tier = report.shares
    assert small.cached < with_tier.cached <= endless.cached
    assert endless.from_tiers == small.from_tiers == 0 < with_tier.from_tiers
    assert report.of_endless == with_tier.cached / endless.cached
    assert report.cache == int(tokens_at_a_time(trace, 12) / 2.5 / 2)


def test_caches_that_do_not_fit_a_context_are_refused():
    trace = make_trace("agents", 60, 10.0).scaled(0.01).with_active(1)
    with pytest.raises(InvalidParameter, match="sessions"):
        measure(trace, 1, replicas=4, overcommit=5.0, block_size=16, router="prefix_aware")
