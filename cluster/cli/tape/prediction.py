"""`manta replay --set`: what other options would have done to the requests of a tape."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.table import Table

from cluster.cli.bench.tables import make_table, show
from cluster.simulator.cluster import simulate
from cluster.simulator.recorded.recording import Recording
from cluster.simulator.recorded.what_if import UNKNOWN, Baseline, Prediction, simulated_figures
from cluster.simulator.tuning.settings import parse_setting, with_settings
from engine.core.tape.ring import EngineTape

LABELS = {
    "output_tokens_per_s": ("output tokens/s", 1.0),
    "ttft_p50_s": ("time to first token p50, ms", 1000.0),
    "ttft_p90_s": ("time to first token p90, ms", 1000.0),
    "ttft_p99_s": ("time to first token p99, ms", 1000.0),
    "tpot_p50_s": ("time per token p50, ms", 1000.0),
    "tpot_p99_s": ("time per token p99, ms", 1000.0),
    "cached": ("prompt tokens cached, %", 100.0),
}


def show_prediction(tapes: Sequence[EngineTape], settings: Sequence[str], *, as_json: bool) -> None:
    baseline = Baseline(Recording(tapes))
    changed = with_settings(baseline.spec, dict(map(parse_setting, settings)))
    figures = simulated_figures(simulate(changed, baseline.trace), changed.slo)
    found = [prediction for prediction in baseline.predict(figures) if prediction.name in LABELS]
    if as_json:
        print(json.dumps({prediction.name: prediction.figures() for prediction in found}))
        return
    show(*told(baseline.recording), predictions(found, f"with {' '.join(settings)}"))
    show(f"+/- is the error of the simulation of what really happened; a figure is unknown above {UNKNOWN:.0%}")


def told(recording: Recording) -> list[str]:
    """Return what there is to say about a tape."""
    fit = recording.fit
    shared = f"; a step takes {fit.contention:.0%} longer for each other engine that computes" if fit.contention else ""
    return [
        f"{len(recording.requests)} requests in {recording.decode + recording.prefill} engines; the cost of a step is "
        f"fitted to {fit.steps} steps, median error {fit.error:.0%}{shared}"
    ]


def predictions(found: Sequence[Prediction], name: str) -> Table:
    table = make_table("", "recorded", "simulated", "error, %", name, "+/-")
    for prediction in found:
        table.add_row(*_row(prediction))
    return table


def _row(prediction: Prediction) -> tuple[str, ...]:
    label, scale = LABELS[prediction.name]
    was, base, changed = (scale * x for x in (prediction.recorded, prediction.simulated, prediction.changed))
    if not prediction.is_known:
        return label, f"{was:.1f}", f"{base:.1f}", f"{100 * prediction.error:.0f}", "unknown", ""
    band = f"{changed * prediction.error:.1f}"
    return label, f"{was:.1f}", f"{base:.1f}", f"{100 * prediction.error:.0f}", f"{changed:.1f}", band
