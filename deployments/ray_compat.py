"""All private names of Ray that we use, except those in ray_driver.py. Ray is pinned to a minor version; before you
raise the pin, check this file."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.serve._private.common import RequestMetadata
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter

from engine.distributed.cluster_key import ClusterKey

logger = logging.getLogger(__name__)

INGRESS = "ingress"  # name of the ingress deployment
DRIVER_EXIT_S = 30.0
NAMESPACE = "manta"  # in Ray's key-value store
SCALING_CHANGES = "scaling_changes"  # the newest ScalingChanges, in msgpack


def engine_id_of(replica_id: Any) -> str:
    """Return the id of a replica's engine. replica_id: Serve's ReplicaID."""
    return f"{replica_id.deployment_id.name}-{replica_id.unique_id}"


def engine_ids(replica: str, count: int) -> list[str]:
    """Return the ids of the engines of a replica. replica: id of its only engine if it has one."""
    return [replica] if count == 1 else [f"{replica}.dp{number}" for number in range(count)]


def roles_of(application: str, deployment: str) -> str:
    """Return the name under which the roles of a deployment's engines are shared: a dict by engine id, in msgpack."""
    return f"roles/{application}/{deployment}"


class CallRouter(RequestRouter):
    """Serve's router, extended to distinguish the calls of one HTTP request."""

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: RequestMetadata | None = None
    ) -> PendingRequest | None:
        """Return the pending request with exactly this metadata. Serve's method compares only an id that all calls of
        one HTTP request share, so the second call would wait forever."""
        waiting = self._pending_requests_to_fulfill
        return next((p for p in waiting if p.metadata is request_metadata and not p.future.done()), None)


@contextmanager
def apart_from_http_request() -> Iterator[None]:
    """Make the calls inside the block independent of any HTTP request, so that they end only when we cancel them.

    Behind HAProxy, when a client leaves, Serve cancels all calls made while its HTTP request was handled, even those of
    an answer that continues without it.
    """
    context = serve.context._get_serve_request_context()
    apart = replace(context, _internal_request_id="", cancel_on_parent_request_cancel=False)
    token = serve.context._serve_request_context.set(apart)
    try:
        yield
    finally:
        serve.context._serve_request_context.reset(token)


@dataclass(frozen=True, slots=True)
class HttpEndpoint:
    """Address at which clients reach an application."""

    url: str  #: URL from the configuration
    is_local: bool  #: whether this node has a proxy
    deployed_at: float  #: in seconds since 1970


def end_serve_run(reason: str) -> None:
    """Print why the application cannot start, and end the `serve run` or `manta serve` that deploys it.

    Does nothing if there is no such process on this node, or if any model has been up: a running application must keep
    running, and a failed change can be reverted. Ray 2.60 builds an application of a YAML file in a worker process;
    when that fails, `serve run` prints a traceback and then sleeps forever. A SIGTERM ends it and all its Ray
    processes, with a nonzero status. `serve deploy` and KubeRay have no such process; they show the error in the
    application's status.
    """
    pid = _serve_run_pid()
    if pid is None or _a_model_was_up():
        return
    _write_to_console_of(pid, f"\nmanta cannot start. {reason}\n")
    internal_kv._internal_kv_put(_failed_key(), b"yes")
    os.kill(pid, signal.SIGTERM)
    time.sleep(DRIVER_EXIT_S)  # its end will end this process too; raising now would only add a traceback


def deployed_applications() -> list[dict[str, Any]]:
    """Return the `applications` of the Serve configuration that is in force or being deployed.

    Empty if Serve does not run, or got its applications in other ways. Blocks for a call to Serve's controller.
    """
    client = serve.context._get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return []
    applications = client.get_serve_details()["applications"].values()
    configs = [application.get("deployed_app_config") for application in applications]
    return [config for config in configs if config is not None]


def certificate() -> str | None:
    """Return the path of the certificate of Serve's HTTP proxies; None without TLS. Blocks for a call to Serve's
    controller."""
    client = serve.context._get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.get_serve_details()["http_options"].get("ssl_certfile")


def is_on_loopback() -> bool:
    """Return whether Serve's HTTP proxies listen on loopback. Blocks for a call to Serve's controller."""
    from ray._common.network_utils import is_localhost

    host = serve.context._get_global_client().http_config.host
    return host is not None and bool(is_localhost(host))


def http_port() -> int:
    """Return the port of Serve's HTTP proxies. Blocks for a call to Serve's controller."""
    return int(serve.context._get_global_client().http_config.port)


def http_endpoint(application: str) -> HttpEndpoint:
    """Return the address of an application. Blocks for calls to Serve's controller. Raises RayError or
    RayServeException."""
    client = serve.context._get_global_client()
    details = client.get_serve_details()
    status = details["applications"].get(application)
    if status is None:
        raise RayServeException(f"there is no application {application!r}")
    url = f"{client.root_url}{status['route_prefix'] or ''}".rstrip("/")
    if details["http_options"].get("ssl_certfile"):  # None if it was not given
        url = url.replace("http://", "https://", 1)  # Ray's URL is always http
    node = ray.get_runtime_context().get_node_id()
    return HttpEndpoint(url, node in details["proxies"], status["last_deployed_time_s"])


def start_has_failed() -> bool:
    """Return whether `end_serve_run` has ended this job. Blocks for a call to the GCS."""
    failed: bool = internal_kv._internal_kv_exists(_failed_key())
    return failed


def serve_logs_to_console() -> bool:
    """Return whether Serve's loggers write to the console, and not only to files."""
    from ray.serve._private.constants import RAY_SERVE_LOG_TO_STDERR

    shown: bool = RAY_SERVE_LOG_TO_STDERR
    return shown


