"""Agents that are drawn have the published shape."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.simulator.write_trace import reuse
from cluster.lab.simulator.trace import Trace, make_trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace("agents", 30_000, 10.0)


def test_a_session_has_as_many_turns_and_a_turn_as_many_tokens_as_published(trace):
    own = [index for index, turn in enumerate(trace.turns) if not turn.agent]
    turns = Counter(trace.turns[index].session for index in own)
    assert np.mean(list(turns.values())) == pytest.approx(43, rel=0.15)
    assert trace.prompt_tokens[own].mean() == pytest.approx(142_000, rel=0.1)
    assert trace.output_tokens[own].mean() == pytest.approx(444, rel=0.1)


def test_nearly_all_of_a_prompt_was_in_one_before(trace):
    assert 0.95 < reuse(trace) < 0.995


def test_some_sessions_have_subagents_that_begin_at_a_time_and_the_agent_waits_for_all(trace):
    sessions = {turn.session for turn in trace.turns}
    agents = {(turn.session, turn.agent) for turn in trace.turns if turn.agent}
    with_subagents = {session for session, _ in agents}
    assert len(with_subagents) / len(sessions) == pytest.approx(0.44, abs=0.08)
    assert len(agents) / len(with_subagents) == pytest.approx(4, abs=0.4)
    for session in sorted(with_subagents)[:5]:
        own = {index: turn for index, turn in enumerate(trace.turns) if turn.session == session}
        began = {turn.after for turn in own.values() if turn.agent and not own[turn.after[0]].agent}
        assert len(began) == 1, "all begin after the same turn"
        joins = [turn for turn in own.values() if len(turn.after) > 1]
        assert len(joins) == 1 and not joins[0].agent
        assert {own[before].agent for before in joins[0].after} == {turn.agent for turn in own.values()} - {0}


def test_a_turn_repeats_the_prompt_and_the_answer_before_it_and_comes_after_a_pause(trace):
    small = trace.first(300).scaled(0.01)
    prompts = [small.prompt(index) for index in range(300)]
    pauses = []
    for index, turn in enumerate(small.turns):
        assert len(prompts[index]) == small.prompt_tokens[index]
        if len(turn.after) == 1 and small.turns[turn.after[0]].agent == turn.agent:
            (before,) = turn.after
            assert prompts[index][: len(prompts[before])] == prompts[before]
            pauses.append(turn.think_s)
    assert np.median(pauses) == pytest.approx(4, rel=0.4) and max(pauses) <= 300


def test_requests_come_at_the_rate_that_is_asked_for_and_after_what_they_wait_for(trace):
    first = [at for at, turn in zip(trace.arrivals_s, trace.turns, strict=True) if not turn.after]
    turns = Counter(turn.session for turn in trace.turns)
    assert len(first) / first[-1] * np.mean(list(turns.values())) == pytest.approx(10, rel=0.2)
    assert all(before < index for index, turn in enumerate(trace.turns) for before in turn.after)


def test_a_hundredth_has_a_hundredth_of_the_tokens_and_shares_as_much():
    whole = make_trace("agents", 400, 10.0)
    small = whole.scaled(0.01)
    assert small.prompt_tokens.mean() == pytest.approx(whole.prompt_tokens.mean() / 100, rel=0.01)
    assert small.output_tokens.min() == 1
    seen = Counter(token for index in range(400) for token in set(small.prompt(index)))
    assert seen.most_common(1)[0][1] > 40, "prompts of one program begin alike"
