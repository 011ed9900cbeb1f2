"""Builds the model of an architecture. A family's file is imported only when needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from engine.model.families.family import find_family
from engine.model.ops import dispatch

if TYPE_CHECKING:
    from engine.model.config import ModelConfig
    from engine.model.models.llama import Model
    from engine.model.shard import ShardPlan

Module = TypeVar("Module", bound=nn.Module)


def model_class(architecture: str, mixins: tuple[str, ...] = ()) -> type[Model]:
    """Return the class for an architecture, with classes that are put before it. All have the interface of Llama's."""
    classes = [_class(name) for name in (*mixins, find_family(architecture).model)]
    return type(classes[-1].__name__, tuple(classes), {}) if mixins else classes[0]


def _class(name: str) -> type[Model]:
    file, _, name = name.rpartition(".")
    cls: type[Model] = getattr(importlib.import_module(f".{file}", __package__), name)
    return cls


def build_model(cfg: ModelConfig, tp: ShardPlan, dtype: torch.dtype, device: torch.device | str) -> Model:
    """Build this rank's shard of the model on `device`, with parameters allocated but not initialised.

    Raises UnsupportedArchitecture, or ConfigError where the model cannot be split over `tp.size` ranks.
    """
    cls = model_class(cfg.architecture, cfg.mixins)
    return build(lambda: cls(cfg, tp), dtype, device)


def add_encoders(model: Model, dtype: torch.dtype, device: torch.device) -> None:
    """Add what encodes other inputs than text to a model that `build_model` has built."""

    def add() -> Model:
        model.add_encoders()
        return model

    build(add, dtype, device)


def build(make: Callable[[], Module], dtype: torch.dtype, device: torch.device | str) -> Module:
    """Return the module that `make` builds, with parameters in `dtype` on `device`. Compiles its CPU kernels."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            module = make().eval()
    finally:
        torch.set_default_dtype(before)
    dispatch.compile_cpu_kernels(dtype, torch.device(device))
    return module
