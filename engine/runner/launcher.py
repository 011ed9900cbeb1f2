"""Where the steps of one rank are launched: in the calling thread, or in a separate one."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from engine.devices.device import Device
from engine.runner.step import LaunchedStep, StepInputs
from engine.wire.part_record import PartRecord


class StepRunner(Protocol):
    """What a launcher knows of the runner of its rank."""

    device: Device

    def launch(self, inputs: StepInputs) -> LaunchedStep:
        """Compute a step, or put it into a device's queue. Steps must come in the order of their plans."""


class Launcher:
    """Launches steps in the calling thread."""

    def __init__(self, runner: StepRunner):
        self._runner = runner

    def launch(self, inputs: StepInputs) -> LaunchedStep | Future[LaunchedStep]:
        return self._runner.launch(inputs)

    def rest(self) -> None:
        """Say that there is nothing to launch until the next call of `launch`. Raises EngineUnavailable if nothing can
        be launched any more."""

    def report(self) -> PartRecord | None:
        """Return figures for EngineStats."""
        return None

    def close(self) -> None:
        """Wait for the launches under way."""


class LaunchThread(Launcher):
    """Launches steps in a thread, in the order of the calls."""

    def __init__(self, runner: StepRunner):
        super().__init__(runner)
        self._executor = ThreadPoolExecutor(1, "model", runner.device.set_current)
        # An interrupt while the executor starts its thread would make the interpreter wait for that thread for ever
        # (CPython does not register it), so it starts here and not in the first step.
        self._executor.submit(int).result()

    def launch(self, inputs: StepInputs) -> Future[LaunchedStep]:
        return self._executor.submit(self._runner.launch, inputs)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
