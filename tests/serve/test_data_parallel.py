"""A replica of two engines that share experts, each on a node of its own: its answers, its routing, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from engine import LLM, SamplingParams
from tests.models import make_model
from tests.serve.fake_cluster import FakeCluster
from tests.serve.serve_run import ServeRun, wait_until
from tests.serve.test_pipeline_stages import check_kill
from tests.serve.test_rank_groups import CONTEXT, HEAD, NODE, POOL, PROMPTS, TOKENS, Serving, text

pytestmark = [pytest.mark.serve, pytest.mark.slow]

MODEL, ENGINES = "spread", 2
OPTIONS = {"device": "cpu", "dtype": "float32", "determinism": "strict"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3_moe", tokenizer=True, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def serving(tmp_path_factory, folder) -> Iterator[Serving]:
    model = {
        "name": MODEL,
        "model": str(folder),
        "engine": {"data_parallel": ENGINES, "expert_parallel": True, "num_blocks": 2048, **OPTIONS},
        "decode": {"num_cpus": 0.25, "label_selector": POOL, "placement_strategy": "STRICT_SPREAD"},
    }
    ingress = {"name": "ingress", "ray_actor_options": {"num_cpus": 0.1, "label_selector": {"pool": "!decode"}}}
    cluster = FakeCluster([HEAD, *[NODE] * ENGINES])
    server = ServeRun(
        tmp_path_factory.mktemp("serve"), {"models": [model]}, address=cluster.address, deployments=[ingress]
    )
    serving = Serving(cluster, server, {MODEL: 1})
    try:
        serving.wait_for_all()
        wait_until(lambda: serving.ask(MODEL).status_code == 200)
        yield serving
    finally:
        (folder.parent / "serve.log").write_text("".join(server.log))
        server.stop()
        cluster.stop()


def test_engines_on_two_nodes_answer_as_one_does_and_both_take_requests(serving, folder):
    (replica,) = serving.replicas(MODEL)
    assert len({rank.node for rank in replica.ranks}) == ENGINES
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(folder), num_blocks=64, num_threads=1, **OPTIONS) as one:
        alone = [answer.outputs[0].text for answer in one.generate(PROMPTS, greedy, progress=False)]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert [text(answer) for answer in pool.map(lambda p: serving.ask(MODEL, p), PROMPTS * 4)] == alone * 4
    metrics = httpx.get(f"{serving.server.url}/metrics", timeout=30).text
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total")]
    assert len(lines) == ENGINES and all(float(line.split()[-1]) > 0 for line in lines), lines
    assert all(any(f".dp{number}" in line for line in lines) for number in range(ENGINES))


@pytest.mark.parametrize("engine", range(ENGINES))
def test_an_engine_killed_in_the_middle_of_16_streams_changes_no_text(serving, engine):
    check_kill(serving, engine)
