"""The fast CPU ops against their plain twins."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.batch import Batch, split
from engine.model.layers import latent_attention as latent
from engine.model.ops import (
    activation,
    argmax,
    attention,
    encoder_attention,
    linear,
    moe,
    norm,
    rope,
    tree_sum,
)
from engine.model.ops.cpu import activation as cpu_activation
from engine.model.ops.cpu import attention as cpu_attention
from engine.model.ops.cpu import encoder_attention as cpu_encoder_attention
from engine.model.ops.cpu import linear as cpu_linear
from engine.model.ops.cpu import norm as cpu_norm
from engine.model.ops.cpu import rope as cpu_rope
from engine.model.ops.cpu import sampling as cpu_sampling
from engine.model.ops.cpu.kernel import TokenCount
from engine.model.ops.cpu.moe import experts as cpu_experts
from engine.model.ops.cpu.moe import routing as cpu_routing
from engine.model.ops.elementwise import activations
from engine.model.ops.sampling import RandomRows
from tests.cpu_kernels import needs_linear_kernel
from tests.engine.model.ops.gpu.paged import image_end

TOLERANCE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2}}
DTYPES = st.sampled_from(list(TOLERANCE))
PROFILE = settings(max_examples=60, derandomize=True)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@PROFILE
@given(tokens=st.integers(1, 40), size=st.integers(1, 100), shift=st.sampled_from([0.0, 1.0]), dtype=DTYPES)
def test_rms_norm_equals_plain(tokens, size, shift, dtype):
    x, weight = randn(tokens, size, dtype=dtype), randn(size, dtype=dtype)
    expected = norm.rms_norm_plain(x, weight, 1e-6, shift)
    torch.testing.assert_close(cpu_norm.rms_norm(x, weight, 1e-6, shift), expected, **TOLERANCE[dtype])


@PROFILE
@given(tokens=st.integers(1, 20), heads=st.integers(1, 4), size=st.sampled_from([8, 33, 64]), dtype=DTYPES)
def test_rms_norm_of_heads_reads_a_part_of_the_merged_projection(tokens, heads, size, dtype):
    merged, weight = randn(tokens, heads + 3, size, dtype=dtype), randn(size, dtype=dtype)
    x = merged[:, 1 : 1 + heads]
    expected = norm.rms_norm_plain(x, weight, 1e-6, 0.0)
    torch.testing.assert_close(cpu_norm.rms_norm(x, weight, 1e-6, 0.0), expected, **TOLERANCE[dtype])


@PROFILE
@given(tokens=st.integers(1, 40), size=st.integers(1, 100), shift=st.sampled_from([0.0, 1.0]), dtype=DTYPES)
def test_a_sum_and_its_norm_have_the_bits_of_both_computed_apart(tokens, size, shift, dtype):
    x, y, weight = (randn(*shape, dtype=dtype) for shape in ((tokens, size), (tokens + 1, size), (size,)))
    total, normed = cpu_norm.add_rms_norm(x, y[1:], weight, 1e-6, shift)
    assert torch.equal(total, x + y[1:])
    assert torch.equal(normed, cpu_norm.rms_norm(total, weight, 1e-6, shift))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [16, 24, 48, 100])
def test_a_norm_has_the_same_bits_wherever_its_arrays_are_in_memory(size, dtype, gated):
    x, gate, weight = (
        randn(size, dtype=torch.float32 if gated else dtype),
        randn(size, dtype=dtype),
        randn(size, dtype=dtype),
    )
    numbers, found = torch.tensor([1e-6, 0.0]), set()
    for distance in range(0, 8 * size, 8):  # from the end of the weight to the output, in bytes
        memory = torch.zeros(16 * size, dtype=torch.uint8)
        near, out = (memory[start:][: size * dtype.itemsize].view(dtype) for start in (0, 4 * size + distance))
        near.copy_(weight)
        if gated:
            cpu_norm.GATED_RMS_NORM.launch(
                dtype, 1, x, gate, near, out, numbers, TokenCount(1), 1, size, size, size, 0
            )  # fmt: skip
        else:
            cpu_norm.RMS_NORM.launch(dtype, 1, x, near, out, numbers, TokenCount(1), size, 1, size, size)
        found.add(bytes(out.view(torch.uint8).tolist()))
    assert len(found) == 1


@PROFILE
@given(
    rows=st.integers(1, 5),
    size=st.sampled_from([1, 7, 1024, 3000]),
    planted=st.lists(st.sampled_from([float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.5])),
    below=st.booleans(),
)
def test_the_likeliest_token_is_the_lowest_of_equals_and_nan_if_there_is_any(rows, size, planted, below):
    logits = randn(rows, size, dtype=torch.float32)
    logits[:, ::2] = logits[:, ::2].bfloat16()  # equal ones
    if below:  # zeros that count
        logits = -logits.abs()
    generator = torch.Generator().manual_seed(len(planted))
    for value in planted:
        logits[torch.randint(rows, (1,), generator=generator), torch.randint(size, (2,), generator=generator)] = value
    values, ids = cpu_sampling.argmax(logits[:, : max(size - 1, 1)])
    expected, where = argmax.argmax_plain(logits[:, : max(size - 1, 1)])
    torch.testing.assert_close(values, expected, atol=0, rtol=0, equal_nan=True)
    assert ids.tolist() == where.tolist()


@PROFILE
@given(
    size=st.sampled_from([1, 50, 512, 513, 3000]),
    scale=st.sampled_from([0.1, 3.0, 300.0]),
    temperature=st.sampled_from([0.01, 0.6, 2.0]),
    seed=st.integers(0, 1000),
)
def test_a_number_draws_the_token_whose_share_of_the_weights_it_falls_into(size, scale, temperature, seed):
    """Up to the rounding of float32, by rows in any order, of logits of which half are banned."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, size, generator=generator) * scale
    logits[:, 1::2] = -torch.inf
    rows, numbers = torch.tensor([6, 0, 3, 3, 5]), torch.tensor([0.0, 0.3, 0.6, 0.97, 1 - 2**-24])[:, None]
    numbers = numbers[torch.randperm(5, generator=generator)]
    group = RandomRows(rows, torch.full((5, 1), temperature), numbers, *[torch.ones(5, 1)] * 2, width=0)
    tokens = cpu_sampling.draw_rows(logits, logits.amax(-1), group)
    after = (logits[rows].double() / temperature).softmax(-1).cumsum(-1)
    before = torch.cat([torch.zeros(5, 1), after[:, :-1]], dim=1).gather(1, tokens[:, None])
    assert (tokens % 2 == 0).all()
    assert (before - 1e-5 <= numbers).all() and (numbers <= after.gather(1, tokens[:, None]) + 1e-5).all()


