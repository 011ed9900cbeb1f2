"""The table of all parts, in the order in which they are asked. Only what starts an application imports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from deployments.edge_part import EdgePart
from deployments.frontend.api_keys import ApiKeys
from deployments.http.bodies import Bodies, PartFields
from deployments.http.middleware import AuthConfig
from deployments.observability.engine_metrics import PartMetrics
from deployments.observability.telemetry import Telemetry
from deployments.openai.served.model_part import ModelPart
from deployments.openai.served.model_source import ModelSource
from deployments.openai.served.served_model import ModelInfo, ServedModel
from deployments.openai.served.served_models import ServedModels
from deployments.options.console import ConsoleConfig
from deployments.options.images import ImageConfig
from deployments.parts.adapters.adapter_models import AdapterModels
from deployments.parts.adapters.metrics import METRICS as adapters
from deployments.parts.adapters.routes import AdapterRoutes
from deployments.parts.console.routes import ConsoleRoutes
from deployments.parts.costs.metrics import METRICS as costs
from deployments.parts.experts.metrics import METRICS as experts
from deployments.parts.handoffs.metrics import METRICS as handoffs
from deployments.parts.holds.fields import ChatHoldFields, HoldFields
from deployments.parts.holds.hold_requests import HoldRequests
from deployments.parts.holds.metrics import METRICS as holds
from deployments.parts.holds.routes import HoldRoutes
from deployments.parts.images.image_inputs import ImageInputs
from deployments.parts.images.metrics import METRICS as images
from deployments.parts.keys.routes import KeyRoutes
from deployments.parts.kv_fetching.metrics import METRICS as fetching
from deployments.parts.kv_tiers.metrics import METRICS as tiers
from deployments.parts.operators.routes import OperatorRoutes
from deployments.parts.prediction.fields import PredictionFields
from deployments.parts.prediction.metrics import METRICS as speculation
from deployments.parts.prediction.prediction import Predictions
from deployments.parts.quotas.quota_part import QuotaChecks, QuotaEdge
from deployments.parts.sdc_check.sdc_check import SdcCheck
from deployments.parts.stages.metrics import METRICS as stages
from deployments.parts.thinking_budget.fields import ThinkingFields
from deployments.parts.thinking_budget.thinking_budget import ThinkingBudgets
from deployments.quotas.quotas import Quotas
from deployments.storage.key_value import KeyValueStore
from engine.text.chat_tokenizer import ChatTokenizer

if TYPE_CHECKING:  # it imports packages that only models with images need
    from deployments.parts.images.image_loader import ImageLoader


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


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """What a model's parts are made of."""

    model: ServedModel
    images: ImageLoader | None
    """None if the model reads text only."""


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One part. Each end is a function that returns None where the configuration leaves the part out."""

    name: str
    """Name of its folder."""
    needs: tuple[str, ...] = ()
    """Names of the parts that it imports."""
    edge: Callable[[EdgeSetup], EdgePart | None] = lambda setup: None
    model: Callable[[ModelSetup], ModelPart | None] = lambda setup: None
    fields: tuple[type[PartFields], ...] = ()
    """What it adds to bodies of requests."""
    metrics: tuple[PartMetrics, ...] = ()
    """Of what its end in engines reports."""


def _adapters(setup: EdgeSetup) -> EdgePart:
    models, may_change = (
        AdapterModels(setup.models, setup.scope, setup.telemetry.peers),
        setup.auth.allow_runtime_lora_updating,
    )
    return AdapterRoutes(setup.models, models, setup.bodies, may_change=may_change)


def _keys(setup: EdgeSetup) -> EdgePart | None:
    if setup.api_keys is None or not setup.auth.allow_runtime_key_updating:
        return None
    return KeyRoutes.of(setup.store, setup.api_keys, setup.quotas, setup.auth.key_limits)


def _operators(setup: EdgeSetup) -> EdgePart:
    return OperatorRoutes(setup.models, setup.telemetry, [each for spec in PARTS for each in spec.metrics])


def _console(setup: EdgeSetup) -> EdgePart | None:
    return ConsoleRoutes(setup.models, setup.telemetry, setup.console) if setup.console.enabled else None


def _images(setup: ModelSetup) -> ModelPart:
    info = setup.model.info
    return ImageInputs(info.name, info.max_model_len, setup.images)


def _quotas(setup: ModelSetup) -> ModelPart:
    return QuotaChecks(has_priorities=setup.model.info.has_priorities)


def _prediction(setup: ModelSetup) -> ModelPart:
    info = setup.model.info
    return Predictions(setup.model.tokenizer, info.max_model_len, drafts=info.drafts)


def _sdc_check(setup: ModelSetup) -> ModelPart | None:
    model = setup.model
    every, frontend = model.info.sdc_check_every, model.frontend
    if every is None:
        return None
    return SdcCheck(every, model.pool, frontend.channel, model.admission, frontend.stats, exact=model.info.same_bits)


PARTS = (
    PartSpec("adapters", edge=_adapters, metrics=adapters),
    PartSpec("keys", edge=_keys),
    PartSpec("quotas", edge=lambda setup: QuotaEdge(setup.quotas), model=_quotas),
    PartSpec("images", model=_images, metrics=images),
    PartSpec(
        "thinking_budget",
        model=lambda setup: ThinkingBudgets(setup.model.format, setup.model.markers),
        fields=(ThinkingFields,),
    ),
    PartSpec("prediction", model=_prediction, fields=(PredictionFields,), metrics=speculation),
    PartSpec("sdc_check", model=_sdc_check),
    PartSpec(
        "holds",
        edge=lambda setup: HoldRoutes(setup.models),
        model=lambda setup: HoldRequests(setup.model),
        fields=(HoldFields, ChatHoldFields),
        metrics=holds,
    ),
    PartSpec("kv_tiers", metrics=tiers),
    PartSpec("kv_fetching", metrics=fetching),
    PartSpec("handoffs", metrics=handoffs),
    PartSpec("costs", metrics=costs),
    PartSpec("stages", metrics=stages),
    PartSpec("experts", metrics=experts),
    PartSpec("operators", edge=_operators),
    PartSpec("console", edge=_console),
)


def part_fields() -> list[type[PartFields]]:
    return [fields for spec in PARTS for fields in spec.fields]


def edge_parts(setup: EdgeSetup) -> list[EdgePart]:
    return [part for spec in PARTS if (part := spec.edge(setup)) is not None]


def open_images(info: ModelInfo, tokenizer: ChatTokenizer, options: ImageConfig) -> ImageLoader | None:
    """Return what loads the images of a model's requests; None if it reads text only. Raises ModelFolderError."""
    if info.image_folder is None:
        return None
    from deployments.parts.images.image_loader import ImageLoader  # needs torch

    return ImageLoader.from_folder(Path(info.image_folder), options, tokenizer)


def model_parts(model: ServedModel, images: ImageLoader | None = None) -> list[ModelPart]:
    """images: None if the model reads text only."""
    setup = ModelSetup(model, images)
    return [part for spec in PARTS if (part := spec.model(setup)) is not None]


def configured(source: ModelSource) -> dict[str, Any]:
    """Return what parts read of a model's configuration, by their names. Raises StartupError."""
    return {name: found for name, module in _modules("configured") if (found := module.read(source)) is not None}


def named(info: ModelInfo, name: str) -> ModelInfo:
    """Return the facts of a model under a name that requests may use, such as that of an adapter. Raises
    RequestError."""
    return next((found for _, module in _modules("configured") if (found := module.named(info, name))), info)


def _modules(file: str) -> list[tuple[str, ModuleType]]:
    """Return the parts that have a file of this name, each with the file."""
    paths = [(spec.name, f"{__package__}.{spec.name}.{file}") for spec in PARTS]
    return [(name, import_module(path)) for name, path in paths if find_spec(path) is not None]
