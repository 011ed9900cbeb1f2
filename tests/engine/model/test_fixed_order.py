"""What `determinism: strict` refuses, and the order of its sums. Whole engines: tests/engine/offline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model import fixed_order
from engine.model.fixed_order import PARTS, FixedOrder
from engine.model.shard import INPUTS, Shard
from tests.ranks import make_ranks, on_all


@pytest.mark.parametrize(
    ("field", "options", "quantization", "device"),
    [
        ("device", {}, None, "cuda"),
        ("torch_compile", {"torch_compile": True}, None, "cpu"),
        ("quantization", {"quantization": "int8"}, object(), "cpu"),
        ("quantization", {}, object(), "cpu"),  # the model's own
    ],
)
def test_what_may_have_other_bits_is_refused_by_its_field(
    field: str, options: dict[str, Any], quantization: object, device: str
) -> None:
    config = EngineConfig(model="none", determinism="strict", **options)
    model: Any = SimpleNamespace(quantization=quantization)
    with pytest.raises(ConfigError, match=f"configuration: {field} .*`strict` does not support it yet"):
        fixed_order.check(config, model, torch.device(device))


def test_a_number_of_ranks_that_does_not_divide_the_parts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel.* 3"):
        FixedOrder(TPGroup(rank=0, size=3))


def test_inputs_that_cannot_be_cut_into_the_parts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"determinism.*intermediate_size.*12.*no multiple of 8"):
        Shard.of_rank((6, 12), INPUTS, FixedOrder(TPGroup.single()), "intermediate_size")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_added_up_in_one_order_whoever_holds_them(dtype: torch.dtype) -> None:
    parts = torch.randn(PARTS, 5, 24, generator=torch.Generator().manual_seed(0)).mul(1e3).to(dtype)
    alone = FixedOrder(TPGroup.single()).sum(list(parts.clone()))
    a, b, c, d, e, f, g, h = parts.float()
    assert torch.equal(alone, (((a + b) + (c + d)) + ((e + f) + (g + h))).to(dtype))
    for size in (2, 4, 8):
        groups = make_ranks(size)
        own = parts.unflatten(0, (size, -1))
        for total in on_all(groups, lambda rank: FixedOrder(groups[rank]).sum(list(own[rank].clone()))):  # noqa: B023
            assert torch.equal(total, alone)


def test_a_rank_has_as_many_rows_of_the_vocabulary_as_our_kernel_computes_at_a_time() -> None:
    linear = pytest.importorskip("engine.model.ops.cpu.linear")
    assert fixed_order.VOCAB_MULTIPLE % linear.COLUMN == 0
