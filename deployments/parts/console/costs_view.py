"""What the console shows of costs: what requests have used, by key, model, adapter and hour, and engines by hour."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from deployments.billing.hourly_usage import UsageLine
from deployments.billing.totals import OTHERS, UsageTotals
from deployments.parts.console.engine_hours import KEEP_S

MAX_ROWS = 50  # of each table


class CostRow(msgspec.Struct):
    name: str
    used: UsageTotals
    saved_s: float = 0.0
    """Engine seconds that computing the cached tokens would probably have cost."""


class EngineHour(msgspec.Struct, frozen=True):
    start: float
    """Seconds since 1970."""
    seconds: dict[str, float]
    """Seconds of all engines, by CostLine."""


class CostsView(msgspec.Struct, frozen=True, kw_only=True):
    """The last 24 hours."""

    at: float
    """Seconds since 1970."""
    currency: str
    by_key: list[CostRow]
    by_model: list[CostRow]
    by_adapter: list[CostRow]
    by_hour: list[CostRow]
    """By the start of the hour, such as `2026-11-26T22:00:00Z`, newest first."""
    engines: list[EngineHour]
    """Newest first."""

    @classmethod
    def of(
        cls,
        lines: Iterable[tuple[UsageLine, UsageTotals]],
        engine_hours: Mapping[float, dict[str, float]],
        prompt_token_s: Mapping[str, float],
        now: float,
        currency: str,
    ) -> CostsView:
        """lines: of all ingresses. engine_hours, prompt_token_s: as in EngineHours."""
        known = [(line, used) for line, used in lines if line.hour.timestamp() > now - KEEP_S]

        def rows(name_of: Callable[[UsageLine], str]) -> dict[str, CostRow]:
            found: dict[str, CostRow] = {}
            for line, used in known:
                row = found.setdefault(name_of(line), CostRow(name_of(line), UsageTotals()))
                row.used.add(used)
                row.saved_s += used.cached_tokens * prompt_token_s.get(line.model, 0.0)
            return found

        hours = rows(lambda line: line.hour.strftime("%Y-%m-%dT%H:%M:%SZ"))
        return cls(
            at=now,
            currency=currency,
            by_key=largest(rows(lambda line: line.key)),
            by_model=largest(rows(lambda line: line.model)),
            by_adapter=largest(rows(lambda line: line.adapter)),
            by_hour=[hours[name] for name in sorted(hours, reverse=True)],
            engines=[EngineHour(start, engine_hours[start]) for start in sorted(engine_hours, reverse=True)],
        )


def largest(rows: Mapping[str, CostRow]) -> list[CostRow]:
    """Return the MAX_ROWS rows with the most engine seconds, the most first, and one for all others."""
    known = sorted((row for row in rows.values() if row.name != OTHERS), key=lambda row: -row.used.compute_s)
    rest = [*known[MAX_ROWS:], *(row for row in rows.values() if row.name == OTHERS)]
    others = CostRow(OTHERS, UsageTotals())
    for row in rest:
        others.used.add(row.used)
        others.saved_s += row.saved_s
    return [*known[:MAX_ROWS], others] if rest else known
