"""Graphs, padding and buffers on a device that is late (tests/late_device.py), against the plain twin on a CPU."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.device import PinnedCopy
from engine.model.ops import dispatch
from engine.runner.cuda_graphs import MAX_CAPTURE_SIZE, capture_sizes, pad_to_capture_size
from engine.wire.messages import GenerateRequest, TokenLogprob
from engine.wire.sampling_params import SamplingParams
from tests.late_device import LateDevice
from tests.models import FAMILIES, made_once

Answers = dict[str, tuple[list[int], list[TokenLogprob]]]
Generate = Callable[..., Answers]


@pytest.fixture(autouse=True)
def plain_ops(monkeypatch) -> None:
    """The others have twins of their own on each device, and those for a CPU know no padding."""
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda dtype, device: False)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    return made_once(tmp_path_factory)


def requests(count: int = 7, **params) -> list[GenerateRequest]:
    """Prompts of different lengths, which arrive together and end one after the other."""
    rng = random.Random(count)
    prompts = [[rng.randrange(3, 97) for _ in range(rng.randrange(1, 30))] for _ in range(count)]
    return [
        GenerateRequest(
            request_id=str(i),
            prompt=prompt,
            params=SamplingParams(**{"temperature": 0.0, "max_tokens": 4 + 2 * i, "ignore_eos": True, **params}),
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture
def generate(monkeypatch) -> Generate:
    def run(
        folder: Path, wanted: list[GenerateRequest], device: LateDevice | None, cores: list[EngineCore] | None = None,
        **options,
    ) -> Answers:  # fmt: skip
        with monkeypatch.context() as patch:
            if device is not None:
                patch.setattr("engine.runner.model_runner.open_device", lambda name: device)
            defaults = {"block_size": 4, "max_num_seqs": 8, "num_blocks": 64, "num_threads": 1, "dtype": "float32"}
            core = EngineCore.build(EngineConfig(model=str(folder), **{**defaults, **options}))
        if cores is not None:
            cores.append(core)
        answers: Answers = {request.request_id: ([], []) for request in wanted}
        for request in wanted:
            core.add(request)
        while core.has_work:
            for event in core.step():
                assert event.delta.error is None, event.delta.error
                tokens, logprobs = answers[event.delta.request_id]
                tokens += event.delta.token_ids
                logprobs += event.delta.logprobs or []
            core.scheduler.check()
        core.close()
        return answers

    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_gives_the_same_tokens_with_padded_graphs_as_plainly_on_a_cpu(family, folder_of, generate):
    folder, device = folder_of(family), LateDevice()
    wanted = requests(logprobs=2)
    plain, graphs = generate(folder, wanted, None), generate(folder, wanted, device)
    assert {name: tokens for name, (tokens, _) in graphs.items()} == {
        name: tokens for name, (tokens, _) in plain.items()
    }
    for name, (_, logprobs) in graphs.items():
        expected = [logprob.logprob for logprob in plain[name][1]]
        assert [logprob.logprob for logprob in logprobs] == pytest.approx(expected, abs=1e-4)
    assert set(device.replays) == {1, 2, 4, 8}, "and every capture size was replayed"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_sampled_tokens_are_the_same_however_steps_are_run(overlap, enforce_eager, folder_of, generate):
    folder, device = folder_of("llama"), LateDevice()
    wanted = [*requests(temperature=1.0, seed=5, top_p=0.9, frequency_penalty=0.3)]
    got = generate(folder, wanted, device, overlap=overlap, enforce_eager=enforce_eager)
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


@pytest.mark.parametrize("overlap", [True, False])
def test_edits_that_need_the_newest_token_are_right_while_only_the_device_has_it(overlap, folder_of, generate):
    def run(edits: list[dict], device: LateDevice | None, **options) -> Answers:
        wanted = [
            replace(request, params=replace(request.params, **edits[i % len(edits)]))
            for i, request in enumerate(requests(9, max_tokens=14, temperature=0.7))
        ]
        return generate(folder_of("qwen3"), wanted, device, **options)

    found, without = run(EDITS, LateDevice(), overlap=overlap), run([{}], None)
    assert found == run(EDITS, None)
    for i, name in enumerate(found):
        assert (found[name] != without[name]) == bool(EDITS[i % len(EDITS)])


def test_steps_stay_right_when_blocks_run_out_and_slots_change_hands(folder_of, generate):
    """Preempted and resumed sequences get other blocks and other slots, and the device's copy of the tables follows."""
    folder, device, cores = folder_of("qwen3"), LateDevice(), []
    wanted = requests(12, max_tokens=30)
    tight = {"num_blocks": 34, "max_num_seqs": 5, "max_model_len": 100, "max_num_batched_tokens": 16}
    assert generate(folder, wanted, device, cores, **tight) == generate(folder, wanted, None, **tight)
    assert cores[0].scheduler.totals.preemptions > 0


