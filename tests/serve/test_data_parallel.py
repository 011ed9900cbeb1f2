"""A replica of two engines that share experts, each with one rank, two ranks or two stages, on nodes of their own: its
answers, its routing, and its end."""

from __future__ import annotations

import re
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
def serving(request, tmp_path_factory, folder) -> Iterator[Serving]:
    """A group of engines with as many stages each, and ranks of each stage, as the parameter says."""
    stages, ranks = request.param
    options = {
        "data_parallel_size": ENGINES,
        "pipeline_parallel_size": stages,
        "tensor_parallel_size": ranks,
        **OPTIONS,
    }
    num_ranks = ENGINES * stages * ranks
    with served(tmp_path_factory.mktemp("serve"), folder, num_ranks, enable_expert_parallel=True, **options) as serving:
        yield serving


@pytest.mark.parametrize("serving", [(1, 1), (1, 2), (2, 1)], indirect=True)
def test_engines_on_several_nodes_answer_as_one_does_and_both_take_requests(serving, folder):
    (replica,) = serving.replicas(MODEL)
    assert len({rank.node for rank in replica.ranks}) == len(replica.ranks)
    placed = next(line for line in serving.server.log if "ranks placed" in line)
    racks = re.findall(r"rack (\w+)", placed)
    assert racks in (["r0", "r1"], ["r1", "r0"], ["r0"] * 2 + ["r1"] * 2, ["r1"] * 2 + ["r0"] * 2), "an engine in each"
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(folder), num_gpu_blocks_override=64, num_threads=1, **OPTIONS) as one:
        alone = [answer.outputs[0].text for answer in one.generate(PROMPTS, greedy, use_tqdm=False)]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert [text(answer) for answer in pool.map(lambda p: serving.ask(MODEL, p), PROMPTS * 4)] == alone * 4
    metrics = httpx.get(f"{serving.server.url}/metrics", timeout=30).text
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total")]
    assert len(lines) == ENGINES and all(float(line.split()[-1]) > 0 for line in lines), lines
    assert all(any(f".dp{number}" in line for line in lines) for number in range(ENGINES))


@pytest.mark.parametrize(
    ("serving", "rank"),
    [((1, 1), 0), ((1, 1), 1), ((1, 2), 1), ((1, 2), 2), ((2, 1), 1), ((2, 1), 2)],  # a last stage, and a first one
    indirect=["serving"],
)
def test_a_rank_killed_in_the_middle_of_16_streams_changes_no_text(serving, rank):
    check_kill(serving, rank)
