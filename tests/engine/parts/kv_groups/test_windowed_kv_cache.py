from __future__ import annotations

import pytest

from engine.core.block_pool import BlockPool
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import BlockTable, Request
from engine.model.kv_groups import KVCacheSpec
from engine.parts.kv_groups.windowed_kv_cache import WindowedKVCacheManager, WindowRoom
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams

SIZE, STEP = 4, 8


def make(window: int, num_blocks: int = 40, caching: bool = True) -> WindowedKVCacheManager:
    pool = BlockPool(num_blocks, SIZE, caching, null_block=True)
    return WindowedKVCacheManager(pool, KVCacheSpec(num_kv_heads=1, head_dim=8, window=window), STEP)


def request(tokens: int = 41) -> Request:
    message = GenerateRequest(request_id="a", prompt=list(range(tokens)), params=SamplingParams(max_tokens=8))
    return Request.create(message, 1000, 0.0)


def started(manager: WindowedKVCacheManager, tokens: int = 41) -> Request:
    new = request(tokens)
    assert KVCacheManager([manager]).reserve(new, 0, 0, tokens, watermark=0)
    return new


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("window", [1, 4, 5, 8, 9, 100])
def test_a_commit_gives_back_what_is_behind_the_window_and_never_what_is_in_it(window, caching):
    manager = make(window, caching=caching)
    running = started(manager)
    for computed in range(1, 42):
        assert manager.grow(running, computed)
        manager.cache_blocks(running, computed)
        manager.check([running])
        blocks = running.tables[0].blocks
        seen = {t // SIZE for t in range(max(0, computed - window + 1), computed)}
        assert all(blocks[index] for index in seen), f"the token at {computed} sees what was given back"
        behind = max(0, computed - window + 1) // SIZE
        assert blocks[:behind] == [0] * behind, "a block that no token to come sees is still held"


def test_what_was_given_back_is_a_null_block_in_the_table_of_the_runner():
    manager = make(window=5)
    running = started(manager)
    running.slot = 2
    manager.add_sequence(running)
    manager.changes.clear()
    for computed in range(1, 13):
        manager.cache_blocks(running, computed)
    nulls = [(change.index, change.blocks) for change in manager.changes]
    assert nulls == [(0, [0]), (1, [0])], "8 and 12 tokens: those from 4 and from 8 on are seen"


@pytest.mark.parametrize("window", [4, 5, 6, 9, 13])
@pytest.mark.parametrize("count", range(11))
def test_a_hit_needs_the_blocks_of_its_window_only(window, count):
    manager, wanted = make(window), request()
    hashes = wanted.hashes(10, SIZE)
    tail = sorted({t // SIZE for t in range(max(0, count * SIZE - window + 1), count * SIZE)})
    for index in tail:
        (block,) = manager.pool.allocate(1)
        manager.pool.cache_block(block, hashes[index])
        manager.pool.release([block])
    assert manager.longest_hit(hashes[:count]) == count
    for index in tail:
        assert manager.longest_hit(hashes[:index]) <= index
    assert KVCacheManager([manager]).reserve(wanted, count, count * SIZE, 41, watermark=0)
    table = wanted.tables[0]
    assert table.num_released == (tail[0] if tail else count)
    assert [manager.pool.has(hashes[i]) for i in range(table.num_released, count)] == [True] * len(tail)
    manager.check([wanted])


def test_a_prompt_holds_no_more_than_its_window_and_a_step_however_long_it_is():
    manager = make(window=8, num_blocks=6)
    running = started(manager, tokens=400)
    most = 0
    for computed in range(STEP, 401, STEP):
        assert manager.grow(running, computed), "it runs in six blocks"
        most = max(most, len(running.tables[0].held))
        manager.cache_blocks(running, computed)
        manager.check([running])
    assert most <= 6


def test_a_step_is_as_long_as_there_are_blocks_to_spare():
    manager = make(window=8, num_blocks=10)
    room = WindowRoom(manager, least=3)
    room.start_step(sequences=2)
    new = request(400)
    new.tables = [BlockTable([], 0, num_released=1, keeps_all=False)]
    new.capacity, new.computed = 12, 8
    assert room.up_to(new, 4) == 4, "it has these blocks"
    assert room.up_to(new, 400) == 4 + 8 * SIZE, "two of the ten are for those that may need another"
    manager.pool.allocate(9)
    new.computed = 12
    assert room.up_to(new, 400) == 3
    new.computed = new.capacity = 16
    assert room.up_to(new, 400) == 0, "steps in flight release a second block when they end"
