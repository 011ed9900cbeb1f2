"""Replicas of several ranks on a cluster of several nodes: how they are placed, what they answer, how they die.

One cluster and one `serve run` for all tests but the last two, so their order matters: first the loss of a node, then
Ctrl-C come last. `pytest -s` shows what each recovery took.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import psutil
import pytest

from engine import LLM, SamplingParams
from tests.models import make_model
from tests.serve.fake_cluster import FakeCluster
from tests.serve.serve_run import ServeRun, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow]

POOL = {"pool": "decode"}
# Ray starts an idle process per CPU, so there are few
HEAD, NODE = {"num_cpus": 1}, {"num_cpus": 2, "num_gpus": 2, "labels": POOL}
DECODE = {
    "spread": {"placement_strategy": "STRICT_SPREAD"},
    "gpus": {"num_gpus": 1},
    "packed": {"num_replicas": 2},
}
RANKS = {"spread": 2, "gpus": 4, "packed": 2}
PROMPTS = ["The", "A cache keeps what was computed, so that", "user", "1 2 3"]
TOKENS = 40
CONTEXT = 4096  # long enough for a request to be still running when something is killed
NOTICED_S = 30.0
SERVED_S = 30.0

STARTED = re.compile(
    r"(decode-(\w+)-\w+)/rank(\d+) placement\.rank_actor rank starts pid=(\d+) node=(\w+) .*gpus=(\S+)"
)
READY = re.compile(r"pid=(\d+).* (decode-(\w+)-\w+) .*replica ready")


@dataclass(frozen=True)
class Rank:
    pid: int
    node: str
    devices: str  # Ray's ids of the GPUs that it was given


@dataclass(frozen=True)
class Replica:
    """pid: of its control actor. ranks: in rank order."""

    pid: int
    ranks: list[Rank]

    @property
    def pids(self) -> list[int]:
        return [self.pid, *(rank.pid for rank in self.ranks)]


@dataclass(frozen=True)
class Answer:
    """error: code of the error that ended it. ended_at: on the monotonic clock."""

    text: str
    error: str | None
    ended_at: float


class Serving:
    """A cluster with a `serve run` on it. models: how many replicas each has. ranks: of a replica of each."""

    def __init__(self, cluster: FakeCluster, server: ServeRun, models: dict[str, int], ranks: dict[str, int] = RANKS):
        self.cluster, self.server, self.models, self.ranks = cluster, server, models, ranks
        self.times: list[str] = []

    def replicas(self, model: str) -> list[Replica]:
        """Those that are ready and whose processes all live, as their log lines tell."""
        controls, ranks = {}, {}
        for line in list(self.server.log):
            if (ready := READY.search(line)) and ready[3] == model:
                controls[ready[2]] = int(ready[1])
            if (started := STARTED.search(line)) and started[2] == model:
                ranks[started[1], int(started[3])] = Rank(int(started[4]), started[5], started[6])
        found = [
            Replica(pid, [rank for key, rank in sorted(ranks.items()) if key[0] == engine_id])
            for engine_id, pid in controls.items()
        ]
        return [r for r in found if len(r.ranks) == self.ranks[model] and all(map(lives, r.pids))]

    def wait_for_all(self, timeout_s: float = 120) -> None:
        wait_until(lambda: all(len(self.replicas(name)) == n for name, n in self.models.items()), timeout_s)

    def ask(self, model: str, prompt: str = "The", max_tokens: int = TOKENS, timeout_s: float = 30) -> httpx.Response:
        return httpx.post(f"{self.server.url}/v1/completions", json=body(model, prompt, max_tokens), timeout=timeout_s)

    def whole(self, model: str) -> Answer:
        """A long request without streaming."""
        response = self.ask(model, max_tokens=CONTEXT - 10, timeout_s=60)
        if response.status_code == 200:
            return Answer(text(response), None, time.monotonic())
        assert response.status_code == 503
        return Answer("", response.json()["error"]["code"], time.monotonic())

    def stream(self, model: str, started: Event, max_tokens: int) -> Answer:
        ask = {**body(model, "The", max_tokens), "stream": True}
        parts: list[str] = []
        error, last = None, ""
        with httpx.stream("POST", f"{self.server.url}/v1/completions", json=ask, timeout=60) as response:
            if response.status_code != 200:  # it failed before its first token
                response.read()
                return Answer("", response.json()["error"]["code"], time.monotonic())
            for line in response.iter_lines():
                last = line or last
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    error = event["error"]["code"]
                else:
                    parts.append(event["choices"][0]["text"])
                started.set()
        assert last == "data: [DONE]"
        return Answer("".join(parts), error, time.monotonic())


def body(model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    answer: str = response.json()["choices"][0]["text"]
    return answer


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def moment_of_end(replica: Replica) -> float:
    wait_until(lambda: not any(map(lives, replica.pids)), timeout_s=60)
    return time.monotonic()


def named_memory(replica: Replica) -> set[Path]:
    """Shared memory that could outlive these processes."""
    maps = [line for pid in replica.pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {Path(line.split()[-1]) for line in maps if line.split()[-1].startswith("/dev/shm/")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def serving(tmp_path_factory, folder) -> Iterator[Serving]:
    """With a node to spare."""
    models = [
        {
            "name": name,
            "model": str(folder),
            "engine": {"tensor_parallel_size": RANKS[name], "device": "cpu", "num_gpu_blocks_override": 2048},
            "decode": {"num_cpus": 0.25, "label_selector": POOL, **pool},
        }
        for name, pool in DECODE.items()
    ]
    # where no test kills the node
    ingress = {"name": "ingress", "ray_actor_options": {"num_cpus": 0.1, "label_selector": {"pool": "!decode"}}}
    cluster = FakeCluster([HEAD, *[NODE] * 3])
    args = {"models": models, "ingress": {"max_replays": 0}}  # so that the end of a replica shows
    server = ServeRun(tmp_path_factory.mktemp("serve"), args, address=cluster.address, deployments=[ingress])
    serving = Serving(cluster, server, {name: int(pool.get("num_replicas", 1)) for name, pool in DECODE.items()})
    try:
        serving.wait_for_all()
        for model in DECODE:
            wait_until(lambda model=model: serving.ask(model).status_code == 200)
        yield serving
    finally:
        print("".join(serving.times))
        (folder.parent / "serve.log").write_text("".join(server.log))
        server.stop()
        cluster.stop()


def test_ranks_across_nodes_answer_as_one_rank_does(serving, folder):
    for model in serving.models.keys() - {"packed"}:
        (replica,) = serving.replicas(model)
        assert len({rank.node for rank in replica.ranks}) == 2
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(folder), device="cpu", num_gpu_blocks_override=64, num_threads=1) as one:
        alone = [answer.outputs[0].text for answer in one.generate(PROMPTS, greedy, use_tqdm=False)]
    assert len(set(alone)) == len(PROMPTS)
    for model in serving.models:
        assert [text(serving.ask(model, prompt)) for prompt in PROMPTS] == alone, model


def test_rank_sees_the_one_gpu_of_its_bundle_and_neighbours_in_rank_are_neighbours_in_space(serving):
    ((a, b, c, d),) = [replica.ranks for replica in serving.replicas("gpus")]
    assert (a.node, c.node) == (b.node, d.node)
    assert a.node != c.node
    assert [rank.devices for rank in (a, b, c, d)] == ["0", "1", "0", "1"]


def strike(serving: Serving, model: str, what: str, blow: Callable[[Replica], None], limit_s: float = SERVED_S) -> None:
    """Whatever `blow` does to a replica with requests: they end with a typed error, new ones are served `limit_s`
    later, and nothing of the replica is left."""
    expected = text(serving.ask(model))
    (replica,) = serving.replicas(model)
    shared_memory = named_memory(replica)
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(serving.whole, model), *streams(serving, pool, model, 3)]
        struck_at = time.monotonic()
        blow(replica)
        gone_at = pool.submit(moment_of_end, replica)
        answers = [request.result(timeout=60) for request in running]
        wait_until(lambda: serving.ask(model).status_code == 200, timeout_s=60)
        served_s = time.monotonic() - struck_at
        gone_s = gone_at.result(timeout=60) - struck_at
    noticed_s = max(answer.ended_at for answer in answers) - struck_at
    serving.times.append(
        f"\n{what}: requests ended after {noticed_s:.1f} s, served again after {served_s:.1f} s, "
        f"processes gone after {gone_s:.1f} s"
    )
    assert [answer.error for answer in answers] == ["engine_unavailable"] * len(answers)
    assert not [path for path in shared_memory if path.exists()]
    assert text(serving.ask(model)) == expected
    serving.wait_for_all()
    assert replica not in serving.replicas(model)
    wait_until(lambda: serving.cluster.placement_groups() == sum(serving.models.values()))
    assert noticed_s < NOTICED_S
    assert served_s < noticed_s + limit_s


def streams(
    serving: Serving, pool: ThreadPoolExecutor, model: str, count: int, max_tokens: int = CONTEXT - 10
) -> list[Future[Answer]]:
    """Requests that have got their first token."""
    started = [Event() for _ in range(count)]
    running = [pool.submit(serving.stream, model, event, max_tokens) for event in started]
    assert all(event.wait(60) for event in started)
    return running


@pytest.mark.parametrize("victim", ["rank 1", "rank 0", "replica actor"])
def test_killed_process_ends_its_replica_and_a_new_one_serves(serving, victim):
    def kill(replica: Replica) -> None:
        pids = {"rank 1": replica.ranks[1].pid, "rank 0": replica.ranks[0].pid, "replica actor": replica.pid}
        os.kill(pids[victim], signal.SIGKILL)

    strike(serving, "spread", f"SIGKILL of {victim}", kill)


@pytest.mark.parametrize("rank", [1, 0])
def test_stopped_rank_is_noticed_and_replaced(serving, rank):
    strike(
        serving, "spread", f"SIGSTOP of rank {rank}", lambda replica: os.kill(replica.ranks[rank].pid, signal.SIGSTOP)
    )


def test_two_replicas_do_not_disturb_each_other(serving):
    """Also when one of them dies."""
    victim, witness = serving.replicas("packed")
    assert len({rank.node for rank in victim.ranks}) == len({rank.node for rank in witness.ranks}) == 1
    expected = text(serving.ask("packed"))
    with ThreadPoolExecutor(20) as pool:
        running = streams(serving, pool, "packed", 12, max_tokens=1500)
        os.kill(victim.ranks[1].pid, signal.SIGKILL)
        struck_at = time.monotonic()
        wait_until(lambda: serving.ask("packed").status_code == 200)
        served_s = time.monotonic() - struck_at
        answers = [request.result(timeout=60) for request in running]
    assert {answer.error for answer in answers} == {None, "engine_unavailable"}  # Serve gives requests to both
    assert len({answer.text for answer in answers if answer.error is None}) == 1, "equal requests, different answers"
    assert text(serving.ask("packed")) == expected
    serving.wait_for_all()
    back_s = time.monotonic() - struck_at
    assert witness in serving.replicas("packed")
    serving.times.append(
        f"\nSIGKILL of rank 1 of one of two replicas: served again after {served_s:.1f} s, by both {back_s:.1f} s"
    )


def test_lost_node_ends_its_replicas_and_new_ones_serve_elsewhere(serving):
    """Up to nine ranks of other replicas start at the same time, on the same machine."""

    def remove(replica: Replica) -> None:
        serving.cluster.remove_node(replica.ranks[1].node)

    strike(serving, "spread", "loss of rank 1's node", remove, limit_s=2 * SERVED_S)


def test_ctrl_c_leaves_no_rank_and_no_placement_group(serving):
    pids = [pid for model in serving.models for replica in serving.replicas(model) for pid in replica.pids]
    assert len(pids) == sum(replicas * (1 + RANKS[model]) for model, replicas in serving.models.items())
    serving.server.interrupt()
    assert serving.server.wait(timeout_s=60) == 0
    wait_until(lambda: not any(map(lives, pids)))
    wait_until(lambda: serving.cluster.placement_groups() == 0)


def mistake(tmp_path: Path, model: dict[str, Any], message: str) -> None:
    """The only replica cannot start, and `serve run` says why in one line and ends."""
    with ServeRun(tmp_path, {"models": [{"name": "tiny", **model}]}) as server:
        server.wait_for_line("manta cannot start. ", timeout_s=120)
        assert server.wait(timeout_s=30) != 0
        assert message in "".join(server.log)
        assert "Traceback" not in "".join(server.log)


def test_spec_that_no_node_can_satisfy_is_refused_and_not_waited_for(tmp_path, folder):
    decode = {"num_cpus": 0.5, "num_gpus": 1, "accelerator_type": "H100"}
    message = "model 'tiny', decode: a replica needs 2 ranks, each with 0.5 CPU + 1 GPU + type H100"
    mistake(tmp_path, {"model": str(folder), "engine": {"tensor_parallel_size": 2}, "decode": decode}, message)


def test_reason_of_a_rank_that_cannot_start_is_on_the_console(tmp_path):
    model = make_model(tmp_path, "llama", tokenizer=True, intermediate_size=81)
    message = "tensor_parallel_size must be a divisor of the model's"
    mistake(
        tmp_path, {"model": str(model), "engine": {"tensor_parallel_size": 2}, "decode": {"num_cpus": 0.5}}, message
    )
