"""The tables of all parts: of an engine, and of each of its ranks. Only what opens them imports these."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

# in the order in which they are asked: holds before tiers, since a tier keeps the blocks of a hold that has not ended
PARTS = (
    "pooling", "grammar", "costs", "holds", "kv_tiers", "kv_fetching", "kv_groups", "stages", "images", "speculation",
    "experts", "lora", "handoffs", "thinking_budget", "kv_check", "kv_events", "black_box", "tape",
)  # fmt: skip
"""Folders of engine/parts whose `make.py` makes the plan end. What an engine lacks is imported, and makes nothing."""

RANK_PARTS = (
    "stages",  # begins with a step first and ends with it last: its time counts for the stage
    "images",
    "lora",
    "speculation",
    "pooling",  # vectors are fetched before a drafter runs, for which nobody waits
    "experts",  # counts no step of warming up
    "handoffs",
    "kv_tiers",
    "kv_check",
    "kv_groups",  # states get a share of what the others leave free
    "grammar",  # edits logits first, then the others, in vLLM's order
    "logits_processors",
    "thinking_budget",
)
"""Folders of engine/parts whose `rank/make.py` makes a rank's end, in the order in which they begin a step."""

FITTINGS = ("speculation", "handoffs", "pooling", "images")
"""Folders of engine/parts whose `fitting.py` fits options and model to each other, in the order in which they do."""


def part_modules(file: str) -> list[ModuleType]:
    """Return the `FILE.py` of the folders in PARTS that have one."""
    return _found([f"{__package__}.{folder}.{file}" for folder in PARTS])


def rank_modules(file: str) -> list[ModuleType]:
    """Return the `rank/FILE.py` of the folders in RANK_PARTS that have one."""
    return _found([f"{__package__}.{folder}.rank.{file}" for folder in RANK_PARTS])


def _found(names: list[str]) -> list[ModuleType]:
    return [import_module(name) for name in names if find_spec(name) is not None]
