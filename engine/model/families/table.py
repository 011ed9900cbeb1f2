"""The table of families: which one computes an architecture."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from engine.model.families.family import Family

TABLES = ("llama", "qwen3", "llama_like", "experts", "gemma", "latent", "hybrid")
"""Files beside this one. Each has FAMILIES: families by the architecture that config.json names."""
OTHERS = "other_architectures"
"""The file whose `family_of` computes any other architecture, or refuses it."""


@cache
def families() -> dict[str, Family]:
    """Return the families of generative models that have code here, by architecture."""
    found: dict[str, Family] = {}
    for table in TABLES:
        found |= import_module(f".{table}", __package__).FAMILIES
    return found


def find_family(architecture: str) -> Family:
    """Return the family of an architecture. Raises UnsupportedArchitecture."""
    family = families().get(architecture)
    if family is None:
        family = import_module(f".{OTHERS}", __package__).family_of(architecture)
    return family
