from __future__ import annotations

import pytest

from engine.serving.trial_queue import TrialQueue
from engine.wire.generate_request import TRIAL_S, TRIAL_TOKENS, GenerateRequest


def queue(*names: str) -> TrialQueue:
    trials = TrialQueue()
    for name in names:
        trials.add(GenerateRequest(request_id=name, prompt=[1]))
    return trials


def begins(trials: TrialQueue, now: float = 0.0) -> str | None:
    request = trials.next(now)
    return None if request is None else request.request_id


@pytest.mark.parametrize("ended", [True, False])
def test_one_request_is_tried_at_a_time_until_it_has_some_tokens_or_ends(ended):
    trials = queue("a", "b")
    assert begins(trials) == "a"
    assert begins(trials) is None
    trials.answered("other", TRIAL_TOKENS, ended=True)
    trials.answered("a", TRIAL_TOKENS - 1, ended=False)
    assert begins(trials) is None
    trials.answered("a", 0 if ended else 1, ended=ended)
    assert begins(trials) == "b"
    assert begins(trials) is None


def test_a_request_that_is_tried_for_long_keeps_the_next_one_waiting_no_longer():
    trials = queue("a", "b")
    assert begins(trials) == "a"
    assert begins(trials, TRIAL_S - 1) is None
    assert begins(trials, TRIAL_S) == "b"


def test_a_request_that_leaves_while_it_waits_is_not_tried():
    trials = queue("a", "b", "c")
    assert begins(trials) == "a"
    left = trials.remove("b")
    assert left is not None and left.request_id == "b"
    assert trials.remove("a") is None, "it does not wait any more"
    trials.answered("a", 0, ended=True)
    assert begins(trials) == "c"
