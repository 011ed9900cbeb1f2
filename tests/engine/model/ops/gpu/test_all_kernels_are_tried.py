"""No kernel of ours is left out of an engine's trial: each is launched by an op that has a plain version."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from engine.kernel_trial.twins import Product, rounding_twins, twins
from engine.model.ops import gpu
from engine.parts.lora.rank.adapters import Adapters


def modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(gpu.__path__, f"{gpu.__name__}."):
        yield importlib.import_module(found.name)


def is_kernel(value: Any) -> bool:
    return isinstance(value, JITFunction | InterpretedFunction) and "Grid (" in (value.fn.__doc__ or "")


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__.removeprefix(f'{gpu.__name__}.')}.{kernel.fn.__name__}"


def kernels() -> set[str]:
    return {name_of(value) for module in modules() for value in vars(module).values() if is_kernel(value)}


def names_in(code: CodeType) -> set[str]:
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*map(names_in, inner))


def launched_by(functions: list[FunctionType]) -> set[str]:
    """The kernels that these functions name, and those that functions of ours that they name do."""
    seen, found = set[FunctionType](), set[str]()
    while functions:
        function = functions.pop()
        if function in seen or not function.__module__.startswith("engine."):
            continue
        seen.add(function)
        names = names_in(function.__code__)
        values = [function.__globals__.get(name) for name in names]
        values += [getattr(value, name, None) for value in values if isinstance(value, ModuleType) for name in names]
        found |= {name_of(value) for value in values if is_kernel(value)}
        functions += [value for value in values if isinstance(value, FunctionType)]
    return found


def tried() -> list[FunctionType]:
    """The functions that a trial compares, and the methods of products."""
    methods = [value for kind in Product.__args__ for value in vars(kind).values()]
    compared = *twins(), *Adapters.twins(), *rounding_twins(), *methods
    return [value for value in compared if isinstance(value, FunctionType)]


def test_every_kernel_is_launched_by_an_op_that_a_trial_compares():
    found = kernels()
    assert {"norm.rms_norm_kernel", "experts.moe.grouped_kernel", "logits.penalise_kernel"} <= found
    assert found - launched_by(tried()) == set()


def test_a_kernel_of_an_op_without_a_plain_version_is_found():
    without = [function for function in tried() if function.__module__ != f"{gpu.__name__}.logits"]
    assert kernels() - launched_by(without) == {"logits.mask_kernel", "logits.penalise_kernel"}
