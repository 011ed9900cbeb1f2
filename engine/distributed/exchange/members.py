"""The ranks of engines that share experts, and what every exchange between them can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

PER_RANK = 1 << 16  # more than a rank has slots for experts of a layer

Counts = Sequence[int]
"""Number of rows of each engine."""


class AllRanks(Protocol):
    """All ranks of all engines, engine by engine: a TPGroup."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, x: Tensor) -> Tensor: ...

    def reduce_scatter(self, x: Tensor) -> Tensor: ...

    def all_to_all(self, x: Tensor, counts: Sequence[Counts]) -> Tensor: ...

    def exchange(self, value: str) -> list[str]: ...


@dataclass(slots=True)
class Members:
    """The ranks, of which each engine has `width` neighbours."""

    ranks: AllRanks
    width: int
    measured: bool = False
    """Whether the memory of the largest step is measured: then rows go to all ranks, the most that a rank can get, and
    the same comes back."""

    @property
    def engines(self) -> int:
        return self.ranks.size // self.width

    @property
    def engine(self) -> int:
        """The engine of this rank."""
        return self.ranks.rank // self.width

    @property
    def place(self) -> int:
        """The number of this rank in its engine."""
        return self.ranks.rank % self.width

    def share_size(self, counts: Counts) -> int:
        """Return how many rows a rank sends for its engine at most."""
        return -(-max(counts) // self.width)

    def share_of(self, counts: Counts) -> slice:
        """Return which of the engine's rows this rank sends, and gets results for."""
        size = self.share_size(counts)
        return slice(self.place * size, (self.place + 1) * size)

    def of_engine(self, share: Tensor, counts: Counts) -> Tensor:
        """Return results for all rows of the engine: those of this rank's share, perhaps with padding behind them, and
        0 for the others."""
        if self.width == 1:
            return share[: counts[self.engine]]
        out = share.new_zeros(counts[self.engine], *share.shape[1:])
        own = out[self.share_of(counts)]
        own.copy_(share[: len(own)])
        return out


class Dispatched(Protocol):
    """The rows that have come to this rank, and the way back for its results."""

    @property
    def x(self) -> Tensor:
        """[rows, hidden]."""

    @property
    def places(self) -> Tensor:
        """[rows, k] integers: where the experts of each row are, see `Exchange.dispatch`."""

    @property
    def weights(self) -> Tensor:
        """[rows, k], of the dtype of x."""

    def combine(self, sums: Tensor) -> Tensor:
        """Return the sums over all ranks, in their order, of what they have for this engine's rows: [counts[engine],
        hidden]. Each rank of an engine gets a share of its rows, and 0 for the others. sums: what this rank has,
        [rows, hidden]."""

    def combine_pairs(self, parts: Tensor) -> Tensor:
        """Return the products of each pair of a row of this engine and one of its experts, of the part with this rank's
        number in its engine: [counts[engine], k, ...]. parts: [ranks of an engine, rows, k, ...], of which only the
        pairs count whose expert is on this rank; 0 for all others."""


class Exchange(Protocol):
    """Carries the rows of a layer to the ranks that have their experts, and the results back. A call of `dispatch` is
    followed by those of its `combine` or `combine_pairs`. All ranks make the same calls."""

    can_be_captured: bool
    """Whether CUDA graphs can hold it: whether it needs no sizes that only the device knows."""

    def dispatch(self, x: Tensor, places: Tensor, weights: Tensor, counts: Counts) -> Dispatched:
        """Send this engine's rows: x [counts[engine], hidden], and the places [counts[engine], k] and weights of their
        experts. A place is the number of the rank that has the expert, times PER_RANK, plus its slot there."""
