"""The KV cache in FP8."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError, ModelFolderError
from engine.model.batch import Batch, split
from engine.model.config import ModelConfig
from engine.model.loader import load_weights
from engine.model.models.registry import build_model
from engine.model.ops import attention
from engine.model.ops.cpu import attention as cpu_attention
from engine.model.shard import ShardPlan
from engine.options.handoff import HandoffConfig
from engine.runner import fp8_kv_cache
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from tests.batches import ByHand
from tests.deltas import deltas_of
from tests.engine.kv_transfer.pair import Pair
from tests.models import make_model
from tests.rank_pool import RankPool

FP8 = torch.float8_e4m3fn
BLOCKS, LAYERS, KV_HEADS, BLOCK_SIZE, HEAD_DIM = 8, 2, 2, 4, 16
SCALES = torch.tensor([[1.0, 1.0], [0.02, 3.0]])


def make_batch(lengths: list[int], dtype: torch.dtype, scales: torch.Tensor | None) -> Batch:
    """Whole prompts of such lengths, each in blocks of its own."""
    single, chunks = split(lengths, lengths)
    blocks = torch.arange(BLOCKS).flip(0).view(len(lengths), -1)
    slots = [blocks[i, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i, n in enumerate(lengths) for p in range(n)]
    return Batch(
        positions=torch.cat([torch.arange(n) for n in lengths]),
        slot_mapping=torch.tensor(slots),
        query_start=torch.tensor([0, *lengths]).cumsum(0).int(),
        kv_len=torch.tensor(lengths, dtype=torch.int32),
        block_table=blocks.int(),
        kv_cache=torch.full((BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM), torch.nan, dtype=dtype),
        single=single,
        chunks=chunks,
        kv_scales=scales,
    )


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("ops", [attention, cpu_attention])
def test_attention_over_fp8_is_attention_over_what_is_stored(ops):
    lengths = [7, 16]
    q, k, v = randn(23, 4, HEAD_DIM), randn(23, KV_HEADS, HEAD_DIM), randn(23, KV_HEADS, HEAD_DIM) * 50
    batch, exact = make_batch(lengths, FP8, SCALES), make_batch(lengths, torch.float32, None)
    unrotated = torch.tensor([1.0, 0.0]).repeat_interleave(HEAD_DIM // 2).repeat(16, 1)
    q = ops.rotate_and_write(q, k, v, unrotated, batch, 1)
    meant_k, meant_v = ((x / s).to(FP8).float() * s for x, s in zip((k, v), SCALES[1], strict=True))
    attention.write_kv(meant_k, meant_v, exact, 1)
    expected = attention.paged_attention(q, exact, 1, 0.25)
    torch.testing.assert_close(ops.paged_attention(q, batch, 1, 0.25), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_whether_its_prompt_comes_whole_or_in_chunks(dtype):
    length, whole = 16, make_batch([16, 16], FP8, SCALES)
    q, k, v = (randn(2 * length, heads, HEAD_DIM).to(dtype) for heads in (4, KV_HEADS, KV_HEADS))
    attention.write_kv(k, v, whole, 1)
    expected = cpu_attention.paged_attention(q, whole, 1, 0.25)
    for rows in (1, 5):
        single, chunks = split([rows], [length])
        start = torch.tensor([0, rows], dtype=torch.int32)
        last = replace(
            whole, query_start=start, kv_len=whole.kv_len[:1], block_table=whole.block_table[:1],
            single=single, chunks=chunks, tiles=None,
        )  # fmt: skip
        found = cpu_attention.paged_attention(q[length - rows : length].contiguous(), last, 1, 0.25)
        assert torch.equal(found, expected[length - rows : length])


def test_values_that_are_too_large_become_the_largest_one():
    batch = make_batch([1, 1], FP8, SCALES)
    k = torch.tensor([1e4, -1e4])[:, None, None].expand(2, KV_HEADS, HEAD_DIM)
    attention.write_kv(k, k, batch, 1)
    written = batch.kv_cache[batch.block_table[:, 0].long(), 1, :, :, 0].float()  # [seq, K or V, heads, head_dim]
    assert (written[0, 0] == 448).all() and (written[1, 0] == -448).all()
    assert (written[0, 1] == 448).all(), "3.0 * 448 is below 10,000"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logits_are_close_to_those_with_a_cache_in_full_precision(tmp_path, family):
    folder = make_model(tmp_path, family)
    cfg = ModelConfig.from_folder(folder)
    model = build_model(cfg, ShardPlan(), torch.float32, "cpu")
    load_weights(model, folder, TPGroup.single())
    exact, rounded = (ByHand(model, cfg, tp=ShardPlan()) for _ in range(2))
    rounded.kv_caches = [cache.to(FP8) for cache in rounded.kv_caches]
    rounded.kv_scales = [torch.full((len(group.layers), 2), 0.05) for group in cfg.kv_groups]
    for tokens in ({0: list(range(30)), 1: [7, 8]}, {0: [5], 1: [3, 9, 1]}):
        found, expected = rounded.step(tokens), exact.step(tokens)
        error = (found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
        assert 1e-4 < error < 0.15


def with_scales(folder: Path, names: dict[str, float]) -> Path:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **{name: torch.tensor(value) for name, value in names.items()}}, file)
    return folder


@pytest.mark.parametrize("between", ["", "k_proj.", "attn."])
def test_scales_are_read_under_the_names_that_tools_give_them(tmp_path, between):
    folder = make_model(tmp_path, "llama")
    v = between.replace("k_", "v_")
    names = {f"model.layers.1.self_attn.{between}k_scale": 0.5, f"model.layers.2.self_attn.{v}v_scale": 0.25}
    found = fp8_kv_cache.read_scales(with_scales(folder, names), 3, torch.device("cpu"))
    assert found.tolist() == [[1.0, 1.0], [0.5, 1.0], [1.0, 0.25]]
    load_weights(build_model(ModelConfig.from_folder(folder), ShardPlan(), torch.float32, "cpu"), folder,
                 TPGroup.single())  # fmt: skip


def test_a_scale_that_is_no_scale_is_refused(tmp_path):
    folder = with_scales(make_model(tmp_path, "llama"), {"model.layers.1.self_attn.k_scale": 0.0})
    with pytest.raises(ModelFolderError, match="a k_scale or v_scale is not above 0"):
        fp8_kv_cache.read_scales(folder, 3, torch.device("cpu"))


def test_unknown_options_are_refused_by_their_key():
    with pytest.raises(ConfigError, match="quantization must be one of fp8, int8, int4, awq, gptq"):
        EngineConfig(quantization="int3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, fp8, fp8_e4m3"):
        EngineConfig(kv_cache_dtype="int8")  # type: ignore[arg-type]


def make_config(role: str | None = None, **options) -> EngineConfig:
    handoff = HandoffConfig(role=role, policy="always", transport="tcp") if role else None
    defaults = {
        "dtype": "float32",
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 4,
        "num_threads": 1,
        "kv_cache_dtype": "fp8",
    }
    return EngineConfig(**{**defaults, **options, "handoff": handoff})


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 4096), k=length)


def answer(core: EngineCore, tokens: list[int]) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    core.add(GenerateRequest(request_id="a", prompt=tokens, params=params))
    found: list[int] = []
    for delta in deltas_of(core, errors=True):
        found += delta.token_ids
    return found


def test_an_engine_stores_a_quarter_of_float32_and_says_what_it_costs_on_a_cpu(caplog):
    with caplog.at_level(logging.INFO, logger="engine.runner.fp8_kv_cache"):
        core = build_engine(make_config())
    assert core.ranks.runner.kv_caches[0].dtype == FP8
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("kv cache in FP8 on a CPU: each step converts what it reads") for line in said)
    assert any(line == "kv cache in FP8: no scales, all are 1" for line in said)
    assert len(answer(core, prompt(40))) == 8
    core.close()


def test_kv_in_fp8_travels_between_engines_as_it_is():
    alone = build_engine(make_config(enable_prefix_caching=False))
    with Pair(make_config("decode"), make_config("prefill"), (RankPool(), RankPool())) as pair:
        for length in (5, 40, 100):
            pair.ingress.add(f"{length}", prompt(length))
            assert pair.ingress.tokens(f"{length}") == answer(alone, prompt(length))
        pair.settle()
        assert sum(pair.decode.status.handoffs.results["received"].values()) == 3
    alone.close()
