"""Steps as one parallel region, against the same steps kernel by kernel: the same bits."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.kernel_trial.steps import memory_of
from engine.model.batch import Batch, KVGroup, split
from engine.model.ops.cpu.kernel import CpuKernel
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.pooling import PoolingParams
from engine.wire.parts.states import StateStep
from engine.wire.sampling_params import SamplingParams
from tests.cpu_kernels import needs_linear_kernel
from tests.models import COMMON

pytestmark = needs_linear_kernel
WIDE = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "attention_bias": False,
    "vocab_size": 192,
    "hidden_size": 128,
    "intermediate_size": 1152,
    "num_hidden_layers": 2,
    "head_dim": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen2": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},  # has biases
}
# With states in place of KV in some layers.
HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3_5": {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "NemotronH": {
        "model_type": "nemotron_h",
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "mlp", "full_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_routed_experts": 0,
        "hidden_act": "relu2",
        "ssm_state_size": 32,
        "n_groups": 2,
    },
    "Bamba": {
        "model_type": "bamba",
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_expand": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "Lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "tie_word_embeddings": True},
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_key_value_heads": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 64}
HYBRIDS |= {
    "Qwen3Next": HYBRIDS["Qwen3_5"] | SHARED_EXPERT | {"model_type": "qwen3_next"},
    "Qwen3_5Moe": HYBRIDS["Qwen3_5"] | SHARED_EXPERT | {"model_type": "qwen3_5_moe_text"},
    "NemotronHMoE": HYBRIDS["NemotronH"]
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "GraniteMoeHybrid": HYBRIDS["Bamba"]
    | {
        "model_type": "granitemoehybrid",
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "shared_intermediate_size": 64,
        "residual_multiplier": 0.7,
    },
    "Lfm3": HYBRIDS["Lfm2"]
    | {
        "model_type": "lfm3",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
    "Lfm2Moe": HYBRIDS["Lfm2"] | EXPERTS | {"model_type": "lfm2_moe", "num_dense_layers": 1},
    "KimiLinear": LATENT
    | {
        "model_type": "kimi_linear",
        "max_position_embeddings": None,
        "num_experts_per_tok": None,
        "n_group": None,
        "topk_group": None,
        "model_max_length": 512,
        "q_lora_rank": None,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 8,
        "num_experts_per_token": 2,
    },
}
MODELS |= HYBRIDS
MODELS |= {
    "Qwen3Moe": EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "GptOss": EXPERTS
    | {
        "model_type": "gpt_oss",
        "num_experts": None,
        "num_local_experts": 4,
        "intermediate_size": 64,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_bias": True,
    },
    "DeepseekV2": LATENT | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"},
    "DeepseekV3": LATENT | {"model_type": "deepseek_v3", "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    "MiniCPM3": LATENT | {"model_type": "minicpm3", "scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 24},
}
VARIANTS = [*((name, None) for name in MODELS), ("Llama", "int8"), ("Llama", "int4")]
FAST = ("Llama", "NemotronH", "DeepseekV3")


def cases(*fast: str) -> list[Any]:
    """All variants; those of other architectures than `fast` are slow."""
    slow = [variant[0] not in fast or variant[1] == "int8" for variant in VARIANTS]
    return [pytest.param(*v, marks=[pytest.mark.slow] * mark) for v, mark in zip(VARIANTS, slow, strict=True)]


def make_core(folder: Path, architecture: str, **options: Any) -> EngineCore:
    config = COMMON | WIDE | MODELS.get(architecture, {})
    config = {
        "model_type": architecture.lower(),
        "architectures": [f"{architecture.removesuffix('MoE')}ForCausalLM"],
    } | {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    defaults = {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "block_size": 4,
        "num_gpu_blocks_override": 64,
        "num_threads": 2,
    }
    return build_engine(EngineConfig(model=str(folder), **{**defaults, **options}))


def generate(core: EngineCore, tokens: int = 7) -> dict[str, list[tuple[int, float]]]:
    """Tokens and logprobs of each of several requests, of which some come while others are answered. tokens: of
    their prompts, which a slow machine cuts into more steps."""
    rng = random.Random(0)
    waiting = [
        GenerateRequest(
            request_id=str(i),
            prompt=[rng.randrange(3, 190) for _ in range(tokens)],
            params=SamplingParams(temperature=0.0, max_tokens=4 + 2 * i, ignore_eos=True, logprobs=1),
        )
        for i in range(4)
    ]
    answers: dict[str, list[tuple[int, float]]] = {}
    steps = 0
    while waiting or core.has_work:
        if waiting and steps % 3 == 0:
            core.add(waiting.pop())
        for event in core.step():
            assert event.delta.error is None, event.delta.error
            answers.setdefault(event.delta.request_id, []).extend(
                (entry.token_id, entry.logprob) for entry in event.delta.logprobs or []
            )
        steps += 1
    return answers


@pytest.mark.parametrize(
    ("architecture", "quantization"),
    cases(*FAST),
)
def test_a_model_gives_the_same_bits_in_one_region_and_kernel_by_kernel(architecture, quantization, tmp_path):
    options = {"quantization": quantization, "num_gpu_blocks_override": 128}
    core = make_core(tmp_path, architecture, enable_prefix_caching=False, **options)
    tokens = 60 if architecture in HYBRIDS else 7  # so that states move
    first, second = generate(core, tokens), generate(core, tokens)
    assert core.ranks.runner.layers.graph is not None
    eager = make_core(tmp_path, architecture, enforce_eager=True, **options)
    assert first == second == generate(eager, tokens)


def make_step(core: EngineCore, counts: list[int], past: int) -> tuple[torch.Tensor, Batch]:
    """Sequences with KV of `past` tokens, of blocks in any order."""
    generator = torch.Generator().manual_seed(len(counts))
    tokens, size = sum(counts), core.ranks.runner.block_size
    kv_lens = [past + count for count in counts]
    width = -(-max(kv_lens) // size)
    position = torch.cat([torch.arange(past, end) for end in kv_lens])
    sequence = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    single, chunks = split(counts, kv_lens)
    groups = []
    for cache in core.ranks.runner.kv_caches:
        table = torch.randperm(len(counts) * width, generator=generator).int().view(len(counts), width)
        slots = table[sequence, position // size].long() * size + position % size
        groups.append(KVGroup(slot_mapping=slots, block_table=table, kv_cache=cache))
    first, *others = groups
    cache = core.ranks.runner.memory.of.get(StateStep.part)
    batch = Batch(
        positions=position,
        slot_mapping=first.slot_mapping,
        query_start=torch.tensor([0, *counts]).cumsum(0).int(),
        kv_len=torch.tensor(kv_lens, dtype=torch.int32),
        block_table=first.block_table,
        kv_cache=first.kv_cache,
        single=single,
        chunks=chunks,
        other_groups=tuple(others),
        states=None if cache is None else cache.batch(np.arange(len(counts)), core.ranks.runner.device.staged_copy()),
    )
    return torch.randn(tokens, 128, generator=generator).bfloat16(), batch


@pytest.mark.parametrize(("architecture", "quantization"), cases(*FAST, "Qwen3Next"))
@torch.inference_mode()
def test_one_recording_serves_steps_of_every_shape(architecture, quantization, tmp_path):
    core = make_core(tmp_path, architecture, quantization=quantization, num_gpu_blocks_override=1100)
    runner = core.ranks.runner
    forward, graph = runner.model.run_layers, runner.layers.graph
    assert graph is not None
    caches = memory_of(runner)
    for cache in caches:
        cache.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    for counts, past in (([1], 70), ([1] * 64, 5), ([300], 0), ([100, 1, 33, 1, 1], 9), ([2], 1), ([1, 1], 128)):
        x, batch = make_step(core, counts, past)
        before = [cache.clone() for cache in caches]
        found, kv = graph.run(x, batch).clone(), [cache.clone() for cache in caches]
        for cache, kept in zip(caches, before, strict=True):
            cache.copy_(kept)
        assert torch.equal(found, forward(x, batch)), counts
        assert all(map(torch.equal, kv, caches)), counts


def test_steps_may_be_of_one_token_at_most(tmp_path):
    options = {"max_num_batched_tokens": 1, "max_num_seqs": 1}
    found = generate(make_core(tmp_path, "Llama", **options))
    assert found == generate(make_core(tmp_path, "Llama", enforce_eager=True, **options))


def test_what_a_prompt_in_parts_is_pooled_from_outlasts_its_step(tmp_path):
    (tmp_path / "modules.json").write_text(
        '[{"idx": 0, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]'
    )
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    core, embeddings = make_core(tmp_path, "Qwen3", max_num_batched_tokens=4, max_num_seqs=4), []
    for prompt in ([5, 6], [5, *range(20, 31)]):  # the first token, which is pooled, sees none but itself
        core.add(GenerateRequest(request_id="", prompt=prompt, params=SamplingParams()).asking(PoolingParams()))
        while core.has_work:
            embeddings += [event.delta.answer for event in core.step() if event.delta.finish_reason]
    assert embeddings[0] == embeddings[1]


def test_every_step_is_two_regions_whatever_its_layers(tmp_path, monkeypatch):
    """One for the layers and one for the head: beside other processes, each may wait for a thread without a core. This
    holds from the first step on, so no request waits for a recording."""
    core, regions, launch = make_core(tmp_path, "Llama"), [], CpuKernel.launch

    def counted(kernel: CpuKernel, dtype: torch.dtype, items: int, *args: Any) -> None:
        regions.extend([kernel] if items > 1 else [])  # one item needs one thread
        launch(kernel, dtype, items, *args)

    monkeypatch.setattr(CpuKernel, "launch", counted)
    core.add(
        GenerateRequest(request_id="0", prompt=[5, 6, 7] * 9, params=SamplingParams(temperature=0.0, max_tokens=4))
    )
    steps = 0
    while core.has_work:
        core.step()
        steps += 1
        assert len(regions) == 2 * steps
    core.close()


def test_a_model_with_steps_of_its_own_runs_kernel_by_kernel_and_says_so_once(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    found = generate(make_core(tmp_path, "Llama", dtype="float32"))
    assert caplog.text.count("steps run kernel by kernel") == 1
    assert found == generate(make_core(tmp_path, "Llama", dtype="float32", enforce_eager=True))
