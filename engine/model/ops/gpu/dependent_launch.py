"""Programmatic dependent launch, on Hopper and newer GPUs: a kernel is launched while the previous one ends, and
waits on the device for the results of that one. This hides the time that a launch takes.

Each kernel begins with `begin`, before it reads or writes memory, so it never runs ahead of what it depends on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST_CAPABILITY = (9, 0)


@triton.jit
def begin(DEPENDENT: tl.constexpr):
    """Wait until the previous kernels have ended and their writes are visible, then let the next kernel start."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


def options(device: torch.device) -> dict[str, Any]:
    """Return the arguments with which a kernel that calls `begin` is launched on this device. Called for each launch,
    right before it."""
    if not in_use(device):
        return {}
    if _apart:
        torch.zeros(1, device=device).add_(1)
    return {"DEPENDENT": True, "launch_pdl": True}


_refused: list[None] = []
_apart: list[None] = []


@contextmanager
def apart() -> Iterator[None]:
    """Launch a kernel of torch before each of ours. It starts when all earlier ones have ended, and ours when it has
    ended. Our kernels are those that start early otherwise: none is compiled for this."""
    _apart.append(None)
    try:
        yield
    finally:
        _apart.pop()


def refuse() -> None:
    """Launch no kernel early from now on."""
    _refused.append(None)


def in_use(device: torch.device) -> bool:
    """Return whether kernels are launched early on this device."""
    return supported(device) and not _refused


@cache
def supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
