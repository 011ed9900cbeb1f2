"""A roll from one version to another and back, under streams, with kills in the middle, and what of it can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.serve.kept_records import Kept, Records
from tests.serve.roll_load import HEADING, Answer, Load, ask_all, asks, other_texts, run_load
from tests.serve.serve_run import wait_until
from tests.serve.version_cluster import VersionCluster

BOOKED_S = 30.0  # until the books have all
Part = tuple[Answer, int, int]  # tokens [begin, end) of an answer, after a border


class Roll:
    """Prints a row of figures for each of its steps."""

    def __init__(self, cluster: VersionCluster, tokens: int, clients: int):
        """tokens: of each stream."""
        self.cluster, self.clients, self.asks = cluster, clients, asks(tokens)
        self._alone: list[list[Answer]] = []
        self._open: list[Part] = []
        self._kept: list[Kept] = []
        self._billed = 0.0  # seconds of engines, by what answers say
        self._wrong: list[str] = []
        print(f"\n{HEADING}")

    def run(self, streams: int) -> list[Load]:
        """Roll to the new version and back, and return what happened under each of the two. streams: under each, at
        least. Raises AssertionError with all that is wrong."""
        records = Records(self.cluster.url)
        self.cluster.roll_to("old")
        self._alone_for("old", streams // 4)
        self._kept.append(records.leave("ocean"))
        rolls = [self._load("to the new one: half, back, and on, with two kills", streams, self._forth_with_kills)]
        self._alone_for("new", streams // 4)
        self._check_records(records, "winter")
        rolls.append(self._load("back to the old one", streams, lambda: self.cluster.roll_to("old")))
        self._check_records(records, "music")
        self._continue_parts()
        self._wrong += [line for load in rolls for line in other_texts(load, self._alone)]
        self._wrong += [f"{answer.ask} from token {begin} to {end}: of no version" for answer, begin, end in self._open]
        assert not self._wrong, "\n".join(self._wrong)
        return rolls

    def _forth_with_kills(self) -> None:
        self.cluster.ask_for("new")
        self.cluster.wait_for_first("new")
        self.cluster.roll_to("old")
        self.cluster.ask_for("new")
        self.cluster.wait_for_first("new")
        self.cluster.kill_one_of("old")
        self.cluster.wait_for_all("new")
        self.cluster.kill_one_of("new")
        self.cluster.wait_until_rolled_to("new")

    def _load(self, what: str, streams: int, change: Callable[[], None] = lambda: None) -> Load:
        load = run_load(self.cluster.url, self.asks, streams, change, self.clients)
        print(load.line(what), flush=True)
        self._wrong += load.problems
        self._billed += load.compute_s
        self._check_bill(what)
        self._open += [
            (answer, begin, end)
            for answer in load.crossed
            if answer.ask.seed is None  # of others, a draw depends on what is output and what prompt
            for begin, end in pairwise([*answer.borders, len(answer.tokens)])
        ]
        return load

    def _alone_for(self, version: str, streams: int) -> None:
        """What the version that runs answers while nothing changes, and whether it continues texts as they were
        continued."""
        load = self._load(f"only the {version} one", max(streams, len(self.asks)))
        known = {answer.ask: answer for answer in load.answers}
        self._wrong += [f"{a.ask} has two texts" for a in load.answers if a.tokens != known[a.ask].tokens]
        self._alone.append(list(known.values()))
        self._continue_parts()

    def _continue_parts(self) -> None:
        asked = [(a.prompt + a.tokens[:begin], end - begin) for a, begin, end in self._open]
        told = ask_all(self.cluster.url, asked)
        self._open = [part for part, tokens in zip(self._open, told, strict=True) if _tokens(part) != tokens]

    def _check_bill(self, what: str) -> None:
        """What was taken from the budget is what answers say, whichever version wrote it."""
        try:
            wait_until(lambda: self.cluster.spent() == pytest.approx(self._billed, rel=1e-6), BOOKED_S)
        except AssertionError:
            self._wrong.append(f"{what}: {self._billed} s are billed, and {self.cluster.spent()} s in the books")

    def _check_records(self, records: Records, name: str) -> None:
        """All that was left so far, by either version."""
        for kept in self._kept:
            try:
                records.check(kept, held=kept is not self._kept[0])  # the first met kills
            except AssertionError as error:
                self._wrong.append(f"what was left as {kept.name}: {error}")
        self._kept.append(records.leave(name))


def _tokens(part: Part) -> list[int]:
    answer, begin, end = part
    return answer.tokens[begin:end]
