"""The whole engine on a GPU: against the CPU, with and without graphs, with and without overlap."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo import config as dynamo_config

from engine import pocket
from engine.core.engine import EngineCore
from engine.devices.cuda_device import CudaDevice
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.images import PromptImages
from engine.wire.parts.speculation import SpecDecodeStats
from engine.wire.sampling_params import SamplingParams
from tests.engine.spec_decode.draft_checkpoints import DRAFTERS, NUM_DRAFTS, make_drafters
from tests.fake_drafter import draft_always
from tests.gpu.engines import Answer, check_same, generate, make_core, requests, run
from tests.models import FAMILIES
from tests.mxfp4_files import make_mxfp4
from tests.vision_models import Prompt, make_vision_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

VOCAB = 97
EXACT = 2e-3  # of float32, where sums run in another order
SPARSE = ("deepseek_v32", "glm_moe_dsa")  # whose tokens are selected in plain torch, without graphs
ROUNDED = 0.4  # of bfloat16 against float32: on a CPU margins move by 0.04 in the median, and by 0.3 at most


@pytest.fixture(scope="module")
def drafters(tmp_path_factory) -> dict[str, tuple[Path, dict[str, str]]]:
    """The target of each kind of drafter, and the options."""
    return make_drafters(tmp_path_factory.mktemp("drafters"))


@pytest.fixture
def core(folder_of) -> Iterator[EngineCore]:
    core = make_core(folder_of("qwen3"), "cuda")
    yield core
    core.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_cpus(family, folder_of):
    wanted = requests(12, VOCAB, logprobs=2)
    expected = generate(folder_of(family), "cpu", wanted)
    core = make_core(folder_of(family), "cuda")
    check_same(run(core, wanted), expected, EXACT)
    assert bool(core.ranks.runner.layers.graphs.captured) != (family in SPARSE), "steps were replayed"
    core.close()


def test_the_bundled_model_in_bfloat16_says_what_it_says_in_float32_on_the_cpu():
    if not (pocket.PATH / "config.json").is_file():
        pytest.skip("the bundled model is not in the tree")
    wanted = requests(8, 400, logprobs=2)
    expected = generate(pocket.PATH, "cpu", wanted)
    check_same(generate(pocket.PATH, "cuda", wanted, dtype="bfloat16"), expected, ROUNDED)


@pytest.mark.parametrize("name", ["gemma3", "internvl", "mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_answers_about_images_are_the_cpus_and_the_host_does_not_wait_for_them(name, tmp_path):
    folder = make_vision_model(tmp_path, name)

    def wanted(first_seed: int) -> list[GenerateRequest]:
        prompts = [Prompt(name).text(5, 6).image(first_seed + i, 2 + i, 3).text(7, 8, 9) for i in range(3)]
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
        return [
            GenerateRequest(request_id=str(i), prompt=prompt.tokens, params=params).asking(
                PromptImages.of(prompt.images)
            )
            for i, prompt in enumerate(prompts)
        ]

    check_same(generate(folder, "cuda", wanted(1)), generate(folder, "cpu", wanted(1)), EXACT)
    core = make_core(folder, "cuda")
    run_strictly(core, wanted(1), wanted(11))
    core.close()


@pytest.mark.parametrize("method", DRAFTERS)
def test_drafts_change_no_token_and_the_host_does_not_wait_for_them(method, drafters, monkeypatch):
    draft_always(monkeypatch)
    (folder, options), wanted = drafters[method], requests(8, VOCAB, logprobs=2)
    speculative = {**options, "num_speculative_tokens": NUM_DRAFTS}
    core = make_core(folder, "cuda", speculative_config=speculative)
    check_same(run(core, wanted), generate(folder, "cpu", wanted), EXACT)
    assert core.stats().record(SpecDecodeStats).num_draft_tokens > 0
    run_strictly(core, wanted, wanted)
    core.close()


def test_a_cache_in_float8_is_close_to_one_in_bfloat16(folder_of):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card has no float8")
    wanted = requests(8, VOCAB, logprobs=2)
    expected = generate(folder_of("qwen3"), "cpu", wanted, kv_cache_dtype="fp8")
    check_same(generate(folder_of("qwen3"), "cuda", wanted, kv_cache_dtype="fp8"), expected, ROUNDED)


def test_experts_in_mxfp4_stay_as_stored_and_say_what_they_stand_for(tmp_path_factory):
    quantized, twin = make_mxfp4(tmp_path_factory.mktemp("mxfp4"), tmp_path_factory.mktemp("twin"))
    wanted = requests(8, VOCAB, logprobs=2)
    expected = generate(twin, "cpu", wanted)
    check_same(generate(quantized, "cuda", wanted, dtype="bfloat16"), expected, ROUNDED)


@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_the_block_size_changes_no_token(block_size, folder_of):
    wanted = requests(8, VOCAB, logprobs=2)
    expected = generate(folder_of("llama"), "cpu", wanted)
    check_same(generate(folder_of("llama"), "cuda", wanted, block_size=block_size), expected, EXACT)


def test_graphs_change_no_token(folder_of):
    wanted = requests(16, VOCAB, logprobs=2)
    eager = generate(folder_of("llama"), "cuda", wanted, enforce_eager=True)
    check_same(generate(folder_of("llama"), "cuda", wanted), eager, EXACT)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3"])
def test_torch_compile_changes_no_token_in_prompts_and_in_graphs(family, folder_of):
    wanted = requests(16, VOCAB, logprobs=2)
    expected = generate(folder_of(family), "cuda", wanted)
    core = make_core(folder_of(family), "cuda", torch_compile=True)
    with dynamo_config.patch(error_on_recompile=True):
        check_same(run(core, wanted), expected, EXACT)
    assert core.ranks.runner.layers.graphs.captured, "of compiled pieces"
    core.close()


def test_overlap_changes_nothing_at_all(folder_of):
    wanted = requests(16, VOCAB, temperature=0.8, top_p=0.9, logprobs=2)
    runs = [generate(folder_of("llama"), "cuda", wanted, async_scheduling=overlap) for overlap in (True, False)]
    assert tokens(runs[0]) == tokens(runs[1])


def test_sampled_tokens_are_the_same_in_every_run(folder_of):
    wanted = requests(16, VOCAB, temperature=1.0, top_k=20)
    runs = [generate(folder_of("qwen3"), "cuda", wanted) for _ in range(2)]
    assert tokens(runs[0]) == tokens(runs[1])


def test_penalties_and_grammar_free_extras_work_on_the_card(folder_of):
    wanted = requests(6, VOCAB, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={5: 2.0}, logprobs=2)
    expected = generate(folder_of("llama"), "cpu", wanted)
    found = generate(folder_of("llama"), "cuda", wanted)
    first = [(found[name].tokens[0], answer.tokens[0]) for name, answer in expected.items()]
    assert all(got == want for got, want in first)


def test_sequences_that_are_preempted_and_resumed_say_the_same(folder_of):
    wanted = requests(16, VOCAB, logprobs=2)
    tight = {"block_size": 16, "num_gpu_blocks_override": 40, "max_num_seqs": 6, "max_model_len": 130}
    expected = generate(folder_of("llama"), "cpu", wanted, **tight)
    check_same(generate(folder_of("llama"), "cuda", wanted, **tight), expected, EXACT)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 5},
        {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.2},
        {"logit_bias": {5: 2.0, 9: -3.0}, "min_tokens": 20, "stop_token_ids": [7]},
        {"allowed_token_ids": list(range(3, 60))},
        {"bad_words_token_ids": [[5], [7, 8], [9, 10, 8]]},
    ],
    ids=str,
)
def test_the_host_never_waits_for_the_card_between_launch_and_collect(sampling, core):
    wanted = requests(8, VOCAB, **sampling)
    run_strictly(core, wanted, wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_host_never_waits_for_experts_either(dtype, folder_of):
    core = make_core(folder_of("qwen3_moe"), "cuda", dtype=dtype)
    wanted = requests(8, VOCAB)
    run_strictly(core, wanted, wanted)
    core.close()


def run_strictly(core: EngineCore, first: list[GenerateRequest], then: list[GenerateRequest]) -> None:
    """Once graphs are captured and kernels compiled, whatever makes the host wait raises."""
    run(core, first)
    launch, prepare = core.ranks.runner.launch, core.ranks.runner.prepare
    steps = 0

    def strictly(call):
        def strict(argument):
            nonlocal steps
            steps += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                return call(argument)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return strict

    core.ranks.runner.launch, core.ranks.runner.prepare = strictly(launch), strictly(prepare)
    run(core, then)
    assert steps > 10


def test_graphs_stay_within_their_budget(folder_of):
    core = make_core(folder_of("llama"), "cuda", cuda_graph_memory_gib=0.25)
    run(core, requests(16, VOCAB))
    assert core.ranks.runner.layers.graphs.used_bytes <= 2**28
    core.close()


def tokens(answers: dict[str, Answer]) -> dict[str, list[int]]:
    return {name: answer.tokens for name, answer in answers.items()}


TAKES_MEMORY = """
import torch
taken = torch.ones(2**28, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("taken", flush=True)
input()
"""


def test_memory_of_another_process_does_not_count():
    device, own = CudaDevice(), torch.ones(2**24, dtype=torch.uint8, device="cuda")
    before = device.used_bytes()
    with subprocess.Popen([sys.executable, "-c", TAKES_MEMORY], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "taken\n"
        assert device.used_bytes() == before >= len(own)
        other.stdin.write("\n")
