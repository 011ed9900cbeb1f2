"""Replays a file of tapes in a process of its own, and answers what each moment looked like. Started by TapeViewer.

It reads a TapeQuestion in JSON from each line of stdin, and writes a TapeAnswer in JSON to stdout.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from pathlib import Path
from typing import Any

import msgspec

from cluster.lab.tape.moment_view import MomentView
from cluster.lab.tape.replay import Diverged, Replay
from cluster.lab.tape.replay_limits import replay_limits
from deployments.parts.tape.choice_record import RecordedChoice, RouterTape
from deployments.parts.tape.tape_viewer import TapeQuestion
from engine.parts.tape.file import MAX_RATIO, read_file, read_tapes

NICENESS = 10


class ChoiceView(msgspec.Struct, frozen=True):
    """What a router has chosen last, and what it knew."""

    router: str
    pool: str
    seconds_ago: float
    choice: dict[str, Any]
    """A RecordedChoice by the names of its fields."""


class TapeAnswer(msgspec.Struct, frozen=True):
    engines: list[str]
    engine: str
    cause: str
    reason: str
    moment: MomentView | None
    """None if the tape cannot be read."""
    choices: list[ChoiceView]
    problem: str = ""
    """Why the replay went no further, or does not begin."""


class OpenTapes:
    """The tapes of a file, of which one is replayed at a time."""

    def __init__(self, path: Path):
        """Raises InvalidParameter."""
        self._tapes = {tape.engine_id: tape for tape in read_tapes(path)}
        routers = [msgspec.msgpack.decode(tape, type=RouterTape) for tape in read_file(path).routers]
        self._choices = [(router, router.read()) for router in routers]
        self._replay: Replay | None = None

    def answer(self, question: TapeQuestion) -> TapeAnswer:
        if not self._tapes:
            return TapeAnswer([], "", "", "", None, [], "no engine records a tape (engine.tape_mib)")
        engine = question.engine if question.engine in self._tapes else next(iter(self._tapes))
        tape, moment, problem = self._tapes[engine], None, ""
        try:
            if self._replay is None or self._replay.tape is not tape:
                self._replay = Replay(tape)
            moment, problem = self._look(self._replay, question)
        except Exception as error:  # noqa: BLE001  a tape of another version can fail in any way
            problem = f"this version cannot replay the tape of {tape.version}: {type(error).__name__}: {error}"
            self._replay = None
        choices = [] if moment is None else list(self._made_before(moment.at))
        return TapeAnswer([*self._tapes], engine, tape.cause, tape.reason, moment, choices, problem)

    def _look(self, replay: Replay, question: TapeQuestion) -> tuple[MomentView, str]:
        position, problem = question.position or 0, ""
        if question.seconds is not None:
            position = replay.place_of(replay.tape.segments[0].started_at + question.seconds)
        try:
            replay.go_to(position)
        except Diverged as error:
            problem = str(error)
        return MomentView.of(replay), problem

    def _made_before(self, at: float) -> list[ChoiceView]:
        found = []
        for router, choices in self._choices:
            if number := bisect_right(choices, at, key=lambda choice: choice.at):
                newest = choices[number - 1]
                found.append(ChoiceView(router.router, router.role, at - newest.at, by_name(newest)))
        return found


def by_name(choice: RecordedChoice) -> dict[str, Any]:
    """Return the fields of a choice, and those of each engine: both are arrays on a tape."""
    known = {engine: msgspec.structs.asdict(one) for engine, one in choice.known.items()}
    return {**msgspec.structs.asdict(choice), "known": known}


def main() -> None:
    os.nice(NICENESS)
    path, encode = Path(sys.argv[1]), msgspec.json.encode
    with replay_limits(path.stat().st_size * MAX_RATIO):
        tapes = OpenTapes(path)
        for line in sys.stdin.buffer:
            sys.stdout.buffer.write(encode(tapes.answer(msgspec.json.decode(line, type=TapeQuestion))) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
