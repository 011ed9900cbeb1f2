"""Replicas of a real cluster that fetch cached KV from each other. `pytest -s` prints how much."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.models import make_model
from tests.serve.serve_run import ServeRun

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(600)]

CLIENTS = 4
TURNS = 5


def metric(server: ServeRun, name: str) -> float:
    lines = re.findall(rf"^{name}\S* (\S+)$", httpx.get(f"{server.url}/metrics", timeout=30).text, re.MULTILINE)
    return sum(map(float, lines))


def talk(server: ServeRun, client: int) -> tuple[list[str], int, int]:
    """A conversation. Returns its answers, and its prompt tokens from the second turn on, all and cached ones."""
    text, answers, tokens, cached = f"{client} " + "The ocean is deep and blue. " * 40, [], 0, 0
    for turn in range(TURNS):
        body = {"model": "tiny", "prompt": text, "max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status().json()
        answers.append(answer["choices"][0]["text"])
        if turn:
            tokens += answer["usage"]["prompt_tokens"]
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        text += answers[-1] + " and then?"
    return answers, tokens, cached


def test_a_conversation_finds_its_prefix_in_any_replica(tmp_path):
    """Replicas take turns, so each prompt comes to a replica that has at most an earlier turn."""
    folder = make_model(tmp_path, "llama", tokenizer=True, max_position_embeddings=4096)
    engine = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 3000, "max_num_seqs": 8}

    def args(fetching: bool) -> dict[str, Any]:
        decode = {"num_replicas": 3, "num_cpus": 0.2, "routing": {"policy": "round_robin"}}
        handoff = {"handoff": {"enable_prefix_fetching": True, "fetch_timeout_s": 20}} if fetching else {}
        return {"models": [{"name": "tiny", "model": str(folder), "engine": engine, "decode": decode, **handoff}]}

    with ServeRun(tmp_path, args(True)) as server:
        server.wait_until_healthy(3)
        talk(server, 100)  # from now on the routers know their replicas
        before = metric(server, "manta_kv_fetched_tokens_total")
        found = [talk(server, client) for client in range(CLIENTS)]
        fetched = metric(server, "manta_kv_fetched_tokens_total") - before
        tokens, cached = (sum(talk[i] for talk in found) for i in (1, 2))
        print(f"\n{cached} of {tokens} prompt tokens cached, {fetched:.0f} of them fetched")
        assert fetched > 0
        assert metric(server, "manta_kv_fetches_total") > 0
        server.put(args(False))
        server.wait_until_healthy(3)
        alone = [talk(server, client) for client in range(CLIENTS)]
        assert [talk[0] for talk in found] == [talk[0] for talk in alone]
        tokens, without = (sum(talk[i] for talk in alone) for i in (1, 2))
        print(f"without fetching: {without} of {tokens} cached")
        assert cached > without
