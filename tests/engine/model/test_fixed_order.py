"""What `determinism: strict` refuses, and the order of its sums. Whole engines: tests/engine/offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model import fixed_order
from engine.model.fixed_order import PARTS, in_fixed_order
from engine.model.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.model.models.registry import build
from engine.model.shard import INPUTS, OUTPUTS, Shard, ShardPlan
from tests.cpu_kernels import needs_linear_kernel
from tests.engine.model.model_configs import tiny_config
from tests.models import COMMON
from tests.ranks import make_plans, on_all
from tests.transformers_models import make_transformers_model


@pytest.mark.parametrize(
    ("field", "options", "quantization"),
    [
        ("torch_compile", {"torch_compile": True}, None),
        ("quantization", {"quantization": "int8"}, object()),
        ("quantization", {}, object()),  # the model's own
    ],
)
def test_what_may_have_other_bits_is_refused_by_its_field(
    field: str, options: dict[str, Any], quantization: object
) -> None:
    config = EngineConfig(model="none", determinism="strict", **options)
    model: Any = SimpleNamespace(quantization=quantization, transformers="", encoder=None, architecture="a")
    with pytest.raises(ConfigError, match=f"configuration: {field} .*`strict` does not support this value yet"):
        fixed_order.check(config, model, torch.device("cpu"))


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_gpu_is_refused_with_the_reason(device: str) -> None:
    config, model = EngineConfig(model="none", determinism="strict"), tiny_config(vocab_size=96)
    with pytest.raises(ConfigError, match="determinism must be left out on a GPU, because libraries choose by the num"):
        fixed_order.check(config, model, torch.device(device))


@pytest.mark.parametrize("architecture", ["OlmoeForCausalLM", "OlmoForCausalLM", "ModernBertModel"])
def test_a_family_whose_bits_no_test_compares_is_refused_by_its_name(tmp_path: Path, architecture: str) -> None:
    if architecture == "ModernBertModel":
        transformers.ModernBertModel(transformers.ModernBertConfig(**COMMON)).save_pretrained(tmp_path)
    else:
        make_transformers_model(tmp_path, architecture)
    with pytest.raises(ConfigError, match=f"model must be .*determinism left out.*got '{architecture}'"):
        build_engine(EngineConfig(model=str(tmp_path), determinism="strict", num_gpu_blocks_override=16, num_threads=1))


def test_a_number_of_ranks_that_does_not_divide_the_parts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size.* 3"):
        in_fixed_order(ShardPlan(TPGroup(rank=0, size=3)))


def test_inputs_that_cannot_be_cut_into_the_parts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"determinism.*intermediate_size.*12.*no multiple of 8"):
        Shard.of_rank((6, 12), INPUTS, in_fixed_order(ShardPlan()), "intermediate_size")


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_linear_kernel)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inputs", [64, 1024, 1088])
def test_a_rank_gives_the_bits_of_the_whole_layer_whatever_number_of_outputs_it_has(inputs, bias, dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weights, biases = torch.randn(2, 192, inputs, generator=generator), torch.randn(2, 192, generator=generator)
    x = torch.randn(150, inputs, generator=generator).to(dtype)

    def outputs(rank: int, size: int) -> list[Tensor]:
        tp = ShardPlan(TPGroup(rank, size))
        parts = {name: Shard.of_rank((192,), OUTPUTS, tp, "intermediate_size") for name in ("gate", "up")}
        layer = build(lambda: ColumnParallelLinear(inputs, parts, bias), dtype, "cpu")
        fixed_order.pad_layers(layer)
        targets = iter(layer.shards().values())
        for whole in (*weights, *biases) if bias else weights:
            shard, target = next(targets)
            target.copy_(whole.narrow(OUTPUTS, shard.start, shard.size))
        layer.pack()
        return list(layer(x).chunk(2, dim=1))

    whole = outputs(0, 1)
    for size in (2, 4, 8):  # of which a rank has 192, 96 or 48 outputs
        of_ranks = [outputs(rank, size) for rank in range(size)]
        for expected, *found in zip(whole, *of_ranks, strict=True):
            assert torch.equal(torch.cat(found, dim=1), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_added_up_in_one_order_whoever_holds_them(dtype: torch.dtype) -> None:
    parts = torch.randn(PARTS, 5, 24, generator=torch.Generator().manual_seed(0)).mul(1e3).to(dtype)
    alone = in_fixed_order(ShardPlan()).ranks.sum(list(parts.clone()))
    a, b, c, d, e, f, g, h = parts.float()
    assert torch.equal(alone, (((a + b) + (c + d)) + ((e + f) + (g + h))).to(dtype))
    for size in (2, 4, 8):
        plans = make_plans(size, fixed_order=True)
        own = parts.unflatten(0, (size, -1))
        for total in on_all(plans, lambda rank: plans[rank].ranks.sum(list(own[rank].clone()))):  # noqa: B023
            assert torch.equal(total, alone)


def test_a_rank_has_as_many_rows_of_the_vocabulary_as_our_kernel_computes_at_a_time() -> None:
    linear = pytest.importorskip("engine.model.ops.cpu.linear")
    assert fixed_order.OUTPUTS_MULTIPLE % linear.COLUMN == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_split_over_eight_ranks_has_the_bits_of_one_that_is_whole(dtype: torch.dtype) -> None:
    weight, x = torch.randn(2, 64, PARTS * 160, generator=torch.Generator().manual_seed(0)).to(dtype)

    def parts(rank: int, size: int) -> Sequence[Tensor]:
        layer = build(
            lambda: RowParallelLinear(PARTS * 160, 64, in_fixed_order(ShardPlan(TPGroup(rank, size)))), dtype, "cpu"
        )
        ((shard, target),) = layer.shards().values()
        target.copy_(own := weight.narrow(INPUTS, shard.start, shard.size))
        layer.pack()
        return layer.partials(x.narrow(INPUTS, shard.start, own.shape[INPUTS]))

    for i, part in enumerate(parts(0, 1)):
        assert torch.equal(part, parts(i, PARTS)[0])
