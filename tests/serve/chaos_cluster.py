"""An application with two pools on a cluster of several nodes, as an operator runs it: put by REST, HAProxy in front.

The head holds the ingress, HAProxy and Serve's controller. Every other node has room for one replica.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

from tests.scrape import Scrape
from tests.serve.fake_cluster import ROOT, FakeCluster
from tests.serve.pod_environment import pod_environment
from tests.serve.serve_run import Program, free_port, wait_until

MODEL = "tiny"
STARTUP_S = 480.0
STARTED = re.compile(r"((?:decode|prefill)-\w+-(\w+))/rank(\d+) placement\.rank_actor rank starts pid=(\d+) node=(\w+)")

Role = Literal["decode", "prefill"]


@dataclass(frozen=True)
class Replica:
    """pid: of its control actor. ranks: their pids. node: Ray's id."""

    name: str
    pid: int
    ranks: tuple[int, ...]
    node: str

    @property
    def lives(self) -> bool:
        """Whether any of its processes does."""
        return any(map(_lives, (self.pid, *self.ranks)))


class ChaosCluster(Program):
    """`put` brings the application."""

    may_fail = False  # whether Serve may call a change failed, and yet go on

    def __init__(self, nodes: list[dict[str, Any]], environment: dict[str, str] | None = None, code: str = str(ROOT)):
        """nodes: arguments of Cluster.add_node; the first is the head. environment: over that of the pods. code: as for
        FakeCluster."""
        self._folder = tempfile.TemporaryDirectory(prefix="manta", dir="/tmp")  # socket paths must be short
        folder = Path(self._folder.name)
        self.port, self._dashboard_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._rest = f"http://127.0.0.1:{self._dashboard_port}/api/serve/applications/"
        stored = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder / "gcs")}
        head = {"include_dashboard": True, "dashboard_port": self._dashboard_port, **nodes[0]}
        self.cluster = FakeCluster([head, *nodes[1:]], pod_environment(folder) | stored | (environment or {}), code)

    def put(self, args: dict[str, Any], deployments: list[dict[str, Any]]) -> None:
        """Returns once Serve has taken the configuration, which then begins to change the application."""
        app = {"name": "manta", "route_prefix": "/", "import_path": "manta:build"}
        config = {
            "proxy_location": "HeadOnly",  # the nodes of this machine would all want the same port
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [{**app, "args": args, "deployments": deployments}],
        }
        httpx.put(self._rest, json=config, timeout=300).raise_for_status()

    def wait_until_running(self, replicas: dict[Role, int], timeout_s: float = STARTUP_S) -> None:
        """Until the application is as it should be: so many of each pool, and no others to come or go."""
        wait_until(lambda: self._is_running(replicas), timeout_s)
        wait_until(lambda: self._healthy(), timeout_s)

    def replicas(self, role: Role) -> list[Replica]:
        """Those that run, or that still have to go."""
        ranks: dict[str, dict[int, int]] = {}
        nodes: dict[str, str] = {}
        for found in filter(None, map(STARTED.search, self.cluster.log_lines())):
            ranks.setdefault(found[2], {})[int(found[3])] = int(found[4])
            nodes[found[2]] = found[5]
        found_replicas = []
        for replica in self._deployments()[f"{role}-{MODEL}"]["replicas"]:
            name = replica["replica_id"]
            if replica["state"] in ("RUNNING", "STOPPING") and name in ranks:
                pids = tuple(pid for _, pid in sorted(ranks[name].items()))
                found_replicas.append(Replica(name, replica["pid"], pids, nodes[name]))
        return found_replicas

    def pids(self, deployment: str) -> list[int]:
        """The processes of its running replicas; none while Serve's controller is away."""
        try:
            replicas = self._deployments()[deployment]["replicas"]
        except (httpx.HTTPError, LookupError):
            return []
        return [replica["pid"] for replica in replicas if replica["state"] == "RUNNING"]

    def busiest(self, requests: int) -> Replica:
        """The decode replica that runs most, once all of so many requests run. Engines say that every second."""
        wait_until(lambda: sum(self._running().values()) >= requests)
        running = self._running()
        return max(self.replicas("decode"), key=lambda replica: running.get(replica.name, 0.0))

    def lists(self, replica: Replica) -> bool:
        """Whether Serve still takes it for running. True also while Serve's controller is away."""
        try:
            deployments = self._deployments()
        except (httpx.HTTPError, LookupError):
            return True
        replicas = [one for deployment in deployments.values() for one in deployment["replicas"]]
        return any(one["replica_id"] == replica.name and one["state"] == "RUNNING" for one in replicas)

    def controller(self) -> int | None:
        """The pid of Serve's controller; None while there is none."""
        return next((p.pid for p in self.cluster.processes() if _title(p).startswith("ray::ServeController")), None)

    def scrape(self) -> Scrape:
        answer = httpx.get(f"{self.url}/metrics", timeout=20)
        assert answer.status_code == 200, answer.text
        return Scrape(answer.text)

    def replays(self) -> int:
        """So far, by the logs of all ingresses: with an ingress goes what it has counted. Without requests that move
        before their first token, of which nothing can be taken along."""
        lines = [line for line in self.cluster.log_lines() if "request replayed" in line]
        return sum("received_tokens=0 reason=moved" not in line for line in lines)

    def handoffs(self) -> list[dict[str, Any]]:
        """Those under way."""
        live: list[dict[str, Any]] = httpx.get(f"{self.url}/debug/handoffs", timeout=20).json()["handoffs"]
        return live

    def wait_until_idle(self) -> None:
        """No engine holds a block for anybody, and nothing waits."""
        wait_until(lambda: not self.handoffs(), 60)
        wait_until(lambda: self._held(self.scrape()) == 0, 60)

    def stop(self) -> None:
        with suppress(httpx.HTTPError):  # the dashboard may not have lived through what was done to the cluster
            httpx.delete(self._rest, timeout=60)
        self.cluster.stop()
        self._folder.cleanup()

    def _is_running(self, replicas: dict[Role, int]) -> bool:
        try:
            application = self._application()
        except (httpx.HTTPError, LookupError):  # Serve's controller is away for now
            return False
        assert self.may_fail or application["status"] != "DEPLOY_FAILED", application["message"]
        if application["status"] != "RUNNING":
            return False
        states = {
            role: [replica["state"] for replica in application["deployments"][f"{role}-{MODEL}"]["replicas"]]
            for role in replicas
        }
        ingress = [replica["state"] for replica in application["deployments"]["ingress"]["replicas"]]
        return set(ingress) == {"RUNNING"} and all(states[role] == ["RUNNING"] * n for role, n in replicas.items())

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    def _application(self) -> dict[str, Any]:
        application: dict[str, Any] = httpx.get(self._rest, timeout=30).json()["applications"]["manta"]
        return application

    def _deployments(self) -> dict[str, Any]:
        deployments: dict[str, Any] = self._application()["deployments"]
        return deployments

    def _running(self) -> dict[str, float]:
        series = self.scrape().select("vllm:num_requests_running", [])
        return {one.labels["engine"].rpartition("-")[2]: one.value for one in series}

    def _held(self, scrape: Scrape) -> float:
        blocks = (scrape.sum("manta_kv_blocks", state=state) for state in ("running", "reserved", "leased"))
        queues = ("vllm:num_requests_running", "vllm:num_requests_waiting", "manta_ingress_requests_waiting")
        return sum(blocks) + sum(map(scrape.sum, queues))


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _title(process: psutil.Process) -> str:
    try:
        return next(iter(process.cmdline()), "")
    except psutil.Error:  # it has just ended
        return ""


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
