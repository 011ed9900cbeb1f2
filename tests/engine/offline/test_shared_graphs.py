"""Graphs of engines that share experts, each a process on a device whose graphs are tapes: the texts of plain steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import EngineUnavailable
from engine.options.speculation import SpeculativeConfig
from engine.runner.graphs.cuda_graphs import StepShape
from engine.runner.graphs.shared_graphs import SharedGraphs
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.experts import ExpertReport
from engine.wire.sampling_params import SamplingParams
from tests.engine.offline.test_expert_moves import often
from tests.late_engine import answer, generate, requests, small_config, use_device
from tests.models import make_model
from tests.products import few
from tests.shared_engines import run_rank, running
from tests.tape import TapedDevice

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=2)


def run_late_rank(config: EngineConfig, rank: int, address: str, options: dict[str, Any]) -> None:
    device = TapedDevice()
    with pytest.MonkeyPatch.context() as patch:
        use_device(patch, device)
        run_rank(config, rank, address, options)
    if bool(device.replays) != (config.all2all_backend != "alltoall"):
        raise EngineUnavailable(f"graphs of {set(device.replays)} rows ran")


@pytest.fixture
def device(monkeypatch) -> TapedDevice:
    monkeypatch.setattr("tests.shared_engines.run_rank", run_late_rank)
    return TapedDevice()


def sharing(folder: Any, **options: Any) -> EngineConfig:
    return small_config(folder, data_parallel_size=2, enable_expert_parallel=True, **options)


@pytest.mark.parametrize("options", few(1, [{"speculative_config": NGRAM}, {}, {"async_scheduling": False}]))
def test_engines_with_unequal_steps_replay_graphs_of_one_size_with_the_texts_of_one_engine_without_graphs(
    pool, tmp_path, monkeypatch, device, options
):
    folder, wanted = make_model(tmp_path, "qwen3_moe"), requests(logprobs=2)
    wanted.append(GenerateRequest(request_id="repeats", prompt=[5, 6, 7] * 6, params=wanted[-1].params))
    expected = generate(folder, wanted, None)
    use_device(monkeypatch, device)
    with running(pool, sharing(folder, **options)) as group:
        found = answer(group, wanted)  # type: ignore[arg-type]
    for name, (tokens, logprobs) in expected.items():
        assert found[name][0] == tokens
        assert [one.logprob for one in found[name][1]] == pytest.approx([one.logprob for one in logprobs], abs=1e-4)
    assert len(set(device.replays)) > 2 and 20 in device.replays, "graphs of several sizes ran"


def test_an_engine_without_requests_replays_graphs_too_and_padding_counts_for_no_expert(
    pool, tmp_path, monkeypatch, device
):
    folder = make_model(tmp_path, "qwen3_moe")
    request = GenerateRequest(
        request_id="a", prompt=[3, 4, 5, 6, 7], params=SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    )
    expected = generate(folder, [request], None)
    use_device(monkeypatch, device)
    config = sharing(folder, eplb_config=often(window_size=4, step_interval=4))
    with running(pool, config) as group:
        assert answer(group, [request])["a"][0] == expected["a"][0]  # type: ignore[arg-type]
        again = GenerateRequest(request_id="b", prompt=[3], params=request.params)
        answer(group, [again])  # type: ignore[arg-type]
        report, moe = group.stats().record(ExpertReport), group.model_config.moe
        assert report is not None
        (stats,) = report.stages
        pairs = moe.experts_per_token * len(moe.layers)
        assert sum(stats.rank_tokens) == 8 * pairs, "5, 1, 1 and 1 tokens of the first four steps"
    assert set(device.replays) == {1, 20}


def test_all_to_all_needs_the_host_so_its_steps_run_without_graphs(pool, tmp_path, monkeypatch, device, caplog):
    caplog.set_level(logging.INFO)
    folder, wanted = make_model(tmp_path, "qwen3_moe"), requests(3)
    expected = generate(folder, wanted, None)
    use_device(monkeypatch, device)
    with running(pool, sharing(folder, all2all_backend="alltoall")) as group:
        found = answer(group, wanted)  # type: ignore[arg-type]
    assert {name: tokens for name, (tokens, _) in found.items()} == {
        name: tokens for name, (tokens, _) in expected.items()
    }
    assert not device.replays
    assert "experts exchanged by all2all_backend=alltoall ranks=2, because it is configured" in caplog.messages
    assert "steps run without graphs: it takes the host to exchange tokens with other engines" in caplog.messages


DECODES = [StepShape(size, size) for size in (1, 2, 4, 8)]
VERIFIES = [StepShape(3 * size, size, 16, verified=3) for size in (1, 2, 4)]
MIXED = [StepShape(8, 8, 16), StepShape(16, 8, 16)]


@pytest.mark.parametrize(
    ("sizes", "agreed"),
    [
        ([(1, 1, 1), (3, 3, 1)], [StepShape(4, 4), StepShape(4, 4)]),
        ([None, (2, 2, 1)], [StepShape(2, 2), StepShape(2, 2)]),
        ([(5, 2, 3), (1, 1, 1)], [VERIFIES[1], VERIFIES[1]]),  # of six tokens, of which a shape also decodes
        ([(5, 2, 3), (5, 5, 1)], [MIXED[0], DECODES[3]]),  # five sequences do not fit the shape of six tokens
        ([(9, 3, 3), (1, 1, 1)], [VERIFIES[2], VERIFIES[2]]),
        ([(17, 1, 17), (1, 1, 1)], [None, None]),
        ([(1, 1, 0), (1, 1, 1)], [None, None]),  # an image, for example
    ],
)
def test_engines_agree_on_the_smallest_number_of_tokens_for_which_each_has_a_shape(sizes, agreed):
    graphs = SharedGraphs.__new__(SharedGraphs)
    graphs.captured = sorted(DECODES + VERIFIES + MIXED, key=lambda shape: (shape.tokens, shape.longest))
    assert [graphs.agreed(sizes, engine) for engine in range(2)] == agreed
