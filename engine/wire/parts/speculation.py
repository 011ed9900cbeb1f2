"""Speculative decoding: what a client predicts, and what became of drafts."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Self

import msgspec

from engine.wire.part_record import PartRecord


class Prediction(PartRecord, frozen=True):
    """Tokens that the client predicts as the output; engines with speculative decoding use them as drafts."""

    part: ClassVar[str] = "speculation"
    is_hint: ClassVar[bool] = True

    tokens: list[int]

    def without_text(self) -> Self:
        return msgspec.structs.replace(self, tokens=[0] * len(self.tokens))


class Verified(PartRecord, frozen=True):
    """Numbers of predicted tokens that a step accepted and rejected, of a request with a Prediction."""

    part: ClassVar[str] = "speculation"

    accepted: int
    rejected: int

    @classmethod
    def total(cls, verified: Collection[Verified]) -> Verified:
        """Return what several steps have verified together."""
        return cls(sum(each.accepted for each in verified), sum(each.rejected for each in verified))

    def at(self, i: int) -> Verified:
        """Return what of this belongs to token `i` of its delta."""
        return Verified(int(i < self.accepted), 0 if i else self.rejected)


class SpecDecodeStats(PartRecord, frozen=True, kw_only=True):
    """Totals of speculative decoding, named like vLLM's metrics."""

    part: ClassVar[str] = "speculation"

    num_drafts: int = 0
    """Verified drafts: one per sequence and step that verified draft tokens."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = msgspec.field(default_factory=list)
    """Accepted tokens by their position in the draft, from the first position on."""
