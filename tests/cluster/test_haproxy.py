"""What `manta-haproxy` makes of Ray's configurations, by Ray's own HAProxy. Without Ray."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPSConnection

import httpx
import psutil
import pytest
from ray.serve._private.haproxy import BackendConfig, ServerConfig

from cluster import haproxy
from cluster.ray_environment import FRONT, tls_environment
from deployments.http.server_header import NODE_HEADER, SERVER_HEADER, SERVER_VARIABLE
from tests.cluster.haproxy_process import needs_haproxy, rendered, replaceable, running
from tests.deployments.openai.bad_requests import Bad
from tests.serve.serve_run import free_port, wait_until

pytestmark = needs_haproxy
# without the header, HAProxy may send another request over a connection that is about to close, and answer nothing
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"


def test_haproxy_that_knows_no_application_yet_asks_clients_to_try_again():
    with running({}) as (url, _, _):
        answer = httpx.post(f"{url}/v1/completions", json={})
        Bad("/", b"", status=503).check(answer)
        assert answer.headers["retry-after"] == "1"


def test_haproxy_that_knows_an_application_answers_404_to_other_paths():
    with running({"a": BackendConfig(name="http-a", path_prefix="/a", app_name="a")}) as (url, _, _):
        Bad("/b", b"", status=404).check(httpx.get(f"{url}/b"))


def test_request_that_ingresses_do_not_answer_gets_the_right_status_in_openai_s_shape():
    ingresses: dict[str, Callable[[socket.socket], object] | None] = {
        "ends": lambda connection: connection.close(),
        "hangs": lambda connection: list(iter(lambda: connection.recv(1000), b"")),
        "gone": None,
    }
    with ExitStack() as stack:
        ports = {name: stack.enter_context(ingress_that(answer)) for name, answer in ingresses.items()}
        (url, _, _) = stack.enter_context(running({name: application(name, port) for name, port in ports.items()}))
        for name, status, headers in (
            ("ends", 502, {}),
            ("hangs", 504, {"x-should-retry": "false"}),
            ("gone", 503, {"retry-after": "1"}),
        ):
            answer = httpx.post(f"{url}/{name}/v1/completions", json={}, timeout=20)
            Bad(name, b"", status=status).check(answer)
            assert headers.items() <= dict(answer.headers).items()


def test_serves_own_proxy_is_never_asked_in_place_of_ingresses():
    """Another cluster's may listen where it did."""
    asked: list[bytes] = []
    with ingress_that(lambda connection: asked.append(b"")) as other, ingress_that(None) as gone:
        backends = {name: application(name, gone) for name in ("none", "gone")}
        backends["none"].servers = []
        for backend in backends.values():
            backend.fallback_server = ServerConfig(name="proxy", host="127.0.0.1", port=other)
        with running(backends) as (url, _, _):
            wait_until(lambda: httpx.get(f"{url}/gone/v1/models", timeout=20).status_code == 503)
            for name in backends:
                answer = httpx.get(f"{url}/{name}/v1/models", timeout=20)
                Bad(name, b"", status=503).check(answer)
                assert answer.headers["retry-after"] == "1"
    assert not asked


def test_ingresses_stay_while_serve_names_none(tmp_path):
    """As it does for some seconds while it builds an application again."""
    memory, line = tmp_path / "ingresses", "server server-a 127.0.0.1:1 check"
    one, none = application("a", 1), application("a", 1)
    none.servers = []
    none.fallback_server = ServerConfig(name="proxy", host="127.0.0.1", port=2)
    for applications, kept in (({"a": none}, False), ({"a": one}, True), ({"a": none}, True), ({"a": none}, True)):
        assert (line in haproxy.configured(rendered(applications, tmp_path).read_text(), memory)) is kept
    for applications in ({}, {"a": none}):  # it was deleted
        assert line not in haproxy.configured(rendered(applications, tmp_path).read_text(), memory)


def test_a_stopping_ingress_gets_requests_until_haproxy_is_told_of_another():
    """It fails its health checks at once, and answers for some seconds more."""
    healths = ["200 OK"]
    asked: list[str] = []

    def health() -> str:
        asked.append(healths[-1])
        return healths[-1]

    with ingress_that(lambda connection: connection.sendall(ANSWER), health=health) as port:
        backend = application("a", port)
        backend.health_check_fall = int(FRONT["RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL"])
        backend.health_check_inter = "50ms"
        with running({"a": backend}) as (url, _, _):
            wait_until(lambda: len(asked) >= 3)
            healths.append("503 Service Unavailable")
            wait_until(lambda: asked.count(healths[-1]) >= 4)
            assert httpx.get(f"{url}/a/v1/models", timeout=20).status_code == 200


