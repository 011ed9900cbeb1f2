"""What a scheduler asks of parts that know the text or secrets: drafters, grammars, names.

A tape has only the sizes of their answers, in the order in which they were asked for, and the names of blocks. In a
replay, stand-ins give the same answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol
from zlib import crc32

from engine.parts.snapshot_kinds import NO_TOKEN, ORDINARY
from engine.wire.block_hash import BLOCK_HASH_BYTES

if TYPE_CHECKING:
    from engine.core.constraint import Constraint
    from engine.errors import ServingError
    from engine.spec_decode.drafter import SequenceDrafter

MOST = 255  # of what fits a byte
NAMES = -(1 << 60)
"""Numbers of arrival from here on downwards stand for a block's hash and name."""


class EndOfAnswers(Exception):
    """The scheduler asks for more than it did when the tape was made."""


class AnswerLog(Protocol):
    """Where answers are recorded."""

    pending_answers: list[bytes | Sequence[int]]
    """The newest: in bytes, or the tokens that a drafter has proposed."""

    def hashes(self, order: int, hashes: list[bytes]) -> None: ...


class Answers:
    """The recorded answers of a tape's segment."""

    def __init__(
        self,
        data: bytes = b"",
        position: int = 0,
        hashes: Mapping[int, list[bytes]] | None = None,
        names: Mapping[tuple[int, bytes], bytes] | None = None,
    ):
        """hashes: those on the tape, by number of arrival. names: of blocks in tiers, by name_order and hash."""
        self._data, self.position, self.hashes, self.names = data, position, hashes or {}, names or {}

    def go_on(self, data: bytes) -> None:
        """Begin with the answers of the next segment."""
        self._data, self.position = data, 0

    def take(self) -> int:
        if self.position >= len(self._data):
            raise EndOfAnswers("the scheduler asks a drafter or a grammar for more than it did then")
        self.position += 1
        return self._data[self.position - 1]


class StandIn:
    """Gives recorded answers in a replay."""

    def __init__(self, answers: Answers):
        self._answers = answers


# -- drafters ----------------------------------------------------------------------------------------------


class TapedDrafter:
    """Records what a drafter proposes."""

    def __init__(self, drafter: SequenceDrafter, log: AnswerLog):
        proposed, record = drafter.propose, log.pending_answers.append

        def propose(limit: int) -> Sequence[int]:
            record(found := proposed(limit))
            return found

        self.propose = propose  # a closure, since each step calls it for each sequence

    def replayed(self) -> ReplayedDrafter:
        return ReplayedDrafter(Answers())


def proposal(tokens: Sequence[int], vocab_size: int) -> bytes:
    """Return how many tokens a drafter has proposed, and how many of them the vocabulary has."""
    found = tokens[:MOST]
    valid = len(found)
    if found and not 0 <= min(found) <= max(found) < vocab_size:
        valid = sum(1 for _ in takewhile(lambda token: 0 <= token < vocab_size, found))
    return bytes((len(found), valid))


class ReplayedDrafter(StandIn):
    def propose(self, limit: int) -> Sequence[int]:
        count, valid = self._answers.take(), self._answers.take()
        return [ORDINARY] * valid + [NO_TOKEN] * (count - valid)


class DrafterWatch:
    """Makes a Speculator's new drafters TapedDrafters."""

    def __init__(self, log: AnswerLog):
        self._log = log

    def __call__(self, drafter: SequenceDrafter) -> TapedDrafter:
        return TapedDrafter(drafter, self._log)

    def replayed(self) -> ReplayedWatch:
        return ReplayedWatch(Answers())


class ReplayedWatch(StandIn):
    def __call__(self, drafter: SequenceDrafter) -> ReplayedDrafter:
        return ReplayedDrafter(self._answers)


# -- grammars ----------------------------------------------------------------------------------------------


class TapedGrammar:
    """Records when a grammar was ready, and how many tokens it had drafted by then."""

    def __init__(self, grammar: Constraint, log: AnswerLog):
        self._grammar, self._log = grammar, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)

    def waits(self, in_flight: int) -> bool:
        waits = self._grammar.waits(in_flight)
        if not in_flight:
            told = b"\0" if waits else bytes((1, self._grammar.forced, len(self._grammar.drafts)))
            self._log.pending_answers.append(told)
        return waits

    def replayed(self) -> ReplayedGrammar:
        return ReplayedGrammar(Answers(), self.forced, len(self.drafts))


class ReplayedGrammar:
    """Accepts and masks nothing, but waits and drafts as a grammar did."""

    is_done = False
    refusal: ServingError | None = None

    def __init__(self, answers: Answers, forced: bool = False, drafts: int = 0):
        self._answers, self.forced, self.drafts = answers, forced, [ORDINARY] * drafts

    def waits(self, in_flight: int) -> bool:
        if in_flight or not self._answers.take():
            return True
        self.forced, self.drafts = bool(self._answers.take()), [ORDINARY] * self._answers.take()
        return False

    def masks(self, num_drafts: int = 0) -> bytes:
        return b""

    def accept(self, token: int) -> None:
        pass

    def start_masks(self, guess: list[int] | None = None) -> None:
        pass


# -- names in the tiers ------------------------------------------------------------------------------------


def name_order(group: int, block_hash: bytes) -> int:
    """Return the number of arrival under which a name is on the tape. Names of holds are made from a client's name and
    a hash, names of blocks from the hash alone."""
    return NAMES - (group << 32 | crc32(block_hash[:-BLOCK_HASH_BYTES]))


class TapedNames:
    """Records which names blocks have in the tiers, each when it is first asked for in a segment. Names depend on a
    secret, so a replay cannot make them."""

    def __init__(self, name_of: Callable[[int, bytes], bytes], log: AnswerLog):
        self.name_of, self._log = name_of, log
        self.told: set[bytes] = set()  # the owner empties it when a segment begins

    def __call__(self, group: int, block_hash: bytes) -> bytes:
        name = self.name_of(group, block_hash)
        if name not in self.told:
            self.told.add(name)
            self._log.hashes(name_order(group, block_hash), [block_hash[-BLOCK_HASH_BYTES:], name])
        return name

    def replayed(self) -> ReplayedNames:
        return ReplayedNames(Answers())


class ReplayedNames(StandIn):
    def __call__(self, group: int, block_hash: bytes) -> bytes:
        found = self._answers.names.get((name_order(group, block_hash), block_hash[-BLOCK_HASH_BYTES:]))
        if found is None:
            raise EndOfAnswers("the scheduler asks for the name of a block for which it did not ask then")
        return found


STAND_INS = (ReplayedDrafter, ReplayedWatch, ReplayedGrammar, ReplayedNames)
"""Classes with the Answers of a replay as `_answers`."""
