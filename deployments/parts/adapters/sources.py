"""The adapters that a model has before any is loaded at run time."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.openai.served.served_model import ModelInfo
from deployments.served_adapter import ServedAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSources:
    """The configured adapters of one model, and the folder of others."""

    modules: tuple[ServedAdapter, ...] = ()
    """Adapters that the configuration lists."""
    dynamic_folder: str | None = None
    """Folder with an adapter in each sub-folder, which has its name."""
    max_rank: int
    """Highest rank that the engines compute."""


def sources_of(info: ModelInfo) -> AdapterSources | None:
    """Return the adapters of a model; None if its engines compute none."""
    return info.of.get("adapters")
