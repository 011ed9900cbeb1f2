from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.block_pool import BlockPool
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.model.kv_groups import KVCacheSpec
from engine.parts.kv_groups.kv_cache_groups import kv_cache_of
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams

SIZE, BLOCKS = 4, 10
WINDOWS = (None, 8, 5)  # of which the second spans two blocks, or three where it begins inside one


def make(windows: tuple[int | None, ...] = WINDOWS, num_blocks: int = 2 * BLOCKS) -> KVCacheManager:
    specs = [KVCacheSpec(num_kv_heads=1, head_dim=8, window=window) for window in windows]
    pools = [BlockPool(num_blocks, SIZE, null_block=window is not None) for window in windows]
    return kv_cache_of(specs, pools, step_tokens=SIZE * BLOCKS)[0]


def request(tokens: int = SIZE * BLOCKS + 1) -> Request:
    message = GenerateRequest(request_id="a", prompt=list(range(tokens)), params=SamplingParams(max_tokens=8))
    return Request.create(message, 1000, 0.0)


def cache(pool: BlockPool, hashes: list[bytes], kept: set[int]) -> None:
    """Leave some blocks of a sequence in the cache of one group."""
    for index in kept:
        blocks = pool.allocate(1)
        assert blocks is not None
        pool.cache_block(blocks[0], hashes[index])
        pool.release(blocks)


def needed(count: int, window: int | None) -> set[int]:
    """Blocks with a token that the one after `count` blocks sees, the slow way."""
    position = count * SIZE
    return {t // SIZE for t in range(position) if window is None or position - t < window}


def match(kv_cache: KVCacheManager, wanted: Request) -> int:
    return kv_cache.match(wanted, lambda request, count, size: count)


@given(st.tuples(*[st.sets(st.integers(0, BLOCKS - 1))] * len(WINDOWS)))
def test_a_hit_is_the_longest_prefix_of_which_every_group_has_what_it_needs(kept):
    kv_cache, wanted = make(), request()
    hashes = wanted.hashes(BLOCKS, SIZE)
    for pool, some in zip(kv_cache.pools, kept, strict=True):
        cache(pool, hashes, some)
    possible = [
        count
        for count in range(BLOCKS + 1)
        if all(needed(count, window) <= some for window, some in zip(WINDOWS, kept, strict=True))
    ]
    assert match(kv_cache, wanted) == max(possible)


@pytest.mark.parametrize("count", range(BLOCKS + 1))
def test_a_prefix_of_any_length_that_all_groups_have_is_a_hit_as_long(count):
    kv_cache, wanted = make(), request()
    for pool in kv_cache.pools:
        cache(pool, wanted.hashes(BLOCKS, SIZE), set(range(count)))
    assert match(kv_cache, wanted) == count


@pytest.mark.parametrize("group", range(len(WINDOWS)))
@pytest.mark.parametrize("missing", range(BLOCKS))
def test_a_block_that_one_group_lacks_shortens_the_hit_for_all_unless_it_is_behind_the_window(group, missing):
    kv_cache, wanted = make(), request()
    for i, pool in enumerate(kv_cache.pools):
        cache(pool, wanted.hashes(BLOCKS, SIZE), set(range(BLOCKS)) - ({missing} if i == group else set()))
    assert match(kv_cache, wanted) == (missing if missing in needed(BLOCKS, WINDOWS[group]) else BLOCKS)


def test_what_may_be_used_of_a_hit_is_asked_again_after_a_group_has_shortened_it():
    kv_cache, wanted = make(), request()
    hashes = wanted.hashes(BLOCKS, SIZE)
    for pool, some in zip(kv_cache.pools, (10, 10, 7), strict=True):
        cache(pool, hashes, set(range(some)))
    asked = []

    def odd(request: Request, count: int, size: int) -> int:
        asked.append(count)
        return count - (count + 1) % 2

    assert kv_cache.match(wanted, odd) == 7
    assert asked[0] == 10 and asked[-1] == 7


def test_a_request_gets_blocks_of_all_groups_or_of_none():
    kv_cache, wanted = make(num_blocks=BLOCKS + 1), request()
    last = kv_cache.pools[-1]
    held = last.allocate(last.num_available)
    before = [pool.num_available for pool in kv_cache.pools]
    assert not kv_cache.reserve(wanted, 0, 0, len(wanted.tokens), watermark=0)
    assert [pool.num_available for pool in kv_cache.pools] == before and not wanted.tables
    last.release(held)
    assert kv_cache.reserve(wanted, 0, 0, len(wanted.tokens), watermark=0)
    assert len(wanted.tables) == len(WINDOWS)
    kv_cache.check([wanted])


def test_what_a_group_holds_of_a_hit_is_not_evicted_for_the_new_blocks_of_another():
    kv_cache, wanted = make(num_blocks=BLOCKS + 1), request()
    for pool in kv_cache.pools:
        cache(pool, wanted.hashes(BLOCKS, SIZE), set(range(BLOCKS)))
    assert kv_cache.reserve(wanted, BLOCKS, SIZE * BLOCKS, len(wanted.tokens), watermark=0)
    tails = [table.blocks[table.num_released : BLOCKS] for table in wanted.tables]
    hashes = wanted.hashes(BLOCKS, SIZE)
    for pool, window, tail in zip(kv_cache.pools, WINDOWS, tails, strict=True):
        assert pool.match([hashes[index] for index in sorted(needed(BLOCKS, window))]) == tail
    kv_cache.check([wanted])


def test_all_groups_together_have_every_block_again_after_a_request_has_ended():
    kv_cache, wanted = make(), request()
    assert kv_cache.reserve(wanted, 0, 0, len(wanted.tokens), watermark=0)
    for computed in range(1, len(wanted.tokens) + 1):
        assert kv_cache.grow(wanted, computed)
        kv_cache.cache_blocks(wanted, computed)
        kv_cache.check([wanted])
        pools = kv_cache.pools
        held = sum(len(table.held) for table in wanted.tables)
        assert sum(pool.num_used for pool in pools) == held
        assert sum(pool.num_free + pool.num_cached for pool in pools) == len(pools) * 2 * BLOCKS - held
    kv_cache.release(wanted)
    kv_cache.check([])
    assert [pool.num_used for pool in kv_cache.pools] == [0] * len(WINDOWS)
    assert match(kv_cache, request()) == BLOCKS, "what was given back on the way is still a hit"


def test_changes_of_block_tables_are_taken_once_group_by_group():
    kv_cache, wanted = make(), request()
    assert kv_cache.reserve(wanted, 0, 0, SIZE, watermark=0)
    wanted.slot = 3
    kv_cache.add_sequence(wanted)
    assert kv_cache.grow(wanted, 2 * SIZE)
    changes = [(change.group, change.slot, change.index) for change in kv_cache.take_changes()]
    assert changes == [(group, 3, index) for group in range(len(WINDOWS)) for index in (0, 1)]
    assert kv_cache.take_changes() == []
