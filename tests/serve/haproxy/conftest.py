"""One server as `make serve` starts it on Linux, HAProxy in front, that wants keys.

It serves a model twice: `tiny` has room for all that these tests ask, `small` is soon full.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from deployments.frontend.api_keys import hash_key
from tests.serve.haproxy.clients import KEYS, MAX_NUM_SEQS, MAX_WAITING
from tests.serve.serve_run import ServeRun, haproxy_ports


@pytest.fixture(scope="package")
def server(tmp_path_factory, model_folder) -> Iterator[ServeRun]:
    if sys.platform != "linux":
        pytest.skip("Ray brings HAProxy for Linux only")
    folder = tmp_path_factory.mktemp("serve")
    keys = folder / "keys"
    keys.write_text("".join(f"{name}:{hash_key(key)}\n" for name, key in KEYS.items()))
    decode = {"num_cpus": 0.5}
    tiny = {"name": "tiny", "model": str(model_folder), "decode": decode}
    small = {"name": "small", "model": str(model_folder), "decode": decode, "engine": {"max_num_seqs": MAX_NUM_SEQS}}
    args = {"models": [tiny, small], "ingress": {"max_waiting": MAX_WAITING, "api_keys_file": str(keys)}}
    server = ServeRun(folder, args, environment=haproxy_ports(), manta=True)
    try:
        server.wait_until_healthy(replicas=2)
        yield server
    finally:
        server.stop()
