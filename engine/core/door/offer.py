"""KV of a prompt that can come from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offer:
    """KV of a prompt's tokens that can come from elsewhere instead of being computed here."""

    tokens: int
    """Number of tokens, besides those that are cached."""
    seconds: float | None
    """Time that it is expected to take; None if nobody can tell, or if it was asked for or promised."""
    start: Callable[[float], bool]
    """Begins, at the given time. Returns False, and does nothing, if there are too few blocks."""
    keeps_blocks: bool = False
    """Whether the request itself holds the blocks that are filled. It must have them before `start`. Otherwise the KV
    comes into the prefix cache, and the request holds no blocks meanwhile."""
    source: str = ""
    """What becomes of the prompt, as a phrase, if the request itself holds the blocks."""
