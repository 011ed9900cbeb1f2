"""Free memory, read from folders that look like /proc and /sys/fs/cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.devices.free_memory import FreeMemory
from engine.devices.host_memory import free_host_memory

GIB = 2**30
MEMINFO = {"MemTotal": 16.0, "MemFree": 1.6, "MemAvailable": 8.4, "Cached": 7.0}
V2 = "29 23 0:26 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_OTHERS = "33 31 0:30 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct"
NO_V1_LIMIT = 9223372036854771712


def machine(root: Path, meminfo: dict[str, float] | None = None, groups: str = "", mounts: str = "") -> Path:
    """A machine's folder. meminfo: in GiB."""
    own = root / "proc" / "self"
    own.mkdir(parents=True)
    lines = (f"{name}:    {int(size * 2**20)} kB" for name, size in (meminfo or MEMINFO).items())
    (root / "proc" / "meminfo").write_text("\n".join([*lines, "HugePages_Total:       0\n"]))
    (own / "cgroup").write_text(groups)
    (own / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/root rw\n" + mounts)
    return root


def group(root: Path, path: str, **files: object) -> None:
    """A control group's folder. Names of files have `__` for a dot; sizes are in GiB."""
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = str(int(content * GIB)) if isinstance(content, float) else str(content)
        (folder / name.replace("__", ".")).write_text(text + "\n")


def stat(inactive: float, active: float, prefix: str = "") -> str:
    sizes = f"{prefix}inactive_file {int(inactive * GIB)}\n{prefix}active_file {int(active * GIB)}"
    return f"anon 77\nfile {int((inactive + active + 1) * GIB)}\n{sizes}\nshmem {GIB}"


def told(root: Path) -> str:
    return str(free_host_memory(root))


@pytest.mark.parametrize(
    ("meminfo", "free"),
    [
        (MEMINFO, "8.40"),
        ({"MemTotal": 16.0, "MemFree": 1.6, "Cached": 7.0}, "8.60"),
        ({"MemFree": 1.6, "MemAvailable": 0.0}, "0.00"),
    ],
    ids=["files in memory are free", "before Linux 3.14", "nothing"],
)
def test_a_machine_without_limits_has_what_linux_calls_available(meminfo, free, tmp_path):
    assert told(machine(tmp_path, meminfo)) == f"{free} GiB are free (the machine's available memory)"


@pytest.mark.parametrize(
    ("own", "top", "folder"),
    [
        ("/", "/", ""),
        ("/kubepods/pod1/c1", "/", "kubepods/pod1/c1"),
        ("/docker/c1", "/docker/c1", ""),
        ("/docker/c1/workers", "/docker/c1", "workers"),
        ("/docker/c1", "/", ""),
        ("/../other", "/", ""),
    ],
    ids=["own namespace", "nested", "mounted part", "group of a mounted part", "name outside", "outside of the mount"],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_what_its_limit_leaves_without_the_files_that_it_has_read(version, own, top, folder, tmp_path):
    if version == 2:
        root = machine(tmp_path, groups=f"0::{own}\n", mounts=V2.format(top=top))
        group(root, folder, memory__max=4.0, memory__high="max", memory__current=3.9, memory__stat=stat(1.5, 0.5))
        path = Path("/sys/fs/cgroup", folder, "memory.max")
    else:
        groups = f"9:name=systemd:/else\n4:memory:{own}\n1:cpu,cpuacct:/else\n0::/\n"
        root = machine(tmp_path, groups=groups, mounts=f"{V1_OTHERS}\n{V1.format(top=top)}")
        files = {"memory__limit_in_bytes": 4.0, "memory__usage_in_bytes": 3.9}
        group(root, f"memory/{folder}", **files, memory__stat=stat(9, 9) + "\n" + stat(1.5, 0.5, "total_"))
        path = Path("/sys/fs/cgroup/memory", folder, "memory.limit_in_bytes")
    assert told(root) == f"2.10 GiB are free (the container's memory limit of 4.00 GiB, {path})"


@pytest.mark.parametrize(
    ("groups", "free"),
    [
        ({"a/b": ("max", 1.0), "a": (6.0, 5.0), "": ("max", 9.0)}, "1.00 GiB are free (the container's memory limit"),
        ({"a/b": (2.0, 1.5), "a": (6.0, 5.0)}, "0.50 GiB are free (the container's memory limit"),
        ({"a/b": (2.0, 2.5)}, "0.00 GiB are free (the container's memory limit"),
        ({"a/b": (64.0, 1.0)}, "8.40 GiB are free (the machine's"),
        ({"a/b": ("max", 1.0), "a": ("max", 1.0)}, "8.40 GiB are free (the machine's"),
        ({}, "8.40 GiB are free (the machine's"),
    ],
    ids=["outer", "inner", "over its limit", "above the machine", "none", "no memory controller"],
)
def test_of_nested_groups_the_one_that_leaves_least_counts(groups, free, tmp_path):
    root = machine(tmp_path, groups="0::/a/b\n", mounts=V2.format(top="/"))
    for folder, (limit, used) in groups.items():
        group(root, folder, memory__max=limit, memory__current=used, memory__stat=stat(0, 0))
    assert told(root).startswith(free)


def test_a_limit_above_which_linux_slows_a_group_down_is_a_limit_too(tmp_path):
    root = machine(tmp_path, groups="0::/\n", mounts=V2.format(top="/"))
    group(root, "", memory__max=4.0, memory__high=3.0, memory__current=1.0, memory__stat=stat(0, 0))
    assert told(root) == "2.00 GiB are free (the container's memory limit of 3.00 GiB, /sys/fs/cgroup/memory.high)"


def test_version_1_without_a_limit_has_a_large_number(tmp_path):
    root = machine(tmp_path, groups="4:memory:/\n", mounts=V1.format(top="/"))
    group(root, "memory", memory__limit_in_bytes=NO_V1_LIMIT, memory__usage_in_bytes=GIB, memory__stat="")
    assert told(root) == "8.40 GiB are free (the machine's available memory)"


def test_a_mount_may_have_blanks_in_its_name(tmp_path):
    mounts = r"29 23 0:26 / /sys/fs/cgroup/my\040groups rw - cgroup2 none rw"
    root = machine(tmp_path, groups="0::/\n", mounts=mounts)
    group(root, "my groups", memory__max=1.0, memory__current=0.0, memory__stat=stat(0, 0))
    assert told(root).startswith("1.00 GiB are free (the container's")


def test_this_machine_has_some(tmp_path):
    assert free_host_memory().size > 2**20


def test_what_is_free_is_shared_by_ranks_and_says_so():
    free = FreeMemory(6 * GIB, "the machine's available memory")
    assert free.shared_by(1) == free
    assert str(free.shared_by(4)) == "1.50 GiB are free (the machine's available memory, shared by 4 ranks)"
    assert str(free.less(8 * GIB)) == "0.00 GiB are free (the machine's available memory)"
