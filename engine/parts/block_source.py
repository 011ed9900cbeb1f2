"""Where cached KV blocks come from that this engine has not computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.core.door.part import Part
from engine.core.request import Request


class Arrivals(Protocol):
    """Hears of blocks that have come."""

    def came(self, part: BlockSource, kind: str, name: str, request: Request, hashes: Sequence[bytes]) -> None:
        """Blocks of a request are in the prefix cache now, which another has computed.

        kind: `host`, `disk`, `store`, `handoff` or `fetch`. name: of the tier or engine. hashes: of the blocks; the
        request knows them.
        """


class BlockSource(Part):
    """A part by which blocks come into the prefix cache."""

    arrivals: Arrivals | None = None
    """Hears of them, if anybody does."""

    def quarantine(self, name: str) -> None:
        """Read nothing any more from a tier or an engine, until this engine ends."""
        raise NotImplementedError
