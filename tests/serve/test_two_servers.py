"""Two `manta serve` on one machine, of which one wants keys: neither ever answers what the other was asked."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deployments.frontend.api_keys import hash_key
from tests.serve.serve_run import ServeRun, kill_all, wait_until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only"),
]

KEY = {"Authorization": "Bearer sk-b"}
KEYED = [f"b:{hash_key('sk-b')}"]
WHOLE_S = 240.0  # a start beside another server, on a busy machine


@dataclass
class Watch:
    """What clients of a server are answered, whatever happens to it."""

    url: str
    model: str
    keyed: bool
    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    unavailable: list[tuple[float, str]] = field(default_factory=list)
    """When, on time.monotonic(), and the answer."""
    client: httpx.Client = field(default_factory=lambda: httpx.Client(verify=False, timeout=60))

    def ask(self, headers: dict[str, str]) -> None:
        try:
            answer = self.client.get(f"{self.url}/v1/models", headers=headers)
        except httpx.TransportError as error:  # nobody listens, or whoever did has just ended
            self.answers[type(error).__name__] += 1
            return
        self.answers[f"{answer.status_code}{' with a key' if headers else ''}"] += 1
        if answer.status_code == 200:
            names = [model["id"] for model in answer.json()["data"]]
            right = names == [self.model] and (bool(headers) or not self.keyed)
        elif answer.status_code == 401:
            right = self.keyed and not headers
        else:
            self.unavailable.append((time.monotonic(), f"{answer.status_code} {answer.text}"))
            right = answer.status_code == 502 or (answer.status_code == 503 and "retry-after" in answer.headers)
        if not right:
            self.wrong.append(f"{answer.status_code} {answer.headers} {answer.text}")

    @contextmanager
    def during(self) -> Iterator[None]:
        done = threading.Event()

        def ask_on() -> None:
            while not done.wait(0.1):
                for headers in ({}, KEY) if self.keyed else ({},):
                    self.ask(headers)

        thread = threading.Thread(target=ask_on)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def args(model: Path, name: str, **engine: Any) -> dict[str, Any]:
    section = {"name": name, "model": str(model), "decode": {"num_cpus": 0.2}, "engine": {"num_threads": 1, **engine}}
    return {"models": [section], "ingress": {"api_keys": KEYED}} if name == "b" else {"models": [section]}


def answers(server: ServeRun, headers: dict[str, str]) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{server.url}/v1/models", headers=headers, timeout=60, verify=False).status_code == 200
    return False


def kill(server: ServeRun, part: str) -> None:
    """SIGKILL for the processes whose command line contains a part."""
    found = []
    for process in server.processes():
        with suppress(psutil.NoSuchProcess):
            if part in " ".join(process.cmdline()):
                found.append(process)
    assert found, part
    kill_all(found)


def folders_of_haproxy() -> set[Path]:
    return set(Path("/tmp").glob("haproxy-*"))


def test_two_servers_of_one_machine_never_answer_each_others_requests(tmp_path, model_folder):
    before = folders_of_haproxy() - {Path("/tmp/haproxy-serve")}
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
    a = ServeRun(folders[0], args(model_folder, "a"), manta=True)
    servers = [a]
    try:
        wait_until(lambda: answers(a, {}), timeout_s=WHOLE_S)
        b = ServeRun(folders[1], args(model_folder, "b"), manta=True)
        servers.append(b)
        of_a, of_b = Watch(a.url, "a", False), Watch(b.url, "b", True)
        with of_a.during(), of_b.during():
            wait_until(lambda: answers(b, KEY), timeout_s=WHOLE_S)
            assert not of_b.wrong, "while it starts"
            kill(b, "ray::ServeReplica:manta:ingress")
            wait_until(lambda: not answers(b, KEY))
            wait_until(lambda: answers(b, KEY), timeout_s=WHOLE_S)
            assert not of_b.wrong, "while it has no ingress"
            kill(b, "haproxy.cfg")
            wait_until(lambda: answers(b, KEY), timeout_s=WHOLE_S)
            assert not of_b.wrong, "while it has no HAProxy"
            b.wait_for_line("dashboard is up", timeout_s=WHOLE_S)
            wait_until(lambda: b.status() == "RUNNING", timeout_s=WHOLE_S)
            changed = time.monotonic()
            b.put(args(model_folder, "b", max_num_seqs=7))
            wait_until(lambda: b.status() == "DEPLOYING", timeout_s=WHOLE_S)
            wait_until(lambda: b.status() == "RUNNING", timeout_s=WHOLE_S)
            assert not of_b.wrong, "while it is built again"
            rebuilt = [answer for at, answer in of_b.unavailable if at > changed]
            assert all(answer.startswith("503 ") for answer in rebuilt), rebuilt
            kill_all(b.processes())
            c = ServeRun(folders[2], args(model_folder, "c"), manta=True)  # may get the ports that b had
            servers.append(c)
            of_c = Watch(c.url, "c", False)
            with of_c.during():
                wait_until(lambda: answers(c, {}), timeout_s=WHOLE_S)
        for watch in (of_a, of_b, of_c):
            print(watch.model, dict(watch.answers))
            assert not watch.wrong
        assert set(of_a.answers) == {"200"}, "what happens to the other one is nothing to it"
        c.interrupt()
        assert c.wait(WHOLE_S) == 0
    finally:
        for server in servers:
            (tmp_path / f"{server.port}.log").write_text("".join(server.log))
            server.stop()
    wait_until(lambda: folders_of_haproxy() - {Path("/tmp/haproxy-serve")} <= before)
