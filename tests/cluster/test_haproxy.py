"""What `manta-haproxy` makes of Ray's configurations, by Ray's own HAProxy. Without Ray."""

from __future__ import annotations

import socket

import httpx
from ray.serve._private.haproxy import BackendConfig

from tests.cluster.haproxy_process import needs_haproxy, running
from tests.serve.serve_run import wait_until

pytestmark = needs_haproxy


def test_haproxy_that_knows_no_application_yet_asks_clients_to_try_again():
    with running({}) as (url, _, _):
        answer = httpx.post(f"{url}/v1/completions", json={})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_haproxy_that_knows_an_application_answers_404_to_other_paths():
    with running({"a": BackendConfig(name="http-a", path_prefix="/a", app_name="a")}) as (url, _, _):
        assert httpx.get(f"{url}/b").status_code == 404


def test_haproxy_whose_manager_is_killed_lets_go_of_its_port_and_finishes_what_it_has():
    with running({}) as (url, _, starter), socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as early:
        early.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n")
        starter.kill()
        wait_until(lambda: not connects(url))
        early.sendall(b"\r\n{}")
        assert early.recv(100).startswith(b"HTTP/1.1 503")


def connects(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", httpx.URL(url).port)).close()
    except ConnectionRefusedError:
        return False
    return True
