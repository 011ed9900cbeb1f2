"""An application that is rolled from one version of Manta to another, and back, inside one Ray cluster.

Each fake node has the packages of one version, as nodes of two images have, and a label that names it. The head, with
Serve's controller and HAProxy, is of the old one throughout.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil

from deployments.frontend.api_keys import key_line
from tests.serve.chaos_cluster import MODEL, ChaosCluster, Replica, Role, kill
from tests.serve.planted_version import APPENDED, OTHER_DEFAULT, OTHER_KERNEL, plant
from tests.serve.serve_run import wait_until

LABEL = "manta/version"
REPLICAS = 2
ROLL_S = 1200.0  # on a busy machine
RANK_CPUS = 0.05
ROOM = {"num_cpus": 1}  # of each version's node: of each pool two replicas and one to spare, and the ingress
OPERATOR, STREAMS = "operator", "streams"
AS_OPERATOR, AS_STREAMS = ({"Authorization": f"Bearer sk-{name}"} for name in (OPERATOR, STREAMS))
BUDGET = "3650d"  # a window that no run sees the end of


class VersionCluster(ChaosCluster):
    may_fail = True  # a replica that dies meanwhile makes Serve call the change failed, until all are up

    def __init__(self, folder: Path, *, same_numerics: bool = False, split: bool = False):
        """folder: for both versions and what they store. same_numerics: whether the new one computes as the old one.
        split: whether prompts have a pool of their own."""
        self.same_numerics = same_numerics
        self.pools: tuple[Role, ...] = ("decode", "prefill") if split else ("decode",)
        edits = [*APPENDED, OTHER_DEFAULT, *([] if same_numerics else [OTHER_KERNEL])]
        self._code = {"old": plant(folder / "old"), "new": plant(folder / "new", edits)}
        self._kept = folder / "kept"
        self._kept.mkdir(exist_ok=True)
        nodes = [
            {**ROOM, "labels": {LABEL: version}, "env_vars": {"PYTHONPATH": str(code)}}
            for version, code in self._code.items()
        ]
        super().__init__([{"num_cpus": 0}, *nodes], code=str(self._code["old"]))

    def ask_for(self, version: str) -> None:
        """Put the application's configuration for nodes of a version. Returns at once."""
        nodes = {LABEL: version}
        pool = {"num_replicas": REPLICAS, "num_cpus": RANK_CPUS, "label_selector": nodes}
        model = {
            "name": MODEL,
            "model": "pocket",
            "engine": {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 2048},
            **dict.fromkeys(self.pools, pool),
            **({"handoff": {"transport": "tcp", "policy": "always"}} if "prefill" in self.pools else {}),
        }
        ingress = {
            "store": f"sqlite://{self._kept / 'store.db'}",
            "batch_dir": str(self._kept / "batches"),
            "api_keys": [key_line(name, f"sk-{name}") for name in (OPERATOR, STREAMS)],
            "admin_keys": [OPERATOR],
            "allow_runtime_key_updating": True,
            "key_limits": {STREAMS: {"budget_limits": [{"budget_duration": BUDGET, "max_engine_seconds": 1e9}]}},
        }
        surging = [{"name": f"{pool}-{MODEL}", "max_surge_percent": 100 // REPLICAS} for pool in self.pools]
        nodes_of_ingress = {"num_cpus": 0.1, "label_selector": nodes}
        self.put(
            {"models": [model], "ingress": ingress},
            [*surging, {"name": "ingress", "ray_actor_options": nodes_of_ingress}],
        )

    def roll_to(self, version: str) -> None:
        """Returns once all runs in that version, and the other one is gone."""
        self.ask_for(version)
        self.wait_until_rolled_to(version)

    def wait_until_rolled_to(self, version: str) -> None:
        self.wait_until_running(dict.fromkeys(self.pools, REPLICAS), ROLL_S)
        assert all(len(self.of_version(version, pool)) == REPLICAS for pool in self.pools)

    def of_version(self, version: str, pool: Role) -> list[Replica]:
        """Its replicas that run; none while Serve builds the application."""
        try:
            replicas = self.replicas(pool)
        except LookupError:
            return []
        return [replica for replica in replicas if self.lists(replica) and self._is_of(replica, version)]

    def wait_for_first(self, version: str) -> None:
        """Until a replica of a version runs, in whichever pool."""
        wait_until(lambda: any(self.of_version(version, pool) for pool in self.pools), ROLL_S)

    def wait_for_all(self, version: str) -> None:
        """Until every pool has all replicas of a version. Those of another one may still have to go."""
        wait_until(lambda: all(len(self.of_version(version, pool)) == REPLICAS for pool in self.pools), ROLL_S)

    def kill_one_of(self, version: str) -> None:
        """In each pool."""
        replicas = [self.of_version(version, pool)[0] for pool in self.pools]
        for replica in replicas:
            kill(*replica.ranks)
        wait_until(lambda: not any(replica.lives or self.lists(replica) for replica in replicas))

    def spent(self) -> float:
        """Seconds of engines that the key STREAMS has used, as the store has it."""
        asked = httpx.get(f"{self.url}/key/info", params={"key_alias": STREAMS}, headers=AS_OPERATOR, timeout=60)
        used: float = asked.raise_for_status().json()["used"][f"max_engine_seconds/{BUDGET}"]["used"]
        return used

    def _is_of(self, replica: Replica, version: str) -> bool:
        try:
            return psutil.Process(replica.pid).environ()["PYTHONPATH"] == str(self._code[version])
        except psutil.Error:  # it has just ended
            return False
