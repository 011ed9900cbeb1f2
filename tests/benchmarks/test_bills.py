"""What benchmarks.bills compares: an engine and an ingress with bills, and without."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.bills import cores, measure_ingress, measure_requests, measure_steps
from benchmarks.host import step
from engine.parts.costs.cost_ledger import CostLedger


def test_one_engine_accounts_for_its_time_and_the_other_for_nothing():
    with ExitStack() as stack:
        off, on = cores(2, stack)
        for core in (off, on):
            for _ in range(4):
                step(core)
        assert off.observers.get(CostLedger) is None
        ledger = on.observers[CostLedger]
        assert ledger.ns["requests"] > 0 < ledger.kv_gib_s
        assert not off.scheduler.kv_cache.pools[0].observers


def test_each_kind_of_work_is_measured_both_ways():
    found = [measure_steps(2, 2), measure_requests(2), *measure_ingress(2)]
    assert len({cost.what for cost in found}) == 4 and all(cost.without_us > 0 for cost in found)
