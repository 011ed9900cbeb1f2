"""Asks the system for the matrix registers of Intel's AMX."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache

XFEATURE_TILE_DATA = 18  # Linux, Documentation/arch/x86/xstate.rst, like the next two
ARCH_REQ_XCOMP_PERM = 0x1023
SYS_ARCH_PRCTL = 158


@cache
def may_use_amx() -> bool:
    """Return whether this process may multiply bfloat16 in AMX's registers. Linux wants to be asked once per process,
    for all threads and forks."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    return ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_TILE_DATA) == 0
