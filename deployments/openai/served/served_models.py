"""Models that an ingress serves, by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import NamedTuple, Protocol

from fastapi import Request

from deployments.errors import ModelNotFound
from deployments.http.context import allowed_models, source_of
from deployments.jobs.source import GenerationSource
from deployments.openai.served.served_model import ServedModel
from deployments.replicas.pools import EnginePool
from engine.errors import RequestError


class FurtherModel(NamedTuple):
    name: str
    base: str
    """Name of the model that computes it."""
    path: str
    """Of its files."""


class FurtherModels(Protocol):
    """Models that requests may name besides those of the configuration, such as models with adapters."""

    def __contains__(self, name: object) -> bool:
        """Return whether this is the name of one that is known since the last `read`."""

    async def read(self) -> None:
        """Update the known ones to what other ingresses have done."""

    async def find(self, name: str, source: GenerationSource) -> ServedModel | None:
        """Return the model of a name; None if there is none. source: of the request that names it."""

    def listed(self) -> AsyncIterator[FurtherModel]: ...


class ServedModels(Mapping[str, ServedModel]):
    """Models by the name under which they are served. If there is only one model, it also answers requests that name
    none.

    A request may also name one of the further models. They are not in this mapping, since their number is unlimited.
    """

    def __init__(self, models: Mapping[str, ServedModel]):
        self._models = models
        self._aliases = {alias: model for model in models.values() for alias in model.info.aliases}
        self.further: list[FurtherModels] = []
        """In the order in which they are asked."""

    def __getitem__(self, name: str) -> ServedModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __contains__(self, name: object) -> bool:
        """Return whether this is the name or alias of a model, or of a further model known since the last `read`."""
        known = name in self._models or name in self._aliases
        return known or any(name in models for models in self.further)

    async def read(self) -> None:
        """Update the further models, which `in` consults, to what other ingresses have done."""
        for models in self.further:
            await models.read()

    async def find(self, name: str | None, request: Request) -> ServedModel:
        """Return the model that a request names.

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
            for models in self.further:
                if (model := await models.find(name, source_of(request))) is not None:
                    return model
        raise ModelNotFound(name, self._known(allowed))

    async def listed(self, request: Request) -> AsyncIterator[tuple[str, ServedModel, str, str | None]]:
        """Yield the models that a request may use: name, model that computes it, path of its files, and for a further
        model the name of its base."""
        allowed = allowed_models(request)
        for model in self.values():
            for name in (model.info.name, *model.info.aliases):
                if allowed is None or name in allowed:
                    yield name, model, model.info.root, None
        for models in self.further:
            async for name, base, path in models.listed():
                if allowed is None or name in allowed:
                    yield name, self[base], path, base

    async def further_of(self, base: str) -> list[str]:
        """Return the names of the further models that this one computes."""
        return [each.name for models in self.further async for each in models.listed() if each.base == base]

    def pools(self) -> dict[str, EnginePool]:
        return {name: model.pool for name, model in self.items()}

    def _known(self, allowed: frozenset[str] | None) -> list[str]:
        return [*self, *self._aliases] if allowed is None else sorted(allowed)
