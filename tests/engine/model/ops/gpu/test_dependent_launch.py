"""Kernels that start before the kernel before them has ended wait for it, before they read or write anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from engine.model import state
from engine.model.ops.gpu import (
    activation,
    attention,
    dependent_launch,
    fused_quantize,
    latent_attention,
    latent_rope,
    logits,
    norm,
    quantize,
    rope,
    sampling,
)
from engine.model.ops.gpu.experts import moe, routing
from engine.model.ops.gpu.recurrent import causal_conv, gates, linear_attention
from engine.model.ops.logits.penalties import Penalties
from engine.model.quantization.rows import RowFormat
from tests.engine.model.ops.gpu.paged import Case, latent_inputs
from tests.state_batches import state_batch

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="it looks into the interpreter"),
]


class Early(Exception):
    pass


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Names of the kernels that were launched as on Hopper, whose programs raise Early if they touch memory before they
    have waited."""
    names: list[str] = []
    state = SimpleNamespace(waited=True, depends=False)
    run, start, memory = GridExecutor.__call__, InterpreterBuilder.set_grid_idx, interpreter._interpreter

    def launch(grid: GridExecutor, *args: Any, **options: Any) -> None:
        state.depends = options.get("DEPENDENT", False)
        names.extend([grid.fn.__name__] * state.depends)
        run(grid, *args, **options)

    def next_program(builder: InterpreterBuilder, *index: int) -> None:
        state.waited = not state.depends
        start(builder, *index)

    class Memory:
        def __getattr__(self, name: str) -> Any:
            if name in ("load", "store", "atomic_rmw", "atomic_cas") and not state.waited:
                raise Early(names[-1])
            return getattr(memory, name)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", next_program)
    monkeypatch.setattr(interpreter, "_interpreter", Memory())
    monkeypatch.setattr(dependent_launch, "gdc_wait", lambda: setattr(state, "waited", True))
    monkeypatch.setattr(dependent_launch, "gdc_launch_dependents", lambda: None)
    monkeypatch.setattr(dependent_launch, "options", lambda device: {"DEPENDENT": True})
    return names


def run_kernels() -> None:
    x = torch.randn(3, 256).bfloat16()
    norm.rms_norm(x, x[0], 1e-6, 0.0)
    norm.add_rms_norm(x, x, x[0], 1e-6, 0.0)
    norm.gated_rms_norm(x[:, None], x[:, None], x[0], 1e-6, False)
    for name in activation.GATED:
        activation.GATED[name](x)
    for format in (RowFormat(torch.int8), RowFormat(torch.float8_e4m3fn, 128)):
        quantize.quantize(x, format)
        fused_quantize.rms_norm(x, x[0], 1e-6, 0.0, format)
        fused_quantize.silu_mul(x.repeat(1, 2), format)
    experts, weights = routing.top_k_softmax(x[:, :8], 2, True)
    pairs = routing.sort_pairs(experts, 8, 16)
    moe.grouped_linear(x, x.repeat(8, 1).unflatten(0, (8, -1)), None, pairs.order, pairs.tiles, 16)
    routing.combine(x.repeat(2, 1), weights)
    routing.top_k_of_groups(x[:, :8].float(), (2, 1), 2, 1.0, x.dtype)
    routing.add_shared(x, x, x[:, :1])
    activation.open_gate(x, x.unflatten(1, (2, 128)))
    sampling.sample_rows(x, [])
    logits.apply_masks(x.float(), torch.tensor([0]), torch.zeros(1, 32, dtype=torch.uint8))
    where = torch.tensor([[0], [0], [0], [1], [5]])
    logits.penalise(x.float(), Penalties(where, torch.ones(3, 1), 5), torch.ones(1, 9).int())
    q, k, v, batch = Case([(20, 1), (7, 1)]).inputs()
    rope.rotate_and_write(q, k, v, torch.randn(64, q.shape[2]).to(q.dtype), batch, 0)
    attention.paged_attention(q, batch, 0, 0.1)
    q, latent, batch = latent_inputs([(20, 1), (7, 2)], 2, 16, 8)
    norm_and_table = (torch.ones(16), 1e-6), torch.randn(64, 8)
    latent_rope.rotate_and_write_latent(
        q.clone(), q[..., 16:], latent[:, :16], latent[:, 16:], *norm_and_table, True, batch, 0
    )
    latent_rope.write_latent(latent, batch, 0)
    latent_attention.latent_attention(q, batch, 0, 0.1, 16)
    run_recurrent_kernels()


def run_recurrent_kernels() -> None:
    batch = state_batch([(0, 100, 30), (1, 7, 1)])
    x = torch.randn(31, 64)
    conv = {"conv": torch.zeros(2, state.RING, 64)}
    causal_conv.causal_conv(x, torch.randn(64, 4), None, conv, batch, True)
    decay, share = gates.gates(x[:, :2], x[:, :2], torch.zeros(2), torch.zeros(2))
    rows = {"keys": (2, 16), "values": (2, 16), "decays": (2, 1)}
    states = {name: torch.zeros(2, count, state.CHUNK, size) for name, (count, size) in rows.items()}
    states["state"] = torch.zeros(2, 2, 16, 16)
    q, k, v = torch.randn(3, 31, 2, 16)
    linear_attention.linear_attention(q, k, v, decay, share, states, batch, 0.1, 1e-6)


KERNELS = {
    "rms_norm_kernel", "gated_rms_norm_kernel", "gated_kernel", "swigluoai_kernel", "relu2_kernel", "quantize_kernel",
    "norm_quantize_kernel", "gated_quantize_kernel", "top_k_softmax_kernel", "order_kernel", "combine_kernel",
    "rotate_and_write_kernel", "attend_kernel",
    "grouped_kernel", "top_k_of_groups_kernel", "add_shared_kernel",
    "open_gate_kernel", "mask_kernel", "penalise_kernel", "best_of_segment_kernel", "best_of_row_kernel",
    "rotate_and_write_latent_kernel", "write_kernel",
    "latent_kernel", "causal_conv_kernel", "keep_kernel", "gates_kernel", "linear_attention_kernel",
}  # fmt: skip


def test_no_program_touches_memory_before_it_has_waited(launched):
    run_kernels()
    assert set(launched) == KERNELS


def test_a_kernel_that_does_not_wait_is_found(launched, monkeypatch):
    monkeypatch.setattr(dependent_launch, "gdc_wait", lambda: None)
    with pytest.raises(Exception, match="Early"):
        norm.rms_norm(torch.ones(1, 16), torch.ones(16), 1e-6, 0.0)


@pytest.mark.parametrize(("capability", "depends"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_only_hopper_and_newer_gpus_launch_so(capability, depends, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    dependent_launch.supported.cache_clear()
    assert bool(dependent_launch.options(torch.device("cuda"))) == depends
    assert not dependent_launch.options(torch.device("cpu"))
    dependent_launch.supported.cache_clear()
