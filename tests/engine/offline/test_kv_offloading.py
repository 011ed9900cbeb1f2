"""Whole engines with tiers below their KV cache: texts and log-probabilities are those of an engine without any."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.door.inputs import CacheCleared
from engine.core.engine import EngineCore
from engine.distributed.cluster_key import ClusterKey
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.kv_offload import rank_tiers
from engine.kv_offload.disk import TEMPORARY_KEY, DiskFolder
from engine.kv_offload.store import StoreFolder, Unreachable
from engine.parts.holds.inputs import HoldsReleased
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.serving.kv_events import KVEventPublisher
from engine.wire.block_hash import BLOCK_HASH_BYTES
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Subscribe
from engine.wire.parts.cache_writes import HoldOutcome
from engine.wire.parts.holds import HoldMark, PromptHold
from engine.wire.parts.kv_offload import KVOffloadStats
from engine.wire.sampling_params import SamplingParams
from tests.deltas import deltas_of
from tests.models import with_slow
from tests.products import few
from tests.rank_pool import RankPool

PROMPT = [3 + 7 * i % 90 for i in range(150)]
FAMILIES = ["llama", "gemma3", "qwen3_next"]  # one group; windows; recurrent states
SIZE = 0.05  # GiB
WAIT_S = 60.0
BLOCKS = {"llama": 128, "gemma3": 128, "qwen3_next": 1024}  # recurrent states of a tiny model are larger than its KV


@pytest.fixture
def key_file(tmp_path) -> str:
    file = tmp_path / "key"
    file.write_bytes(os.urandom(32))
    file.chmod(0o600)
    return str(file)


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[EngineCore]:
    core = build_engine(config_of(folder, **options))
    try:
        yield core
    finally:
        core.close()


def config_of(folder: Path, **options: Any) -> EngineConfig:
    fixed = {"dtype": "float32", "block_size": 4, "max_num_seqs": 4, "num_gpu_blocks_override": 64, "num_threads": 1}
    return EngineConfig(**{"model": str(folder), "max_model_len": 200, **fixed, **options})


def answer(core: EngineCore, prompt: list[int], name: str = "a", **more: Any) -> tuple[list[Any], int]:
    """What the engine answers, bit for bit, and how many tokens of the prompt it had."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    core.add(GenerateRequest(request_id=name, prompt=prompt, params=params, **more))
    found: list[Any] = []
    cached = 0
    for delta in deltas_of(core):
        found += zip(delta.token_ids, delta.logprobs or [], strict=True)
        cached += delta.num_cached_tokens
    return found, cached


def flush(core: EngineCore) -> None:
    """Let all blocks go down."""
    while not core.scheduler.parts[KVOffloading].flushed():
        core.step()


@pytest.fixture(scope="module")
def plainly(folder_of):
    """What an engine without tiers answers to the prompt, and to the turn after it."""

    @cache
    def of(family: str) -> list[list[Any]]:
        with engine(folder_of(family), num_gpu_blocks_override=128) as core:
            first, _ = answer(core, PROMPT)
            core.apply(CacheCleared())
            return [first, answer(core, next_turn(first))[0]]

    return of


def next_turn(first: list[Any]) -> list[int]:
    return [*PROMPT, *(token for token, _ in first), 5, 6, 7]


@pytest.mark.parametrize("family", with_slow(FAMILIES, ["gemma3"]))
def test_a_second_start_continues_from_the_disk_of_the_first(folder_of, plainly, tmp_path, key_file, family):
    tiers = {"kv_offloading_disk_size": SIZE, "kv_offloading_dir": str(tmp_path / "kv")}
    tiers["kv_offloading_key_file"] = key_file
    first, second = plainly(family)
    with engine(folder_of(family), **tiers) as core:
        assert answer(core, PROMPT) == (first, 0)
    with engine(folder_of(family), **tiers) as core:
        found, cached = answer(core, next_turn(first))
        assert found == second
        assert cached >= 128, "but for the rest after the last border of a recurrent state"
        stats = core.stats().record(KVOffloadStats)
    assert stats is not None and stats.hit_tokens == cached
    assert stats.tiers["disk"].errors == {}