def test_requests_tell_ingresses_which_server_and_node_they_were_sent_to():
    heads: list[bytes] = []
    with (
        subprocess.Popen([sys.executable, "-c", "input()", "--node_id=1a2b"], stdin=subprocess.PIPE) as raylet,
        ingress_that(lambda connection: connection.sendall(ANSWER), heads=heads) as port,
        running(
            {"a": application("a", port)}, environment={SERVER_VARIABLE: "ours", "RAY_RAYLET_PID": str(raylet.pid)}
        ) as (url, _, _),
    ):
        forged = {SERVER_HEADER: "forged", NODE_HEADER: "forged"}
        wait_until(lambda: httpx.get(f"{url}/a/b", headers=forged).text == "ok")
        raylet.kill()
    assert heads and all(b"x-manta-server: ours" in head and b"forged" not in head for head in heads)
    assert all(b"x-manta-node: 1a2b" in head for head in heads)


@pytest.mark.parametrize("tls", [False, True])
def test_requests_on_connections_that_outlive_their_haproxy_are_answered(tls, certificate):
    """By the ingresses of the process that replaced it, while the old ones end."""
    https = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    https.load_cert_chain(certificate.certfile, certificate.keyfile)
    trusting = ssl.create_default_context(cafile=str(certificate.certfile))
    files = {"ssl_certfile": str(certificate.certfile), "ssl_keyfile": str(certificate.keyfile)}
    environment = tls_environment(files) if tls else {}
    with ExitStack() as stack, ExitStack() as old_ingress:
        new, old = (
            until.enter_context(ingress_that(lambda client: client.sendall(ANSWER), https if tls else None))
            for until in (stack, old_ingress)
        )
        first = {"a": application("a", old), "late": application("late", old)}
        first["late"].servers = []  # as while Serve starts its ingresses
        later = {name: application(name, new) for name in ("a", "late", "added")}
        port, replace = stack.enter_context(replaceable(first, later, environment))
        connect = partial(HTTPSConnection, context=trusting) if tls else HTTPConnection
        wait_until(lambda: answer(connect("localhost", port, timeout=20), "/a/b") == (200, True))
        idle = [connect("localhost", port, timeout=20) for _ in range(40)]
        assert all(answer(connection, "/a/b") == (200, True) for connection in idle)
        replace()
        for path in ("/a/b", "/late/b", "/added/b"):
            assert answer(idle.pop(), path) == (200, False)
        old_ingress.close()
        assert all(answer(connection, "/a/b") == (200, False) for connection in idle)


def test_request_on_a_connection_that_outlives_haproxys_manager_is_answered():
    with (
        ingress_that(lambda client: client.sendall(ANSWER)) as port,
        running({"a": application("a", port)}) as (url, _, starter),
    ):
        address = "127.0.0.1", httpx.URL(url).port
        wait_until(lambda: answer(HTTPConnection(*address, timeout=20), "/a/b") == (200, True))
        idle = [HTTPConnection(*address, timeout=20) for _ in range(2)]
        assert all(answer(connection, "/a/b") == (200, True) for connection in idle)
        starter.kill()
        wait_until(lambda: not connects(url))
        assert all(answer(connection, "/a/b") == (200, False) for connection in idle)


def answer(connection: HTTPConnection, path: str) -> tuple[int, bool]:
    """Its status, and whether the connection stays open."""
    connection.request("GET", path)
    response = connection.getresponse()
    response.read()
    return response.status, not response.will_close


def application(name: str, port: int) -> BackendConfig:
    server = ServerConfig(name=f"server-{name}", host="127.0.0.1", port=port)
    return BackendConfig(name=name, path_prefix=f"/{name}", app_name=name, servers=[server], timeout_server_s=1)


@contextmanager
def ingress_that(
    answer: Callable[[socket.socket], object] | None,
    tls: ssl.SSLContext | None = None,
    heads: list[bytes] | None = None,
    health: Callable[[], str] = lambda: "200 OK",
) -> Iterator[int]:
    """Its port. answer: to a request; None for one that is gone. heads: of requests, to be filled. health: returns the
    status of a health check."""
    if answer is None:
        yield free_port()
        return

    def serve_one(connection: socket.socket) -> None:
        with (
            suppress(OSError),  # at the end
            connection if tls is None else tls.wrap_socket(connection, server_side=True) as connection,
        ):
            head = connection.recv(1000)
            if b"healthz" in head:
                connection.sendall(f"HTTP/1.1 {health()}\r\ncontent-length: 0\r\n\r\n".encode())
                return
            if heads is not None:
                heads.append(head)
            answer(connection)

    def serve() -> None:
        with suppress(OSError):  # at the end
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve_one, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(60)


