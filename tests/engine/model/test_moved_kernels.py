"""No bit that a CPU kernel writes depends on the addresses of its arrays."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.model.batch import Batch, split
from engine.model.ops.cpu import encoder_attention, rope
from engine.model.ops.cpu.kernel import CpuKernel
from engine.model.ops.cpu.lora import low_rank
from tests.cpu_kernels import needs_linear_kernel
from tests.engine.model.ops.lora.cases import Case
from tests.engine.model.test_parity import Run
from tests.engine.model.test_recorded_steps import ALL, WIDE
from tests.models import make_model
from tests.moved_kernels import moved_kernels

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "enforce_eager": True, "overlap": False}
# Fields of the model's configuration, and options of the engine; together these run all kernels.
MODELS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen3_next", {}, {}),
    ("nemotron_h", {}, {}),
    ("falcon_h1", {}, {}),
    ("granite4_moe", {}, {}),
    ("kimi_linear", {"linear_head_dim": 32}, {}),
    ("deepseek_v32", {}, {}),
    ("gpt_oss", {}, {}),
    ("gemma3", {"head_dim": 12}, {}),
    ("qwen3_moe", {**ALL, "moe_intermediate_size": 64, "mlp_only_layers": []}, {}),
    ("deepseek_v3", {**ALL, **WIDE["deepseek_v3"]}, {}),
    ("llama", ALL, {"determinism": "strict"}),
    ("llama", ALL, {"quantization": "int8"}),
    ("llama", ALL, {"quantization": "int4"}),
]
DTYPES = torch.float32, torch.bfloat16


def computing(kernels: Iterable[CpuKernel]) -> set[str]:
    """The names of the kernels of this package, each that of one of its entry points; tests have some of their own."""
    entries: list[Any] = [next(iter(kernel.entries.values())) for kernel in kernels]
    functions = [inspect.getclosurevars(entry.__wrapped__).nonlocals["function"] for entry in entries]
    return {function.__name__ for function in functions if function.__module__.startswith("engine.model.ops.")}


def run(folder: Path, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Answer two prompts, in several chunks and beside each other, one of them at random."""
    name = str(dtype).removeprefix("torch.")
    with Run(SimpleNamespace(folder=folder), **SIZES, dtype=name, **options) as engine:
        for temperature, length in enumerate((70, 9)):
            prompt = [3 + 7 * i * i % 89 for i in range(length)]
            engine.add(f"{length}", prompt, max_tokens=4, temperature=float(temperature), seed=1)
        engine.go()


def add_adapters(dtype: torch.dtype) -> None:
    Case.make([0, 1, 1, -1, 0], dtype=dtype).result(low_rank.add)


def encode(dtype: torch.dtype) -> None:
    lengths, none = [5, 40], torch.zeros(0, dtype=torch.int64)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    batch = Batch(none, none, starts, torch.tensor(lengths).int(), none, none, *split(lengths, lengths))
    q, k, v = torch.randn(3, sum(lengths), 2, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    q = rope.rotate(q, torch.linspace(-1, 1, 45 * 6).view(45, 6).to(dtype), torch.arange(45))
    encoder_attention.encoder_attention(q, k, v, batch, 0.2, None)


@pytest.mark.slow
@needs_linear_kernel
def test_kernels_have_the_same_bits_wherever_their_arrays_are_in_memory(tmp_path):
    repeated: set[CpuKernel] = set()
    for number, (family, fields, options) in enumerate(MODELS):
        folder = make_model(tmp_path / str(number), family, **fields)
        for dtype in DTYPES:
            with moved_kernels() as found:
                run(folder, dtype, options)
            repeated |= found
    for dtype in DTYPES:
        with moved_kernels() as found:
            add_adapters(dtype)
            encode(dtype)
        repeated |= found
    rest = computing(kernel for kernel in CpuKernel.imported if kernel not in repeated)
    assert rest <= {"run_all"}, "this kernel only runs others"
