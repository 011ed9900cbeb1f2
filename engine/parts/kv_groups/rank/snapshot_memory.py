"""Computes how many snapshots of recurrent states a rank has memory for, and how far apart they are."""

from __future__ import annotations

import math

import torch

from engine.devices.free_memory import FreeMemory
from engine.distributed.tp_group import TPGroup
from engine.engine_options import EngineOptions
from engine.model.config import ModelConfig
from engine.model.state import CHUNK, StateSpec, state_specs
from engine.options.handoff import HandoffOptions
from engine.runner import kv_cache
from engine.runner.rank_setup import RankSetup

SHARE = 4  # snapshots get 1 / SHARE of the KV cache's memory
LEAST = 2  # fewest snapshots; a handoff needs one


def specs_of(setup: RankSetup, model: ModelConfig) -> list[StateSpec]:
    """Return the tensors that each recurrent layer keeps for a sequence. model: with the layers of one stage, or of
    all."""
    return state_specs(model.recurrent, str(setup.dtype).removeprefix("torch."), setup.tp.size)


def snapshot_border(block_size: int) -> int:
    """Return the smallest number of tokens that is both whole KV blocks and whole chunks of a recurrent layer.
    Snapshots are taken at its multiples."""
    return math.lcm(CHUNK, block_size)


def snapshot_bytes(specs: list[StateSpec]) -> int:
    return sum(spec.kept_bytes for spec in specs)


def snapshot_interval(
    config: EngineOptions, block_size: int, model: ModelConfig, specs: list[StateSpec], dtype: torch.dtype, tp: TPGroup
) -> int:
    """Return the tokens between two snapshots in a long sequence, a multiple of `snapshot_border`; 0 for none.

    By default it is the number of tokens whose KV takes as much memory as one snapshot, so that snapshots never cost
    more than the KV that they make reusable. dtype: the KV cache's dtype.
    """
    border, interval = snapshot_border(block_size), config.prefix_cache_retention_interval
    if interval is None:
        block_bytes = sum(need.block_bytes for need in kv_cache.group_needs(config, block_size, model, dtype, tp))
        interval = max(1, snapshot_bytes(specs) * block_size // max(1, block_bytes))
    return -(-interval // border) * border


def choose_num_snapshots(
    config: EngineOptions,
    block_size: int,
    model: ModelConfig,
    specs: list[StateSpec],
    dtype: torch.dtype,
    device: torch.device,
    tp: TPGroup,
    free: FreeMemory,
) -> int:
    """Return the number of snapshots of recurrent states.

    They get 1 / SHARE of the KV cache's memory, but no more than all sequences at full length could use. If
    `num_gpu_blocks_override` is configured, they get 1 / (SHARE - 1) of the memory of these blocks in addition. dtype:
    the KV cache's dtype. Raises OutOfMemory as `kv_budget` does.
    """
    if not (specs or model.recurrent) or not (config.enable_prefix_caching or config.of(HandoffOptions).handoff):
        return 0
    useful = config.max_num_seqs * (1 + model.longest_sequence(config.max_model_len) // snapshot_border(block_size))
    if not specs:
        return useful  # a stage without recurrent layers, where a snapshot takes no memory
    needs = kv_cache.group_needs(config, block_size, model, dtype, tp)
    if config.num_gpu_blocks_override is None:
        budget = max(0, kv_cache.kv_budget(config, device, free)[0])
    else:
        budget = config.num_gpu_blocks_override * sum(need.block_bytes for need in needs) * SHARE // (SHARE - 1)
    return min(useful, max(LEAST, budget // SHARE // snapshot_bytes(specs)))
