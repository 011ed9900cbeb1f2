"""Memory for snapshots of states: a part of the KV cache's, and no more than is of use."""

from __future__ import annotations

import logging

import pytest
import torch

from engine.config import EngineConfig
from engine.devices.free_memory import FreeMemory
from engine.distributed.tp_group import TPGroup
from engine.errors import OutOfMemory
from engine.model.config import ModelConfig
from engine.model.state import CHUNK, StateSpec
from engine.parts.experts.rank.experts import keep_free
from engine.parts.kv_groups.rank.snapshot_memory import choose_num_snapshots, snapshot_bytes, snapshot_interval
from engine.runner.kv_cache import choose_num_blocks, group_needs, plan_blocks
from engine.runner.rank_part import RankPart, RankParts
from engine.runner.rank_setup import RankSetup
from tests.engine.model.model_configs import tiny_config
from tests.models import make_model

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


def test_blocks_leave_room_for_the_experts_of_a_lost_engine(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="engine.parts.experts.rank.experts")
    config = EngineConfig(model=str(make_model(tmp_path, "qwen3_moe")), dtype="float32", device="cpu", max_num_seqs=64)
    setup = RankSetup.of(config, ModelConfig.from_folder(tmp_path), tmp_path, ONE)
    block_bytes = sum(need.block_bytes for need in group_needs(config, 16, setup.model, torch.float32, ONE))
    spare = GIB - 80 * block_bytes

    class Spare(RankPart):
        def __init__(self, spare_bytes: int):
            self._spare_bytes = spare_bytes

        def reserve(self, free: FreeMemory) -> FreeMemory:
            return keep_free(free, self._spare_bytes)

    def blocks(spare_bytes: int) -> int:
        (found,), _ = plan_blocks(setup, FreeMemory(GIB, "the box"), RankParts([Spare(spare_bytes)]))
        return found

    assert blocks(spare) == 40 < blocks(0), "half of what is free, on a CPU"
    assert [record.message for record in caplog.records] == [
        f"{spare / GIB:.2f} GiB are kept free for experts of a lost engine"
    ]
    with pytest.raises(
        OutOfMemory, match=r"this rank needs 2.00 GiB for its part .* but only 1.00 GiB are free \(the box\)"
    ):
        blocks(2 * GIB)
