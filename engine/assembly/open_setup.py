"""Derives the setup of a rank, and checks that its options, model and device go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model import fixed_order
from engine.model.config import ModelConfig
from engine.model.expert_parallel import check_experts
from engine.model.expert_split import ExpertShardPlan
from engine.model.ops import dispatch
from engine.model.stage import config_of, nth_stage
from engine.runner.fp8_kv_cache import with_kv_cache_dtype
from engine.runner.rank_setup import RankSetup


def open_setup(
    config: EngineConfig, whole: ModelConfig, folder: Path, group: TPGroup, host: str = "127.0.0.1"
) -> RankSetup:
    """Open the device of a rank and return its setup. whole: with the layers of all stages. group: the ranks of one
    stage. host: as in RankSetup. Raises ConfigError for options that cannot be combined."""
    layers: Sequence[int] = ()
    if config.pipeline_parallel_size > 1:
        from engine.parts.stages.rank.stage_group import StageGroup  # it needs pyzmq

        layers = group.layers if isinstance(group, StageGroup) else ()
    model = config_of(nth_stage(group.stage, layers, whole), whole) if layers else whole
    if config.torch_compile and model.transformers:
        limit = f"false for {model.architecture}, which transformers' own code computes"
        raise ConfigError("torch_compile", True, limit)
    if model.recurrent is not None or model.latent is not None or model.gemma is not None:
        check_layers(config, model)
    check_experts(config, model)
    setup = replace(
        with_kv_cache_dtype(RankSetup.of(config, model, folder, group)),
        whole=whole,
        plan=ExpertShardPlan.of(config, group),
        max_steps=1 + config.pipeline_parallel_size,
        host=host,
        layout=f" stages={','.join(map(str, layers))}" if layers else "",
    )
    if config.determinism == "strict":
        fixed_order.check(config, model, setup.torch_device)
        setup = replace(setup, plan=fixed_order.in_fixed_order(setup.plan), adapt=fixed_order.pad_layers)
    if setup.device.asynchronous and config.pipeline_parallel_size > 1 and config.data_parallel_size > 1:
        limit = "1 on a GPU with data_parallel_size above 1, because stages could wait for each other for ever"
        raise ConfigError("pipeline_parallel_size", config.pipeline_parallel_size, limit)
    if dispatch.gpu_kernels(setup.dtype, setup.torch_device):
        check_tested(config, model)
    return setup


def check_tested(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for parts whose kernels no GPU has run yet, unless they are allowed."""
    parts = {
        "recurrent layers": model.recurrent is not None,
        "latent attention": model.latent is not None,
        **dict.fromkeys(config.added_to_layers, True),
        "quantized experts": model.moe is not None and model.quantization is not None,
    }
    untested = [part for part, present in parts.items() if present]
    if untested and not config.allow_untested_kernels:
        limit = f"true for {', '.join(untested)} of {model.architecture}, whose kernels were not run on a GPU yet"
        raise ConfigError("allow_untested_kernels", False, limit)


def check_layers(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for options that do not support recurrent layers, latent attention or Gemma 3n's layers yet."""
    fp8 = model.latent is not None and config.kv_cache_dtype != "auto"
    refused = {"torch_compile": config.torch_compile, "kv_cache_dtype": fp8}
    if model.recurrent is not None:  # a handoff sends either a state or a window's blocks after the other KV, not both
        windowed = any(group.spec.window is not None for group in model.kv_groups)
        refused["handoff"] = config.handoff is not None and windowed
    for key in filter(refused.get, refused):
        limit = f"left out for {model.architecture}, which does not support it yet"
        raise ConfigError(key, getattr(config, key), limit)
