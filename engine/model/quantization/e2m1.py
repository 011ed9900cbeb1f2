"""The numbers of four bits in MXFP4 (OCP Microscaling Formats specification 1.0): a sign, two bits of exponent and one
of fraction, with a common exponent for a group."""

from __future__ import annotations

import torch
from torch import Tensor

DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the numbers encoded by the low three bits; the fourth bit is the sign
EXPONENT_BIAS = 127


def doubled(codes: Tensor) -> Tensor:
    """Return twice the number that each code stands for, int8."""
    numbers = torch.tensor((*DOUBLED, *(-n for n in DOUBLED)), dtype=torch.int8, device=codes.device)
    return numbers[codes.int()]


def half_scale(exponents: Tensor) -> Tensor:
    """Return half the scale that each exponent stands for, float32."""
    return torch.exp2(exponents.float() - (EXPONENT_BIAS + 1))
