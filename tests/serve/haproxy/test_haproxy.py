"""Serve with HAProxy in front and HTTP answered by the ingress replica itself, as `manta serve` starts it on Linux."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import httpx
import openai
import psutil
import pytest

from tests.deployments.openai.bad_requests import Bad
from tests.scrape import Scrape
from tests.serve.haproxy.clients import ALICE, KEYS, MAX_NUM_SEQS
from tests.serve.serve_run import ServeRun, wait_until

pytestmark = pytest.mark.serve


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS["alice"], timeout=60, max_retries=0) as client:
        yield client


def listeners(server: ServeRun) -> set[tuple[str, str]]:
    """(program, address) of what listens on the port that clients use."""
    return {
        (process.name(), connection.laddr.ip)
        for process in server.processes()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == server.port
    }


def test_haproxy_listens_for_clients_and_on_loopback_only(server):
    assert listeners(server) == {("haproxy", "127.0.0.1")}


def test_ranks_have_the_priority_of_the_command_that_serves(server):
    command, *others = server.processes()
    ranks = [process for process in others if "RankActor" in " ".join(process.cmdline())]
    assert {rank.nice() for rank in ranks} == {command.nice()}


def test_no_process_that_serve_starts_has_loaded_pandas(server):
    names = ("Serve", "ProxyActor", "HAProxyManager", "RankActor")
    workers = [process for process in server.processes() if any(name in process.name() for name in names)]
    assert len(workers) >= 8
    assert not [worker for worker in workers if any("/pandas/" in part.path for part in worker.memory_maps())]


def test_streamed_answer_is_the_whole_one_in_many_chunks(client):
    ask = {"model": "tiny", "prompt": "a b c", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**ask).choices[0].text
    chunks = [chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True)]
    assert "".join(chunks) == whole
    assert len(chunks) > 4


def test_errors_keep_their_status_and_shape(server):
    answer = httpx.post(
        f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": -1}, headers=ALICE
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"
    assert httpx.get(f"{server.url}/nowhere", headers=ALICE).status_code == 404


def test_headers_that_are_no_text_are_refused(server):
    for header in ("x-request-id", "x-session-id", "user-agent"):
        answer = httpx.get(f"{server.url}/v1/models", headers=[*ALICE.items(), (header, b"a\xff")])
        Bad("/v1/models", b"", header).check(answer)


def test_path_with_a_slash_too_many_is_an_error_and_no_redirect(server):
    for path in ("/v1/completions/", "//v1/completions", "/v1//completions", "/v1/chat/completions/"):
        Bad(path, b"", status=404).check(httpx.post(f"{server.url}{path}", json={}, headers=ALICE))


def wait_for_metric(server: ServeRun, line: str) -> None:
    """Until /metrics has a line that begins with this pattern."""
    pattern = re.compile(f"^{line}", re.MULTILINE)
    wait_until(lambda: pattern.search(httpx.get(f"{server.url}/metrics", headers=ALICE).text) is not None)


def test_client_that_does_not_wait_for_its_whole_answer_frees_its_blocks(server):
    # log-probabilities make it take seconds even with so small a model
    body = {"model": "tiny", "prompt": "a", "max_tokens": 500, "n": 2 * MAX_NUM_SEQS, "logprobs": 5, "ignore_eos": True}

    async def ask_and_leave() -> None:
        async with httpx.AsyncClient(base_url=server.url, headers=ALICE, timeout=60) as client:
            answer = asyncio.create_task(client.post("/v1/completions", json=body))
            # as many as there may be, or it might be a request of another test
            full = rf"vllm:num_requests_running\{{.*tiny.*\}} {MAX_NUM_SEQS}\.0$"
            await asyncio.to_thread(wait_for_metric, server, full)
            answer.cancel()
            await asyncio.wait([answer])

    asyncio.run(ask_and_leave())
    wait_for_metric(server, r'vllm:request_success_total\{finished_reason="abort".*tiny.*\} [1-9]')
    wait_for_metric(server, r"vllm:num_requests_running\{.*tiny.*\} 0\.0$")


def test_client_that_leaves_a_stream_frees_its_blocks(server, client):
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_for_metric(server, r"vllm:num_requests_running\{.*tiny.*\} 0\.0$")


def test_answer_with_an_idempotency_key_goes_on_when_its_client_leaves(server):
    body = {"model": "tiny", "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    ask = {"url": f"{server.url}/v1/completions", "json": body, "headers": {**ALICE, "Idempotency-Key": "left"}}

    def ended(reason: str) -> float:
        metrics = Scrape(httpx.get(f"{server.url}/metrics", headers=ALICE).text)
        return metrics.sum("vllm:request_success_total", model_name="tiny", finished_reason=reason)

    before = ended("abort"), ended("length")
    with httpx.stream("POST", **ask, timeout=60) as response:
        next(response.iter_lines())
    assert httpx.post(**ask, timeout=60).text.endswith("data: [DONE]\n\n")
    assert (ended("abort"), ended("length")) == (before[0], before[1] + 1)
