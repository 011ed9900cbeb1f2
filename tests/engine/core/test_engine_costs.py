from __future__ import annotations

from concurrent.futures import Future

import pytest

from engine.parts.costs.cost_ledger import CostLedger
from engine.wire.parts.costs import CostStats, SequenceCost


@pytest.mark.parametrize("overlap", [True, False])
def test_a_pause_without_a_lost_engine_is_neither_a_steps_time_nor_a_requests_cost(make_engine, monkeypatch, overlap):
    engine = make_engine(async_scheduling=overlap)
    launcher, launch = engine.core.ranks.launcher, engine.core.ranks.launcher.launch

    def paused_once(inputs):
        launched = launch(inputs)
        if isinstance(launched, Future):  # while it computes, the fake clock stands still
            launched.result()
        if inputs.plan.step == 8:
            engine.clock.now += 7.0
            launcher.resumed_at = engine.clock.now
        engine.clock.now += 0.5
        return launched

    monkeypatch.setattr(launcher, "launch", paused_once)
    engine.add("one", max_tokens=12)
    engine.go()
    stats, (cost,) = engine.core.stats(), engine.last("one").records(SequenceCost)
    spent = stats.record(CostStats)
    assert spent.seconds["recovery"] == pytest.approx(7.0)
    assert spent.seconds["requests"] == cost.compute_s == pytest.approx(0.5 * stats.steps)
    assert 0.4 < stats.decode_seconds_per_step + stats.decode_seconds_per_sequence < 0.6
    assert cost.kv_gib_s == pytest.approx(spent.kv_gib_s)
    blocks = 5 * engine.core.observers[CostLedger].block_bytes[0] / 2**30
    assert cost.kv_gib_s < blocks * 0.5 * stats.steps, "nobody pays for KV meanwhile"
