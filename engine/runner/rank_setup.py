"""The setup of one rank: its options, and everything derived from them before weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.devices.device import Device, open_device
from engine.distributed.tp_group import TPGroup
from engine.engine_options import BLOCK_SIZES, EngineOptions
from engine.model.config import ModelConfig
from engine.model.shard import ShardPlan


@dataclass(frozen=True, slots=True)
class RankSetup:
    """The options of one rank, and everything derived from them."""

    config: EngineOptions
    model: ModelConfig
    """With the layers that this rank has a part of."""
    whole: ModelConfig
    """With all layers."""
    folder: Path
    tp: TPGroup
    plan: ShardPlan
    device: Device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    overlap: bool
    max_steps: int = 2
    """Steps that may be launched and not collected, with overlap."""
    kv_scales: torch.Tensor | None = None
    """[layers, 2 (K, V)] float32, by which numbers of an FP8 cache are multiplied; None for a cache without scales."""
    host: str = "127.0.0.1"
    """IP address at which ranks of other engines reach this one."""
    layout: str = ""
    """Suffix of the fingerprint of KV whose ranks hold other layers than those of most engines."""
    adapt: Callable[[torch.nn.Module], None] | None = None
    """Changes the layers of the model before its weights are loaded."""

    @classmethod
    def of(cls, config: EngineOptions, model: ModelConfig, folder: Path, tp: TPGroup) -> RankSetup:
        """Open the device and derive the rest, for a model of which each rank has a slice of everything."""
        device = open_device(config.device)
        dtype: torch.dtype = getattr(torch, model.dtype if config.dtype == "auto" else config.dtype)
        return cls(
            config=config,
            model=model,
            whole=model,
            folder=folder,
            tp=tp,
            plan=ShardPlan(tp),
            device=device,
            dtype=dtype,
            kv_dtype=dtype,
            block_size=config.block_size or BLOCK_SIZES[device.torch_device.type],
            overlap=(device.asynchronous or not model.stage.is_whole)
            if config.async_scheduling is None
            else config.async_scheduling,
        )

    @property
    def torch_device(self) -> torch.device:
        return self.device.torch_device
