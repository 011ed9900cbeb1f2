"""Five faults of GPU code, planted on purpose, and what finds each on a CPU (docs/gpu.md lists them)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import triton
from triton.runtime.errors import InterpreterError

from engine.devices.cuda_device import CudaEvent
from engine.kv_transfer.transport.base import Region
from engine.kv_transfer.transport.memory import BlockMemory
from engine.model.models.llama import LlamaForCausalLM
from engine.model.ops.gpu import norm
from engine.model.ops.sampling import mark_non_finite
from engine.runner.graphs.cuda_graphs import CudaGraphs
from engine.runner.model_runner import ModelRunner
from tests.late_device import LateDevice
from tests.late_engine import generate, requests
from tests.models import made_once
from tests.streams import Race, Streams
from tests.sync_guard import HostWaits
from tests.tape import TapedDevice

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is about stand-ins for a GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return made_once(tmp_path_factory)("llama")


@pytest.fixture
def streams(monkeypatch) -> Streams:
    return Streams(monkeypatch)


def test_a_host_read_in_a_step_raises_on_the_late_device(folder, monkeypatch):
    def reading(best, tokens):
        return mark_non_finite(best, tokens.clamp(max=int(tokens.max())))

    monkeypatch.setattr("engine.runner.model_runner.mark_non_finite", reading)
    with pytest.raises(HostWaits, match="_local_scalar_dense"):
        generate(folder, requests(1), TapedDevice())


def test_an_integer_that_a_graph_has_frozen_changes_tokens_when_its_tape_is_replayed(folder, monkeypatch):
    run_layers, wanted = LlamaForCausalLM.run_layers, requests(2)

    def counting(model, x, batch, *inputs):
        rows = sum(chunk.count for chunk in batch.chunks)  # a number of the host's
        return run_layers(model, x.roll(rows, 1), batch, *inputs)

    monkeypatch.setattr(LlamaForCausalLM, "run_layers", counting)
    expected = generate(folder, wanted, None)
    assert generate(folder, wanted, TapedDevice(), enforce_eager=True) == expected
    assert generate(folder, wanted, TapedDevice()) != expected


def test_an_input_that_was_freed_behind_a_graph_raises_when_its_tape_is_replayed(folder, monkeypatch):
    compute, capture, held = CudaGraphs._compute, CudaGraphs._capture, []

    def reading(graphs, shape, inputs):
        held.append(torch.zeros(3, 1, 1))
        return compute(graphs, shape, inputs) + held[0][0]

    def freeing(graphs, shape):
        try:
            return capture(graphs, shape)
        finally:
            held.clear()

    monkeypatch.setattr(CudaGraphs, "_compute", reading)
    monkeypatch.setattr(CudaGraphs, "_capture", freeing)
    with pytest.raises(AssertionError, match="nobody else holds"):
        generate(folder, requests(1), TapedDevice())


class StreamedDevice(LateDevice):
    """A late device whose results are there at once, but may be read only behind an event."""

    def fetch(self, tensor):
        return tensor.clone()

    def event(self):
        return CudaEvent()


def test_a_step_on_a_wrong_stream_races_with_its_inputs(folder, streams, monkeypatch):
    wanted = requests(2, max_tokens=2)
    with streams.watched():
        generate(folder, wanted, StreamedDevice())
        forward = ModelRunner._forward

        def astray(runner, step):
            with torch.cuda.stream(torch.cuda.Stream()):
                return forward(runner, step)

        monkeypatch.setattr(ModelRunner, "_forward", astray)
        with pytest.raises(Race, match="of stream 0"):
            generate(folder, wanted, StreamedDevice())


def test_results_that_are_read_without_an_event_race_with_the_step(folder, streams, monkeypatch):
    monkeypatch.setattr(CudaEvent, "wait", lambda event: None)
    with streams.watched(), pytest.raises(Race, match="of the host"):
        generate(folder, requests(1), StreamedDevice())


def moved(streams: Streams, step_ends: Callable[[CudaEvent], None]) -> None:
    """Move a block of KV between two steps that compute in both caches."""
    here, there = torch.zeros(2, 4, 1, 2, 2, 2, 4)
    with streams.watched():
        source, target = BlockMemory(here), BlockMemory(there)
        for memory in (source, target):
            memory._stream, memory._words = torch.cuda.Stream(), memory._in_words(memory.tensor)
            memory._stream.wait_stream(torch.cuda.current_stream())
        here.add_(1)
        step_ends(CudaEvent())
        region = Region(0, 2, 0, source.layout.slabs)
        target.scatter([2], region, source.gather([1], region))
        there.add_(1)
    assert (there[2] == 2).all()


@pytest.mark.parametrize("fault", [None, "the default stream", "no wait for the step", "no wait for the copy"])
def test_kv_that_is_copied_on_a_wrong_stream_or_unordered_races(fault, streams, monkeypatch):
    if fault == "the default stream":
        monkeypatch.setattr(BlockMemory, "apart", contextmanager(lambda memory: iter([None])))
    if fault == "no wait for the copy":
        monkeypatch.setattr("tests.streams.Stream.synchronize", lambda stream: None)
    with nullcontext() if fault is None else pytest.raises(Race):
        moved(streams, (lambda event: None) if fault == "no wait for the step" else CudaEvent.wait)


def test_a_row_out_of_bounds_raises_in_the_interpreter():
    x, weight, out = torch.ones(4, 16), torch.ones(16), torch.empty(4, 16)

    def launch(rows: int) -> None:
        norm.rms_norm_kernel[(triton.cdiv(rows, 2),)](
            x, x, weight, out, out, rows, x.stride(0), 0, 1e-6, 0.0,
            HEADS=1, SIZE=16, ADD=False, SHIFTED=False, ROWS=2, SIZE_PAD=16,
        )  # fmt: skip

    launch(4)
    with pytest.raises(InterpreterError, match="16 of 16 addresses"):
        launch(5)
