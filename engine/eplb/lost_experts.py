"""Gives the experts of a lost engine to the ranks that are left.

Each rank tells the others which experts it holds. From this, all of them compute the same placement. An expert that has
a copy somewhere needs nothing more; the others are read from the checkpoint again. What is read waits in layers of its
own until all ranks have theirs. Only then it goes into free slots, so that an engine that is lost meanwhile leaves the
others as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.devices.free_memory import FreeMemory
from engine.distributed.tp_group import ConnectedGroup
from engine.eplb.layer_slots import LayerSlots, grow
from engine.eplb.placement import EMPTY, Placement, adopt, most_adopted
from engine.errors import EngineUnavailable, ModelFolderError
from engine.model.expert_split import ExpertSlots, SpreadExperts
from engine.model.layers.moe import Experts
from engine.model.loader import checkpoint_shards, load_tensor, open_weights, shorten, slice_for, tensors_by_file
from engine.model.models.llama import Model
from engine.model.noise import fill_with_noise
from engine.model.shard import Shard

logger = logging.getLogger(__name__)


class ExpertsDoNotFit(EngineUnavailable):
    """The engines that are left have too little memory for the experts of one that died."""

    def __init__(self, rank: int, needed: int, free: str):
        """needed: bytes of one of the ranks. free: what it has, in words."""
        Exception.__init__(self, rank, needed, free)

    def __str__(self) -> str:
        rank, needed, free = self.args
        return (
            f"the experts of a lost engine do not fit: rank {rank} needs {needed / 2**30:.2f} GiB for its part, "
            f"and {free}"
        )


class Defaults(TorchFunctionMode):
    """Makes a dtype and a device the default of new tensors, in this thread only."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self._dtype, self._device = dtype, device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros):
            kwargs["dtype"] = kwargs.get("dtype") or self._dtype
            kwargs["device"] = kwargs.get("device") or self._device
        return func(*args, **kwargs)


class SomeExperts:
    """Some experts of a layer, to be loaded like a model that has nothing else."""

    unused: tuple[str, ...] = ()

    def __init__(self, model: Model, path: str, like: Experts, own: range):
        """path: of the layer `like` in the model."""
        layer = copy(like)
        layer._parameters = {}
        layer.split = copy(like.split)
        layer.split.own = own
        layer.kernels, layer.kept = (), None
        with Defaults(like.dtype, like.device):
            layer.allocate()
        self.layer, self._path = layer, path
        self.checkpoint_name, self.canonical_name = model.checkpoint_name, model.canonical_name

    def modules(self) -> Iterator[nn.Module]:
        yield self.layer

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        yield self._path, self.layer

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.layer.parameters()


class AdoptedExperts:
    """The experts that one layer of this rank adopts."""

    def __init__(self, path: str, layer: Experts, placement: Placement, rank: int):
        self.path, self.layer, self._placement, self._rank = path, layer, placement, rank
        before, after = slots_of(layer).held, placement[rank]
        adopted = [slot for slot, expert in enumerate(after) if expert != EMPTY and before[slot : slot + 1] != [expert]]
        self._slots, self._num_slots, self._num_new = adopted, len(after), len(after) - len(before)
        self.experts = [after[slot] for slot in adopted]
        self.parts: list[SomeExperts] = []  #: once there is memory for them

    @property
    def needed_bytes(self) -> tuple[int, int]:
        """Memory for new slots and for the adopted experts until they are in slots; and, for a moment, to grow."""
        size = sum(tensor.nbytes for tensor in LayerSlots(self.layer).read(0))
        grown = self._num_slots - self._num_new if self._num_new else 0
        return size * (self._num_new + len(self.experts)), size * grown

    def open(self, model: Model) -> None:
        """Allocate memory for the weights."""
        neighbours = groupby(enumerate(self.experts), lambda pair: pair[1] - pair[0])
        for _, pairs in neighbours:
            first, *others = [expert for _, expert in pairs]
            self.parts.append(SomeExperts(model, self.path, self.layer, range(first, first + 1 + len(others))))

    def install(self) -> None:
        """Put the experts into slots, and take the placement into use."""
        if self._num_new:
            grow(self.layer, self._num_slots)
        slots, free = LayerSlots(self.layer), iter(self._slots)
        for part in self.parts:
            source = LayerSlots(part.layer)
            for i in range(len(part.layer.split.own)):
                slots.copy(next(free), source, i)
        self.parts = []
        slots_of(self.layer).place(self._placement, self._rank)
        self.layer.split.num_slots = slots_of(self.layer).count


