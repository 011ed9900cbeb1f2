"""Three replicas that change between answering requests and computing prompts, as the load turns; of one engine each,
and of two that share experts. `pytest -s` prints when."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx
import psutil
import pytest

from tests.models import make_model
from tests.scrape import Scrape
from tests.serve.serve_run import ServeRun, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(600)]

POOL = {"num_cpus": 0.2, "drain_s": 120.0}
CHANGED_S = 60.0


class Roles:
    def __init__(self, server: ServeRun, engines: int):
        """engines: of each replica."""
        self.server, self.engines = server, engines

    def now(self) -> dict[str, str]:
        """The role of each engine that is up."""
        scrape = Scrape(httpx.get(f"{self.server.url}/metrics", timeout=60).text)
        return {s.labels["engine"]: s.labels["role"] for s in scrape.select("manta_engine_role", []) if s.value == 1}

    def wait_for(self, prefill: int, decode: int) -> float:
        """Seconds until all engines of so many replicas have each role."""
        began = time.monotonic()

        def reached() -> bool:
            now = self.now()
            of_replicas = sorted(role for _, role in {(name.split(".")[0], role) for name, role in now.items()})
            every = len(now) == self.engines * (prefill + decode)
            return every and of_replicas == ["decode"] * decode + ["prefill"] * prefill

        wait_until(reached, CHANGED_S)
        return time.monotonic() - began

    def ask(self, number: int, length: int, max_tokens: int) -> str:
        prompt = [3 + (number * 7 + i * i) % 90 for i in range(length)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        answer = httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def load(self, clients: int, length: int, max_tokens: int, until: Event) -> list[tuple[int, str]]:
        """Prompt numbers with their texts, asked by so many clients until the event is set."""

        def client(first: int) -> list[tuple[int, str]]:
            found, number = [], first
            while not until.is_set():
                found.append((number, self.ask(number, length, max_tokens)))
                number += clients
            return found

        with ThreadPoolExecutor(clients) as pool:
            return [answer for answers in pool.map(client, range(clients)) for answer in answers]


@pytest.fixture
def roles(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Roles]:
    """Replicas with as many engines each as the parameter says, by default one."""
    engines = getattr(request, "param", 1)
    folder = make_model(
        tmp_path, "llama" if engines == 1 else "qwen3_moe", tokenizer=True, max_position_embeddings=4096
    )
    options = {
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "num_gpu_blocks_override": 2048,
        "max_num_seqs": 8 // engines,
    }
    engine = options | ({"data_parallel_size": engines, "enable_expert_parallel": True} if engines > 1 else {})
    handoff = {"switch_roles": True, "move_requests": True, "policy": "always", "transport": "tcp"}
    model = {"name": "tiny", "model": str(folder), "engine": engine, "slo": {"ttft_ms": 100, "itl_ms": 1000},
             "prefill": {**POOL, "num_replicas": 1}, "decode": {**POOL, "num_replicas": 2},
             "handoff": handoff}  # fmt: skip
    with ServeRun(tmp_path, {"models": [model]}) as server:
        server.wait_until_healthy(3)
        yield Roles(server, engines)


@pytest.mark.parametrize("roles", [1, 2], indirect=True, ids=["one engine", "two engines"])
def test_replicas_change_roles_under_load_and_no_text_changes(roles):
    print(f"\nas configured: {roles.wait_for(prefill=1, decode=2):.1f} s")
    before = roles.now()
    for what, clients, length, tokens, split in (
        ("prompts", 12, 3000, 2, {"prefill": 2, "decode": 1}),
        ("answers", 16, 20, 400, {"prefill": 1, "decode": 2}),
        ("prompts", 12, 3000, 2, {"prefill": 2, "decode": 1}),
    ):
        over = Event()
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(roles.load, clients, length, tokens, over)
            try:
                print(f"{what}: {split} after {roles.wait_for(**split):.1f} s")
            finally:
                over.set()
            texts = dict(answers.result())
        for number in list(texts)[:3]:
            assert roles.ask(number, length, tokens) == texts[number]
    assert roles.now().keys() == before.keys(), "no replica was started or stopped"
    scrape = Scrape(httpx.get(f"{roles.server.url}/metrics", timeout=60).text)
    assert scrape.sum("manta_role_changes_total") >= 3
    lines = [line for line in roles.server.log if re.search("autoscaling (prefill|decode)-tiny from", line)]
    print("".join(line[:160] + "\n" for line in lines))


def test_a_replica_that_dies_while_roles_change_costs_no_answer(roles):
    roles.wait_for(prefill=1, decode=2)
    over = Event()
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(roles.load, 12, 3000, 20, over)
        try:
            roles.wait_for(prefill=2, decode=1)
            victim = next(p for p in roles.server.processes() if "ServeReplica:manta:pd-tiny" in " ".join(p.cmdline()))
            victim.kill()
            wait_until(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE, CHANGED_S)
            wait_until(lambda: len(roles.now()) == 3 and set(roles.now().values()) == {"prefill", "decode"}, 120)
        finally:
            over.set()
        texts = dict(answers.result())
    for number in list(texts)[:8]:
        assert roles.ask(number, 3000, 20) == texts[number]
