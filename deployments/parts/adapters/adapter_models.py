"""Models with adapters, each under its adapter's name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from deployments.jobs.source import GenerationSource
from deployments.observability.telemetry import NoPeers
from deployments.openai.served.served_model import ModelInfo, ServedModel
from deployments.openai.served.served_models import FurtherModel, FurtherModels, ServedModels
from deployments.parts.adapters.files import is_unchanged
from deployments.parts.adapters.registry import AdapterRegistry
from deployments.parts.adapters.sources import sources_of
from deployments.parts.adapters.table import AdapterTable, MemoryTable

FOLDER = "adapters"  # by which ingresses tell each other of changes


class AdapterModels(FurtherModels):
    def __init__(self, models: ServedModels, scope: str | None, peers: NoPeers):
        """scope: as in EdgeSetup. peers: the other ingresses."""
        self._models, self._scope, self._peers = models, scope, peers
        self.tables: dict[str, AdapterTable] = {}
        self.registries: dict[str, AdapterRegistry] = {}
        for name, model in models.items():
            if (sources := sources_of(model.info)) is not None:
                table = self.tables[name] = self._table(model.info)
                names = name, *model.info.aliases
                self.registries[name] = AdapterRegistry(name, names, sources, table, model.pool, model.poison)

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
        if begun is not None and (source.started or await asyncio.to_thread(is_unchanged, begun)):
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

    def _table(self, info: ModelInfo) -> AdapterTable:
        """Return the table of a model's adapters, which ingresses share."""
        if self._scope is None:
            return MemoryTable()
        from deployments.parts.adapters.gcs_table import GcsTable  # needs Ray

        weights = info.identity.weights if info.identity else ""
        tell = partial(self._peers.tell, FOLDER)
        return GcsTable(f"{self._scope}/{info.name}/{weights}", tell)
