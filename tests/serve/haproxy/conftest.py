"""One server as `make serve` starts it on Linux, HAProxy in front, that wants keys.

It serves a model twice: `tiny` is soon full, and `apart` has its prompts computed by an engine of two ranks, in several
chunks, and decodes on one rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.frontend.api_keys import hash_key
from tests.models import make_model
from tests.serve.haproxy.clients import KEYS, MAX_NUM_SEQS, MAX_WAITING
from tests.serve.serve_run import ServeRun, wait_until

ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1}
DECODE = {"num_cpus": 0.2}
APART = {
    "engine": {**ENGINE, "num_gpu_blocks_override": 512},
    "prefill": {"num_cpus": 0.2, "engine": {"tensor_parallel_size": 2, "max_num_batched_tokens": 128}},
    "decode": DECODE,
    "handoff": {"transport": "tcp", "policy": "always"},
}
LAST = "test_ctrl_c_ends_manta_serve_and_all_its_processes"


@pytest.hookimpl(trylast=True)  # after files have got their order
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The test that ends the server comes after all others of this folder."""
    places = [i for i, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    for place, item in zip(places, sorted((items[i] for i in places), key=lambda item: item.name == LAST), strict=True):
        items[place] = item


@pytest.fixture(scope="package")
def server(tmp_path_factory) -> Iterator[ServeRun]:
    if sys.platform != "linux":
        pytest.skip("Ray brings HAProxy for Linux only")
    folder = tmp_path_factory.mktemp("serve")
    model = str(make_model(folder / "model", "llama", tokenizer=True, max_position_embeddings=2048))
    keys = folder / "keys"
    keys.write_text("".join(f"{name}:{hash_key(key)}\n" for name, key in KEYS.items()))
    models = [
        {"name": "tiny", "model": model, "decode": DECODE, "engine": {**ENGINE, "max_num_seqs": MAX_NUM_SEQS}},
        {"name": "apart", "model": model, **APART},
    ]
    ingress = {"max_waiting": MAX_WAITING, "api_keys_file": str(keys), "admin_keys": ["alice"]}
    args = {"models": models, "ingress": ingress}
    with ServeRun(folder, args, manta=True) as server:
        server.wait_for_line("prefill engines: prefill-apart-", timeout_s=280)  # the dispatcher knows it
        wait_until(lambda: httpx.get(f"{server.url}/health", timeout=10).status_code == 200, timeout_s=60)
        yield server
