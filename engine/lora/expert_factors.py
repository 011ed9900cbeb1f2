"""Adapters that hold the factors of all experts of a layer in two matrices. PEFT writes them for models that hold the
weights of all experts in one parameter (`target_parameters`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from engine.errors import Described
from engine.lora.errors import AdapterError


class ExpertSizes(NamedTuple):
    """Number and sizes of the experts of one layer."""

    experts: int
    hidden: int
    intermediate: int
    wide: int
    """Outputs of the projections to gate and up together, or of the one to up."""


def of_each_expert(
    adapter: str, module: str, a: Tensor, b: Tensor, sizes: ExpertSizes, may_be_swapped: bool
) -> tuple[bool, Iterator[tuple[Tensor, Tensor]]]:
    """Return whether an adapter changes the projections to gate and up, not those from the intermediate size, and each
    expert's A [rank, inputs] and B [outputs, rank].

    a: [experts * rank, inputs]; the rows of one expert are neighbours. b: [outputs, rank * experts]; neighbouring
    columns belong to different experts. The file does not name the parameter, so it is found by its sizes.
    may_be_swapped: whether inputs and outputs may be exchanged. Raises AdapterError if the sizes fit no parameter or
    more than one.
    """
    experts, hidden, inner, wide = sizes
    found = a.shape[1], len(b)
    fits = [
        (is_first, swapped)
        for is_first, shape in ((True, (hidden, wide)), (False, (inner, hidden)))
        for swapped in (False, True)[: 1 + may_be_swapped]
        if found == (shape[::-1] if swapped else shape)
    ]
    if len(a) % experts or len(fits) != 1:
        limit = f"of {experts} experts with {hidden} inputs and {wide} outputs, or {inner} and {hidden}"
        limit += "; these sizes fit more than one parameter" if fits else ""
        raise AdapterError(adapter, module, Described(f"{list(a.shape)} and {list(b.shape)}"), limit)
    is_first, swapped = fits[0]
    each_a, each_b = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    if swapped:
        each_a, each_b = each_b.mT, each_a.mT
    return is_first, zip(each_a, each_b, strict=True)
