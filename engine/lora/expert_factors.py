"""Adapters that hold the factors of all experts of a layer in two matrices. PEFT writes them for models that hold the
weights of all experts in one parameter (`target_parameters`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from engine.errors import AdapterError, Described


class ExpertSizes(NamedTuple):
    """Number and sizes of the experts of one layer."""

    experts: int
    hidden: int
    intermediate: int
    wide: int
    """Outputs of the first projections together."""
    projections: tuple[str, ...]
    """The first projections: those to gate and up, which may be one, or the one to up."""
    may_be_swapped: bool
    """Whether an adapter may have inputs and outputs exchanged."""


def of_each_expert(
    adapter: str, module: str, a: Tensor, b: Tensor, sizes: ExpertSizes
) -> tuple[str, tuple[str, ...], Iterator[tuple[Tensor, Tensor]]]:
    """Return the parameter that an adapter changes, the projections that this parameter consists of, and each expert's
    A [rank, inputs] and B [outputs, rank].

    a: [experts * rank, inputs]; the rows of one expert are neighbours. b: [outputs, rank * experts]; neighbouring
    columns belong to different experts. The file does not name the parameter, so it is found by its sizes. If a model
    stores [experts, outputs, inputs], versions of PEFT before 0.19 confused inputs with outputs, and so exchanged the
    sizes of A and B. Raises AdapterError if the sizes fit no parameter or more than one.
    """
    experts, hidden, inner, wide, first, may_be_swapped = sizes
    up = ("up_proj" if first == ("up_proj",) else "gate_up_proj", first)
    found = a.shape[1], len(b)
    fits = [
        (parameter, swapped)
        for parameter, shape in ((up, (hidden, wide)), (("down_proj", ("down_proj",)), (inner, hidden)))
        for swapped in (False, True)[: 1 + may_be_swapped]
        if found == (shape[::-1] if swapped else shape)
    ]
    if len(a) % experts or len(fits) != 1:
        limit = f"of {experts} experts with {hidden} inputs and {wide} outputs, or {inner} and {hidden}"
        limit += "; these sizes fit more than one parameter" if fits else ""
        raise AdapterError(adapter, module, Described(f"{list(a.shape)} and {list(b.shape)}"), limit)
    (parameter, projections), swapped = fits[0]
    each_a, each_b = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    if swapped:
        each_a, each_b = each_b.mT, each_a.mT
    return parameter, projections, zip(each_a, each_b, strict=True)
