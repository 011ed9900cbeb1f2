from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.agent_clients import SessionFigures, SessionLoad, TurnShape, midway, run_sessions
from benchmarks.agents import measure_turns, most_sessions, servers_of
from cluster.cli.bench.openai_client import OpenAIClient, RequestResult
from cluster.lab.simulator.trace import make_trace
from tests.cluster.cli.bench.fake_openai_server import FakeOpenAIServer

SHAPE = TurnShape(context=50, turn=3, cold=80, answer=2, think_s=0.0)
LOAD = SessionLoad(scale=0.001, time_scale=0.0, window_s=0.2, longest=300, ttft_s=60.0, tpot_s=60.0, good=0.9)


@pytest.fixture
def server():
    with closing(FakeOpenAIServer()) as started:
        yield started


def test_a_peer_that_is_not_there_is_left_out_with_a_line(tmp_path):
    model, python = tmp_path / "model", str(tmp_path / "python")
    model.mkdir()
    Path(python).touch()
    model.with_name("model.gguf").touch()
    for vllm, llamacpp, names in ((python, python, ["manta", "vllm", "llamacpp"]), (None, "/no/python", ["manta"])):
        servers, left_out = servers_of(str(model), vllm, None, llamacpp)
        assert [server.name for server in servers] == names
        assert len(left_out) == 3 - len(names)
    model.with_name("model.gguf").unlink()
    _, left_out = servers_of(str(model), None, None, python)
    assert "model.gguf" in left_out[1]


def test_warm_turns_repeat_their_context_and_cold_prompts_nothing(server):
    figures = asyncio.run(measure_turns(server.url, SHAPE, 0.1, turns=5, prompts=2))
    assert figures.turns >= 1 and figures.warm_ratio > 0 and figures.cold_ratio > 0
    prompts = [body["prompt"] for _, body in server.requests]
    warm = [prompt for prompt in prompts if len(prompt) == 53]
    cold = [prompt for prompt in prompts if len(prompt) == 80]
    assert len(warm) + len(cold) == len(prompts)
    assert len({tuple(prompt[:50]) for prompt in warm}) == 1 and len({tuple(prompt) for prompt in warm}) == len(warm)
    assert len({tuple(prompt[:50]) for prompt in cold}) == len(cold)


def test_sessions_begin_in_their_middle_and_turns_after_the_first_prompts_count(server):
    trace = make_trace("agents", 600, 1.0).scaled(0.001)
    later = midway(trace, 300, seed=1)
    assert 0 < len(later) < len(trace)
    assert max(later.prompt_tokens + later.output_tokens) <= 300
    begun = [int(later.prompt_tokens[index]) for index, turn in enumerate(later.turns) if not turn.after]
    assert sum(begun) / len(begun) > 40, "contexts are as long as in the middle"

    async def run() -> SessionFigures | None:
        async with OpenAIClient(server.url, None, 10.0) as client:
            return await run_sessions(client, LOAD, 2)

    figures = asyncio.run(run())
    assert figures is not None and figures.good == 1.0
    assert 0 < figures.turns <= len(server.requests) - 2


def test_a_turn_is_good_if_it_keeps_both_targets():
    load = SessionLoad(scale=1, time_scale=1, window_s=1, longest=1, ttft_s=0.5, tpot_s=0.1, good=0.9)
    one = {"e2el_s": 1.0, "output_tokens": 7}
    assert load.keeps(RequestResult(ttft_s=0.5, **one))
    assert not load.keeps(RequestResult(ttft_s=0.51, **one))
    assert not load.keeps(RequestResult(ttft_s=0.1, **one))
    assert not load.keeps(RequestResult(ttft_s=0.5, **one, error="HTTP 500"))


@pytest.mark.parametrize(
    ("enough", "found", "tried"),
    [(0, 0, [4, 2, 1]), (5, 5, [4, 8, 6, 5]), (16, 16, [4, 8, 16, 32, 24, 20]), (99, 64, [4, 8, 16, 32, 64])],
)
def test_the_most_sessions_are_found_by_doubling_and_halving(monkeypatch, enough, found, tried):
    async def fake(client: OpenAIClient, load: SessionLoad, sessions: int) -> SessionFigures:
        return SessionFigures(sessions, 10, float(sessions <= enough), 0.1, 1.0, None)

    monkeypatch.setattr("benchmarks.agents.run_sessions", fake)
    monkeypatch.setattr("benchmarks.agents.MAX_SESSIONS", 64)
    most, figures = asyncio.run(most_sessions("http://127.0.0.1:1", LOAD, 4))
    assert (most, [each.sessions for each in figures]) == (found, tried)
