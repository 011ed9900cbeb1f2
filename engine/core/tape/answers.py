"""What a scheduler asks of parts that know the text or the network: drafters, grammars, links.

A tape has only the sizes of their answers, in the order in which they were asked for. In a replay, stand-ins give the
same answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

from engine.kv_transfer.no_channel import NoChannel
from engine.text.free_text import FreeText
from engine.wire.handoff import HandoffEvent
from engine.wire.remote_request import Peer

if TYPE_CHECKING:
    from engine.spec_decode.drafter import SequenceDrafter
    from engine.text.grammar import Grammar

ORDINARY = 0
"""Stands for any token that does not end a request."""
NO_TOKEN = -4
"""Stands for a drafted token that no vocabulary has."""
MOST = 255  # of what fits a byte


class EndOfAnswers(Exception):
    """The scheduler asks for more than it did when the tape was made."""


class AnswerLog(Protocol):
    """Where answers are recorded."""

    answers: bytearray


class Answers:
    """The recorded answers of a tape's segment."""

    def __init__(self, data: bytes = b"", position: int = 0, hashes: Mapping[int, list[bytes]] | None = None):
        """hashes: those on the tape, by number of arrival."""
        self._data, self.position, self.hashes = data, position, hashes or {}

    def go_on(self, data: bytes) -> None:
        """Begin with the answers of the next segment."""
        self._data, self.position = data, 0

    def take(self) -> int:
        if self.position >= len(self._data):
            raise EndOfAnswers("the scheduler asks a drafter, a grammar or a link for more than it did then")
        self.position += 1
        return self._data[self.position - 1]

    def take_text(self) -> str:
        return bytes(self.take() for _ in range(self.take() * 256 + self.take())).decode()


# -- drafters ----------------------------------------------------------------------------------------------


class TapedDrafter:
    """Records how many tokens a drafter proposes, and how many of them the vocabulary has."""

    def __init__(self, drafter: SequenceDrafter, log: AnswerLog, vocab_size: int):
        self._drafter, self._log, self._vocab_size = drafter, log, vocab_size

    def propose(self, limit: int) -> Sequence[int]:
        found = self._drafter.propose(limit)[:MOST]
        valid = len(found)
        if found and not 0 <= min(found) <= max(found) < self._vocab_size:
            valid = sum(1 for _ in takewhile(lambda token: 0 <= token < self._vocab_size, found))
        self._log.answers += bytes((len(found), valid))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayedDrafter, ()


class ReplayedDrafter:
    def __init__(self, answers: Answers):
        self._answers = answers

    def propose(self, limit: int) -> Sequence[int]:
        count, valid = self._answers.take(), self._answers.take()
        return [ORDINARY] * valid + [NO_TOKEN] * (count - valid)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayedDrafter, ()


class DrafterWatch:
    """Makes a Speculator's new drafters TapedDrafters."""

    def __init__(self, log: AnswerLog, vocab_size: int):
        self._log, self._vocab_size = log, vocab_size

    def __call__(self, drafter: SequenceDrafter) -> TapedDrafter:
        return TapedDrafter(drafter, self._log, self._vocab_size)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayedWatch, ()


class ReplayedWatch:
    def __init__(self, answers: Answers):
        self._answers = answers

    def __call__(self, drafter: SequenceDrafter) -> ReplayedDrafter:
        return ReplayedDrafter(self._answers)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayedWatch, ()


class NoDrafter:
    """Stands for a HostDrafter, and for the drafters that it makes."""

    def follow(self, tokens: list[int], cache_salt: str) -> NoDrafter:
        return self

    def propose(self, limit: int) -> Sequence[int]:
        raise AssertionError("a ReplayedDrafter is asked instead")

    def finish(self, tokens: list[int], num_prompt: int, cache_salt: str) -> None:
        pass


# -- grammars ----------------------------------------------------------------------------------------------


class TapedGrammar:
    """Records when a grammar was ready, and how many tokens it had drafted by then."""

    constrains = True

    def __init__(self, grammar: Grammar | FreeText, log: AnswerLog):
        self._grammar, self._log = grammar, log

    @property
    def is_done(self) -> bool:
        return self._grammar.is_done

    @property
    def error(self) -> str | None:
        return self._grammar.error

    @property
    def drafts(self) -> list[int]:
        return self._grammar.drafts

    @property
    def forced(self) -> bool:
        return self._grammar.forced

    def waits(self, in_flight: int) -> bool:
        waits = self._grammar.waits(in_flight)
        if not in_flight:
            self._log.answers.append(0 if waits else 1)
            if not waits:
                self._log.answers += bytes((self._grammar.forced, len(self._grammar.drafts)))
        return waits

    def accept(self, token: int) -> None:
        self._grammar.accept(token)

    def start_masks(self, guess: list[int] | None = None) -> None:
        self._grammar.start_masks(guess)

    def masks(self, num_drafts: int = 0) -> bytes:
        return self._grammar.masks(num_drafts)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayedGrammar, (self.forced, len(self.drafts))


class ReplayedGrammar(FreeText):
    """Accepts and masks nothing, as FreeText does, but waits and drafts as a grammar did."""

    constrains = True

    def __init__(self, answers: Answers, forced: bool = False, drafts: int = 0):
        self._answers, self.forced, self.drafts = answers, forced, [ORDINARY] * drafts

    def waits(self, in_flight: int) -> bool:
        if in_flight or not self._answers.take():
            return True
        self.forced, self.drafts = bool(self._answers.take()), [ORDINARY] * self._answers.take()
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayedGrammar, (self.forced, len(self.drafts))


# -- links -------------------------------------------------------------------------------------------------


class TapedLinks:
    """Records the names of the engines that get no prefill requests for now."""

    def __init__(self, quarantined: Callable[[], Collection[str]], log: AnswerLog):
        self._quarantined, self._log = quarantined, log

    def __call__(self) -> Collection[str]:
        found = self._quarantined()
        text = "\n".join(found).encode()[: 256 * 256 - 1]
        self._log.answers += len(text).to_bytes(2, "big") + text
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayedLinks, ()


class ReplayedLinks:
    def __init__(self, answers: Answers):
        self._answers = answers

    def __call__(self) -> Collection[str]:
        return self._answers.take_text().splitlines()

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayedLinks, ()


class ReplayedChannel(NoChannel):
    """Stands for the channel of images."""

    def __init__(self, answers: Answers, peer: Peer | None):
        super().__init__()
        self.peer = peer
        self.waiting: list[HandoffEvent] = []

    def events(self) -> list[HandoffEvent]:
        found, self.waiting = self.waiting, []
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayedChannel, (self.peer,)


STAND_INS = (ReplayedDrafter, ReplayedWatch, ReplayedGrammar, ReplayedLinks, ReplayedChannel)
"""Classes whose first argument is the Answers of a replay."""
