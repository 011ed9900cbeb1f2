"""One rank of several, which computes its part without the others."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.distributed.tp_group import TPGroup


class RankAlone(TPGroup):
    """The first of `size` ranks. What others would add is left out, and what they would send is its own once more."""

    def __init__(self, size: int):
        super().__init__(0, size)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)
