"""Models that transformers' own code computes over our attention, and text parts of multimodal models, against
transformers: the same logits and greedy tokens, alone, in chunks, in batches and with cached prefixes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.model.families.transformers_family import TRANSFORMERS
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from tests.batches import load_by_hand
from tests.deltas import deltas_of
from tests.transformers_models import SPECIAL, TEXT_PARTS, make_transformers_model

MAX_TOKENS = 8
MODELS = sorted({*TRANSFORMERS, *SPECIAL, *TEXT_PARTS})


# an engine has the tokens of others
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (i % 8 != 1)) for i, name in enumerate(MODELS)]
)
@torch.inference_mode()
def test_logits_of_a_prompt_in_two_chunks_equal_those_of_transformers(tmp_path, name):
    folder, prompt = make_transformers_model(tmp_path, name), random_prompt(33)
    model = load_by_hand(folder)
    found = torch.cat([model.step({0: prompt[:20]}), model.step({0: prompt[20:]})])
    torch.testing.assert_close(found, load_reference(folder, name)(torch.tensor([prompt])).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (i % 16 > 0)) for i, name in enumerate(MODELS)]
)
@torch.inference_mode()
def test_greedy_tokens_equal_those_of_transformers(tmp_path, name):
    folder = make_transformers_model(tmp_path, name)
    reference = load_reference(folder, name)
    prompts = {str(length): random_prompt(length) for length in (33, 1, 20)}
    expected = {key: greedy(reference, prompt) for key, prompt in prompts.items()}
    assert len({token for tokens in expected.values() for token in tokens}) > 2, "repetition would prove nothing"

    core = build(folder)
    tokens, cached = run(core, prompts)
    assert tokens == expected and not any(cached.values())
    again, cached = run(core, prompts)
    assert again == expected
    assert cached == {"33": 32, "1": 0, "20": 16}
    core.close()


def load_reference(folder: Path, name: str) -> transformers.PreTrainedModel:
    auto = transformers.AutoModelForImageTextToText if name in TEXT_PARTS else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # so that every generation is as long as asked for
    return model


def greedy(reference: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": MAX_TOKENS, "do_sample": False}
    return reference.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


def random_prompt(length: int) -> list[int]:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def build(folder: Path) -> EngineCore:
    """An engine that cuts prompts into chunks and mixes them with decodes."""
    sizes = {"block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 3, "max_num_batched_tokens": 13}
    return build_engine(EngineConfig(model=str(folder), dtype="float32", num_threads=1, **sizes))


def run(core: EngineCore, prompts: dict[str, list[int]]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Tokens of each prompt, and how many of its tokens were cached."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for name, prompt in prompts.items():
        core.add(GenerateRequest(request_id=name, prompt=prompt, params=params))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    cached = dict.fromkeys(prompts, 0)
    for delta in deltas_of(core):
        tokens[delta.request_id] += delta.token_ids
        cached[delta.request_id] += delta.num_cached_tokens
    return tokens, cached
