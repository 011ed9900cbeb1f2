"""Models with adapters, each under its adapter's name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from deployments.adapters.table import AdapterTable
from deployments.jobs.source import GenerationSource
from deployments.openai.served.served_model import ModelInfo, ServedModel
from deployments.openai.served.served_models import FurtherModel, FurtherModels, ServedModels
from deployments.parts.adapters.registry import AdapterRegistry


class AdapterModels(FurtherModels):
    def __init__(self, models: ServedModels, tables: Callable[[ModelInfo], AdapterTable]):
        """tables: function that returns the table of a model's adapters."""
        self._models = models
        self.registries = {
            name: AdapterRegistry(
                name, (name, *model.info.aliases), config, tables(model.info), model.pool, model.poison
            )
            for name, model in models.items()
            if (config := model.info.adapters) is not None
        }

    def __contains__(self, name: object) -> bool:
        """May look into a folder."""
        return any(name in registry for registry in self.registries.values())

    async def read(self) -> None:
        for registry in self.registries.values():
            await registry.read()

    async def find(self, name: str, source: GenerationSource) -> ServedModel | None:
        """An answer that has begun keeps its adapter, which may have been unloaded or replaced since. The rest of that
        answer can be computed only while the adapter's files are unchanged. Raises AdapterError for an adapter that
        cannot be used."""
        begun = source.adapter
        if begun is not None and (source.started or await asyncio.to_thread(begun.is_unchanged)):
            base = self._models.get(begun.parent)
            return None if base is None else base.adapted(begun)
        for parent, registry in self.registries.items():
            if (adapter := await registry.find(name)) is not None:
                return self._models[parent].adapted(adapter)
        return None

    async def listed(self) -> AsyncIterator[FurtherModel]:
        for base, registry in self.registries.items():
            for name, path in await registry.listed():
                yield FurtherModel(name, base, path)