@PROFILE
@given(
    name=st.sampled_from(["silu", "gelu_pytorch_tanh", "swigluoai"]),
    tokens=st.integers(1, 40),
    size=st.integers(1, 100),
    scale=st.sampled_from([1.0, 30.0, 300.0]),
    dtype=DTYPES,
)
def test_a_gated_activation_equals_plain(name, tokens, size, scale, dtype):
    x = randn(tokens, 2 * size, dtype=dtype) * scale
    found = activations.select(name, dtype, torch.device("cpu"))(x)
    expected = activations.PLAIN[name](x.double()).to(dtype)  # in float32, GELU by tanh has 0 for small numbers
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


@PROFILE
@given(
    tokens=st.integers(1, 40),
    heads=st.integers(1, 4),
    half=st.integers(1, 40),
    rest=st.sampled_from([0, 1, 16]),
    dtype=DTYPES,
)
def test_rotate_equals_plain_and_leaves_its_neighbours_alone(tokens, heads, half, rest, dtype):
    merged, table = randn(tokens, heads + 2, 2 * half + rest, dtype=dtype), randn(50, 2 * half, dtype=dtype)
    positions = torch.arange(tokens).flip(0)
    before = merged.clone()
    expected = rope.rotate_plain(merged[:, 1:-1], table, positions)
    torch.testing.assert_close(cpu_rope.rotate(merged[:, 1:-1], table, positions), expected, **TOLERANCE[dtype])
    assert torch.equal(merged[:, 0], before[:, 0])
    assert torch.equal(merged[:, -1], before[:, -1])


