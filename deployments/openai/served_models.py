"""Models that an ingress serves, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deployments.openai.served_model import ServedModel
from deployments.replicas.pools import EnginePool
from engine.errors import ModelNotFound, RequestError


class ServedModels(Mapping[str, ServedModel]):
    """Models by the name under which they are served. A single model also answers requests that name none."""

    def __init__(self, models: Mapping[str, ServedModel]):
        self._models = models
        self._aliases = {alias: model for model in models.values() for alias in model.info.aliases}

    def __getitem__(self, name: str) -> ServedModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def find(self, name: str | None) -> ServedModel:
        """Return the model that a request names. Raises ModelNotFound, or RequestError if the request must name one."""
        if not name:
            if len(self) > 1:
                raise RequestError(f"model is required; served here: {', '.join(self)}", "model")
            return next(iter(self.values()))
        model = self._models.get(name) or self._aliases.get(name)
        if model is None:
            raise ModelNotFound(name, [*self, *self._aliases])
        return model

    def pools(self) -> dict[str, EnginePool]:
        return {name: model.pool for name, model in self.items()}
