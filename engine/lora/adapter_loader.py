"""Loads adapters into one rank's memory, in a thread beside the steps."""

from __future__ import annotations

import logging
import queue
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from engine.black_box import BLACK_BOX, read_key
from engine.devices.device import Device
from engine.errors import ServingError
from engine.lora.adapter_files import WEIGHTS_FILE, open_adapter
from engine.lora.errors import AdapterError
from engine.lora.messages import AdapterAnswer, AdapterLoad
from engine.lora.model_adapters import ModelAdapters
from engine.model.low_rank import Factors
from engine.wire.parts.adapter import ModelAdapter

logger = logging.getLogger(__name__)


class AdapterLoader:
    """Keeps the most recently used adapters in host memory, and copies them into slots. If an adapter cannot be loaded,
    the answer is an error and nothing changes."""

    def __init__(self, adapters: ModelAdapters, capacity: int, device: Device):
        """capacity: number of adapters in host memory."""
        self.rows = adapters.rows
        self._adapters, self._capacity, self._device = adapters, capacity, device
        self._kept: OrderedDict[str, dict[int, Factors]] = OrderedDict()  # by digest, the last used one last
        self._answers: queue.SimpleQueue[AdapterAnswer] = queue.SimpleQueue()
        self._executor = ThreadPoolExecutor(1, "adapters", device.begin_background)

    def load(self, command: AdapterLoad) -> None:
        self._executor.submit(self._load, command)

    def check(self, lora: ModelAdapter) -> Future[None]:
        """Read an adapter; the future raises AdapterError if it cannot be used."""
        return self._executor.submit(self._check, lora)

    def answers(self) -> list[AdapterAnswer]:
        """Return the answers since the last call."""
        found = []
        while not self._answers.empty():
            found.append(self._answers.get())
        return found

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _load(self, command: AdapterLoad) -> None:
        started, error = time.perf_counter(), ""
        try:
            factors = self._factors(command.lora)
            if command.slot >= 0:
                self._adapters.write(command.slot, factors)
                self._device.event().wait()
        except ServingError as problem:
            error = str(problem)
        except Exception as problem:  # it must not take more than its requests with it
            logger.exception("adapter failed name=%s path=%s", command.lora.name, command.lora.path)
            error = f"adapter {command.lora.name!r}: {type(problem).__name__}: {problem}"
        logger.info(
            "adapter loaded name=%s digest=%s slot=%d seconds=%.2f error=%s",
            command.lora.name, command.lora.digest[:8], command.slot, time.perf_counter() - started, error,
        )  # fmt: skip
        self._answers.put(AdapterAnswer(command.number, error))

    def _check(self, lora: ModelAdapter) -> None:
        self._factors(lora)

    def _factors(self, lora: ModelAdapter) -> dict[int, Factors]:
        """Return this rank's part of an adapter, from host memory or from the adapter's files."""
        if lora.digest in self._kept:
            self._kept.move_to_end(lora.digest)
            return self._kept[lora.digest]
        with BLACK_BOX.doing(read_key(lora.digest)):
            factors = self._read(lora)
        self._kept[lora.digest] = factors
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)
        return factors

    def _read(self, lora: ModelAdapter) -> dict[int, Factors]:
        files = open_adapter(lora.path, lora.name)
        if files.digest != lora.digest:
            limit = f"the file with the digest {lora.digest}; the file has changed since the request arrived"
            raise AdapterError(lora.name, WEIGHTS_FILE, files.digest, limit)
        return self._adapters.factors(files)
