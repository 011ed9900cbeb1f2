"""The adapter with which a request is computed, of whatever kind."""

from __future__ import annotations

from typing import ClassVar, Self

import msgspec

from engine.wire.part_record import PartRecord


class ModelAdapter(PartRecord, frozen=True, omit_defaults=True):
    """What changes a model's weights for some of its requests. Two adapters are the same if their digests are equal."""

    part: ClassVar[str] = "adapter"

    name: str
    """The adapter's name for clients; it does not affect the result."""
    path: str = ""
    """Folder or Hub id."""
    digest: str = ""
    """Hash of everything that affects the adapter's results."""

    def without_text(self) -> Self:
        return msgspec.structs.replace(self, path="")


def digest_of(adapter: ModelAdapter | None) -> str:
    """Return the digest of an adapter, empty for none."""
    return "" if adapter is None else adapter.digest


def extra_keys(digest: str) -> tuple[str, ...]:
    """Return what the hashes of a sequence's KV blocks depend on besides its tokens and its salt, as `root_hash` takes
    it. digest: of its adapter, empty for none. A name would not suffice, since new weights under an old name give
    another KV."""
    return (digest,) if digest else ()
