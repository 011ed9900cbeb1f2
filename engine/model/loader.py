"""Loads the weights in a model folder into the sharded parameters of one rank.

Files are memory-mapped, and only this rank's shard of each tensor is read. Tensors are read one at a time, so loading
needs memory for the parameters and one tensor only.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.distributed.tp_group import TPGroup
from engine.errors import ModelFolderError
from engine.model.checkpoint.folder import OTHER_FORMATS, weight_files
from engine.model.layers.embedding import TiedLMHead
from engine.model.shard import Shard, Sharded, TensorSlice

logger = logging.getLogger(__name__)

COMPARED_ROWS = 4096
LOG_INTERVAL_S = 1.0  # between two log lines of progress
# Tensors that a checkpoint may hold but that are never used: rotary frequencies, a copy of a tied head, shapes and
# trivial column orders of quantized weights, and static scales of activations, which are scaled dynamically here. The
# scales of an FP8 KV cache are read by engine/runner/fp8_kv_cache.py.
UNUSED = (
    ".inv_freq", "lm_head.weight", ".weight_shape", ".g_idx",
    ".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".prob_scale",
)  # fmt: skip


class Tensors(Protocol):
    """The tensors in a file, by their names in the checkpoint."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> TensorSlice: ...


class Loadable(Protocol):
    """A module whose layers read tensors of a checkpoint: a model, or the module of a drafter."""

    unused: tuple[str, ...]

    def checkpoint_name(self, path: str) -> str: ...

    def canonical_name(self, name: str) -> str | None: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def load_weights(model: Loadable, folder: Path, tp: TPGroup) -> None:
    """Fill every parameter of `model`, each exactly once. Progress is logged, and shown by rank 0 on a terminal.

    Raises ModelFolderError that names tensors which are missing, unexpected or of a wrong shape.
    """
    started = time.monotonic()
    files = tensors_by_file(folder)
    canonical: dict[str, str] = {}
    for file, names in files.items():
        known = {name: model.canonical_name(name) for name in names}
        canonical |= {name: own for name, own in known.items() if own is not None}
        files[file] = [name for name in names if name in canonical]
    untie_own_head(model, folder, files, canonical)
    leave_out(elsewhere(model, set(canonical.values())), files, canonical)
    shards = checkpoint_shards(model)
    unused = zero_biases(files, canonical, set(shards))
    # such as those of a head for pretraining
    unused |= {name for name, own in canonical.items() if own.startswith(model.unused) and own not in shards}
    found = [name for names in files.values() for name in names if name not in unused]
    check_names(folder, set(shards), found, canonical)
    quiet = tp.rank > 0 or not sys.stderr.isatty()
    num_bytes = sum(target.nbytes for parts in shards.values() for _, target in parts)
    read, logged_at = 0, 0.0
    with Progress(console=Console(stderr=True), disable=quiet) as progress:
        bar = progress.add_task("loading weights", total=num_bytes)
        for file, names in files.items():
            with open_weights(file) as tensors:
                for name in names:
                    if (now := time.monotonic()) >= logged_at + LOG_INTERVAL_S:
                        logged_at = now
                        logger.info("loading weights folder=%s read=%.2f", folder, read / num_bytes)
                    if parts := shards.get(canonical[name]):
                        load_tensor(parts, slice_for(tensors, name, parts[0][1]), name, folder)
                        read += sum(target.nbytes for _, target in parts)
                        progress.update(bar, completed=read)
    seconds = time.monotonic() - started
    logger.info("weights loaded folder=%s gb=%.2f seconds=%.1f", folder, num_bytes / 1e9, seconds)


def pack_weights(model: Loadable) -> None:
    """Convert loaded weights to the form that the ops need, layer by layer. The result replaces the original."""
    for layer in model.modules():
        if isinstance(layer, Sharded):
            layer.pack()


def count_parameters(model: Loadable) -> int:
    """Return the number of parameters on this rank. Must be called before they are packed."""
    quantized = sum(layer.quantized_parameters for layer in model.modules() if isinstance(layer, Sharded))
    return quantized + sum(parameter.numel() for parameter in model.parameters())


def load_tensor(parts: list[tuple[Shard, Tensor]], source: TensorSlice, name: str, folder: Path) -> None:
    """Copy this rank's slice of a checkpoint's tensor into the weights to which it belongs.

    parts: these weights, stored one after the other along `shard.dim`, or all read from the same values; each target is
    [*shard.local_shape]. A tensor of three dimensions may be stored with the last two exchanged.
    """
    shape, first = tuple(source.get_shape()) or (1,), parts[0][0]
    sizes = [shard.shape[first.dim] for shard, _ in parts]
    whole = (*first.shape[: first.dim], sum(sizes), *first.shape[first.dim + 1 :])
    if len(shape) == 3 and shape != whole == (shape[0], shape[2], shape[1]):
        return load_tensor([(shard.transposed(), target.mT) for shard, target in parts], source, name, folder)
    if shape != whole and any(shard.shape != shape for shard, _ in parts):
        problem = f"{name} has shape {source.get_shape()}, config.json asks for {list(whole)}"
        raise ModelFolderError(str(folder), problem)
    starts = itertools.accumulate(sizes[:-1], initial=0) if shape == whole else itertools.repeat(0)
    for (shard, target), start in zip(parts, starts, strict=False):
        replace(shard, shape=shape, start=start + shard.start).load(source, target)


