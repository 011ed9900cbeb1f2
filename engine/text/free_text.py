"""Grammar of an output that is not constrained."""

from __future__ import annotations


class FreeText:
    """Allows any text. Has the methods of Grammar."""

    constrains = False
    is_done = False
    error: str | None = None

    drafts: list[int] = []  # noqa: RUF012 - it is never changed
    forced = False

    def waits(self, in_flight: int) -> bool:
        return False

    def accept(self, token: int) -> None:
        pass

    def start_masks(self, guess: list[int] | None = None) -> None:
        pass

    def masks(self, num_drafts: int = 0) -> bytes:
        return b""


FREE_TEXT = FreeText()
