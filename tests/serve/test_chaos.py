"""Whatever dies under 16 running streams: no request fails, and every text is that of a run in which nothing dies.

A cluster of five fake nodes, with two decode and two prefill replicas; `pytest -s` prints how long streams paused.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from tests.models import make_model
from tests.serve.chaos_cluster import MODEL, ChaosCluster, Replica, Role, kill
from tests.serve.chaos_streams import run_streams
from tests.serve.serve_run import wait_until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only"),
]

NODES: dict[Role, dict[str, Any]] = {  # each has room for one replica
    "decode": {"num_cpus": 1, "labels": {"pool": "decode"}},
    "prefill": {"num_cpus": 1, "labels": {"pool": "prefill"}},
}
HEAD = {"num_cpus": 1, "labels": {"pool": "head"}}
# a stream ends with its ingress, and with the HAProxy in front: both are where no test kills the node
INGRESS = {"name": "ingress", "ray_actor_options": {"num_cpus": 0.1, "label_selector": {"pool": "head"}}}
REPLICAS: dict[Role, int] = {"decode": 2, "prefill": 2}
WORDS = ["ocean", "lamp", "winter", "dog", "music", "river", "stone", "letter"]
PROMPT = " ".join(WORDS) * 3
TOKENS = 900
ASKED: list[dict[str, Any]] = [
    *({"prompt": f"The {word} and {PROMPT}", "temperature": 0} for word in WORDS),
    *({"prompt": f"A {word} and {PROMPT}", "temperature": 1.0, "seed": i} for i, word in enumerate(WORDS)),
]
STREAMS = [{**body, "max_tokens": TOKENS, "ignore_eos": True} for body in ASKED]


def pool(role: Role, **engine: Any) -> dict[str, Any]:
    return {"num_replicas": REPLICAS[role], "num_cpus": 0.6, "label_selector": {"pool": role}, "engine": engine}


def args(folder: Path, **engine: Any) -> dict[str, Any]:
    """engine: options of all engines."""
    model = {
        "name": MODEL,
        "model": str(folder),
        "engine": {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 2048, **engine},
        "prefill": pool("prefill", max_num_batched_tokens=128),
        "decode": pool("decode"),
        "handoff": {"transport": "tcp", "policy": "always"},
    }
    return {"models": [model]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    sizes = {"num_hidden_layers": 24, "max_position_embeddings": 2048}  # slow enough to be struck in the middle
    return make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True, **sizes)


@pytest.fixture(scope="module")
def serving(folder) -> Iterator[ChaosCluster]:
    serving = ChaosCluster([HEAD, *[NODES["decode"]] * 2, *[NODES["prefill"]] * 2])
    try:
        serving.put(args(folder), [INGRESS])
        serving.wait_until_running(REPLICAS)
        yield serving
    finally:
        (folder.parent / "ray.log").write_text("\n".join(serving.cluster.log_lines()))
        serving.stop()


@pytest.fixture(scope="module")
def expected(serving) -> list[str]:
    unharmed = run_streams(serving.url, STREAMS)
    assert not unharmed.problems
    assert len(set(unharmed.texts)) == len(STREAMS)
    return unharmed.texts


def strike(serving: ChaosCluster, expected: list[str], what: str, blow: Callable[[], Replica | None]) -> int:
    """`blow` happens once all streams run, and returns the replica that it ended. Returns how many streams had to go
    on in another engine."""
    whole_at = 0.0

    def blow_and_wait() -> None:
        nonlocal whole_at
        victim = blow()
        wait_until(lambda: victim is None or not victim.lives)
        wait_until(lambda: victim is None or not serving.lists(victim), 60)
        serving.wait_until_running(REPLICAS)
        whole_at = time.monotonic()

    before = serving.replays()
    struck = run_streams(serving.url, STREAMS, blow_and_wait)
    assert not struck.problems
    for stream, text in zip(struck.streams, expected, strict=True):
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(stream.text, text, strict=False)))
        assert stream.text == text, f"{stream.name} differs after {same} of {len(text)} characters"
    assert struck.running == len(STREAMS)
    serving.wait_until_idle()
    assert serving.scrape().sum("vllm:request_success_total", finished_reason="error") == 0
    replayed = serving.replays() - before
    pauses = struck.pauses_s
    print(
        f"\n| {what} | {replayed} | {pauses[len(pauses) // 2]:.1f} | {pauses[-1]:.1f} "
        f"| {struck.asked} | {struck.slowest_s:.1f} | {whole_at - struck.at:.1f} |"
    )
    return replayed


@pytest.mark.parametrize("process", ["rank", "control actor"])
def test_streams_outlive_a_decode_replica(serving, expected, process):
    def blow() -> Replica:
        replica = serving.busiest(len(STREAMS))
        kill(replica.pid if process == "control actor" else replica.ranks[0])
        return replica

    assert strike(serving, expected, f"SIGKILL of a decode replica's {process}", blow) > 0


def test_requests_outlive_the_prefill_replica_that_has_their_prompts(serving, expected):
    """Beside the streams that run, 16 requests with long prompts come; in the midst it stands still, and dies."""
    asked = [{**body, "prompt": body["prompt"] * 8, "max_tokens": 20} for body in STREAMS]
    unharmed = run_streams(serving.url, asked)
    assert not unharmed.problems
    replica = serving.replicas("prefill")[0]

    def waited_for() -> bool:
        """peer is empty where the replica has not accepted yet."""
        peers = [live["handoff"]["peer"] for live in serving.handoffs() if live["handoff"]["role"] == "decode"]
        return any(not peer or replica.name in peer for peer in peers)

    def blow() -> Replica:
        with ThreadPoolExecutor() as pool:
            found = pool.submit(run_streams, serving.url, asked)
            wait_until(waited_for)
            os.kill(replica.ranks[0], signal.SIGSTOP)
            wait_until(waited_for)
            kill(*replica.ranks)
            struck = found.result()
        assert not struck.problems
        assert struck.texts == unharmed.texts
        return replica

    assert strike(serving, expected, "SIGKILL of a prefill replica", blow) == 0


def test_streams_outlive_the_controller_of_serve(serving, expected):
    def blow() -> None:
        controller = serving.controller()
        kill(controller)
        wait_until(lambda: serving.controller() not in (None, controller), 60)

    assert strike(serving, expected, "SIGKILL of Serve's controller", blow) == 0


def test_streams_outlive_five_seconds_without_control_store(serving, expected):
    def blow() -> None:
        serving.cluster.kill_control_store()
        time.sleep(5.0)  # this is the fault
        serving.cluster.start_control_store()

    assert strike(serving, expected, "GCS down for 5 s", blow) == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_streams_outlive_a_node_and_a_new_one_takes_its_place(serving, expected, role):
    def blow() -> Replica:
        replica = serving.busiest(len(STREAMS)) if role == "decode" else serving.replicas("prefill")[0]
        serving.cluster.remove_node(replica.node)
        serving.cluster.add_node(NODES[role])
        return replica

    replayed = strike(serving, expected, f"loss of a {role} node", blow)
    assert (replayed > 0) == (role == "decode")


def test_streams_outlive_a_decode_node_that_falls_silent(serving, expected):
    """A cut network looks like this: nothing says that it is gone, and it comes back when others have its work."""

    def blow() -> Replica:
        replica = serving.busiest(len(STREAMS))
        processes = serving.cluster.node_processes(replica.node)
        for process in processes:
            process.suspend()
        serving.cluster.add_node(NODES["decode"])
        wait_until(lambda: not serving.lists(replica), 60)
        for process in processes:
            process.resume()
        return replica

    assert strike(serving, expected, "a decode node falls silent", blow) > 0


def test_streams_outlive_a_change_of_both_pools(serving, expected, folder):
    def blow() -> None:
        serving.put(args(folder, max_num_seqs=64), [INGRESS])

    assert strike(serving, expected, "other engine options for both pools", blow) == 0


def test_streams_end_with_their_ingress_and_free_their_blocks(serving, folder):
    (pid,) = serving.pids("ingress")
    ends: list[float] = []

    def blow() -> None:
        kill(pid)
        wait_until(lambda: serving.pids("ingress") not in ([], [pid]), 60)
        serving.wait_until_running(REPLICAS)
        ends.append(time.monotonic())

    found = run_streams(serving.url, [{**body, "max_tokens": 1700} for body in STREAMS], blow)
    assert all(stream.problem for stream in found.streams)
    serving.wait_until_idle()
    assert not run_streams(serving.url, STREAMS).problems
    print(
        f"\nSIGKILL of the ingress: {found.streams[0].problem}; {found.asked} short questions, {found.short_problems};"
    )
    print(f"served again after {ends[0] - found.at:.1f} s")
