"""Compiles kernels for a GPU where there is none: launchers run as they are, but what they launch is only compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface

Launch = Callable[..., None]


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """What Triton asks a driver for before it compiles. capability: of the GPU, times 10."""

    capability: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # one number for each, since Triton keeps what it has compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A launch that Triton compiles a kernel for."""

    key: str
    """The same for launches that Triton compiles one kernel for."""
    kernel: JITFunction
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    grid: tuple[int, ...]

    def compile(self, capability: int) -> None:
        """Compile it, or find it in the cache."""
        driver.set_active(CompileTarget(capability))
        self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)


@contextmanager
def variants(capability: int) -> Iterator[dict[str, Variant]]:
    """Collect the variants that the `with` block would launch, each once, by key. Nothing is launched."""
    found: dict[str, Variant] = {}
    binders: dict[JITFunction, Callable[..., Any]] = {}

    def item(kernel: JITFunction, grid: tuple[int, ...]) -> Launch:
        if kernel not in binders:
            binders[kernel] = kernel.create_binder()[-1]

        def note(*arguments: Any, **options: Any) -> None:
            _, specialization, chosen = binders[kernel](*arguments, **options)
            key = f"{kernel.fn.__name__} {specialization} {sorted(chosen.items())}"
            found.setdefault(key, Variant(key, kernel, arguments, options, grid))

        return note

    driver.set_active(CompileTarget(capability))
    launch = KernelInterface.__getitem__
    KernelInterface.__getitem__ = item
    try:
        yield found
    finally:
        KernelInterface.__getitem__ = launch
