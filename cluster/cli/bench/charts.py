"""HTML reports of `manta bench serve` and `generate`."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.bench.openai_client import RequestResult
from cluster.terminal.html_report import Point, distribution, rate_over_time, write_report
from cluster.terminal.tables import figure

if TYPE_CHECKING:  # neither needs the other's libraries
    from cluster.cli.bench.serve import ServeReport
    from cluster.cli.generate import Summary


def write_serve_report(path: Path, report: ServeReport) -> None:
    done = [outcome for outcome in report.outcomes if outcome.error is None]
    began = min((outcome.sent_at for outcome in done), default=0.0)
    tokens = [event for outcome in done for event in _tokens(outcome, began)]
    charts = [
        distribution("Time to first token", "ms", [1e3 * o.ttft_s for o in done]),
        distribution("Time per output token", "ms", [1e3 * o.tpot_s for o in done if o.tpot_s is not None]),
        distribution("Time to the end", "ms", [1e3 * o.e2el_s for o in done]),
        rate_over_time("Output", "tokens/s", tokens, report.duration),
        rate_over_time("Answers", "requests/s", [(o.sent_at + o.e2el_s - began, 1.0) for o in done], report.duration),
    ]
    figures = [
        ("completed", f"{report.completed} requests in {figure(report.duration)} s"),
        ("failed", str(report.failed)),
        *((name.replace("_", " ") + "/s", figure(value)) for name, value in report.throughputs.items()),
        *((f"{name}, median and p99", f"{figure(d.median)} and {figure(d.p99)} ms")
          for name, d in report.latencies.items() if d is not None),
    ]  # fmt: skip
    write_report(path, f"{report.model} at {report.base_url}", figures, charts)


def _tokens(outcome: RequestResult, began: float) -> list[Point]:
    """Return the times at which tokens arrived, and how many arrived at each. The tokens of an answer are spread evenly
    over its chunks."""
    times = list(accumulate(outcome.itl_s, initial=outcome.sent_at + outcome.ttft_s - began))
    return [(at, outcome.output_tokens / len(times)) for at in times]


def write_generation_report(path: Path, summary: Summary) -> None:
    lengths = [float(tokens) for _, tokens in summary.finished]
    duration_s = max((at for at, _ in summary.finished), default=0.0)
    charts = [
        rate_over_time("Output, counted as answers are written", "tokens/s", summary.finished, duration_s),
        distribution("Length of an answer", "tokens", lengths),
    ]
    figures = [
        ("answers", f"{summary.answered}; {summary.failed} failed"),
        ("output tokens", figure(sum(lengths), 0)),
        ("output tokens/s", figure(sum(lengths) / duration_s if duration_s else None)),
    ]
    write_report(path, "manta generate", figures, charts)
