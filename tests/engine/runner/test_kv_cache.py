import logging

import hypothesis.strategies as st
import psutil
import pytest
import torch
from hypothesis import given

from engine.config import EngineConfig
from engine.devices.free_memory import FreeMemory
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError, OutOfMemory
from engine.kv_transfer.transport import nixl
from engine.model.config import ModelConfig
from engine.model.kv_groups import KVCacheGroup, KVCacheSpec
from engine.options.handoff import HandoffConfig
from engine.runner import fp8_kv_cache, kv_cache
from engine.runner.kv_cache import GIB, GroupNeed, divide, total_bytes
from tests.engine.model.model_configs import tiny_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MODEL = tiny_config(num_layers=4, num_kv_heads=2, head_dim=64, max_position_embeddings=1024)
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4  # layers, K and V, KV heads, head_dim, float32
BLOCK_BYTES = 16 * TOKEN_BYTES
ONE = TPGroup.single()
PLENTY = FreeMemory(64 * GIB, "")


def choose(*, device: torch.device = CPU, free: float = 64 * GIB, dtype=torch.float32, model=MODEL, **options):
    """The blocks of the only group, and max_model_len."""
    limit = f"gpu_memory_utilization ({EngineConfig().gpu_memory_utilization})" if device == CUDA else "the box"
    room = FreeMemory(int(free), limit)
    config = EngineConfig(**options)
    (blocks,), longest = num_blocks(config, model, dtype, device, ONE, room)
    return blocks, longest


def num_blocks(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    tp: TPGroup,
    free: FreeMemory,
) -> tuple[list[int], int]:
    """The blocks of each group, and max_model_len."""
    needs = kv_cache.group_needs(config, 16, model, dtype, tp)
    return kv_cache.choose_num_blocks(config, needs, model.longest_sequence(config.max_model_len), device, free)


def test_num_blocks_is_taken_as_it_is():
    assert choose(num_gpu_blocks_override=100) == (100, 1024)


def test_a_few_blocks_shorten_the_longest_request_to_what_they_hold():
    assert choose(num_gpu_blocks_override=10) == (10, 160)


