"""Models with recurrent layers, latent attention and experts, wide enough that their steps are recorded. With drafts
and with adapters, each request has the bits that it has alone in an engine that runs kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.options.speculation import SpeculativeConfig
from engine.wire.parts.speculation import SpecDecodeStats
from tests.answers import Answers, ask, prompt
from tests.cpu_kernels import needs_linear_kernel
from tests.engine.lora.peft_adapters import make_adapter
from tests.engine.spec_decode.draft_checkpoints import write_mtp
from tests.fake_drafter import WildDrafter, draft_always
from tests.models import make_model

pytestmark = needs_linear_kernel
# The CPU kernel of linear layers takes multiples of 64 outputs.
ALL = {"hidden_size": 128, "intermediate_size": 192}
RECURRENT = {"head_dim": 32, "linear_key_head_dim": 32}
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
WIDE: dict[str, dict[str, Any]] = {
    "qwen3_5": RECURRENT,
    "qwen3_next": RECURRENT | EXPERTS,
    "deepseek_v3": {
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "moe_intermediate_size": 64,
    },
}
DRAFTED = [
    pytest.param(family, method, marks=[pytest.mark.slow] * (family != "qwen3_5" or method != "ngram"))
    for family in WIDE
    for method in ("ngram", "mtp")
]
REQUESTS = {str(i): (prompt(6, i) * 3 + prompt(45 + i, i), None) for i in range(3)}  # of more than 64 tokens


@pytest.fixture
def opened() -> Iterator[list[EngineCore]]:
    cores: list[EngineCore] = []
    yield cores
    for core in cores:
        core.close()


def build(folder: Any, opened: list[EngineCore], **options: Any) -> EngineCore:
    sizes = {
        "block_size": 4,
        "num_gpu_blocks_override": 400,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 40,
        "num_threads": 1,
    }
    opened.append(core := build_engine(EngineConfig(model=str(folder), dtype="bfloat16", **{**sizes, **options})))
    return core


def recorded(core: EngineCore) -> bool:
    return core.ranks.runner.layers.graph is not None


def each_alone(folder: Any, opened: list[EngineCore], requests: dict[str, Any], **options: Any) -> Answers:
    core, answers = build(folder, opened, enforce_eager=True, enable_prefix_caching=False, **options), Answers()
    for name, request in requests.items():
        one = ask(core, {name: request}, max_tokens=24)
        answers.tokens |= one.tokens
        answers.logprobs |= one.logprobs
    return answers


@pytest.mark.parametrize(("family", "method"), DRAFTED)
def test_drafts_change_no_bit_of_recorded_steps(family, method, tmp_path, opened, monkeypatch):
    draft_always(monkeypatch)
    drafter = WildDrafter()
    monkeypatch.setattr("engine.parts.speculation.make.NgramDrafter", lambda shortest, longest: drafter)
    folder = make_model(tmp_path, family, **ALL, **WIDE[family])
    if method == "mtp":
        write_mtp(folder)
    alone = each_alone(folder, opened, REQUESTS)
    drafter.know_texts([tokens + alone.tokens[name] for name, (tokens, _) in REQUESTS.items()])
    core = build(folder, opened, speculative_config=SpeculativeConfig(method=method, num_speculative_tokens=4))
    assert recorded(core)
    found = ask(core, REQUESTS, max_tokens=24)
    stats = core.stats().record(SpecDecodeStats)
    assert stats is not None and stats.num_draft_tokens > stats.num_accepted_tokens >= (method == "ngram")
    assert found.tokens == alone.tokens and found.logprobs == alone.logprobs


@pytest.mark.slow
def test_adapters_of_a_recorded_model_with_states(tmp_path, opened):
    folder = make_model(tmp_path / "model", "qwen3_5", **ALL, **WIDE["qwen3_5"])
    modules = r".*\.(o_proj|out_proj|in_proj_qkv|in_proj_z|gate_proj|down_proj)"
    adapters = [make_adapter(tmp_path / str(seed), folder, seed, target_modules=modules) for seed in (1, 2)]
    requests = {
        name: (tokens, lora) for (name, (tokens, _)), lora in zip(REQUESTS.items(), (None, *adapters), strict=True)
    }
    options = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2}
    core = build(folder, opened, **options)
    assert recorded(core)
    found, alone = ask(core, requests, max_tokens=24), each_alone(folder, opened, requests, **options)
    assert not found.errors
    assert found.tokens == alone.tokens and found.logprobs == alone.logprobs
    assert found.logprobs["1"] != each_alone(folder, opened, {"1": (requests["1"][0], None)}).logprobs["1"]


def test_steps_with_adapters_of_experts_are_not_recorded(tmp_path, opened):
    folder = make_model(tmp_path, "qwen3_next", **ALL, **WIDE["qwen3_next"])
    assert recorded(build(folder, opened)) and not recorded(build(folder, opened, enable_lora=True))
