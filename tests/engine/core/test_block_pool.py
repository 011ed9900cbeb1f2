import pytest

from engine.core.block_pool import BlockPool
from engine.serving.hash_changes import HashChanges
from engine.wire.block_hash import block_hash, root_hash


def chain(*blocks: list[int], salt: str = "", extra_keys: tuple[str, ...] = ()) -> list[bytes]:
    hashes = [root_hash(salt, extra_keys)]
    for tokens in blocks:
        hashes.append(block_hash(hashes[-1], tokens))
    return hashes[1:]


def cache(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    """A sequence of full blocks that was computed and has ended."""
    blocks = pool.allocate(len(hashes))
    assert blocks is not None
    for block, hash in zip(blocks, hashes, strict=True):
        assert pool.cache_block(block, hash) == block
    pool.release(blocks)
    pool.check()
    return blocks


def observe(pool: BlockPool) -> HashChanges:
    """What changes from now on."""
    changes = HashChanges()
    pool.observers.append(changes)
    return changes


def test_taking_more_than_there_is_changes_nothing():
    pool = BlockPool(4, 16)
    held = pool.allocate(3)
    assert pool.allocate(2) is None
    assert (pool.num_free, pool.num_used) == (1, 3)
    pool.release(held)
    assert pool.num_free == 4
    pool.check()


def test_released_blocks_with_a_name_can_be_matched_again():
    pool = BlockPool(4, 2)
    hashes = chain([1, 2], [3, 4])
    blocks = cache(pool, hashes)
    assert pool.match(hashes) == blocks
    assert pool.match(chain([1, 2], [9, 9])) == blocks[:1]
    assert pool.match(chain([9, 9], [3, 4])) == []


def test_a_block_is_named_by_all_tokens_before_it():
    assert chain([1, 2], [3, 4])[1] != chain([2, 1], [3, 4])[1]
    assert chain([1, 2])[0] != chain([1, 2], salt="tenant")[0]
    assert chain([1, 2], salt="ab", extra_keys=("c",))[0] != chain([1, 2], salt="a", extra_keys=("bc",))[0]


def test_eviction_eats_a_chain_from_its_tail():
    pool = BlockPool(4, 2)
    hashes = chain([1, 2], [3, 4], [5, 6])
    blocks = cache(pool, hashes)
    assert pool.allocate(2) is not None  # one free block, then the tail
    assert pool.match(hashes) == blocks[:2]
    pool.check()


def test_the_least_recently_used_chain_is_evicted_first():
    pool = BlockPool(4, 2)
    old, new = chain([1, 2], [3, 4]), chain([5, 6], [7, 8])
    cache(pool, old)
    cache(pool, new)
    held = pool.reserve(pool.match(old), 0)  # used again
    pool.release(held)
    pool.allocate(2)
    assert len(pool.match(old)) == 2
    assert pool.match(new) == []


def test_reserving_never_evicts_what_was_just_matched():
    pool = BlockPool(3, 2)
    hashes = chain([1, 2], [3, 4])
    blocks = cache(pool, hashes)
    matched = pool.match(hashes)
    assert pool.reserve(matched, 2) is None  # only one block is left beside the matched two
    assert pool.match(hashes) == blocks
    held = pool.reserve(matched, 1)
    assert held[:2] == blocks and len(set(held)) == 3
    pool.check()


def test_reserving_leaves_the_spare_blocks_asked_for():
    pool = BlockPool(4, 2)
    assert pool.reserve([], 3, watermark=2) is None
    assert pool.reserve([], 3, watermark=1) is not None


def test_a_duplicate_prefix_is_given_up_for_the_first_copy():
    pool = BlockPool(4, 2)
    (hash,) = chain([1, 2])
    first, second = pool.allocate(1) + pool.allocate(1)
    assert pool.cache_block(first, hash) == first
    assert pool.cache_block(second, hash) == first
    assert (pool.num_used, pool.num_free) == (1, 3)
    pool.release([first])
    pool.check()
    assert pool.num_used == 1, "both sequences hold the one copy"
    pool.release([first])
    assert pool.num_cached == 1


def test_a_duplicate_of_an_idle_cached_block_takes_it_back_into_use():
    pool = BlockPool(4, 2)
    hashes = chain([1, 2])
    (old,) = cache(pool, hashes)
    (own,) = pool.allocate(1)
    assert pool.cache_block(own, hashes[0]) == old
    assert (pool.num_used, pool.num_cached) == (1, 0)
    pool.check()


def test_without_prefix_caching_nothing_is_kept():
    pool = BlockPool(4, 2, enable_prefix_caching=False)
    blocks = pool.allocate(2)
    pool.cache_block(blocks[0], chain([1, 2])[0])
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached) == (4, 0)


