"""What an engine says of the parts of a prompt that a request asks to keep cached; clients see it in `usage`."""

from __future__ import annotations

from typing import ClassVar, Literal

from engine.wire.part_record import PartRecord

HoldRefusal = Literal["off", "ttl", "short", "not_cached", "client_full", "full"]
# off: the engine keeps no holds. ttl: longer than max_hold_s. short: no full block before the mark. not_cached: the
# engine does not keep the blocks. client_full, full: the share of the client, or of all clients, is taken.


class HoldOutcome(PartRecord, frozen=True, kw_only=True, omit_defaults=True):
    """The engine's answer to a HoldMark, told with the request's first token."""

    part: ClassVar[str] = "holds"

    tokens: int
    """Tokens that are kept; those that the mark asked for if the hold is refused."""
    ttl_s: float
    refusal: HoldRefusal | None = None
    """None if the hold is granted."""
    reason: str = ""
    """A sentence about the refusal."""
