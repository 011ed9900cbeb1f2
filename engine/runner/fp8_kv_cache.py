"""A KV cache in FP8: numbers in float8_e4m3fn, each times the scale of its layer."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine.engine_options import EngineOptions
from engine.errors import ConfigError, ModelFolderError
from engine.model.loader import open_weights, tensors_by_file
from engine.runner.rank_setup import RankSetup

logger = logging.getLogger(__name__)

FP8_CAPABILITY = (8, 9)  # Triton has no float8_e4m3fn below it: ktransformers #1978, vLLM #45829
SCALE = re.compile(r"layers\.(\d+)\.self_attn\.(?:[kv]_proj\.|attn\.)?([kv])_scale$")


def with_kv_cache_dtype(setup: RankSetup) -> RankSetup:
    """Return the setup of a rank with the configured dtype of the KV cache. Raises ConfigError or ModelFolderError."""
    kv_dtype = cache_dtype(setup.config, setup.dtype, setup.torch_device)
    if kv_dtype == setup.dtype:
        return setup
    return replace(
        setup, kv_dtype=kv_dtype, kv_scales=read_scales(setup.folder, setup.model.num_layers, setup.torch_device)
    )


def cache_dtype(config: EngineOptions, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the KV cache. dtype: dtype of activations. Raises ConfigError if the GPU lacks float8."""
    if config.kv_cache_dtype == "auto":
        return dtype
    if device.type == "cpu":
        logger.warning("kv cache in FP8 on a CPU: each step converts what it reads, which is slow; meant for tests")
    elif torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        raise ConfigError(
            "kv_cache_dtype", config.kv_cache_dtype, f"'auto' on this GPU of compute capability {major}.{minor}: "
            "float8 needs 8.9 or newer (Ada, Hopper)"
        )  # fmt: skip
    return torch.float8_e4m3fn


def read_scales(folder: Path, num_layers: int, device: torch.device) -> Tensor:
    """Return the scales of values in an FP8 cache: [layers, 2 (K, V)] float32, 1 where the checkpoint has none.

    Checkpoints name them `self_attn.k_scale`, `self_attn.k_proj.k_scale` or `self_attn.attn.k_scale`, likewise for V.
    Raises ModelFolderError for a scale that is not above 0.
    """
    scales = torch.ones(num_layers, 2)
    found = 0
    for file, names in tensors_by_file(folder).items():
        with open_weights(file) as tensors:
            for name in names:
                if match := SCALE.search(name):
                    scales[int(match[1]), "kv".index(match[2])] = tensors.get_tensor(name).float().item()
                    found += 1
    if not (scales > 0).all():
        raise ModelFolderError(str(folder), "a k_scale or v_scale is not above 0")
    logger.info("kv cache in FP8: %s", f"{found} scales from the checkpoint" if found else "no scales, all are 1")
    return scales.to(device)
