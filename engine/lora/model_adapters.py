"""The linear layers of one rank's model that adapters can change, by their names in checkpoints."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.errors import AdapterError, Described
from engine.lora.adapter_files import WEIGHTS_FILE, AdapterFiles, LowRank, TensorEntry
from engine.model.layers.linear import Linear
from engine.model.layers.lora import LinearAdapters
from engine.model.low_rank import AdapterRows, filled
from engine.model.models.llama import Model
from engine.model.shard import INPUTS, OUTPUTS, Shard

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
IN_LAYERS = re.compile(r"(.*\.)?(layers?|h|blocks)\.\d+\.")  # what a step computes once for each of its tokens
REASONS = {
    "experts": "adapters of experts are not supported",
    "kv_b_proj": "latent attention absorbs it into queries and outputs",
    "lm_head": "adapters of the output head are not supported",
    "intermediate.dense": "it is computed together with its activation",
}


@dataclass(slots=True)
class Place:
    """One slice of a linear layer of ours."""

    layer: LinearAdapters
    slice: int
    shard: Shard
    """This rank's part of the weight of a layer of the checkpoint, or of a part of it."""


@dataclass(slots=True)
class LayerFactors:
    """An adapter's factors of one linear layer, in the layout and dtype of its slots: see LowRankWeights."""

    a: Tensor
    """[inputs, slices, rank]"""
    b: Tensor
    """[rank, outputs]"""


class ModelAdapters:
    """The linear layers of a model with room for adapters, and which rows of a step have one."""

    def __init__(self, model: Model, slots: int, rank: int, max_tokens: int, device: torch.device):
        """rank: the highest of an adapter. Gives each linear layer of the model its slots."""
        self._model, self._max_rank = model, rank
        self.rows = AdapterRows(max_tokens, device)
        self._layers: list[LinearAdapters] = []
        self._places: dict[str, list[Place]] = {}
        for path, module in model.named_modules():
            if isinstance(module, Linear) and module.takes_adapters and IN_LAYERS.match(f"{path}."):
                shards = list(module.weights.values())
                module.adapters = layer = LinearAdapters(shards, slots, rank, self.rows, module.dtype, module.device)
                self._layers.append(layer)
                for i, (name, shard) in enumerate(module.weights.items()):
                    tensor = f"{name}.weight".removeprefix(".").partition(":")[0]
                    place = Place(layer, i, shard)
                    self._places.setdefault(model.checkpoint_name(f"{path}.{tensor}"), []).append(place)

    def factors(self, files: AdapterFiles) -> dict[int, LayerFactors]:
        """Return this rank's part of an adapter, by the number of the layer. Raises AdapterError if it does not fit
        the model, above all if it changes a layer that the model does not have: without that part it would be another
        adapter."""
        if files.rank > self._max_rank:
            raise AdapterError(files.name, "r", files.rank, f"at most {self._max_rank} (max_lora_rank)")
        found: dict[str, list[Place]] = {}
        for module in files.modules:
            name = self._model.canonical_name(f"{module}.weight")
            found[module] = [] if name is None else self._places.get(name, [])
        self._check_places(files, found)
        numbers = {id(layer): i for i, layer in enumerate(self._layers)}
        factors: dict[int, LayerFactors] = {}
        for module, pair in files.modules.items():
            a, b = tensor_of(files, pair.a), tensor_of(files, pair.b)
            b = b.float() * files.config.scale(module, pair.rank)
            for place, start in zip(found[module], starts_of(files, module, pair, found[module]), strict=True):
                layer = place.layer
                own = factors.setdefault(numbers[id(layer)], empty_factors(layer, filled(files.rank)))
                copy_slice(own, place, a, b, start)
        return factors

    def write(self, slot: int, factors: dict[int, LayerFactors]) -> None:
        """Copy an adapter into a slot, which no row of a step that runs has."""
        for i, layer in enumerate(self._layers):
            weights, own = layer.weights, factors.get(i)
            if own is None:
                weights.ranks[slot] = 0
                continue
            inputs, slices, rank = own.a.shape
            weights.a[slot].view(inputs, slices, weights.rank)[:, :, :rank] = own.a
            weights.b[slot, :rank] = own.b
            weights.ranks[slot] = rank

    def _check_places(self, files: AdapterFiles, found: dict[str, list[Place]]) -> None:
        lost = [module for module, places in found.items() if not places]
        if not lost:
            return
        shown = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        why = next((f" ({reason})" for part, reason in REASONS.items() if part in lost[0]), "")
        got = Described(f"{len(lost)} of {len(found)} that find no place: {shown}{why}")
        raise AdapterError(files.name, WEIGHTS_FILE, got, "of linear layers that this model has")


def tensor_of(files: AdapterFiles, stored: TensorEntry) -> Tensor:
    content = np.frombuffer(files.content, np.uint8, stored.end - stored.start, stored.start)
    return torch.from_numpy(content.copy()).view(DTYPES[stored.dtype]).view(stored.shape)


def empty_factors(layer: LinearAdapters, rank: int) -> LayerFactors:
    weights = layer.weights
    return LayerFactors(
        torch.zeros(weights.a.shape[1], weights.slices, rank, dtype=weights.a.dtype),
        torch.zeros(rank, weights.b.shape[2], dtype=weights.b.dtype),
    )


def starts_of(files: AdapterFiles, module: str, pair: LowRank, places: list[Place]) -> list[int]:
    """Return where the outputs of each place begin in B. An adapter of a layer that the checkpoint holds in one tensor,
    of which we make several slices, has all of them. Raises AdapterError for factors of another layer's sizes."""
    outputs, inputs = pair.b.shape[0], pair.a.shape[1]
    sizes = [place.shard.shape[OUTPUTS] for place in places]
    whole = sum(sizes) if len(set(sizes)) > 1 or sizes[0] != outputs else outputs
    if any(place.shard.shape[INPUTS] != inputs for place in places) or outputs != whole:
        wanted = f"of a layer with {places[0].shard.shape[INPUTS]} inputs and {sum(sizes)} outputs"
        raise AdapterError(files.name, module, Described(f"{inputs} and {outputs}"), wanted)
    return [0] * len(places) if sizes[0] == outputs else list(itertools.accumulate(sizes[:-1], initial=0))


def copy_slice(own: LayerFactors, place: Place, a: Tensor, b: Tensor, start: int) -> None:
    """Copy this rank's part of A [rank, inputs] and of B [outputs, rank], whose outputs begin at `start`."""
    shard, rank = place.shard, len(a)
    outputs = shard if shard.dim == OUTPUTS else replace(shard, dim=OUTPUTS, start=0, size=shard.shape[OUTPUTS])
    if shard.dim == INPUTS:
        a = a[:, shard.start : shard.start + shard.size]
    own.a[:, place.slice, :rank] = a.T
    first = sum(filled(size.local_shape[OUTPUTS]) for size in place.layer.shards[: place.slice])
    begin = start + outputs.start
    own.b[:rank, first : first + outputs.size] = b[begin : begin + outputs.size].T
