"""Predicts from a tape what other options would have done, and how far off the prediction may be."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from cluster.lab.recorded.recording import Recording
from cluster.lab.simulator.billing.costs import Costs
from cluster.lab.simulator.cluster import simulate
from cluster.lab.simulator.results import Report
from cluster.lab.simulator.spec import ClusterSpec, GoodputSlo
from deployments.billing.prices import FREE, Prices

UNKNOWN = 0.5  # error of the baseline from which a figure is not predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What clients care about. Seconds count from the arrival at the engine to the token's step."""

    output_tokens_per_s: float
    good: float  #: fraction of the requests within both latency targets
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    cached: float  #: fraction of the prompt tokens
    cost_per_hour: float | None = None  #: of all engines; None without prices, as the next ones
    cost_per_request: float | None = None
    cost_per_million_prompt_tokens: float | None = None
    cost_per_million_output_tokens: float | None = None
    wasted_idle: float | None = None  #: fraction of the engines' time, as the next ones
    wasted_preemption: float | None = None
    wasted_replay: float | None = None

    @classmethod
    def of(
        cls,
        ttft: np.ndarray,
        tpot: np.ndarray,
        slo: GoodputSlo,
        *,
        tokens: int,
        seconds: float,
        cached: float,
        costs: Costs | None,
    ) -> Figures:
        """ttft, tpot: of each request in seconds; nan if it has none. costs: None without prices."""

        def at(values: np.ndarray, percent: float) -> float:
            values = values[~np.isnan(values)]
            return float(np.percentile(values, percent)) if len(values) else 0.0

        return cls(
            output_tokens_per_s=tokens / max(seconds, 1e-9),
            good=float(np.mean((ttft <= slo.ttft_s) & ~(tpot > slo.tpot_s))),
            ttft_p50_s=at(ttft, 50),
            ttft_p90_s=at(ttft, 90),
            ttft_p99_s=at(ttft, 99),
            tpot_p50_s=at(tpot, 50),
            tpot_p99_s=at(tpot, 99),
            cached=cached,
            **({} if costs is None else figures_of(costs)),
        )

    def known(self) -> dict[str, float]:
        """Return all figures by name, those in money only if there are prices."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def figures_of(costs: Costs) -> dict[str, float]:
    """Return the figures that are about money, and those about time that was wasted."""
    return {
        "cost_per_hour": costs.per_hour,
        "cost_per_request": costs.per_request,
        "cost_per_million_prompt_tokens": costs.per_million_prompt_tokens,
        "cost_per_million_output_tokens": costs.per_million_output_tokens,
        **{f"wasted_{line}": costs.wasted[line] for line in ("idle", "preemption", "replay")},
    }


NAMES = [one.name for one in fields(Figures)]


@dataclass(frozen=True, slots=True)
class PredictedFigure:
    """A figure as it was, and as it would have been."""

    name: str
    recorded: float
    simulated: float  #: with the options as they were
    changed: float  #: simulated with the other options

    @property
    def error(self) -> float:
        """How far the simulation of what really happened is off, as a fraction."""
        if not self.recorded:
            return 0.0 if not self.simulated else 1.0
        return abs(self.simulated - self.recorded) / self.recorded

    @property
    def is_known(self) -> bool:
        return self.error <= UNKNOWN

    def figures(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error, "is_known": self.is_known}


class Baseline:
    """The recorded cluster and its requests, and how far their simulation is from what happened."""

    def __init__(self, recording: Recording, slo: GoodputSlo | None = None, prices: Prices = FREE):
        """slo: latency targets of good requests. Raises ServingError."""
        slo = slo or GoodputSlo()
        self.recording, self.trace = recording, recording.trace()
        self.spec: ClusterSpec = replace(recording.spec(), slo=slo, prices=prices)
        self.recorded = recorded_figures(recording, slo, prices)
        self.simulated = simulated_figures(simulate(self.spec, self.trace), slo)

    def predict(self, changed: Figures) -> list[PredictedFigure]:
        """Return all figures, those in money only if there are prices. changed: those simulated with other options."""
        return [
            PredictedFigure(name, *(getattr(each, name) for each in (self.recorded, self.simulated, changed)))
            for name in NAMES
            if name in self.recorded.known()
        ]


def recorded_figures(recording: Recording, slo: GoodputSlo, prices: Prices = FREE) -> Figures:
    requests = recording.requests
    return Figures.of(
        np.array([request.ttft_s for request in requests], dtype=np.float64),
        np.array([request.tpot_s for request in requests], dtype=np.float64),
        slo,
        tokens=recording.output_tokens,
        seconds=recording.seconds,
        cached=sum(request.num_cached for request in requests) / sum(request.num_prompt for request in requests),
        costs=None if prices == FREE else recording.costs(prices),
    )


def simulated_figures(report: Report, slo: GoodputSlo) -> Figures:
    series = report.series
    intervals = np.where(series.output_tokens > 1, series.output_tokens - 1, np.nan)
    return Figures.of(
        series.ttft_s,
        (series.e2e_s - series.ttft_s) / intervals,
        slo,
        tokens=int(series.output_tokens.sum()),
        seconds=report.duration_s,
        cached=report.hit_rate,
        costs=report.costs,
    )
