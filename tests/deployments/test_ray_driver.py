from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray._private.node import Node
from ray._private.ray_logging import WorkerStandardStreamDispatcher

from deployments import ray_driver
from deployments.ray_driver import _changed_start


@pytest.fixture
def started(monkeypatch) -> list[dict[str, bool]]:
    """With which options nodes have started dashboards."""
    found: list[dict[str, bool]] = []
    monkeypatch.setattr(Node, "start_api_server", lambda node, **options: found.append(options))
    monkeypatch.setattr(ray._private.worker, "_global_node", SimpleNamespace(webui_url="127.0.0.1:8265"))
    return found


def test_rays_dashboard_starts_as_ray_meant_it_but_only_when_told_to(started):
    with _changed_start({}) as start_dashboard:
        Node.start_api_server(SimpleNamespace(), include_dashboard=None, raise_on_failure=False)
        assert not started
    start_dashboard()
    assert started == [{"include_dashboard": None, "raise_on_failure": False}]


def test_the_monitor_of_rays_autoscaler_starts_before_the_dashboard_and_no_sooner(monkeypatch, started):
    monkeypatch.setattr(Node, "start_monitor", lambda node: started.append(node.options))
    with _changed_start({}) as start_the_rest:
        Node.start_monitor(SimpleNamespace(options="monitor"))
        Node.start_api_server(SimpleNamespace(), include_dashboard=None)
        assert not started
    start_the_rest()
    assert started == ["monitor", {"include_dashboard": None}]


def test_no_dashboard_is_started_for_a_ray_that_was_running(started):
    with _changed_start({}) as start_dashboard:
        pass
    start_dashboard()
    assert not started


def test_a_ray_that_starts_later_in_this_process_has_its_dashboard_at_once(started):
    with pytest.raises(KeyboardInterrupt), _changed_start({}):
        raise KeyboardInterrupt
    Node.start_api_server(SimpleNamespace(), include_dashboard=True)
    assert started == [{"include_dashboard": True}]


def test_the_dashboard_waits_for_models_that_load_until_its_limit(monkeypatch):
    states = iter([["NOT_STARTED"], ["RUNNING", "DEPLOYING"], ["RUNNING", "DEPLOY_FAILED"]])
    looks = []

    def status() -> SimpleNamespace:
        looks.append(next(states))
        return SimpleNamespace(applications={str(i): SimpleNamespace(status=s) for i, s in enumerate(looks[-1])})

    monkeypatch.setattr("ray.serve.status", status)
    monkeypatch.setattr(ray_driver, "STATUS_INTERVAL_S", 0.0)
    ray_driver._wait_while_models_load()
    assert looks[-1] == ["RUNNING", "DEPLOY_FAILED"]
    monkeypatch.setattr(ray_driver, "DASHBOARD_LIMIT_S", 0.0)
    ray_driver._wait_while_models_load()
    assert len(looks) == 3


def test_the_viewer_is_given_the_events_of_rays_autoscaler_and_not_its_table_of_resources(monkeypatch):
    dispatcher = WorkerStandardStreamDispatcher()
    monkeypatch.setattr(ray_driver, "global_worker_stdstream_dispatcher", dispatcher)
    monkeypatch.setattr("ray.autoscaler.v2.utils.is_autoscaler_v2", lambda: False)  # it would ask a cluster
    viewer = SimpleNamespace(lines=[])
    viewer.line = viewer.lines.append
    ray_driver._send_lines_to(viewer)
    dispatcher.emit({"pid": "autoscaler", "lines": ["Total Usage:", ":event_summary:Adding 1 node(s) of type gpu."]})
    dispatcher.emit({"pid": 7, "lines": ["Total Usage:"]})
    assert viewer.lines[-2:] == ["Adding 1 node(s) of type gpu.", "Total Usage:"]
    assert viewer.lines.count("Total Usage:") == 1


class Deleted:
    """Serve while an application is deleted, of which an ingress never ends by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engines_for: int):
        """engines_for: looks at the status for which an engine lives on."""
        self.looks, self.killed, self.is_shut_down = 0, list[tuple[str, int]](), False
        self._engines_for = engines_for
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "get_actor", self.get_actor)
        monkeypatch.setattr(ray, "kill", lambda name: self.killed.append((name, self.looks)))
        monkeypatch.setattr(serve.context, "_get_global_client", lambda **_: self)
        monkeypatch.setattr(serve, "status", self.status)
        monkeypatch.setattr(serve, "shutdown", lambda: setattr(self, "is_shut_down", True))
        monkeypatch.setattr(ray_driver, "STATUS_INTERVAL_S", 0.0)
        monkeypatch.setattr(ray_driver, "LAST_ANSWERS_S", 0.0)

    def get_actor(self, name: str, namespace: str) -> str:
        if "decode" in name and self.looks > self._engines_for:
            raise ValueError(name)
        return name

    def delete_apps(self, names: list[str], blocking: bool) -> None:
        """From now on Serve tells no replicas."""
        self.get_serve_details = dict

    def status(self) -> SimpleNamespace:
        self.looks += 1
        return SimpleNamespace(applications={} if self.killed else {"manta": None})

    def get_serve_details(self) -> dict[str, Any]:
        config = {"graceful_shutdown_timeout_s": 600.0}
        deployments = {
            name: {"deployment_config": config, "replicas": [{"actor_name": f"{name}#{i}"} for i in range(2)]}
            for name in ("ingress", "decode-m")
        }
        return {"applications": {"manta": {"deployments": deployments}}}


def test_ctrl_c_waits_for_engines_and_not_for_requests_that_none_is_left_to_compute(monkeypatch):
    deleted = Deleted(monkeypatch, engines_for=4)
    ray_driver._shutdown()
    assert [name for name, _ in deleted.killed] == ["ingress#0", "ingress#1"]
    assert {looks for _, looks in deleted.killed} == {5}, "once, and as soon as no engine is left"
    assert deleted.is_shut_down
