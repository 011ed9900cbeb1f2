"""Graphs, padding and buffers on a device that is late (tests/late_device.py), against the plain twin on a CPU."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from engine.core.engine import EngineCore
from engine.costs.step_cost import StepTimes
from engine.devices.cuda_device import PinnedCopy
from engine.errors import StartupError
from engine.model.batch import Batch, split_rows
from engine.model.ops.sampling import mark_non_finite
from engine.runner.graphs.cuda_graphs import (
    MAX_DECODE_SIZE,
    MAX_MIXED_SIZE,
    CudaGraphs,
    StepColumns,
    StepShape,
    decode_sizes,
    mixed_sizes,
    pad_step,
)
from engine.runner.inputs import InputBuilder
from engine.runner.model_runner import ModelRunner
from engine.runner.step import StepMemory
from tests.engine.distributed.test_tp_group import LIMIT_S, connect, on_all
from tests.late_device import NOISE
from tests.late_engine import Answers, generate, requests
from tests.models import FAMILIES, with_slow
from tests.products import each_once
from tests.sync_guard import HostWaits
from tests.tape import TapedDevice

GRAPHED = [family for family, (_, fields) in FAMILIES.items() if "index_topk" not in fields]  # not sparse attention


@pytest.mark.parametrize("family", with_slow(GRAPHED, set(GRAPHED) - {"qwen3_moe"}))
def test_a_model_gives_the_same_tokens_with_padded_graphs_as_plainly_on_a_cpu(family, folder_of, monkeypatch):
    monkeypatch.setattr(
        "engine.runner.graphs.gpu_layers.can_capture", lambda setup: True
    )  # with latents too, as with Triton
    folder, device = folder_of(family), TapedDevice()
    wanted = requests(logprobs=2)
    plain, graphs = generate(folder, wanted, None), generate(folder, wanted, device)
    assert {name: tokens for name, (tokens, _) in graphs.items()} == {
        name: tokens for name, (tokens, _) in plain.items()
    }
    for name, (_, logprobs) in graphs.items():
        expected = [logprob.logprob for logprob in plain[name][1]]
        assert [logprob.logprob for logprob in logprobs] == pytest.approx(expected, abs=1e-4)
    assert set(device.replays) == {1, 2, 4, 8, 20}, "and every graph was replayed"


def test_every_step_is_a_graph_prompts_and_decodes_together_too(folder_of):
    device, cores = TapedDevice(), []
    generate(folder_of("llama"), requests(), device, cores)
    assert len(device.replays) == cores[0].scheduler.totals.steps
    assert device.replays.count(20) > 3


@pytest.mark.parametrize(("overlap", "enforce_eager"), each_once([True, False], [True, False]))
def test_sampled_tokens_are_the_same_however_steps_are_run(overlap, enforce_eager, folder_of):
    folder, device = folder_of("llama"), TapedDevice()
    wanted = [*requests(temperature=1.0, seed=5, top_p=0.9, frequency_penalty=0.3)]
    got = generate(folder, wanted, device, async_scheduling=overlap, enforce_eager=enforce_eager)
    assert got == generate(folder, wanted, None)
    assert bool(device.replays) != enforce_eager


EDITS = [
    {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"repetition_penalty": 1.8},
    {"logit_bias": {5: 8.0, 25: -100.0}, "min_tokens": 2},
    {"allowed_token_ids": list(range(3, 40))},
    {"bad_words_token_ids": [[a, b] for a in range(3, 40) for b in range(3, 97, 2)], "repetition_penalty": 0.7},
    {},
]


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_edits_that_need_the_newest_token_are_right_while_only_the_device_has_it(overlap, folder_of):
    def run(edits: list[dict], device: TapedDevice | None, **options) -> Answers:
        wanted = [
            replace(request, params=replace(request.params, **edits[i % len(edits)]))
            for i, request in enumerate(requests(9, max_tokens=14, temperature=0.7))
        ]
        return generate(folder_of("qwen3"), wanted, device, **options)

    found, without = run(EDITS, TapedDevice(), async_scheduling=overlap), run([{}], None)
    assert found == run(EDITS, None)
    for i, name in enumerate(found):
        assert (found[name] != without[name]) == bool(EDITS[i % len(EDITS)])


def test_steps_stay_right_when_blocks_run_out_and_slots_change_hands(folder_of):
    """Preempted and resumed sequences get other blocks and other slots, and the device's copy of the tables follows."""
    folder, device, cores = folder_of("qwen3"), TapedDevice(), []
    wanted = requests(8, max_tokens=20)
    tight = {"num_gpu_blocks_override": 26, "max_num_seqs": 5, "max_model_len": 100, "max_num_batched_tokens": 16}
    assert generate(folder, wanted, device, cores, **tight) == generate(folder, wanted, None, **tight)
    assert cores[0].scheduler.totals.preemptions > 0


