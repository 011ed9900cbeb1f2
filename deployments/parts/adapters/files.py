"""Reads adapters from their files."""

from __future__ import annotations

import time

from deployments.served_adapter import ServedAdapter
from engine.lora.adapter_files import open_adapter
from engine.lora.errors import AdapterError


def open_served(name: str, path: str, parent: str, max_rank: int) -> ServedAdapter:
    """Read an adapter's files, which takes about a second for each GB. Raises AdapterError and AdapterNotFound."""
    files = open_adapter(path, name)
    if files.rank > max_rank:
        raise AdapterError(name, "rank", files.rank, f"at most max_lora_rank ({max_rank})")
    return ServedAdapter(name, path, files.digest, parent, int(time.time()))


def is_unchanged(adapter: ServedAdapter) -> bool:
    """Read an adapter's files again, and return whether they still exist and have the same digest."""
    try:
        return open_adapter(adapter.path, adapter.name).digest == adapter.digest
    except AdapterError:
        return False
