from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cluster.lab.simulator.spec import GoodputSlo
from cluster.lab.simulator.trace import Trace
from cluster.lab.simulator.tuning.search import Tuner, make_grid, sizes
from engine.errors import PromptTooLong
from tests.cluster.lab.simulator.small_cluster import small_cluster

#: 24 requests at once: with 8 at a time, two thirds wait for others to end.
BURST = Trace("burst", np.zeros(24), np.full(24, 20), np.full(24, 50))
SLO = GoodputSlo(ttft_s=0.1, tpot_s=0.05)


def tuner(max_gpus: int = 2, *, trace: Trace = BURST, objective="goodput", given=(), **options) -> Tuner:
    spec = replace(small_cluster(router="round_robin", **options), slo=SLO)
    return Tuner(spec, trace, objective, max_gpus, make_grid(spec, max_gpus, given))


def test_the_option_that_lets_requests_wait_is_found_and_nothing_else_is_changed():
    best = tuner(replicas=2).tune()
    assert list(best.changes) == ["max_num_seqs"] and best.changes["max_num_seqs"] > 8
    assert best.report.good == 1.0


def test_a_cluster_that_cannot_be_better_stays_as_it_is():
    easy = Trace("easy", np.arange(4.0), np.full(4, 20), np.full(4, 5))
    assert tuner(trace=easy, replicas=2).tune().changes == {}


def test_the_fewest_gpus_that_are_good_enough_are_found():
    search = tuner(8, objective="cost", replicas=8, max_num_seqs=2, max_num_batched_tokens=16)
    best = search.tune()
    assert search.is_good_enough(best)
    assert best.spec.gpus < 8 and best.changes["max_num_seqs"] > 2


def test_no_cluster_has_more_gpus_than_allowed():
    tried = []
    spec = replace(small_cluster(replicas=2), slo=GoodputSlo(ttft_s=1e-6, tpot_s=1e-6))
    search = Tuner(spec, BURST, "cost", 3, make_grid(spec, 3), tried.append)
    assert not search.is_good_enough(search.tune())
    assert {trial.spec.gpus for trial in tried} == {1, 2, 3}
    assert any(trial.spec.prefill_replicas for trial in tried)


def test_values_that_are_given_replace_the_usual_ones():
    grid = make_grid(small_cluster(), 2, [("max_num_seqs", 3), ("max_num_seqs", 5), ("decode.num_replicas", 2)])
    assert [{"max_num_seqs": 3}, {"max_num_seqs": 5}] in grid
    assert [{"decode.num_replicas": 2}] in grid
    assert not any("prefill.num_replicas" in choice for choices in grid for choice in choices)


def test_settings_that_no_engine_can_have_are_left_out():
    best = tuner(replicas=2, given=[("max_num_seqs", 10_000), ("max_num_seqs", 12)]).tune()
    assert best.changes == {"max_num_seqs": 12}
    with pytest.raises(PromptTooLong):
        tuner(trace=Trace("long", np.zeros(1), np.array([10**6]), np.ones(1, dtype=int))).tune()


def test_sizes_have_one_pool_or_two():
    pairs = [tuple(choice.values()) for choice in sizes(4)]
    assert pairs == [(1, 0), (2, 0), (1, 1), (3, 0), (2, 1), (1, 2), (4, 0), (3, 1), (2, 2), (1, 3)]
