"""The base of the CPU kernels: typed pointers, bfloat16, and torch's own threads.

A kernel is a Numba function of one argument, an array of int64: element 0 is a counter from which the threads take
their work, the others are addresses and sizes. `launch` runs it on all threads of torch's OpenMP pool, so that no
second pool competes for the cores. Compiled code is cached on disk where NUMBA_CACHE_DIR says, next to the source, in
the user's cache, or in a folder of the user's below /tmp: the first of these that can be written.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, config, njit, types
from numba.extending import intrinsic
from torch import Tensor

from engine.user_folder import private_folder

logger = logging.getLogger(__name__)

I64 = ir.IntType(64)
I32 = ir.IntType(32)
OPTIONS = {"fastmath": True, "error_model": "numpy"}
PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# a function that is compiled into the kernels that call it: if one were called, it would be another copy of it, with
# other instructions and bits, in a process that has just compiled the kernel than in one that has found it in the cache
device_function = njit(nogil=True, boundscheck=False, forceinline=True, **OPTIONS)


def keeps_code() -> bool:
    """Return whether Numba finds a folder for compiled code. It raises RuntimeError where it does not."""
    try:
        njit(cache=True)(keeps_code)
    except RuntimeError:
        return False
    return True


def bring_compiled(folder: Path) -> None:
    """Copy the kernels that an image was built with to Numba's cache: it reads no folder that it cannot write."""
    for file in folder.rglob("*.nb[ci]") if config.CACHE_DIR else ():
        target = Path(config.CACHE_DIR) / file.relative_to(folder)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = target.with_suffix(f".{os.getpid()}")  # other ranks do the same
            shutil.copyfile(file, copy)
            copy.replace(target)


if not keeps_code():
    config.CACHE_DIR = str(private_folder() or "")
    if not keeps_code():
        logger.warning("compiled kernels can be kept nowhere, so every start compiles them; set NUMBA_CACHE_DIR")
bring_compiled(Path(sys.prefix) / "kernels")
compiled = cfunc(types.void(types.CPointer(types.int64)), cache=keeps_code(), **OPTIONS)


def kernel(function: Callable[[Any], None]) -> Callable[[], Any]:
    """Make an entry point of `def name_bf16(args): name(as_bf16, args)`. It is compiled, or found in the cache, when it
    is first asked for: most models need one dtype of each kernel. Each is written out, because the cache never finds a
    closure over a compiled function again: Numba takes that function's number in this process for a part of the key."""
    return cache(lambda: compiled(function))


@intrinsic
def take(_: Any, args: Any, count: Any) -> Any:
    """Take the next `count` items of work for this thread: args[0] before it is raised, in one atomic step."""
    signature = types.int64(types.CPointer(types.int64), types.int64)
    return signature, lambda context, builder, sig, a: builder.atomic_rmw("add", a[0], a[1], "acq_rel")


@intrinsic
def as_bf16(_: Any, address: Any) -> Any:
    """Pointer to bfloat16, which Numba knows as uint16."""
    signature = types.CPointer(types.uint16)(types.int64)
    return signature, lambda context, builder, sig, a: builder.inttoptr(a[0], ir.IntType(16).as_pointer())


@intrinsic
def as_f32(_: Any, address: Any) -> Any:
    signature = types.CPointer(types.float32)(types.int64)
    return signature, lambda context, builder, sig, a: builder.inttoptr(a[0], ir.FloatType().as_pointer())


@intrinsic
def as_i32(_: Any, address: Any) -> Any:
    signature = types.CPointer(types.int32)(types.int64)
    return signature, lambda context, builder, sig, a: builder.inttoptr(a[0], I32.as_pointer())


@intrinsic
def as_i64(_: Any, address: Any) -> Any:
    signature = types.CPointer(types.int64)(types.int64)
    return signature, lambda context, builder, sig, a: builder.inttoptr(a[0], I64.as_pointer())


