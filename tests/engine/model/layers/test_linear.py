from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model.layers.linear import ColumnParallelLinear, QKVLinear, RowParallelLinear
from engine.model.layers.mlp import GatedMLP
from engine.model.shard import Shard, ShardPlan
from tests.engine.model.layers.sharding import random_tensors, run_sharded
from tests.engine.model.model_configs import tiny_config

TOKENS, HIDDEN = 5, 12
X = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_of_a_merged_column_parallel_layer_hold_every_output_once(size):
    tensors = random_tensors({"a.weight": (8, HIDDEN), "a.bias": (8,), "b.weight": (4, HIDDEN), "b.bias": (4,)})

    def build(tp: ShardPlan) -> ColumnParallelLinear:
        outputs = {"a": Shard.of_rank((8,), 0, tp, "a"), "b": Shard.of_rank((4,), 0, tp, "b")}
        return ColumnParallelLinear(HIDDEN, outputs, bias=True)

    outputs = run_sharded(size, build, tensors, lambda rank: (X,))
    a = torch.cat([out[:, : 8 // size] for out in outputs], dim=-1)
    b = torch.cat([out[:, 8 // size :] for out in outputs], dim=-1)
    torch.testing.assert_close(a, F.linear(X, tensors["a.weight"], tensors["a.bias"]))
    torch.testing.assert_close(b, F.linear(X, tensors["b.weight"], tensors["b.bias"]))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parallel_ranks_sum_to_the_whole_layer_with_its_bias_once(size):
    tensors = random_tensors({"weight": (6, HIDDEN), "bias": (6,)})
    outputs = run_sharded(
        size, lambda tp: RowParallelLinear(HIDDEN, 6, tp, bias=True), tensors, lambda rank: (X.chunk(size, -1)[rank],)
    )
    for out in outputs:
        torch.testing.assert_close(out, F.linear(X, tensors["weight"], tensors["bias"]))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_query_head_meets_its_kv_head_on_its_rank(size):
    cfg = tiny_config(hidden_size=HIDDEN, num_heads=8, num_kv_heads=2, head_dim=4, qkv_bias=True)
    shapes = {"q.weight": (32, HIDDEN), "k.weight": (8, HIDDEN), "v.weight": (8, HIDDEN)}
    tensors = random_tensors({**shapes, "q.bias": (32,), "k.bias": (8,), "v.bias": (8,)})
    outputs = run_sharded(size, lambda tp: QKVLinear(cfg, tp), tensors, lambda rank: (X,))
    q, k, v = (F.linear(X, tensors[f"{name}.weight"], tensors[f"{name}.bias"]).unflatten(-1, (-1, 4)) for name in "qkv")
    torch.testing.assert_close(torch.cat([out[0] for out in outputs], dim=1), q)
    for rank, (queries, keys, values) in enumerate(outputs):
        for i in range(queries.shape[1]):
            kv_head = (rank * queries.shape[1] + i) // 4  # 8 query heads share 2 KV heads
            local = i // (queries.shape[1] // keys.shape[1])
            torch.testing.assert_close(keys[:, local], k[:, kv_head])
            torch.testing.assert_close(values[:, local], v[:, kv_head])


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_gated_mlp_is_the_same_on_any_number_of_ranks(size, activation):
    cfg = tiny_config(hidden_size=HIDDEN, intermediate_size=20, activation=activation)
    shapes = {"gate_up_proj.gate.weight": (20, HIDDEN), "gate_up_proj.up.weight": (20, HIDDEN)}
    tensors = random_tensors({**shapes, "down_proj.weight": (HIDDEN, 20)})
    gate, up, down = tensors.values()
    act = F.silu if activation == "silu" else lambda x: F.gelu(x, approximate="tanh")
    expected = F.linear(act(F.linear(X, gate)) * F.linear(X, up), down)
    for out in run_sharded(size, lambda tp: GatedMLP(cfg, tp), tensors, lambda rank: (X,)):
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 4), (12, 6, 4), (12, 4, 6)])
def test_a_model_whose_heads_do_not_divide_over_the_ranks_is_refused(heads, kv_heads, size):
    cfg = tiny_config(num_heads=heads, num_kv_heads=kv_heads)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        QKVLinear(cfg, ShardPlan(TPGroup(0, size)))


def test_a_size_that_does_not_divide_is_named():
    with pytest.raises(ConfigError, match="intermediate_size"):
        GatedMLP(tiny_config(intermediate_size=30), ShardPlan(TPGroup(0, 4)))