def test_with_a_certificate_clients_and_ingresses_are_spoken_to_over_tls(certificate):
    https = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    https.load_cert_chain(certificate.certfile, certificate.keyfile)
    environment = tls_environment({"ssl_certfile": str(certificate.certfile), "ssl_keyfile": str(certificate.keyfile)})
    with (
        ingress_that(lambda connection: connection.sendall(ANSWER), https) as port,
        running({"a": application("a", port)}, environment=environment) as (url, _, _),
    ):
        trusting = ssl.create_default_context(cafile=str(certificate.certfile))
        secure = url.replace("http://127.0.0.1", "https://localhost")
        wait_until(lambda: httpx.get(f"{secure}/a/b", verify=trusting).text == "ok")
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"{url}/a/b")


def client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def old_hello(minor: int) -> bytes:
    """Of a client that knows TLS 1.0 (1) or 1.1 (2) only."""
    hello = bytes([3, minor]) + bytes(32) + b"\0" + b"\0\x02\xc0\x09" + b"\1\0"
    message = b"\x01" + len(hello).to_bytes(3) + hello
    return b"\x16\x03\x01" + len(message).to_bytes(2) + message


@pytest.mark.slow
def test_clients_that_begin_tls_badly_or_not_at_all_are_closed_in_time_and_others_are_answered_meanwhile(certificate):
    https = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    https.load_cert_chain(certificate.certfile, certificate.keyfile)
    environment = tls_environment({"ssl_certfile": str(certificate.certfile), "ssl_keyfile": str(certificate.keyfile)})
    hello, refused = client_hello(), b"\x15\x03"  # an alert
    waiting = {"nothing": b"", "half a hello": hello[:200], "no second step": hello}
    waiting |= {f"one byte {i}": hello[:1] for i in range(100)}
    wrong = {
        "garbage": b"\xff" * 600,
        "HTTP": b"GET /a/b HTTP/1.1\r\nhost: a\r\n\r\n",
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\n",
    }
    wrong |= {"TLS 1.0": old_hello(1), "TLS 1.1": old_hello(2), "an alert": b"\x15\x03\x01\x00\x02\x02\x28"}
    with (
        ingress_that(lambda connection: connection.sendall(ANSWER), https) as port,
        running({"a": application("a", port)}, environment=environment, timeout_client_s=3) as (url, _, _),
        ExitStack() as stack,
    ):
        trusting = ssl.create_default_context(cafile=str(certificate.certfile))
        secure = url.replace("http://127.0.0.1", "https://localhost")
        wait_until(lambda: httpx.get(f"{secure}/a/b", verify=trusting).text == "ok")
        address = "127.0.0.1", httpx.URL(url).port
        bad = {}
        for name, sent in (waiting | wrong).items():
            bad[name] = stack.enter_context(socket.create_connection(address, timeout=60))
            bad[name].sendall(sent)
        reset = socket.create_connection(address)
        reset.sendall(hello[:200])
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reset.close()
        assert httpx.get(f"{secure}/a/b", verify=trusting).text == "ok"
        for name, connection in bad.items():
            answer = b""
            with suppress(ConnectionResetError):
                while got := connection.recv(10_000):
                    answer += got
            assert name in waiting or not answer or answer.startswith(refused), name
        assert httpx.get(f"{secure}/a/b", verify=trusting).text == "ok"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_haproxys_metrics_listen_where_the_api_does_and_its_statistics_for_this_machine_only(host):
    """Prometheus reads the metrics of a pod, where a NetworkPolicy names who else may."""
    with running({"a": BackendConfig(name="http-a", path_prefix="/a", app_name="a")}, host) as (_, _, starter):
        (proxy,) = psutil.Process(starter.pid).children()
        listening = [c.laddr.ip for c in proxy.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert sorted(listening) == sorted([host, host, "127.0.0.1"])
        (admin,) = [c.laddr for c in proxy.net_connections("unix") if "admin.sock" in c.laddr]  # it was renamed since
        assert stat.S_IMODE(os.stat(admin.partition(".sock")[0] + ".sock").st_mode) == 0o600


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
