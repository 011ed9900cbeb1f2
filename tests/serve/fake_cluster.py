"""A Ray cluster of several nodes on this machine, in a process of its own.

`ray.cluster_utils.Cluster` in the tests' process would make that a Ray driver, for all tests to come.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from tests.serve.serve_run import Program, kill_all, ray_environment

ROOT = Path(__file__).parents[2]
NOTICE_NODE_DEATH = {  # Ray's defaults take more than 15 s
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


class FakeCluster(Program):
    def __init__(self, nodes: list[dict[str, Any]], environment: dict[str, str] | None = None, code: str = str(ROOT)):
        """nodes: arguments of Cluster.add_node; the first is the head. environment: of all nodes. code: folder with the
        packages of all nodes whose `env_vars` have no PYTHONPATH of their own."""
        self._folder = tempfile.TemporaryDirectory(prefix="manta", dir="/tmp")  # socket paths must be short
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(nodes)],
            cwd=self._folder.name,  # workers look for modules in their driver's working folder first
            env={
                **ray_environment(self._folder.name),
                **NOTICE_NODE_DEATH,
                **(environment or {}),
                "PYTHONPATH": f"{code}{os.pathsep}{ROOT}",  # `tests` are in the latter
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address: str = self._answer()

    def remove_node(self, node_id: str) -> None:
        """SIGKILL to all processes of a node that Ray itself started."""
        self._ask("remove", node_id)

    def node_processes(self, node_id: str) -> list[psutil.Process]:
        """Its raylet, and all that this has started."""
        raylet = psutil.Process(self._ask("raylet", node_id))
        return [raylet, *raylet.children(recursive=True)]

    def add_node(self, node: dict[str, Any]) -> None:
        """node: arguments of Cluster.add_node."""
        self._ask("add", json.dumps(node))

    def kill_control_store(self) -> None:
        """SIGKILL to the head's GCS."""
        self._ask("kill_gcs", "")

    def start_control_store(self) -> None:
        """Anew, with what it had stored, if that was on disk."""
        self._ask("start_gcs", "")

    def placement_groups(self) -> int:
        """How many there are."""
        groups: int = self._ask("groups", "")
        return groups

    def log_lines(self) -> list[str]:
        """The lines of the actors of all nodes, in no order across processes."""
        files = sorted(Path(self._folder.name).rglob("worker-*.err"))
        return [line for file in files for line in file.read_text(errors="replace").splitlines()]

    def labels(self, node_id: str) -> dict[str, str]:
        """Of a node."""
        labels: dict[str, str] = self._ask("labels", node_id)
        return labels

    def processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def stop(self) -> None:
        """At once."""
        if self._process.poll() is None:
            kill_all(self.processes())
        self._folder.cleanup()

    def _ask(self, command: str, argument: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, argument]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        """The next line that is one; Ray prints others."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError("the fake cluster ended")


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    head, *others = json.loads(sys.argv[1])
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})
    for arguments in others:
        cluster.add_node(**arguments)
    ray.init(address=cluster.address, log_to_driver=False)
    print("answer", json.dumps(cluster.address), flush=True)
    for line in sys.stdin:
        command, argument = json.loads(line)
        result = None
        if command in ("remove", "raylet"):
            (socket,) = [n["RayletSocketName"] for n in ray.nodes() if n["NodeID"] == argument]
            (node,) = [n for n in cluster.worker_nodes if n.raylet_socket_name == socket]
        if command == "remove":
            cluster.remove_node(node, allow_graceful=False)
        elif command == "raylet":
            (raylet,) = node.all_processes["raylet"]
            result = raylet.process.pid
        elif command == "add":
            cluster.add_node(**json.loads(argument))
        elif command == "kill_gcs":
            cluster.head_node.kill_gcs_server()
        elif command == "start_gcs":
            cluster.head_node.start_gcs_server()
        elif command == "labels":
            (result,) = [n["Labels"] for n in ray.nodes() if n["NodeID"] == argument]
        elif command == "groups":
            groups = ray.util.placement_group_table().values()
            result = len([group for group in groups if group["state"] != "REMOVED"])
        print("answer", json.dumps(result), flush=True)
    ray.shutdown()  # the tests' process has ended without `stop`
    cluster.shutdown()


if __name__ == "__main__":
    main()