def checkpoint_shards(model: Loadable) -> dict[str, list[tuple[Shard, Tensor]]]:
    """Return all shards of the model by their tensor's name in the checkpoint. Several may share one tensor."""
    shards: dict[str, list[tuple[Shard, Tensor]]] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Sharded):
            for name, shard in layer.shards().items():
                tensor = name.partition(":")[0]
                shards.setdefault(name_of(model, path, tensor), []).append(shard)
    return shards


def untie_own_head(model: Loadable, folder: Path, files: dict[Path, list[str]], canonical: dict[str, str]) -> None:
    """Give a tied head a matrix of its own if the checkpoint holds one that differs from its embedding."""
    paths = {module: path for path, module in model.named_modules()}
    for head in [module for module in paths if isinstance(module, TiedLMHead) and module.embedding[0] in paths]:
        own, tied = (model.checkpoint_name(f"{paths[module]}.weight") for module in (head, head.embedding[0]))
        if has_own_head(files, canonical, own, tied):
            logger.warning(
                "config.json sets tie_word_embeddings, but %s differs from %s, so the head is not tied folder=%s",
                own, tied, folder,
            )  # fmt: skip
            head.untie()


def has_own_head(files: dict[Path, list[str]], canonical: dict[str, str], own: str, tied: str) -> bool:
    """Return whether the checkpoint holds a head that differs from its embedding. Every rank compares both in full, a
    few rows at a time. own, tied: names of the head's and the embedding's tensors."""
    where = {canonical[name]: (file, name) for file, names in files.items() for name in names}
    if own not in where or tied not in where:
        return False
    (head_file, head_name), (file, name) = where[own], where[tied]
    with open_weights(head_file) as heads, open_weights(file) as embeddings:
        head, embedding = heads.get_slice(head_name), embeddings.get_slice(name)
        if head.get_shape() != embedding.get_shape() or head.get_dtype() != embedding.get_dtype():
            return True
        starts = range(0, head.get_shape()[0], COMPARED_ROWS)
        return any(not torch.equal(*(t[i : i + COMPARED_ROWS] for t in (head, embedding))) for i in starts)


def zero_biases(files: dict[Path, list[str]], canonical: dict[str, str], wanted: set[str]) -> set[str]:
    """Return the biases that are all 0 and that the model lacks. Older GPTQ checkpoints have such a bias for every
    layer."""
    found = set()
    for file, names in files.items():
        if biases := [name for name in names if name.endswith(".bias") and canonical[name] not in wanted]:
            with open_weights(file) as tensors:
                found |= {name for name in biases if not tensors.get_tensor(name).any()}
    return found


def elsewhere(model: Loadable, names: set[str]) -> set[str]:
    """Return those of the checkpoint's tensors, by their canonical names, that only other ranks hold."""
    found = set()
    for path, layer in model.named_modules():
        if isinstance(layer, Sharded):
            found |= layer.elsewhere(names, partial(name_of, model, path))
    return found


def name_of(model: Loadable, path: str, tensor: str) -> str:
    """Return the canonical name of a layer's tensor. path: the layer's in the model."""
    return model.checkpoint_name(f"{path}.{tensor}")


def leave_out(left_out: set[str], files: dict[Path, list[str]], canonical: dict[str, str]) -> None:
    """Remove names of tensors. left_out: canonical names."""
    for file, names in files.items():
        files[file] = [name for name in names if canonical[name] not in left_out]


def check_names(folder: Path, wanted: set[str], found: list[str], canonical: dict[str, str]) -> None:
    """Raise ModelFolderError unless `found` has each of `wanted` once, under any of its names, and nothing else."""
    counts = Counter(canonical[name] for name in found)
    kinds = {
        "missing": wanted - set(counts),
        "unexpected": {name for name in found if canonical[name] not in wanted and not name.endswith(UNUSED)},
        "duplicate": {name for name, count in counts.items() if count > 1},
    }
    if problems := [f"{len(names)} {kind} tensors: {shorten(names)}" for kind, names in kinds.items() if names]:
        raise ModelFolderError(str(folder), "; ".join(problems))


def shorten(names: set[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def tensors_by_file(folder: Path) -> dict[Path, list[str]]:
    """Return the tensor names in every safetensors file of a model. If there is an index, only its files are read."""
    names = {}
    for file in weight_files(folder):
        try:
            with open_weights(file) as tensors:
                names[file] = list(tensors.keys())
        except (OSError, SafetensorError) as e:
            raise ModelFolderError(str(folder), f"cannot read {file.name}: {e}") from e
    return names


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
