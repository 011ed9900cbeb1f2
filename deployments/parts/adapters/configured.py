"""Reads the adapters that the configuration gives a model."""

from __future__ import annotations

from pathlib import Path

from deployments.openai.served.model_source import ModelSource
from deployments.parts.adapters.files import open_served
from deployments.parts.adapters.places import place_of
from deployments.parts.adapters.sources import AdapterSources
from engine.bucket_url import SCHEMES, is_bucket
from engine.errors import ConfigError, StartupError
from engine.lora.errors import AdapterError


def read(source: ModelSource) -> AdapterSources | None:
    """Read the listed adapters; None if the engines compute none. Raises StartupError for an adapter that cannot be
    used."""
    if not source.engine.enable_lora:
        return None
    name, max_rank = source.name, source.engine.max_lora_rank
    folder: str | None = source.section["lora"]["dynamic_folder"]
    if folder is not None and not is_bucket(folder) and not Path(folder).expanduser().is_dir():
        limit = f"an existing folder, or the URL of a folder in a bucket ({', '.join(SCHEMES)})"
        raise ConfigError(f"lora.dynamic_folder of model {name!r}", folder, limit)
    try:
        place_of(folder).names()
    except AdapterError as error:
        raise StartupError(f"lora.dynamic_folder of model {name!r}: {error}") from None
    try:
        modules = tuple(
            open_served(module["name"], module["path"], module["base_model_name"] or name, max_rank)
            for module in source.section["lora_modules"]
        )
    except AdapterError as error:
        raise StartupError(f"lora_modules of model {name!r}: {error}") from None
    return AdapterSources(modules=modules, dynamic_folder=folder, max_rank=max_rank)