@pytest.mark.parametrize("family", few(1, FAMILIES))
def test_host_memory_keeps_what_the_cache_evicts(folder_of, plainly, family):
    with engine(folder_of(family), kv_offloading_size=SIZE) as core:
        assert answer(core, PROMPT)[0] == plainly(family)[0]
        flush(core)
        for i in range(3):
            answer(core, [3 + (5 * j + i) % 90 for j in range(150)], f"other {i}")
            flush(core)
        core.scheduler.kv_cache.clear_cache()
        found, cached = answer(core, next_turn(plainly(family)[0]), "again")
    assert found == plainly(family)[1]
    assert cached >= 128


def listed(core: EngineCore, blocks: int) -> None:
    """Wait until an engine knows of so many blocks in its slowest tier."""
    deadline = time.monotonic() + WAIT_S
    while (stats := core.stats().record(KVOffloadStats)) is not None and [*stats.tiers.values()][-1].blocks < blocks:
        assert time.monotonic() < deadline, stats
        core.step()


@pytest.fixture
def shared(tmp_path, key_file, monkeypatch) -> dict[str, Any]:
    monkeypatch.setattr(rank_tiers, "LIST_S", 0.02)
    store = {"kv_offloading_store": str(tmp_path / "store"), "kv_offloading_store_size": SIZE}
    return {**store, "kv_offloading_key_file": key_file}


@pytest.mark.parametrize("family", with_slow(FAMILIES, ["gemma3"]))
def test_what_one_engine_has_written_to_the_store_another_reads(folder_of, plainly, shared, family):
    first, second = plainly(family)
    with engine(folder_of(family), **shared) as one, engine(folder_of(family), **shared) as other:
        assert answer(one, PROMPT) == (first, 0)
        flush(one)
        stats = one.stats().record(KVOffloadStats)
        assert stats is not None
        listed(other, stats.tiers["store"].blocks)
        found, cached = answer(other, next_turn(first))
        assert found == second
        assert cached >= 128, "but for the rest after the last border of a recurrent state"
        stats = other.stats().record(KVOffloadStats)
        assert stats is not None and stats.tiers["store"].errors == {} and stats.hit_tokens == cached


def test_engines_of_other_salts_keys_and_cpus_find_nothing_in_the_store(folder_of, plainly, shared, monkeypatch):
    folder, first = folder_of("llama"), plainly("llama")[0]
    with engine(folder, **shared) as core:
        answer(core, PROMPT)
    with engine(folder, **shared) as core:
        listed(core, 40)
        assert answer(core, PROMPT, "salted", cache_salt="mine")[1] == 0
        assert answer(core, PROMPT, "plain") == (first, 148)
    other_key = Path(f"{shared['kv_offloading_key_file']}2")
    other_key.write_bytes(os.urandom(32))
    other_key.chmod(0o600)
    with engine(folder, **{**shared, "kv_offloading_key_file": str(other_key)}) as core:
        assert answer(core, PROMPT) == (first, 0)
    monkeypatch.setattr("engine.kv_offload.rank_tiers.kind_of", lambda device: "another CPU")
    with engine(folder, **shared) as core:
        assert answer(core, PROMPT) == (first, 0)
    scopes = [scope.name for scope in Path(shared["kv_offloading_store"]).iterdir()]
    assert len(scopes) == 3


def test_damaged_objects_and_a_store_that_is_away_cost_time_only(folder_of, plainly, shared, monkeypatch):
    with engine(folder_of("llama"), **shared) as core:
        answer(core, PROMPT)
    objects = sorted(Path(shared["kv_offloading_store"]).glob("*/??/*"))
    assert len(objects) == 40
    for number, file in enumerate(objects):
        data = file.read_bytes()
        file.write_bytes(data[: number * 10] if number % 2 else data[:-1] + bytes([data[-1] ^ 1]))
    with engine(folder_of("llama"), **shared) as core:
        listed(core, 40)
        assert answer(core, PROMPT) == (plainly("llama")[0], 0)
        stats = core.stats().record(KVOffloadStats)
        assert stats is not None and stats.tiers["store"].errors == {"read": 37}
        flush(core)

    def away(self, name):
        raise Unreachable("the network is down")

    monkeypatch.setattr(StoreFolder, "read", away)
    with engine(folder_of("llama"), **shared) as core:
        listed(core, 40)
        assert answer(core, PROMPT) == (plainly("llama")[0], 0)
        stats = core.stats().record(KVOffloadStats)
        assert stats is not None and stats.tiers["store"].errors == {"read": 37}
        assert stats.tiers["store"].blocks == 40, "they may be there when it is back"


