import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.kv_transfer.transport.head_map import HeadPart, HeadShard, parts
from engine.model.layers.linear import QKVLinear
from engine.model.shard import ShardPlan
from tests.engine.model.model_configs import tiny_config

SIZES = (1, 2, 4, 8)


def divides(kv_heads: int, size: int) -> bool:
    return kv_heads % size == 0 or size % kv_heads == 0


SHARDINGS = [(kv_heads, size) for kv_heads in range(1, 9) for size in SIZES if divides(kv_heads, size)]
PAIRS = [(kv_heads, size, other) for kv_heads, size in SHARDINGS for other in SIZES if divides(kv_heads, other)]


def assert_reads_each_head_once(kv_heads: int, source_size: int, shard: HeadShard) -> None:
    found = []
    for part in parts(shard, source_size):
        holder = HeadShard(kv_heads, part.source_rank, source_size)
        assert part.count > 0 and 0 <= part.remote_start <= holder.stop - holder.start - part.count
        for i in range(part.count):
            assert holder.start + part.remote_start + i == shard.start + part.local_start + i
            found.append(part.local_start + i)
    assert found == list(range(shard.stop - shard.start))


@pytest.mark.parametrize(("kv_heads", "size"), SHARDINGS)
def test_a_shard_holds_the_heads_whose_weights_the_layers_load(kv_heads: int, size: int) -> None:
    config = tiny_config(num_heads=8 * kv_heads, num_kv_heads=kv_heads)
    for rank in range(size):
        weight, _ = QKVLinear(config, ShardPlan(TPGroup(rank, size))).shards()["k.weight"]
        shard = HeadShard(kv_heads, rank, size)
        assert shard.start * config.head_dim == weight.start
        assert (shard.stop - shard.start) * config.head_dim == weight.size
        assert shard.stop - shard.start == config.kv_heads_per_rank(size)


@pytest.mark.parametrize(("kv_heads", "source", "reader"), PAIRS)
def test_every_head_of_every_rank_is_read_once_from_a_rank_that_holds_it(
    kv_heads: int, source: int, reader: int
) -> None:
    for rank in range(reader):
        assert_reads_each_head_once(kv_heads, source, HeadShard(kv_heads, rank, reader))


@given(st.data())
def test_any_sizes_that_divide_are_mapped(data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 128))
    sizes = st.integers(1, 256).filter(lambda size: divides(kv_heads, size))
    source, reader = data.draw(sizes), data.draw(sizes)
    rank = data.draw(st.integers(0, reader - 1))
    assert_reads_each_head_once(kv_heads, source, HeadShard(kv_heads, rank, reader))


@pytest.mark.parametrize(("kv_heads", "size"), SHARDINGS)
def test_engines_of_equal_size_read_rank_from_rank(kv_heads: int, size: int) -> None:
    for rank in range(size):
        shard = HeadShard(kv_heads, rank, size)
        assert parts(shard, size) == [HeadPart(rank, 0, 0, shard.stop - shard.start)]


@pytest.mark.parametrize(("kv_heads", "source", "reader"), PAIRS)
def test_copies_of_a_head_are_read_evenly(kv_heads: int, source: int, reader: int) -> None:
    counts = [0] * source
    for rank in range(reader):
        for part in parts(HeadShard(kv_heads, rank, reader), source):
            counts[part.source_rank] += part.count
    reads = max(kv_heads, reader)
    assert sum(counts) == reads
    assert max(counts) == max(1, reads // source)


@pytest.mark.parametrize(("kv_heads", "size"), [(3, 2), (6, 4), (5, 8)])
def test_heads_that_do_not_divide_are_refused_as_in_the_model(kv_heads: int, size: int) -> None:
    with pytest.raises(ConfigError):
        tiny_config(num_heads=size * kv_heads, num_kv_heads=kv_heads).kv_heads_per_rank(size)
    with pytest.raises(ValueError, match=f"{kv_heads} KV heads cannot be divided among {size} ranks"):
        HeadShard(kv_heads, 0, size)
    with pytest.raises(ValueError, match="cannot be divided among"):
        parts(HeadShard(kv_heads, 0, 1), size)
