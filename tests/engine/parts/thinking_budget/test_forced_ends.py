from __future__ import annotations

import pytest

from engine.wire.part_record import encoded
from engine.wire.parts.thinking_budget import ThinkingBudget
from engine.wire.sampling_params import SamplingParams
from tests.engine.parts.edited_logits import banned, process
from tests.engine.runner.sampling_cases import LOGITS, VOCAB


@pytest.mark.parametrize(
    ("budget", "output", "forced"),
    [
        (ThinkingBudget(3, close=7), [1, 2], False),
        (ThinkingBudget(3, close=7), [1, 2, 3], True),
        (ThinkingBudget(0, close=7), [], True),
        (ThinkingBudget(3, close=7), [1, 7, 3], False),
        (ThinkingBudget(3, close=7, call=5), [1, 5, 3], False),
        (ThinkingBudget(3, close=7, call=5), [1, 2, 3], True),
        (ThinkingBudget(3, close=7, open=6), [6, 1, 2], False),
        (ThinkingBudget(3, close=7, open=6), [6, 1, 2, 3], True),
        (ThinkingBudget(3, close=7, open=6), [1, 6, 2, 3], False),
        (ThinkingBudget(3, close=7, open=6), [6, 1, 7, 3], False),
    ],
)
def test_reasoning_that_has_spent_its_budget_can_only_end(budget, output, forced):
    found = process(SamplingParams(extra_args=encoded(budget)), [0, 7, 6], output)
    assert banned(found) == (set(range(VOCAB)) - {7} if forced else set())
    assert found[7] == LOGITS[7]


def test_end_of_the_reasoning_waits_where_a_grammar_does_not_allow_it():
    params = SamplingParams(extra_args=encoded(ThinkingBudget(2, close=7)), bad_words_token_ids=[[3, 7]])
    assert banned(process(params, [0], [1, 3])) == {7}
    assert banned(process(params, [0], [1, 3, 1])) == set(range(VOCAB)) - {7}
