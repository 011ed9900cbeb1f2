"""Checks whether the LoRA adapters of a configuration fit their models, and how much memory their slots take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cluster.cli.check.finding import Finding
from cluster.config.app_config import AppConfig
from cluster.config.model_section import ModelSection
from cluster.serve_config import ours
from deployments.routing.config import Role
from engine.distributed.exchange.expert_exchange import ExpertExchange
from engine.distributed.tp_group import TPGroup
from engine.errors import StartupError
from engine.lora.adapter_files import open_adapter
from engine.lora.errors import AdapterError
from engine.lora.model_adapters import ModelAdapters
from engine.model.checkpoint.overlay import engine_folder
from engine.model.config import ModelConfig
from engine.model.expert_split import ExpertShardPlan
from engine.model.models.registry import build_model


def check_listed(serve_config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield warnings about the adapters that a Serve configuration lists. Reads no weights of the models. Raises
    StartupError for an adapter that does not fit its model."""
    for _, application in ours(serve_config):
        for model in AppConfig.of(application).models:
            for finding in check_adapters(model, layers_of(model, "decode")) if model.lora_modules else ():
                if finding.level == "problem":
                    raise StartupError(f"lora_modules of model {model.name!r}: {finding}")
                if finding.level == "warning":
                    yield finding


def layers_of(model: ModelSection, role: Role) -> ModelAdapters:
    """Return the layers that adapters can change in an engine of a pool. Allocates no memory for weights."""
    engine = model.engine_config(role)
    shape = ModelConfig.from_folder(engine_folder(engine), engine.quantization)
    dtype = getattr(torch, shape.dtype if engine.dtype == "auto" else engine.dtype)
    plan = ExpertShardPlan(TPGroup(0, engine.tensor_parallel_size))
    if engine.data_parallel_size > 1:
        exchange = ExpertExchange(TPGroup(0, engine.world_size), ranks_per_engine=plan.size)
        plan = replace(plan, expert_exchange=exchange)
    built = build_model(shape, plan, dtype, "meta")
    slots, rank = engine.lora_slots, engine.max_lora_rank
    return ModelAdapters(built, slots, rank, 1, torch.device("meta"), for_gpu=model.on_gpu(role))


def check_adapters(model: ModelSection, layers: ModelAdapters) -> Iterator[Finding]:
    """Check names, sizes and ranks of the adapters that are listed for a model, and whether they were trained on it."""
    for module in model.lora_modules:
        topic = f"adapter {module.name} of {model.name}"
        try:
            files = open_adapter(module.path, module.name)
            layers.factors(files)
        except AdapterError as error:
            yield Finding("problem", topic, str(error))
            continue
        base = files.config.base_model
        if is_other(base, model.model):
            message = f"was trained on {base} according to its adapter_config.json, but is served on {model.model}"
            yield Finding("warning", topic, message, "The adapter's layers fit, but its answers may make no sense")
        else:
            yield Finding("ok", topic, f"fits: {len(files.modules)} modules")


def is_other(base: str, model: str) -> bool:
    """Return whether two paths or Hub ids name different models. If one name begins with the other, as with quantized
    variants, they count as one model."""
    one, other = (Path(name).name.casefold() for name in (base, model))
    return not (one.startswith(other) or other.startswith(one))
