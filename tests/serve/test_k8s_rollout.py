"""A roll as the chart renders it, put to a Ray cluster whose fake nodes have the labels of the rendered worker groups.

Nodes of both tags run the same code here; tests/serve/test_roll.py has two versions.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.overlays import needs_helm, ray_groups, ray_service
from tests.k8s.test_rollout import LABEL, NEW, OLD, tagged
from tests.serve.k8s_head import Head
from tests.serve.serve_run import wait_until
from tests.serve.test_k8s_overlays import REPLICAS

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only"),
    needs_helm,
]

ROLL_S = 300.0
STEPS = [((OLD,), OLD), ((OLD, NEW), NEW), ((OLD, NEW), OLD)]  # a tag, the next one, and back


def node(group: dict[str, Any]) -> dict[str, Any]:
    """A node that has room for all replicas of the group and a spare one."""
    has_gpus = group["rayStartParams"].get("num-gpus", "0") != "0"
    return {"num_cpus": 16, "labels": group["labels"], **({"num_gpus": 8} if has_gpus else {})}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("overlay", ["single-gpu", "pd-disagg"])
def test_all_replicas_run_on_nodes_of_the_tag_that_serves_there_and_back(overlay):
    groups = ray_groups(tagged(overlay, OLD, NEW))
    head_group = groups.pop("head")
    with tempfile.TemporaryDirectory(prefix="manta", dir="/tmp") as folder:  # socket paths must be short
        head = Head(Path(folder), [node(group) for group in groups.values()], head_group["labels"])
        try:
            for tags, serving in STEPS:
                manifests = tagged(overlay, *tags, serving=serving)
                config = yaml.safe_load(ray_service(manifests)["spec"]["serveConfigV2"])
                head.put(config)
                expected = {name: [serving] * count for name, count in REPLICAS[overlay].items()}
                wait_until(lambda expected=expected: head.labels(LABEL) == expected, ROLL_S)
                wait_until(lambda: head.status() == ("RUNNING", REPLICAS[overlay]), ROLL_S)
                model = config["applications"][0]["args"]["models"][0]["name"]
                wait_until(lambda model=model: head.complete(model).status_code == 200)
        finally:
            head.cluster.stop()
