"""Shows a replayed scheduler in a terminal: its queue, its blocks and its batch, at any moment."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from cluster.lab.explorer.outcome import clock_time, told
from cluster.lab.tape.moment_view import MomentView
from cluster.lab.tape.replay import Diverged, Replay
from engine.core.door.inputs import Input
from engine.core.request import Request, State
from engine.errors import InvalidParameter
from engine.parts.tape.inputs import AddedRemoteShape, AddedShape

SHOWN = 24  # rows of a table
HELP = "n [COUNT] forward, b [COUNT] back, t SECONDS, # NUMBER, r REQUEST to its next change, h help, q quit"


def show(replay: Replay, console: Console) -> None:
    view = MomentView.of(replay)
    console.print(f"#{view.position} of {view.moments}, {clock_time(replay, replay.now)}: {view.what}")
    for pool in view.blocks:
        console.print(
            f"blocks of group {pool.group}: {pool.used} used, {pool.cached} cached, {pool.free} free, "
            f"of {pool.total} with {pool.block_size} tokens each"
        )
    console.print(f"steps planned and not ended: {view.planned}; preemptions: {view.preemptions}")
    for title, requests in view.requests.items():
        console.print(_table(f"{title}: {len(requests)}", requests))
    if view.step:
        tokens = sum(row.end - row.start for row in view.batch)
        console.print(_table(f"newest step {view.step}: {tokens} tokens of {len(view.batch)} requests", view.batch))


def _table(title: str, rows: Sequence[msgspec.Struct]) -> Table:
    """Return a table of some rows, with their fields as columns."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in rows[0].__struct_fields__:
        table.add_column(column, justify="left" if column in ("request", "state") else "right")
    for row in rows[:SHOWN]:
        table.add_row(
            *(
                ("yes" if value else "no") if isinstance(value, bool) else str(value)
                for value in msgspec.structs.astuple(row)
            )
        )
    if len(rows) > SHOWN:
        table.add_row(f"and {len(rows) - SHOWN} more")
    return table


def show_at(replay: Replay, at: str, console: Console) -> None:
    """Show the scheduler at a time in seconds from the start, or at a moment's number (`#12`). Raises
    InvalidParameter."""
    replay.go_to(_position(replay, at))
    show(replay, console)


def _position(replay: Replay, at: str) -> int:
    try:
        if at.startswith("#"):
            return int(at[1:])
        return replay.place_of(replay.tape.segments[0].started_at + float(at))
    except ValueError:
        raise InvalidParameter("--at", at, "seconds from the start, or # and the number of a moment") from None


# -- one request -------------------------------------------------------------------------------------------


def is_of(name: str, request_id: str) -> bool:
    """Return whether a name is that of a request, of one of its sequences or attempts, or of a handoff of these."""
    return name == request_id or name.startswith(tuple(request_id + mark for mark in "-./"))


def follow(replay: Replay, request_id: str, console: Console) -> bool:
    """Print what happened to a request and its parts (is_of), from their arrivals to their ends. Returns False if the
    engine did not have it."""
    arrived = (moment.input for moment in replay.moments)
    names = [*replay.scheduler.queue.live, *(_arrived(one) for one in arrived)]
    found = [name for name in dict.fromkeys(names) if is_of(name, request_id)]
    for name in found:
        console.print(f"{name} in {replay.tape.engine_id}:")
        replay.go_to(0)
        _follow_one(replay, name, console)
    return bool(found)


def _arrived(call: Input | None) -> str:
    """Return the id of the request that comes by a call; empty if none does."""
    match call:
        case AddedShape(message=message):
            return message.request_id
        case AddedRemoteShape(request=request):
            return request.handoff_id
        case _:
            return ""


def _follow_one(replay: Replay, request_id: str, console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("#", justify="right")
    table.add_column("time")
    table.add_column("what happened", overflow="fold")
    for change in changes(replay, request_id):
        table.add_row(str(replay.position), clock_time(replay, replay.now), change)
    console.print(table)


def changes(replay: Replay, request_id: str) -> Iterator[str]:
    """Replay the rest. Yields what changes about a request: its state, the end of a prompt chunk, its first token."""
    before: tuple[object, ...] | None = None
    request: Request | None = None
    while replay.position < len(replay.moments):
        replay.step()
        request = replay.scheduler.queue.live.get(request_id, request)
        if request is None:
            continue
        decodes = request.computed >= request.num_prompt
        now = (request.state, request.num_preemptions, request.prefix.num_cached, min(request.num_output, 1),
               -1 if decodes else request.computed, id(request))  # fmt: skip
        if now != before:
            before = now
            yield _said(request)
            if request.state is State.FINISHED:
                request, before = None, None  # its id may be used again


def _said(request: Request) -> str:
    text = f"{request.state.value}: {request.computed} of {len(request.tokens)} tokens computed"
    if request.prefix.num_cached:
        text += f", {request.prefix.num_cached} were cached"
    if request.num_preemptions:
        text += f", preempted {request.num_preemptions} times"
    return f"{text}, {request.num_output} output tokens"


# -- step by step ------------------------------------------------------------------------------------------


def explore(replay: Replay, console: Console) -> None:
    """Obey commands from stdin (HELP) until it ends."""
    show(replay, console)
    console.print(HELP)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        try:
            if command == "q":
                return
            _obey(replay, command or "n", argument.strip(), console)
        except Diverged as error:
            console.print(told(replay, error))
        except (ValueError, InvalidParameter) as error:
            console.print(f"{error}; {HELP}")


def _obey(replay: Replay, command: str, argument: str, console: Console) -> None:
    match command:
        case "n" | "b":
            count = int(argument or 1)
            replay.go_to(replay.position + (count if command == "n" else -count))
        case "t":
            replay.go_to(_position(replay, argument))
        case "#":
            replay.go_to(int(argument))
        case "r":
            next(changes(replay, argument), None)
            next(changes(replay, argument), None)
        case _:
            raise ValueError(f"{command!r} is no command")
    show(replay, console)
