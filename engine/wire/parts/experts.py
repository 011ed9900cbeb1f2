"""Experts that are divided among ranks."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from engine.wire.part_record import PartRecord


class ExpertStats(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a pipeline stage whose ranks share whole experts."""

    stage: int
    rank_tokens: list[int]
    """Tokens for which each rank has computed an expert since the start, over all layers. The copies of an expert count
    as if they had equal shares."""
    balancedness: float
    """Mean load of a rank divided by the maximum, in the last window: 1 if ranks have equal loads."""
    top: list[tuple[int, int, float]]
    """The most loaded experts of the last window: layer, expert, and its share of the layer's load."""
    moved: int = 0
    """Copies of experts that have moved since the start."""
    stopped: bool = False
    """Whether experts move no more, because a rank failed while it sent or received some."""


class ExpertOrder(PartRecord, frozen=True, array_like=True):
    """What ranks do with their experts before a step (engine/eplb/)."""

    part: ClassVar[str] = "experts"

    measure: bool = False
    """Read the load since the last time, and begin to count again."""
    move: bool = False
    """Begin to move experts by this load."""
    commit: bool = False
    """Use the experts that have arrived on all ranks."""
    stop: bool = False
    """Forget the experts that have arrived, because a rank failed. Nothing moves any more."""


class ExpertAnswer(PartRecord, frozen=True, array_like=True):
    """What a rank tells rank 0 about its experts: one of these."""

    part: ClassVar[str] = "experts"

    load: ExpertStats | None = None
    """From the first rank of each stage, after `measure`."""
    arrived: bool = False
    """Experts of a layer have arrived, and wait for `commit`."""
    done: bool = False
    """All moves have taken effect."""
    failed: str = ""
    """Why this rank can move no experts any more."""


class ExpertReport(PartRecord, frozen=True):
    """The experts of one engine whose ranks share whole experts."""

    part: ClassVar[str] = "experts"

    stages: list[ExpertStats]
    """Of each stage, once a window has been measured."""


class SharedSteps(PartRecord, frozen=True, kw_only=True):
    """Steps that an engine has taken together with engines that share its experts, since its start."""

    part: ClassVar[str] = "shared_experts"

    steps: dict[str, int]
    """Steps by whether they were its `own`, or it only `served` the other engines."""
    wait_s: float
    """Seconds in which it waited for the other engines to begin a step."""