WAITS = {
    "number": lambda tokens: int(tokens[0]),
    "truth": lambda tokens: bool(tokens.any()),
    "tolist": lambda tokens: tokens.tolist(),
    "numpy": lambda tokens: tokens.numpy(),
    "array": lambda tokens: np.asarray(tokens),
    "cpu": lambda tokens: tokens.cpu(),
    "nonzero": lambda tokens: tokens.nonzero(),
    "masked_select": lambda tokens: tokens.masked_select(tokens > 3),
    "boolean index": lambda tokens: tokens[tokens > 3],
    "unique": lambda tokens: tokens.unique(),
    "repeat_interleave": lambda tokens: torch.arange(len(tokens)).repeat_interleave(tokens.clamp(0, 1)),
    "tensor of a list": lambda tokens: tokens + torch.tensor([1]),
    "tensor of an array": lambda tokens: torch.from_numpy(np.zeros(1)).to(tokens.device),
    "index that is a list": lambda tokens: tokens[[0]],
    "number at an index": lambda tokens: tokens.clone().__setitem__(torch.zeros_like(tokens), 1),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_step_in_which_the_host_would_wait_is_found(name, folder_of, monkeypatch):
    def waiting(best, tokens):
        WAITS[name](tokens)
        return mark_non_finite(best, tokens)

    monkeypatch.setattr("engine.runner.model_runner.mark_non_finite", waiting)
    with pytest.raises(HostWaits):
        generate(folder_of("llama"), requests(1), TapedDevice())


def test_inputs_that_are_read_before_they_are_sent_are_found(folder_of, monkeypatch):
    build = InputBuilder.build
    monkeypatch.setattr(InputBuilder, "build", lambda *args: build(*args).written.tolist())
    with pytest.raises(HostWaits, match="tolist"):
        generate(folder_of("llama"), requests(1), TapedDevice())


def test_what_a_graph_leaves_in_its_memory_is_gone(folder_of, monkeypatch):
    compute, left = CudaGraphs._compute, []

    def leaving(graphs, shape, inputs):
        out = compute(graphs, shape, inputs)
        left.append(out + 1)
        return left[-1] - 1

    monkeypatch.setattr(CudaGraphs, "_compute", leaving)
    wanted = requests(1)
    generate(folder_of("llama"), wanted, TapedDevice())
    assert (left[-1].view(torch.uint8) == NOISE).all()


def test_prompt_logprobs_come_late_and_are_the_same(folder_of):
    folder = folder_of("llama")
    wanted = requests(3, prompt_logprobs=1)
    assert generate(folder, wanted, TapedDevice()) == generate(folder, wanted, None)


def test_log_probabilities_of_more_rows_are_no_more_launches(folder_of, monkeypatch):
    counts, sample = {}, ModelRunner._sample

    def counted(runner, hidden, inputs):
        with Counter() as counter:
            result = sample(runner, hidden, inputs)
        counts[len(inputs.entries)] = counter.operations
        return result

    monkeypatch.setattr(ModelRunner, "_sample", counted)
    generate(folder_of("llama"), requests(8, logprobs=2), None)
    assert max(counts) > 3
    assert counts[max(counts)] == counts[1]


class Counter(TorchDispatchMode):
    """Counts the operations of a `with` block."""

    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


def test_what_rows_beyond_the_batch_hold_changes_nothing(folder_of, monkeypatch):
    """Padding is never read: with a nonsense token and a nonsense position in it the answers stay the same."""
    folder, wanted = folder_of("llama"), requests(3)
    expected = generate(folder, wanted, TapedDevice())

    def other_pad(shape, token_index, *columns):
        buffer = pad_step(shape, token_index, *columns)
        padded = StepColumns.of(buffer, shape, np.int64)
        padded.token_index[len(token_index) :], padded.positions[len(token_index) :] = 11, 7
        return buffer

    monkeypatch.setattr("engine.runner.graphs.cuda_graphs.pad_step", other_pad)
    assert generate(folder, wanted, TapedDevice()) == expected


def test_padding_leaves_the_kv_cache_as_it_was(folder_of):
    cores: list[EngineCore] = []
    folder, wanted = folder_of("llama"), requests(3)
    for device in (TapedDevice(), None):
        generate(folder, wanted, device, cores, enable_prefix_caching=False, async_scheduling=False)
    padded, plain = (core.ranks.runner.kv_caches[0] for core in cores)
    written = plain.abs().sum(dim=(1, 2, 3, 5)) > 0
    assert not padded.abs().sum(dim=(1, 2, 3, 5))[~written].any(), "only real tokens have KV"
    torch.testing.assert_close(padded, plain)


def shapes(core: EngineCore) -> list[int]:
    return [shape.tokens for shape in core.ranks.runner.layers.graphs.captured]


def test_graphs_of_all_sizes_take_no_more_memory_than_the_largest(folder_of):
    """A pool can give a capture only what a larger one before it has freed."""
    device, cores = TapedDevice(row_mib=2), []
    generate(folder_of("llama"), requests(3), device, cores)
    assert shapes(cores[0]) == [1, 2, 4, 8, 20]
    assert cores[0].ranks.runner.layers.graphs.used_bytes == 40 * 2**20


def test_graphs_that_do_not_fit_into_the_budget_are_left_out_and_the_others_are_not(folder_of, caplog):
    device, cores, wanted = TapedDevice(), [], requests()
    got = generate(folder_of("llama"), wanted, device, cores, cuda_graph_memory_gib=5 / 1024)
    assert got == generate(folder_of("llama"), wanted, None)
    assert shapes(cores[0]) == [1, 2, 4] and set(device.replays) == {1, 2, 4}
    assert cores[0].ranks.runner.layers.graphs.used_bytes == 4 * 2**20
    assert "do not fit into cuda_graph_memory_gib: [8, 20]" in caplog.text


def test_a_step_whose_size_has_no_graph_replays_the_next_larger_one(folder_of):
    class Full(TapedDevice):
        def capture(self, run):
            if len(self._graphs) == 2:
                raise RuntimeError("out of memory")
            return super().capture(run)

    device, cores, wanted = Full(), [], requests()
    assert generate(folder_of("llama"), wanted, device, cores) == generate(folder_of("llama"), wanted, None)
    assert shapes(cores[0]) == [8, 20]
    assert len(device.replays) == cores[0].scheduler.totals.steps and set(device.replays) == {8, 20}


class SpinningDevice(TapedDevice):
    """A device whose sums wait for those of the other rank, and whose host waits for them at each `used_bytes`."""

    def __init__(self, own: threading.Event, other: threading.Event):
        super().__init__()
        self.own, self.other, self.sums = own, other, 0

    def launch_sum(self) -> None:
        self.sums += 1
        self.own.set()

    def used_bytes(self) -> int:
        assert not self.sums or self.other.wait(LIMIT_S / 2), "the host waits for a kernel that spins for ever"
        return super().used_bytes()


def memory() -> StepMemory:
    return StepMemory([torch.zeros(1)], [None], torch.zeros(2, 8))


def test_a_rank_that_fails_before_its_first_sum_ends_the_start_of_the_other_which_waits_for_that_sum():
    groups, launched = connect(2), [threading.Event(), threading.Event()]

    def capture(rank: int) -> str:
        device = SpinningDevice(launched[rank], launched[1 - rank])

        def forward(ids: torch.Tensor, batch: Batch) -> torch.Tensor:
            if rank == 1:
                raise RuntimeError("a kernel that does not compile")
            device.launch_sum()
            return ids.float()[:, None]

        graphs = CudaGraphs(
            device, forward, torch.zeros(1, 2, 1, dtype=torch.int32), memory(),
            budget_bytes=2**30, tp=groups[rank],
        )  # fmt: skip
        with pytest.raises((RuntimeError, StartupError)) as failed, groups[rank].starting():
            graphs.capture([StepShape(1, 1, 0), StepShape(2, 2, 0)])
        return str(failed.value)

    assert on_all(2, capture) == ["rank 1: a kernel that does not compile", "a kernel that does not compile"]
    for group in groups:
        group.close()


def test_ranks_whose_lists_of_graphs_differ_end_their_start_and_capture_none():
    groups = connect(2)

    def capture(rank: int) -> str:
        device = TapedDevice()
        graphs = CudaGraphs(
            device, lambda ids, batch: ids.float()[:, None],
            torch.zeros(1, 2, 1, dtype=torch.int32), memory(), budget_bytes=2**30, tp=groups[rank],
        )  # fmt: skip
        with pytest.raises(StartupError, match=r"ranks \[1\] are about to capture other graphs than rank 0"):
            graphs.capture([StepShape(1, 1), StepShape(2, 2)][rank:])
        return str(graphs.captured)

    assert on_all(2, capture) == ["[]", "[]"]
    for group in groups:
        group.close()


def note_calls(monkeypatch, owner: type, name: str, calls: list[str]) -> None:
    method = getattr(owner, name)

    def noted(*args):
        calls.append(name)
        return method(*args)

    monkeypatch.setattr(owner, name, noted)


def test_the_first_request_finds_everything_compiled_and_captured_and_its_steps_are_the_first_that_count(
    folder_of, monkeypatch, caplog
):
    """What the warm-up computes is neither a step of the engine's statistics nor of what it learns of their cost."""
    device, wanted = TapedDevice(), requests(1, max_tokens=2)
    caplog.set_level(logging.INFO, logger="engine.runner")
    steps: list[str] = []
    for owner, name in ((ModelRunner, "launch"), (StepTimes, "observe_step"), (EngineCore, "add")):
        note_calls(monkeypatch, owner, name, steps)
    generate(folder_of("llama"), wanted, device, async_scheduling=False)
    before, after = steps[: steps.index("add")], steps[steps.index("add") + 1 :]
    assert set(before) == {"launch"} and after == ["launch", "observe_step"] * 2
    assert "graphs captured: 4 of decode steps, 1 of mixed steps, seconds=" in caplog.text
    assert "warmed up seconds=" in caplog.text


def test_sizes_are_few_and_end_with_the_largest_step():
    assert decode_sizes(1) == [1]
    assert decode_sizes(3) == [1, 2, 3]
    assert decode_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert decode_sizes(256)[:8] == [1, 2, 4, 8, 16, 24, 32, 40]
    assert decode_sizes(256)[-1] == 256 and len(decode_sizes(256)) == 35
    assert decode_sizes(10_000)[-1] == MAX_DECODE_SIZE
    assert mixed_sizes(20) == [20] and mixed_sizes(128) == [128] and mixed_sizes(300) == [128, 256, 300]
    assert mixed_sizes(8192) == [128 * i for i in range(1, 9)] and mixed_sizes(8192)[-1] == MAX_MIXED_SIZE


@given(st.data())
def test_every_step_that_a_shape_is_for_fits_into_it_and_is_there_again(data):
    counts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    tokens, seqs = sum(counts), len(counts)
    groups = data.draw(st.integers(1, 3))
    sizes = st.integers(tokens, 80), st.integers(seqs, 9), st.integers(1, 5)
    shape = StepShape(*map(data.draw, sizes), kv_groups=groups)
    query_start = np.cumsum([0, *counts])
    single, chunks = split_rows(counts, counts)
    column = np.arange(tokens) + 5
    mappings = [column + 2 + i for i in range(groups)]
    buffer = pad_step(
        shape, column, column + 1, mappings, column[:seqs], query_start[1:], query_start, single,
        chunks, np.stack([query_start[1:], column[:seqs]]).astype(np.int32),
    )  # fmt: skip
    for columns in (
        StepColumns.of(buffer, shape, np.int64),
        StepColumns.of(torch.from_numpy(buffer), shape, torch.int64),
    ):
        pad = shape.tokens - tokens
        assert columns.token_index.tolist() == [*column.tolist(), *[0] * pad]
        assert columns.positions.tolist() == [*(column + 1).tolist(), *[0] * pad]
        assert [slots.tolist() for slots in columns.slot_mappings] == [
            [*mapping.tolist(), *[-1] * pad] for mapping in mappings
        ]
        pad = shape.seqs - seqs
        assert columns.slots.tolist() == [*column[:seqs].tolist(), *[0] * pad]
        assert columns.kv_len.tolist() == [*query_start[1:].tolist(), *[0] * pad]
        assert columns.save_at.tolist() == [*query_start[1:].tolist(), *[-1] * pad]
        assert columns.save_slots[:seqs].tolist() == column[:seqs].tolist()
        assert columns.query_start.tolist() == [*query_start.tolist(), *[tokens] * pad]
        assert columns.single.tolist() == [*single.tolist(), *[-1] * (shape.seqs - len(single))]
        tiles = [tuple(tile) for tile in columns.tiles.reshape(-1, 4).tolist()]
        rows = [row for _, first, count, _ in tiles for row in range(first, first + count)]
        assert sorted(rows) == [
            row for _, first_row, count, _ in chunks.tolist() for row in range(first_row, first_row + count)
        ]


def test_a_staged_copy_brings_arrays_of_every_kind_in_one_copy():
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(0, 100, 7),
        rng.integers(0, 100, (3, 5), dtype=np.int32),
        rng.random(3, dtype=np.float32),
        rng.random((2, 9)) < 0.5,
        np.empty(0, dtype=np.int64),
        rng.integers(0, 100, (4, 6))[::2, ::3],  # with gaps between its numbers
        rng.integers(0, 100, 20_000),  # more than a chunk holds
        rng.integers(0, 255, 5, dtype=np.uint8),
    ]
    staged = PinnedCopy(torch.device("cpu"))
    tensors = [staged.add(array) for array in arrays]
    staged.send()
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.dtype == torch.from_numpy(np.ascontiguousarray(array)).dtype
        assert tensor.shape == array.shape and tensor.tolist() == array.tolist()


def test_a_step_that_cannot_be_captured_runs_without_graphs_and_says_why(folder_of, caplog):
    class Unable(TapedDevice):
        def capture(self, run):
            try:
                raise RuntimeError("operation not permitted when stream is capturing")
            finally:  # as torch, which then ends the capture
                raise RuntimeError("operation failed due to a previous error during capture")

    device, cores = Unable(), []
    wanted = requests(3)
    assert generate(folder_of("llama"), wanted, device, cores) == generate(folder_of("llama"), wanted, None)
    assert cores[0].ranks.runner.layers.graphs.captured == []
    (warning,) = [record.message for record in caplog.records if "without more graphs" in record.message]
    assert "cannot be captured: operation not permitted when stream is capturing" in warning
