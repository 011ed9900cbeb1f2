"""`python -m engine.model.ops.cpu` compiles all kernels, so that no later start on this machine has to."""

import importlib
import multiprocessing
import os
import pkgutil
from concurrent.futures import ProcessPoolExecutor

from engine.model.ops import cpu
from engine.model.ops.cpu.kernel import CpuKernel

MAX_PROCESSES = 8  # each takes some hundred MiB

for module in pkgutil.walk_packages(cpu.__path__, f"{cpu.__name__}."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
ENTRIES = [(kernel, dtype) for kernel in CpuKernel.imported for dtype in kernel.entries]


def compile_entry(number: int) -> None:
    kernel, dtype = ENTRIES[number]
    kernel.compile(dtype)


if __name__ == "__main__":
    processes = min(os.cpu_count() or 1, MAX_PROCESSES)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        list(pool.map(compile_entry, range(len(ENTRIES))))
