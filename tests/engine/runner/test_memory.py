"""Memory for snapshots of states: a part of the KV cache's, and no more than is of use."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.devices.free_memory import FreeMemory
from engine.distributed.tp_group import TPGroup
from engine.model.state import CHUNK, StateSpec
from engine.parts.kv_groups.rank.snapshot_memory import choose_num_snapshots, snapshot_bytes, snapshot_interval
from engine.runner.kv_cache import choose_num_blocks, group_needs
from tests.engine.model.model_configs import tiny_config

GIB, CPU = 2**30, torch.device("cpu")
MODEL = tiny_config(num_layers=4, num_kv_heads=2, head_dim=64, max_position_embeddings=1 << 20)
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4  # layers, K and V, KV heads, head_dim, float32
SPECS = [StateSpec({"state": ((4, 64, 64), "float32")})] * 8
ONE = TPGroup.single()
PLENTY = FreeMemory(64 * GIB, "")


def snapshots(specs=SPECS, **options) -> int:
    config = EngineConfig(**{"max_num_seqs": 8, **options})
    return choose_num_snapshots(config, 16, MODEL, specs, torch.float32, CPU, ONE, PLENTY)


def test_a_quarter_of_the_kv_cache_is_for_snapshots():
    size = snapshot_bytes(SPECS)
    assert snapshots(kv_cache_memory_bytes=GIB) == GIB // 4 // size
    config = EngineConfig(max_num_seqs=8, kv_cache_memory_bytes=GIB)
    reserved = snapshots(kv_cache_memory_bytes=GIB) * size
    needs = group_needs(config, 16, MODEL, torch.float32, ONE)
    (blocks,), _ = choose_num_blocks(config, needs, MODEL.max_position_embeddings, CPU, PLENTY, reserved)
    assert blocks == (GIB - reserved) // (16 * TOKEN_BYTES)


def test_beside_a_number_of_blocks_they_take_a_third_of_what_these_do():
    assert snapshots(num_gpu_blocks_override=3000) == 1000 * 16 * TOKEN_BYTES // snapshot_bytes(SPECS)


def test_there_are_never_fewer_than_a_handoff_needs_nor_more_than_all_sequences_use():
    assert snapshots(kv_cache_memory_bytes=100_000) == 2
    assert snapshots(max_model_len=640) == 8 * (1 + 640 // CHUNK)


def test_there_are_none_without_states_and_where_nothing_would_use_them():
    assert snapshots(specs=[]) == 0
    assert snapshots(enable_prefix_caching=False) == 0


def test_they_are_as_far_apart_as_tokens_whose_kv_takes_the_memory_of_one():
    tokens = snapshot_bytes(SPECS) // TOKEN_BYTES

    def interval(**options) -> int:
        return snapshot_interval(EngineConfig(**options), 16, MODEL, SPECS, torch.float32, ONE)

    assert interval() == -(-tokens // 64) * 64
    assert interval(prefix_cache_retention_interval=1000) == 1024
    assert interval(prefix_cache_retention_interval=0) == 0
