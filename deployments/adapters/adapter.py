"""One adapter as clients see it."""

from __future__ import annotations

import time

import msgspec

from engine.lora.adapter_files import open_adapter
from engine.lora.errors import AdapterError
from engine.wire.parts.adapter import ModelAdapter


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that is served under its own name."""

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
    def open(cls, name: str, path: str, parent: str, max_rank: int) -> Adapter:
        """Read an adapter's files, which takes about a second for each GB. Raises AdapterError and AdapterNotFound."""
        files = open_adapter(path, name)
        if files.rank > max_rank:
            raise AdapterError(name, "rank", files.rank, f"at most max_lora_rank ({max_rank})")
        return cls(name, path, files.digest, parent, int(time.time()))

    @classmethod
    def of(cls, lora: ModelAdapter, parent: str) -> Adapter:
        """Return the adapter that a request names. parent: name of the model."""
        return cls(lora.name, lora.path, lora.digest, parent, int(time.time()))

    def is_unchanged(self) -> bool:
        """Read the adapter's files again, and return whether they still exist and have the same digest."""
        try:
            return open_adapter(self.path, self.name).digest == self.digest
        except AdapterError:
            return False

    @property
    def lora(self) -> ModelAdapter:
        """The record by which requests name this adapter to engines."""
        return ModelAdapter(self.name, self.path, self.digest)
