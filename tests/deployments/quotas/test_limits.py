"""Windows in which limits are counted."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from deployments.quotas.limits import BudgetLimit, KeyLimits, window


def at(*when: int) -> float:
    return datetime(*when, tzinfo=UTC).timestamp()  # type: ignore[arg-type, misc]


@pytest.mark.parametrize(
    ("duration", "start", "end"),
    [
        ("1m", at(2026, 12, 31, 23, 59), at(2027, 1, 1)),
        ("1h", at(2026, 12, 31, 23), at(2027, 1, 1)),
        ("1d", at(2026, 12, 31), at(2027, 1, 1)),
        ("7d", at(2026, 12, 28), at(2027, 1, 4)),
        ("1mo", at(2026, 12, 1), at(2027, 1, 1)),
        ("3mo", at(2026, 10, 1), at(2027, 1, 1)),
    ],
)
def test_a_window_is_of_the_calendar_in_utc_and_weeks_begin_on_mondays(duration, start, end):
    now = at(2026, 12, 31, 23, 59, 59)
    assert window(duration, now) == (start, end)
    assert window(duration, end)[0] == end


@pytest.mark.parametrize("duration", ["0d", "1y", "d", "1.5h", ""])
def test_no_other_durations_exist(duration):
    with pytest.raises(ValidationError):
        BudgetLimit(budget_duration=duration, max_budget=1.0)


def test_each_limit_has_its_own_name():
    budgets = tuple(
        BudgetLimit(budget_duration=duration, max_budget=1.0, max_engine_seconds=2.0) for duration in ("1d", "1mo")
    )
    limits = KeyLimits(rpm_limit=1, tpm_limit=2, max_parallel_requests=3, budget_limits=budgets).all()
    assert len({limit.name for limit in limits}) == 7


def test_two_budgets_of_the_same_time_are_refused_since_one_would_not_be_kept():
    budgets = [{"budget_duration": "1d", "max_budget": 1}, {"budget_duration": "1d", "max_engine_seconds": 1}]
    assert len(KeyLimits.model_validate({"budget_limits": budgets}).all()) == 2
    with pytest.raises(ValidationError, match="no two limit the same cost"):
        KeyLimits.model_validate({"budget_limits": [*budgets, {"budget_duration": "1d", "max_budget": 100}]})
