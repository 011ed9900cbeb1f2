"""Conversations that are held while the whole cluster is killed and starts again. `pytest -s` prints what is cached."""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest

from tests.models import make_model
from tests.serve.serve_run import ServeRun, wait_until
from tests.serve.test_fetching import metric

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(600)]

CLIENTS = 4


def turn(server: ServeRun, client: int, text: str, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": text, "max_tokens": 20, "temperature": 0.0, "ignore_eos": True, **more}
    headers = {"X-Session-Id": f"talk {client}"}
    found = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)
    answer: dict[str, Any] = found.raise_for_status().json()
    return answer


@pytest.mark.parametrize("place", ["disk", "store"])
def test_held_conversations_survive_a_kill_of_the_whole_cluster(tmp_path, place):
    folder = make_model(tmp_path, "llama", tokenizer=True, max_position_embeddings=4096)
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    files = tmp_path / "kv"
    where = {"kv_offloading_disk_size": 0.2, "kv_offloading_dir": str(files)}
    if place == "store":
        where = {"kv_offloading_store_size": 0.2, "kv_offloading_store": str(files)}
    engine = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 1000, "max_num_seqs": 8}
    decode = {"num_replicas": 2, "num_cpus": 0.2}
    tiers = {**engine, **where, "kv_offloading_key_file": str(key)}
    args = {"models": [{"name": "tiny", "model": str(folder), "engine": tiers, "decode": decode}]}

    texts = [f"{client} " + "The ocean is deep and blue. " * 40 for client in range(CLIENTS)]
    server = ServeRun(tmp_path, args)
    try:
        server.wait_until_healthy(2)
        for client, text in enumerate(texts):
            answer = turn(server, client, text, hold_s=3600)
            (hold,) = answer["usage"]["holds"]
            assert hold["status"] == "held"
            texts[client] = text + answer["choices"][0]["text"] + " and then?"
        wait_until(lambda: len(list(files.rglob("holds/*"))) == CLIENTS)
    finally:
        (tmp_path / "first.log").write_text("".join(server.log))
        server.stop()  # SIGKILL
    server = ServeRun(tmp_path, args)
    try:
        server.wait_until_healthy(2)
        per_hold = 1 if place == "disk" else 2  # each replica restores what is in the store
        wait_until(lambda: metric(server, "manta_holds_restored_total") == CLIENTS * per_hold)
        answers = [turn(server, client, text) for client, text in enumerate(texts)]
        usages = [answer["usage"] for answer in answers]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        print(f"\n{place}: {cached} of {[usage['prompt_tokens'] for usage in usages]} prompt tokens cached")
        assert all(hit > 0.8 * usage["prompt_tokens"] for hit, usage in zip(cached, usages, strict=True))
        server.put({"models": [{"name": "tiny", "model": str(folder), "engine": engine, "decode": decode}]})
        server.wait_until_healthy(2)
        plain = [turn(server, client, text)["choices"][0]["text"] for client, text in enumerate(texts)]
        assert [answer["choices"][0]["text"] for answer in answers] == plain
    finally:
        (tmp_path / "second.log").write_text("".join(server.log))
        server.stop()
