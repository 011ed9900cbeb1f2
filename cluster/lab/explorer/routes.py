"""Routers' choices on a tape: made again, and shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from cluster.lab.explorer.explore import is_of
from deployments.parts.tape.choice_record import RecordedChoice, RouterTape, choose_again, prompt_of
from engine.parts.tape.file import UNREADABLE

SHOWN = 32  # engines of a table


@dataclass(frozen=True, slots=True)
class RouterOutcome:
    router: str
    pool: str
    seconds: float  #: from the first choice to the last
    choices: int
    equal: int
    problem: str = ""  #: the first choice that differs

    @property
    def name(self) -> str:
        return f"{self.router} to {self.pool}"

    @property
    def differs(self) -> bool:
        return self.equal < self.choices

    def row(self) -> tuple[str, ...]:
        return self.router, self.pool, f"{self.seconds:.1f}", f"{self.equal} of {self.choices}"


def choose_all_again(tape: RouterTape) -> RouterOutcome:
    """Make all choices of a router again, and compare them."""
    try:
        choices, problems = tape.read(), list[str]()
    except UNREADABLE as error:
        problem = f"the choices cannot be read by this version ({error})"
        return RouterOutcome(tape.router, tape.role, 0.0, len(tape.choices), 0, problem)
    for choice in choices:
        if why := _difference(tape, choice):
            problems.append(f"{choice.request_id} at {_clock(choice.at)}: {why}")
    seconds = choices[-1].at - choices[0].at if choices else 0.0
    first = problems[0] if problems else ""
    return RouterOutcome(tape.router, tape.role, seconds, len(choices), len(choices) - len(problems), first)


def _difference(tape: RouterTape, choice: RecordedChoice) -> str:
    try:
        return choose_again(tape, choice).differs(choice)
    except (LookupError, StopIteration):
        return "the router asks for more than it did then"


def choices_of(tapes: Sequence[RouterTape], request_id: str) -> Iterator[tuple[RouterTape, RecordedChoice]]:
    """Yield the choices for a request and its parts (is_of)."""
    for tape in tapes:
        for choice in tape.read():
            if is_of(choice.request_id, request_id):
                yield tape, choice


def show_choice(tape: RouterTape, choice: RecordedChoice, console: Console) -> None:
    """Print why an engine was chosen: what the router knew of each."""
    console.print(
        f"{_clock(choice.at)}, the router of {tape.router} to the {tape.role} pool: {choice.request_id}, a prompt of "
        f"{choice.num_tokens} tokens, to {choice.ranked[0]} ({choice.reason}, {choice.cached_tokens} tokens cached)"
    )
    if choice.home:
        console.print(f"{choice.home} holds a part of the prompt")
    if choice.holder:
        console.print(f"{choice.holder} has more of the prompt cached")
    if choice.unhealthy:
        console.print(f"last, because they failed or are about to stop: {', '.join(choice.unhealthy)}")
    table, prompt = Table(box=None, padding=(0, 2, 0, 0)), prompt_of(choice)
    for column in ("engine", "cost", "cached tokens", "queued tokens", "sequences", "blocks used", ""):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for engine in choice.ranked[:SHOWN]:
        if (known := choice.known.get(engine)) is None:
            table.add_row(engine, "not looked at")
            continue
        candidate = known.candidate(engine)
        table.add_row(
            engine,
            f"{tape.cost.total(prompt, candidate):.2f}",
            str(tape.cost.cached_tokens(prompt, candidate)),
            str(known.queued_tokens),
            f"{known.sequences} of {known.slots}",
            f"{known.blocks_used} of {known.blocks_total}",
            "would wait" if tape.cost.would_wait(prompt, candidate) else "",
        )
    if len(choice.ranked) > SHOWN:
        table.add_row(f"and {len(choice.ranked) - SHOWN} more")
    console.print(table)
    console.print(_difference(tape, choice) or "chosen again: equal")


def _clock(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S.%f} UTC"
