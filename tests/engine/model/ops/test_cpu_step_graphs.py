"""Steps as one parallel region, against the same steps kernel by kernel: the same bits."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.model.ops.cpu.kernel import Kernel
from engine.wire.messages import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from tests.models import COMMON

pytestmark = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="linear layers have no kernel of ours here"
)
WIDE = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "attention_bias": False,
    "vocab_size": 192,
    "hidden_size": 128,
    "intermediate_size": 1088,
    "num_hidden_layers": 2,
    "head_dim": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen2": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},  # has biases
}


def make_core(folder: Path, architecture: str, **options: Any) -> EngineCore:
    config = COMMON | WIDE | MODELS.get(architecture, {})
    config |= {"model_type": architecture.lower(), "architectures": [f"{architecture}ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    defaults = {"dtype": "bfloat16", "load_format": "dummy", "block_size": 4, "num_blocks": 64, "num_threads": 2}
    return EngineCore.build(EngineConfig(model=str(folder), **{**defaults, **options}))


def generate(core: EngineCore) -> list[tuple[int, float]]:
    """Tokens and logprobs of requests of several lengths, of which some come while others are answered."""
    rng = random.Random(0)
    waiting = [
        GenerateRequest(
            request_id=str(i),
            prompt=[rng.randrange(3, 190) for _ in range(7)],
            params=SamplingParams(temperature=0.0, max_tokens=4 + 2 * i, ignore_eos=True, logprobs=1),
        )
        for i in range(4)
    ]
    answers, steps = [], 0
    while waiting or core.has_work:
        if waiting and steps % 3 == 0:
            core.add(waiting.pop())
        for event in core.step():
            assert event.delta.error is None, event.delta.error
            answers += [(entry.token_id, entry.logprob) for entry in event.delta.logprobs or []]
        steps += 1
    return answers


@pytest.mark.parametrize(("architecture", "quantization"), [*((name, None) for name in MODELS), ("Llama", "int8")])
def test_a_model_gives_the_same_bits_in_one_region_and_kernel_by_kernel(architecture, quantization, tmp_path):
    core = make_core(tmp_path, architecture, enable_prefix_caching=False, quantization=quantization)
    first, second = generate(core), generate(core)
    assert core.runner._step_graphs.recorded >= {(1,), (1, 1), (1, 1, 1), (7,), (1, 7), (1, 1, 7)}
    eager = make_core(tmp_path, architecture, enforce_eager=True, quantization=quantization)
    assert first == second == generate(eager)


def test_a_decode_step_is_two_regions_whatever_its_layers(tmp_path, monkeypatch):
    """One for the layers and one for the head: beside other processes, each may wait for a thread without a core."""
    core = make_core(tmp_path, "Llama")
    core.add(GenerateRequest(request_id="0", prompt=[5, 6, 7], params=SamplingParams(temperature=0.0, max_tokens=9)))
    for _ in range(4):
        core.step()
    regions, launch = [], Kernel.launch

    def counted(kernel: Kernel, dtype: torch.dtype, items: int, *args: Any) -> None:
        regions.extend([kernel] if items > 1 else [])  # one item needs one thread
        launch(kernel, dtype, items, *args)

    monkeypatch.setattr(Kernel, "launch", counted)
    core.step()
    core.close()
    assert len(regions) == 2


def test_a_model_with_steps_of_its_own_runs_kernel_by_kernel_and_says_so_once(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    found = generate(make_core(tmp_path, "Llama", dtype="float32"))
    assert caplog.text.count("steps run kernel by kernel") == 1
    assert found == generate(make_core(tmp_path, "Llama", dtype="float32", enforce_eager=True))
