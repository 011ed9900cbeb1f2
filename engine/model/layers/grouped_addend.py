"""What others add to many products of equal sizes, one for each expert or head."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class GroupedAddend(Protocol):
    def add_each(self, out: Tensor, x: Tensor) -> None:
        """Add to all products of each token. out: [tokens, products, outputs], contiguous; x: [tokens, products,
        inputs]."""

    def add(self, out: Tensor, x: Tensor, products: Tensor, tokens: Tensor, part: int = 0) -> None:
        """Add to one part of the products, for pairs of a token and a product. out: [pairs, outputs]; x:
        [pairs, inputs]."""
