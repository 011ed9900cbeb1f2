"""Makes Triton's interpreter compute as a GPU does where it does not, and run programs in no order.

It runs on NumPy, which has neither bfloat16 nor float8: it multiplies the bits of bfloat16 in tl.dot, and cuts digits
off where a GPU rounds to nearest. Private names of Triton 3.6 to 3.9.
"""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

TORCH = {  # each type, and one for its bits
    tl.float32: (torch.float32, torch.uint32),
    tl.float16: (torch.float16, torch.uint16),
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
}


def make_exact() -> None:
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot


def shuffle_programs(seed: int) -> None:
    """Start the programs of every grid in random order, where the interpreter walks through them."""
    rng = random.Random(seed)

    def set_grid_dim(builder: interpreter.InterpreterBuilder, *dims: int) -> None:
        builder.grid_dim = dims
        builder.to_start = list(product(*map(range, dims)))
        rng.shuffle(builder.to_start)

    def set_grid_idx(builder: interpreter.InterpreterBuilder, *index: int) -> None:
        builder.grid_idx = builder.to_start.pop()

    interpreter.InterpreterBuilder.set_grid_dim = set_grid_dim
    interpreter.InterpreterBuilder.set_grid_idx = set_grid_idx


def convert(values: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: object) -> np.ndarray:
    """The bits of `values` in another type, rounded to nearest even."""
    (dtype, bits), (target_dtype, target_bits) = TORCH[source], TORCH[target]
    result = torch.from_numpy(values.copy()).view(bits).view(dtype).to(target_dtype)
    return result.view(target_bits).numpy()


def dot(builder: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: object) -> TensorHandle:
    """a @ b + d, summed in float32."""
    wide = [convert(x.data, x.dtype.scalar, tl.float32, None).view(np.float32) for x in (a, b)]
    return TensorHandle(np.matmul(*wide) + d.data, d.dtype.scalar)