class LostExperts:
    """The mixture layers of one rank, and the checkpoint from which it reads experts of engines that are lost."""

    def __init__(self, model: Model, folder: Path | None, free_memory: Callable[[], FreeMemory]):
        """model: whose experts are spread over engines. folder: None for random weights."""
        self._model, self._folder, self._free_memory = model, folder, free_memory
        self._layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, Experts)}
        self.placements: list[Placement] = []  #: of each layer, since the last loss

    def share(self, ranks: ConnectedGroup) -> int:
        """Give every expert to a rank again. ranks: of the engines that are left. Returns how many experts, over all
        layers, this one has read. Every rank has to call this at the same time.

        Raises ExpertsDoNotFit in all ranks, or StartupError if another one is lost. Then nothing has changed.
        """
        with ranks.starting():
            placements = self._agree(ranks)
            adopted = [
                AdoptedExperts(path, layer, placement, ranks.rank)
                for (path, layer), placement in zip(self._layers.items(), placements, strict=True)
            ]
            self._check_memory(ranks, adopted)
            self._read(adopted, ranks.check_joined)
            ranks.exchange("read")
        for each in adopted:
            each.install()
        self.placements = placements
        return sum(len(each.experts) for each in adopted)

    def _agree(self, ranks: ConnectedGroup) -> list[Placement]:
        """Return the next placement of each layer, the same in all ranks."""
        held = msgspec.json.encode([slots_of(layer).held for layer in self._layers.values()]).decode()
        of_ranks = [msgspec.json.decode(answer, type=Placement) for answer in ranks.exchange(held)]
        layers = zip(self._layers.values(), *of_ranks, strict=True)
        return [adopt(held, layer.num_experts, slots_of(layer).movable) for layer, *held in layers]

    def _check_memory(self, ranks: ConnectedGroup, adopted: Sequence[AdoptedExperts]) -> None:
        needs = [each.needed_bytes for each in adopted]
        own = sum(kept for kept, _ in needs) + max((moment for _, moment in needs), default=0)
        free = self._free_memory()
        for rank, answer in enumerate(ranks.exchange(f"{own} {free.size} {free.limit}")):
            needed, size, limit = answer.split(" ", 2)
            if int(needed) > int(size):
                raise ExpertsDoNotFit(rank, int(needed), str(FreeMemory(int(size), limit)))

    def _read(self, adopted: Sequence[AdoptedExperts], check: Callable[[], None]) -> None:
        """Load the weights of the adopted experts, and pack them. check: function that raises if this is to end, since
        another engine is lost; the others would wait for this one in vain."""
        for each in adopted:
            each.open(self._model)
        parts = [part for each in adopted for part in each.parts]
        if self._folder is None:
            for part in parts:
                fill_with_noise(part)
        else:
            load_parts(parts, self._folder, self._model, check)
        for part in parts:
            check()
            part.layer.pack()


def spare_bytes(layers: Iterable[Experts], ranks: int, lost: int) -> int:
    """Return the memory that a rank needs at most for its part of the experts of one engine. ranks: of all engines.
    lost: those of them that the engine has."""
    kept = moment = 0
    for layer in layers:
        slots, size = slots_of(layer), sum(tensor.nbytes for tensor in LayerSlots(layer).read(0))
        # twice: in new slots, and where they are read to
        kept += 2 * size * most_adopted(layer.num_experts, ranks, lost, slots.count if slots.movable else 0)
        moment = max(moment, size * slots.count)
    return kept + moment


def slots_of(layer: Experts) -> ExpertSlots:
    assert isinstance(layer.split, SpreadExperts)
    return layer.split.slots


def load_parts(parts: Sequence[SomeExperts], folder: Path, model: Model, check: Callable[[], None]) -> None:
    """Load the weights of some experts. Only files that have some of them are read. check: called before each tensor.
    Raises ModelFolderError."""
    wanted: dict[str, list[list[tuple[Shard, Tensor]]]] = {}  # what each part reads of a tensor
    for part in parts:
        for name, shards in checkpoint_shards(part).items():
            wanted.setdefault(name, []).append(shards)
    missing = set(wanted)
    for file, names in tensors_by_file(folder).items() if wanted else ():
        needed = {name: own for name in names if (own := model.canonical_name(name)) in wanted}
        if not needed:
            continue
        with open_weights(file) as tensors:
            for name, own in needed.items():
                check()
                for shards in wanted[own]:
                    load_tensor(shards, slice_for(tensors, name, shards[0][1]), name, folder)
        missing -= set(needed.values())
    if missing:
        raise ModelFolderError(str(folder), f"{len(missing)} missing tensors: {shorten(missing)}")
