"""A replica of two ranks, each on a node of its own, with whole experts that move: its answers, also if a rank dies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.models import make_model
from tests.serve.test_pipeline_stages import check_answers, check_kill, served
from tests.serve.test_rank_groups import CONTEXT, Serving

pytestmark = [pytest.mark.serve, pytest.mark.slow]

RANKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3_moe", tokenizer=True, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def serving(tmp_path_factory, folder) -> Iterator[Serving]:
    often = {"window_size": 10, "step_interval": 10, "num_redundant_experts": 2}
    options = {
        "tensor_parallel_size": RANKS,
        "enable_expert_parallel": True,
        "determinism": "strict",
        "enable_eplb": True,
    }
    options |= {"eplb_config": often}
    with served(tmp_path_factory.mktemp("serve"), folder, RANKS, **options) as serving:
        yield serving


def test_ranks_with_whole_experts_on_two_nodes_answer_as_one_rank_does(serving, folder):
    check_answers(serving, folder, RANKS)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_killed_in_the_middle_of_16_streams_changes_no_text(serving, rank):
    check_kill(serving, rank)
