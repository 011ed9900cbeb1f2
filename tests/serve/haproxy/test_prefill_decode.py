"""Prefill and decode in separate pools: model `apart` has the texts of `tiny`, which computes its prompts itself."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.serve.haproxy.clients import ALICE, KEYS
from tests.serve.serve_run import ServeRun, wait_until

pytestmark = pytest.mark.serve

WORDS = ["The quick brown fox", "jumps over", "the lazy dog,", "and a cache keeps", "what was computed.", "1 2 3"]
PROMPTS = [" ".join(WORDS[(i + k) % len(WORDS)] for k in range(n)) for i, n in enumerate((1, 5, 12, 20, 30, 45))]
STARTED = re.compile(r"(prefill-apart-\w+)/rank(\d+) placement\.rank_actor rank starts pid=(\d+)")


class Serving:
    def __init__(self, server: ServeRun, client: openai.OpenAI):
        self.server, self.client = server, client
        self.salts = 0

    def ask(self, model: str, prompt: str, **options: Any) -> str:
        """An answer whose prompt no cache has. options: of the completion."""
        self.salts += 1
        extra = {"cache_salt": str(self.salts), "ignore_eos": True}
        ask = {"max_tokens": 20, "temperature": 0, **options}
        answer = self.client.completions.create(model=model, prompt=prompt, extra_body=extra, **ask)
        return answer.choices[0].text

    def ask_at_once(self, pool: ThreadPoolExecutor, prompts: list[str]) -> list[Future[str]]:
        return [pool.submit(self.ask, "apart", prompt) for prompt in prompts]

    def metric(self, name: str, *labels: str) -> float:
        """Sum of the series of model `apart` with these labels."""
        text = httpx.get(f"{self.server.url}/metrics", headers=ALICE, timeout=60).text
        lines = [line for line in text.splitlines() if line.startswith(f"{name}{{") and 'model_name="apart"' in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))

    def received(self) -> float:
        return self.metric("manta_handoffs_total", 'result="received"')

    def live(self) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.server.url}/debug/handoffs", headers=ALICE, timeout=60)
        handoffs: list[dict[str, Any]] = answer.json()["handoffs"]
        return handoffs

    def prefill_pids(self) -> list[int]:
        """Processes of the newest prefill replica's ranks, in rank order."""
        started = [found for line in list(self.server.log) if (found := STARTED.search(line))]
        newest = started[-1][1]
        return [int(found[3]) for found in sorted(started, key=lambda f: int(f[2])) if found[1] == newest]

    def wait_until_idle(self) -> None:
        """No block is held for anybody."""
        wait_until(lambda: not self.live())
        for state in ("running", "reserved", "leased"):
            wait_until(lambda state=state: self.metric("manta_kv_blocks", f'state="{state}"') == 0)


@pytest.fixture(scope="module")
def serving(server) -> Iterator[Serving]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS["alice"], timeout=60, max_retries=0) as client:
        yield Serving(server, client)


@pytest.fixture(scope="module")
def expected(serving) -> dict[str, str]:
    return {prompt: serving.ask("tiny", prompt) for prompt in PROMPTS}


def test_texts_of_two_pools_are_those_of_one_engine(serving, expected):
    before, routed = serving.received(), serving.metric("manta_routed_requests_total", 'pool="prefill"')
    with ThreadPoolExecutor() as pool:
        answers = [future.result() for future in serving.ask_at_once(pool, PROMPTS)]
    assert answers == [expected[prompt] for prompt in PROMPTS]
    assert len(set(answers)) == len(answers)
    wait_until(lambda: serving.received() == before + len(PROMPTS))
    assert serving.metric("pd_decision_total", 'where="remote"') >= len(PROMPTS)
    assert serving.metric("manta_routed_requests_total", 'pool="prefill"') == routed + len(PROMPTS)
    assert serving.metric("manta_handoff_bytes_total", 'transport="tcp"') > 0
    assert serving.metric("manta_handoffs_total", 'result="failed"') == 0
    serving.wait_until_idle()