def remember_that_a_model_is_up() -> None:
    """Record that a model has been up in this job, so that `end_serve_run` does not end it. Blocks for a call to the
    GCS."""
    internal_kv._internal_kv_put(_served_key(), b"yes")


def share(name: str, value: bytes) -> None:
    """Store a value that all processes of the cluster can read. Does nothing without a cluster. Blocks for a call to
    the GCS."""
    if internal_kv._internal_kv_initialized():
        internal_kv._internal_kv_put(name, value, namespace=NAMESPACE)


def shared(name: str) -> bytes | None:
    """Return the value that `share` stored last, or None. Blocks for a call to the GCS."""
    value: bytes | None = internal_kv._internal_kv_get(name, namespace=NAMESPACE)
    return value


def share_first(name: str, value: bytes) -> bool:
    """Store a value as `share` does, unless this name has a value already. Returns whether the value was stored."""
    return not internal_kv._internal_kv_put(name, value, overwrite=False, namespace=NAMESPACE)


def unshare(name: str) -> None:
    """Delete the value that `share` has stored under this name, if any. Blocks for a call to the GCS."""
    internal_kv._internal_kv_del(name, namespace=NAMESPACE)


def shared_below(prefix: str) -> dict[str, bytes]:
    """Return the values that `share` has stored under names with this prefix, by the rest of the name. Blocks for a
    call to the GCS, and one more for each value."""
    names = [key.decode() for key in internal_kv._internal_kv_list(prefix, namespace=NAMESPACE)]
    found = {name.removeprefix(prefix): shared(name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


@cache
def cluster_key() -> ClusterKey:
    """Return the key of all sockets of this cluster. The first process that asks creates it.

    It is kept in Ray's GCS, so anyone who can run tasks in the cluster can read it. Blocks for two calls to the GCS.
    """
    made = msgspec.msgpack.encode(ClusterKey.generate())
    internal_kv._internal_kv_put("cluster_key", made, overwrite=False, namespace=NAMESPACE)
    return msgspec.msgpack.decode(internal_kv._internal_kv_get("cluster_key", namespace=NAMESPACE), type=ClusterKey)


def takes_commands_of_anybody() -> bool:
    """Return whether Ray listens on a network without token authentication, so that anyone who can connect can run
    code."""
    from ray._common.network_utils import is_localhost
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    return not is_token_auth_enabled() and not is_localhost(ray.util.get_node_ip_address())


async def broadcast(handle: DeploymentHandle, method: str, timeout_s: float, *args: Any) -> list[Any]:
    """Return the answers of all replicas: an exception for each that fails or does not answer in time.

    Ray's own `results_async` gives no answer at all if one replica hangs.
    """
    try:
        response = handle.broadcast(method, *args)
        results = await asyncio.wait_for(response._fetch_replica_results_async(), timeout_s)
    except (TimeoutError, RayError, DeploymentUnavailableError):
        return []
    answers = (asyncio.wait_for(result.get_async(), timeout_s) for result in results)
    return await asyncio.gather(*answers, return_exceptions=True)


def is_stopping() -> bool:
    """Return whether Serve has told this replica to stop. It then waits for the replica's open calls."""
    replica = _replica()
    return replica is not None and replica._shutting_down


def open_calls() -> int:
    """Return the number of calls and HTTP requests that this replica has not answered yet."""
    replica = _replica()
    return 0 if replica is None else int(replica.get_num_ongoing_requests())


def pipe_of_sigterm() -> int:
    """Return the file descriptor of a pipe that becomes readable when this process gets a SIGTERM, which then has no
    other effect.

    Ray's handler would end the process at once. Python lets only the main thread set another handler, and a replica's
    code runs in another thread. faulthandler has no such restriction; on SIGTERM it writes a thread's stack into the
    pipe.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    faulthandler.register(signal.SIGTERM, file=writer, all_threads=False, chain=False)
    return reader


def haproxy_binary() -> str:
    """Return the path of the HAProxy that Serve would start. Raises FileNotFoundError."""
    from ray.serve._private.haproxy import get_haproxy_binary

    path: str = get_haproxy_binary()
    return path


def _replica() -> Any:
    """Return Serve's object of this replica; None outside a replica."""
    actor_id = ray.get_runtime_context().get_actor_id()
    actors = {actor.hex(): instance for actor, instance in ray._private.worker.global_worker.actors.items()}
    return getattr(actors.get(actor_id), "_replica_impl", None)


def _serve_run_pid() -> int | None:
    """Return the process id of this job's driver if it is a `serve run` or `manta serve` on this node, else None."""
    context = ray.get_runtime_context()
    jobs: list[dict[str, Any]] = ray._private.state.jobs()
    for job in jobs:
        here = job["DriverIPAddress"] == ray.util.get_node_ip_address()
        command = job["Entrypoint"].split()
        if job["JobID"] == context.get_job_id() and here and ("run" in command or "serve" in command):
            return int(job["DriverPid"])
    return None


def _a_model_was_up() -> bool:
    return internal_kv._internal_kv_exists(_served_key())


def _served_key() -> str:
    return f"manta_has_served_{ray.get_runtime_context().get_job_id()}"


def _failed_key() -> str:
    return f"manta_has_failed_{ray.get_runtime_context().get_job_id()}"


def _write_to_console_of(pid: int, text: str) -> None:
    """Write directly to a process's stderr, because what a worker prints reaches the driver too late."""
    try:
        with open(f"/proc/{pid}/fd/2", "w") as console:
            console.write(text)
    except OSError:  # no /proc
        logger.error(text)
