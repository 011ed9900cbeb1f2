"""Sums over memory that GPUs share, on CPUs: gloo stands for NCCL, and for torch's kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from engine.config import EngineConfig
from engine.distributed import tp_group
from engine.distributed.local import gpus
from engine.distributed.local.symmetric_memory import ONE_SHOT_BYTES, SymmetricMemory, open_symmetric_memory
from engine.distributed.process_group import Collectives, ProcessGroup
from engine.distributed.tp_group import ConnectedGroup
from engine.errors import StartupError
from engine.offline.llm import LLM
from placement.cuda_device import device_index
from tests.engine.distributed.test_tp_group import connect, on_all

SIZE = 2
SMALL_BUFFER = 2 * ONE_SHOT_BYTES


class FakeOps:
    """torch.ops.symm_mem: what its operations ask of their arguments (CUDASymmetricMemoryOps.cu), and the sums."""

    def __init__(self, plain: ProcessGroup, buffer: Tensor):
        self.plain, self.buffer, self.calls = plain, buffer, []

    def check(self, shared: Tensor, reduce_op: str, name: str) -> None:
        assert shared.data_ptr() == self.buffer.data_ptr() and shared.is_contiguous() and shared.nbytes % 16 == 0
        assert (reduce_op, name) == ("sum", "ranks")

    def one_shot_all_reduce_copy(self, shared: Tensor, x: Tensor, reduce_op: str, name: str) -> Tensor:
        self.check(shared, reduce_op, name)
        assert (x.shape, x.dtype) == (shared.shape, shared.dtype) and x.is_contiguous()
        self.calls.append("one shot")
        return self.plain.all_reduce(x.clone())

    def two_shot_all_reduce_(self, shared: Tensor, reduce_op: str, name: str) -> Tensor:
        self.check(shared, reduce_op, name)
        self.calls.append("two shots")
        return shared.copy_(self.plain.all_reduce(shared.clone()))

    def multimem_all_reduce_(self, shared: Tensor, reduce_op: str, name: str) -> Tensor:
        self.two_shot_all_reduce_(shared, reduce_op, name)
        self.calls[-1] = "multicast"
        return shared


class WrongOps(FakeOps):
    """Add up nothing on rank 1, in parts."""

    def two_shot_all_reduce_(self, shared: Tensor, reduce_op: str, name: str) -> Tensor:
        mine = shared.clone()
        super().two_shot_all_reduce_(shared, reduce_op, name)
        return shared.copy_(mine) if mine.float().sum() > shared.float().sum() / 2 else shared


class RefusingOps(FakeOps):
    """torch's operation for parts raises, as where a card or a size does not suit it."""

    def two_shot_all_reduce_(self, shared: Tensor, reduce_op: str, name: str) -> Tensor:
        raise RuntimeError("two_shot_all_reduce_: unsupported")


@pytest.fixture
def groups():
    groups = connect(SIZE, shared_memory=False)
    yield groups
    for group in groups:
        group._collectives = None
        group.close()


def shared_by(groups: list[ConnectedGroup], multicast: bool = False, ops: type[FakeOps] = FakeOps) -> list:
    found = []
    for group in groups:
        buffer = torch.empty(SMALL_BUFFER, dtype=torch.uint8)
        plain = group._collectives
        found.append(SymmetricMemory(plain, buffer, "ranks", multicast, ops(plain, buffer)))
    return found


