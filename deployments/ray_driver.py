"""Runs Ray for `manta serve`: starts Ray, deploys the application, and ends both on Ctrl-C.

Like ray_compat.py, this module uses private names of Ray. Serve's are imported inside functions, because this process
has time for that while Ray starts.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import services
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray._private.worker import filter_autoscaler_events
from ray._raylet import get_port_filename  # type: ignore[attr-defined]  # compiled
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from deployments import without_pandas  # noqa: F401  before Serve is imported
from engine.errors import StartupError
from placement.console_log import log_to_console

if TYPE_CHECKING:
    from ray.serve._private.client import ServeControllerClient

logger = logging.getLogger(__name__)

SERVE_NAMESPACE = "serve"
STATUS_INTERVAL_S = 0.5
IMPORT_LIMIT_S = 60.0
PROXY_LIMIT_S = 60.0
# Ray's limits for parts of its start, longer on a busy machine. One of them has no environment variable.
NODE_LIMIT_S = 30.0
RAYS_LIMITS = {
    "RAY_gcs_server_port_wait_time_s": 30,
    "RAY_agent_register_timeout_ms": 30_000,
    "RAY_worker_register_timeout_seconds": 60,
}
NODE_INTERVAL_S = 0.1
KILL_LIMIT_S = 30.0
LAST_ANSWERS_S = 10.0  # for ingresses to end once no engine is left: what still waits there will never be computed
DASHBOARD_LIMIT_S = 60.0  # that the dashboard's start waits for models to load
STARTING = ("NOT_STARTED", "DEPLOYING")  # of Serve's ApplicationStatus


class ServeViewer(Protocol):
    """Interface of a display that shows a server's log lines and its shutdown to the user."""

    def line(self, text: str) -> None:
        """Take a line that a process of the cluster has written. May be called from any thread."""

    def stopping(self, states: dict[str, int]) -> None:
        """Show progress. Called repeatedly while the server ends. states: number of replicas still stopping, by
        deployment."""


