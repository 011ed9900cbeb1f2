"""The machine itself: cores, memory, limits, ports, and what its CPU can compute with."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from cluster import haproxy
from cluster.cli.check.finding import Finding

GIB = 2**30
LEAST_FREE_GIB = 2.0
LEAST_SHM_GIB = 0.5  # Ray's object store and ranks that share a machine; containers often have 64 MiB
LEAST_FILES = 4096  # a stream takes a socket in HAProxy, another towards the ingress, and one there


def check_machine() -> Iterator[Finding]:
    yield from check_cpu()
    yield check_memory(psutil.virtual_memory().available / GIB, psutil.virtual_memory().total / GIB)
    if sys.platform == "linux":
        yield check_shared_memory(Path("/dev/shm"))
    yield check_open_files()


def check_ports(host: str, port: int) -> Iterator[Finding]:
    """host, port: where the API is to listen. Raises ConfigError."""
    yield check_port(host, port, "the API", "Stop what listens there, or choose another with --port")
    if sys.platform == "linux":
        for name, number in haproxy.own_ports().items():
            advice = f"Stop what listens there, often another Manta, or set {name}"
            yield check_port("0.0.0.0", number, "HAProxy itself", advice)


def check_cpu() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("ok", "cores", f"{cores} of {os.cpu_count()} may be used")
    quota = cgroup_cores(Path("/sys/fs/cgroup/cpu.max"))
    if quota is not None and quota < cores:
        advice = f"Set engine.num_threads to {max(1, int(quota))}, or threads will be stopped in turn"
        yield Finding("warning", "cores", f"the container gets the time of {quota:g} cores only", advice)
    flags = cpu_flags(Path("/proc/cpuinfo"))
    if flags:
        yield check_flags(flags)


def check_flags(flags: set[str]) -> Finding:
    known = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    told = ", ".join(known) or "none that torch is fast with"
    if "avx2" not in flags:
        return Finding("warning", "CPU vectors", told, "Models will be slow on this CPU")
    return Finding("ok", "CPU vectors", told)


def has_bfloat16(flags: set[str]) -> bool:
    """Whether the CPU multiplies bfloat16 by itself."""
    return bool(flags & {"avx512_bf16", "amx_bf16"})


def cpu_flags(cpuinfo: Path) -> set[str]:
    """Empty where there is no such file, or it names none."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def cgroup_cores(cpu_max: Path) -> float | None:
    """Cores' worth of time that a container gets; None without a limit."""
    try:
        quota, period = cpu_max.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def check_memory(free_gib: float, total_gib: float) -> Finding:
    told = f"{free_gib:.1f} of {total_gib:.1f} GiB are free"
    if free_gib < LEAST_FREE_GIB:
        return Finding("warning", "memory", told, "Ray and one engine need about 2 GiB beside the model")
    return Finding("ok", "memory", told)


def check_shared_memory(folder: Path) -> Finding:
    try:
        free_gib = psutil.disk_usage(str(folder)).free / GIB
    except OSError as error:
        return Finding("warning", "shared memory", f"{folder}: {error.strerror}", "Mount a tmpfs there")
    told = f"{free_gib:.2f} GiB are free in {folder}"
    if free_gib < LEAST_SHM_GIB:
        return Finding("warning", "shared memory", told, "In a container, start it with --shm-size 2g")
    return Finding("ok", "shared memory", told)


def check_open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        advice = f"`ulimit -n {most}` allows more clients at a time"
        return Finding("warning", "open files", f"{shown} at a time", advice)
    return Finding("ok", "open files", f"{shown} at a time")


def check_port(host: str, port: int, use: str, advice: str) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            return Finding("problem", "port", f"{port}, for {use}, cannot be had on {host}: {error.strerror}", advice)
    return Finding("ok", "port", f"{port}, for {use}, is free")
