"""How much of the machine's memory can still be taken, and what limits it.

A machine's free memory says little: Linux fills it with the files that were read last, weights among them, and gives it
back when a process asks. In a container, or below a systemd unit with a limit, the control group counts too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.devices.control_groups import group_folders, read_text
from engine.devices.free_memory import GIB, FreeMemory


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """Names that one version of Linux's control groups has for limits, and for what memory uses."""

    limits: tuple[str, ...]
    used: str
    cached: tuple[str, ...]  # in `memory.stat`: pages of files, which are dropped when memory is short


FILES = {
    2: MemoryFiles(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
    1: MemoryFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def free_host_memory(root: Path = Path("/")) -> FreeMemory:
    """Return what this process can take of the machine's memory, within the limits of all its control groups.

    root: folder that contains `proc` and `sys/fs/cgroup`.
    """
    machine = FreeMemory(_available(root), "the machine's available memory")
    return min([machine, *_of_groups(root)], key=lambda free: free.size)


def _available(root: Path) -> int:
    """Return how many bytes Linux can hand out without swapping, those of cached files included."""
    kib = {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB", read_text(root / "proc/meminfo"), re.M)}
    return 1024 * kib.get("MemAvailable", kib.get("MemFree", 0) + kib.get("Cached", 0))


def _of_groups(root: Path) -> Iterator[FreeMemory]:
    """Yield what each limit of this process's control groups, and of those that contain them, leaves."""
    for version, folder in group_folders("memory", root):
        inside, names = root / folder.relative_to("/"), FILES[version]
        used = _number(inside / names.used)
        stat = dict(line.split() for line in read_text(inside / "memory.stat").splitlines() if len(line.split()) == 2)
        cached = sum(int(stat.get(name, 0)) for name in names.cached)
        for name in names.limits:
            if used is not None and (limit := _number(inside / name)) is not None:
                where = f"the container's memory limit of {limit / GIB:.2f} GiB, {folder / name}"
                yield FreeMemory(max(0, limit - max(0, used - cached)), where)


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is no file, or it says `max`."""
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None
