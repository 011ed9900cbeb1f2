from __future__ import annotations

import asyncio
import json
import socket
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cluster.cli import main as cli
from cluster.cli.bench import serve
from cluster.cli.bench.load import ServeLoad
from cluster.cli.bench.openai_client import RequestResult
from cluster.cli.bench.serve import meets, parse_goodput, send_all, summarise
from engine.errors import InvalidParameter
from tests.cluster.cli.bench.fake_openai_server import FakeOpenAIServer


@pytest.fixture
def server():
    server = FakeOpenAIServer()
    yield server
    server.close()


def bench(*arguments: str, exit_code: int = 0):
    result = CliRunner().invoke(cli.app, ["bench", "serve", *arguments])
    assert result.exit_code == exit_code, result.output
    return result


def report(server: FakeOpenAIServer, *arguments: str, exit_code: int = 0) -> dict:
    result = bench("--base-url", server.url, "--json", "--num-prompts", "8", *arguments, exit_code=exit_code)
    return json.loads(result.stdout)


def test_every_request_is_measured(server):
    fields = report(server, "--input-len", "12", "--output-len", "5")
    assert (fields["completed"], fields["failed"], fields["without_usage"]) == (8, 0, 0)
    assert fields["model"] == "fake"
    assert (fields["total_input_tokens"], fields["total_output_tokens"]) == (8 * 7, 8 * 5)  # by the server's usage
    assert fields["output_throughput"] == pytest.approx(40 / fields["duration"])
    assert fields["total_token_throughput"] == pytest.approx(96 / fields["duration"])
    assert fields["request_throughput"] == pytest.approx(8 / fields["duration"])
    for statistic in ("mean", "median", "p90", "p99"):
        ttft, tpot, itl, e2el = (fields[f"{statistic}_{name}_ms"] for name in ("ttft", "tpot", "itl", "e2el"))
        assert 0 < ttft <= e2el <= 1e3 * fields["duration"]
        assert tpot >= 0 and itl >= 0
    path, body = server.requests[0]
    assert path == "/v1/completions"
    assert len(body["prompt"]) == 12 and all(10 <= token < 1000 for token in body["prompt"])
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (5, 0, True)


def test_prompts_are_those_of_the_seed(server):
    for seed in ("0", "0", "1"):
        report(server, "--seed", seed)
    first, again, other = ([body["prompt"] for _, body in server.requests[i : i + 8]] for i in (0, 8, 16))
    assert sorted(first) == sorted(again) != sorted(other)


def test_a_chat_sends_messages_and_its_role_chunk_is_no_token(server):
    server.sends_usage = False
    fields = report(server, "--endpoint", "chat", "--output-len", "5")
    assert fields["total_output_tokens"] == 40
    assert fields["without_usage"] == 8
    path, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert [message["role"] for message in body["messages"]] == ["user"]


def test_text_model_key_and_own_fields_reach_the_server(server):
    report(server, "--text", "--model", "mine", "--api-key", "k", "--no-ignore-eos", "--temperature", "0.5")
    _, body = server.requests[0]
    assert isinstance(body["prompt"], str)
    assert (body["model"], body["temperature"]) == ("mine", 0.5)
    assert "ignore_eos" not in body
    assert server.authorization == "Bearer k"


def test_warm_ups_are_sent_and_not_counted(server):
    assert report(server, "--num-warmups", "3")["completed"] == 8
    assert len(server.requests) == 11


def test_goodput_counts_what_meets_every_objective(server):
    assert report(server)["request_goodput"] is None
    easy = report(server, "--goodput", "ttft:60000 tpot:60000 e2el:60000")
    assert easy["request_goodput"] == pytest.approx(easy["request_throughput"])
    assert report(server, "--goodput", "ttft:60000 e2el:0")["request_goodput"] == 0


def test_half_of_the_requests_fail_and_so_does_the_command(server):
    server.fails = True
    fields = report(server, "--output-len", "5", exit_code=1)
    assert (fields["completed"], fields["failed"]) == (4, 4)
    assert fields["errors"] == {"HTTP 500: out of luck": 4}
    assert fields["total_output_tokens"] == 4 * 5
    shown = bench("--base-url", server.url, "--num-prompts", "4", exit_code=1).stdout
    assert "failed 2 times: HTTP 500: out of luck" in shown


@pytest.mark.parametrize(
    ("trouble", "message"),
    [({"breaks_off": True}, "ended early"), ({"error": "no memory"}, "no memory")],
)
def test_a_stream_that_breaks_is_a_failure(server, trouble, message):
    for name, value in trouble.items():
        setattr(server, name, value)
    fields = report(server, exit_code=1)
    assert fields["failed"] == 8
    assert message in next(iter(fields["errors"]))
    assert fields["mean_ttft_ms"] is None


def test_a_request_without_an_answer_is_given_up(server):
    server.hangs = True
    fields = report(server, "--timeout-s", "0.1", exit_code=1)
    assert fields["errors"] == {"not finished within 0.1 s": 8}


def test_the_table_shows_totals_and_latencies(server):
    shown = bench("--base-url", server.url, "--num-prompts", "4", "--goodput", "ttft:60000").stdout
    for name in ("completed", "output tokens/s", "goodput", "TTFT", "TPOT", "ITL", "E2EL", "p99"):
        assert name in shown


