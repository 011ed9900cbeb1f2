"""What a replayed scheduler looks like at one moment: its queue, its blocks and its batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import msgspec

from cluster.lab.tape.replay import Moment, Replay
from engine.core.engine_stats import pools_by_name
from engine.core.request import Request, State


class BlocksView(msgspec.Struct, frozen=True):
    """Blocks of a KV cache group."""

    group: str
    used: int
    cached: int
    free: int
    total: int
    block_size: int
    """Tokens of a block."""


class RequestView(msgspec.Struct, frozen=True):
    request: str
    state: str
    slot: int
    prompt: int
    output: int
    computed: int
    blocks: int
    preempted: int

    @classmethod
    def of(cls, request: Request) -> Self:
        blocks = sum(len(one.held) for one in request.tables)
        numbers = request.num_prompt, request.num_output, request.computed, blocks, request.num_preemptions
        return cls(request.request_id, request.state.value, request.slot, *numbers)


class RowView(msgspec.Struct, frozen=True):
    """An entry of the newest planned step: it computes the tokens [start, end) of a request."""

    request: str
    start: int
    end: int
    drafts: int
    samples: bool


class MomentView(msgspec.Struct, frozen=True, kw_only=True):
    position: int
    """Number of moments that have been replayed."""
    moments: int
    """Of the whole tape."""
    at: float
    """Seconds since 1970."""
    seconds: float
    """From the start of the tape."""
    what: str
    """What happened last."""
    blocks: list[BlocksView]
    planned: int
    """Steps that are planned and have not ended."""
    preemptions: int
    requests: dict[str, list[RequestView]]
    """`running`, `waiting`, and those with `KV of other engines`, as far as there are any."""
    step: int
    """The newest planned step that has not ended; 0 for none."""
    batch: list[RowView]
    """Its entries."""

    @classmethod
    def of(cls, replay: Replay) -> Self:
        scheduler = replay.scheduler
        queue, kept = scheduler.queue, scheduler.parts.kept()
        lists: dict[str, Sequence[Request]] = {
            "running": queue.running,
            "waiting": [*queue.waiting, *scheduler.parts.kept(State.LOADING_KV)],
            "KV of other engines": [r for r in kept if r.state is not State.LOADING_KV],
        }
        last = replay.moments[replay.position - 1] if replay.position else None
        return cls(
            position=replay.position,
            moments=len(replay.moments),
            at=replay.tape.wall_s + replay.now,
            seconds=replay.now - replay.tape.segments[0].started_at,
            what=what(last),
            blocks=[
                BlocksView(name, pool.num_used, pool.num_cached, pool.num_free, pool.num_blocks, pool.block_size)
                for name, pool in pools_by_name(scheduler.kv_cache).items()
            ],
            planned=len(scheduler.planned),
            preemptions=scheduler.totals.preemptions,
            requests={name: [*map(RequestView.of, requests)] for name, requests in lists.items() if requests},
            step=scheduler.planned[-1][0].step if scheduler.planned else 0,
            batch=list(_rows(replay)),
        )


def _rows(replay: Replay) -> Iterable[RowView]:
    if not replay.scheduler.planned:
        return
    plan, requests = replay.scheduler.planned[-1]
    columns = zip(requests, plan.starts, plan.counts, plan.samples, strict=True)
    for entry, (request, start, count, samples) in enumerate(columns):
        yield RowView(request.request_id, start, start + count, len(plan.drafts.get(entry, ())), samples)


def what(moment: Moment | None) -> str:
    """Return what happened at a moment."""
    if moment is None:
        return "the start of the tape"
    ended = "".join(f"; {ended.request_id} ended ({ended.reason})" for ended in moment.ended)
    if moment.digest is not None:
        return "nothing could be planned" if not moment.digest else "a step was planned"
    if moment.commits:
        return f"a step ended{ended}"
    fields = moment.input.__struct_fields__ if moment.input is not None else ()
    told = (f"{name}={getattr(moment.input, name)!r}" for name in fields if name not in ("message", "request"))
    named = getattr(moment.input, "message", None) or getattr(moment.input, "request", None)
    name = getattr(named, "request_id", "")
    kind = type(moment.input).__name__.removesuffix("Shape")
    return f"{kind} {name} {' '.join(told)}{ended}"