def test_prompt_logprobs_come_late_and_are_the_same(folder_of, generate):
    folder = folder_of("llama")
    wanted = requests(3, prompt_logprobs=1)
    assert generate(folder, wanted, LateDevice()) == generate(folder, wanted, None)


def test_what_rows_beyond_the_batch_hold_changes_nothing(folder_of, generate, monkeypatch):
    """Padding is never read: with a nonsense token in it, and NaN in the KV of block 0, the answers stay the same."""
    folder = folder_of("llama")
    wanted = requests(3)
    expected = generate(folder, wanted, LateDevice())

    def other_pad(size, *columns):
        padded = pad_to_capture_size(size, *columns)
        padded[0, len(columns[3]) :] = 11  # another token of the history
        return padded

    monkeypatch.setattr("engine.runner.inputs.pad_to_capture_size", other_pad)
    assert generate(folder, wanted, LateDevice()) == expected


def test_padding_leaves_the_kv_cache_as_it_was(folder_of, generate):
    cores: list[EngineCore] = []
    folder, wanted = folder_of("llama"), requests(3)
    for device in (LateDevice(), None):
        generate(folder, wanted, device, cores, enable_prefix_caching=False, overlap=False)
    padded, plain = (core.runner.kv_cache for core in cores)
    written = plain.abs().sum(dim=(1, 2, 3, 5)) > 0
    assert not padded.abs().sum(dim=(1, 2, 3, 5))[~written].any(), "only real tokens have KV"
    torch.testing.assert_close(padded, plain)


def test_batch_sizes_that_come_after_the_budget_is_used_run_without_graphs(folder_of, generate, caplog):
    folder, device, cores = folder_of("llama"), LateDevice(graph_mib=10), []
    wanted = requests()
    caplog.set_level(logging.INFO, logger="engine.runner.cuda_graphs")
    got = generate(folder, wanted, device, cores, cuda_graph_memory_gib=20 / 1024)
    assert got == generate(folder, wanted, None)
    graphs = cores[0].runner.graphs
    assert graphs is not None and len(graphs.captured) == 2 and graphs.used_bytes == 20 * 2**20
    captured = [record.message for record in caplog.records if "decode graph captured" in record.message]
    assert len(captured) == 2 and "MiB=10.0 total_MiB=10.0 budget_MiB=20" in captured[0]
    assert f"reached their budget cuda_graph_memory_gib=0.02: batch sizes other than {graphs.captured}" in caplog.text


def test_a_graph_is_captured_once_and_only_for_sizes_that_came(folder_of, generate):
    device, cores = LateDevice(), []
    generate(folder_of("llama"), requests(1), device, cores)
    assert cores[0].runner.graphs.captured == [1] and set(device.replays) == {1}
    assert cores[0].runner.graphs.used_bytes == 2**20


def test_capture_sizes_are_few_and_end_with_the_largest_batch():
    assert capture_sizes(1) == [1]
    assert capture_sizes(3) == [1, 2, 3]
    assert capture_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert (
        capture_sizes(256)[:8] == [1, 2, 4, 8, 16, 24, 32, 40]
        and capture_sizes(256)[-1] == 256
        and len(capture_sizes(256)) == 35
    )
    assert capture_sizes(10_000)[-1] == MAX_CAPTURE_SIZE


def test_rows_of_padding_are_sequences_without_tokens_or_a_place_for_kv():
    ones = np.ones(3, dtype=np.int64)
    padded = pad_to_capture_size(8, 5 * ones, 6 * ones, 7 * ones, 2 * ones, 9 * ones)
    assert padded[:, :3].T.tolist() == [[5, 6, 7, 2, 9]] * 3
    assert padded[:, 3:].T.tolist() == [[0, 0, -1, 0, 0]] * 5


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


def test_a_step_that_cannot_be_captured_runs_without_graphs_and_says_why(folder_of, generate, caplog):
    class Unable(LateDevice):
        def capture(self, run):
            try:
                raise RuntimeError("operation not permitted when stream is capturing")
            finally:  # as torch, which then ends the capture
                raise RuntimeError("operation failed due to a previous error during capture")

    device, cores = Unable(), []
    wanted = requests(3)
    assert generate(folder_of("llama"), wanted, device, cores) == generate(folder_of("llama"), wanted, None)
    assert cores[0].runner.graphs.captured == []
    (warning,) = [record.message for record in caplog.records if "without more graphs" in record.message]
    assert "cannot be captured: operation not permitted when stream is capturing" in warning
