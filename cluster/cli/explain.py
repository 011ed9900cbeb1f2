"""`manta explain`: what happened to one request, by GET /debug/requests/{id}."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from cluster.terminal.tables import summary
from deployments.observability.timeline import RequestTimeline, SequenceTimeline
from engine.wire.parts.costs import SequenceCost


def show(body: bytes, console: Console) -> None:
    for timeline in msgspec.json.decode(body, type=RequestTimeline).sequences:
        show_sequence(timeline, console)


def show_sequence(timeline: SequenceTimeline, console: Console) -> None:
    events = Table(box=None, padding=(0, 2, 0, 0))
    events.add_column("seconds", justify="right")
    events.add_column("where", style="cyan")
    events.add_column("what happened", overflow="fold")
    for event in timeline.events:
        events.add_row(f"{event.at - timeline.arrived_at:+.3f}", event.where, event.what)
    for part in (summary(summary_of(timeline)), "", events, ""):
        console.print(part)


def summary_of(timeline: SequenceTimeline) -> list[tuple[str, str]]:
    """Return (name, text) for each line of the summary, without empty ones."""
    first_s = timeline.first_token_s
    state = {"waiting": "waits for its first token", "running": "is running"}.get(timeline.state)
    cached = "" if first_s is None else f", {timeline.cached_tokens} of them from the prefix cache"
    waits = {
        "for admission": timeline.admission_s,
        "in the engine's queue": timeline.queue_s,
        "for the first token after that": timeline.prefill_s,
    }
    output = f"{timeline.output_tokens} tokens" + ("" if first_s is None else f", the first after {first_s:.3f} s")
    if first_s is not None and timeline.seconds is not None and timeline.output_tokens > 1:
        each_s = (timeline.seconds - first_s) / (timeline.output_tokens - 1)
        output += f", then one every {1000 * each_s:.1f} ms"
    rows = [
        ("request", timeline.request_id),
        ("model", timeline.model),
        ("adapter", timeline.adapter or ""),
        ("state", state or f"ended after {timeline.seconds or 0.0:.3f} s: {timeline.reason}"),
        ("error", timeline.error or ""),
        ("prompt", f"{timeline.prompt_tokens} tokens{cached}"),
        ("waited", ", ".join(f"{value:.3f} s {where}" for where, value in waits.items() if value is not None)),
        ("output", output),
        ("engines", ", ".join(timeline.engines)),
        ("replays", str(timeline.replays or "")),
        ("preemptions", str(timeline.preemptions or "")),
        ("cost", _cost(timeline)),
        ("prompt text", timeline.prompt or ""),
        ("output text", timeline.output or ""),
    ]
    return [(name, text) for name, text in rows if text]


def _cost(timeline: SequenceTimeline) -> str:
    """Return what all attempts of a sequence have cost."""
    if not timeline.costs:
        return ""
    cost = SequenceCost.total(timeline.costs.values())
    wasted = f", and {cost.wasted_s:.4f} s for tokens computed again" if cost.wasted_s else ""
    price = f"; price {timeline.price:.6g}" if timeline.price else ""
    return f"{cost.compute_s:.4f} s of compute{wasted}, {cost.kv_gib_s:.6f} GiB·s of KV cache{price}"
