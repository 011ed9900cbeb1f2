"""Models with states, windows or latents give the same bits with a prefix cache as without."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.model.state import CHUNK
from tests.engine.model.test_parity import Run
from tests.models import HYBRIDS, make_model, with_slow

FAMILIES = (
    *("qwen3_5", "nemotron_h", "lfm2", "kimi_linear"),  # Gated DeltaNet, Mamba-2, a convolution alone, KDA
    *("qwen3_next", "bamba", "falcon_h1", "granite4_moe"),
    *("gemma3", "gemma4", "gpt_oss", "gemma3n"),  # windows; KV read by other layers
    *("deepseek_v2", "deepseek_v3", "minicpm3", "deepseek_v32", "glm_moe_dsa"),  # latents; selected by an indexer
)
VOCAB, BLOCK = 97, 16


class Folder:
    """What Run wants of a reference."""

    def __init__(self, folder: Path, family: str):
        self.folder = folder
        self.step = CHUNK if family in HYBRIDS else BLOCK  # tokens from one possible end of a hit to the next
        self.alone: dict[tuple, dict] = {}


@pytest.fixture(scope="module", params=with_slow(FAMILIES, FAMILIES[1:]))
def folder(request, tmp_path_factory) -> Folder:
    return Folder(make_model(tmp_path_factory.mktemp("model"), request.param), request.param)


@pytest.fixture(params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def dtype(request) -> str:
    return request.param


def run_of(folder: Folder, dtype: str, **options) -> Run:
    defaults = {"block_size": BLOCK, "num_blocks": 256, "kv_cache_memory_gib": None}
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


@pytest.mark.parametrize(
    ("budget", "overlap"),
    [(61, True), *(pytest.param(n, n % 2 == 0, marks=pytest.mark.slow) for n in (7, 64, 300))],
)
def test_many_prompts_at_once_in_chunks_of_awkward_sizes(folder, dtype, overlap, budget):
    shared = tokens(2 * CHUNK + 9, "shared")
    prompts = {f"{i}": shared[: len(shared) - 11 * (i % 3)] + tokens(5 + 13 * i, i) for i in range(5)}
    alone = computed_alone(folder, dtype, prompts, 20)
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 4, "overlap": overlap}
    with run_of(folder, dtype, **options, prefix_cache_retention_interval=CHUNK) as run:
        for name, prompt in prompts.items():
            run.add(name, prompt, max_tokens=20, logprobs=1)
        run.go()
        assert bits(run) == alone
        assert sum(map(bool, run.cached.values())) >= 3


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


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "overlap"])
def test_who_is_preempted_has_the_same_bits(folder, dtype, overlap):
    prompts = {f"{i}": tokens(90 + 7 * i, ("preempted", i)) for i in range(3)}
    alone = computed_alone(folder, dtype, prompts, CHUNK + 9)
    with run_of(folder, dtype, num_blocks=24, max_num_seqs=4, overlap=overlap, max_model_len=256) as run:
        for name, prompt in prompts.items():
            run.add(name, prompt, max_tokens=CHUNK + 9, logprobs=1)
        assert run.go().preemptions
        assert bits(run) == alone