@PROFILE
@given(
    sequences=st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 1, 2, 9])), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    head_dim=st.sampled_from([8, 24, 64]),
    block_size=st.sampled_from([1, 4, 16, 20]),
    window=st.sampled_from([None, 1, 7, 16, 33]),
    softcap=st.sampled_from([None, None, 1.5, 50.0]),
    sinks=st.booleans(),
    chunk=st.sampled_from([None, None, 1, 32]),
    images=st.booleans(),
    dtype=DTYPES,
)
def test_attention_over_pages_equals_plain(
    sequences, heads, head_dim, block_size, window, softcap, sinks, chunk, images, dtype
):
    """Each sequence: tokens cached before, and tokens in this step."""
    num_heads, kv_heads = heads
    counts, kv_lens = [n for _, n in sequences], [cached + n for cached, n in sequences]
    width = -(-max(kv_lens) // block_size)
    blocks = torch.randperm(len(sequences) * width, generator=torch.Generator().manual_seed(1))
    table = blocks.view(len(sequences), width).int()
    position = torch.cat([torch.arange(total - n, total) for n, total in zip(counts, kv_lens, strict=True)])
    sequence = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    single, chunks = split(counts, kv_lens)
    ends = [image_end(*sequences[i], p) for i, p in zip(sequence.tolist(), position.tolist(), strict=True)]
    batch = Batch(
        positions=position,
        slot_mapping=table[sequence, position // block_size].long() * block_size + position % block_size,
        query_start=torch.tensor([0, *counts]).cumsum(0).int(),
        kv_len=torch.tensor(kv_lens, dtype=torch.int32),
        block_table=table,
        kv_cache=randn(len(blocks), 2, 2, kv_heads, block_size, head_dim, dtype=dtype),
        single=single,
        chunks=chunks,
        span_ends=torch.tensor(ends, dtype=torch.int32) if images else None,
    )
    merged = randn(sum(counts), num_heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, v = merged.split((num_heads, kv_heads, kv_heads), dim=1)
    cache, angles = batch.kv_cache.clone(), randn(80, 8, dtype=dtype)  # for a part of a head, or all of it
    expected = attention.rotate_and_write(q, k, v, angles, batch, 1)
    written, batch.kv_cache = batch.kv_cache, cache
    q = cpu_attention.rotate_and_write(q, k, v, angles, batch, 1)
    torch.testing.assert_close(q, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(batch.kv_cache, written, **TOLERANCE[dtype])
    scores = {"softcap": softcap, "sinks": randn(num_heads, dtype=dtype) if sinks else None, "chunk": chunk}
    expected = attention.paged_attention(q, batch, 1, head_dim**-0.5, window, **scores)
    found = cpu_attention.paged_attention(q, batch, 1, head_dim**-0.5, window, **scores)
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_nothing_is_written_or_read_for_padding(dtype, decodes):
    """Rows without slots, a row and a chunk of sequences without KV, and an entry of `single` that is no sequence."""
    counts, kv_lens = ([1, 1, 1], [5, 0, 9]) if decodes else ([1, 1, 3, 2], [5, 0, 9, 0])
    tokens = sum(counts) + 2
    single, chunks = split(counts, kv_lens)
    batch = Batch(
        positions=torch.zeros(tokens, dtype=torch.int64),
        slot_mapping=torch.tensor([4, -1, 8, *([-1, -1] if decodes else [9, 10, -1, -1, -1, -1])]),
        query_start=torch.tensor([0, *counts]).cumsum(0).int(),
        kv_len=torch.tensor(kv_lens, dtype=torch.int32),
        block_table=torch.tensor([[0], [2**31 - 1], [0], [2**31 - 1]], dtype=torch.int32)[: len(counts)],
        kv_cache=randn(3, 1, 2, 2, 16, 32, dtype=dtype),
        single=torch.cat((single, single.new_tensor([-1]))),
        chunks=chunks,
    )
    q, k, v = randn(tokens, 8, 32, dtype=dtype).split((4, 2, 2), dim=1)
    cache, unrotated = batch.kv_cache.clone(), torch.tensor([1.0, 0.0], dtype=dtype).repeat_interleave(16)[None]
    cpu_attention.rotate_and_write(q, k, v, unrotated, batch, 0)
    written, batch.kv_cache = batch.kv_cache, cache
    attention.rotate_and_write(q, k, v, unrotated, batch, 0)
    assert torch.equal(written, batch.kv_cache)
    found = cpu_attention.paged_attention(q, batch, 0, 0.2)[: sum(counts)]
    expected = attention.paged_attention(q, batch, 0, 0.2)[: sum(counts)]
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


@needs_linear_kernel
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "outputs", "inputs"),
    [
        (torch.bfloat16, 192, 2),
        (torch.bfloat16, 128, 768),
        (torch.bfloat16, 64, 1058),
        (torch.bfloat16, 128, 4864),
        (torch.float32, 128, 63),
    ],
)
def test_our_product_equals_the_plain_one_and_a_row_has_the_same_bits_beside_any_others(dtype, outputs, inputs, bias):
    rows = 2 * cpu_linear.BLOCK_ROWS + 5
    x, weight = randn(rows, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype)
    offset = randn(outputs, dtype=dtype) if bias else None
    packed = cpu_linear.pack(weight)
    together = linear.linear(x, packed, offset)
    torch.testing.assert_close(together, linear.linear(x, weight, offset), **TOLERANCE[dtype])
    for count in (*range(1, 15), cpu_linear.BLOCK_ROWS):
        assert torch.equal(linear.linear(x[3 : 3 + count], packed, offset), together[3 : 3 + count]), f"{count} rows"


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_products_of_all_parts_of_the_inputs_are_those_of_each_part_alone(dtype):
    x, weight = randn(5, 8 * 24, dtype=dtype), randn(128, 8 * 24, dtype=dtype)
    found = linear.linear_parts(x, linear.pack_parts(weight, 8), 8)
    for part, own, rows in zip(found, weight.chunk(8, dim=1), x.chunk(8, dim=1), strict=True):
        (alone,) = linear.linear_parts(rows, linear.pack_parts(own, 1), 1)
        assert torch.equal(part, alone)
        torch.testing.assert_close(part, linear.linear(rows, own), **TOLERANCE[dtype])
    assert torch.equal(tree_sum.tree_sum(found), tree_sum.tree_sum_plain([p.float() for p in found]).to(dtype))


@needs_linear_kernel
def test_an_embedding_reads_its_rows_from_the_packed_weight_of_a_head():
    weight, ids = randn(192, 48, dtype=torch.bfloat16), torch.tensor([191, 0, 64, 63, 64])
    assert torch.equal(linear.rows_of(linear.pack(weight), ids), weight[ids])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_linear_layer_equals_the_plain_one(dtype, tokens, bias):
    x, weight = randn(tokens, 48, dtype=dtype), randn(33, 48, dtype=dtype)
    offset = randn(33, dtype=dtype) if bias else None
    expected = linear.linear(x, weight, offset)
    packed = linear.pack(weight)
    packs = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert linear.is_packed(packed) == (packs and torch.backends.mkldnn.is_available())
    torch.testing.assert_close(linear.linear(x, packed, offset), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "packed", "inputs"),
    [
        (torch.bfloat16, True, 1024),
        (torch.bfloat16, False, 2048),
        (torch.float32, True, 2048),
        pytest.param(torch.bfloat16, True, 2048, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, False, 1024, marks=pytest.mark.slow),
        pytest.param(torch.float32, True, 1024, marks=pytest.mark.slow),
    ],
)
def test_a_row_of_a_linear_layer_has_the_same_bits_alone_and_among_others(dtype, packed, inputs):
    rows = 272
    x, weight = randn(rows, inputs, dtype=dtype), randn(768, inputs, dtype=dtype)
    ready = linear.pack(weight)
    if not linear.is_packed(ready):
        pytest.skip("oneDNN does not support this dtype here")
    weight = ready if packed else weight
    together = linear.linear(x, weight)
    for size in (1, 2, 3, 16, 59, 256):
        apart = torch.cat([linear.linear(rows, weight) for rows in x.split(size)])
        assert torch.equal(apart, together), f"{size} rows at a time"


@settings(PROFILE, max_examples=20)
@given(
    cached=st.integers(0, 300),
    count=st.integers(2, 20),
    others=st.integers(0, 5),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3), (7, 1)]),
    head_dim=st.sampled_from([12, 16, 24, 48, 64]),
    block_size=st.sampled_from([4, 16, 20]),
    window=st.sampled_from([None, 33, 100]),
    dtype=DTYPES,
)
def test_a_row_of_attention_has_the_same_bits_in_a_chunk_and_by_itself(
    cached, count, others, heads, head_dim, block_size, window, dtype
):
    """others: sequences that decode beside it."""
    num_heads, kv_heads = heads
    total = cached + count
    width = -(-total // block_size)
    table = torch.randperm((others + 1) * width, generator=torch.Generator().manual_seed(1)).view(-1, width).int()
    cache = randn(table.numel(), 1, 2, kv_heads, block_size, head_dim, dtype=dtype)
    q = randn(count + others, num_heads, head_dim, dtype=dtype)

    def attend(q: torch.Tensor, table: torch.Tensor, counts: list[int], kv_lens: list[int]) -> torch.Tensor:
        single, chunks = split(counts, kv_lens)
        nowhere = torch.zeros(sum(counts), dtype=torch.int64)  # nothing is rotated or written
        start, kv_len = torch.tensor([0, *counts]).cumsum(0).int(), torch.tensor(kv_lens, dtype=torch.int32)
        batch = Batch(nowhere, nowhere, start, kv_len, table, cache, single, chunks)
        return cpu_attention.paged_attention(q, batch, 0, head_dim**-0.5, window)

    chunk = attend(q, table, [count] + [1] * others, [total] * (others + 1))
    for row in range(count):
        alone = attend(q[row : row + 1], table[:1], [1], [cached + row + 1])
        assert torch.equal(alone[0], chunk[row]), row
    decoding = attend(q[count - 1 :], table, [1] * (others + 1), [total] * (others + 1))
    assert torch.equal(decoding, chunk[count - 1 :])


def whole_sequences(lengths: list[int]) -> Batch:
    """A step of an encoder, as far as attention looks at it."""
    none, single_and_chunks = torch.zeros(0, dtype=torch.int64), split(lengths, lengths)
    start, lens = torch.tensor([0, *lengths]).cumsum(0).int(), torch.tensor(lengths, dtype=torch.int32)
    return Batch(none, none, start, lens, none, none, *single_and_chunks)


@settings(PROFILE, max_examples=30)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 7, 33, 128, 129, 300]), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    head_dim=st.sampled_from([8, 32, 40, 64]),
    window=st.sampled_from([None, 1, 5, 64, 200]),
    dtype=DTYPES,
)
def test_attention_of_whole_sequences_equals_plain(lengths, heads, head_dim, window, dtype):
    num_heads, kv_heads = heads
    merged = randn(sum(lengths), num_heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, v = merged.split((num_heads, kv_heads, kv_heads), dim=1)
    batch = whole_sequences(lengths)
    expected = encoder_attention.encoder_attention_plain(q, k, v, batch, head_dim**-0.5, window)
    found = cpu_encoder_attention.encoder_attention(q, k, v, batch, head_dim**-0.5, window)
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])
    if len(lengths) > 1:  # a sequence has the same bits alone
        first, alone = slice(0, lengths[0]), whole_sequences(lengths[:1])
        own = cpu_encoder_attention.encoder_attention(q[first], k[first], v[first], alone, head_dim**-0.5, window)
        assert torch.equal(own, found[first])


