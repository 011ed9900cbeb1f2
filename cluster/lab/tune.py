"""The backend of `manta tune`: where the search for better options begins, and what came of it, as a table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from cluster.config.idle_flags import given_flags, refuse_idle
from cluster.config.tune_options import TuneOptions
from cluster.lab.recorded.prediction import LABELS, cautions, told
from cluster.lab.recorded.recording import Recording
from cluster.lab.recorded.what_if import UNKNOWN, Baseline, Figures, simulated_figures
from cluster.lab.simulator.cluster import simulate
from cluster.lab.simulator.spec import ClusterSpec, GoodputSlo, find_trace, make_cluster
from cluster.lab.simulator.trace import Trace
from cluster.lab.simulator.tuning.search import Trial
from cluster.lab.simulator.tuning.settings import parse_setting, to_yaml
from cluster.terminal.tables import figure, make_table, show
from engine.errors import InvalidParameter

WITH_TAPE = {"--requests", "--rate", "--ttft-ms", "--tpot-ms", "--good"}
WITH_TRACE = WITH_TAPE | {"--trace", "--burstiness", "--seed", "--scale", "--max-active-conversations"}


@dataclass(frozen=True, slots=True)
class Start:
    """The cluster as it is, its load, and what a tape tells of them."""

    spec: ClusterSpec
    trace: Trace
    baseline: Baseline | None = None
    is_other_load: bool = False  #: whether the load is not the tape's


@dataclass(frozen=True, slots=True)
class Result:
    start: Start
    best: Trial
    tried: int
    before: Figures
    after: Figures

    @property
    def errors(self) -> dict[str, float]:
        """Errors of the simulation of what really happened, as fractions by figure; empty without a tape."""
        baseline = self.start.baseline
        return {} if baseline is None else {each.name: each.error for each in baseline.predict(baseline.simulated)}

    @property
    def serve_config(self) -> str:
        return to_yaml(self.start.spec, self.best.spec)

    @property
    def is_within_error(self) -> bool:
        """Whether the gain in good requests is not larger than the error."""
        gain = abs(self.after.good - self.before.good)
        return "good" in self.errors and gain <= self.errors["good"] * self.after.good

    def figures(self) -> dict[str, Any]:
        return {
            "tried": self.tried,
            "changes": self.best.changes,
            "serve_config": self.serve_config,
            "gpus": [self.start.spec.gpus, self.best.spec.gpus],
            "before": self.before.known(),
            "after": self.after.known(),
            "errors": self.errors,
        }


def make_start(options: TuneOptions, tapes: list[Path]) -> Start:
    """Return where the search begins. Raises ServingError."""
    given = given_flags(options)
    if not tapes:
        if not options.trace:
            raise InvalidParameter("--tape", None, "given, or --trace")
        trace = find_trace(options, whole_file=True)
        return Start(make_cluster(options, trace), trace)
    allowed = WITH_TRACE if options.trace else WITH_TAPE
    refuse_idle(given, (" ".join(flag for flag in given if flag not in allowed), True, "with --tape, which tells it"))
    baseline = Baseline(Recording.of_files(tapes), GoodputSlo.of(options))
    if options.trace:
        return Start(baseline.spec, find_trace(options, whole_file=True), baseline, is_other_load=True)
    trace = baseline.trace if options.rate is None else baseline.trace.at_rate(options.rate)
    return Start(baseline.spec, trace, baseline, is_other_load=options.rate is not None)


def parse_values(text: str) -> list[tuple[str, Any]]:
    """Return name and value of each of `NAME=VALUE,VALUE`. Raises InvalidParameter."""
    name, _, values = text.partition("=")
    return [parse_setting(f"{name}={value}", "--try") for value in values.split(",")]


def simulated(spec: ClusterSpec, trace: Trace) -> Figures:
    return simulated_figures(simulate(spec, trace), spec.slo)


def show_result(result: Result) -> None:
    start = result.start
    if start.baseline is not None:
        show(*told(start.baseline.recording))
    show(f"{len(start.trace)} requests; {result.tried} clusters simulated", effects(result), str(start.spec.slo))
    if start.baseline is None:
        show("without a tape, the error is not known; docs/measurements/simulator.md has some that were measured")
    else:
        show("+/- is the error of the simulation of what really happened when the tape was recorded")
    if not result.serve_config:
        show("nothing that was tried is expected to be better")
        return
    show(*cautions(start.spec, result.best.spec, result.best.report))
    if result.is_within_error:
        show("the expected gain is not larger than the error: measure it before you rely on it")
    show("change in the model's section of serve_config.yaml:", result.serve_config)


def effects(result: Result) -> Table:
    labels = {"good": ("good requests, %", 100.0, 1), **LABELS}
    baseline, errors = result.start.baseline, result.errors
    recorded = baseline.recorded if baseline is not None and not result.start.is_other_load else None
    columns = ["", "recorded", "simulated", "with the change", "+/-"]
    table = make_table(*(name for name in columns if recorded is not None or name != "recorded"))
    for name, (label, scale, _) in labels.items():
        if name not in result.before.known():
            continue
        before, after = (scale * getattr(each, name) for each in (result.before, result.after))
        row = [] if recorded is None else [figure(scale * getattr(recorded, name))]
        if errors.get(name, 0.0) > UNKNOWN:
            table.add_row(label, *row, figure(before), "unknown", "-")
        else:
            table.add_row(label, *row, figure(before), figure(after), figure(after * errors[name] if errors else None))
    gpus = ["-"] if recorded is not None else []
    table.add_row("GPUs", *gpus, str(result.start.spec.gpus), str(result.best.spec.gpus), "-")
    return table
