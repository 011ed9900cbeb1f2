"""Environment variables with which Ray is started.

On Linux, Serve's HAProxy is in front, and each ingress replica answers HTTP itself: a streamed token then costs a
fraction of what it costs through Serve's Python proxy (docs/measurements/performance.md). Elsewhere that proxy is used.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.haproxy import BINARY_PATH, CERTFILE, KEYFILE
from cluster.server_folder import server_folder
from cluster.server_ports import server_ports
from deployments import without_pandas
from deployments.http.server_header import SERVER_VARIABLE
from engine.user_folder import can_write

FRONT = {  # on every node
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # An ingress that dies or stops may close a connection on which a request has just been sent. Until the first byte
    # of the answer, the request can be sent elsewhere: work that was begun ends with the connection.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    # A stopping ingress fails health checks at once, but answers until HAProxy has been told of others. With Ray's two
    # checks, a quarter of a second apart, clients of a single ingress got 503 in between.
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL": "20",
    # Else two replicas that die while a change replaces the others end it, and nobody replaces them.
    "RAY_SERVE_STOP_FAILED_ROLLING_UPDATES": "0",
    # For a client that stops sending a body or reading an answer; Ray allows an hour.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
    # Serve decodes headers before it calls an ingress, and answers 500 to bytes that are not text.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "manta:around_serve",
}
CORES_PER_PROXY_THREAD, MAX_PROXY_THREADS = 4, 4
ENVIRONMENT = {
    **FRONT,
    # A stopping ingress takes connections for as long as HAProxy may need to notice that it stops. Ray's 30 s are for
    # slower load balancers, and would delay Ctrl-C.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
    # After Ray's 5 s a proxy that is still starting is replaced, which only makes a busy machine busier.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # Ray's 15 would leave an engine a thirtieth of a core if any other program wants it.
    "RAY_worker_niceness": "0",
    "RAY_preload_python_modules": without_pandas.__name__,
    # When the ingress changes, a new HAProxy process takes over; the old one may live as long as a request may take.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "660",
}
# Ray then gives its node the address 127.0.0.1, as on macOS, so that its processes and ours listen only there.
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_VARIABLES = {TOKEN, "RAY_AUTH_TOKEN_PATH"}


def environment() -> dict[str, str]:
    """Return Ray's environment variables for this machine."""
    if sys.platform != "linux":
        return {}
    ours = Path(sys.executable).with_name("manta-haproxy")  # `main`, as pip installs it
    binary = {BINARY_PATH: str(ours)} if ours.exists() else {}
    return {**ENVIRONMENT, "RAY_SERVE_HAPROXY_NBTHREAD": str(proxy_threads(os.cpu_count() or 1)), **binary}


def proxy_threads(cores: int) -> int:
    """Return the number of HAProxy's threads. Ray would start four threads. On a small machine they compete for the
    cores: with two cores, a streamed token takes 23 us with one thread, and 29 us with four."""
    return min(max(1, cores // CORES_PER_PROXY_THREAD), MAX_PROXY_THREADS)


def tls_environment(http_options: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables from which HAProxy learns the certificate; Ray passes it only to the ingresses."""
    names = {CERTFILE: "ssl_certfile", KEYFILE: "ssl_keyfile"}
    return {variable: http_options[key] for variable, key in names.items() if http_options.get(key)}


def own_environment() -> dict[str, str]:
    """Return the further variables of a Ray that this process starts. They separate everything that two Rays on one
    machine would otherwise share (docs/operations.md). Raises StartupError."""
    return ON_LOOPBACK | server_ports() | server_folder() | _token() | {SERVER_VARIABLE: secrets.token_hex(8)}


def _token() -> dict[str, str]:
    """Return an authentication token for this server's processes to inherit, if Ray could not store one in the user's
    home as it normally does."""
    if TOKEN_VARIABLES & os.environ.keys():
        return {}
    file = Path(os.path.expanduser("~/.ray/auth_token"))
    return {} if os.access(file, os.R_OK) or can_write(file.parent) else {TOKEN: secrets.token_hex(32)}
