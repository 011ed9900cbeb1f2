"""Models whose sizes no kernel divides evenly: a request has the same bits alone and in any batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cpu_kernels import needs_linear_kernel
from tests.engine.model.test_parity import Run
from tests.models import make_model

VOCAB = 777
SIZES: dict[str, Any] = {"hidden_size": 180, "intermediate_size": 392, "vocab_size": VOCAB}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "head_dim": 20},
    "deepseek_v32": {**SIZES, "kv_lora_rank": 37, "v_head_dim": 20, "moe_intermediate_size": 24, "index_head_dim": 20},
    "qwen3_next": {**SIZES, "head_dim": 40, "linear_key_head_dim": 20, "linear_value_head_dim": 20},
}


def prompt(length: int) -> list[int]:
    return [3 + 7 * i * i % (VOCAB - 3) for i in range(length)]


PROMPTS = {f"{length} tokens": prompt(length) for length in (5, 21, 34, 47, 70)}


@needs_linear_kernel
@pytest.mark.parametrize(
    ("family", "dtype", "determinism"),
    [
        ("llama", "bfloat16", "strict"),
        ("deepseek_v32", "bfloat16", "strict"),
        ("qwen3_next", "bfloat16", None),
        pytest.param("llama", "bfloat16", None, marks=pytest.mark.slow),
        pytest.param("deepseek_v32", "float32", "strict", marks=pytest.mark.slow),
        pytest.param("deepseek_v32", "float32", None, marks=pytest.mark.slow),
        pytest.param("qwen3_next", "float32", "strict", marks=pytest.mark.slow),
    ],
)
def test_a_request_has_the_same_bits_alone_and_in_a_batch(
    family: str, dtype: str, determinism: str | None, tmp_path: Path
) -> None:
    folder: Any = SimpleNamespace(folder=make_model(tmp_path, family, **MODELS[family]))
    options = {
        "dtype": dtype,
        "determinism": determinism,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 256,
    }

    def answers(**more: Any) -> dict[str, Any]:
        with Run(folder, False, **options, **more) as run:
            for name, tokens in PROMPTS.items():
                run.add(name, tokens, max_tokens=6, logprobs=1, prompt_logprobs=1)
            run.go()
            return {name: (run.tokens[name], run.logprobs[name], run.prompt_logprobs[name]) for name in PROMPTS}

    assert answers(max_num_seqs=8) == answers(max_num_seqs=1)
