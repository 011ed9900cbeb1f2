"""The Serve configuration of each Kubernetes overlay, put to a real Ray cluster by REST, as the KubeRay operator does.

The cluster has fake GPUs and labels, and runs with the environment that all Ray pods have.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.serve.k8s_head import Head
from tests.serve.serve_run import wait_until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only"),
]

K8S = Path(__file__).parents[2] / "k8s"
STARTUP_S = 150.0
WORKERS = [  # between them they have a place for every overlay; pods of the overlays are larger
    {"num_cpus": 9, "num_gpus": 2, "labels": {"pool": "decode"}},
    {"num_cpus": 9, "num_gpus": 2, "labels": {"pool": "prefill"}},
    {"num_cpus": 3, "labels": {"pool": "ingress"}},
]
REPLICAS = {  # of each deployment, when nobody asks anything
    "cpu-demo": {"ingress": 2, "decode-pocket": 2},
    "single-gpu": {"ingress": 2, "decode-qwen3-8b": 1},
    "multi-node-tp": {"ingress": 2, "decode-llama-3.3-70b": 1},
    "multi-node-pp": {"ingress": 2, "decode-llama-3.3-70b": 1},
    "pd-disagg": {"ingress": 2, "prefill-qwen3-8b": 1, "decode-qwen3-8b": 1},
}


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with tempfile.TemporaryDirectory(prefix="manta", dir="/tmp") as folder:  # socket paths must be short
        head = Head(Path(folder), WORKERS)
        try:
            yield head
        finally:
            head.cluster.stop()


def test_there_is_an_expectation_for_every_overlay():
    assert REPLICAS.keys() == {folder.name for folder in (K8S / "overlays").iterdir()}


@pytest.mark.parametrize("overlay", REPLICAS)
def test_serve_configuration_of_an_overlay_is_put_to_a_cluster_and_answers(head, overlay):
    config = yaml.safe_load((K8S / "overlays" / overlay / "serve_config.yaml").read_text())
    model = config["applications"][0]["args"]["models"][0]["name"]
    head.put(config)
    wait_until(lambda: head.status() == ("RUNNING", REPLICAS[overlay]), STARTUP_S)
    # HAProxy may know the replicas a little later, or still those of the overlay before
    wait_until(lambda: head.complete(model).status_code == 200)
    assert head.complete(model).json()["usage"]["completion_tokens"] > 0
