"""What routers learn of the prefixes that a part keeps cached."""

from __future__ import annotations

from collections.abc import Collection

from engine.core.door.part import Part


class KeepsPrefixes(Part):
    @property
    def ends(self) -> Collection[bytes]:
        """Hashes of the last blocks of the prefixes."""
        return ()
