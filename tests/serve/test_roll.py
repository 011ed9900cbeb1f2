"""Two versions of Manta in one Ray cluster: replicas are replaced one at a time, with one to spare, and replaced back.

No stream fails, and each text is that of one version, or says where it went on with other numerics. `pytest -s` prints
what it took; `python -m benchmarks.roll` is the same with more streams.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.serve.roll import Roll
from tests.serve.version_cluster import VersionCluster

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only"),
]
STREAMS, TOKENS, CLIENTS = 32, 300, 8


@pytest.fixture(params=[False, True], ids=["one pool", "prefill and decode"])
def split(request) -> bool:
    return request.param


@pytest.fixture(params=[True, False], ids=["the same numerics", "other numerics"])
def cluster(tmp_path, request, split) -> Iterator[VersionCluster]:
    with VersionCluster(tmp_path, same_numerics=request.param, split=split) as cluster:
        yield cluster
        (tmp_path / "ray.log").write_text("\n".join(cluster.cluster.log_lines()))


def test_no_stream_fails_and_no_text_mixes_versions_unsaid(cluster):
    loads = Roll(cluster, TOKENS, CLIENTS).run(STREAMS)
    assert any(load.crossed for load in loads) != cluster.same_numerics
