"""HAProxy among connections that never become a request: what others wait. Without Ray."""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.cluster.haproxy_process import needs_haproxy, running
from tests.cluster.test_haproxy import ANSWER, application, ingress_that
from tests.serve.serve_run import wait_until

pytestmark = needs_haproxy

SOCKETS = str(Path(__file__).with_name("waiting_sockets.py"))
EVENT_S, STREAMS = 0.02, 16


@contextmanager
def waiting_sockets(port: int, source: str, silent: int, slow: int) -> Iterator[None]:
    arguments = map(str, (port, source, silent, slow))
    with subprocess.Popen([sys.executable, SOCKETS, *arguments], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline(), "all have been opened"
            yield
        finally:
            process.kill()


def stream(connection: socket.socket) -> None:
    """An event every EVENT_S, until the client leaves."""
    with suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        while True:
            connection.sendall(b"data: a\n\n")
            time.sleep(EVENT_S)


def longest_pause(url: str, until: threading.Event) -> float:
    """Of a stream that is read until then, in seconds."""
    longest = 0.0
    with httpx.stream("GET", url, timeout=60) as response:
        last = time.monotonic()
        for _ in response.iter_raw():
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            if until.is_set():
                return longest
    raise AssertionError("the stream ended")


def seconds_of_a_request(url: str) -> float:
    began = time.monotonic()
    assert httpx.get(url, timeout=60).text == "ok"
    return time.monotonic() - began


def test_a_source_that_takes_all_connections_it_can_leaves_some_to_others():
    with (
        ingress_that(lambda connection: connection.sendall(ANSWER)) as port,
        running({"a": application("a", port)}, environment={"RAY_SERVE_HAPROXY_MAXCONN": "40"}) as (url, _, _),
    ):
        wait_until(lambda: httpx.get(f"{url}/a/b").text == "ok")
        with waiting_sockets(int(url.rpartition(":")[2]), "127.0.0.2", 200, 0):
            assert seconds_of_a_request(f"{url}/a/b") < 9  # in which HAProxy closes none of them


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nx:"])
@pytest.mark.slow
def test_connection_without_a_whole_header_is_closed_after_ten_seconds(begun):
    with running({}) as (url, _, _), socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as connection:
        began = time.monotonic()
        connection.sendall(begun)
        connection.settimeout(30)
        answer = b"".join(iter(lambda: connection.recv(10_000), b""))
        assert 9 < time.monotonic() - began < 20
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_http_2_is_not_spoken_on_the_clear_port():
    """Neither to those who begin with it, nor to those who ask for it."""
    ask = b"GET /a/b HTTP/1.1\r\nhost: a\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    settings = b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n"
    with (
        ingress_that(lambda connection: connection.sendall(ANSWER)) as port,
        running({"a": application("a", port)}) as (url, _, _),
    ):
        wait_until(lambda: httpx.get(f"{url}/a/b").text == "ok")
        for bytes_, status in ((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"), (ask + settings, b"200")):
            with closing(socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=20)) as connection:
                connection.sendall(bytes_)
                assert connection.recv(1000).startswith(b"HTTP/1.1 " + status)


@pytest.mark.slow
def test_ten_thousand_connections_that_send_nothing_or_little_keep_nobody_waiting():
    with ingress_that(stream) as streams, ingress_that(lambda connection: connection.sendall(ANSWER)) as short:
        applications = {"streams": application("streams", streams), "short": application("short", short)}
        with running(applications) as (url, _, _):
            wait_until(lambda: httpx.get(f"{url}/short/a").text == "ok")
            done, pauses = threading.Event(), list[float]()
            read = lambda: pauses.append(longest_pause(f"{url}/streams/a", done))  # noqa: E731
            readers = [threading.Thread(target=read, daemon=True) for _ in range(STREAMS)]
            for reader in readers:
                reader.start()
            with waiting_sockets(int(url.rpartition(":")[2]), "127.0.0.1", 5000, 5000):
                waits, end = list[float](), time.monotonic() + 20
                while time.monotonic() < end:
                    waits.append(seconds_of_a_request(f"{url}/short/a"))
                    time.sleep(0.1)
            done.set()
            for reader in readers:
                reader.join(60)
    print(
        f"{len(waits)} requests: median {statistics.median(waits):.3f} s, slowest {max(waits):.2f} s; "
        f"{len(pauses)} streams: longest pause {max(pauses):.2f} s"
    )
    assert len(pauses) == STREAMS
    assert max(waits) < 5
    assert max(pauses) < 5
