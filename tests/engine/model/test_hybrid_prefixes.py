"""Models with states, windows or latents give the same bits with a prefix cache as without."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.model.state import CHUNK
from tests.engine.model.test_parity import Run
from tests.models import HYBRIDS, make_model
from tests.products import in_turns, pairwise, slow

KINDS = (
    *("qwen3_5", "nemotron_h", "lfm2", "kimi_linear"),  # Gated DeltaNet, Mamba-2, a convolution alone, KDA
    *("gemma3", "gemma3n", "deepseek_v3", "deepseek_v32"),  # windows; KV read by other layers; latents; an indexer
)
LIKE_THEM = (
    *("qwen3_next", "bamba", "falcon_h1", "granite4_moe"),
    *("gemma4", "gpt_oss", "mimo_v2_flash", "deepseek_v2", "longcat_flash", "minicpm3", "glm_moe_dsa"),
)
EVERY_KIND = pairwise([KINDS[0], *slow(KINDS[1:])], ["bfloat16", *slow(["float32"])])
ALL = [*EVERY_KIND, *in_turns(slow(LIKE_THEM), ["bfloat16", "float32"])]
for_all = pytest.mark.parametrize(("folder", "dtype"), ALL, indirect=["folder"])
VOCAB, BLOCK = 97, 16


class Folder:
    """What Run wants of a reference."""

    def __init__(self, folder: Path, family: str):
        self.folder = folder
        self.step = CHUNK if family in HYBRIDS else BLOCK  # tokens from one possible end of a hit to the next
        self.alone: dict[tuple, dict] = {}


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> Folder:
    return Folder(make_model(tmp_path_factory.mktemp("model"), request.param), request.param)


def run_of(folder: Folder, dtype: str, **options) -> Run:
    defaults = {"block_size": BLOCK, "num_gpu_blocks_override": 256, "kv_cache_memory_bytes": None}
    return Run(folder, **{"overlap": False, **defaults, "dtype": dtype, **options})


def tokens(count: int, seed: object) -> list[int]:
    draw = random.Random(f"{seed}")
    return [draw.randrange(VOCAB) for _ in range(count)]


def bits(run: Run) -> dict[str, tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of all requests."""
    return {name: (run.tokens[name], [value.logprob for value in run.logprobs[name]]) for name in run.tokens}


def computed_alone(folder: Folder, dtype: str, prompts: dict[str, list[int]], max_tokens: int):
    """The bits of each without a cache, computed once for all tests."""
    key = (dtype, max_tokens, *map(tuple, prompts.values()))
    if key not in folder.alone:
        with run_of(folder, dtype, enable_prefix_caching=False, max_num_seqs=1) as run:
            for name, prompt in prompts.items():
                run.add(name, prompt, max_tokens=max_tokens, logprobs=1)
                run.go()
            folder.alone[key] = bits(run)
    return folder.alone[key]


@for_all
def test_a_prefix_of_every_number_of_blocks(folder, dtype):
    """The first prompt that parts from another leaves a state where they part, from which the next one goes on."""
    whole, prompts = tokens(3 * CHUNK + 5, "whole"), {}
    for blocks in range(1, len(whole) // BLOCK + 1):
        for part in "ab":
            prompts[f"{blocks}{part}"] = whole[: blocks * BLOCK] + tokens(BLOCK + 3, (blocks, part))
    alone = computed_alone(folder, dtype, prompts, 3)
    with run_of(folder, dtype) as run:
        run.add("whole", whole, max_tokens=1)
        run.go()
        for name, prompt in prompts.items():
            run.add(name, prompt, max_tokens=3, logprobs=1)
            run.go()
        del run.tokens["whole"]
        assert bits(run) == alone
        for blocks in range(1, len(whole) // BLOCK + 1):
            assert run.cached[f"{blocks}b"] == blocks * BLOCK // folder.step * folder.step


@for_all
def test_many_prompts_at_once_in_chunks_of_an_awkward_size(folder, dtype):
    check_chunks(folder, dtype, 61, overlap=True)


@pytest.mark.parametrize(
    ("folder", "dtype", "overlap", "budget"),
    pairwise(slow(KINDS), ["bfloat16", "float32"], [False, True], [7, 64, 300]),
    indirect=["folder"],
)
def test_many_prompts_at_once_in_chunks_of_other_sizes(folder, dtype, overlap, budget):
    check_chunks(folder, dtype, budget, overlap)


def check_chunks(folder: Folder, dtype: str, budget: int, overlap: bool) -> None:
    shared = tokens(2 * CHUNK + 9, "shared")
    prompts = {f"{i}": shared[: len(shared) - 11 * (i % 3)] + tokens(5 + 13 * i, i) for i in range(5)}
    alone = computed_alone(folder, dtype, prompts, 20)
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 4, "async_scheduling": overlap}
    with run_of(folder, dtype, **options, prefix_cache_retention_interval=CHUNK) as run:
        for name, prompt in prompts.items():
            run.add(name, prompt, max_tokens=20, logprobs=1)
        run.go()
        assert bits(run) == alone
        assert sum(map(bool, run.cached.values())) >= 3


@for_all
def test_the_next_turn_of_a_conversation_goes_on_from_its_answer(folder, dtype):
    first = tokens(30, "turn")
    with run_of(folder, dtype) as run:
        run.add("first", first, max_tokens=2 * CHUNK, logprobs=1)
        run.go()
        second = first + run.tokens["first"] + tokens(20, "next turn")
        run.add("second", second, max_tokens=5, logprobs=1)
        run.go()
        assert run.cached["second"] == (30 + 2 * CHUNK - 1) // folder.step * folder.step
        assert bits(run)["second"] == computed_alone(folder, dtype, {"second": second}, 5)["second"]


@pytest.mark.parametrize(
    ("folder", "dtype", "overlap"),
    [pytest.param(*param.values, i % 2 == 0, marks=param.marks) for i, param in enumerate(ALL)],
    indirect=["folder"],
)
def test_who_is_preempted_has_the_same_bits(folder, dtype, overlap):
    prompts = {f"{i}": tokens(90 + 7 * i, ("preempted", i)) for i in range(3)}
    alone = computed_alone(folder, dtype, prompts, CHUNK + 9)
    with run_of(
        folder, dtype, num_gpu_blocks_override=24, max_num_seqs=4, async_scheduling=overlap, max_model_len=256
    ) as run:
        for name, prompt in prompts.items():
            run.add(name, prompt, max_tokens=CHUNK + 9, logprobs=1)
        assert run.go().preemptions
        assert bits(run) == alone
