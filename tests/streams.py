"""Streams of a GPU, on a CPU: whatever is read or written without waiting for what another stream does to it raises.

Torch's own sanitizer (torch.cuda._sanitizer) keeps the order of events. Here it sees every storage as a whole, so it
judges one transfer or one step at a time, and the host as one more stream, which kernels wait for and which waits for
nothing by itself. On a card, TORCH_CUDA_SANITIZER=1 watches real streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage
from torch.cuda._sanitizer import ArgumentHandler, EventHandler
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.sync_guard import in_stand_in

DEFAULT, HOST = 0, -1
READING_METHODS = {Tensor.numpy, Tensor.tolist, Tensor.__array__}
EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


class Race(AssertionError):
    """Two streams, or a stream and the host, touch the same memory in no order."""


class Arguments(ArgumentHandler):
    """What an operation reads and writes, by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[UntypedStorage] = []

    def _handle_argument(
        self, value: Any, is_write: bool, metadata_only: bool, name: str | None = None, is_output: bool = False
    ) -> None:
        if not isinstance(value, Tensor) or value.is_mkldnn:
            return
        self.held.append(value.untyped_storage())
        storage = self.held[-1]._cdata
        if is_write:
            self.dataptrs_written.add(storage)
        elif not metadata_only:
            self.dataptrs_read.add(storage)
        self.tensor_aliases.setdefault(storage, []).append(name or "output")


class Stream:
    def __init__(self, streams: Streams, number: int):
        self.number, self._streams = number, streams

    def synchronize(self) -> None:
        self._streams.events._handle_stream_synchronization(self.number)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._streams)
        event.record(other)
        self._streams.events._handle_event_wait(event.number, self.number)


class Event:
    def __init__(self, streams: Streams):
        self.number, self._streams = next(streams.numbers), streams

    def record(self, stream: Stream | None = None) -> None:
        self._streams.events._handle_event_record(self.number, (stream or self._streams.current()).number)

    def synchronize(self) -> None:
        self._streams.events._handle_event_synchronization(self.number)

    def query(self) -> bool:
        self.synchronize()
        return True


class HostReads(TorchFunctionMode):
    def __init__(self, streams: Streams):
        self._streams = streams

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in READING_METHODS and not in_stand_in():
            storage = args[0].untyped_storage()
            self._streams.touch(HOST, {storage._cdata}, set(), f"Tensor.{func.__name__}", [storage])
        return func(*args, **(kwargs or {}))


class Streams(TorchDispatchMode):
    """Takes the place of torch.cuda's streams and events; watches what runs in `with watched()`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.events, self.numbers = EventHandler(), count(1)
        self._entered = [Stream(self, DEFAULT)]
        self._held: list[UntypedStorage] = []  # so that none comes back for other values
        no_traces = SimpleNamespace(StackSummary=SimpleNamespace(extract=lambda *args, **options: []), walk_stack=id)
        monkeypatch.setattr("torch.cuda._sanitizer.traceback", no_traces)  # they take longer than all the rest
        for name, stand_in in {
            "Stream": lambda device=None: Stream(self, next(self.numbers)),
            "Event": lambda **options: Event(self),
            "current_stream": lambda device=None: self.current(),
            "stream": self._enter,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def current(self) -> Stream:
        return self._entered[-1]

    @contextmanager
    def _enter(self, stream: Stream) -> Iterator[None]:
        self._entered.append(stream)
        try:
            yield
        finally:
            self._entered.pop()

    @contextmanager
    def watched(self) -> Iterator[None]:
        with HostReads(self), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        arguments, name = Arguments(), func._schema.name.removeprefix("aten::")
        looks_on = name.startswith("new_") or name.endswith("_like")
        arguments.parse_inputs(func._schema, args, kwargs or {}, is_factory=looks_on)
        result = func(*args, **(kwargs or {}))
        arguments.parse_outputs(func._schema, result, is_factory=name in EMPTY)
        read = arguments.dataptrs_read - arguments.dataptrs_written
        self.touch(self.current().number, read, arguments.dataptrs_written, str(func), arguments.held)
        return result

    def touch(self, stream: int, read: set[int], written: set[int], what: str, held: list[UntypedStorage]) -> None:
        self._held += held
        names = {storage: [what] for storage in read | written}
        if stream != HOST:  # a launch comes behind all that the host has done
            syncs = self.events.syncs
            for number in (HOST, stream):
                syncs._ensure_stream_exists(number)
            syncs.current_sync_states[stream][HOST] = syncs.current_sync_states[HOST][HOST]
        for error in self.events._handle_kernel_launch(stream, read, written, set(), what, names):
            who = "the host" if stream == HOST else f"stream {stream}"
            raise Race(f"{what} of {who} does not wait for {error.previous_access.operator} of stream "
                       f"{error.previous_access.stream}")  # fmt: skip
