"""The number of KV blocks that fit, and the tensor that holds them."""

from __future__ import annotations

import logging
import math
import mmap
import os
import re
from pathlib import Path

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError, ModelFolderError, OutOfMemory
from engine.kv_transfer.transport import nixl
from engine.model.checkpoint.weights import open_weights
from engine.model.config import ModelConfig
from engine.model.loader import tensors_by_file

logger = logging.getLogger(__name__)

GIB = 2**30
FP8_CAPABILITY = (8, 9)  # Triton has no float8_e4m3fn below, as ktransformers #1978 and vLLM #45829 met
CPU_DEFAULT_GIB = 2.0
SCALE = re.compile(r"layers\.(\d+)\.self_attn\.(?:[kv]_proj\.|attn\.)?([kv])_scale$")


def block_shape(config: ModelConfig, block_size: int, tp: TPGroup) -> tuple[int, int, int, int, int]:
    """Return the shape of one block on one rank: [layers, 2 (K, V), kv_heads, block_size, head_dim]."""
    return config.num_kv_layers, 2, config.kv_heads_per_rank(tp.size), block_size, config.head_dim


def choose_num_blocks(
    config: EngineConfig,
    block_size: int,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    tp: TPGroup,
    free_bytes: int,
    drafter_bytes: int = 0,
) -> tuple[int, int]:
    """Return (num_blocks, max_model_len) for this memory, and log what limits them.

    free_bytes: on a GPU memory for the KV cache, measured by a profiling run; on a CPU the machine's free memory.
    drafter_bytes: that a drafter needs for each block.
    Raises OutOfMemory if the configured `max_model_len` does not fit, or nothing fits at all.
    """
    block_bytes = torch.Size(block_shape(model, block_size, tp)).numel() * dtype.itemsize + drafter_bytes
    if device.type == "cuda" and config.handoff is not None and config.handoff.transport != "tcp":
        free_bytes -= nixl.MAX_BUFFERS * nixl.buffer_bytes(block_bytes)
    longest = model.longest_sequence(config.max_model_len)
    desired = config.max_num_seqs * -(-longest // block_size)
    if not block_bytes:
        logger.info("kv cache: none, since this model keeps no KV; max_model_len=%d", longest)
        return desired, longest
    if config.num_blocks is not None:
        blocks, limit = config.num_blocks, "num_blocks"
        if blocks * block_bytes > free_bytes:
            raise OutOfMemory(
                f"num_blocks={blocks} needs {blocks * block_bytes / GIB:.2f} GiB of KV cache, but only "
                f"{free_bytes / GIB:.2f} GiB are free; at most {free_bytes // block_bytes} blocks fit"
            )
    else:
        budget, limit = kv_budget(config, device, free_bytes)
        blocks = max(0, budget) // block_bytes
        if blocks > desired:
            blocks, limit = desired, f"max_num_seqs ({config.max_num_seqs}) x max_model_len ({longest})"
    tokens = blocks * block_size
    shortest = config.max_model_len or 2  # one token of prompt and one of output
    if tokens < shortest:
        needed = -(-shortest // block_size)
        more = f"kv_cache_memory_gib to at least {math.ceil(needed * block_bytes / GIB * 1000) / 1000}"
        if config.num_blocks is not None:
            more = f"num_blocks to at least {needed}"
        less = f", or lower max_model_len to {tokens} or less" if tokens >= 2 else ""
        raise OutOfMemory(
            f"the KV cache holds {tokens} tokens (limited by {limit}), but one request of {shortest} tokens "
            f"needs {needed} blocks, {needed * block_bytes / GIB:.3g} GiB; raise {more}{less}"
        )
    max_model_len = min(longest, tokens)
    logger.info(
        "kv cache: %d tokens fit (%d blocks of %d, %.2f GiB), limited by %s; max_model_len=%d, so %.1f full requests",
        tokens, blocks, block_size, blocks * block_bytes / GIB, limit, max_model_len, tokens / max_model_len,
    )  # fmt: skip
    return blocks, max_model_len


def kv_budget(config: EngineConfig, device: torch.device, free_bytes: int) -> tuple[int, str]:
    """Return the bytes for the KV cache and the name of the limit that sets them."""
    if config.kv_cache_memory_gib is not None:
        requested = int(config.kv_cache_memory_gib * GIB)
        if requested > free_bytes:
            raise OutOfMemory(
                f"kv_cache_memory_gib={config.kv_cache_memory_gib} does not fit: {free_bytes / GIB:.2f} GiB are free"
            )
        return requested, f"kv_cache_memory_gib ({config.kv_cache_memory_gib})"
    if device.type == "cuda":
        return free_bytes, f"gpu_memory_utilization ({config.gpu_memory_utilization})"
    return min(int(CPU_DEFAULT_GIB * GIB), free_bytes // 2), f"the default on a CPU ({CPU_DEFAULT_GIB} GiB)"


def cache_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the KV cache. dtype: of the model's activations."""
    if config.kv_cache_dtype == "auto":
        return dtype
    if device.type == "cpu":
        logger.warning("kv cache in FP8 on a CPU: attention runs in plain torch, several times slower; meant for tests")
    elif torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        raise ConfigError(
            "kv_cache_dtype", config.kv_cache_dtype, f"'auto' on this GPU of compute capability {major}.{minor}: "
            "float8 needs 8.9 or newer (Ada, Hopper)"
        )  # fmt: skip
    return torch.float8_e4m3fn


def read_scales(folder: Path, num_layers: int, device: torch.device) -> Tensor:
    """Return [layers, 2 (K, V)] float32, the scales of values stored in an FP8 cache; 1 if the checkpoint has none.

    Tools name them `self_attn.k_scale`, or with `k_proj.` or `attn.` in between.
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


def free_host_bytes() -> int:
    """Return the memory that the machine can still give without swapping."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def allocate(
    num_blocks: int, config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device, tp: TPGroup
) -> Tensor:
    """Return [num_blocks, layers, 2, kv_heads, block_size, head_dim], zeroed so that a padded read never meets NaN.

    On a CPU pages are taken only when they are first written: torch itself would write zeros into all of them.
    """
    shape = (num_blocks, *block_shape(config, block_size, tp))
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
