"""On what the code of a kernel depends: the card, and the versions of what compiles for it."""

from __future__ import annotations

import re
import subprocess
from functools import cache

import torch


def environment() -> str:
    """Return the card and the versions on which a kernel's code depends."""
    import triton

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    ptxas = ".".join(map(str, ptxas_version())) or "of unknown version"
    return f"{card}, torch {torch.__version__}, triton {triton.__version__}, ptxas {ptxas}"


@cache
def ptxas_version() -> tuple[int, ...]:
    """Return the version of the assembler that Triton uses; empty if it cannot be found out."""
    from triton import knobs

    try:
        found = subprocess.run([knobs.nvidia.ptxas.path, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired, AttributeError):
        return ()
    version = re.search(r"release (\d+)\.(\d+)", found.stdout)
    return tuple(map(int, version.groups())) if version else ()
