"""The plain ops of recurrent layers: transformers' numbers, and the same bits however a sequence is cut up."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from engine.model.ops.recurrent import causal_conv
from engine.model.ops.recurrent.linear_attention import linear_attention_plain, select
from engine.model.state import CHUNK, RING, StateSpec, max_drafts
from tests.engine.model.ops.recurrent.inputs import D_K, D_V, HEADS, K_HEADS, KINDS, Inputs, inputs, spec_of
from tests.state_batches import garbage, same_bits, state_batch

CHANNELS, KERNEL = 24, 4
CONV = StateSpec({"conv": ((RING, CHANNELS), "float32")})
CONVS = {"plain": causal_conv.causal_conv_plain, "fast": causal_conv.select(torch.float32, torch.device("cpu"))}
FAST = {channels: select(D_K, D_V, channels, torch.device("cpu")) for channels in (1, D_K)}

BOTH = [(kind, op) for kind in KINDS for op in ("plain", "fast")]


def run(x: Inputs, states: Any, batch: Any, op: str = "plain") -> Tensor:
    attend = linear_attention_plain if op == "plain" else FAST[x.decay.shape[2]]
    return attend(x.q, x.k, x.v, x.decay, x.beta, states, batch, D_K**-0.5, x.eps)


def cut(tokens: int, cuts: list[int]) -> list[tuple[int, int]]:
    ends = sorted({*(c % tokens for c in cuts), 0, tokens})
    return list(itertools.pairwise(ends))


@pytest.mark.parametrize(("kind", "op"), BOTH)
def test_numbers_are_those_of_transformers(kind, op):
    x = inputs(kind, 200, torch.float32, 0)
    own = run(x, garbage(spec_of(x), 1), state_batch([(0, 0, 200)]), op)
    q, k, v = x.q[None], x.k[None], x.v[None]
    if kind == "gated delta rule":
        theirs, _ = qwen.torch_chunk_gated_delta_rule(
            q, k, v, x.decay[None, ..., 0], x.beta[None], use_qk_l2norm_in_kernel=True
        )
    elif kind == "a decay per channel":
        theirs, _ = kimi.chunk_kimi_delta_attention(q, k, v, x.decay[None], x.beta[None], use_qk_l2norm_in_kernel=True)
    else:
        theirs = recurrence(x)[None]
    torch.testing.assert_close(own, theirs[0], atol=1e-4, rtol=1e-4)


def recurrence(x: Inputs) -> Tensor:
    """Mamba-2 as a recurrence, in float64."""
    state, out = torch.zeros(HEADS, D_K, D_V, dtype=torch.float64), []
    for q, k, v, decay in zip(x.q.double(), x.k.double(), x.v.double(), x.decay.double(), strict=True):
        q, k = (y.repeat_interleave(HEADS // K_HEADS, dim=0) for y in (q, k))
        state = state * decay.exp()[..., None] + k[..., None] * v[:, None]
        out.append((state * q[..., None]).sum(1) * D_K**-0.5)
    return torch.stack(out).float()


@settings(max_examples=25, deadline=None)
@given(
    kind_and_op=st.sampled_from(BOTH),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    cuts=st.lists(st.integers(1, 10_000), max_size=6),
    tokens=st.integers(1, 2 * CHUNK + 10),
    other=st.integers(1, 5),
)
def test_a_sequence_has_the_same_bits_in_any_parts_beside_any_other(kind_and_op, dtype, cuts, tokens, other):
    kind, op = kind_and_op
    x, neighbour = inputs(kind, tokens, dtype, tokens), inputs(kind, other * (len(cuts) + 2), dtype, 7)
    whole = run(x, garbage(spec_of(x), 1), state_batch([(0, 0, tokens)]), op)
    states, parts = garbage(spec_of(x), 3), []
    for i, (first, last) in enumerate(cut(tokens, cuts)):
        batch = state_batch([(1, i * other, other), (2, first, last - first)])
        both = neighbour.rows(i * other, (i + 1) * other).beside(x.rows(first, last))
        parts.append(run(both, states, batch, op)[other:])
    assert same_bits(torch.cat(parts), whole)


@pytest.mark.parametrize(("kind", "op"), BOTH)
def test_a_state_saved_at_a_border_stands_for_all_before_it(kind, op):
    x = inputs(kind, 150, torch.float32, 3)
    states = garbage(spec_of(x), 2, kept=1)
    whole = run(x, states, state_batch([(0, 0, 150)], {0: (CHUNK, 2)}), op)
    states["state"][1] = states["state"][2]
    rest = run(x.rows(CHUNK, 150), states, state_batch([(1, CHUNK, 150 - CHUNK)]), op)
    assert same_bits(rest, whole[CHUNK:])


@settings(max_examples=15, deadline=None)
@given(
    kind_and_op=st.sampled_from(BOTH),
    prompt=st.integers(1, CHUNK),
    steps=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=30),
)
def test_rows_of_refused_drafts_leave_nothing_behind(kind_and_op, prompt, steps):
    kind, op = kind_and_op
    tokens, weight = 2 * CHUNK + 10, torch.randn(CHANNELS, KERNEL, generator=torch.Generator().manual_seed(1))
    x, refused = inputs(kind, tokens, torch.float32, 3), inputs(kind, tokens + 12, torch.float32, 4)
    y, other = (torch.randn(len(rows.v), CHANNELS, generator=torch.Generator().manual_seed(2)) for rows in (x, refused))
    whole = run(x, garbage(spec_of(x), 1), state_batch([(0, 0, tokens)]), op)
    convolved = CONVS[op](y, weight, None, garbage(CONV, 1), state_batch([(0, 0, tokens)]), True)
    states, ring = garbage(spec_of(x), 1), garbage(CONV, 1)
    start, first = 0, prompt
    for drafts, accepted in [*steps, *[(12, 12)] * 10]:
        count = min(drafts, max_drafts(start + first - 1, KERNEL)) if start else 0
        kept = min(first + min(accepted, count), tokens - start)
        batch, end = state_batch([(0, start, first + count)]), start + first + count
        rows = x.rows(start, start + kept).beside(refused.rows(start + kept, end))
        out = run(rows, states, batch, op)
        assert same_bits(out[:kept], whole[start : start + kept])
        both = torch.cat((y[start : start + kept], other[start + kept : end]))
        assert same_bits(CONVS[op](both, weight, None, ring, batch, True)[:kept], convolved[start : start + kept])
        start, first = start + kept, 1
        if start == tokens:
            break


@settings(max_examples=15, deadline=None)
@given(
    conv=st.sampled_from([*CONVS.values()]),
    cuts=st.lists(st.integers(1, 10_000), max_size=6),
    tokens=st.integers(1, 100),
    silu=st.booleans(),
)
def test_a_convolution_has_the_same_bits_in_any_parts_and_transformers_numbers(conv, cuts, tokens, silu):
    generator = torch.Generator().manual_seed(tokens)
    x, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((tokens, CHANNELS), (CHANNELS, KERNEL), (CHANNELS,))
    )
    whole = conv(x, weight, bias, garbage(CONV, 1), state_batch([(0, 0, tokens)]), silu)
    theirs = qwen.causal_conv1d_fn(x.T[None], weight, bias, activation="silu" if silu else None)[0].T
    torch.testing.assert_close(whole, theirs, atol=1e-5, rtol=1e-5)
    states, parts = garbage(CONV, 2), []
    for i, (first, last) in enumerate(cut(tokens, cuts)):
        both = torch.cat((torch.full((1, CHANNELS), 7.0), x[first:last]))
        batch = state_batch([(1, i, 1), (0, first, last - first)])
        parts.append(conv(both, weight, bias, states, batch, silu)[1:])
    assert same_bits(torch.cat(parts), whole)


@pytest.mark.parametrize("conv", CONVS.values(), ids=CONVS)
def test_a_convolution_goes_on_from_what_was_saved_at_a_border(conv):
    x, weight = torch.randn(90, CHANNELS), torch.randn(CHANNELS, KERNEL)
    states = garbage(CONV, 1, kept=1)
    whole = conv(x, weight, None, states, state_batch([(0, 0, 90)], {0: (CHUNK, 1)}), False)
    rest = conv(x[CHUNK:], weight, None, states, state_batch([(1, CHUNK, 90 - CHUNK)]), False)
    assert same_bits(rest, whole[CHUNK:])
