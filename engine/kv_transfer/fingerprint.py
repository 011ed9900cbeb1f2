"""Fingerprint of an engine: engines with equal fingerprints can use each other's KV."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch

from engine.errors import ModelFolderError
from engine.model.checkpoint.identity import sample_weights, short
from engine.model.config import ModelConfig
from engine.model.kv_groups import KVCacheGroup
from engine.model.loader import tensors_by_file
from engine.source_digest import numerics_digest

LAYOUT_VERSION = 2  # of a group's blocks: [layers, 2, kv_heads, block_size, head_dim], rotated keys


def fingerprint(
    config: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
    determinism: str | None = None,
    tensor_parallel_size: int = 1,
) -> str:
    """Return a text that is equal for engines with the same KV in the same layout, and else shows what differs.

    dtype: type of activations. `config` contains how weights are quantized, and the weights contain the scales of an
    FP8 cache. tensor_parallel_size: number of ranks. It is part of the text only for models with recurrent layers,
    since each rank reads the states of the other engine's rank of the same number.

    The numerics are those of this version of Manta and of the packages whose kernels it calls.

    The text identifies weights by the names, sizes and headers of their files and a sample of their pages. This takes
    milliseconds and distinguishes models and versions, but does not detect deliberate changes of a few bytes. Raises
    ModelFolderError.
    """
    fields = {
        "kv": LAYOUT_VERSION,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_dtype": str(kv_dtype).removeprefix("torch."),
        "block_size": block_size,
        "determinism": determinism,
        "layers": config.num_layers,
        "groups": ",".join(map(_describe, config.kv_groups)),
        "rope": short(hashlib.sha256(repr(config.rope).encode())),
        "config": short(_hash_config(config)),
        "weights": short(_hash_weights(folder)),
        "numerics": numerics_digest(),
    }
    if config.recurrent is not None:
        fields["states_of_ranks"] = tensor_parallel_size
    return " ".join(f"{name}={value}" for name, value in fields.items())


def _describe(group: KVCacheGroup) -> str:
    """Return "<layers>x<parts>x<KV heads>x<head_dim>" of a group, followed by "w<window>" if the group has a window."""
    spec = group.spec
    shape = f"{len(group.layers)}x{spec.parts}x{spec.num_kv_heads}x{spec.head_dim}"
    return shape if spec.window is None else f"{shape}w{spec.window}"


def _hash_config(config: ModelConfig) -> hashlib._Hash:
    def plain(value: object) -> object:
        return sorted(value) if isinstance(value, frozenset) else str(value)

    return hashlib.sha256(json.dumps(asdict(config), sort_keys=True, default=plain).encode())


def _hash_weights(folder: Path) -> hashlib._Hash:
    total = hashlib.sha256()
    try:
        sample_weights(total, sorted(tensors_by_file(folder)))
    except OSError as e:
        raise ModelFolderError(str(folder), f"cannot be read: {e}") from e
    return total
