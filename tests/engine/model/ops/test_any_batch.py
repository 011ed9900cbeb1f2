"""On a CPU a row has the same bits in any batch, whatever its sizes: ops as layers choose them, with sizes that no
kernel divides evenly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.model.layers.latent_attention import of_heads, packed_heads
from engine.model.ops import activation, linear, moe, norm, quantized_linear
from engine.model.ops.elementwise.norms import select_gated
from engine.model.ops.recurrent.linear_attention import select as select_linear_attention
from engine.model.ops.sparse import sparse_attention
from engine.model.quantization.weight import QuantizedWeight
from engine.model.state import CHUNK, StateSpec
from tests.cpu_kernels import needs_linear_kernel
from tests.engine.model.ops.recurrent.inputs import KINDS
from tests.state_batches import garbage, state_batch

CPU = torch.device("cpu")
ROWS = 40
PARTS = [(0, 1), (1, 2), (0, 3), (20, 27), (7, 23), (3, 36)]  # first row, and the row after the last
DTYPES = [torch.bfloat16, torch.float32]

Op = Callable[[slice], Tensor]


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def products(inputs: int, outputs: int) -> Callable[[torch.dtype], Op]:
    def op(dtype: torch.dtype) -> Op:
        x, weight = randn(ROWS, inputs, dtype=dtype), linear.pack(randn(outputs, inputs, dtype=dtype))
        bias = randn(outputs, dtype=dtype)
        return lambda rows: linear.linear(x[rows], weight, bias)

    return op


def gelu(dtype: torch.dtype) -> Op:
    x, weight = randn(ROWS, 130, dtype=dtype), linear.pack(randn(1000, 130, dtype=dtype))
    return lambda rows: linear.linear_gelu(x[rows], weight)


def parts_of_products(dtype: torch.dtype) -> Op:
    x, weights = randn(ROWS, 8 * 63, dtype=dtype), linear.pack_parts(randn(1000, 8 * 63, dtype=dtype), 8)
    return lambda rows: torch.cat(list(linear.linear_parts(x[rows], weights, 8)), dim=1)


def router(dtype: torch.dtype) -> Op:
    weight, bias = linear.pack_outputs(randn(321, 63, dtype=dtype), randn(321, dtype=dtype))
    x, top_k = randn(ROWS, 63, dtype=dtype), moe.select_top_k(dtype, CPU)
    return lambda rows: torch.cat(top_k(linear.linear(x[rows], weight, bias)[:, :321], 5, True), dim=1)


def heads_of_latents(dtype: torch.dtype) -> Op:
    x, weights = randn(ROWS, 3, 33, dtype=dtype), packed_heads(randn(3, 321, 33, dtype=dtype))
    return lambda rows: of_heads(x[rows], weights)


def experts(dtype: torch.dtype) -> Op:
    gate_up, down = (moe.pack_each(randn(3, *shape, dtype=dtype) / 30) for shape in ((2 * 388, 130), (130, 388)))
    x, chosen = randn(ROWS, 130, dtype=dtype), torch.stack([torch.randperm(3)[:2] for _ in range(ROWS)])
    weights, act = randn(ROWS, 2, dtype=dtype), activation.select("silu", dtype, CPU)
    return lambda rows: moe.mix_packed(x[rows], gate_up, down, act, chosen[rows], weights[rows])


def indexer(dtype: torch.dtype) -> Op:
    ops, lengths = sparse_attention.select(dtype, CPU), torch.randint(1, 90, (ROWS,), dtype=torch.int32)
    q, weights, keys = randn(ROWS, 3, 20, dtype=dtype), torch.randn(ROWS, 3), randn(100, 20, dtype=dtype)
    places = torch.stack([torch.randperm(100) for _ in range(ROWS)]).int()

    def op(rows: slice) -> Tensor:
        longest = int(lengths[rows].max())  # as many places as the longest of these rows needs
        scores = ops.index_scores(q[rows], weights[rows], keys, places[rows, :longest].contiguous(), lengths[rows])
        seen = torch.arange(longest) < lengths[rows, None]
        return torch.nn.functional.pad(scores.where(seen, 0.0), (0, 90 - longest))

    return op


def selected_tokens(width: int) -> Callable[[torch.dtype], Op]:
    def op(dtype: torch.dtype) -> Op:
        ops, counts = sparse_attention.select(dtype, CPU), torch.randint(0, 90, (ROWS,), dtype=torch.int32)
        q, vectors = randn(ROWS, 3, width, dtype=dtype), randn(100, width + 5, dtype=dtype)[:, :width]
        places = torch.stack([torch.randperm(100) for _ in range(ROWS)]).int()

        def attend(rows: slice) -> Tensor:
            own = places[rows, : max(1, int(counts[rows].max()))].contiguous()
            return ops.attend_selected(q[rows], vectors, own, counts[rows], 0.2, width - 3)

        return attend

    return op


def norms(dtype: torch.dtype) -> Op:
    x, y, weight = randn(ROWS, 77, dtype=dtype), randn(ROWS, 77, dtype=dtype), randn(77, dtype=dtype)
    _, add = norm.select(dtype, CPU)
    gated = select_gated(dtype, CPU)
    heads, of_head = randn(ROWS, 7, 11, dtype=dtype), randn(11, dtype=dtype)
    gates = randn(ROWS, 7, 11, dtype=dtype)
    return lambda rows: torch.cat(
        [*add(x[rows], y[rows], weight, 1e-6, 0.0), gated(heads[rows], gates[rows], of_head, 1e-6, False).flatten(1)],
        dim=1,
    )


def rounded_weights(bits: int, group_size: int) -> Callable[[torch.dtype], Op]:
    def op(dtype: torch.dtype) -> Op:
        inputs, outputs = 3 * group_size, 321
        values = torch.randint(-8, 8, (outputs, inputs)).to(torch.int8)
        weight = QuantizedWeight(values, torch.rand(outputs, 3) / 50, None, bits, None)
        multiply = quantized_linear.select(weight, dtype)
        dequantized = linear.pack(weight.dequantize(dtype)) if multiply is None else None
        x = randn(ROWS, inputs, dtype=dtype)
        return lambda rows: linear.linear(x[rows], dequantized) if multiply is None else multiply(x[rows], None)

    return op


def linear_attention(kind: str) -> Callable[[torch.dtype], Op]:
    """Rows that decode, each of a sequence of its own, after CHUNK + 2 tokens."""

    def op(dtype: torch.dtype) -> Op:
        key_dim, value_dim, heads, start = 21, 35, 2, CHUNK + 2
        channels = key_dim if kind == "a decay per channel" else 1
        attend = select_linear_attention(key_dim, value_dim, channels, CPU)
        spec = StateSpec(
            {"state": ((heads, key_dim, value_dim), "float32")},
            {
                "keys": ((heads, CHUNK, key_dim), "float32"),
                "values": ((heads, CHUNK, value_dim), "float32"),
                "decays": ((heads, CHUNK, channels), "float32"),
            },
        )
        kept = {name: torch.randn(tensor.shape) for name, tensor in garbage(spec, ROWS).items()}
        q, k, v = (randn(ROWS, heads, size, dtype=dtype) for size in (key_dim, key_dim, value_dim))
        decay, beta = -torch.rand(ROWS, heads, channels), torch.rand(ROWS, heads)

        def attended(rows: slice) -> Tensor:
            states = {name: tensor.clone() for name, tensor in kept.items()}
            batch = state_batch([(row, start, 1) for row in range(rows.start, rows.stop)])
            share, eps = (None, None) if kind == "without delta rule" else (beta[rows], 1e-6)
            return attend(q[rows], k[rows], v[rows], decay[rows], share, states, batch, 0.2, eps)

        return attended

    return op


SIZES = [(1, 1), (15, 500), (33, 321), (63, 1000), (130, 777), (1000, 100), (1540, 321), (4099, 40)]

OPS: dict[str, Callable[[torch.dtype], Op]] = {
    **{f"product of {inputs} with {outputs}": products(inputs, outputs) for inputs, outputs in SIZES},
    "product and GELU": gelu,
    "products of parts": parts_of_products,
    "router": router,
    "heads of latents": heads_of_latents,
    "experts": experts,
    "indexer": indexer,
    **{f"selected tokens of {width}": selected_tokens(width) for width in (20, 40, 48, 81)},
    **{f"linear attention, {kind}": linear_attention(kind) for kind in KINDS},
    "norms": norms,
    **{
        f"int{bits} in groups of {size}": rounded_weights(bits, size)
        for bits, size in [(4, 4), (4, 24), (8, 6), (8, 33)]
    },
}  # fmt: skip


@needs_linear_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_a_row_has_the_same_bits_alone_and_among_any_others(name: str, dtype: torch.dtype) -> None:
    op = OPS[name](dtype)
    alone = torch.cat([op(slice(row, row + 1)) for row in range(ROWS)])
    for first, last in PARTS:
        assert torch.equal(op(slice(first, last)), alone[first:last]), f"rows {first} to {last}"
