"""A device that works through a queue as a GPU does, on a CPU: whatever is read too early is wrong.

Arrays of a staged copy are noise until it is sent; results are noise until an event behind them has been waited for. A
graph is the call that was captured, made again on the tensors that it was captured with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.devices.cuda_device import PinnedCopy
from engine.devices.device import Device, DeviceEvent, Run, StagedCopy

NOISE = 0x55  # in every byte: in any integer type a number that is far out of range
MIB = 2**20


class LateStagedCopy(PinnedCopy):
    def _open(self, size: int) -> None:
        super()._open(size)
        self._chunks[-1][1].fill_(NOISE)


class LateEvent(DeviceEvent):
    def __init__(self, device: LateDevice):
        self._device, self._before = device, len(device.results)

    @torch.inference_mode()
    def wait(self) -> None:
        for fetched, values in self._device.results[: self._before]:
            fetched.copy_(values)

    def reached(self, timeout_s: float) -> bool:
        self.wait()
        return True


class CapturedGraph:
    alive = True

    def destroy(self) -> None:
        self.alive = False


class LateDevice(Device):
    """A device whose graphs take `row_mib` for each row of their output, in a pool as torch's: a capture uses a block
    that an earlier one has freed if it is large enough, and otherwise takes a new one."""

    asynchronous = True

    def __init__(self, row_mib: float = 1.0):
        super().__init__(torch.device("cpu"))
        self.results: list[tuple[Tensor, Tensor]] = []
        self.replays: list[int] = []  # the rows of every replay
        self.capturing: CapturedGraph | None = None
        self._row_bytes = int(row_mib * MIB)
        self._graphs: list[CapturedGraph] = []
        self._pool: list[int] = []  # the bytes of each block

    def staged_copy(self) -> StagedCopy:
        return LateStagedCopy(self.torch_device)

    def fetch(self, tensor: Tensor) -> Tensor:
        fetched = torch.empty_like(tensor)
        fetched.view(torch.uint8).fill_(NOISE)
        self.results.append((fetched, tensor.clone()))
        return fetched

    def event(self) -> DeviceEvent:
        return LateEvent(self)

    def capture(self, run: Run) -> tuple[Tensor, Callable[[], None], Callable[[], None]]:
        graph = self.capturing = CapturedGraph()
        output, again = self.record(run)
        output.fill_(torch.nan)  # capturing computes nothing
        self.capturing = None
        size = len(output) * self._row_bytes
        self._graphs = [graph for graph in self._graphs if graph.alive]
        self._pool = self._pool if self._graphs else []
        if not any(block >= size for block in self._pool):
            self._pool.append(size)
        self._graphs.append(graph)

        def replay() -> None:
            assert graph.alive
            self.replays.append(len(output))
            again()

        return output, replay, graph.destroy

    def record(self, run: Run) -> tuple[Tensor, Callable[[], None]]:
        """Return the output of `run`, and a function that computes it again in the same place."""
        output = run().clone()
        return output, lambda: output.copy_(run())

    def used_bytes(self) -> int:
        return sum(self._pool) if any(graph.alive for graph in self._graphs) else 0
