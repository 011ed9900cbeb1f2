"""Servers, ingress and engine in one process, that are killed under the turns of a tree of sessions."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployments.jobs.server import NUM_TOKENS
from tests.deployments.jobs.test_killed_servers import SERVER, have_more, read_until
from tests.resuming_client import ResumingClient
from tests.served_app import served_app

pytestmark = pytest.mark.slow
NUM_CLIENTS, NUM_KILLS = 8, 2


def begin(base_url: str, budget: int) -> None:
    """A session with a budget, and one below it for each client."""
    with httpx.Client(base_url=base_url, timeout=60) as http:
        for number in range(-1, NUM_CLIENTS):
            below = {"X-Session-Id": f"sub-{number}", "X-Parent-Session-Id": "top"}
            top = {"X-Session-Id": "top", "X-Session-Max-Tokens": str(budget)}
            answer = http.post(
                "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=top if number < 0 else below
            )
            assert answer.status_code == 200, answer.text


async def all_read(clients: list[ResumingClient], base_url: str) -> None:
    await read_until(base_url, clients, lambda: all(client.done for client in clients))


@pytest.mark.parametrize("budget", [100_000, 600])
def test_no_kill_bills_a_turn_twice_or_lets_the_tree_exceed_its_budget(tmp_path: Path, budget: int):
    url = f"sqlite://{tmp_path}/store.db"
    body: dict[str, Any] = {"prompt": "a", "max_tokens": NUM_TOKENS}
    clients = [ResumingClient(f"key {i}", {**body, "session_id": f"sub-{i}"}) for i in range(NUM_CLIENTS)]
    for kill in range(NUM_KILLS):
        count = [len(client.ids) for client in clients]
        with served_app(SERVER, url) as (process, base_url):
            if not kill:
                begin(base_url, budget)
            asyncio.run(read_until(base_url, clients, partial(have_more, clients, count), process.kill))
    with served_app(SERVER, url) as (_, base_url):
        asyncio.run(all_read(clients, base_url))
        whole = [ResumingClient(client.key, client.body) for client in clients]
        asyncio.run(all_read(whole, base_url))
        assert [client.text for client in whole] == [client.text for client in clients]
        told = httpx.get(f"{base_url}/v1/sessions/top", timeout=60).json()
        assert told["usage"]["turns"] == len(told["turns"]) == 1 + 2 * NUM_CLIENTS
        assert None not in {turn["finish_reason"] for turn in told["turns"]}
        assert told["usage"]["prompt_tokens"] == 1 + 2 * NUM_CLIENTS
        used = told["usage"]["prompt_tokens"] + told["usage"]["output_tokens"]
        assert used <= budget and told["remaining_tokens"] == budget - used
        if budget > 10_000:
            assert told["usage"]["output_tokens"] == 1 + NUM_CLIENTS + NUM_CLIENTS * NUM_TOKENS
        else:
            assert "budget" in {turn["finish_reason"] for turn in told["turns"]}
