"""`python -m engine.model.ops.cpu` compiles all kernels, so that on this machine no start has to."""

import importlib
import pkgutil

from engine.model.ops import cpu
from engine.model.ops.cpu.kernel import Kernel

for module in pkgutil.iter_modules(cpu.__path__, f"{cpu.__name__}."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for kernel in Kernel.imported:
    for dtype in kernel.entries:
        kernel.compile(dtype)