def serve_until_interrupted(
    config: dict[str, Any],
    address: str | None,
    viewer: ServeViewer | None = None,
    *,
    agent_ports: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Start or join Ray, deploy a Serve configuration, and return once Ctrl-C or SIGTERM has ended it.

    Replaces `serve run FILE`, which waits for its proxies before it deploys, and exits with 0 after an error.
    viewer: display that gets all lines, which otherwise go to the console. agent_ports: ports of Ray's agents, by their
    names in RayParams.
    Raises StartupError, and SystemExit if a process of the cluster has reported why the application cannot start.
    """
    if viewer is None:
        log_to_console("manta-serve")
    started = time.monotonic()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with ThreadPoolExecutor(1) as beside, _changed_start(agent_ports) as start_the_rest:
            serve = beside.submit(importlib.import_module, "ray.serve")
            _start_ray(address, configure_logging=viewer is None)
            builders = [_import_builder.remote(application) for application in config.get("applications", ())]
            serve.result()
        if viewer is not None:
            _send_lines_to(viewer)
        logger.info("Ray is up startup_s=%.1f", time.monotonic() - started)
        proxies = _deploy(config, builders)
        logger.info("Serve is up startup_s=%.1f", time.monotonic() - started)
        _wait_for(proxies)
        logger.info("proxies are up startup_s=%.1f", time.monotonic() - started)
        _wait_while_models_load()
        start_the_rest()
        threading.Event().wait()
    except KeyboardInterrupt:
        _end_if_the_start_failed()
        if viewer is not None:
            threading.Thread(target=_tell_what_stops, args=(viewer,), daemon=True).start()
        _shutdown()
    except GetTimeoutError as error:
        raise StartupError(f"the start took too long: {error}. {_load()}") from error
    except Exception:
        _shutdown()
        raise


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Treat SIGTERM like Ctrl-C."""
    raise KeyboardInterrupt


def _end_if_the_start_failed() -> None:
    from deployments import ray_compat

    if ray.is_initialized() and ray_compat.start_has_failed():
        ray.shutdown()
        raise SystemExit(1)


def patience() -> float:
    """Return the factor by which things take longer than on an idle machine: the number of runnable processes per
    CPU."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _load() -> str:
    load, logs = os.getloadavg()[0], f"{get_default_ray_temp_dir()}/session_latest/logs"
    return f"The machine's load is {load:.0f} on {os.cpu_count()} CPUs; Ray's logs are in {logs}"


def _start_ray(address: str | None, *, configure_logging: bool) -> None:
    """Start or join Ray, with time limits that grow with the machine's load. Raises StartupError."""
    for name, limit in RAYS_LIMITS.items():
        os.environ.setdefault(name, str(int(limit * patience())))
    try:
        ray.init(address=address, namespace=SERVE_NAMESPACE, configure_logging=configure_logging)
    except StartupError:
        raise
    except Exception as error:  # Ray raises plain Exception
        raise StartupError(f"Ray does not start: {str(error).strip().partition(chr(10))[0]} {_load()}") from error
    signal.signal(signal.SIGTERM, _interrupt)  # replaces Ray's handler, which ends this process with a stack trace


@contextmanager
def _changed_start(agent_ports: Mapping[str, int]) -> Iterator[Callable[[], None]]:
    """Change how `ray.init` starts a node, inside the block.

    `ray.init` then leaves out the monitor of Ray's autoscaler and Ray's dashboard, which would otherwise start before
    the processes that models need. It gives Ray's agents fixed ports, and announces the ports where the raylet looks
    for them; otherwise the raylet would end after 15 s. It waits for the node as long as the load requires instead of
    half a minute, but not for a node that has ended. Yields a function that later starts what was left out; it does
    nothing if Ray was already running.
    """
    left_out: list[Callable[[], None]] = []
    nodes: list[Node] = []
    start, get_node, select = Node.start_api_server, services.get_node, RayParams.update_pre_selected_port
    start_monitor = Node.start_monitor
    began = time.monotonic()

    def leave_out(node: Node, **options: Any) -> None:
        nodes.append(node)
        for name, port in agent_ports.items():
            Path(node.get_session_dir_path(), get_port_filename(node.node_id, name)).write_text(str(port))
        left_out.append(lambda: start(node, **options))

    def leave_monitor_out(node: Node) -> None:
        left_out.append(lambda: start_monitor(node))

    def wait_for_node(gcs_address: str, node_id: str) -> Any:
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError:  # it is not registered yet
                ended = [name for node in nodes for name, _ in node.dead_processes()]
                if ended or time.monotonic() - began > NODE_LIMIT_S * patience():
                    problem = f"{ended[0]} has ended" if ended else "its node takes too long to start"
                    raise StartupError(f"Ray does not start: {problem}. {_load()}") from None
            time.sleep(NODE_INTERVAL_S)

    def start_the_rest() -> None:
        for call in left_out:
            call()
        if left_out:
            logger.info("Ray's dashboard is up at http://%s", ray._private.worker._global_node.webui_url)

    def select_ports(params: RayParams) -> None:
        vars(params).update(agent_ports)
        select(params)

    Node.start_api_server, Node.start_monitor, services.get_node = leave_out, leave_monitor_out, wait_for_node
    RayParams.update_pre_selected_port = select_ports
    try:
        yield start_the_rest
    finally:
        Node.start_api_server, Node.start_monitor, services.get_node = start, start_monitor, get_node
        RayParams.update_pre_selected_port = select


@ray.remote(num_cpus=0)
def _import_builder(application: Mapping[str, Any]) -> None:
    """Import the application's builder in a worker that stays idle afterwards. Serve gets the same worker once its
    controller has started."""
    module, _, name = application["import_path"].partition(":")
    getattr(importlib.import_module(module), name)


def _deploy(config: dict[str, Any], builders: list[ray.ObjectRef]) -> list[ray.ObjectRef]:
    """Start Serve if it does not run, and make it build and start the applications. Returns the starting proxies.

    builders: calls of `_import_builder`.
    """
    from ray import serve
    from ray.serve._private import api
    from ray.serve._private.client import ServeControllerClient
    from ray.serve.config import gRPCOptions
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(config)
    client, proxies = serve.context._get_global_client(raise_if_no_controller_running=False), []
    if client is None:
        controller, proxies = api._create_controller_and_proxy_refs(
            schema.http_options.model_dump(),
            gRPCOptions(**schema.grpc_options.model_dump()),
            None,
            None,
            api._coerce_controller_options(schema.controller_options),
            schema.proxy_location,
        )
        client = ServeControllerClient(controller)
        serve.context._set_global_client(client)
    if builders:
        ray.wait(builders, num_returns=len(builders), timeout=IMPORT_LIMIT_S)
    client.deploy_apps(schema, _blocking=False)
    return proxies


def _wait_for(proxies: list[ray.ObjectRef]) -> None:
    """Wait until the proxies are up. Raises StartupError."""
    began = time.monotonic()
    while time.monotonic() - began < PROXY_LIMIT_S * patience():
        ready, proxies = ray.wait(proxies, num_returns=len(proxies), timeout=STATUS_INTERVAL_S)
        for proxy in ready:
            with suppress(ActorDiedError):  # on a busy machine the controller may replace a slow one
                ray.get(proxy)
        if not proxies:
            return
    raise StartupError(f"Serve's proxies are not up after {time.monotonic() - began:.0f} s. {_load()}")


def _wait_while_models_load() -> None:
    from ray import serve

    deadline = time.monotonic() + DASHBOARD_LIMIT_S
    while time.monotonic() < deadline:
        if not any(application.status in STARTING for application in serve.status().applications.values()):
            return
        time.sleep(STATUS_INTERVAL_S)


def _send_lines_to(viewer: ServeViewer) -> None:
    """Send everything that Ray would print to the driver's console to a viewer instead: the lines of the cluster's
    processes and the events of the autoscaler. The autoscaler's resource table, printed every five seconds, stays in
    Ray's log."""

    def give(data: dict[str, Any]) -> None:
        for line in filter_autoscaler_events(data["lines"]) if data.get("pid") == "autoscaler" else data["lines"]:
            viewer.line(line)

    global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
    global_worker_stdstream_dispatcher.add_handler("ray_print_logs", give)


def _tell_what_stops(viewer: ServeViewer) -> None:
    """Report stopping replicas to the viewer until Serve's controller is gone."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    with suppress(RayError, RayServeException):
        while True:
            deployments = [d for a in serve.status().applications.values() for d in a.deployments.items()]
            stopping = {name: sum(status.replica_states.values()) for name, status in deployments}
            viewer.stopping({name: number for name, number in stopping.items() if number})
            time.sleep(STATUS_INTERVAL_S)


def _shutdown() -> None:
    """End the applications once their running requests have ended, then Serve. Serve's own shutdown would first end the
    proxies through which those requests are answered."""
    from ray import serve

    if not ray.is_initialized():  # else Serve would start another Ray
        return
    client = serve.context._get_global_client(raise_if_no_controller_running=False)
    if client is not None:
        ingresses, engines = _replicas(client)
        deadline, kill_at = time.monotonic() + _drain_limit(client), math.inf
        client.delete_apps(list(serve.status().applications), blocking=False)
        while serve.status().applications and time.monotonic() < deadline:
            if kill_at == math.inf and not any(map(_lives, engines)):
                kill_at = time.monotonic() + LAST_ANSWERS_S
            if time.monotonic() >= kill_at:
                for name in filter(_lives, ingresses):
                    logger.warning("%s is killed: no engine is left for the requests that it still has", name)
                    with suppress(ValueError, RayError):  # it has just ended
                        ray.kill(ray.get_actor(name, namespace=SERVE_NAMESPACE))
            time.sleep(STATUS_INTERVAL_S)
    serve.shutdown()


def _replicas(client: ServeControllerClient) -> tuple[list[str], list[str]]:
    """Return the names of the actors of all ingresses, and of all replicas with engines."""
    from deployments.ray_compat import INGRESS

    names: tuple[list[str], list[str]] = [], []
    for application in client.get_serve_details()["applications"].values():
        for deployment, details in application["deployments"].items():
            names[deployment != INGRESS].extend(replica["actor_name"] for replica in details["replicas"])
    return names


def _lives(actor_name: str) -> bool:
    try:
        ray.get_actor(actor_name, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def _drain_limit(client: ServeControllerClient) -> float:
    """Return the seconds after which Serve kills every replica that has not ended by itself."""
    applications = client.get_serve_details()["applications"].values()
    drains = [
        deployment["deployment_config"]["graceful_shutdown_timeout_s"]
        for application in applications
        for deployment in application["deployments"].values()
    ]
    return max(drains, default=0.0) + KILL_LIMIT_S * patience()
