"""Models that an ingress serves, by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

from fastapi import Request

from deployments.adapters.registry import AdapterRegistry
from deployments.adapters.table import AdapterTable, MemoryTable
from deployments.http.context import allowed_models, source_of
from deployments.jobs.source import GenerationSource
from deployments.openai.served.served_model import ModelInfo, ServedModel
from deployments.replicas.pools import EnginePool
from engine.errors import ModelNotFound, RequestError


class ServedModels(Mapping[str, ServedModel]):
    """Models by the name under which they are served. If there is only one model, it also answers requests that name
    none.

    A request may also name an adapter as its model. Adapters are not in this mapping, since their number is unlimited.
    """

    def __init__(
        self, models: Mapping[str, ServedModel], tables: Callable[[ModelInfo], AdapterTable] = lambda _: MemoryTable()
    ):
        """tables: function that returns the table of a model's adapters."""
        self._models = models
        self._aliases = {alias: model for model in models.values() for alias in model.info.aliases}
        self.registries = {
            name: AdapterRegistry(
                name, (name, *model.info.aliases), config, tables(model.info), model.pool, model.poison
            )
            for name, model in models.items()
            if (config := model.info.adapters) is not None
        }

    def __getitem__(self, name: str) -> ServedModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __contains__(self, name: object) -> bool:
        """Return whether this is the name or alias of a model, or of an adapter known since the last `read`. May look
        into a folder."""
        known = name in self._models or name in self._aliases
        return known or any(name in registry for registry in self.registries.values())

    async def read(self) -> None:
        """Update the known adapters, which `in` consults, to what other ingresses have loaded and unloaded."""
        for registry in self.registries.values():
            await registry.read()

    async def find(self, name: str | None, request: Request) -> ServedModel:
        """Return the model that a request names, or the model with the adapter that it names.

        Raises ModelNotFound if there is no such model or the request's API key may not use it, RequestError if the
        request has to name a model, and AdapterError for an adapter that cannot be used.
        """
        allowed = allowed_models(request)
        if not name:
            served = [model for model in self.values() if allowed is None or model.info.name in allowed]
            if len(served) != 1:
                raise RequestError(f"model is required; this server has: {', '.join(self._known(allowed))}", "model")
            return served[0]
        if allowed is None or name in allowed:
            if (model := self._models.get(name) or self._aliases.get(name)) is not None:
                return model
            if (model := await self._adapted(name, source_of(request))) is not None:
                return model
        raise ModelNotFound(name, self._known(allowed))

    async def _adapted(self, name: str, source: GenerationSource) -> ServedModel | None:
        """Return the model with the adapter of this name. An answer that has begun keeps its adapter, which may have
        been unloaded or replaced since. The rest of that answer can be computed only while the adapter's files are
        unchanged."""
        begun = source.adapter
        if begun is not None and (source.started or await asyncio.to_thread(begun.is_unchanged)):
            base = self._models.get(begun.parent)
            return None if base is None else base.adapted(begun)
        for parent, registry in self.registries.items():
            if (adapter := await registry.find(name)) is not None:
                return self[parent].adapted(adapter)
        return None

    async def listed(self, request: Request) -> AsyncIterator[tuple[str, ServedModel, str, str | None]]:
        """Yield the models and adapters that a request may use: name, model that computes it, path of its files, and
        for an adapter the name of its model."""
        allowed = allowed_models(request)
        for model in self.values():
            for name in (model.info.name, *model.info.aliases):
                if allowed is None or name in allowed:
                    yield name, model, model.info.root, None
        for base, registry in self.registries.items():
            for name, path in await registry.listed():
                if allowed is None or name in allowed:
                    yield name, self[base], path, base

    async def adapters_of(self, base: str) -> list[str]:
        return [name for name, _ in await self.registries[base].listed()] if base in self.registries else []

    def pools(self) -> dict[str, EnginePool]:
        return {name: model.pool for name, model in self.items()}

    def _known(self, allowed: frozenset[str] | None) -> list[str]:
        return [*self, *self._aliases] if allowed is None else sorted(allowed)
