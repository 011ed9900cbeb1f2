from __future__ import annotations

import pytest

from engine.errors import InvalidParameter, RequestError
from engine.parts.thinking_budget.thinking_budgets import ThinkingBudgets
from engine.wire.generate_request import GenerateRequest
from engine.wire.part_record import Records, encoded
from engine.wire.parts.holds import PromptHold
from engine.wire.parts.thinking_budget import ThinkingBudget
from engine.wire.sampling_params import SamplingParams


def check(extra_args: Records) -> None:
    request = GenerateRequest(request_id="a", prompt=[1], params=SamplingParams(extra_args=extra_args))
    ThinkingBudgets(vocab_size=10).check(request, request.prompt)


@pytest.mark.parametrize(
    ("budget", "token"),
    [
        (ThinkingBudget(3, close=10), 10),
        (ThinkingBudget(3, close=1, open=12), 12),
        (ThinkingBudget(3, close=1, call=-1), -1),
    ],
)
def test_a_budget_with_a_tag_that_the_model_lacks_is_refused(budget, token):
    with pytest.raises(InvalidParameter) as caught:
        check(encoded(budget))
    assert str(caught.value) == f"thinking_budget must be a token id below 10, got {token}"


def test_a_request_without_a_budget_and_one_with_tags_of_the_model_are_taken():
    check({})
    check(encoded(ThinkingBudget(0, close=9, open=0, call=5)))


def test_a_record_that_is_no_budget_is_refused():
    (other,) = encoded(PromptHold(marks=[])).values()
    with pytest.raises(RequestError, match="the record of thinking_budget is not valid"):
        check({ThinkingBudget.part: other})
