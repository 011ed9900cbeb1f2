"""Limits of one API key, with LiteLLM's names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

DURATION = r"^[1-9]\d{0,4}(s|m|h|d|mo)$"
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MONDAY = 4 * 86400  # the first Monday since 1970
MAX_DURATION_S = 100 * 366 * 86400  # dates end with the year 9999
PRIORITY = 2**31 - 1

Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
"""A whole number that a float has exactly, as stores and windows have it."""
Amount = Annotated[float, Field(strict=True, ge=0, le=1e15, allow_inf_nan=False)]
"""What can be spent."""
ModelName = Annotated[str, Field(min_length=1, max_length=256)]

Unit = Literal["requests", "tokens", "parallel", "money", "engine_seconds"]
"""What a limit counts: requests, tokens of prompts and answers, requests at a time, and the costs of requests."""


class BudgetLimit(BaseModel):
    """What a key may spend in each day, month or other time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget_duration: str = Field(pattern=DURATION)  #: `1d`, `7d`, `1mo`; in UTC, weeks begin on Mondays
    max_budget: Amount | None = Field(default=None)  #: money, by the models' `prices`
    max_engine_seconds: Amount | None = Field(default=None)  #: seconds of engines (`compute_seconds`)

    @field_validator("budget_duration")
    @classmethod
    def _ends(cls, duration: str) -> str:
        count, unit = _parts(duration)
        if count * SECONDS.get(unit, 31 * 86400) > MAX_DURATION_S:
            raise PydanticCustomError("too_long", "at most 100 years")
        return duration

    @model_validator(mode="after")
    def _limits_something(self) -> BudgetLimit:
        if self.max_budget is None and self.max_engine_seconds is None:
            raise PydanticCustomError("empty", "an object with max_budget or max_engine_seconds")
        return self


class KeyLimits(BaseModel):
    """Limits of all API keys of one name together (docs/quotas.md). None: no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rpm_limit: Count | None = Field(default=None)  #: requests per minute
    tpm_limit: Count | None = Field(default=None)  #: tokens of prompts and answers per minute
    max_parallel_requests: Count | None = Field(default=None)  #: requests at a time
    budget_limits: tuple[BudgetLimit, ...] = Field(default=(), max_length=100)  #: costs, each in its time
    ends_running_requests: bool = Field(default=False)
    """Whether requests that run end with an error when a budget is used up. By default they run to their end."""
    models: tuple[ModelName, ...] | None = Field(
        default=None, max_length=1000
    )  #: models and adapters that requests may name; None: all
    priority: int = Field(default=0, ge=-PRIORITY, le=PRIORITY)
    """Priority of its requests. They may ask for a lower priority (a greater number), not for a higher one."""

    @field_validator("budget_limits")
    @classmethod
    def _differ(cls, budgets: tuple[BudgetLimit, ...]) -> tuple[BudgetLimit, ...]:
        given = [(b.budget_duration, name) for b in budgets for name, value in b if isinstance(value, float)]
        if len(set(given)) < len(given):
            raise PydanticCustomError("twice", "budgets of which no two limit the same cost in the same time")
        return budgets

    def all(self) -> list[Limit]:
        """Return everything that is counted."""
        limits = [
            Limit("rpm_limit", "requests", self.rpm_limit, "1m"),
            Limit("tpm_limit", "tokens", self.tpm_limit, "1m"),
            Limit("max_parallel_requests", "parallel", self.max_parallel_requests, None),
        ]
        for budget in self.budget_limits:
            limits.append(Limit("max_budget", "money", budget.max_budget, budget.budget_duration))
            limits.append(
                Limit("max_engine_seconds", "engine_seconds", budget.max_engine_seconds, budget.budget_duration)
            )
        return [limit for limit in limits if limit.given is not None]


@dataclass(frozen=True, slots=True)
class Limit:
    """One number that is counted, and its maximum."""

    field: str
    """Its name in KeyLimits or BudgetLimit."""
    unit: Unit
    given: float | None
    duration: str | None
    """Time after which counting begins again; None if nothing is used up."""

    @property
    def name(self) -> str:
        """Name that no other limit of a key has."""
        return self.field if self.duration is None else f"{self.field}/{self.duration}"

    @property
    def value(self) -> float:
        return self.given or 0.0

    @property
    def is_whole(self) -> bool:
        """Whether it counts whole numbers."""
        return self.unit in ("requests", "parallel")

    @property
    def is_cost(self) -> bool:
        """Whether it limits what requests cost, which is known only once they have run."""
        return self.unit in ("money", "engine_seconds")

    def window(self, now: float) -> tuple[float, float]:
        """Return the time that is counted together: its start and its end, in seconds since 1970. All time is one
        window if nothing is used up."""
        return (0.0, float("inf")) if self.duration is None else window(self.duration, now)


@dataclass(frozen=True, slots=True)
class Shortage:
    """A limit of which less is left than a request would take."""

    limit: Limit
    left: float
    need: float
    is_part: bool = False
    """Whether `left` is only this ingress's part, because the store does not answer."""


def window(duration: str, now: float) -> tuple[float, float]:
    """Return the start and the end of the window of a duration, in seconds since 1970."""
    count, unit = _parts(duration)
    if unit == "mo":
        day = datetime.fromtimestamp(now, UTC)
        months = (day.year * 12 + day.month - 1) // count * count
        return _month(months), _month(months + count)
    seconds = count * SECONDS[unit]
    start = MONDAY + (now - MONDAY) // seconds * seconds
    return start, start + seconds


def _parts(duration: str) -> tuple[int, str]:
    match = re.fullmatch(r"(\d+)(\D+)", duration)
    assert match is not None
    return int(match[1]), match[2]


def _month(months: int) -> float:
    """Return when a month begins. months: months since the year 0."""
    return datetime(months // 12, months % 12 + 1, 1, tzinfo=UTC).timestamp()
