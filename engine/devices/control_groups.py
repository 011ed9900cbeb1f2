"""Linux's control groups of this process: the limits of a container, or of a systemd unit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Controller = Literal["memory", "cpu"]
ESCAPE = re.compile(r"\\([0-7]{3})")  # of blanks in /proc/self/mountinfo


def group_folders(controller: Controller, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Yield the version (1 or 2) and the folder of this process's group, and of each group that contains it.

    root: folder that contains `proc` and `sys/fs/cgroup`. The yielded paths are those of the machine, without it.
    """
    member_of, mounts = read_text(root / "proc/self/cgroup"), read_text(root / "proc/self/mountinfo").splitlines()
    versions = (
        (2, re.compile(r"cgroup2 "), re.compile(r"^0::(.*)$", re.M)),
        (
            1,
            re.compile(rf"cgroup .*\b{controller}\b"),
            re.compile(rf"^\d+:(?:[^:\n]*,)?{controller}(?:,[^:\n]*)?:(.*)$", re.M),
        ),
    )
    for version, mounted, member in versions:
        for line in mounts:
            mount, _, kind = line.partition(" - ")
            if mounted.match(kind) and (own := member.search(member_of)):
                top, point = (ESCAPE.sub(lambda code: chr(int(code[1], 8)), field) for field in mount.split(" ")[3:5])
                below = _below(own[1], top)
                yield from ((version, Path(point) / part) for part in [below, *below.parents])


def read_text(path: Path) -> str:
    """Return what a file of the system says; nothing if there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # another version of Linux or of control groups
        return ""


def _below(group: str, top: str) -> Path:
    """Return a group's path below the group that is mounted. A container may see the name that its group has outside,
    of which it has mounted only the last part."""
    path = Path(group)
    inside = path.relative_to(top) if path.is_relative_to(top) else Path()
    return Path() if ".." in inside.parts else inside
