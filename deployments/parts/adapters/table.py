"""The adapters loaded and unloaded at run time, shared by all ingresses of an application."""

from __future__ import annotations

from typing import Protocol

from deployments.served_adapter import ServedAdapter

Changes = dict[str, ServedAdapter | None]
"""Adapters by name; None for an adapter of the configuration that was unloaded."""


class AdapterTable(Protocol):
    """Table of adapters by name. Every method raises ServingError if the table cannot be reached."""

    num_heard: int
    """Number of changes that other ingresses have reported."""

    async def changes(self) -> Changes: ...

    async def add(self, adapter: ServedAdapter) -> bool:
        """Add an adapter, unless another ingress has just added one of the same name. Returns whether it was added."""

    async def replace(self, adapter: ServedAdapter) -> None:
        """Add an adapter, replacing any other of the same name."""

    async def delete(self, name: str, *, configured: bool) -> None:
        """Unload the adapter of this name. configured: whether the configuration lists it."""


class MemoryTable:
    """An AdapterTable for a single ingress."""

    def __init__(self) -> None:
        self.num_heard = 0
        self._changes: Changes = {}

    async def changes(self) -> Changes:
        return dict(self._changes)

    async def add(self, adapter: ServedAdapter) -> bool:
        if self._changes.get(adapter.name) is not None:
            return False
        self._changes[adapter.name] = adapter
        return True

    async def replace(self, adapter: ServedAdapter) -> None:
        self._changes[adapter.name] = adapter

    async def delete(self, name: str, *, configured: bool) -> None:
        self._changes.pop(name, None)
        if configured:
            self._changes[name] = None
