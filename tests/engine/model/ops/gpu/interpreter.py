"""Makes Triton's interpreter compute as a GPU does where it does not, run programs in no order, and refuse to leave the
memory of a kernel's tensors.

It runs on NumPy, which has neither bfloat16 nor float8: it multiplies the bits of bfloat16 in tl.dot, and cuts digits
off where a GPU rounds to nearest. Private names of Triton 3.6 to 3.9.
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

TORCH = {  # each type, and one for its bits
    tl.float32: (torch.float32, torch.uint32),
    tl.float16: (torch.float16, torch.uint16),
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
}


PATCHED: set[tuple[int, ...]] = set()  # modules of Triton's language, together, that a launch has patched


def make_exact() -> None:
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpreterBuilder.create_dot_scaled = dot_scaled
    TritonSemantic.dot_scaled = with_named_types
    interpreter.InterpretedFunction.__call__ = call


def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of a kernel, tl.sum for one, patching Triton's language once in a launch: as Triton does it,
    anew for every call, this takes ten times as long as all else."""
    modules = tuple(id(value) for value in function.fn.__globals__.values() if value is tl or value is tl.core)
    if modules not in PATCHED:
        interpreter._patch_lang(function.fn)
        PATCHED.add(modules)
    try:
        return function.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def shuffle_programs(seed: int) -> None:
    """Start the programs of every grid in random order, where the interpreter walks through them."""
    rng = random.Random(seed)

    def set_grid_dim(builder: interpreter.InterpreterBuilder, *dims: int) -> None:
        PATCHED.clear()
        builder.grid_dim = dims
        builder.to_start = list(product(*map(range, dims)))
        rng.shuffle(builder.to_start)

    def set_grid_idx(builder: interpreter.InterpreterBuilder, *index: int) -> None:
        builder.grid_idx = builder.to_start.pop()

    interpreter.InterpreterBuilder.set_grid_dim = set_grid_dim
    interpreter.InterpreterBuilder.set_grid_idx = set_grid_idx


class OutOfBounds(IndexError):
    """A program has read or written what belongs to no tensor of its kernel. On a GPU it would be somebody else's."""


class CheckedMemory:
    """Triton's loads, stores and atomics, of the storages that were let in last."""

    def __init__(self, memory: Any):
        self._memory = memory
        self._begins = self._ends = np.empty(0, np.uint64)

    def let_in(self, tensors: list[Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        spans = np.array(sorted((begin, begin + size) for begin, size in storages.items()), np.uint64)
        self._begins, self._ends = spans.reshape(-1, 2).T

    def load(self, pointers: NDArray[Any], mask: NDArray[Any], other: NDArray[Any], dtype: Any) -> NDArray[Any]:
        self._check(pointers, mask, np.dtype(dtype).itemsize)
        return self._memory.load(pointers, mask, other, dtype)

    def store(self, pointers: NDArray[Any], values: NDArray[Any], mask: NDArray[Any]) -> None:
        self._check(pointers, mask, values.itemsize)
        self._memory.store(pointers, values, mask)

    def atomic_rmw(self, how: Any, pointers: NDArray[Any], values: NDArray[Any], mask: NDArray[Any], sem: Any) -> Any:
        self._check(pointers, mask, values.itemsize)
        return self._memory.atomic_rmw(how, pointers, values, mask, sem)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def _check(self, pointers: NDArray[Any], mask: NDArray[Any], size: int) -> None:
        first = np.asarray(pointers, np.uint64)[np.asarray(mask, bool)]
        if not len(first):
            return
        span = np.searchsorted(self._begins, first, "right") - 1
        outside = (span < 0) | (first + np.uint64(size) > self._ends[span])
        if outside.any():
            wrong = int(first[outside][0])
            nearest = int(np.abs(np.stack([self._begins, self._ends]).astype(np.int64) - wrong).min())
            raise OutOfBounds(f"{outside.sum()} of {len(first)} addresses, the first {nearest} bytes from a tensor")


def check_bounds() -> None:
    """Have every kernel refuse addresses outside the storages of the tensors that it is launched with."""
    if isinstance(interpreter._interpreter, CheckedMemory):
        return
    memory = interpreter._interpreter = CheckedMemory(interpreter._interpreter)
    to_host = interpreter.GridExecutor._init_args_hst

    def let_in(executor: interpreter.GridExecutor, args: Any, options: dict[str, Any]) -> Any:
        found, others = to_host(executor, args, options)
        memory.let_in([value for value in (*found, *others.values()) if isinstance(value, Tensor)])
        return found, others

    interpreter.GridExecutor._init_args_hst = let_in


def convert(values: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: object) -> np.ndarray:
    """The bits of `values` in another type, rounded to nearest even."""
    (dtype, bits), (target_dtype, target_bits) = TORCH[source], TORCH[target]
    result = torch.from_numpy(values.copy()).view(bits).view(dtype).to(target_dtype)
    return result.view(target_bits).numpy()


def dot(builder: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: object) -> TensorHandle:
    """a @ b + d, summed in float32, or in int32 for int8."""
    if a.dtype.scalar == tl.int8:
        return TensorHandle(np.matmul(a.data, b.data, dtype=np.int32) + d.data, d.dtype.scalar)
    wide = [convert(x.data, x.dtype.scalar, tl.float32, None).view(np.float32) for x in (a, b)]
    return TensorHandle(np.matmul(*wide) + d.data, d.dtype.scalar)


DOT_SCALED = TritonSemantic.dot_scaled


def with_named_types(semantic: TritonSemantic, *args: Any) -> tl.tensor:
    """tl.dot_scaled, which takes the names of types as a compiler passes them."""
    return DOT_SCALED(semantic, *(tl.constexpr(arg) if isinstance(arg, str) else arg for arg in args))


MXFP4_NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def dot_scaled(
    builder: object, a: TensorHandle, a_scale: None, a_type: object, b: TensorHandle, b_scale: TensorHandle,
    b_type: object, fast_math: bool, a_packed: bool, b_packed: bool, d: TensorHandle,
) -> TensorHandle:  # fmt: skip
    """a @ b + d for b in MXFP4, [inputs / 2, outputs] bytes of two codes, the first in the low bits; b_scale: [outputs,
    inputs / 32] exponents."""
    codes = np.stack((b.data & 15, b.data >> 4), axis=1).reshape(-1, b.data.shape[1])
    numbers = np.where(codes > 7, np.float32(-1), np.float32(1)) * MXFP4_NUMBERS[codes & 7]
    scales = np.exp2(b_scale.data.astype(np.float32) - 127).T.repeat(32, axis=0)
    wide = convert(a.data, a.dtype.scalar, tl.float32, None).view(np.float32)
    return TensorHandle(np.matmul(wide, numbers * scales) + d.data, d.dtype.scalar)
