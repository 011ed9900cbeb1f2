"""The setup of one rank: its options, and everything derived from them before weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.devices.device import Device, open_device
from engine.distributed.expert_shard_plan import ExpertShardPlan
from engine.distributed.shard_plan import ShardPlan
from engine.distributed.tp_group import TPGroup
from engine.engine_options import BLOCK_SIZES
from engine.errors import ConfigError
from engine.model import fixed_order
from engine.model.config import ModelConfig
from engine.model.expert_parallel import check_experts
from engine.model.ops import dispatch
from engine.model.stage import config_of, nth_stage
from engine.runner import kv_cache
from engine.usable_cpus import usable_cpus


@dataclass(frozen=True, slots=True)
class RankSetup:
    """The options of one rank, and everything derived from them."""

    config: EngineConfig
    model: ModelConfig
    """With the layers of this rank's pipeline stage."""
    whole: ModelConfig
    """With the layers of all stages."""
    stage_layers: Sequence[int]
    """Number of layers of each stage; empty without stages."""
    folder: Path
    tp: TPGroup
    host: str
    """IP address at which ranks of other engines reach this one."""
    plan: ShardPlan
    device: Device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    overlap: bool

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model: ModelConfig,
        folder: Path,
        tp: TPGroup,
        *,
        stage_layers: Sequence[int] = (),
        host: str = "127.0.0.1",
    ) -> RankSetup:
        """Open the device and derive the rest. model: with the layers of all stages. Raises ConfigError for options
        that cannot be combined."""
        whole = model
        if stage_layers:
            model = config_of(nth_stage(tp.stage, stage_layers, whole), whole)
        if config.torch_compile and model.transformers:
            limit = f"false for {model.architecture}, which transformers' own code computes"
            raise ConfigError("torch_compile", True, limit)
        if config.torch_compile and config.enable_lora:
            raise ConfigError("torch_compile", True, "false with enable_lora, because compiled layers have no adapters")
        if model.recurrent is not None or model.latent is not None or model.gemma is not None:
            check_layers(config, model)
        check_experts(config, model)
        device = open_device(config.device)
        if device.asynchronous and config.pipeline_parallel_size > 1 and config.data_parallel_size > 1:
            limit = "1 on a GPU with data_parallel_size above 1, because stages could wait for each other for ever"
            raise ConfigError("pipeline_parallel_size", config.pipeline_parallel_size, limit)
        dtype: torch.dtype = getattr(torch, model.dtype if config.dtype == "auto" else config.dtype)
        if dispatch.gpu_kernels(dtype, device.torch_device):
            check_tested(config, model)
        return cls(
            config=config,
            model=model,
            whole=whole,
            stage_layers=stage_layers,
            folder=folder,
            tp=tp,
            host=host,
            plan=shard_plan(config, model, tp, device.torch_device),
            device=device,
            dtype=dtype,
            kv_dtype=kv_cache.cache_dtype(config, dtype, device.torch_device),
            block_size=config.block_size or BLOCK_SIZES[device.torch_device.type],
            overlap=(device.asynchronous or not model.stage.is_whole)
            if config.async_scheduling is None
            else config.async_scheduling,
        )

    @property
    def layout(self) -> str:
        """Suffix of the fingerprint of KV whose ranks hold other layers than those of engines without stages."""
        return f" stages={','.join(map(str, self.stage_layers))}" if self.stage_layers else ""

    @property
    def torch_device(self) -> torch.device:
        return self.device.torch_device


def shard_plan(config: EngineConfig, model: ModelConfig, tp: TPGroup, device: torch.device) -> ShardPlan:
    """Return how the model is divided over the ranks. Raises ConfigError."""
    plan: ShardPlan = ExpertShardPlan.of(config, tp)
    if config.determinism == "strict":
        fixed_order.check(config, model, device)
        plan = fixed_order.in_fixed_order(plan)
    return plan


def check_tested(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for parts whose kernels no GPU has run yet, unless they are allowed."""
    parts = {
        "recurrent layers": model.recurrent is not None,
        "latent attention": model.latent is not None,
        "adapters": config.enable_lora,
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


def set_threads(config: EngineConfig, tp: TPGroup) -> None:
    """Set torch's number of threads: the configured one, else at most this rank's share of the CPUs that it may use."""
    share = max(1, int(usable_cpus() / tp.all_engines.local_size))
    torch.set_num_threads(config.num_threads or min(torch.get_num_threads(), share))
