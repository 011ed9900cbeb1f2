"""Where the time goes in which a stream that moves gets no token: the timelines of its ingress and of both engines."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

from tests.serve.chaos_streams import Stream

PHASES = {  # beginning of the event that ends a phase: name of the phase
    "stopped after": "",
    "the attempt failed": "to the ingress",
    "routed to": "routing",
    "queued behind": "to the replica",
    "accepted by": "claim",
    "received,": "reading",
    "first token from": "back to the ingress",
}
"""They follow each other in this order."""


@dataclass(frozen=True)
class Move:
    """pause_s: between the two tokens of the client around it. phases: seconds that each phase took."""

    pause_s: float
    phases: dict[str, float]


def moves_of(url: str, streams: Iterable[Stream]) -> list[Move]:
    """Return the moves of these requests of which all events are known."""
    found = []
    for stream in streams:
        timeline = httpx.get(f"{url}/debug/requests/{stream.name}", timeout=30).json()
        found += _moves(stream, timeline["sequences"][-1]["events"])
    return found


def _moves(stream: Stream, events: list[dict[str, Any]]) -> list[Move]:
    moves: list[list[tuple[str, float]]] = []
    for event in events:
        begins = _phase(event["what"])
        if begins == "stopped after":
            moves.append([(begins, event["at"])])
        elif begins is not None and moves and moves[-1][-1][0] != begins:
            moves[-1].append((begins, event["at"]))
    whole = [move for move in moves if [begins for begins, _ in move] == list(PHASES)]
    return [Move(_pause_s(stream, move), {PHASES[end]: at - since for (_, since), (end, at) in pairwise(move)})
            for move in whole]  # fmt: skip


def _pause_s(stream: Stream, move: list[tuple[str, float]]) -> float:
    """The longest time between two tokens that overlaps with the move, which is timed by the same machine's clock. The
    time that the move took, if the client was so late that it read its first token afterwards."""
    began, ended = (at - time.time() + time.monotonic() for _, at in (move[0], move[-1]))
    pauses = (after - before for before, after in pairwise(stream.arrivals) if before <= ended and after >= began)
    return max(pauses, default=ended - began)


def _phase(what: str) -> str | None:
    return next((begins for begins in PHASES if what.startswith(begins) or f": {begins}" in what), None)


def is_replayed(url: str, stream: Stream) -> bool:
    """Whether another engine has computed the stream's tokens again."""
    timeline = httpx.get(f"{url}/debug/requests/{stream.name}", timeout=30).json()
    return bool(timeline["sequences"][-1]["replays"])


def percentiles(seconds: list[float]) -> str:
    """Return P50 and P99 in milliseconds."""
    if not seconds:
        return "unknown"
    ordered = sorted(seconds)
    p50, p99 = (1000 * ordered[int(share * (len(ordered) - 1) + 0.5)] for share in (0.5, 0.99))
    return f"P50 {p50:.0f} ms, P99 {p99:.0f} ms"


def table(moves: list[Move]) -> str:
    """Return the percentiles of pauses and phases, a line each."""
    columns = {"pause of the client": [move.pause_s for move in moves]}
    columns |= {phase: [move.phases[phase] for move in moves] for phase in PHASES.values() if phase}
    return "\n".join(f"  {phase}: {percentiles(seconds)}" for phase, seconds in columns.items())
