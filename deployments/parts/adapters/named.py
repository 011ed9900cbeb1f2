"""The names that a model's adapters add to its own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from deployments.openai.served.served_model import ModelInfo
from deployments.parts.adapters.registry import AdapterRegistry
from deployments.parts.adapters.sources import sources_of
from deployments.parts.adapters.table import MemoryTable
from deployments.poison.poison import Poison


def named(info: ModelInfo, name: str) -> ModelInfo | None:
    """Return the facts of the model with its adapter of this name, if it has one. Raises AdapterError."""
    no_engine: Any = SimpleNamespace()
    names, sources = (info.name, *info.aliases), sources_of(info)
    if sources is None or name in names:
        return None
    registry = AdapterRegistry(info.name, names, sources, MemoryTable(), no_engine, Poison())
    adapter = asyncio.run(registry.find(name))
    return None if adapter is None else info.adapted(adapter)
