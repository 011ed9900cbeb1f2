"""Everything is killed under running streams, and started again: each client ends with the text of a run without a
fault, no token twice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import httpx
import pytest

from tests.serve.serve_run import ServeRun, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow]
NUM_CLIENTS = 8
RUNNING = 5  # events after which a stream counts as running
LIMIT_S = 280.0


@dataclass(slots=True)
class Client:
    """Asks for a stream until it has all of it. server: its address; empty while there is none."""

    body: dict[str, Any]
    key: str
    server: list[str]
    text: str = ""
    last_id: str = ""
    ids: list[str] = field(default_factory=list)
    connections: int = 0
    done: bool = False
    running: Event = field(default_factory=Event)

    def run(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        with httpx.Client(timeout=60) as client:
            while not self.done:
                assert time.monotonic() < deadline, f"{self.key} is not answered after {len(self.ids)} events"
                if self.server:
                    with suppress(httpx.HTTPError):
                        self.ask(client)
                time.sleep(0.5)

    def ask(self, client: httpx.Client) -> None:
        headers = {"Idempotency-Key": self.key} | ({"Last-Event-ID": self.last_id} if self.last_id else {})
        url = f"{self.server[0]}/v1/completions"
        with client.stream("POST", url, json={**self.body, "stream": True}, headers=headers) as response:
            if response.status_code >= 500:
                return  # nobody is there yet
            assert response.status_code == 200, response.read()
            self.connections += 1
            for event_id, data in events(response.iter_lines()):
                if event_id is not None:
                    assert event_id not in self.ids
                    self.ids.append(event_id)
                    self.last_id = event_id
                if data == "[DONE]":
                    self.done = True
                    return
                event = json.loads(data)
                if "error" in event:
                    assert event["error"]["type"] == "service_unavailable_error", event
                    return
                self.text += event["choices"][0]["text"]
                if len(self.ids) == RUNNING:
                    self.running.set()


def events(lines: Iterator[str]) -> Iterator[tuple[str | None, str]]:
    """(id, data) of each event; as a browser does, only of those that came whole."""
    event_id, data = None, None
    for line in lines:
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            data = line[6:]
        elif not line and data is not None:
            yield event_id, data
            event_id, data = None, None


def test_each_client_has_the_whole_text_once_after_its_ingress_and_then_the_whole_cluster_were_killed(tmp_path):
    args = {
        "models": [{"name": "pocket", "model": "pocket"}],
        "ingress": {"store": f"sqlite://{tmp_path}/store.db"},
    }
    bodies: list[dict[str, Any]] = [
        {"prompt": f"The story of number {i} is", "max_tokens": 700, "ignore_eos": True, "temperature": 1.0, "seed": i}
        for i in range(NUM_CLIENTS)
    ]
    server = ServeRun(tmp_path, args)
    try:
        server.wait_until_healthy()
        whole = [ask_whole(server.url, body) for body in bodies]
        address = [server.url]
        clients = [Client(body, f"key {i}", address) for i, body in enumerate(bodies)]
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            runs = [threads.submit(client.run) for client in clients]
            for client in clients:
                assert client.running.wait(60)
            (ingress,) = [p for p in server.processes() if "ServeReplica:manta:ingress" in " ".join(p.cmdline())]
            ingress.kill()
            wait_until(lambda: all(client.connections > 1 or client.done for client in clients), 120)
            unfinished = sum(not client.done for client in clients)
            address.clear()
            server.stop()
            assert unfinished
            server = ServeRun(tmp_path, args)
            server.wait_until_healthy()
            address.append(server.url)
            for run in runs:
                run.result(LIMIT_S)
        assert [client.text for client in clients] == whole
        assert max(client.connections for client in clients) > 2
        again = httpx.post(
            f"{server.url}/v1/completions", json={**bodies[0], "stream": True}, headers={"Idempotency-Key": "key 0"}
        )
        assert "".join(json.loads(d)["choices"][0]["text"] for _, d in list(events(iter(again.text.split("\n"))))[:-1])
    finally:
        server.stop()


def ask_whole(url: str, body: dict[str, Any]) -> str:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text
