"""An application that is rolled from one version of Manta to another, and back, inside one Ray cluster.

Each fake node has the packages of one version, as nodes of two images have, and a label that names it. The head, with
Serve's controller and HAProxy, is of the old one throughout.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.serve.chaos_cluster import MODEL, ChaosCluster, Replica, kill
from tests.serve.planted_version import APPENDED, OTHER_DEFAULT, OTHER_KERNEL, plant
from tests.serve.serve_run import wait_until

LABEL = "manta/version"
REPLICAS = 2
ROLL_S = 1200.0  # on a busy machine
ROOM = {"num_cpus": 1}  # of each version's node: two replicas, one to spare, and an ingress


class VersionCluster(ChaosCluster):
    may_fail = True  # a replica that dies meanwhile makes Serve call the change failed, until all are up

    def __init__(self, folder: Path, *, same_numerics: bool = False):
        """folder: for both versions and what they store. same_numerics: whether the new one computes as the old one."""
        self.same_numerics = same_numerics
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
        model = {
            "name": MODEL,
            "model": "pocket",
            "engine": {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 2048},
            "decode": {"num_replicas": REPLICAS, "num_cpus": 0.15, "label_selector": nodes},
        }
        ingress = {"store": f"sqlite://{self._kept / 'store.db'}", "batch_dir": str(self._kept / "batches")}
        self.put(
            {"models": [model], "ingress": ingress},
            [
                {"name": f"decode-{MODEL}", "max_surge_percent": 100 // REPLICAS},
                {"name": "ingress", "ray_actor_options": {"num_cpus": 0.1, "label_selector": nodes}},
            ],
        )

    def roll_to(self, version: str) -> None:
        """Returns once all runs in that version, and the other one is gone."""
        self.ask_for(version)
        self.wait_until_rolled_to(version)

    def wait_until_rolled_to(self, version: str) -> None:
        self.wait_until_running({"decode": REPLICAS}, ROLL_S)
        assert len(self.of_version(version)) == REPLICAS

    def of_version(self, version: str) -> list[Replica]:
        """Its decode replicas that run; none while Serve builds the application."""
        try:
            replicas = self.replicas("decode")
        except LookupError:
            return []
        return [replica for replica in replicas if self.lists(replica) and self._is_of(replica, version)]

    def wait_for(self, count: int, version: str) -> None:
        """Until so many decode replicas of a version run."""
        wait_until(lambda: len(self.of_version(version)) >= count, ROLL_S)

    def kill_one_of(self, version: str) -> None:
        replica = self.of_version(version)[0]
        kill(*replica.ranks)
        wait_until(lambda: not replica.lives and not self.lists(replica))

    def _is_of(self, replica: Replica, version: str) -> bool:
        try:
            return psutil.Process(replica.pid).environ()["PYTHONPATH"] == str(self._code[version])
        except psutil.Error:  # it has just ended
            return False
