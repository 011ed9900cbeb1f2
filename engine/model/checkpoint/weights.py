"""Opens weight files of any supported format."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from engine.model.checkpoint.folder import OTHER_FORMATS
from engine.model.shard import TensorSlice


class Tensors(Protocol):
    """The tensors in a file, by their names in the checkpoint."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> TensorSlice: ...


def open_weights(file: Path) -> AbstractContextManager[Tensors]:
    """Map a file from `weight_files`. Raises OSError or SafetensorError."""
    other = OTHER_FORMATS.get(file.name)
    tensors: AbstractContextManager[Tensors] = (
        safe_open(file, framework="pt") if other is None else import_module(other, __package__).open_weights(file)
    )
    return tensors


def slice_for(tensors: Tensors, name: str, target: Tensor) -> TensorSlice:
    """Return a tensor in the form that `target` needs: stored blocks if it holds bytes, else numbers."""
    found = tensors.get_slice(name)
    blocks: TensorSlice = getattr(found, "blocks", found)
    return blocks if target.dtype == torch.uint8 else found