def message_of(monkeypatch, capsys, *arguments: str) -> str:
    """The one line of an error that the user can mend."""
    monkeypatch.setattr(sys, "argv", ["manta", "bench", "serve", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_no_server_is_one_clear_line(monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound but not listening: refused, and nobody else can take it
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        line = message_of(monkeypatch, capsys, "--base-url", url)
    assert line == f"manta: no server answers at {url}: connection refused"


def test_a_server_that_names_no_model_needs_one_given(server, monkeypatch, capsys):
    server.models = []
    assert "model must be given" in message_of(monkeypatch, capsys, "--base-url", server.url)
    assert report(server, "--model", "mine")["completed"] == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--goodput", "ttft=200"], "goodput must be pairs like ttft:200"),
        (["--goodput", "itl:5"], "goodput must be pairs like ttft:200"),
        (["--request-rate", "0"], "request_rate must be above 0"),
        (["--endpoint", "embeddings"], "endpoint must be one of completions, chat"),
        (["--base-url", "ftp://localhost"], "base_url must be like http://127.0.0.1:8000"),
    ],
)
def test_a_wrong_option_is_one_clear_line(arguments, message, monkeypatch, capsys):
    assert message in message_of(monkeypatch, capsys, *arguments)


def test_base_url_may_have_v1_behind_and_no_scheme(server):
    bench("--base-url", server.url + "/v1/", "--num-prompts", "1")
    bench("--base-url", server.url.removeprefix("http://"), "--num-prompts", "1")


# -- without a server --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "most"), [(3, 3), (None, 10)])
def test_no_more_requests_than_asked_for_are_on_their_way(limit, most):
    now = highest = 0

    async def send(_: bytes) -> RequestResult:
        nonlocal now, highest
        now += 1
        highest = max(highest, now)
        for _ in range(5):
            await asyncio.sleep(0)
        now -= 1
        return RequestResult()

    outcomes = asyncio.run(send_all(send, [b""] * 10, [0.0] * 10, limit))
    assert len(outcomes) == 10
    assert highest == most


def test_each_request_is_sent_at_its_time(monkeypatch):
    now, sent = 100.0, []
    sleep = asyncio.sleep

    async def move_clock(seconds: float) -> None:
        nonlocal now
        await sleep(0)  # what is ready runs before time passes
        now += seconds

    async def send(_: bytes) -> RequestResult:
        sent.append(now)
        return RequestResult()

    monkeypatch.setattr(serve, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(asyncio, "sleep", move_clock)
    asyncio.run(send_all(send, [b""] * 4, [0.5, 1.0, 1.0, 4.0], None))
    assert sent == [100.5, 101.0, 101.0, 104.0]


def outcome(
    ttft_s: float = 0.1, e2el_s: float = 0.5, output_tokens: int = 5, error: str | None = None
) -> RequestResult:
    return RequestResult(ttft_s=ttft_s, e2el_s=e2el_s, output_tokens=output_tokens, itl_s=[0.1] * 4, error=error)


def test_objectives_are_limits_in_milliseconds_that_may_be_reached():
    assert parse_goodput("ttft:200 tpot:50.5") == {"ttft": 200, "tpot": 50.5}
    assert meets(outcome(), {"ttft": 100, "tpot": 100, "e2el": 500})
    assert not meets(outcome(), {"ttft": 99})
    assert not meets(outcome(), {"ttft": 100, "tpot": 99})
    assert not meets(outcome(), {"e2el": 499})
    assert meets(outcome(output_tokens=1), {"tpot": 0})
    with pytest.raises(InvalidParameter, match="goodput"):
        parse_goodput("ttft:-1")


def test_failed_requests_count_for_nothing_but_themselves():
    outcomes = [outcome(), outcome(ttft_s=0.3), outcome(e2el_s=9.0, error="lost"), outcome(error="lost")]
    load = ServeLoad(num_prompts=4, input_len=10, prefix_len=2)
    result = summarise(outcomes, 2.0, load, "url", "model", {"ttft": 200}, 0.0)
    assert (result.completed, result.failed, result.errors) == (2, 2, {"lost": 2})
    assert (result.total_input_tokens, result.total_output_tokens) == (24, 10)
    assert list(result.throughputs.values()) == [1, 5, 17]
    assert result.request_goodput == 0.5
    assert result.latencies["ttft"].median == pytest.approx(200)
    assert result.latencies["e2el"].max == pytest.approx(500)
    assert result.latencies["itl"].mean == pytest.approx(100)


def test_the_requests_of_a_trace_are_sent_with_their_lengths_and_common_beginnings(server, tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 40, "input_length": 700, "output_length": 5, "hash_ids": [1, 3]},
        {"timestamp": 20, "input_length": 9, "output_length": 2},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    fields = json.loads(bench("--base-url", server.url, "--json", "--trace", str(tmp_path / "t.jsonl")).stdout)
    assert (fields["completed"], fields["num_prompts"], fields["input_len"]) == (3, 3, 436)
    assert fields["duration"] > 0.04
    prompts = {body["max_tokens"]: body["prompt"] for _, body in server.requests}
    assert {tokens: len(prompt) for tokens, prompt in prompts.items()} == {3: 600, 5: 700, 2: 9}
    assert prompts[3][:512] == prompts[5][:512] != prompts[3][512:] and prompts[3][512] != prompts[5][512]


def test_lengths_beside_a_trace_are_refused(server, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"timestamp": 0, "input_length": 5, "output_length": 1}')
    result = CliRunner().invoke(cli.app, ["bench", "serve", "--trace", str(tmp_path / "t.jsonl"), "--input-len", "9"])
    assert isinstance(result.exception, InvalidParameter) and "--input-len" in str(result.exception)