def test_what_is_not_a_number_stays_in_its_own_sequence():
    q, k, v = randn(3, 90, 2, 16, dtype=torch.float32)
    expected = cpu_encoder_attention.encoder_attention(q, k, v, whole_sequences([30, 20, 40]), 0.25, None)
    q[:30] = k[:30] = v[:30] = torch.nan
    found = cpu_encoder_attention.encoder_attention(q, k, v, whole_sequences([30, 20, 40]), 0.25, None)
    assert torch.equal(found[30:], expected[30:])


def test_what_another_request_left_in_a_block_is_not_read():
    q, cache = randn(10, 2, 16, dtype=torch.bfloat16), randn(3, 1, 2, 2, 16, 16, dtype=torch.bfloat16)
    start, table = torch.tensor([0, 10], dtype=torch.int32), torch.tensor([[2, 1, 0]], dtype=torch.int32)
    nowhere = torch.zeros(10, dtype=torch.int64)
    batch = Batch(nowhere, nowhere, start, torch.tensor([21], dtype=torch.int32), table, cache, *split([10], [21]))
    expected = cpu_attention.paged_attention(q, batch, 0, 0.25)
    cache[0], cache[1, :, :, :, 5:] = torch.nan, torch.nan
    assert torch.equal(cpu_attention.paged_attention(q, batch, 0, 0.25), expected)
    decoding = Batch(nowhere[:1], nowhere[:1], start[:2] // 10, batch.kv_len, table, cache, *split([1], [21]))
    assert torch.equal(cpu_attention.paged_attention(q[-1:], decoding, 0, 0.25), expected[-1:])


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names a CPU of this kind")
def test_attention_and_products_equal_the_plain_ones_on_a_cpu_without_avx512(tmp_path):
    program = """
import sys, pytest, torch
from llvmlite import binding
torch.cpu._is_avx512_bf16_supported = lambda: False
features = {name: found and "avx512" not in name for name, found in binding.get_host_cpu_features().items()}
binding.get_host_cpu_features = lambda: features
sys.exit(pytest.main([sys.argv[1], "-q", "-p", "no:xdist", "-k", "(attention or product) and not avx512"]))
"""
    other_cpu = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+avx2,+fma", "NUMBA_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", program, Path(__file__)], env=os.environ | other_cpu, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


@PROFILE
@given(
    tokens=st.integers(1, 20), groups=st.sampled_from([(1, 1), (4, 2), (4, 1), (2, 2)]), k=st.integers(1, 4),
    normalise=st.booleans(), dtype=DTYPES,
)  # fmt: skip
def test_routers_choose_the_same_experts_as_plain(tokens, groups, k, normalise, dtype):
    logits, correction = randn(tokens, 3 + 16, dtype=dtype)[:, 3:], randn(16, dtype=torch.float32)
    pairs = [(cpu_routing.top_k_softmax(logits, k, normalise), moe.top_k_softmax_plain(logits, k, normalise))]
    wide, scale = randn(tokens, 16, dtype=torch.float32), (2.5, dtype)
    options = groups, k, normalise, *scale
    pairs += [
        (cpu_routing.top_k_sigmoid(wide, correction, *options), moe.top_k_sigmoid_plain(wide, correction, *options)),
        (cpu_routing.top_k_of_groups(wide, groups, k, *scale), moe.top_k_of_groups_plain(wide, groups, k, *scale)),
    ]
    for (experts, weights), (expected, shares) in pairs:
        if dtype == torch.float32 or experts.dtype == dtype:  # there are equal logits in bfloat16
            assert torch.equal(experts, expected)
        torch.testing.assert_close(weights, shares, **TOLERANCE[dtype])


def test_of_equal_logits_the_first_are_chosen_and_nan_chooses_known_experts():
    experts, weights = cpu_routing.top_k_softmax(torch.zeros(1, 16), 3, True)
    assert experts.tolist() == [[0, 1, 2]] and torch.allclose(weights, torch.full((1, 3), 1 / 3))
    experts, _ = cpu_routing.top_k_sigmoid(
        torch.full((2, 16), torch.nan), torch.zeros(16), (4, 2), 3, True, 1.0, torch.float32
    )
    assert experts.min() >= 0 and experts.max() < 16


@needs_linear_kernel
@pytest.mark.parametrize(("tokens", "num_experts"), [(1, 16), (7, 16), (40, 3), (500, 2)])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_equal_plain_and_a_token_has_the_same_bits_alone(tokens, num_experts, biased):
    size, inner, k = 128, 64, 2
    gate_up, down = (
        0.1 * randn(num_experts, *shape, dtype=torch.bfloat16) for shape in ((2 * inner, size), (size, inner))
    )
    biases = (randn(num_experts, 2 * inner, dtype=torch.bfloat16), randn(num_experts, size, dtype=torch.bfloat16))
    x, own = randn(tokens, size, dtype=torch.bfloat16), biases if biased else None
    experts, weights = moe.top_k_softmax_plain(randn(tokens, num_experts, dtype=torch.bfloat16), k, True)
    packed = [moe.pack_each(weight) for weight in (gate_up, down)]

    def mix(rows: slice) -> torch.Tensor:
        return cpu_experts.mix_experts(x[rows], *packed, cpu_activation.silu_mul, experts[rows], weights[rows], own)

    found = mix(slice(None))
    exact = [value.float() for value in (x, gate_up, down)]
    wide = tuple(bias.float() for bias in own) if own else None
    expected = moe.mix_experts_plain(*exact, activation.silu_mul, experts, weights.float(), wide)
    torch.testing.assert_close(found.float(), expected, atol=3e-2, rtol=3e-2)
    for row in (0, tokens // 2, tokens - 1):
        assert torch.equal(found[row : row + 1], mix(slice(row, row + 1)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "num_experts", "first"), [(1, 16, 8), (40, 4, 0), (300, 5, 3), (9, 6, 6)])
def test_products_of_experts_of_other_ranks_are_left_out_and_rows_have_the_bits_of_all(
    tokens, num_experts, first, dtype
):
    """A rank has the experts before `first`, and another one the rest."""
    size, inner, k = 128, 64, 2
    gate_up, down = (0.1 * randn(num_experts, *shape, dtype=dtype) for shape in ((2 * inner, size), (size, inner)))
    x, chosen = randn(tokens, size, dtype=dtype), randn(tokens, num_experts, dtype=dtype)
    experts, weights = moe.top_k_softmax_plain(chosen, k, True)
    act, whole = cpu_activation.silu_mul, [moe.pack_each(weight) for weight in (gate_up, down)]
    expected = moe.mix_packed(x, *whole, act, experts, weights)
    sums, rows = [], []
    for own in (range(first), range(first, num_experts)):
        if own:
            packed = [moe.pack_each(weight[own.start : own.stop]) for weight in (gate_up, down)]
            here = (experts >= own.start) & (experts < own.stop)
            local = torch.where(here, experts - own.start, len(own))
            sums.append(moe.mix_packed(x, *packed, act, local, weights).float())
            rows.append(moe.pair_rows(x, *packed, act, local))
            assert not rows[-1][~here].any() and not sums[-1][~here.any(1)].any()
    torch.testing.assert_close(sum(sums), expected.float(), **TOLERANCE[dtype])
    assert torch.equal(moe.combine_rows(sum(rows), experts, weights, isinstance(whole[0], torch.Tensor)), expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("size", "inner"), [(48, 32), (1088, 96), (128, 64)])
def test_a_token_has_the_same_bits_alone_with_experts_of_any_width(size, inner, dtype):
    """Our own kernel multiplies by experts in bfloat16 whose widths are multiples of 64, oneDNN by others."""
    shapes, k = ((5, 2 * inner, size), (5, size, inner)), 2
    gate_up, down = (moe.pack_each(randn(*shape, dtype=dtype) / shape[2] ** 0.5) for shape in shapes)
    for tokens in (2, 9, 40):
        x, weights = randn(tokens, size, dtype=dtype), randn(tokens, k, dtype=dtype)
        experts = torch.stack([torch.randperm(5)[:k] for _ in range(tokens)])
        mixed = moe.mix_packed(x, gate_up, down, cpu_activation.silu_mul, experts, weights)
        for row in range(tokens):
            own = slice(row, row + 1)
            alone = moe.mix_packed(x[own], gate_up, down, cpu_activation.silu_mul, experts[own], weights[own])
            assert torch.equal(alone, mixed[own])


@PROFILE
@given(tokens=st.integers(1, 9), gated=st.booleans(), dtype=DTYPES)
def test_shared_experts_and_scales_equal_plain(tokens, gated, dtype):
    x, y, gate = randn(tokens, 40, dtype=dtype), randn(tokens, 50, dtype=dtype)[:, :40], randn(tokens, 3, dtype=dtype)
    gate = gate[:, :1] if gated else None
    torch.testing.assert_close(cpu_experts.add_shared(x, y, gate), moe.add_shared_plain(x, y, gate), **TOLERANCE[dtype])
    for other in TOLERANCE:
        assert torch.equal(cpu_activation.scaled(y, 0.22, other), (y.float() * 0.22).to(other))


@PROFILE
@given(tokens=st.integers(1, 9), interleaved=st.booleans(), dtype=DTYPES)
def test_latents_are_rotated_and_written_as_by_plain_ops(tokens, interleaved, dtype):
    heads, rank, rope_dim, block = 3, 24, 16, 4
    q, c, k = randn(tokens, heads, 40, dtype=dtype)[..., 24:], randn(tokens, 30, dtype=dtype)[:, :rank], None
    k, table = randn(tokens, 99, dtype=dtype)[:, 5 : 5 + rope_dim], randn(12, rope_dim, dtype=dtype)
    cache = torch.zeros(4, 2, 1, 1, block, rank + rope_dim, dtype=dtype)
    slots = torch.arange(tokens).flip(0) - 1  # the last is padding
    positions = (5 * torch.arange(tokens)) % 12
    batch = Batch(positions, slots, *[torch.empty(0)] * 3, cache, torch.empty(0), [])
    out = torch.zeros(tokens, heads, rank + rope_dim, dtype=dtype)
    norm = randn(rank, dtype=dtype), 1e-6
    cpu_rope.rotate_and_write_latent(out, q, c, k, norm, table, interleaved, batch, 1)
    c = cpu_norm.rms_norm(c, *norm, 0.0)
    rotated_q, rotated_k = (latent.rotate(part, table, batch, interleaved) for part in (q, k[:, None]))
    torch.testing.assert_close(out[..., rank:], rotated_q, **TOLERANCE[dtype])
    assert not out[..., :rank].any() and not cache[:, 0].any()
    for token in range(tokens - 1):
        written = cache[slots[token] // block, 1, 0, 0, slots[token] % block]
        assert torch.equal(written[:rank], c[token])
        torch.testing.assert_close(written[rank:], rotated_k[token, 0], **TOLERANCE[dtype])
    assert int(cache.abs().sum(-1).bool().sum()) == tokens - 1