@pytest.mark.parametrize("multicast", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype", "call"),
    [
        ((3, 8), torch.bfloat16, "one shot"),
        ((ONE_SHOT_BYTES // 4,), torch.float32, "one shot"),
        ((2, ONE_SHOT_BYTES // 4), torch.bfloat16, "one shot"),
        ((ONE_SHOT_BYTES // 4 + 4,), torch.float32, "parts"),
        ((SMALL_BUFFER // 8, 4), torch.bfloat16, "parts"),
        ((SMALL_BUFFER // 4 + 4,), torch.float32, None),  # larger than the buffer
        ((3,), torch.float32, None),  # 12 bytes
        ((0, 8), torch.float32, None),
        ((16,), torch.int64, None),
    ],
)
def test_each_tensor_is_summed_by_the_operation_for_its_size(groups, shape, dtype, call, multicast):
    shared = shared_by(groups, multicast)
    addends = [
        torch.arange(torch.Size(shape).numel()).view(shape).remainder(7).mul(rank + 1).to(dtype) for rank in range(2)
    ]
    for out in on_all(SIZE, lambda rank: shared[rank].all_reduce(addends[rank].clone())):
        assert torch.equal(out, addends[0] * 3) and out.shape == shape
    name = {"parts": "multicast" if multicast else "two shots"}.get(call, call)
    assert shared[0]._ops.calls == ([] if name is None else [name])


def test_columns_of_a_wider_tensor_are_summed(groups):
    shared = shared_by(groups)
    wide = torch.randn(4, 24)
    for out in on_all(SIZE, lambda rank: shared[rank].all_reduce(wide[:, 8:16])):
        assert torch.equal(out, wide[:, 8:16] * 2)


def start(groups: list[ConnectedGroup], open_shared: Callable[[int], SymmetricMemory], monkeypatch) -> list:
    monkeypatch.setattr(SymmetricMemory, "release", lambda self: None)
    monkeypatch.setattr(ProcessGroup, "close", lambda self: pytest.fail("the ranks go on with it"))

    def share(rank: int) -> Collectives:
        return gpus.share_if_all_can(groups[rank], groups[rank]._collectives, partial(open_shared, rank))

    return on_all(SIZE, share)


def test_ranks_share_memory_if_its_sums_are_those_of_nccl(groups, monkeypatch):
    shared = shared_by(groups)
    assert start(groups, lambda rank: shared[rank], monkeypatch) == shared


def test_ranks_use_nccl_alone_if_one_of_them_cannot_map_the_others_memory(groups, monkeypatch, caplog):
    shared = shared_by(groups)

    def open_shared(rank):
        if rank == 1:
            raise RuntimeError("no NVLink")
        return shared[rank]

    assert start(groups, open_shared, monkeypatch) == [group._collectives for group in groups]
    assert not shared[0]._ops.calls, "a kernel would wait for rank 1 for ever"
    assert "use no shared memory, because it is unavailable: no NVLink" in caplog.text


@pytest.mark.parametrize(("visible", "share"), [("0,1", True), (None, False)], ids=["all", "their own only"])
def test_ranks_of_a_machine_share_memory_if_each_sees_all_gpus(groups, monkeypatch, caplog, visible, share):
    """The rendezvous refuses two ranks of one host with one index, as torch's does. Ray shows an actor only its own
    GPU, whose index is then 0, unless it is told not to (placement/cuda_device.py)."""
    shared, indices, met = shared_by(groups), [0] * SIZE, threading.Barrier(SIZE, timeout=60)

    def rendezvous(rank):
        indices[rank] = device_index(str(rank), visible or str(rank))
        met.wait()
        if len(set(indices)) < SIZE:
            raise RuntimeError("detected allocations from overlapping devices from different ranks")
        return shared[rank]

    expected = shared if share else [group._collectives for group in groups]
    assert start(groups, rendezvous, monkeypatch) == expected
    assert ("overlapping devices" in caplog.text) != share


def test_ranks_use_nccl_alone_if_a_sum_is_wrong_on_one_of_them(groups, monkeypatch, caplog):
    shared = shared_by(groups, ops=WrongOps)
    found = start(groups, lambda rank: shared[rank], monkeypatch)
    assert found == [group._collectives for group in groups]
    assert "is wrong" in caplog.text


def test_ranks_use_nccl_alone_if_torch_refuses_a_sum(groups, monkeypatch, caplog):
    shared = shared_by(groups, ops=RefusingOps)
    found = start(groups, lambda rank: shared[rank], monkeypatch)
    assert found == [group._collectives for group in groups]
    assert "failed: two_shot_all_reduce_: unsupported" in caplog.text


class LonelySums:
    """Symmetric memory whose first sum waits for a rank that has died."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def check(self, rank: int) -> str:
        self.ended.wait()
        return ""


@pytest.fixture
def lonely_sums():
    sums = LonelySums()
    yield sums
    sums.ended.set()


def test_a_rank_that_fails_in_the_first_sums_ends_the_start_of_those_that_wait_for_it(groups, lonely_sums):
    with pytest.raises(MemoryError), groups[1].starting():
        raise MemoryError("no memory")
    with pytest.raises(StartupError, match="rank 1: no memory"):
        gpus.check_in_thread(groups[0], lonely_sums)


def test_a_rank_that_dies_in_the_first_sums_ends_the_start_of_rank_0(groups, lonely_sums):
    groups[0].abort("rank 1 has died")
    with pytest.raises(StartupError, match="rank 1 has died"):
        gpus.check_in_thread(groups[0], lonely_sums)


def test_the_first_sums_have_a_deadline(groups, lonely_sums, monkeypatch):
    monkeypatch.setattr(gpus, "COLLECTIVE_TIMEOUT_S", 0.0)
    with pytest.raises(StartupError, match="had not ended after 0 s; set disable_custom_all_reduce to avoid it"):
        gpus.check_in_thread(groups[0], lonely_sums)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such memory")
def test_torch_without_gpus_says_so_and_keeps_no_group(groups, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    plain = groups[0]._collectives
    with pytest.raises(RuntimeError, match="SymmetricMemory"):
        open_symmetric_memory(plain, groups[0].store("test"), 0, SIZE, "manta test")
    with pytest.raises(RuntimeError):
        c10d._resolve_process_group("manta test")


def test_torch_has_the_operations_with_these_arguments():
    for name in ("one_shot_all_reduce_copy", "two_shot_all_reduce_", "multimem_all_reduce_"):
        arguments = [argument.name for argument in getattr(torch.ops.symm_mem, name).default._schema.arguments]
        first = ["symm_buffer", "local_input"] if name.endswith("copy") else ["input"]
        assert arguments == [*first, "reduce_op", "group_name"]


def test_ranks_of_an_engine_share_no_memory_if_they_are_told_so(monkeypatch):
    told = []

    def listen(size: int, **options) -> None:
        told.append(options["shared_memory"])
        raise InterruptedError

    monkeypatch.setattr(tp_group.TPGroup, "listen", listen)
    for disabled in (False, True):
        llm = LLM.__new__(LLM)
        llm.config = EngineConfig(model="none", tensor_parallel_size=2, disable_custom_all_reduce=disabled)
        with pytest.raises(InterruptedError):
            llm._start()
    assert told == [True, False]
