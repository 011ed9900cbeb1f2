"""CPUs that a process can use, read from folders that look like /proc and /sys/fs/cgroup."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.devices.usable_cpus import threads_of_rank, usable_cpus
from tests.engine.devices.test_host_memory import V2, group, machine

V1_CPU = "33 31 0:30 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct"


@pytest.fixture(autouse=True)
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


@pytest.mark.parametrize(
    ("outer", "inner", "cpus"),
    [
        ("max 100000", "max 100000", 16.0),
        ("max 100000", "250000 100000", 2.5),
        ("400000 100000", "max 100000", 4.0),
        ("100000 100000", "400000 100000", 1.0),
        ("6400000 100000", "max 100000", 16.0),
    ],
    ids=["no quota", "inner", "outer", "the least", "above the machine"],
)
def test_of_nested_groups_the_least_quota_counts(outer, inner, cpus, tmp_path):
    root = machine(tmp_path, groups="0::/pod/container\n", mounts=V2.format(top="/"))
    group(root, "pod", cpu__max=outer)
    group(root, "pod/container", cpu__max=inner)
    assert usable_cpus(root) == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("-1", 16.0), ("300000", 3.0)])
def test_version_1_has_two_files_for_a_quota(quota, cpus, tmp_path):
    root = machine(tmp_path, groups="4:cpu,cpuacct:/pod\n", mounts=V1_CPU)
    group(root, "cpu/pod", cpu__cfs_quota_us=quota, cpu__cfs_period_us="100000")
    assert usable_cpus(root) == cpus


def test_a_machine_without_groups_has_the_cpus_on_which_the_process_may_run(tmp_path: Path):
    assert usable_cpus(machine(tmp_path)) == 16.0


@pytest.mark.parametrize(
    ("cpus", "num_ranks", "threads"),
    [(2, 1, 2), (2, 2, 1), (2, 3, 1), (0.5, 1, 1), (2.5, 1, 2), (8, 1, 8), (9, 1, 8), (64, 1, 63), (64, 4, 15)],
)
def test_ranks_share_the_cpus_and_above_eight_one_is_left_to_ingresses(cpus, num_ranks, threads):
    assert threads_of_rank(cpus, num_ranks) == threads
