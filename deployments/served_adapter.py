"""One adapter as clients see it."""

from __future__ import annotations

import time

import msgspec

from engine.wire.parts.adapter import ModelAdapter


class ServedAdapter(msgspec.Struct, frozen=True):
    """An adapter that is served under its own name."""

    name: str
    path: str
    """Folder or Hub id."""
    digest: str
    """Digest that identifies its weights. Name and path do not, since they may get other weights later."""
    parent: str
    """The model that it adapts, as /v1/models names it."""
    created: int
    """When it was opened, in seconds since 1970."""

    @classmethod
    def of(cls, adapter: ModelAdapter, parent: str) -> ServedAdapter:
        """Return the adapter that a request names. parent: name of the model."""
        return cls(adapter.name, adapter.path, adapter.digest, parent, int(time.time()))

    @property
    def record(self) -> ModelAdapter:
        """The record by which requests name this adapter to engines."""
        return ModelAdapter(self.name, self.path, self.digest)