def test_a_size_in_memory_becomes_as_many_blocks_as_fit_into_it():
    blocks, longest = choose(kv_cache_memory_bytes=100 * BLOCK_BYTES + BLOCK_BYTES // 2)
    assert (blocks, longest) == (100, 1024)


def test_half_the_width_of_a_number_is_twice_the_blocks():
    assert choose(kv_cache_memory_bytes=100 * BLOCK_BYTES, dtype=torch.bfloat16)[0] == 200


@pytest.mark.parametrize(("ranks", "blocks"), [(1, 100), (2, 200), (4, 200)])
def test_ranks_that_share_the_kv_heads_hold_more_blocks_each(ranks, blocks):
    config = EngineConfig(kv_cache_memory_bytes=100 * BLOCK_BYTES)
    tp = TPGroup(rank=0, size=ranks)
    assert num_blocks(config, MODEL, torch.float32, CPU, tp, PLENTY)[0] == [blocks]


def test_never_more_blocks_than_all_sequences_at_full_length_could_use():
    assert choose(max_num_seqs=3) == (3 * 64, 1024)
    assert choose(max_num_seqs=3, max_model_len=100) == (3 * 7, 100)
    assert choose(max_num_seqs=3, kv_cache_memory_bytes=GIB) == (3 * 64, 1024)


def test_a_cpu_gives_its_default_size_but_at_most_half_of_its_free_memory():
    large = tiny_config(num_layers=32, num_kv_heads=32, head_dim=128, max_position_embeddings=32768)
    block_bytes = 32 * 2 * 32 * 128 * 16 * 4
    assert choose(model=large)[0] == kv_cache.CPU_DEFAULT_GIB * GIB // block_bytes
    assert choose(model=large, free=1 * GIB)[0] == GIB // 2 // block_bytes


@pytest.mark.parametrize("option", ["auto", "cuda"])
def test_a_gpu_gives_all_that_was_measured_as_free(option):
    large = tiny_config(num_layers=32, num_kv_heads=32, head_dim=128, max_position_embeddings=32768)
    config = EngineConfig(device=option)
    (blocks,), _ = num_blocks(config, large, torch.bfloat16, CUDA, ONE, FreeMemory(40 * GIB, ""))
    assert blocks == 40 * GIB // (32 * 2 * 32 * 128 * 16 * 2)


@pytest.mark.parametrize(("transport", "buffers"), [("auto", 8), ("nixl", 8), ("tcp", 0)])
def test_a_gpu_leaves_room_for_the_buffers_that_kv_arrives_in(transport, buffers):
    handoff = HandoffConfig(role="decode", transport=transport)
    large = tiny_config(num_layers=32, num_kv_heads=32, head_dim=128, max_position_embeddings=32768)
    free = 1000 * 32 * 2 * 32 * 128 * 16 * 2
    config = EngineConfig(handoff=handoff)
    needs = kv_cache.group_needs(config, 16, large, torch.bfloat16, ONE)
    reserved = nixl.reserved_bytes(config, [need.block_bytes for need in needs], CUDA)
    assert choose(device=CUDA, free=free - reserved, model=large, dtype=torch.bfloat16)[0] == 1000 - buffers


def test_a_request_of_max_model_len_that_fits_exactly_is_taken():
    assert choose(max_model_len=160, num_gpu_blocks_override=10) == (10, 160)
    assert choose(max_model_len=150, num_gpu_blocks_override=10) == (10, 150)


def test_more_than_the_models_own_context_is_refused():
    with pytest.raises(ConfigError) as caught:
        choose(max_model_len=1025)
    message = "configuration: max_model_len must be at most the model's own context (1024), got 1025"
    assert str(caught.value) == message


def test_num_blocks_that_memory_does_not_hold_are_refused_with_the_number_that_fits():
    with pytest.raises(OutOfMemory) as caught:
        choose(num_gpu_blocks_override=16384, free=0.25 * GIB)
    fit = GIB // 4 // BLOCK_BYTES
    message = "num_gpu_blocks_override=16384 needs 1.00 GiB of KV cache, but only 0.25 GiB are free (the box)"
    assert str(caught.value) == f"{message}; at most {fit} blocks fit"


def test_a_size_that_is_not_free_is_refused_with_what_is():
    with pytest.raises(OutOfMemory, match=r"kv_cache_memory_bytes=4831838208 does not fit: only 1\.25 GiB are free"):
        choose(kv_cache_memory_bytes=9 * GIB // 2, free=1.25 * GIB)


def test_num_blocks_too_few_for_max_model_len_are_refused_with_the_number_needed():
    with pytest.raises(OutOfMemory) as caught:
        choose(num_gpu_blocks_override=10, max_model_len=161)
    message = str(caught.value)
    assert (
        "holds 160 tokens (limited by num_gpu_blocks_override), but one request of 161 tokens needs 11 blocks"
        in message
    )
    assert "raise num_gpu_blocks_override to at least 11, or lower max_model_len to 160 or less" in message


def test_memory_too_small_for_max_model_len_is_refused_with_the_size_needed():
    with pytest.raises(OutOfMemory) as caught:
        choose(kv_cache_memory_bytes=10 * BLOCK_BYTES, max_model_len=1024)
    message = str(caught.value)
    assert f"holds 160 tokens (limited by kv_cache_memory_bytes ({10 * BLOCK_BYTES}))" in message
    assert "one request of 1024 tokens needs 64 blocks, 0.00391 GiB" in message
    assert (
        f"raise kv_cache_memory_bytes to at least {64 * BLOCK_BYTES}, or lower max_model_len to 160 or less" in message
    )


def test_the_size_that_a_refusal_asks_for_is_enough():
    assert choose(kv_cache_memory_bytes=64 * BLOCK_BYTES, max_model_len=1024) == (64, 1024)


def test_memory_for_nothing_at_all_is_refused_without_advice_that_cannot_help():
    with pytest.raises(OutOfMemory) as caught:
        choose(free=BLOCK_BYTES)
    assert "holds 0 tokens (limited by half of the free 0.00 GiB (the box))" in str(caught.value)
    assert "max_model_len" not in str(caught.value)


def test_a_machine_short_of_memory_is_the_reason_and_no_larger_size_the_advice():
    with pytest.raises(OutOfMemory) as caught:
        choose(free=10 * BLOCK_BYTES, max_model_len=1024)
    message = str(caught.value)
    assert "limited by half of the free 0.00 GiB (the box)" in message
    assert "only 0.00 GiB are free (the box): free 0.0033 GiB, or lower max_model_len to 80 or less" in message
    assert "raise" not in message
    with pytest.raises(OutOfMemory, match=f"raise kv_cache_memory_bytes to at least {64 * BLOCK_BYTES}"):
        choose(free=100 * BLOCK_BYTES, max_model_len=1024)  # half of which would not be enough


def test_the_log_says_how_much_fits_and_what_limits_it(caplog):
    with caplog.at_level(logging.INFO, logger="engine.runner.kv_cache"):
        choose(num_gpu_blocks_override=100)
    (record,) = caplog.records
    assert "1600 tokens fit (100 blocks of 16, 0.01 GiB), limited by num_gpu_blocks_override" in record.message
    assert "1.6 requests of max_model_len 1024" in record.message


def test_the_tensor_has_a_block_outermost_and_starts_as_zeros():
    cache = kv_cache.allocate(10, MODEL.kv_groups[0], 16, torch.bfloat16, CPU, TPGroup(rank=1, size=2))
    assert cache.shape == (10, 4, 2, 1, 16, 64)
    assert cache.dtype == torch.bfloat16
    assert not cache.any()
    assert cache[0].is_contiguous()


def test_memory_of_a_cpu_is_taken_block_by_block_as_blocks_are_written():
    process = psutil.Process()
    before = process.memory_info().rss
    cache = kv_cache.allocate(4 * 64 * 2**20 // BLOCK_BYTES, MODEL.kv_groups[0], 16, torch.float32, CPU, ONE)
    cache[7] = 1.0
    assert cache.nbytes >= 4 * 64 * 2**20 - BLOCK_BYTES
    assert process.memory_info().rss - before < 64 * 2**20
    assert (cache[7] == 1.0).all() and not cache[8].any()


def test_a_gpu_whose_memory_is_taken_already_holds_nothing_rather_than_less():
    with pytest.raises(OutOfMemory, match=r"holds 0 tokens \(limited by gpu_memory_utilization \(0\.9\)\)"):
        choose(device=CUDA, free=-3 * GIB)


@pytest.mark.parametrize(("capability", "taken"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_a_cache_in_float8_is_refused_by_a_sentence_on_a_gpu_without_float8(capability, taken, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = EngineConfig(kv_cache_dtype="fp8")
    if taken:
        assert fp8_kv_cache.cache_dtype(config, torch.bfloat16, CUDA) == torch.float8_e4m3fn
    else:
        with pytest.raises(ConfigError, match=r"kv_cache_dtype must be 'auto' on this GPU .* 8\.\d.*, got 'fp8'"):
            fp8_kv_cache.cache_dtype(config, torch.bfloat16, CUDA)


windows = st.lists(st.one_of(st.none(), st.integers(1, 600)), min_size=1, max_size=3)


@given(
    windows=windows.map(lambda found: sorted(found, key=lambda window: window is not None)),
    sizes=st.tuples(*[st.integers(1, 5000)] * 3),
    budget=st.integers(0, 10**8),
    longest=st.integers(1, 5000),
    seqs=st.integers(1, 64),
    step=st.integers(1, 2048),
)
def test_groups_share_a_budget_so_that_the_longest_sequence_fits_alone_if_it_can(
    windows, sizes, budget, longest, seqs, step
):
    needs = [
        GroupNeed(KVCacheGroup(KVCacheSpec(num_kv_heads=1, head_dim=1, window=window), (0,)), 16, size, step)
        for window, size in zip(windows, sizes, strict=False)
    ]
    blocks, alone = divide(budget, needs, longest, seqs), [need.of(longest) for need in needs]
    most = [need.most(longest, seqs) for need in needs]
    assert total_bytes(needs, blocks) <= budget
    assert all(0 <= have <= limit for have, limit in zip(blocks, most, strict=True))
    if total_bytes(needs, alone) <= budget:
        assert all(have >= need for have, need in zip(blocks, alone, strict=True))
    if len(needs) == 1:
        assert blocks == [min(most[0], budget // needs[0].block_bytes)]
    assert (
        blocks == most
        or budget - total_bytes(needs, blocks) < sum(need.block_bytes for need in needs)
        or (blocks[0] == most[0])
    ), "memory is left that nobody needs"


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, r"limited by half of the free 0\.00 GiB \(the box\)"),
        ({"device": CUDA}, r"limited by gpu_memory_utilization"),
        (
            {"kv_cache_memory_bytes": GIB},
            rf"kv_cache_memory_bytes={GIB} does not fit: only 0\.00 GiB are free \(the box\)",
        ),
        (
            {"num_gpu_blocks_override": 9},
            r"num_gpu_blocks_override=9 .* only 0\.00 GiB are free \(the box\); at most 1 blocks fit",
        ),
    ],
)
def test_a_cache_that_does_not_fit_names_what_limits_it(options, limit):
    with pytest.raises(OutOfMemory, match=limit):
        choose(free=BLOCK_BYTES * 1.5, max_model_len=100, **options)
