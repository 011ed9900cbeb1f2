"""Conversations in the simulator: turns wait for answers, and find them in the cache."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cluster.config.simulation_options import SimulationOptions
from cluster.lab.simulator.cluster import Cluster
from cluster.lab.simulator.conversations.turn import DueTurns, Turn, with_active
from cluster.lab.simulator.spec import find_trace
from cluster.lab.simulator.trace import Trace, make_trace
from engine.errors import InvalidParameter
from tests.cluster.lab.simulator.small_cluster import BLOCK, small_cluster


def run(trace: Trace, **options) -> Cluster:
    cluster = Cluster(small_cluster(**options), trace)
    cluster.run()
    for replica in cluster.pools["decode"].replicas:
        replica.scheduler.check()
    return cluster


def turn(session: int, *after: int, think_s: float = 0.0, agent: int = 0) -> Turn:
    return Turn(session, agent, after, think_s)


def talk(*turns: Turn, prompts: int = 64, outputs: int = 20) -> Trace:
    size = len(turns)
    return Trace("talk", np.zeros(size), np.full(size, prompts), np.full(size, outputs), turns=turns)


def test_a_turn_comes_so_long_after_the_last_of_those_that_it_waits_for():
    trace = talk(turn(0), turn(0, 0, think_s=3.0), turn(0, 0, think_s=9.0, agent=1), turn(0, 1, 2, think_s=1.0))
    results = run(trace).results
    later = results.arrived_at - results.last_at[[0, 0, 0, 2]]
    assert later.tolist() == pytest.approx([later[0], 3.0, 9.0, 1.0], abs=0.01)
    assert results.arrived_at[0] == 0 and results.last_at[2] > results.last_at[1]


def test_times_to_the_first_token_count_from_when_a_turn_comes():
    report = run(talk(turn(0), turn(0, 0, think_s=100.0))).report()
    assert report.completed == 2 and report.ttft_ms is not None
    assert report.ttft_ms.p99 < 1000


def test_a_turn_finds_the_prompt_and_the_answer_before_it_in_the_cache(tmp_path):
    lines = [{"session_id": "s", "input_length": 100, "output_length": 60}] * 3
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    cached = run(Trace.read(tmp_path / "t.jsonl"), replicas=1).results.cached.tolist()
    assert cached == [0, (160 - 1) // BLOCK * BLOCK, (320 - 1) // BLOCK * BLOCK]


def test_all_requests_of_agents_end_on_any_number_of_replicas():
    trace = make_trace("agents", 150, 5.0).scaled(0.005).with_active(3)
    for replicas in (1, 3):
        report = run(trace, replicas=replicas, num_blocks=2000, router="prefix_aware").report()
        assert report.completed == 150 and report.hit_rate > 0.8


def test_turns_come_at_the_same_times_whether_steps_are_taken_at_once_or_not():
    trace = make_trace("agents", 120, 5.0).scaled(0.005).with_active(4)
    found = []
    for at_once in (0, 64):
        cluster = Cluster(
            small_cluster(replicas=2, num_blocks=2000, router="prefix_aware"), trace, fast_forward=at_once
        )
        cluster.run()
        found.append(cluster.results)
    assert found[0].arrived_at.tolist() == found[1].arrived_at.tolist()
    assert found[0].last_at.tolist() == found[1].last_at.tolist()


def test_a_conversation_begins_as_another_ends_if_no_more_may_be_active():
    turns = [turn(0), turn(1), turn(2), turn(0, 0), turn(3), turn(0, 0, agent=1)]
    limited = with_active(turns, [0, 1, 2, 3, 4, 5], 2)
    assert [each.after for each in limited] == [(), (), (3, 5), (0,), (1,), (0,)]
    due = DueTurns(limited)
    assert due.first == [0, 1]
    assert (due.ended(1), due.ended(0), due.ended(3), due.ended(5)) == ([4], [3, 5], [], [2])


def test_beginnings_of_one_conversation_keep_their_distance():
    limited = with_active([turn(0), turn(1), turn(1)], [0.0, 5.0, 8.0], 1)
    assert [(each.after, each.think_s) for each in limited] == [((), 0.0), ((0,), 0.0), ((0,), 3.0)]


def test_pauses_are_stretched_with_the_rate():
    trace = make_trace("agents", 200, 10.0)
    slow = trace.at_rate(len(trace) / trace.duration_s / 2)
    assert [each.think_s for each in slow.turns] == pytest.approx([2 * each.think_s for each in trace.turns])


def test_options_that_conversations_do_not_have_are_refused(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"turns": [{"text": "a"}, {"text": "b"}]}')
    for name, options in (
        ("burstiness", {"trace": str(tmp_path / "t.jsonl"), "burstiness": 0.5}),
        ("max_active_conversations", {"trace": "fixed", "max_active_conversations": 2}),
        ("scale", {"trace": "agents", "requests": 20, "scale": 1.5}),
    ):
        with pytest.raises(InvalidParameter, match=name):
            find_trace(SimulationOptions(**options))


def test_a_part_of_a_trace_waits_for_nothing_before_it():
    trace = talk(turn(0), turn(0, 0), turn(0, 1), turn(0, 0, 2))
    part = trace.busiest(2)
    assert part.turns is not None and len(part.turns) == 2
    assert all(0 <= before < index for index, each in enumerate(part.turns) for before in each.after)
