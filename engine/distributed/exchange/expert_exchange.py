"""Carries rows of mixture layers between engines that share experts, in steps that all engines take together.

Each engine has rows of its own requests, and each of its ranks has some of the experts. In each mixture layer the rows
of an engine travel to ranks that have their experts, and the results travel back. The ranks of an engine all have its
rows, so each sends a share of them. The sizes of the engines' steps are told once for each step, in `begin`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from engine.distributed.exchange.all_gather import AllGather
from engine.distributed.exchange.members import AllRanks, Counts, Dispatched, Exchange, Members

NO_STEP = -1


class StepSize(NamedTuple):
    """The size of an engine's step."""

    tokens: int
    seqs: int = 0
    longest: int = 0  #: tokens of its longest sequence; 0 if no graph can compute this step


class ExpertExchange:
    """One rank's end. Used by one thread."""

    def __init__(
        self,
        ranks: AllRanks,
        hosts: AllRanks | None = None,
        ranks_per_engine: int = 1,
        open_exchange: Callable[[Members], Exchange] = AllGather,
    ):
        """hosts: the same ranks, which tell each other sizes in host memory, so that no step waits for the device to
        end the one before; None if `ranks` can."""
        self._ranks, self._width, self._hosts = ranks, ranks_per_engine, hosts or ranks
        self._counts: list[int] | None = None
        self.choose(open_exchange)
        self.sizes: list[StepSize | None] = []  #: of each engine's step, as told in the last call of `begin`
        self.states: list[int] = []  #: what each rank has told in the last call of `begin`

    def choose(self, open_exchange: Callable[[Members], Exchange]) -> None:
        """Exchange in this way from now on."""
        self.members = Members(self._ranks, self._width, measured=self._counts is None)
        self._exchange = open_exchange(self.members)

    @property
    def has_step(self) -> bool:
        """Whether this engine has a step, since the last call of `begin`."""
        return bool(self.sizes) and self.sizes[self.members.engine] is not None

    @property
    def can_be_captured(self) -> bool:
        return self._exchange.can_be_captured

    def begin(self, size: StepSize | None, state: int = 0) -> bool:
        """Begin a step of all engines, and return whether any has one. size: of this engine's; None if it has no step.
        Only the first rank of an engine needs to know. state: a number that all ranks get to know. This waits for the
        other ranks, but not for a device."""
        told, members = torch.tensor([*(size or StepSize(NO_STEP)), state]), self.members
        answers = self._hosts.all_gather(told).view(members.ranks.size, len(told)).tolist()
        self.states = [answer[-1] for answer in answers]
        sizes = [StepSize(*answer[:-1]) for answer in answers[:: self._width]]
        self.sizes = [None if size.tokens == NO_STEP else size for size in sizes]
        self._counts, members.measured = [0 if size is None else size.tokens for size in self.sizes], False
        return any(size is not None for size in self.sizes)

    def chunks(self, rows: int, at_once: int) -> Iterator[tuple[int, list[int]]]:
        """Yield a start, and the number of rows of each engine from there on: at most `at_once`. rows: of this engine.
        Before the first step, all engines have as many, since they take the same dummy steps while they load."""
        counts = self._counts or [rows] * self.members.engines
        for start in range(0, max(counts), at_once):
            yield start, [min(at_once, max(0, count - start)) for count in counts]

    def dispatch(self, x: Tensor, places: Tensor, weights: Tensor, counts: Counts) -> Dispatched:
        return self._exchange.dispatch(x, places, weights, counts)
