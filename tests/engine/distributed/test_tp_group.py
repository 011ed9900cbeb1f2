"""Ranks are threads of this process here; in test_tensor_parallel.py and test_rank_processes.py they are processes."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from engine.distributed.local.shared_memory import CHUNK_BYTES, SharedMemory
from engine.distributed.tp_group import ConnectedGroup, TPGroup
from engine.errors import EngineUnavailable, RendezvousTimeout, StartupError

T = TypeVar("T")
LIMIT_S = 60.0


def connect(size: int, **options) -> list[ConnectedGroup]:
    first = TPGroup.listen(size, device="cpu", **options)

    def join(rank: int) -> ConnectedGroup:
        if rank:
            return TPGroup.connect(rank, size, first.address, LIMIT_S, device="cpu", **options)
        first.join(LIMIT_S)
        return first

    return on_all(size, join)


def on_all(size: int, function: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, range(size)))


@pytest.fixture(scope="module", params=[2, 4])
def size(request) -> int:
    return request.param


@pytest.fixture(scope="module", params=[True, False], ids=["shared memory", "gloo"])
def groups(request, size):
    groups = connect(size, shared_memory=request.param)
    assert isinstance(groups[0]._collectives, SharedMemory) == request.param
    yield groups
    for group in groups:
        group.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (0, 4), (2, 3, 4)])
def test_all_reduce_gives_every_rank_the_sum(groups, size, dtype, shape):
    values = torch.arange(size * max(1, torch.Size(shape).numel())).to(dtype)
    addends = [values[rank : rank + torch.Size(shape).numel()].view(shape) for rank in range(size)]
    expected = torch.stack(addends).sum(0)
    for out in on_all(size, lambda rank: groups[rank].all_reduce(addends[rank].clone())):
        assert torch.equal(out, expected)


@pytest.mark.parametrize("numel", [CHUNK_BYTES // 4 - 1, CHUNK_BYTES // 4, 3 * CHUNK_BYTES // 4 + 7])
def test_tensors_larger_than_a_buffer_are_reduced_and_gathered_whole(groups, size, numel):
    addends = [torch.randn(1, numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    sums = on_all(size, lambda rank: groups[rank].all_reduce(addends[rank].clone()))
    torch.testing.assert_close(sums[0], sum(addends))
    assert all(torch.equal(out, sums[0]) for out in sums), "every rank must have the same bits"
    for out in on_all(size, lambda rank: groups[rank].all_gather(addends[rank])):
        assert torch.equal(out, torch.cat(addends, dim=-1))


def test_all_gather_concatenates_along_the_last_dimension_in_rank_order(groups, size):
    addends = [torch.full((2, 3, 2), float(rank)) for rank in range(size)]
    for out in on_all(size, lambda rank: groups[rank].all_gather(addends[rank])):
        assert torch.equal(out, torch.cat(addends, dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (2, 3, 4), (CHUNK_BYTES // 4 + 3,)])
def test_reduce_scatter_gives_each_rank_the_sum_of_its_part(groups, size, dtype, shape):
    count = size * torch.Size(shape).numel()
    addends = [(torch.arange(count) % 7 + rank).to(dtype).view(size, *shape) for rank in range(size)]
    for rank, out in enumerate(on_all(size, lambda rank: groups[rank].reduce_scatter(addends[rank]))):
        assert torch.equal(out, sum(addend[rank] for addend in addends))


def test_collectives_take_tensors_that_are_not_contiguous(groups, size):
    x = torch.arange(12.0).view(3, 4)
    for out in on_all(size, lambda rank: groups[rank].all_reduce(x.clone().T)):
        assert torch.equal(out, x.T * size)
    for out in on_all(size, lambda rank: groups[rank].all_gather(x.T[:, :2])):
        assert torch.equal(out, torch.cat([x.T[:, :2]] * size, dim=-1))


def test_many_collectives_in_a_row_do_not_mix(groups, size):
    def count(rank: int) -> list[float]:
        return [groups[rank].all_reduce(torch.tensor([float(i + rank)])).item() for i in range(300)]

    expected = [float(size * i + sum(range(size))) for i in range(300)]
    assert on_all(size, count) == [expected] * size


def test_every_rank_knows_what_the_others_say(groups, size):
    said = [f"rank {rank}" for rank in range(size)]
    assert on_all(size, lambda rank: groups[rank].exchange(said[rank])) == [said] * size


def test_every_rank_knows_how_many_share_its_machine(groups, size):
    assert [group.local_size for group in groups] == [size] * size


def test_a_single_rank_needs_nobody():
    group = TPGroup.single()
    x = torch.randn(3)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert torch.equal(group.reduce_scatter(x[None]), x)
    assert group.exchange("a") == ["a"]


def test_rank_0_names_the_ranks_that_did_not_come():
    first = TPGroup.listen(4, device="cpu")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(TPGroup.connect, 2, 4, first.address, LIMIT_S, device="cpu")
        first._open_store().wait(["exchange/1/2"])
        with pytest.raises(
            RendezvousTimeout, match=r"ranks 1, 3 of 4 did not join the rendezvous within 0 s"
        ) as raised:
            first.join(0.0)
        assert raised.value.args[0] == [1, 3]
        with pytest.raises(StartupError, match="1, 3"):  # because rank 0 said so
            late.result()
    first.close()


def test_a_rank_that_nobody_awaits_names_rank_0():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RendezvousTimeout, match=rf"rank 0 of 2 .* \(127\.0\.0\.1:{port}"):
        TPGroup.connect(1, 2, f"127.0.0.1:{port}", 0.2, device="cpu")


def test_a_rank_that_fails_while_it_loads_ends_the_start_of_the_others():
    groups = connect(2)

    def start(rank: int) -> None:
        with groups[rank].starting():
            if rank:
                raise ValueError("no such file")
            groups[rank].exchange("loaded")

    with pytest.raises(StartupError, match=r"^rank 1: no such file$"):
        on_all(2, start)


def test_ranks_that_were_told_different_sizes_do_not_start():
    first = TPGroup.listen(2, device="cpu")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(TPGroup.connect, 1, 3, first.address, LIMIT_S, device="cpu")
        with pytest.raises(StartupError, match="different group sizes"):
            first.join(LIMIT_S)
        with pytest.raises(StartupError):
            other.result()


def test_abort_ends_a_collective_that_waits_for_a_rank_which_does_not_come():
    groups = connect(2)
    timer = threading.Timer(0.1, groups[0].abort, ("rank 1 was sent home",))
    timer.start()
    with pytest.raises(EngineUnavailable, match="rank 1 was sent home"):
        groups[0].all_reduce(torch.ones(1))
    timer.join()
    with pytest.raises(EngineUnavailable, match="rank 1 was sent home"):
        groups[0].all_reduce(torch.ones(1))


def test_groups_listen_only_where_they_are_told_to():
    group = TPGroup.listen(2, host="127.0.0.1", device="cpu")
    port = int(group.address.rpartition(":")[2])
    table = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6") if os.path.exists("/proc/net"))
    assert re.findall(rf"(\w+):{port:04X} \w+:0000 0A", table) == ["0100007F"]


def named_shared_memory() -> list[str]:
    return [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]


def test_nothing_of_a_group_has_a_name_that_could_be_left_behind():
    for group in connect(2):  # opens what a process keeps
        group.close()
    del group
    before, memories = named_shared_memory(), num_memories()
    groups = connect(2)
    assert "memfd:manta-ranks" in Path("/proc/self/maps").read_text()
    assert named_shared_memory() == before
    for group in groups:
        group.close()
    del groups, group
    assert num_memories() <= memories


def num_memories() -> int:
    """How many of this process's descriptors are of memory that ranks share. Other threads open and close others."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # another thread has closed it
            found.append("memfd:manta-ranks" in os.readlink(f"/proc/self/fd/{name}"))
    return sum(found)
