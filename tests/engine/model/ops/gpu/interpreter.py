"""Makes Triton's interpreter compute as a GPU does where it does not.

It runs on NumPy, which has neither bfloat16 nor float8: it multiplies the bits of bfloat16 in tl.dot, and cuts digits
off where a GPU rounds to nearest. Private names of Triton 3.6 to 3.9.
"""

from __future__ import annotations

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


def convert(values: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: object) -> np.ndarray:
    """The bits of `values` in another type, rounded to nearest even."""
    (dtype, bits), (target_dtype, target_bits) = TORCH[source], TORCH[target]
    result = torch.from_numpy(values.copy()).view(bits).view(dtype).to(target_dtype)
    return result.view(target_bits).numpy()


def dot(builder: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: object) -> TensorHandle:
    """a @ b + d, summed in float32."""
    wide = [convert(x.data, x.dtype.scalar, tl.float32, None).view(np.float32) for x in (a, b)]
    return TensorHandle(np.matmul(*wide) + d.data, d.dtype.scalar)
