"""What the parts of an application and of its models are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.edge_part import EdgePart
from deployments.frontend.api_keys import ApiKeys
from deployments.http.bodies import Bodies, PartFields
from deployments.http.middleware import AuthConfig
from deployments.observability.engine_metrics import PartMetrics
from deployments.observability.telemetry import Telemetry
from deployments.openai.served.model_part import ModelPart
from deployments.openai.served.served_model import ServedModel
from deployments.openai.served.served_models import ServedModels
from deployments.options.console import ConsoleConfig
from deployments.quotas.quotas import Quotas
from deployments.storage.key_value import KeyValueStore


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSetup:
    """What an application's parts are made of."""

    models: ServedModels
    telemetry: Telemetry
    auth: AuthConfig
    bodies: Bodies
    api_keys: ApiKeys | None
    """None for a server without keys."""
    quotas: Quotas
    store: KeyValueStore
    console: ConsoleConfig
    scope: str | None
    """Name of the application on Serve, whose ingresses share values by it; None for a single ingress."""
    metrics: Sequence[PartMetrics]
    """Of all parts."""


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """What a model's parts are made of."""

    model: ServedModel
    images: Any
    """Its ImageLoader; None if it reads text only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """One part. Each end is a function that returns None where the configuration leaves the part out."""

    needs: tuple[str, ...] = ()
    """Folders of the parts that it imports."""
    edge: Callable[[EdgeSetup], EdgePart | None] = lambda setup: None
    model: Callable[[ModelSetup], ModelPart | None] = lambda setup: None
    fields: tuple[type[PartFields], ...] = ()
    """What it adds to bodies of requests."""
    metrics: tuple[PartMetrics, ...] = ()
    """Of what its end in engines reports."""