@intrinsic
def load(_: Any, pointer: Any, index: Any) -> Any:
    """Load element `index` of a bfloat16 or float32 array as float32."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, a: Any) -> Any:
        value = builder.load(builder.gep(a[0], [a[1]]))
        if sig.args[0].dtype == types.float32:
            return value
        return builder.bitcast(builder.shl(builder.zext(value, I32), ir.Constant(I32, 16)), ir.FloatType())

    return types.float32(pointer, types.int64), generate


@intrinsic
def store(_: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Write a float32 value as element `index`, rounded to nearest even for bfloat16."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, a: Any) -> Any:
        value = a[2]
        if sig.args[0].dtype == types.uint16:
            bits = builder.bitcast(value, I32)
            odd = builder.and_(builder.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
            rounded = builder.add(builder.add(bits, ir.Constant(I32, 0x7FFF)), odd)
            value = builder.trunc(builder.lshr(rounded, ir.Constant(I32, 16)), ir.IntType(16))
        builder.store(value, builder.gep(a[0], [a[1]]))
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.float32), generate


@intrinsic
def divide(_: Any, a: Any, b: Any) -> Any:
    """a / b as float32, rounded once. Numba's own division is an estimate where a loop is vectorised, and none in the
    rest of that loop (`fastmath`), so that a value's bits would depend on its place in a row."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.fdiv(args[0], args[1], flags=("contract",))

    return types.float32(types.float32, types.float32), generate


@intrinsic
def power_of_two(_: Any, exponent: Any) -> Any:
    """2.0 ** exponent as float32, for int32 exponents from -126 to 127."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, a: Any) -> Any:
        biased = builder.add(a[0], ir.Constant(I32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(I32, 23)), ir.FloatType())

    return types.float32(types.int32), generate


@device_function
def exp(x: Any) -> Any:
    """e ** x in float32, to 2e-7 relative; arithmetic only, so that loops over it can be vectorised.

    2 ** x split into its integer part and a polynomial for the rest (minimax, Cephes' exp2f).
    """
    x = min(max(x * np.float32(1.4426950408889634), np.float32(-126.0)), np.float32(126.0))
    whole = np.floor(x + np.float32(0.5))
    f = x - whole
    p = np.float32(1.535336188319500e-4)
    p = p * f + np.float32(1.339887440266574e-3)
    p = p * f + np.float32(9.618437357674640e-3)
    p = p * f + np.float32(5.550332471162809e-2)
    p = p * f + np.float32(2.402264791363012e-1)
    p = p * f + np.float32(6.931472028550421e-1)
    return (p * f + np.float32(1.0)) * power_of_two(np.int32(whole))


@cache
def openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded; None if it is not GNU's."""
    library = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    if not library.exists():
        return None
    runtime = ctypes.CDLL(str(library))
    runtime.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    runtime.GOMP_parallel.restype = None
    return runtime


class Recorder(threading.local):
    """The graph that records this thread's kernels, if any."""

    graph: Any = None


recorder = Recorder()


class TokenCount(int):
    """The number of a step's tokens, as an argument of a kernel: in a replay of a graph it may be another."""


class Kernel:
    """A kernel's entry points by dtype, called with tensors and integers."""

    imported: ClassVar[list[Kernel]] = []

    def __init__(self, entries: dict[torch.dtype, Callable[[], Any]]):
        self.entries = entries
        self._addresses: dict[torch.dtype, int] = {}
        self._direct: dict[torch.dtype, Callable[[Any], None]] = {}
        Kernel.imported.append(self)

    def compile(self, dtype: torch.dtype) -> None:
        self._addresses[dtype] = address = self.entries[dtype]().address
        self._direct[dtype] = PROTOTYPE(address)

    def launch(self, dtype: torch.dtype, items: int, *args: Tensor | int) -> None:
        """Run over `items` items of work, on this thread alone if there is only one. Tensors are passed by address: the
        caller makes sure that they are contiguous where the kernel needs it."""
        if dtype not in self._addresses:
            self.compile(dtype)
        values = [arg if isinstance(arg, int) else arg.data_ptr() for arg in args]
        packed = (ctypes.c_int64 * (len(values) + 1))(0, *values)
        if recorder.graph is not None:
            recorder.graph.add(self._addresses[dtype], items, args, packed)
        threads = min(torch.get_num_threads(), items)
        runtime = openmp()
        if threads <= 1 or runtime is None:
            self._direct[dtype](packed)
        else:
            runtime.GOMP_parallel(self._addresses[dtype], packed, threads, 0)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for a kernel's output."""
    if recorder.graph is not None:
        return recorder.graph.memory.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype)


@cache
def constants(*values: float) -> Tensor:
    """float32 values for a kernel, which takes only addresses and integers."""
    return torch.tensor(values, dtype=torch.float32)
