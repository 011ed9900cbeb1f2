"""Whole engines check the KV that comes from their tiers: what is right stays, what is wrong is found."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from engine.core.engine import EngineCore
from engine.kv_offload.block_memory import DeviceBlocks
from engine.parts.kv_check.messages import KVCheckStats
from engine.wire.parts.kv_offload import KVOffloadStats
from tests.engine.offline.test_kv_offloading import PROMPT, SIZE, answer, engine, flush, next_turn

LAYER = 1


def checks(core: EngineCore) -> dict[str, dict[str, int]]:
    stats = core.stats().record(KVCheckStats)
    assert stats is not None
    return stats.checks


def rest(core: EngineCore) -> int:
    """Step until the engine is idle. Returns the tokens that it computes until then."""
    before = core.stats().histograms["iteration_tokens_total"].sum
    core.idle = False
    while not core.idle:
        assert core.step() == []
    return core.stats().histograms["iteration_tokens_total"].sum - before


@pytest.fixture
def tiers(tmp_path) -> dict[str, dict[str, Any]]:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    store = {"kv_offloading_store": str(tmp_path / "store"), "kv_offloading_store_size": SIZE}
    return {
        "host": {"kv_offloading_size": SIZE},
        "disk": {"kv_offloading_disk_size": SIZE, "kv_offloading_dir": str(tmp_path / "kv")},
        "store": {**store, "kv_offloading_key_file": str(key)},
    }


@pytest.fixture
def bits_flip(monkeypatch):
    """One bit of layer LAYER of each block that comes from a tier is another one."""
    write = DeviceBlocks.write

    def flipped(self: DeviceBlocks, group: int, block: int, source: torch.Tensor | bytes) -> None:
        data = bytearray(source if isinstance(source, bytes) else source.numpy().tobytes())
        data[len(data) // 2] ^= 16  # the model has two layers
        write(self, group, block, bytes(data))

    monkeypatch.setattr(DeviceBlocks, "write", flipped)


@pytest.mark.parametrize("tier", ["host", "disk", "store"])
def test_a_tier_that_is_right_is_checked_once_and_stays(folder_of, tiers, tier):
    with engine(folder_of("llama"), **tiers[tier]) as core:
        first, _ = answer(core, PROMPT)
        flush(core)
        core.scheduler.kv_cache.clear_cache()
        _, cached = answer(core, next_turn(first), "again")
        rest(core)
        assert checks(core) == {tier: {"equal": 1, "different": 0}}
        assert cached >= 128
        assert +Counter(core.stats().finished) == {"length": 2}, "no client asked for it"
        assert rest(core) == 0, "nothing new has come"
        core.scheduler.check()


@pytest.mark.parametrize("tier", ["host", "disk", "store"])
def test_a_tier_whose_bits_flip_is_found_and_left_alone(folder_of, tiers, tier, bits_flip, caplog):
    with engine(folder_of("llama"), **tiers[tier]) as core:
        first, _ = answer(core, PROMPT)
        flush(core)
        core.scheduler.kv_cache.clear_cache()
        answer(core, next_turn(first), "wrong")
        rest(core)
        assert checks(core) == {tier: {"equal": 0, "different": 1}}
        assert f"source={tier} name={tier} layer={LAYER} " in caplog.text and "request_id=wrong" in caplog.text
        assert core.stats().record(KVOffloadStats).tiers[tier].errors == {"different": 1}
        assert not core.scheduler.kv_cache.pool.block_hashes()
        assert answer(core, PROMPT, "right") == (first, 0)
        core.scheduler.kv_cache.clear_cache()
        assert answer(core, PROMPT, "not from there") == (first, 0)
        core.scheduler.check()
