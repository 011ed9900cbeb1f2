"""Chooses the versions of ops as layers are built: plain torch, or fast ones for their device."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from functools import cache

import torch

from engine.device import numba_found

logger = logging.getLogger(__name__)

CPU_DTYPES = (torch.bfloat16, torch.float32)  # supported by the fast CPU ops
GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def cpu_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether ops/cpu has kernels for layers of this dtype on this device."""
    return device.type == "cpu" and dtype in CPU_DTYPES and numba_found()


def compile_cpu_kernels(dtype: torch.dtype, device: torch.device) -> None:
    """Compile the CPU kernels that layers have imported, so that no request waits for a compilation."""
    if cpu_kernels(dtype, device):
        from engine.model.ops.cpu.kernel import Kernel

        for kernel in [kernel for kernel in Kernel.imported if dtype in kernel.entries]:
            kernel.compile(dtype)


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
