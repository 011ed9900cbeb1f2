"""Which version of the ops a model gets."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys

import pytest
import torch

from engine.model.models.registry import build_model
from engine.model.ops import activation, attention, dispatch, moe, norm
from engine.model.ops.elementwise.gates import select_open_gate
from engine.model.ops.elementwise.norms import select_gated
from engine.model.ops.recurrent import gates
from engine.model.shard import ShardPlan
from tests.engine.model.model_configs import tiny_config

ON_GPU = (torch.bfloat16, torch.device("cuda:0"))


@pytest.fixture
def without_triton(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    dispatch.triton_found.cache_clear()
    yield
    dispatch.triton_found.cache_clear()


def test_a_gpu_without_triton_gets_plain_torch_and_one_warning(without_triton, caplog):
    with caplog.at_level(logging.WARNING):
        assert attention.select(*ON_GPU) is attention
        assert norm.select(*ON_GPU) == (norm.rms_norm_plain, norm.add_rms_norm_plain)
        assert activation.select("silu", *ON_GPU) is activation.silu_mul
    assert [record.message for record in caplog.records] == [
        "triton is not installed, so plain torch is used, which is many times slower on a GPU"
    ]


def test_a_numba_that_was_made_for_another_numpy_is_not_used_and_its_reason_is_told(tmp_path, monkeypatch, caplog):
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.4 or less')")
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    dispatch.numba_found.cache_clear()
    assert not dispatch.numba_found()
    dispatch.numba_found.cache_clear()
    assert "numba cannot be imported (Numba needs NumPy 2.4 or less)" in caplog.text


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is made for Linux only")
def test_a_gpu_gets_the_triton_kernels():
    modules = {op.__module__ for op in (*norm.select(*ON_GPU), activation.select("silu", *ON_GPU))}
    modules |= {activation.select("gelu_pytorch_tanh", *ON_GPU).__module__, attention.select(*ON_GPU).__name__}
    modules |= {select_open_gate(*ON_GPU).__module__, select_gated(*ON_GPU).__module__}
    modules |= {op.__module__ for op in (moe.select_top_k(*ON_GPU), moe.select_add_shared(*ON_GPU))}
    modules |= {op.__module__ for op in (moe.select_top_k_sigmoid(ON_GPU[1]), moe.select_top_k_of_groups(ON_GPU[1]))}
    modules.add(gates.select(*ON_GPU).__module__)
    names = ("norm", "activation", "libraries.attention", "experts.routing", "recurrent.gates")
    assert modules == {f"engine.model.ops.gpu.{name}" for name in names}


def test_a_cpu_gets_no_kernel_of_the_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    on_cpu = (torch.bfloat16, torch.device("cpu"))
    assert not dispatch.gpu_kernels(*on_cpu)
    assert attention.select(*on_cpu).__name__ != "engine.model.ops.gpu.libraries.attention"


def test_a_built_model_has_its_kernels_compiled_for_its_own_dtype(monkeypatch):
    from engine.model.ops.cpu.kernel import CpuKernel

    compiled = []
    monkeypatch.setattr(CpuKernel, "compile", lambda kernel, dtype: compiled.append((kernel, dtype)))
    build_model(tiny_config(), ShardPlan(), torch.bfloat16, "cpu")
    of_the_model = [kernel for kernel, dtype in compiled if dtype == torch.bfloat16]
    assert of_the_model == [kernel for kernel in CpuKernel.imported if torch.bfloat16 in kernel.entries]
    assert of_the_model


@pytest.mark.slow
def test_all_kernels_of_a_machine_are_compiled_by_one_command(tmp_path):
    program = """
import json, runpy, sys
from engine.model.ops.cpu.kernel import CpuKernel

def compile(kernel, dtype):
    with open(sys.argv[1], "a") as file:
        file.write(f"{CpuKernel.imported.index(kernel)} {dtype}\\n")

CpuKernel.compile = compile
runpy.run_module("engine.model.ops.cpu", run_name="__main__", alter_sys=True)
assert "engine.model.ops.cpu.encoder_attention" in sys.modules
print(json.dumps([f"{number} {dtype}" for number, kernel in enumerate(CpuKernel.imported) for dtype in kernel.entries]))
"""
    file = tmp_path / "compiled"
    run = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True)
    compiled = file.read_text().splitlines()
    assert sorted(set(compiled)) == sorted(json.loads(run.stdout)), "some are compiled as they are imported, too"
    assert {"torch.bfloat16", "torch.float32"} <= {line.split()[1] for line in compiled}
