"""Chooses the versions of ops as layers are built: plain torch, or fast ones for their device."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch

from engine.devices.device import numba_found

logger = logging.getLogger(__name__)

Op = TypeVar("Op", bound=Callable[..., Any])
CPU_DTYPES = (torch.bfloat16, torch.float32)  # supported by the fast CPU ops
GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def cpu_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether ops/cpu has kernels for layers of this dtype on this device."""
    return device.type == "cpu" and dtype in CPU_DTYPES and numba_found()


def compile_cpu_kernels(dtype: torch.dtype, device: torch.device) -> None:
    """Compile the CPU kernels that layers have imported, so that no request waits for a compilation."""
    if cpu_kernels(dtype, device):
        kernels("cpu.kernel").compile_imported(dtype)


def module_of(dtype: torch.dtype, device: torch.device, cpu: str = "", gpu: str = "") -> ModuleType | None:
    """Return the module with the fast versions of ops; None for plain torch. cpu, gpu: modules of ops/cpu and ops/gpu;
    empty for none."""
    for has_kernels, package, module in ((cpu_kernels, "cpu", cpu), (gpu_kernels, "gpu", gpu)):
        if module and has_kernels(dtype, device):
            return kernels(f"{package}.{module}")
    return None


def kernels(module: str) -> ModuleType:
    """Import a module of fast versions, such as `cpu.linear`."""
    return importlib.import_module(f".{module}", __package__)


def fastest(op: Op, dtype: torch.dtype, device: torch.device, cpu: str = "", gpu: str = "") -> Op:
    """Return the fastest version of a plain op. cpu, gpu: modules of ops/cpu and ops/gpu that have it under the same
    name, without `_plain`; empty for none."""
    module = module_of(dtype, device, cpu, gpu)
    if module is None:
        return op
    found: Op = getattr(module, op.__name__.removesuffix("_plain"))
    replaceable.add(found)
    return op if found in refused else found


replaceable: set[Callable[..., Any]] = set()  #: kernels whose plain version can take their place in a graph
refused: set[Callable[..., Any]] = set()  #: those that were wrong in their trial (engine/kernel_trial)


def refuse(kernel: Callable[..., Any]) -> bool:
    """Let plain torch take a kernel's place in layers that are built from now on. Returns False if it cannot."""
    if kernel not in replaceable:
        return False
    refused.add(kernel)
    return True


def gpu_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether ops/gpu has kernels for layers of this dtype on this device."""
    return device.type == "cuda" and dtype in GPU_DTYPES and triton_found()


@cache
def triton_found() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if found:
        logger.info("ops: Triton kernels")
    else:
        logger.warning("triton is not installed, so plain torch is used, which is many times slower on a GPU")
    return found
