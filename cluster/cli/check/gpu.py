"""GPUs, and what torch can do with them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import torch

from cluster.cli.check.finding import Finding

TOPIC = "GPU"
QUERY = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]


def check_gpus() -> Iterator[Finding]:
    driver = gpus_of_driver()
    if not torch.cuda.is_available():
        yield without_torch(driver)
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        gib, capability = properties.total_memory / 2**30, f"{properties.major}.{properties.minor}"
        yield Finding("ok", TOPIC, f"{number}: {properties.name}, {gib:.0f} GiB, compute capability {capability}")
        if properties.major < 8:
            advice = "bfloat16 is slow here: use --dtype float16"
            yield Finding("warning", TOPIC, f"{number} is older than Ampere", advice)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield Finding("ok", "CUDA", f"{torch.version.cuda}, NCCL {nccl}" + (f"; driver: {driver[0]}" if driver else ""))


def gpus_of_driver() -> list[str]:
    """Lines like `NVIDIA L4, 550.54.15, 23034 MiB`; none without a driver."""
    if shutil.which(QUERY[0]) is None:
        return []
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def without_torch(driver: list[str]) -> Finding:
    if not driver:
        return Finding("ok", TOPIC, "none; models run on the CPU")
    build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build for CPUs"
    advice = "Install a build for the driver's CUDA: https://pytorch.org/get-started/locally"
    return Finding("problem", TOPIC, f"torch {torch.__version__} {build} and cannot use {'; '.join(driver)}", advice)
