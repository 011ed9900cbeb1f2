"""`manta explain`: what happened to one request, by GET /debug/requests/{id}."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.table import Table

from cluster.cli.bench.openai_client import OpenAIClient, error_message
from deployments.observability.timeline import RequestTimeline, SequenceTimeline
from engine.errors import EngineUnavailable, InvalidApiKey, RequestError, RequestNotFound

TIMEOUT_S = 30.0


def fetch(url: str, request_id: str, api_key: str | None) -> bytes:
    """The server's answer: RequestTimeline, in JSON.

    Raises RequestNotFound, InvalidApiKey, RequestError, or EngineUnavailable if there is no server.
    """
    status, body = asyncio.run(_get(url, f"/debug/requests/{quote(request_id, safe='')}", api_key))
    match status:
        case 200:
            return body
        case 401:
            raise InvalidApiKey(f"{url}: {error_message(body)}")
        case 404 if b"not_found_error" in body:
            raise RequestNotFound(request_id)
        case 404:
            raise RequestError(f"{url} is no Manta: it has no /debug/requests")
        case _:
            raise EngineUnavailable(f"{url} answers {status}: {error_message(body)}")


async def _get(url: str, path: str, api_key: str | None) -> tuple[int, bytes]:
    async with OpenAIClient(url, api_key, TIMEOUT_S) as client:
        return await client.get(path)


def show(body: bytes, console: Console) -> None:
    for timeline in msgspec.json.decode(body, type=RequestTimeline).sequences:
        show_sequence(timeline, console)


def show_sequence(timeline: SequenceTimeline, console: Console) -> None:
    summary = Table.grid(padding=(0, 2))
    summary.add_column(style="bold")
    summary.add_column(overflow="fold")
    for name, told in summary_of(timeline):
        summary.add_row(name, told)
    events = Table(box=None, padding=(0, 2, 0, 0))
    events.add_column("seconds", justify="right")
    events.add_column("where", style="cyan")
    events.add_column("what happened", overflow="fold")
    for event in timeline.events:
        events.add_row(f"{event.at - timeline.arrived_at:+.3f}", event.where, event.what)
    console.print(summary)
    console.print()
    console.print(events)
    console.print()


def summary_of(timeline: SequenceTimeline) -> list[tuple[str, str]]:
    """(name, what is to be said of it)"""
    if timeline.state != "ended":
        end = "waits for its first token" if timeline.state == "waiting" else "is running"
    else:
        end = f"ended after {seconds(timeline.seconds)}: {timeline.reason}"
    cached = f", {timeline.cached_tokens} of them from the prefix cache" if timeline.first_token_s is not None else ""
    waits = {
        "for admission": timeline.admission_s,
        "in the engine's queue": timeline.queue_s,
        "for the first token since then": timeline.prefill_s,
    }
    waited = ", ".join(f"{seconds(value)} {where}" for where, value in waits.items() if value is not None)
    output = f"{timeline.output_tokens} tokens"
    if timeline.first_token_s is not None:
        output += f", the first after {seconds(timeline.first_token_s)}"
        if timeline.seconds is not None and timeline.output_tokens > 1:
            each = (timeline.seconds - timeline.first_token_s) / (timeline.output_tokens - 1)
            output += f", then one every {1000 * each:.1f} ms"
    rows = [
        ("request", timeline.request_id),
        ("model", timeline.model),
        ("state", end),
        ("error", timeline.error or ""),
        ("prompt", f"{timeline.prompt_tokens} tokens{cached}"),
        ("waited", waited),
        ("output", output),
        ("engines", ", ".join(timeline.engines)),
        ("replays", str(timeline.replays or "")),
        ("preemptions", str(timeline.preemptions or "")),
    ]
    return [(name, told) for name, told in rows if told]


def seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f} s"
