"""The table of all parts. Only what starts an application or a replica imports it."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a replica does without what only applications need
    from deployments.http.bodies import PartFields
    from deployments.observability.engine_metrics import PartMetrics
    from deployments.openai.served.model_part import ModelPart
    from deployments.openai.served.model_source import ModelSource
    from deployments.openai.served.served_model import ModelInfo, ServedModel
    from deployments.options.images import ImageConfig
    from deployments.parts.images.image_loader import ImageLoader
    from deployments.parts.setup import EdgePart, EdgeSetup, PartSpec
    from deployments.replicas.replica_part import ReplicaPart, ReplicaSetup
    from engine.text.chat_tokenizer import ChatTokenizer

PARTS = (
    "adapters", "keys", "quotas", "sessions", "images", "thinking_budget", "prediction", "sdc_check", "holds",
    "kv_tiers", "kv_fetching", "handoffs", "kv_check", "costs", "stages", "experts", "operators", "tape", "console",
)  # fmt: skip
"""Folders of deployments/parts, in the order in which they are asked. Their `part.py` has the ends in applications and
models as SPEC; the `replica.py` of some makes an end in a replica, the `configured.py` of some reads the configuration,
and the `named.py` of some finds a model by a further name."""


def spec_of(name: str) -> PartSpec:
    spec: PartSpec = importlib.import_module(f"{__package__}.{name}.part").SPEC
    return spec


def part_fields() -> list[type[PartFields]]:
    return [fields for name in PARTS for fields in spec_of(name).fields]


def part_metrics() -> list[PartMetrics]:
    return [metrics for name in PARTS for metrics in spec_of(name).metrics]


def edge_parts(setup: EdgeSetup) -> dict[str, EdgePart]:
    """Return an application's parts by the names of their folders."""
    return {name: part for name in PARTS if (part := spec_of(name).edge(setup)) is not None}


def open_images(info: ModelInfo, tokenizer: ChatTokenizer, options: ImageConfig) -> ImageLoader | None:
    """Return what loads the images of a model's requests; None if it reads text only. Raises ModelFolderError."""
    if info.image_folder is None:
        return None
    from deployments.parts.images.image_loader import ImageLoader  # needs torch

    return ImageLoader.from_folder(Path(info.image_folder), options, tokenizer)


def model_parts(model: ServedModel, images: ImageLoader | None = None) -> list[ModelPart]:
    """images: None if the model reads text only."""
    from deployments.parts.setup import ModelSetup

    setup = ModelSetup(model, images)
    return [part for name in PARTS if (part := spec_of(name).model(setup)) is not None]


def configured(source: ModelSource) -> dict[str, Any]:
    """Return what parts read of a model's configuration, by their names. Raises StartupError."""
    return {name: found for name, module in _modules("configured") if (found := module.read(source)) is not None}


def named(info: ModelInfo, name: str) -> ModelInfo:
    """Return the facts of a model under a name that requests may use, such as that of an adapter. Raises
    RequestError."""
    return next((found for _, module in _modules("named") if (found := module.named(info, name))), info)


def replica_parts(setup: ReplicaSetup) -> list[ReplicaPart]:
    return [module.make(setup) for _, module in _modules("replica")]


def _modules(file: str) -> list[tuple[str, ModuleType]]:
    """Return the parts that have a file of this name, each with the file."""
    paths = [(name, f"{__package__}.{name}.{file}") for name in PARTS]
    return [(name, importlib.import_module(path)) for name, path in paths if find_spec(path) is not None]
