"""Predicts from a tape what other options would have done, and how far off the prediction may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, get_args

import numpy as np

from cluster.simulator.cluster import simulate
from cluster.simulator.options import RouterName
from cluster.simulator.recorded.recording import Recording
from cluster.simulator.results import Report
from cluster.simulator.spec import ClusterSpec
from engine.errors import InvalidParameter

UNKNOWN = 0.5  # error of the baseline from which a figure is not predicted
ENGINE = ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")
KINDS = {"max_num_seqs": int, "max_num_batched_tokens": int, "enable_prefix_caching": bool}
CLUSTER = ("decode.num_replicas", "prefill.num_replicas", "routing.policy", "num_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What clients care about. Seconds count from the arrival at the engine to the token's step."""

    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    cached: float  #: fraction of the prompt tokens

    @classmethod
    def of(cls, ttft: np.ndarray, tpot: np.ndarray, tokens: int, seconds: float, cached: float) -> Figures:
        def at(values: np.ndarray, percent: float) -> float:
            return float(np.percentile(values, percent)) if len(values) else 0.0

        return cls(
            output_tokens_per_s=tokens / max(seconds, 1e-9),
            ttft_p50_s=at(ttft, 50),
            ttft_p90_s=at(ttft, 90),
            ttft_p99_s=at(ttft, 99),
            tpot_p50_s=at(tpot, 50),
            tpot_p99_s=at(tpot, 99),
            cached=cached,
        )


NAMES = [one.name for one in fields(Figures)]


@dataclass(frozen=True, slots=True)
class Prediction:
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


def recorded_figures(recording: Recording) -> Figures:
    requests = [request for request in recording.requests if request.request is not None]
    ttft = [request.ttft_s for request in requests]
    tpot = [request.tpot_s for request in requests]
    ends = [
        request.arrived_at + last - request.request.clock.arrived_at
        for request in requests
        if request.request is not None and (last := request.request.clock.last_token_at) is not None
    ]
    tokens = sum(request.request.num_output for request in requests if request.request is not None)
    cached = sum(request.request.prefix.num_cached for request in requests if request.request is not None)
    return Figures.of(
        np.array([value for value in ttft if value is not None]),
        np.array([value for value in tpot if value is not None]),
        tokens,
        max(ends) - requests[0].arrived_at,
        cached / sum(request.num_prompt for request in requests),
    )


def simulated_figures(report: Report) -> Figures:
    series = report.series
    several = series.output_tokens > 1
    tpot = (series.e2e_s - series.ttft_s)[several] / (series.output_tokens[several] - 1)
    tokens = int(series.output_tokens.sum())
    return Figures.of(series.ttft_s, tpot, tokens, report.duration_s, report.hit_rate)


def changed_spec(spec: ClusterSpec, settings: Sequence[str]) -> ClusterSpec:
    """Return the cluster with other options. settings: `name=value` each. Raises InvalidParameter and ConfigError."""
    for setting in settings:
        name, separator, value = setting.partition("=")
        name = name.removeprefix("engine.")
        if not separator or name not in (*ENGINE, *CLUSTER):
            known = ", ".join((*ENGINE, *CLUSTER))
            raise InvalidParameter("--set", setting, f"NAME=VALUE, where NAME is one of {known}")
        if name in ENGINE:
            values: dict[str, Any] = {name: _number(setting, value) if KINDS[name] is int else _truth(setting, value)}
            spec = replace(spec, engine=replace(spec.engine, **values))
        elif name == "routing.policy":
            if value not in get_args(RouterName):
                raise InvalidParameter("--set", setting, f"one of {', '.join(get_args(RouterName))}")
            spec = replace(spec, router=value)  # type: ignore[arg-type]
        elif name == "num_blocks":
            spec = replace(spec, num_blocks=_number(setting, value))
        elif name == "prefill.num_replicas":
            spec = replace(spec, prefill_replicas=_number(setting, value, least=0))
        else:
            spec = replace(spec, replicas=_number(setting, value))
    return spec


def _number(setting: str, value: str, least: int = 1) -> int:
    if not value.isdecimal() or int(value) < least:
        raise InvalidParameter("--set", setting, f"a whole number, {least} or more")
    return int(value)


def _truth(setting: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise InvalidParameter("--set", setting, "true or false")
    return value == "true"


def predict(recording: Recording, settings: Sequence[str]) -> list[Prediction]:
    """Predict the figures with other options. Raises ServingError."""
    spec, trace = recording.spec(), recording.trace()
    other = changed_spec(spec, settings)
    was, base = recorded_figures(recording), simulated_figures(simulate(spec, trace))
    changed = simulated_figures(simulate(other, trace))
    return [Prediction(name, getattr(was, name), getattr(base, name), getattr(changed, name)) for name in NAMES]
