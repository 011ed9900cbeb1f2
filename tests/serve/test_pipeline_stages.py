"""A replica of three pipeline stages, each on a node of its own: its answers, and what streams show if a stage dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from engine import LLM, SamplingParams
from tests.models import make_model
from tests.serve.fake_cluster import FakeCluster
from tests.serve.serve_run import ServeRun, wait_until
from tests.serve.test_rank_groups import CONTEXT, HEAD, NODE, POOL, PROMPTS, TOKENS, Serving, text

pytestmark = [pytest.mark.serve, pytest.mark.slow]

MODEL, STAGES, STREAMS, LONG = "spread", 3, 16, 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def serving(tmp_path_factory, folder) -> Iterator[Serving]:
    with served(tmp_path_factory.mktemp("serve"), folder, STAGES, pipeline_parallel_size=STAGES) as serving:
        yield serving


@contextmanager
def served(
    tmp_path: Path, folder: Path, num_ranks: int, nodes: int = 0, pools: dict[str, Any] | None = None, **engine: Any
) -> Iterator[Serving]:
    """Serve a model by one replica, each of whose ranks has a node of its own. nodes: number of nodes if it differs.
    pools: other fields of the model."""
    model = {
        "name": MODEL,
        "model": str(folder),
        "engine": {"device": "cpu", "num_gpu_blocks_override": 2048, **engine},
        "decode": {
            "num_cpus": 0.25,
            "label_selector": POOL,
            "placement_strategy": "PACK" if nodes else "STRICT_SPREAD",
        },
        **(pools or {}),
    }
    ingress = {"name": "ingress", "ray_actor_options": {"num_cpus": 0.1, "label_selector": {"pool": "!decode"}}}
    racks = [{**NODE, "labels": {**POOL, "rack": f"r{i % 2}"}} for i in range(nodes or num_ranks)]
    cluster = FakeCluster([HEAD, *racks])
    server = ServeRun(tmp_path, {"models": [model]}, address=cluster.address, deployments=[ingress])
    serving = Serving(cluster, server, {MODEL: 1}, {MODEL: num_ranks})
    try:
        serving.wait_for_all(timeout_s=60 + 30 * num_ranks)
        wait_until(lambda: serving.ask(MODEL).status_code == 200)
        yield serving
    finally:
        (folder.parent / "serve.log").write_text("".join(server.log))
        server.stop()
        cluster.stop()


def test_stages_on_three_nodes_answer_as_one_rank_does(serving, folder):
    check_answers(serving, folder, STAGES)


def check_answers(serving: Serving, folder: Path, num_ranks: int) -> None:
    (replica,) = serving.replicas(MODEL)
    assert len({rank.node for rank in replica.ranks}) == num_ranks
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(folder), device="cpu", num_gpu_blocks_override=64, num_threads=1) as one:
        alone = [answer.outputs[0].text for answer in one.generate(PROMPTS, greedy, use_tqdm=False)]
    assert [text(serving.ask(MODEL, prompt)) for prompt in PROMPTS] == alone


@pytest.mark.parametrize("stage", range(STAGES))  # first, middle, last
def test_a_stage_killed_in_the_middle_of_16_streams_changes_no_text(serving, stage):
    check_kill(serving, stage)


def check_kill(serving: Serving, rank: int) -> None:
    """Kill a rank in the middle of 16 streams, and compare their texts with the text of a stream without a fault."""
    serving.wait_for_all()
    expected = text(serving.ask(MODEL, max_tokens=LONG, timeout_s=60))
    (replica,) = serving.replicas(MODEL)
    with ThreadPoolExecutor(STREAMS) as pool:
        started = [Event() for _ in range(STREAMS)]
        running = [pool.submit(serving.stream, MODEL, event, LONG) for event in started]
        assert all(event.wait(60) for event in started)
        assert not any(stream.done() for stream in running)
        os.kill(replica.ranks[rank].pid, signal.SIGKILL)
        answers = [stream.result(timeout=120) for stream in running]
    assert {answer.error for answer in answers} == {None}
    assert {answer.text for answer in answers} == {expected}
    serving.wait_for_all()
    assert replica not in serving.replicas(MODEL)
