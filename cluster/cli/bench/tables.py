"""Reports as tables, with notes about what the figures do not show."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cluster.terminal.tables import Total, distributions, figure, show, totals

if TYPE_CHECKING:  # a load generator need not wait for torch
    from cluster.cli.bench.offline import OfflineReport
    from cluster.cli.bench.serve import ServeReport

BUSY_CLIENT = 0.8  # of one core


def show_offline(report: OfflineReport) -> None:
    rows = [
        ("output tokens/s", report.output_tokens_per_s, 1),
        ("input + output tokens/s", report.total_tokens_per_s, 1),
        ("time to first token, ms", report.ttft_ms, 2),
        ("time per output token, ms", report.tpot_ms, 3),
    ]
    show(
        f"{report.model}, {report.dtype}, {report.threads} threads; {report.repetitions} repetitions of "
        f"{report.requests} requests, {report.input_len} tokens in and {report.output_len} out",
        distributions("", ("median", "min", "max"), rows),
        f"after the start of the process: loaded {figure(report.loaded_s)} s, warmed up {figure(report.ready_s)} s",
        f"memory at its peak: {report.peak_rss_gib:.2f} GiB",
    )
    if report.failed:
        show(f"{report.failed} requests failed")


def show_serve(report: ServeReport) -> None:
    load, throughputs = report.load, list(report.throughputs.values())
    rate = "all at once" if math.isinf(load.request_rate) else f"{load.request_rate:g} requests/s asked for"
    limit = f", at most {load.max_concurrency} at a time" if load.max_concurrency else ""
    rows: list[Total] = [
        ("completed", report.completed, 0),
        ("failed", report.failed, 0),
        ("duration, s", report.duration, 2),
        ("input tokens", report.total_input_tokens, 0),
        *([] if report.total_cached_tokens is None else [("of these cached", report.total_cached_tokens, 0)]),
        ("output tokens", report.total_output_tokens, 0),
        ("requests/s", throughputs[0], 2),
        ("output tokens/s", throughputs[1], 1),
        ("input + output tokens/s", throughputs[2], 1),
    ]
    if report.request_goodput is not None:
        rows.append(("goodput, requests/s", report.request_goodput, 2))
    latencies = [(name.upper(), values, 2) for name, values in report.latencies.items()]
    tables = [distributions("ms", ("mean", "median", "p90", "p99"), latencies)] if report.completed else []
    title = f"{report.model} at {report.base_url}: {load.num_prompts} requests, {rate}{limit}"
    show(title, totals(rows), *tables, *serve_notes(report))


def serve_notes(report: ServeReport) -> list[str]:
    """Return notes that a reader of the figures should know."""
    notes = [f"failed {count} times: {error}" for error, count in report.errors.items()]
    if report.without_usage:
        notes.append(f"{report.without_usage} answers came without usage; their tokens were counted by chunks")
    elif report.total_output_tokens < (asked := report.load.full_output(report.completed)):
        notes.append(f"answers are shorter than requested: in full they would have {asked} tokens")
    if report.client_cpu_share > BUSY_CLIENT:
        notes.append(
            f"this client used {report.client_cpu_share:.0%} of a core, and may itself have limited the figures"
        )
    return notes
