"""The base of the CPU kernels: typed pointers, bfloat16, and torch's own threads.

A kernel is a Numba function of one argument, an array of int64. Element 0 is a counter from which threads take work;
the others are addresses and sizes. `launch` runs it on all threads of torch's OpenMP pool, so that no second pool
competes for the cores. Compiled code is cached on disk, in the first of these folders that can be written:
NUMBA_CACHE_DIR, the source's folder, the user's cache, a folder of the user's below /tmp. There it has a folder for
each state of the sources: Numba compiles a kernel again only if the kernel's own file has changed, but kernels contain
functions of other files too.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, config, njit, types
from numba.extending import intrinsic
from torch import Tensor

from engine.devices.amx_permission import may_use_amx
from engine.user_folder import own_folder, private_folder

logger = logging.getLogger(__name__)

I64 = ir.IntType(64)
I32 = ir.IntType(32)
# Sums and products keep the order in which they are written. If the compiler could reorder them, it would do so in one
# way in a loop of vectors and in another way in a loop of single values, and it chooses between these two by the
# addresses of arrays and the place in a row. So bits would depend on both
OPTIONS = {"fastmath": {"nnan", "ninf", "nsz", "contract"}, "error_model": "numpy"}
PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# decorator for functions that are inlined into kernels. If they were called, a process that has just compiled a kernel
# would call another copy than one that has loaded the kernel from the cache, with other instructions and so other bits
device_function = njit(nogil=True, boundscheck=False, forceinline=True, **OPTIONS)
# decorator for functions that sum numbers and write to no memory: the order of such a sum depends only on their number
sum_function = njit(nogil=True, boundscheck=False, forceinline=True, **{**OPTIONS, "fastmath": True})


def keeps_code() -> bool:
    """Return whether Numba can cache compiled code in our folder. It raises RuntimeError if it cannot."""
    if not config.CACHE_DIR:  # else it would look for a folder itself
        return False
    try:
        njit(cache=True)(keeps_code)
    except RuntimeError:
        return False
    return True


def bring_compiled(folder: Path) -> None:
    """Copy compiled kernels from a container image to Numba's cache: Numba reads only folders that it can write."""
    for file in folder.rglob("*.nb[ci]") if config.CACHE_DIR else ():
        target = Path(config.CACHE_DIR) / file.relative_to(folder)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = target.with_suffix(f".{os.getpid()}")  # other ranks do the same
            shutil.copyfile(file, copy)
            copy.replace(target)


def digest_of(sources: Path) -> str:
    """Return a digest of all Python files below a folder."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(sources.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def cache_folder(digest: str) -> str:
    """Create the folder for kernels of sources with this digest. Returns an empty string if none can be written, or
    others can write to it: whoever writes Numba's index there runs code here, since it is a pickle."""
    given, own = config.CACHE_DIR, Path(__file__).parent / "__pycache__"
    for folder in [given] if given else [own, Path("~/.cache/numba").expanduser(), private_folder()]:
        with suppress(OSError):
            if folder is not None and os.access(found := own_folder(Path(folder, digest)), os.W_OK):
                return str(found)
    return ""


# kernels with AMX's instructions are apart from those of a process that may not use them, which they would end
SOURCES = digest_of(Path(__file__).parent) + ("-amx" if may_use_amx() else "")
config.CACHE_DIR = cache_folder(SOURCES)
if not keeps_code():
    logger.warning("compiled kernels cannot be stored, so every start compiles them again; set NUMBA_CACHE_DIR")
bring_compiled(Path(sys.prefix) / "kernels" / SOURCES)
compiled = cfunc(types.void(types.CPointer(types.int64)), cache=keeps_code(), **OPTIONS)


def kernel(function: Callable[[Any], None]) -> Callable[[], Any]:
    """Make an entry point from a function of `args`. It is compiled, or loaded from the cache, on first use, since most
    models need only one dtype of each kernel."""
    return cache(lambda: compiled(function))


@intrinsic
def take(_: Any, args: Any, count: Any) -> Any:
    """Take the next `count` items of work for this thread: return args[0] and increase it, atomically."""
    signature = types.int64(types.CPointer(types.int64), types.int64)
    return signature, lambda context, builder, sig, a: builder.atomic_rmw("add", a[0], a[1], "acq_rel")


