"""The tables of all parts: of an engine, and of each of its ranks. Only what opens them imports these."""

from __future__ import annotations

# in the order in which they are asked: holds before tiers, since a tier keeps the blocks of a hold that has not ended
PARTS = (
    "pooling", "grammar", "costs", "holds", "kv_tiers", "kv_fetching", "kv_groups", "stages", "images", "speculation",
    "experts", "lora", "handoffs", "thinking_budget", "kv_events", "black_box", "tape",
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
    "kv_groups",  # states get a share of what the others leave free
    "grammar",  # edits logits first, then the others, in vLLM's order
    "logits_processors",
    "thinking_budget",
)
"""Folders of engine/parts whose `rank/make.py` makes a rank's end, in the order in which they begin a step."""

FITTINGS = ("speculation", "handoffs", "pooling", "images")
"""Folders of engine/parts whose `fitting.py` fits options and model to each other, in the order in which they do."""
