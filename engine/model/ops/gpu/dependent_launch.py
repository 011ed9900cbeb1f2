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
    """Return the arguments with which a kernel that calls `begin` is launched on this device."""
    return {"DEPENDENT": True, "launch_pdl": True} if supported(device) and not _off else {}


_off: list[None] = []


@contextmanager
def off() -> Iterator[None]:
    """Launch kernels only when the previous ones have ended."""
    _off.append(None)
    try:
        yield
    finally:
        _off.pop()


def refuse() -> None:
    """Launch no kernel early from now on."""
    _off.append(None)


@cache
def supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