def test_both_engines_tell_what_became_of_a_request(serving):
    extra = {"cache_salt": "explained", "ignore_eos": True}
    answer = serving.client.completions.create(model="apart", prompt=PROMPTS[2], max_tokens=5, extra_body=extra)
    found = httpx.get(f"{serving.server.url}/debug/requests/{answer.id}", headers=ALICE, timeout=60)
    (timeline,) = found.json()["sequences"]
    told: dict[str, list[str]] = {}
    for event in timeline["events"]:
        told.setdefault(event["where"].rpartition("-")[0], []).append(event["what"])
    assert any("to be computed by a prefill engine: policy" in line for line in told["decode-apart"])
    assert any("accepted by prefill-apart-" in line for line in told["decode-apart"])
    assert any("first token computed" in line for line in told["prefill-apart"])
    assert told["decode-apart"][-1] == "ended: length, 5 output tokens"


def test_sampled_text_is_the_same_wherever_its_first_token_is_drawn(serving):
    for seed in range(3):
        options = {"temperature": 1.0, "seed": seed, "presence_penalty": 0.5}
        assert serving.ask("apart", PROMPTS[2], **options) == serving.ask("tiny", PROMPTS[2], **options)


def test_stopped_prefill_process_delays_the_first_token_only_and_shows_as_a_live_handoff(serving, expected):
    pids = serving.prefill_pids()
    assert len(pids) == 2
    with ThreadPoolExecutor() as pool:
        os.kill(pids[0], signal.SIGSTOP)
        try:
            (answer,) = serving.ask_at_once(pool, PROMPTS[-1:])
            wait_until(lambda: any(live["handoff"]["role"] == "decode" for live in serving.live()))
        finally:
            os.kill(pids[0], signal.SIGCONT)
        assert answer.result() == expected[PROMPTS[-1]]
    serving.wait_until_idle()


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_sigkill_of_a_prefill_rank_under_load_fails_no_request_and_changes_no_text(serving, expected, rank):
    with ThreadPoolExecutor(16) as pool:
        prompts = PROMPTS * 6
        answers = serving.ask_at_once(pool, prompts)
        answers[0].result()
        killed = serving.prefill_pids()
        os.kill(killed[rank], signal.SIGKILL)
        assert [answer.result() for answer in answers] == [expected[prompt] for prompt in prompts]
    serving.server.wait_for_line("prefill engines: none")
    serving.server.wait_for_line("prefill engines: prefill-apart-")
    assert serving.prefill_pids() != killed
    before = serving.received()
    assert serving.ask("apart", PROMPTS[3]) == expected[PROMPTS[3]]
    wait_until(lambda: serving.received() == before + 1)
    serving.wait_until_idle()


def test_ctrl_c_ends_manta_serve_and_all_its_processes(serving):
    processes = serving.server.processes()
    serving.server.interrupt()
    assert serving.server.wait(timeout_s=30) == 0
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


@pytest.mark.slow
def test_pools_that_do_not_fit_each_other_end_serve_run_with_one_clear_line(tmp_path: Path, model_folder):
    pools = {"prefill": {"num_cpus": 0.2, "engine": {"dtype": "bfloat16"}}, "decode": {"num_cpus": 0.2}}
    with ServeRun(
        tmp_path, {"models": [{"name": "tiny", "model": str(model_folder), "engine": {"device": "cpu"}, **pools}]}
    ) as server:
        line = server.wait_for_line("manta cannot start. ")
        assert server.wait(timeout_s=30) != 0
        messages = ["prefill-tiny-", "cannot compute prompts for decode-tiny-", "dtype=bfloat16, where dtype=float32"]
        assert all(message in line for message in messages), line
        assert "Traceback" not in "".join(server.log)
