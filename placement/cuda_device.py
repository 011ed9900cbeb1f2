"""Selects the GPU of a rank among those that its process can see.

By default Ray shows a process only its own GPU, so every rank would be device 0, and torch's symmetric memory refuses
ranks of one machine that have the same device index. So ranks see all GPUs of their node, as in vLLM, and each selects
its own.
"""

from __future__ import annotations

from typing import Any

from placement.spec import GroupSpec

#: Makes Ray leave CUDA_VISIBLE_DEVICES as it is on the node (ray/_private/accelerators/nvidia_gpu.py).
SEE_ALL = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def rank_options(spec: GroupSpec) -> dict[str, Any]:
    """Return the options of a rank's actor. Without a GPU the actor needs no environment of its own, so Ray can use a
    process that it has started in advance."""
    resources: dict[str, Any] = {"num_cpus": spec.num_cpus, "num_gpus": spec.num_gpus}
    return resources | {"runtime_env": {"env_vars": SEE_ALL}} if spec.num_gpus else resources


def device_index(own: str, visible: str | None) -> int:
    """Return CUDA's index of the GPU `own`, an accelerator id of Ray (a number or a UUID).

    visible: CUDA_VISIBLE_DEVICES of the process; if set, Ray's ids are entries of it. Raises ValueError.
    """
    if visible is None:
        return int(own)
    names = [name.strip() for name in visible.split(",")]
    if own not in names:
        raise ValueError(f"Ray gave this rank GPU {own!r}, which CUDA_VISIBLE_DEVICES={visible} does not name")
    return names.index(own)
