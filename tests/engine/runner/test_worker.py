"""Two ranks as threads, whose steps are graphs with collectives inside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from engine.assembly.build import build_engine
from engine.assembly.open_worker import open_worker
from engine.config import EngineConfig
from engine.distributed import tp_group
from engine.distributed.tp_group import TPGroup
from engine.errors import EngineUnavailable
from engine.model.ops import dispatch
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from tests.late_device import CapturedGraph, LateDevice
from tests.models import make_model

LIMIT_S = 60.0
PATIENCE_S = 3.0  # far more than an abort takes here


class FakeNccl:
    """Gloo that is as hard to end as NCCL: its abort, and its end, wait until the graphs are gone that hold one of its
    collectives (`commDestroySync` in NCCL's init.cc waits for `localPersistentRefs`)."""

    def __init__(self, gloo: Any, device: LateDevice, log: list[str]):
        self._gloo, self._device, self._log = gloo, device, log
        self._graphs: list[CapturedGraph] = []

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> dist.Work:
        if self._device.capturing is not None:
            self._graphs.append(self._device.capturing)
        return self._gloo.allreduce(tensors, options)

    def _allgather_base(self, out: Tensor, x: Tensor, options: Any) -> dist.Work:
        return self._gloo._allgather_base(out, x, options)

    def abort(self) -> None:
        waited = threading.Event()
        for _ in range(100):
            if not self._holds():
                return
            waited.wait(PATIENCE_S / 100)
        self._log.append("abort hangs")

    def __del__(self) -> None:
        self._log.append("end hangs" if self._holds() else "ended")

    def _holds(self) -> bool:
        return any(graph.alive for graph in self._graphs)


class Ranks:
    """An engine of two ranks."""

    def __init__(self, folder: str, log: list[str]):
        self.log = log
        self.devices = [LateDevice(), LateDevice()]
        config = EngineConfig(
            model=folder, tensor_parallel_size=2, dtype="float32", block_size=4, max_num_seqs=4,
            num_gpu_blocks_override=64,
            max_num_batched_tokens=16, num_threads=1,
        )  # fmt: skip
        group = TPGroup.listen(2, device="cpu", shared_memory=False)
        self._pool = ThreadPoolExecutor(1)
        self.followed: Future[None] = self._pool.submit(self._follow, config, group.address)
        group.join(LIMIT_S)
        self.core = build_engine(config, group)
        del group

    def _follow(self, config: EngineConfig, address: str) -> None:
        group = TPGroup.connect(1, 2, address, LIMIT_S, device="cpu", shared_memory=False)
        worker = open_worker(config, group)
        del group
        worker.run()

    def start(self) -> None:
        """Have a request answered, and another one half answered."""
        for name, max_tokens in (("whole", 4), ("half", 60)):
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            self.core.add(GenerateRequest(request_id=name, prompt=[5, 6, 7], params=params))
        while not any(event.delta.finish_reason for event in self.core.step()):
            pass
        assert all(device.replays for device in self.devices), "collectives are in graphs"

    def run(self) -> None:
        while self.core.has_work:
            self.core.step()


@pytest.fixture
def ranks(tmp_path, monkeypatch) -> Iterator[Ranks]:
    log: list[str] = []
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda dtype, device: False)
    monkeypatch.setattr("engine.runner.rank_setup.open_device", lambda name: devices[threading.get_ident()])
    gloo = tp_group.gloo
    devices: dict[int, LateDevice] = {}

    def nccl(store: dist.Store, rank: int, *args: Any) -> FakeNccl:
        device = devices[threading.get_ident()] = LateDevice()
        return FakeNccl(gloo(store, rank, *args), device, log)

    monkeypatch.setattr(tp_group, "gloo", nccl)
    ranks = Ranks(str(make_model(tmp_path, "llama")), log)
    ranks.devices = list(devices.values())
    yield ranks
    ranks.followed.exception(LIMIT_S)


def test_ranks_end_in_order_although_nccl_waits_for_the_graphs_that_hold_its_collectives(ranks):
    ranks.start()
    ranks.core.close()
    ranks.followed.result(LIMIT_S)
    assert ranks.log == ["ended", "ended"]


def test_rank_0_raises_at_once_when_a_rank_is_gone_although_nccls_abort_waits_for_graphs(ranks):
    ranks.start()
    ranks.core.ranks._group.abort("rank 1 is gone")
    with pytest.raises(EngineUnavailable, match="rank 1 is gone"):
        ranks.run()
    ranks.core.close()
    ranks.followed.exception(LIMIT_S)
    assert "abort hangs" not in ranks.log and "end hangs" not in ranks.log


@pytest.mark.slow
def test_a_rank_that_loses_rank_0_raises_at_once_although_nccls_abort_waits_for_graphs(ranks):
    ranks.start()
    ranks.run()
    ranks.core.ranks._broadcaster._context.destroy(linger=0)  # rank 0 has died
    with pytest.raises(EngineUnavailable, match="rank 0 is gone"):
        ranks.followed.result(LIMIT_S)
    assert "abort hangs" not in ranks.log and "end hangs" not in ranks.log
