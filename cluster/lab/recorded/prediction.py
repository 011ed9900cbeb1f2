"""`manta replay --set`: what other options would have done to the requests of a tape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from cluster.lab.recorded.recording import Recording
from cluster.lab.recorded.what_if import UNKNOWN, Baseline, PredictedFigure, simulated_figures
from cluster.lab.simulator.cluster import simulate
from cluster.lab.simulator.results import Report
from cluster.lab.simulator.spec import ClusterSpec
from cluster.lab.simulator.tuning.settings import parse_setting, with_settings
from cluster.terminal.tables import make_table, show
from deployments.billing.prices import Prices

SATURATED = 0.9  # fraction of the time from which small errors of the cost become large ones of latencies
LABELS = {  # of each figure: its label, a factor, decimals
    "output_tokens_per_s": ("output tokens/s", 1.0, 1),
    "ttft_p50_s": ("time to first token p50, ms", 1000.0, 1),
    "ttft_p90_s": ("time to first token p90, ms", 1000.0, 1),
    "ttft_p99_s": ("time to first token p99, ms", 1000.0, 1),
    "tpot_p50_s": ("time per token p50, ms", 1000.0, 1),
    "tpot_p99_s": ("time per token p99, ms", 1000.0, 1),
    "cached": ("prompt tokens cached, %", 100.0, 1),
    "cost_per_hour": ("cost per hour", 1.0, 2),
    "cost_per_request": ("cost per request", 1.0, 6),
    "cost_per_million_prompt_tokens": ("cost per million tokens in", 1.0, 4),
    "cost_per_million_output_tokens": ("cost per million tokens out", 1.0, 4),
    "wasted_idle": ("wasted (idle), %", 100.0, 1),
    "wasted_preemption": ("wasted (preemption), %", 100.0, 1),
    "wasted_replay": ("wasted (replay), %", 100.0, 1),
}


def show_prediction(files: Sequence[Path], settings: Sequence[str], prices: Prices, *, as_json: bool) -> None:
    baseline = Baseline(Recording.of_files(files), prices=prices)
    changed = with_settings(baseline.spec, dict(map(parse_setting, settings)))
    report = simulate(changed, baseline.trace)
    figures = simulated_figures(report, changed.slo)
    found = [prediction for prediction in baseline.predict(figures) if prediction.name in LABELS]
    if as_json:
        print(json.dumps({prediction.name: prediction.figures() for prediction in found}))
        return
    show(*told(baseline.recording), predictions(found, f"with {' '.join(settings)}"))
    show(f"+/- is the error of the simulation of what really happened; a figure is unknown above {UNKNOWN:.0%}")
    show(*cautions(baseline.spec, changed, report))


def told(recording: Recording) -> list[str]:
    """Return what there is to say about a tape."""
    fit = recording.fit
    shared = f"; a step takes {fit.contention:.0%} longer for each other engine that computes" if fit.contention else ""
    return [
        f"{len(recording.requests)} requests in {recording.decode + recording.prefill} engines; the cost of a step is "
        f"fitted to {fit.steps} steps, median error {fit.error:.0%}{shared}"
    ]


def cautions(before: ClusterSpec, after: ClusterSpec, report: Report) -> list[str]:
    """Return why a prediction may be further off than its error says. report: of `after`."""
    found = []
    if after.contention and after.sizes != before.sizes:
        found.append(
            "the engines share cores, and how much is known only for as many as there were: figures for another number "
            "of replicas may be off by a multiple"
        )
    busy = max(use.busy for use in report.pools.values())
    if busy > SATURATED:
        found.append(
            f"engines compute for {busy:.0%} of the time: so near their limit, latencies may be off by a multiple"
        )
    return found


def predictions(found: Sequence[PredictedFigure], name: str) -> Table:
    table = make_table("", "recorded", "simulated", "error, %", name, "+/-")
    for prediction in found:
        table.add_row(*_row(prediction))
    return table


def _row(prediction: PredictedFigure) -> tuple[str, ...]:
    label, scale, decimals = LABELS[prediction.name]
    values = prediction.recorded, prediction.simulated, prediction.changed, prediction.changed * prediction.error
    was, base, changed, band = (f"{scale * value:.{decimals}f}" for value in values)
    error = f"{100 * prediction.error:.0f}"
    return (label, was, base, error, changed, band) if prediction.is_known else (label, was, base, error, "unknown", "")
