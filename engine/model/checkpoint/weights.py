"""Opens weight files of any supported format."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from engine.model.checkpoint.gguf.folder import INDEX
from engine.model.checkpoint.gguf.tensors import GGUFSlice, GGUFTensors
from engine.model.shard import TensorSlice


class Tensors(Protocol):
    """The tensors in a file, by their names in the checkpoint."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> TensorSlice: ...


def open_weights(file: Path) -> AbstractContextManager[Tensors]:
    """Map a file from `weight_files`. Raises OSError or SafetensorError."""
    if file.name == INDEX:
        return GGUFTensors(file)
    tensors: AbstractContextManager[Tensors] = safe_open(file, framework="pt")
    return tensors


def slice_for(tensors: Tensors, name: str, target: Tensor) -> TensorSlice:
    """Return a tensor in the form that `target` needs: stored blocks if it holds bytes, else numbers."""
    found = tensors.get_slice(name)
    return found.blocks if isinstance(found, GGUFSlice) and target.dtype == torch.uint8 else found
