"""Routes that load and unload LoRA adapters while the server runs, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from fastapi import Request, Response
from pydantic import Field

from deployments.edge_part import EdgePart
from deployments.http.bodies import Bodies
from deployments.http.body import RequestBody
from deployments.http.route import ADMIN, Route
from deployments.openai.served.served_models import ServedModels
from deployments.parts.adapters.adapter_models import AdapterModels
from deployments.parts.adapters.errors import AdapterNotLoaded
from deployments.parts.adapters.registry import AdapterRegistry
from engine.errors import InvalidParameter, RequestError

MAX_NAME = 256
ADAPTERS = "adapters are there for all keys, or for none"


class LoadAdapterBody(RequestBody):
    lora_name: str = Field(default="", max_length=MAX_NAME)
    """Name that requests will send as `model`."""
    lora_path: str = Field(default="", max_length=4096)
    """Folder that all replicas have, or a Hub id."""
    load_inplace: bool = False
    """Whether it may replace an adapter of the same name, for all later requests."""
    base_model_name: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    """The model that it adapts; needed if several models have adapters."""
    is_3d_lora_weight: bool = False
    """Ignored, since this is read from the adapter's files."""


class UnloadAdapterBody(RequestBody):
    lora_name: str = Field(default="", max_length=MAX_NAME)
    lora_int_id: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """Ignored, since Manta identifies adapters by name."""


class AdapterRoutes(EdgePart):
    def __init__(self, models: ServedModels, adapters: AdapterModels, bodies: Bodies, *, may_change: bool):
        """may_change: whether requests may load and unload adapters."""
        self._models, self._adapters, self._bodies = models, adapters, bodies
        self._may_change = may_change

    def further_models(self) -> AdapterModels:
        return self._adapters

    def told(self) -> None:
        for table in self._adapters.tables.values():
            table.num_heard += 1

    def routes(self) -> list[Route]:
        if not self._may_change:
            return []
        load, unload = "Serve a LoRA adapter.", "Stop serving a LoRA adapter."
        text = "text/plain"
        return [
            Route(
                ADMIN,
                "POST",
                "/v1/load_lora_adapter",
                self.load,
                load,
                body=LoadAdapterBody,
                result=text,
                of_others=ADAPTERS,
            ),
            Route(
                ADMIN,
                "POST",
                "/v1/unload_lora_adapter",
                self.unload,
                unload,
                body=UnloadAdapterBody,
                result=text,
                of_others=ADAPTERS,
            ),
        ]

    async def load(self, request: Request) -> Response:
        body = await self._bodies.read(request, LoadAdapterBody)
        if not body.lora_name or not body.lora_path:
            raise RequestError("Both 'lora_name' and 'lora_path' must be provided.")
        registry = self._registry(body.base_model_name)
        if body.lora_name in self._models and body.lora_name not in self._adapters:
            raise InvalidParameter("lora_name", body.lora_name, "a name that no model has")
        await registry.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
        return _success(body.lora_name, "added")

    async def unload(self, request: Request) -> Response:
        body = await self._bodies.read(request, UnloadAdapterBody)
        if not body.lora_name:
            raise RequestError("either 'lora_name' and 'lora_int_id' needs to be provided.")
        for registry in self._adapters.registries.values():
            if await registry.unload(body.lora_name):
                return _success(body.lora_name, "removed")
        raise AdapterNotLoaded(body.lora_name)

    def _registry(self, base: str | None) -> AdapterRegistry:
        registries = self._adapters.registries
        if base is None and len(registries) == 1:
            return next(iter(registries.values()))
        if base not in registries:
            known = ", ".join(registries) or "none"
            raise InvalidParameter("base_model_name", base, f"a model with adapters (engine.enable_lora): {known}")
        return registries[base]


def _success(name: str, what: str) -> Response:
    return Response(f"Success: LoRA adapter '{name}' {what} successfully.", media_type="text/plain")
