"""The GPU of a rank among those that its process sees.

Ray would show a process its own GPU only. Every rank is then device 0, and torch's symmetric memory refuses ranks of
one machine with the same device index. So ranks see all GPUs of their node, and each makes its own the current one,
as those of vLLM do. This has not run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

from placement.spec import GroupSpec

#: Ray leaves CUDA_VISIBLE_DEVICES as it is on the node (ray/_private/accelerators/nvidia_gpu.py).
SEE_ALL = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def rank_options(spec: GroupSpec) -> dict[str, Any]:
    """Return the options of a rank's actor. Without a GPU it takes a process that Ray has ready, of any environment."""
    resources: dict[str, Any] = {"num_cpus": spec.num_cpus, "num_gpus": spec.num_gpus}
    return resources | {"runtime_env": {"env_vars": SEE_ALL}} if spec.num_gpus else resources


def device_index(own: str, visible: str | None) -> int:
    """Return the index by which CUDA knows the GPU `own`, an accelerator id of Ray's: a number or a UUID.

    visible: CUDA_VISIBLE_DEVICES of the process, in whose terms Ray counts if it is set. Raises ValueError.
    """
    if visible is None:
        return int(own)
    names = [name.strip() for name in visible.split(",")]
    if own not in names:
        raise ValueError(f"Ray gave this rank GPU {own!r}, which CUDA_VISIBLE_DEVICES={visible} does not name")
    return names.index(own)
