"""`manta bench serve` sends conversations."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing

import pytest
from typer.testing import CliRunner

from cluster.cli.bench.openai_client import RequestResult
from cluster.cli.bench.prompts import trace_prompts
from cluster.cli.bench.turns import send_turns
from cluster.cli.main import app
from cluster.lab.simulator.conversations.turn import Turn
from cluster.lab.simulator.trace import make_trace
from engine.errors import InvalidParameter
from tests.cluster.cli.bench.fake_openai_server import FakeOpenAIServer


@pytest.fixture
def server():
    with closing(FakeOpenAIServer()) as started:
        yield started


def bench(server: FakeOpenAIServer, *arguments: str) -> dict:
    result = CliRunner().invoke(app, ["bench", "serve", "--base-url", server.url, "--json", *arguments])
    assert result.exit_code == 0, result.exception or result.output
    return json.loads(result.stdout)


def test_agents_are_sent_with_their_sessions_and_each_turn_after_the_answer_before_it(server):
    fields = bench(
        server, "--trace", "agents", "--scale", "0.01", "--num-prompts", "60", "--request-rate", "1",
        "--time-scale", "0.0001", "--max-active-conversations", "2",
    )  # fmt: skip
    assert (fields["completed"], fields["num_prompts"]) == (60, 60)
    prompts = [body["prompt"] for _, body in server.requests]
    assert len({tuple(prompt) for prompt in prompts}) == 60
    assert max(map(len, prompts)) > 500
    assert len(set(server.sessions)) >= 2 and all(name.startswith("session-") for name in server.sessions)


def test_a_file_of_conversations_is_sent_one_turn_after_another(server, tmp_path):
    turns = [{"text": "x" * 40, "output_length": 3}, {"text": "y" * 40, "output_length": 2, "delay": 30}]
    (tmp_path / "t.jsonl").write_text(json.dumps({"session_id": "s", "turns": turns}))
    fields = bench(server, "--trace", str(tmp_path / "t.jsonl"))
    assert (fields["completed"], fields["total_output_tokens"]) == (2, 5)
    assert fields["duration"] > 0.03
    first, second = (body["prompt"] for _, body in server.requests)
    assert (len(first), len(second)) == (10, 23) and second[:10] == first


def test_what_a_server_finds_cached_is_counted(server):
    assert bench(server, "--num-prompts", "2")["total_cached_tokens"] is None
    server.cached_tokens = 5
    assert bench(server, "--num-prompts", "2")["total_cached_tokens"] == 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trace", "agents"], "request_rate must be given with --trace agents"),
        (["--trace", "missing.jsonl", "--request-rate", "1"], "a file, or one of agents"),
        (["--trace", "fixed", "--request-rate", "1", "--max-active-conversations", "2"], "has no conversations"),
    ],
)
def test_options_that_do_not_fit_a_trace_are_refused(arguments, said):
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert isinstance(result.exception, InvalidParameter) and said in str(result.exception)


def test_turns_wait_for_answers_and_subagents_run_at_a_time():
    turns = [Turn(0, 0, (), 0.0), Turn(0, 1, (0,), 0.0), Turn(0, 2, (0,), 0.0), Turn(0, 0, (1, 2), 0.0)]
    under_way, most, order = set(), 0, []

    async def send(body: bytes, session: str) -> RequestResult:
        nonlocal most
        under_way.add(body)
        most = max(most, len(under_way))
        for _ in range(3):
            await asyncio.sleep(0)
        under_way.remove(body)
        order.append((body, session))
        return RequestResult(output_tokens=int(body))

    outcomes = asyncio.run(send_turns(send, [b"0", b"1", b"2", b"3"], [0.0] * 4, turns, None))
    assert [outcome.output_tokens for outcome in outcomes] == [0, 1, 2, 3]
    assert most == 2 and [body for body, _ in order][::3] == [b"0", b"3"]
    assert [session for _, session in order] == [f"session-0-agent-{agent}" for agent in (0, 1, 2, 0)]


def test_random_prompts_of_agents_begin_alike_where_the_trace_says_so():
    trace = make_trace("agents", 40, 1.0).scaled(0.01)
    prompts = list(trace_prompts(trace, 1000, seed=0))
    assert [len(prompt) for prompt in prompts] == trace.prompt_tokens.tolist()
    for index, turn in enumerate(trace.turns):
        if len(turn.after) == 1 and trace.turns[turn.after[0]].agent == turn.agent:
            before = prompts[turn.after[0]]
            assert prompts[index][: len(before)] == before
