"""What one output is constrained by."""

from __future__ import annotations

from typing import Protocol

from engine.errors import ServingError


class Constraint(Protocol):
    """Says after each token of an output which ones may be next. It may compute that meanwhile."""

    @property
    def is_done(self) -> bool:
        """Whether the output is complete, so that only its end may follow."""

    @property
    def drafts(self) -> list[int]:
        """Guesses of the next tokens, for which there are masks."""

    @property
    def forced(self) -> bool:
        """Whether no tokens are allowed but the drafts."""

    @property
    def refusal(self) -> ServingError | None:
        """Why no token is allowed any more."""

    def waits(self, in_flight: int) -> bool:
        """Return whether no step can be planned yet, because the next mask depends on one of the `in_flight` tokens or
        is still being computed."""

    def masks(self, num_drafts: int = 0) -> bytes:
        """Return the mask of the next token: one bit per token of the vocabulary, lowest first, in 32-bit words. Then
        the masks after each of the first `num_drafts` drafts."""

    def accept(self, token: int) -> None:
        """Continue the output with this token. `start_masks` follows before the next token is sampled."""

    def start_masks(self, guess: list[int] | None = None) -> None:
        """Start to compute the next masks. guess: tokens that may come next, of which the longest allowed prefix
        becomes `drafts`. None drafts nothing."""
