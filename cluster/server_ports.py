"""Ports reserved for one server on a machine.

Ray uses the same port numbers in every cluster, so two clusters on one machine would answer each other's requests:
Serve's own proxies silently share a port, and HAProxy sends requests to any process that listens on an ingress's old
port.
"""

from __future__ import annotations

import os
import socket
import sys
from functools import cache
from typing import NamedTuple

from engine.errors import ConfigError, StartupError

FIRST_PORT, LAST_PORT = 30_000, 31_000  # below the ports that systems assign themselves
SERVER_PORTS = 100  # ports reserved per server
# Ray's variables, with the offset of their port among a server's ports, of which the first is held.
PORTS = {
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 1,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 2,
    "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": 10,
    "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": 69,
    "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": 70,
    "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": 99,
}
AGENT_PORTS = {  # offsets of the ports of Ray's agents, by the names of Ray's parameters
    "metrics_agent_port": 5,
    "metrics_export_port": 6,
    "dashboard_agent_listen_port": 7,
    "runtime_env_agent_port": 8,
}


class KnownPort(NamedTuple):
    """A port with a well-known number."""

    number: int
    offset: int  #: offset of the port that replaces it if another server has it
    use: str


KNOWN_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": KnownPort(8404, 3, "HAProxy's statistics"),
    "RAY_SERVE_HAPROXY_METRICS_PORT": KnownPort(9101, 4, "HAProxy's metrics"),
}


def server_ports() -> dict[str, str]:
    """Return the variables that assign ports to this process's server. No other server on this machine gets them while
    this process lives. Variables that are already set stay unchanged.

    HAProxy's statistics and metrics use Ray's usual ports, unless another server has them. Raises StartupError.
    """
    if sys.platform != "linux":
        return {}
    first: int = held_port().getsockname()[1]
    ports = {name: first + offset for name, offset in PORTS.items()}
    for name, known in KNOWN_PORTS.items():
        ports[name] = known.number if first == FIRST_PORT and _is_free(known.number) else first + known.offset
    return {name: str(port) for name, port in ports.items() if name not in os.environ}


@cache
def held_port() -> socket.socket:
    """Take the first port of a range that no server has, and hold it until this process ends. Raises StartupError."""
    for first in range(FIRST_PORT, LAST_PORT, SERVER_PORTS):
        held = socket.socket()
        try:
            held.bind(("", first))
        except OSError:
            held.close()
            continue
        if all(_is_free(first + offset) for offset in range(1, 9)):
            return held
        held.close()
    raise StartupError(
        f"a server needs {SERVER_PORTS} free ports in a row, and between {FIRST_PORT} and {LAST_PORT} none are "
        "left. Stop another server on this machine"
    )


def agent_ports() -> dict[str, int]:
    """Return the ports for the agents of this server's Ray. Raises StartupError."""
    first: int = held_port().getsockname()[1]
    return {name: first + offset for name, offset in AGENT_PORTS.items()}


def given_ports() -> dict[str, int]:
    """Return the ports that this environment sets for HAProxy's statistics and metrics, by variable. Raises
    ConfigError."""
    ports = {}
    for name in KNOWN_PORTS:
        given = os.environ.get(name)
        if given is None:
            continue
        if not given.isdecimal() or not 0 < int(given) < 65536:
            raise ConfigError(name, given, "a port between 1 and 65535")
        ports[name] = int(given)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
