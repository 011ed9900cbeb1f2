"""Requests that say where their prompt is to be computed."""

from __future__ import annotations

import pytest

from engine.errors import InvalidParameter
from engine.parts.handoffs.handoffs import Handoffs
from tests.engine.core.test_scheduler_handoffs import ids, only_open
from tests.fake_handoffs import DecodeHarness
from tests.fake_runner import Harness


def test_local_keeps_a_prompt_here_that_would_go_elsewhere():
    h = DecodeHarness(num_blocks=16, max_model_len=64)
    h.add("a", ids(14), prefill="local")
    h.run()
    assert h.scheduler.parts[Handoffs].report().prefill_decisions == {"local": {"asked": 1}}


def test_remote_sends_a_prompt_away_that_would_stay_here():
    h = DecodeHarness(num_blocks=16, max_model_len=64)
    h.policy.replicas = []
    h.add("a", ids(3), prefill="remote")
    h.step()
    h.receive(only_open(h))
    h.run()
    assert h.scheduler.parts[Handoffs].report().prefill_decisions == {"remote": {"asked": 1}}


@pytest.mark.parametrize(("attempts", "retry"), [(2, True), (1, False)])
def test_remote_fails_the_request_where_it_would_else_be_computed_here(attempts, retry):
    h = DecodeHarness(num_blocks=16, max_model_len=64, max_attempts=2)
    h.add("a", ids(14), prefill="remote")
    for _ in range(attempts):
        h.step()
        h.fail(only_open(h), verified_blocks=1, retry=retry)
    delta = h.finished["a"].delta
    assert delta.finish_reason == "error"
    assert delta.error.message.startswith("no other engine could compute the prompt: link")
    assert h.pool.num_used == 0
    assert h.step() is None


def test_remote_is_refused_where_there_is_no_other_engine():
    h = Harness(num_blocks=16, max_model_len=64)
    with pytest.raises(InvalidParameter, match="prefill must be auto or local"):
        h.add("a", ids(3), prefill="remote")
