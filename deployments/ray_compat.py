"""What Ray has no public name for. Ray is pinned to a minor version; look here first when that changes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.replicas.prefill_dispatcher import PoolState

logger = logging.getLogger(__name__)

INGRESS = "ingress"  # name of that deployment
DRIVER_EXIT_S = 30.0
AT_REST = ("HEALTHY", "UPSCALING", "DOWNSCALING")


def end_serve_run(reason: str) -> None:
    """Say why the application cannot start, and end the `serve run` that deploys it.

    Returns if there is no such process on this node, or if some model has been up: that one must not end for another's
    sake, and a change that fails can be taken back.

    Ray 2.60 builds an application of a YAML file in a worker process. When that fails, `serve run` shows a traceback
    and then sleeps for ever. On SIGTERM it ends, with all its Ray processes and a status other than 0.
    `serve deploy` and KubeRay have no such process; they show the error in the application's status.
    """
    pid = _serve_run_pid()
    if pid is None or _a_model_was_up():
        return
    _write_to_console_of(pid, f"\nmanta cannot start. {reason}\n")
    os.kill(pid, signal.SIGTERM)
    time.sleep(DRIVER_EXIT_S)  # it takes this process with it; raising now would only add a traceback


def deployed_applications() -> list[dict[str, Any]]:
    """Entries of `applications` of the Serve configuration that is in force, or that is just being deployed. Empty
    where Serve does not run, or was told of its applications in other ways. Blocks for a call to Serve's controller."""
    client = serve.context._get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return []
    told = [
        application.get("deployed_app_config") for application in client.get_serve_details()["applications"].values()
    ]
    return [config for config in told if config is not None]


def _serve_run_pid() -> int | None:
    """Process of this job's driver, if that is a `serve run` on this node."""
    context = ray.get_runtime_context()
    jobs: list[dict[str, Any]] = ray._private.state.jobs()
    for job in jobs:
        here = job["DriverIPAddress"] == ray.util.get_node_ip_address()
        if job["JobID"] == context.get_job_id() and here and " run " in f" {job['Entrypoint']} ":
            return int(job["DriverPid"])
    return None


def remember_that_a_model_is_up() -> None:
    """For as long as this job runs: from now on its users mind if it ends. Blocks for a call to the GCS."""
    internal_kv._internal_kv_put(_served_key(), b"yes")


def _a_model_was_up() -> bool:
    return internal_kv._internal_kv_exists(_served_key())


def _served_key() -> str:
    return f"manta_has_served_{ray.get_runtime_context().get_job_id()}"


def _status(handle: DeploymentHandle) -> Any:
    """DeploymentStatusOverview, or None while there is no such deployment. Blocks for a call to Serve's controller."""
    name = handle.deployment_id
    app = serve.status().applications.get(name.app_name)
    return app.deployments.get(name.name) if app is not None else None


def is_at_rest(handle: DeploymentHandle) -> bool:
    """Whether a deployment that may have no replicas has none, and nothing is wrong with it. Blocks."""
    deployment = _status(handle)
    return deployment is not None and deployment.status in AT_REST and not deployment.replica_states.get("RUNNING")


def pool_state(handle: DeploymentHandle) -> PoolState:
    """Of a deployment. Blocks."""
    deployment = _status(handle)
    if deployment is None or deployment.status == "UPDATING":
        return "deploying"
    return "up" if deployment.replica_states.get("RUNNING") else "down"


async def broadcast(handle: DeploymentHandle, method: str, timeout_s: float, *args: Any) -> list[Any]:
    """Answers of all replicas that give one in time; exceptions of the others.

    Ray's own `results_async` gives no answer at all if one replica hangs.
    """
    try:
        response = handle.broadcast(method, *args)
        results = await asyncio.wait_for(response._fetch_replica_results_async(), timeout_s)
    except (TimeoutError, RayError, DeploymentUnavailableError):
        return []
    answers = (asyncio.wait_for(result.get_async(), timeout_s) for result in results)
    return await asyncio.gather(*answers, return_exceptions=True)


def haproxy_binary() -> str:
    """Path of the HAProxy that Serve would start. Raises FileNotFoundError."""
    from ray.serve._private.haproxy import get_haproxy_binary

    path: str = get_haproxy_binary()
    return path


def _write_to_console_of(pid: int, text: str) -> None:
    """Straight to its stderr: what a worker prints reaches the driver too late."""
    try:
        with open(f"/proc/{pid}/fd/2", "w") as console:
            console.write(text)
    except OSError:  # no /proc
        logger.error(text)
