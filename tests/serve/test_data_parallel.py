"""A replica of two engines that share experts, each on a node of its own: its answers, its routing, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from engine import LLM, SamplingParams
from tests.models import make_model
from tests.serve.test_pipeline_stages import MODEL, check_kill, served
from tests.serve.test_rank_groups import CONTEXT, PROMPTS, TOKENS, Serving, text

pytestmark = [pytest.mark.serve, pytest.mark.slow]

ENGINES = 2
OPTIONS = {"device": "cpu", "dtype": "float32", "determinism": "strict"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3_moe", tokenizer=True, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def serving(tmp_path_factory, folder) -> Iterator[Serving]:
    options = {"data_parallel": ENGINES, "expert_parallel": True, **OPTIONS}
    with served(tmp_path_factory.mktemp("serve"), folder, ENGINES, **options) as serving:
        yield serving


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
