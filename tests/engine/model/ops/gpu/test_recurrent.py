"""The Triton kernels of recurrent layers against the plain ones, and their bits however a sequence is cut up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from engine.model.batch import Batch
from engine.model.ops.elementwise.norms import gated_rms_norm_plain
from engine.model.ops.gpu import norm
from engine.model.ops.gpu.recurrent import causal_conv, linear_attention
from engine.model.ops.gpu.recurrent.gates import gates
from engine.model.ops.recurrent.causal_conv import causal_conv_plain
from engine.model.ops.recurrent.gates import gates_plain
from engine.model.ops.recurrent.linear_attention import linear_attention_plain
from engine.model.state import CHUNK, RING, StateBatch, StateSpec
from tests.engine.model.ops.gpu.paged import DEVICE
from tests.engine.model.ops.recurrent.inputs import D_K, KINDS, Inputs, inputs, spec_of
from tests.models import with_slow
from tests.state_batches import garbage, same_bits, state_batch

PARTS = (1, 20, 11, 1, 38, 9)  # tokens of each step: within a chunk, up to its end, into the next
TOKENS = sum(PARTS)
BORDER = 2 * CHUNK  # which the step of 38 tokens passes
CHANNELS, KERNEL = 40, 4
CONV = StateSpec({"conv": ((RING, CHANNELS), "float32")})


def on_device(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    if isinstance(value, dict):
        return {name: tensor.to(DEVICE) for name, tensor in value.items()}
    return value


def batch_of(*args: Any) -> Batch:
    batch = state_batch(*args)
    found = batch.states
    assert found is not None
    batch.query_start, batch.kv_len = batch.query_start.to(DEVICE), batch.kv_len.to(DEVICE)
    batch.states = StateBatch([], *map(on_device, (found.slots, found.save_at, found.save_slots)))
    return batch


def attend(op: Any, x: Inputs, states: dict[str, Tensor], batch: Batch) -> Tensor:
    return op(*map(on_device, x[:5]), states, batch, D_K**-0.5, x.eps)


@pytest.mark.parametrize("kind", with_slow(KINDS, KINDS[1:]))
def test_linear_attention_equals_plain_with_the_same_bits_in_any_parts(kind):
    """Beside each part stand a token of another sequence and padding. The state at a border is saved."""
    x, other = inputs(kind, TOKENS, torch.float32, 1), inputs(kind, len(PARTS) + 1, torch.float32, 2)
    expected = attend(linear_attention_plain, x, on_device(garbage(spec_of(x), 1)), batch_of([(0, 0, TOKENS)]))
    states, parts, start = on_device(garbage(spec_of(x), 3, kept=1)), [], 0
    for i, count in enumerate(PARTS):
        saves = {1: (BORDER, 3)} if start < BORDER <= start + count else {}
        batch = batch_of([(1, i, 1), (2, start, count), (0, -1, 1)], saves)  # the last has kv_len 0
        rows = other.rows(i, i + 1).beside(x.rows(start, start + count)).beside(other.rows(0, 1))
        parts.append(attend(linear_attention.linear_attention, rows, states, batch)[1:-1])
        start += count
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)
    whole = attend(linear_attention.linear_attention, x, on_device(garbage(spec_of(x), 1)), batch_of([(0, 0, TOKENS)]))
    assert torch.cuda.is_available() or same_bits(torch.cat(parts), whole)

    resumed = on_device(garbage(spec_of(x), 1))
    resumed["state"][0] = states["state"][3]
    rest = attend(
        linear_attention.linear_attention, x.rows(BORDER, TOKENS), resumed, batch_of([(0, BORDER, TOKENS - BORDER)])
    )
    assert torch.cuda.is_available() or same_bits(rest, whole[BORDER:])


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter computes")
def test_a_decoded_token_solves_one_row_of_its_tile_and_a_prompt_each_row_once(monkeypatch):
    create_exp, exps = InterpreterBuilder.create_exp, []
    monkeypatch.setattr(InterpreterBuilder, "create_exp", lambda *args: (exps.append(args), create_exp(*args))[1])
    counts = {}
    for tokens in (1, 2, 16):
        x = inputs(KINDS[0], tokens, torch.float32, 1)
        exps.clear()
        attend(linear_attention.linear_attention, x, on_device(garbage(spec_of(x), 1)), batch_of([(0, 0, tokens)]))
        counts[tokens] = len(exps)
    programs = counts[2] - counts[1]
    assert counts[16] - counts[1] == 15 * programs > 0


@pytest.mark.parametrize(("silu", "biased"), [(True, False), (False, True)])
def test_a_convolution_equals_plain_with_the_same_bits_in_any_parts(silu, biased):
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(DEVICE)
        for shape in ((TOKENS, CHANNELS), (CHANNELS, KERNEL), (CHANNELS,))
    )
    bias = bias if biased else None
    expected = causal_conv_plain(x, weight, bias, on_device(garbage(CONV, 1)), batch_of([(0, 0, TOKENS)]), silu)
    states, parts, start = on_device(garbage(CONV, 3, kept=1)), [], 0
    for i, count in enumerate(PARTS):
        saves = {1: (BORDER, 3)} if start < BORDER <= start + count else {}
        batch = batch_of([(1, i, 1), (2, start, count), (0, -1, 1)], saves)
        rows = torch.cat((x[:1], x[start : start + count], x[:1]))
        parts.append(causal_conv.causal_conv(rows, weight, bias, states, batch, silu)[1:-1])
        start += count
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-5, rtol=1e-5)
    whole = causal_conv.causal_conv(x, weight, bias, on_device(garbage(CONV, 1)), batch_of([(0, 0, TOKENS)]), silu)
    assert torch.cuda.is_available() or same_bits(torch.cat(parts), whole)

    resumed = on_device(garbage(CONV, 1))
    resumed["conv"][0] = states["conv"][3]
    rest = causal_conv.causal_conv(x[BORDER:], weight, bias, resumed, batch_of([(0, BORDER, TOKENS - BORDER)]), silu)
    assert torch.cuda.is_available() or same_bits(rest, whole[BORDER:])


def test_a_border_that_a_decoded_token_reaches_is_saved_from_earlier_steps_inputs():
    x, weight = torch.randn(CHUNK + 5, CHANNELS).to(DEVICE), torch.randn(CHANNELS, KERNEL).to(DEVICE)
    states = on_device(garbage(CONV, 1, kept=1))
    whole = causal_conv.causal_conv(x, weight, None, on_device(garbage(CONV, 1)), batch_of([(0, 0, len(x))]), True)
    causal_conv.causal_conv(x[: CHUNK - 1], weight, None, states, batch_of([(0, 0, CHUNK - 1)]), True)
    causal_conv.causal_conv(
        x[CHUNK - 1 : CHUNK], weight, None, states, batch_of([(0, CHUNK - 1, 1)], {0: (CHUNK, 1)}), True
    )
    rest = causal_conv.causal_conv(x[CHUNK:], weight, None, states, batch_of([(1, CHUNK, 5)]), True)
    torch.testing.assert_close(rest, whole[CHUNK:])


@pytest.mark.parametrize("channels", [1, 16])
def test_decays_and_shares_equal_plain(channels):
    generator = torch.Generator().manual_seed(channels)
    merged, log_rate, bias = (
        torch.randn(size, generator=generator).to(DEVICE) for size in ((5, 6 + 6 * channels), 6, 6 * channels)
    )
    b, a = (30 * merged).bfloat16().split((6, 6 * channels), dim=1)
    for found, expected in zip(gates(a, b, log_rate, bias), gates_plain(a, b, log_rate, bias), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("by_sigmoid", [False, True])
def test_a_gated_norm_equals_plain(by_sigmoid):
    merged, weight = (
        torch.randn(5, 100, generator=torch.Generator().manual_seed(1)).to(DEVICE),
        torch.randn(20).to(DEVICE),
    )
    x, gate = merged[:, :40].unflatten(1, (2, 20)).contiguous(), merged[:, 50:90].unflatten(1, (2, 20))
    found = norm.gated_rms_norm(x, gate, weight, 1e-6, by_sigmoid)
    torch.testing.assert_close(found, gated_rms_norm_plain(x, gate, weight, 1e-6, by_sigmoid), atol=1e-5, rtol=1e-5)
