"""What the files of an adapter tell before a request names it."""

from __future__ import annotations

from engine.lora.adapter_files import open_adapter
from engine.wire.parts.adapter import ModelAdapter


def digest_of_files(adapter: ModelAdapter) -> str:
    """Return the digest of an adapter's files. Raises AdapterError."""
    return open_adapter(adapter.path, adapter.name).digest