def test_a_store_that_hangs_costs_the_timeout_only(folder_of, plainly, shared, monkeypatch):
    with engine(folder_of("llama"), **shared) as core:
        answer(core, PROMPT)
    go_on = threading.Event()
    for method in ("read", "write"):
        monkeypatch.setattr(StoreFolder, method, lambda self, name, block=None: go_on.wait(60) and b"")
    with engine(folder_of("llama"), kv_offloading_timeout_s=0.05, **shared) as core:
        listed(core, 40)
        assert answer(core, PROMPT) == (plainly("llama")[0], 0)
        assert answer(core, PROMPT[1:], "other")[1] == 0
        stats = core.stats().record(KVOffloadStats)
        assert stats is not None and stats.tiers["store"].errors == {"deadline": 37}
        assert not core.scheduler.kv_cache.pool.pinned, "a block is still kept for the store"
        go_on.set()


def granted(core: EngineCore, prompt: list[int], name: str = "talk") -> int:
    """Ask for a hold of a prompt, and return for how many tokens it is granted."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    hold = PromptHold(name=name, marks=[HoldMark(len(prompt), 600.0)])
    core.add(GenerateRequest(request_id=name, prompt=prompt, params=params, client="alice").asking(hold))
    outcomes = []
    while core.has_work:
        outcomes += [outcome for event in core.step() for outcome in event.delta.records(HoldOutcome)]
    (outcome,) = outcomes
    assert outcome.refusal is None, outcome
    return outcome.tokens


def test_deleted_session_leaves_nothing_and_what_is_held_shows_no_text(folder_of, tmp_path, key_file):
    disk = {"kv_offloading_disk_size": SIZE, "kv_offloading_dir": str(tmp_path / "kv")}
    with engine(folder_of("llama"), num_gpu_blocks_override=128, **disk, kv_offloading_key_file=key_file) as core:
        granted(core, PROMPT, "the name of a session")
        flush(core)
        files = [file for file in (tmp_path / "kv").rglob("*") if file.is_file() and file.name != "lock"]
        assert files
        for file in files:
            data = file.read_bytes()
            assert b"alice" not in data and b"session" not in data
            assert bytes(PROMPT[:8]) not in data and array("i", PROMPT[:8]).tobytes() not in data
        core.apply(HoldsReleased("the name of a session", "alice"))
        core.step()
    left = [file for file in (tmp_path / "kv").rglob("*") if file.is_file() and file.name != "lock"]
    assert not left


def test_damaged_files_cost_time_only(folder_of, plainly, tmp_path, key_file):
    tiers = {"kv_offloading_disk_size": SIZE, "kv_offloading_dir": str(tmp_path / "kv")}
    tiers["kv_offloading_key_file"] = key_file
    with engine(folder_of("llama"), **tiers) as core:
        answer(core, PROMPT)
    files = sorted((tmp_path / "kv").glob("*/*/??/*"))
    assert len(files) == 40
    for number, file in enumerate(files):
        data = file.read_bytes()
        file.write_bytes(data[: number * 10] if number % 2 else data[:-1] + bytes([data[-1] ^ 1]))
    with engine(folder_of("llama"), **tiers) as core:
        assert answer(core, PROMPT) == (plainly("llama")[0], 0)
        stats = core.stats().record(KVOffloadStats)
        assert stats is not None and stats.tiers["disk"].errors == {"read": 37}  # of the prompt's 150 tokens
        core.scheduler.kv_cache.clear_cache()


def test_a_disk_that_hangs_costs_the_timeout_only(folder_of, plainly, tmp_path, key_file, monkeypatch):
    tiers = {"kv_offloading_disk_size": SIZE, "kv_offloading_dir": str(tmp_path / "kv")}
    tiers |= {"kv_offloading_key_file": key_file, "kv_offloading_timeout_s": 0.05}
    with engine(folder_of("llama"), **tiers) as core:
        answer(core, PROMPT)
    go_on = threading.Event()
    monkeypatch.setattr(DiskFolder, "read", lambda self, name: go_on.wait(60) and b"")
    with engine(folder_of("llama"), **tiers) as core:
        assert answer(core, PROMPT) == (plainly("llama")[0], 0)
        stats = core.stats().record(KVOffloadStats)
        assert stats is not None and stats.tiers["disk"].errors == {"deadline": 37}
        assert not core.scheduler.kv_cache.pool.pinned, "a block is still kept for the disk"
        go_on.set()


def test_a_key_that_is_nowhere_leaves_nothing_to_the_next_start(folder_of, tmp_path):
    tiers = {"kv_offloading_disk_size": SIZE, "kv_offloading_dir": str(tmp_path / "kv")}
    scopes = []
    for _ in range(2):
        with engine(folder_of("llama"), **tiers) as core:
            assert answer(core, PROMPT)[1] == 0
        scopes.append({file.parent.parent.parent.name for file in (tmp_path / "kv").glob("*/*/??/*")})
    assert [len(scope) for scope in scopes] == [1, 1] and scopes[0] != scopes[1]
    assert all(name.startswith(TEMPORARY_KEY) for scope in scopes for name in scope)


@pytest.mark.slow
def test_two_ranks_each_keep_their_part_and_hit_together(folder_of, plainly, tmp_path, key_file):
    tiers = {"kv_offloading_disk_size": SIZE, "kv_offloading_dir": str(tmp_path / "kv"), "kv_offloading_size": SIZE}
    config = config_of(folder_of("llama"), tensor_parallel_size=2, kv_offloading_key_file=key_file, **tiers)
    with RankPool() as pool:
        with pool.engine(config) as core:
            first, _ = answer(core, PROMPT)
            turn = next_turn(first)
            second, _ = answer(core, turn, "second turn")
            flush(core)
            core.scheduler.kv_cache.clear_cache()
            assert answer(core, turn, "from host memory") == (second, 164)
        # one part of one block is lost: the block is, on both ranks
        folders = {scope: sorted(scope.glob("*/??/*")) for scope in (tmp_path / "kv").iterdir()}
        assert [len(files) for files in folders.values()] == [44, 44]
        min(folders.popitem()[1], key=lambda file: file.stat().st_mtime).unlink()
        with pool.engine(config) as core:
            found, cached = answer(core, turn)
            assert found == second and 0 < cached < 164
            stats = core.stats().record(KVOffloadStats)
            assert stats is not None and stats.tiers["disk"].errors == {}


def test_two_ranks_write_parts_to_the_store_that_hit_together(folder_of, shared):
    config = config_of(folder_of("llama"), tensor_parallel_size=2, **shared)
    with RankPool() as pool:
        with pool.engine(config) as core:
            first, _ = answer(core, PROMPT)
            turn = next_turn(first)
            second, _ = answer(core, turn, "second turn")
            flush(core)
        parts = sorted(Path(shared["kv_offloading_store"]).glob("*/??/*"), key=lambda file: file.stat().st_mtime)
        assert len(parts) == 2 * 44 and {part.suffix for part in parts} == {".0", ".1"}
        parts[0].unlink()
        with pool.engine(config) as core:
            listed(core, 43)
            found, cached = answer(core, turn)
            assert found == second and 0 < cached < 164
            stats = core.stats().record(KVOffloadStats)
            assert stats is not None and stats.tiers["store"].errors == {}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_next", *FAMILIES[:2]])
def test_stages_each_keep_their_layers_in_every_tier_and_hit_together(
    folder_of, plainly, tmp_path, shared, family, ranks
):
    disk = {"kv_offloading_disk_size": SIZE, "kv_offloading_dir": str(tmp_path / "kv")}
    layout = {
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": ranks,
        "determinism": "strict",
        "num_gpu_blocks_override": BLOCKS[family],
    }
    with engine(folder_of(family), num_gpu_blocks_override=BLOCKS[family], determinism="strict") as core:
        first, _ = answer(core, PROMPT)
        core.apply(CacheCleared())
        turn = next_turn(first)
        expected, _ = answer(core, turn)
    pool = RankPool()
    try:
        with pool.engine(config_of(folder_of(family), **layout, **disk, **shared, kv_offloading_size=SIZE)) as core:
            assert answer(core, PROMPT)[0] == first
            flush(core)
            core.scheduler.kv_cache.clear_cache()
            assert answer(core, turn, "from host memory")[0] == expected
            stats = core.stats().record(KVOffloadStats)
            assert stats is not None and stats.hit_tokens >= 128 and not stats.tiers["host"].errors
            flush(core)
            blocks = core.stats().record(KVOffloadStats).tiers["store"].blocks
        folders = {scope: len(list(scope.glob("*/??/*"))) for scope in (tmp_path / "kv").iterdir()}
        assert list(folders.values()) == [blocks] * 2 * ranks
        for tier in ({**disk, "kv_offloading_key_file": shared["kv_offloading_key_file"]}, shared):
            with pool.engine(config_of(folder_of(family), **layout, **tier)) as core:
                listed(core, blocks)
                found, cached = answer(core, turn)
                assert found == expected and cached >= 128
                assert not any(tier.errors for tier in core.stats().record(KVOffloadStats).tiers.values())
    finally:
        pool.close()


def test_the_clusters_key_lets_an_engine_that_was_replaced_go_on(folder_of, plainly, tmp_path):
    config = config_of(
        folder_of("llama"), kv_offloading_disk_size=SIZE, kv_offloading_dir=str(tmp_path), kv_offloading_ttl_s=3600.0
    )
    key, cached = ClusterKey.generate(), []
    for _ in range(2):
        core = build_engine(config, TPGroup.single(key))
        found, hit = answer(core, PROMPT)
        core.close()
        assert found == plainly("llama")[0]
        cached.append(hit)
    assert cached == [0, 148]


def test_a_router_hears_of_what_is_in_a_tier_until_it_is_cleared(folder_of, tmp_path):
    tiers = {"kv_offloading_disk_size": SIZE, "kv_offloading_dir": str(tmp_path)}
    with engine(folder_of("llama"), **tiers) as core:
        publisher = KVEventPublisher("e", core.scheduler)
        publisher.subscribe(Subscribe(address="router"), 0.0)
        answer(core, PROMPT)
        flush(core)
        core.scheduler.kv_cache.clear_cache()
        ((snapshot, _),) = publisher.messages(1.0)
        assert len(snapshot.stored) == 40 * BLOCK_HASH_BYTES
        core.apply(CacheCleared())
        core.step()
        ((update, _),) = publisher.messages(2.0)
        assert len(update.removed) == 40 * BLOCK_HASH_BYTES


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kv_offloading_size": 0}, "kv_offloading_size"),
        ({"kv_offloading_disk_size": -1}, "kv_offloading_disk_size"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"kv_offloading_size": 1, "kv_offloading_key_file": "key"}, "kv_offloading_key_file"),
        ({"kv_offloading_store": "/kv"}, "kv_offloading_store_size"),
        ({"kv_offloading_store_size": 1}, "kv_offloading_store"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, field):
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**options)


def test_a_tier_smaller_than_a_block_is_refused(folder_of):
    with pytest.raises(ConfigError, match="kv_offloading_size"), engine(folder_of("llama"), kv_offloading_size=1e-7):
        pass


def test_a_store_without_a_key_that_others_have_is_refused(folder_of, tmp_path):
    store = {"kv_offloading_store": str(tmp_path), "kv_offloading_store_size": SIZE}
    with pytest.raises(ConfigError, match="kv_offloading_key_file"), engine(folder_of("llama"), **store):
        pass
