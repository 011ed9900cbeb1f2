"""What `manta serve` does with Ray: starts it, deploys, and ends both on Ctrl-C. It has private names of Ray's, as
ray_compat.py has; those of Serve are imported by functions, since this process has time for that while Ray starts.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import ray
from ray._private.node import Node
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray._private.worker import filter_autoscaler_events
from ray.exceptions import ActorDiedError, RayError

from placement.console_log import log_to_console

logger = logging.getLogger(__name__)

SERVE_NAMESPACE = "serve"
STATUS_INTERVAL_S = 0.5
IMPORT_LIMIT_S = 60.0
DASHBOARD_LIMIT_S = 60.0  # models that take longer to load are not waited for
STARTING = ("NOT_STARTED", "DEPLOYING")  # of Serve's ApplicationStatus


class ServeViewer(Protocol):
    """Shows a server to the user who has started it."""

    def line(self, text: str) -> None:
        """Take a line that a process of the cluster has written. Called by any thread."""

    def stopping(self, states: dict[str, int]) -> None:
        """Called again and again while the server ends. states: replicas that still stop, by deployment."""


def serve_until_interrupted(config: dict[str, Any], address: str | None, viewer: ServeViewer | None = None) -> None:
    """Start Ray, or join one, deploy a Serve configuration, and return once Ctrl-C has ended it.

    As `serve run FILE` does, which waits for its proxies before it deploys, and ends with 0 after an error. viewer: is
    given all lines, which otherwise go to the console.
    """
    if viewer is None:
        log_to_console("manta-serve")
    started = time.monotonic()
    try:
        with ThreadPoolExecutor(1) as beside, _dashboard_later() as start_dashboard:
            serve = beside.submit(importlib.import_module, "ray.serve")
            ray.init(address=address, namespace=SERVE_NAMESPACE, configure_logging=viewer is None)
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
        start_dashboard()
        threading.Event().wait()
    except KeyboardInterrupt:
        if viewer is not None:
            threading.Thread(target=_tell_what_stops, args=(viewer,), daemon=True).start()
        _shutdown()
    except Exception:
        _shutdown()
        raise


@contextmanager
def _dashboard_later() -> Iterator[Callable[[], None]]:
    """Have `ray.init` leave out Ray's dashboard, which it would start, and wait for, before anything that models need.
    Yields what starts it then; that does nothing if Ray was running already.
    """
    left_out: list[Callable[[], None]] = []
    start = Node.start_api_server

    def leave_out(node: Node, **options: Any) -> None:
        left_out.append(lambda: start(node, **options))

    def start_dashboard() -> None:
        for call in left_out:
            call()
            logger.info("Ray's dashboard is up at http://%s", ray._private.worker._global_node.webui_url)

    Node.start_api_server = leave_out
    try:
        yield start_dashboard
    finally:
        Node.start_api_server = start


@ray.remote(num_cpus=0)
def _import_builder(application: Mapping[str, Any]) -> None:
    """Import what builds an application, in a worker that then waits for more: Serve is given the same one, once its
    controller has started."""
    importlib.import_module(application["import_path"].partition(":")[0])


def _deploy(config: dict[str, Any], builders: list[ray.ObjectRef]) -> list[ray.ObjectRef]:
    """Start Serve where it does not run, and have it build and start the applications. Return its proxies that start.

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
    from ray.serve._private.constants import HTTP_PROXY_TIMEOUT

    for proxy in proxies:
        with suppress(ActorDiedError):  # on a busy machine the controller may replace one that is slow
            ray.get(proxy, timeout=HTTP_PROXY_TIMEOUT)


def _wait_while_models_load() -> None:
    from ray import serve

    deadline = time.monotonic() + DASHBOARD_LIMIT_S
    while time.monotonic() < deadline:
        if not any(application.status in STARTING for application in serve.status().applications.values()):
            return
        time.sleep(STATUS_INTERVAL_S)


def _send_lines_to(viewer: ServeViewer) -> None:
    """Give a viewer what Ray prints to the console of a driver: all that the processes of its cluster write, and of the
    autoscaler its events. The table of resources that it writes every five seconds stays in Ray's own log.
    """

    def give(data: dict[str, Any]) -> None:
        for line in filter_autoscaler_events(data["lines"]) if data.get("pid") == "autoscaler" else data["lines"]:
            viewer.line(line)

    global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
    global_worker_stdstream_dispatcher.add_handler("ray_print_logs", give)


def _tell_what_stops(viewer: ServeViewer) -> None:
    """Returns when Serve's controller is gone."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    with suppress(RayError, RayServeException):
        while True:
            deployments = [d for a in serve.status().applications.values() for d in a.deployments.items()]
            stopping = {name: sum(status.replica_states.values()) for name, status in deployments}
            viewer.stopping({name: number for name, number in stopping.items() if number})
            time.sleep(STATUS_INTERVAL_S)


def _shutdown() -> None:
    from ray import serve

    serve.shutdown()
