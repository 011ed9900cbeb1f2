"""Graphs of CPU kernels: replays, their memory, and how their threads wait."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine.model.ops import moe
from engine.model.ops.cpu import activation, norm
from engine.model.ops.cpu.graph import ENTRY, MAX_SPINS, NAP_US, WAITS, KernelGraph, poll, usleep, wait_for_zero
from engine.model.ops.cpu.kernel import CpuKernel, as_i64, kernel, take
from engine.model.ops.cpu.moe import experts, routing
from tests.cpu_kernels import needs_linear_kernel

TOKENS, SIZE = 40, 96  # work for more than one thread
WEIGHT = torch.linspace(0.5, 1.5, SIZE)


@kernel
def wait_entry(args: Any) -> None:
    wait_for_zero(as_i64(args[1]), 0, as_i64(args[2]))


@kernel
def await_and_tell(args: Any) -> None:
    """Wait until args[1][0] is 1, for 10 s at most, then set args[1][1] to 1."""
    if take(args, 1) == 0:
        told = as_i64(args[1])
        for _ in range(10_000_000 // NAP_US):
            if poll(told, 0) == 1:
                told[1] = 1
                break
            usleep(NAP_US)


@kernel
def tell(args: Any) -> None:
    if take(args, 1) == 0:
        as_i64(args[1])[0] = 1


@kernel
def copy_told(args: Any) -> None:
    if take(args, 1) == 0:
        as_i64(args[1])[2] = as_i64(args[1])[1]


WAIT = CpuKernel({torch.int64: wait_entry})
AWAIT_AND_TELL, TELL, COPY_TOLD = (CpuKernel({torch.int64: entry}) for entry in (await_and_tell, tell, copy_told))


@pytest.fixture(autouse=True)
def more_threads_than_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def layers(x: torch.Tensor, count: int) -> torch.Tensor:
    """Kernels of which each needs what the one before it wrote."""
    for _ in range(count):
        total, normed = norm.add_rms_norm(x, x, WEIGHT, 1e-6, 0.0)
        x = norm.add_rms_norm(total, normed, WEIGHT, 1e-6, 0.0)[1]
    return activation.silu_mul(x)


def test_a_replay_computes_what_the_kernels_would_on_what_their_tensors_hold_by_then():
    x, graph = torch.randn(TOKENS, SIZE), KernelGraph(TOKENS, TOKENS)
    with graph:
        out = layers(x, 3)
    for _ in range(4):
        x.copy_(torch.randn(TOKENS, SIZE))
        graph.replay(TOKENS)
        assert torch.equal(out, layers(x, 3))


def test_a_kernel_may_run_beside_the_one_before_it_and_the_next_waits_for_both():
    told, graph = torch.ones(3, dtype=torch.int64), KernelGraph(1, 1)
    with graph:
        AWAIT_AND_TELL.launch(torch.int64, 4, told)
        graph.run_beside()
        TELL.launch(torch.int64, 4, told)
        COPY_TOLD.launch(torch.int64, 4, told)
    for _ in range(20):
        told.zero_()
        graph.replay(1)
        assert told.tolist() == [1, 1, 1]


def test_a_replay_needs_only_the_threads_that_have_a_core():
    """So beside a busy process a step takes at most as much longer as fewer threads compute it: each finds all work
    that nobody has in hand, and waits for no thread that has not come."""
    x, graph = torch.randn(TOKENS, SIZE), KernelGraph(TOKENS, TOKENS)
    with graph:
        out = layers(x, 3)
    expected, waits = out.clone(), WAITS[1:].copy()
    out.zero_()
    torch.set_num_threads(1)
    graph.replay(TOKENS)
    assert torch.equal(out, expected)
    assert WAITS[1:].tolist() == waits.tolist(), "it has yielded or slept"


def test_what_no_kernel_reads_any_more_makes_room_for_what_later_ones_write():
    x, held = torch.randn(TOKENS, SIZE), []
    for count in (2, 20):
        graph = KernelGraph(TOKENS, TOKENS)
        with graph:
            layers(x, count)
        held.append(len(graph.memory))
    assert held[0] == held[1]


def test_a_graph_of_a_few_tokens_is_replayed_for_more_and_for_fewer():
    x, graph = torch.zeros(TOKENS, SIZE), KernelGraph(3, TOKENS)
    with graph:
        out = layers(x[:3], 3)
    for tokens in (TOKENS, 1, 17):
        x[:tokens] = torch.randn(tokens, SIZE)
        graph.replay(tokens)
        assert torch.equal(out.as_strided((tokens, out.shape[1]), out.stride()), layers(x[:tokens], 3))


def test_another_thread_launches_its_kernels_beside_a_recording():
    x, graph, results = torch.randn(TOKENS, SIZE), KernelGraph(TOKENS, TOKENS), []
    with graph:
        other = threading.Thread(target=lambda: results.append(layers(x, 1)))
        other.start()
        other.join()
    assert torch.equal(results[0], layers(x, 1))
    graph.replay(TOKENS)


def test_a_thread_that_waits_for_long_spins_then_yields_then_sleeps_and_spins_less_the_next_time():
    counter, waits = np.ones(1, dtype=np.int64), np.array([MAX_SPINS, 0, 0], dtype=np.int64)

    def wait() -> None:
        WAIT.launch(torch.int64, 1, counter.ctypes.data, waits.ctypes.data)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while waits[2] == 0:  # until it sleeps
        assert waiter.is_alive()
    counter[0] = 0
    waiter.join()
    assert waits.tolist() == [MAX_SPINS // 2, 1, 1]
    wait()
    assert waits.tolist() == [MAX_SPINS // 2 + MAX_SPINS // 32, 1, 1], "one that need not wait spins more"


def experts_layer(x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    chosen, weights = routing.top_k_softmax(logits, 2, True)
    return experts.mix_experts(x, gate_up, down, activation.silu_mul, chosen, weights)


def experts_of_a_layer() -> list[torch.Tensor]:
    weights = torch.randn(6, 128, 64).bfloat16(), torch.randn(6, 64, 64).bfloat16()
    packed = [moe.pack_each(weight) for weight in weights]
    return [weight for weight in packed if isinstance(weight, torch.Tensor)]


@needs_linear_kernel
def test_experts_are_replayed_for_more_tokens_and_for_fewer():
    x, logits, graph = torch.randn(TOKENS, 64).bfloat16(), torch.randn(TOKENS, 6).bfloat16(), KernelGraph(3, TOKENS)
    weights = experts_of_a_layer()
    with graph:
        out = experts_layer(x[:3], logits[:3], *weights)
    for tokens in (TOKENS, 1, 17):
        x.copy_(torch.randn(TOKENS, 64))
        logits.copy_(torch.randn(TOKENS, 6))
        graph.replay(tokens)
        assert torch.equal(
            out.as_strided((tokens, 64), out.stride()), experts_layer(x[:tokens], logits[:tokens], *weights)
        )


@needs_linear_kernel
def test_a_thread_that_comes_late_to_experts_leaves_whatever_has_taken_their_memory():
    x, logits, graph = (
        torch.randn(TOKENS, 64).bfloat16(),
        torch.randn(TOKENS, 6).bfloat16(),
        KernelGraph(TOKENS, TOKENS),
    )
    with graph:
        out = experts_layer(x, logits, *experts_of_a_layer())
    graph.replay(TOKENS)
    expected, op, late = out.clone(), experts.MULTIPLY_SEGMENTS, 0
    for row in graph._table:
        if row[ENTRY] == op._addresses[torch.bfloat16]:
            ctypes.c_int64.from_address(int(row[5])).value = 10**6  # segments
            taken = row[0]
            op._direct[torch.bfloat16](row.ctypes.data)
            assert row[0] == taken + 1
            late += 1
    assert late == 2 and torch.equal(out, expected)