def test_clearing_the_cache_leaves_nothing_to_match_and_blocks_in_use_to_their_holders():
    pool = BlockPool(4, 2)
    hashes = chain([1, 2], [3, 4])
    cache(pool, hashes)
    changes = observe(pool)
    held = pool.reserve(pool.match(hashes[:1]), 0)
    pool.clear_cache()
    pool.check()
    assert (pool.match(hashes), pool.num_used, pool.num_cached) == ([], 1, 0)
    assert sorted(changes.take()[1]) == sorted(hashes)
    again = pool.allocate(1)
    assert pool.cache_block(again[0], hashes[0]) == again[0], "a new copy takes the place of the old one"
    pool.release(held)
    pool.check()
    assert pool.match(hashes) == again


def test_releasing_twice_is_our_own_error():
    pool = BlockPool(2, 2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


def test_changes_are_names_that_came_and_went_since_they_were_asked_for():
    pool = BlockPool(2, 2)
    cache(pool, chain([1, 2]))
    changes = observe(pool)
    assert not changes, "it came before"
    first, second, third = chain([1, 2]) + chain([3, 4]) + chain([5, 6])
    cache(pool, [second])
    assert changes
    assert changes.take() == ([second], [])
    cache(pool, [third])
    pool.clear_cache()
    stored, removed = changes.take()
    assert (stored, sorted(removed)) == ([], sorted([first, second, third])), "what came and went is gone"
    assert not changes
    assert pool.block_hashes() == []


def test_blocks_that_are_not_trusted_are_not_matched_and_are_named_once_to_whoever_gets_them():
    pool = BlockPool(4, 2)
    hashes = chain([1, 2], [3, 4], [5, 6])
    shared = cache(pool, hashes)[0]
    changes = observe(pool)
    other, blocks = pool.reserve(pool.match(hashes[:1]), 0), pool.reserve(pool.match(hashes[:2]), 1)
    pool.invalidate(blocks)
    pool.check()
    assert pool.match(hashes) == [shared] == other, "of what another holds, that one will find out"
    assert changes.take() == ([], hashes[1:2])
    pool.release(blocks)
    assert sorted(pool.take_invalid(pool.allocate(3))) == sorted(blocks[1:])
    assert pool.take_invalid(blocks) == []
    pool.check()


def test_unverified_blocks_are_matched_and_are_named_once_to_whoever_gets_them():
    pool = BlockPool(3, 2)
    hashes = chain([1, 2], [3, 4])
    blocks = pool.reserve(cache(pool, hashes), 0)
    pool.mark_unverified(blocks)
    pool.check()
    assert pool.match(hashes) == blocks
    pool.release(blocks)
    assert sorted(pool.take_invalid(pool.allocate(3))) == sorted(blocks)
    assert pool.take_invalid(blocks) == []
    pool.check()


def test_a_block_that_was_filled_again_is_trusted():
    pool = BlockPool(2, 2)
    blocks = pool.allocate(1)
    pool.invalidate(blocks)
    assert pool.cache_block(*blocks, *chain([1, 2])) == blocks[0]
    assert pool.take_invalid(blocks) == []
    pool.check()
