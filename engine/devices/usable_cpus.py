"""How many CPUs this process can use, and how many of them a rank computes with."""

from __future__ import annotations

import os
from pathlib import Path

from engine.devices.control_groups import group_folders, read_text

FREE_ABOVE = 8  # CPUs above which one is left to ingresses and proxies


def usable_cpus(root: Path = Path("/")) -> float:
    """Return the CPUs that this process may run on, within the quotas of all its control groups.

    root: folder that contains `proc` and `sys/fs/cgroup`.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(allowed), *_quotas(root)])


def threads_of_rank(cpus: float, num_ranks: int) -> int:
    """Return the threads of one of the ranks that share some CPUs. num_ranks: of all engines of the machine."""
    return max(1, int((cpus - (cpus > FREE_ABOVE)) / num_ranks))


def _quotas(root: Path) -> list[float]:
    found = []
    for version, folder in group_folders("cpu", root):
        inside = root / folder.relative_to("/")
        if version == 2:
            quota, _, period = read_text(inside / "cpu.max").strip().partition(" ")
        else:
            quota, period = (read_text(inside / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):  # else `max`, or -1: no quota
            found.append(int(quota) / int(period))
    return found
