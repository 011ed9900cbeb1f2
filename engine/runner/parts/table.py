"""The table of all parts on a rank, in the order in which they begin a step. Only what opens a runner imports it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

from engine.runner.rank_part import RankPart, RankParts
from engine.runner.rank_setup import RankSetup


class PartSpec(NamedTuple):
    """A part of a rank. Its file is imported only if a rank has it, since some need packages that others do without."""

    place: str
    """File in this folder, and class."""
    has: Callable[[RankSetup], bool] = lambda setup: True
    """Returns whether a rank has the part."""

    def make(self, setup: RankSetup) -> RankPart:
        file, _, name = self.place.partition(".")
        part: RankPart = getattr(importlib.import_module(f".{file}", __package__), name)(setup)
        return part


RANK_PARTS = (
    # begins with a step first and ends with it last: its time counts for the stage
    PartSpec("stages.PipelineStage", lambda setup: setup.config.pipeline_parallel_size > 1),
    PartSpec("images.Images", lambda setup: setup.model.vision is not None or setup.config.encode is not None),
    PartSpec("adapters.Adapters", lambda setup: setup.config.enable_lora),
    PartSpec("drafting.Drafting", lambda setup: setup.config.speculative_config is not None),
    PartSpec("pooling.Pooling"),  # vectors are fetched before a drafter runs, for which nobody waits
    PartSpec("experts.Experts", lambda setup: setup.config.enable_expert_parallel),  # counts no step of warming up
    PartSpec("kv_workers.KVWorkers", lambda setup: setup.config.handoff is not None),
    PartSpec("kv_tiers.KVTiers", lambda setup: setup.config.offloads_kv),
)


def make_parts(setup: RankSetup) -> RankParts:
    """Return the parts that a rank has."""
    return RankParts([spec.make(setup) for spec in RANK_PARTS if spec.has(setup)])
