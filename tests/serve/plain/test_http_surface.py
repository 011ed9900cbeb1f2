"""The HTTP surface against a real `serve run`: what a test in one process cannot see."""

from __future__ import annotations

import socket

import httpx
import pytest

from tests.deployments.openai.bad_requests import BAD, Bad

pytestmark = pytest.mark.serve

ASK = {"prompt": "The", "max_tokens": 2}


def test_every_bad_request_is_refused_through_the_whole_stack_and_the_server_lives_on(server):
    with httpx.Client(timeout=60) as client:
        for bad in BAD:
            bad.check(client.send(bad.request(server.url)))
        assert client.post(f"{server.url}/v1/completions", json=ASK).status_code == 200


def test_body_of_unknown_length_is_refused(server):
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(
        f"{server.url}/v1/completions", content=(b" " * 2**20 for _ in range(17)), headers=headers, timeout=60
    )
    Bad("/v1/completions", b"", status=413).check(answer)


def test_request_id_is_sent_back_once(server):
    with httpx.Client(timeout=60) as client:
        for given in ({"X-Request-Id": "abc"}, {}):
            answer = client.post(f"{server.url}/v1/completions", json=ASK, headers=given)
            (request_id,) = answer.headers.get_list("x-request-id")
            assert answer.json()["id"] == f"cmpl-{request_id}"
            assert request_id == given.get("X-Request-Id", request_id)


def test_version_load_and_openapi_document(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.get("/version").json()["version"]
        assert client.get("/load").json() == {"server_load": 0}
        assert "/v1/chat/completions" in client.get("/openapi.json").json()["paths"]


def test_tokens_make_the_round_trip(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        tokens = client.post("/tokenize", json={"prompt": "The fox", "add_special_tokens": False}).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "The fox"}


def test_server_listens_on_loopback_only(server):
    address = next(
        (a[4][0] for a in socket.getaddrinfo(socket.gethostname(), None) if not a[4][0].startswith(("127.", "::1"))),
        None,
    )
    if address is None:
        pytest.skip("this machine has no other address")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{address}:{server.port}/health", timeout=10)


def test_deadline_ends_a_request_that_takes_longer(server):
    body = {"prompt": "The", "max_tokens": 500, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Timeout-Ms": "50"}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["type"]) == (408, "timeout_error")
