"""The kind of a device, by which the results of kernels can differ."""

from __future__ import annotations

import torch

from engine.devices.amx_permission import may_use_amx
from engine.devices.device import numba_found


def kind_of(torch_device: torch.device) -> str:
    """Return the model of a GPU, or the CPU's model with the instructions that kernels use. On another kind, kernels
    may round differently."""
    if torch_device.type == "cuda":
        return torch.cuda.get_device_name(torch_device)
    instructions = torch.backends.cpu.get_cpu_capability()
    if not numba_found():
        return instructions
    from llvmlite.binding import get_host_cpu_name

    return f"{get_host_cpu_name()} {instructions}{' AMX' if may_use_amx() else ''}"