@intrinsic
def as_bf16(_: Any, address: Any) -> Any:
    """Cast an address to a pointer to bfloat16, which Numba knows as uint16."""
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
def power_of_two(_: Any, exponent: Any) -> Any:
    """Return 2.0 ** exponent as float32, for int32 exponents from -126 to 127."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, a: Any) -> Any:
        biased = builder.add(a[0], ir.Constant(I32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(I32, 23)), ir.FloatType())

    return types.float32(types.int32), generate


@device_function
def exp(x: Any) -> Any:
    """Return e ** x in float32, with a relative error of 2e-7. Arithmetic only, so that loops can be vectorised.

    Computed as 2 ** y, split into the integer part of y and a polynomial for the rest (minimax, Cephes' exp2f).
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


@sum_function
def sum_of_squares(x: Any, first: int, size: int) -> Any:
    total = np.float32(0.0)
    for i in range(first, first + size):
        value = load(x, i)
        total += value * value
    return total


@device_function
def work(args: Any, total: int, at_once: int = 1) -> Any:
    """Yield this thread's share of `total` items of work. It takes `at_once` of them at a time."""
    while True:
        first = take(args, at_once)
        if first >= total:
            break
        for item in range(first, min(first + at_once, total)):  # noqa: UP028 - Numba knows no `yield from`
            yield item


@cache
def openmp() -> ctypes.CDLL | None:
    """Return the OpenMP runtime that torch has loaded; None if it is not GNU's."""
    library = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    if not library.exists():
        return None
    runtime = ctypes.CDLL(str(library))
    runtime.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    runtime.GOMP_parallel.restype = None
    return runtime


class Recorder(threading.local):
    """Holds the graph that records this thread's kernels, or None."""

    graph: Any = None


recorder = Recorder()


class TokenCount(int):
    """The number of a step's tokens, or a multiple, as an argument of a kernel. A replay of a graph may replace it."""


class CpuKernel:
    """A kernel: one entry point per dtype, launched with tensors and integers."""

    imported: ClassVar[list[CpuKernel]] = []

    def __init__(self, entries: dict[torch.dtype, Callable[[], Any]]):
        self.entries = entries
        self._addresses: dict[torch.dtype, int] = {}
        self._direct: dict[torch.dtype, Callable[[Any], None]] = {}
        CpuKernel.imported.append(self)

    def compile(self, dtype: torch.dtype) -> None:
        self._addresses[dtype] = address = self.entries[dtype]().address
        self._direct[dtype] = PROTOTYPE(address)

    def launch(self, dtype: torch.dtype, items: int, *args: Tensor | int) -> None:
        """Run the kernel over `items` items of work, on this thread alone if there is only one. Tensors are passed by
        address: the caller ensures that they are contiguous where the kernel needs it."""
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


def compile_imported(dtype: torch.dtype) -> None:
    """Compile the kernels that layers have imported."""
    for kernel in [kernel for kernel in CpuKernel.imported if dtype in kernel.entries]:
        kernel.compile(dtype)


def each_dtype(rows: Any) -> CpuKernel:
    """Return the kernel that a device function computes in bfloat16 and float32. rows: takes a cast to a pointer, the
    bytes of an element if it has a parameter for them, and the kernel's `args`.

    The entry points are made from text, because closures over a compiled function cannot be cached: their key in
    Numba's cache contains that function's number in this process.
    """
    code, name, entries = rows.py_func.__code__, rows.py_func.__name__, {}
    for dtype, cast in ((torch.bfloat16, as_bf16), (torch.float32, as_f32)):
        size = f"{dtype.itemsize}, " if code.co_argcount == 3 else ""
        text = f"def {name}_{dtype.itemsize}(args): {name}(cast, {size}args)"
        names = {"__name__": rows.py_func.__module__, name: rows, "cast": cast}
        exec(compile("\n" * (code.co_firstlineno - 1) + text, code.co_filename, "exec"), names)
        entries[dtype] = kernel(names[f"{name}_{dtype.itemsize}"])
    return CpuKernel(entries)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory for a kernel's output. During a recording it is the graph's memory, otherwise new memory."""
    if recorder.graph is not None:
        return recorder.graph.memory.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype)


@cache
def constants(*values: float) -> Tensor:
    """Return float32 values as a tensor for a kernel, which takes only addresses and integers."""
    return torch.tensor(values, dtype=torch.float32)
