"""Searches the options with which a cluster serves a trace best, by simulating one cluster after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from cluster.config.simulation_options import HandoffPolicy
from cluster.lab.simulator.cluster import simulate
from cluster.lab.simulator.results import Report
from cluster.lab.simulator.spec import ClusterSpec, GoodputSlo
from cluster.lab.simulator.trace import Trace
from cluster.lab.simulator.tuning.settings import changes, with_settings
from deployments.routing.config import PolicyName
from engine.errors import ServingError

Objective = Literal["goodput", "cost"]
Settings = dict[str, Any]  # values of one setting, or of several that change together, by name
Grid = Sequence[Sequence[Settings]]

FACTORS = (1 / 8, 1 / 4, 1 / 2, 2, 4)  # of a number that is searched
MAX_SEQS = 1024
COUNTS = sorted({base << shift for base in (1, 3) for shift in range(12)})  # of replicas that are tried
PREFILL_SHARES = (1 / 4, 1 / 2, 3 / 4)
TOLERANCE = 0.005  # fraction of requests that a change must make good, to be worth it


@dataclass(frozen=True, slots=True)
class Trial:
    """A simulated cluster."""

    changes: Settings  #: settings that differ from those of the first
    spec: ClusterSpec
    report: Report


class Tuner:
    """Changes one setting after another to the value with the best result, until none improves it.

    It then takes back what is of no use. With `goodput`, the best cluster has the most requests within both latency
    targets; with `cost`, the fewest GPUs with which a fraction of `slo.fraction` is within them.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        trace: Trace,
        objective: Objective,
        max_gpus: int,
        grid: Grid,
        on_trial: Callable[[Trial], None] = lambda trial: None,
    ):
        """spec: the first cluster. grid: for each setting, the values to try."""
        self._spec, self._trace, self._objective, self._max_gpus = spec, trace, objective, max_gpus
        self._grid, self._on_trial = grid, on_trial
        self._tried: dict[frozenset[tuple[str, Any]], Trial | None] = {}

    @property
    def num_tried(self) -> int:
        return len(self._tried)

    def tune(self) -> Trial:
        """Return the best cluster. Raises ServingError if the first cannot serve the trace."""
        best, before = self._first(), None
        while best is not before:
            before = best
            for choices in self._grid:
                found = [self._try(best.changes | choice) for choice in choices]
                best = max([best, *(trial for trial in found if trial is not None)], key=self._rank)
        return self._simplest(best)

    def is_good_enough(self, trial: Trial) -> bool:
        return trial.report.good >= self._spec.slo.fraction

    def _rank(self, trial: Trial) -> tuple[float, ...]:
        """Return what is larger for a better cluster."""
        quality = trial.report.good, nearness(trial.report, self._spec.slo)
        if self._objective == "goodput":
            return quality
        return (1.0, -trial.spec.gpus, *quality) if self.is_good_enough(trial) else (0.0, 0.0, *quality)

    def _simplest(self, best: Trial) -> Trial:
        """Return a cluster that is about as good, with no change that could be left out."""
        for name in best.changes:
            without = self._try({other: value for other, value in best.changes.items() if other != name})
            if without is not None and self._is_as_good(without, best):
                return self._simplest(without)
        return best

    def _is_as_good(self, trial: Trial, best: Trial) -> bool:
        if self._objective == "cost" and self.is_good_enough(best):
            return self.is_good_enough(trial) and trial.spec.gpus <= best.spec.gpus
        return trial.report.good >= best.report.good - TOLERANCE

    def _first(self) -> Trial:
        trial = Trial({}, self._spec, simulate(self._spec, self._trace))
        self._tried[frozenset()] = trial
        self._on_trial(trial)
        return trial

    def _try(self, values: Settings) -> Trial | None:
        """Simulate a cluster with these settings. Returns None if there is none, or if it has too many GPUs."""
        try:
            spec = self._plain(with_settings(self._spec, values))
        except ServingError:
            return None
        key = frozenset((different := changes(self._spec, spec)).items())
        if key not in self._tried:
            self._tried[key] = None
            if spec.gpus <= self._max_gpus:
                try:
                    self._tried[key] = trial = Trial(different, spec, simulate(spec, self._trace))
                except ServingError:
                    return None
                self._on_trial(trial)
        return self._tried[key]

    def _plain(self, spec: ClusterSpec) -> ClusterSpec:
        """Return the cluster without settings that decide nothing."""
        if not spec.prefill_replicas:
            spec = replace(spec, handoff=self._spec.handoff)
        return replace(spec, router=self._spec.router) if max(spec.sizes.values()) == 1 else spec


def nearness(report: Report, slo: GoodputSlo) -> float:
    """Return how near requests come to their targets, from 0 to 1 if all meet them. It tells apart clusters that miss
    them equally often."""
    series = report.series
    tpot = (series.e2e_s - series.ttft_s) / np.maximum(series.output_tokens - 1, 1)
    near = np.minimum(1, slo.ttft_s / np.maximum(series.ttft_s, 1e-9)) * np.minimum(
        1, slo.tpot_s / np.maximum(tpot, 1e-9)
    )
    return float(near.mean())


def make_grid(spec: ClusterSpec, max_gpus: int, given: Sequence[tuple[str, Any]] = ()) -> Grid:
    """Return the values to try. given: settings with values that replace the usual ones."""
    engine = spec.engine
    usual: dict[str, list[Settings]] = {
        "replicas": sizes(max_gpus // spec.replica_gpus),
        "routing.policy": [{"routing.policy": policy} for policy in get_args(PolicyName)],
        "handoff.policy": [{"handoff.policy": policy} for policy in get_args(HandoffPolicy)],
        "max_num_seqs": [{"max_num_seqs": n} for n in around(engine.max_num_seqs, MAX_SEQS)],
        "max_num_batched_tokens": [
            {"max_num_batched_tokens": n} for n in around(engine.max_num_batched_tokens, spec.max_model_len)
        ],
        "enable_prefix_caching": [{"enable_prefix_caching": True}],
    }
    asked: dict[str, list[Settings]] = {}
    for name, value in given:
        asked.setdefault(name, []).append({name: value})
        if name.endswith("num_replicas"):
            usual.pop("replicas", None)
    return list((usual | asked).values())


def around(value: int, largest: int) -> list[int]:
    """Return numbers below and above a value."""
    return sorted({max(1, min(round(value * factor), max(largest, value))) for factor in FACTORS} - {value})


def sizes(replicas: int) -> list[Settings]:
    """Return numbers of replicas of one pool or two, up to this many together."""
    found = []
    for total in sorted({count for count in COUNTS if count < replicas} | {replicas}):
        prefills = {0, *(round(share * total) for share in PREFILL_SHARES)}
        found += [(total - prefill, prefill) for prefill in sorted(prefills) if prefill < total]
    return [{"decode.num_replicas": decode, "prefill.num_replicas": prefill} for decode, prefill in found]
