"""The layers of one rank's model that adapters can change, by their names in checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.errors import Described
from engine.lora.adapter_files import ALL_EXPERTS, REFUSED, WEIGHTS_FILE, AdapterFiles, TensorEntry
from engine.lora.errors import AdapterError
from engine.lora.expert_factors import ExpertSizes, of_each_expert
from engine.lora.layers import GroupedAdapters, LinearAdapters
from engine.model.config_parts.stage import ALL_LAYERS, Stage
from engine.model.layers.latent_attention import HeadProjections
from engine.model.layers.linear import AS_STORED, Order, Product
from engine.model.layers.moe import Experts
from engine.model.low_rank import LANES, AdapterRows, Factors, filled, in_columns
from engine.model.models.llama import Model
from engine.model.shard import INPUTS, OUTPUTS, Shard
from engine.model.tensor_names import HEADS, canonical_name

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NOT_IN_STEPS = (*HEADS, "pooler.", "causal.")  # paths of what is computed for some of a step's tokens only
ON_CPU = "on CPUs only: on a GPU they have no kernel yet"
REASONS = REFUSED | {"intermediate.dense": "it is computed in one kernel with its activation"}
REASONS_IF_SHARED = {
    "experts": "with data_parallel_size, experts also compute tokens of engines that have other adapters"
}
REASONS_ON_GPU = REASONS | {
    "experts": f"adapters of experts are supported {ON_CPU}",
    "kv_b_proj": f"adapters of this layer of latent attention are supported {ON_CPU}",
}


@dataclass(slots=True)
class Place:
    """One slice of a layer's output, to which an adapter adds its part."""

    layer: LinearAdapters | GroupedAdapters
    product: int
    """Number of the expert or head; 0 in a layer without experts or heads."""
    slice: int
    shard: Shard
    """This rank's part of the layer's weight in the checkpoint."""
    order: Order
    """As in Product."""


@dataclass(slots=True)
class ExpertPlaces:
    """The experts of one layer."""

    module: Experts
    sizes: ExpertSizes
    places: tuple[dict[int, list[Place]], dict[int, list[Place]]]
    """Of the projections to gate and up, and of the one from the intermediate size, by this rank's experts."""


@dataclass(slots=True)
class Change:
    """What an adapter adds to one layer of the checkpoint."""

    name: str
    """Name of the layer in the adapter."""
    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[outputs, rank]"""
    scale: float
    places: list[Place]


class ModelAdapters:
    """The layers of a model that adapters can change, and the adapter of each row of a step."""

    def __init__(
        self,
        model: Model,
        slots: int,
        rank: int,
        max_tokens: int,
        device: torch.device,
        *,
        for_gpu: bool = False,
        stage: Stage = ALL_LAYERS,
    ):
        """Give each linear layer of the model its slots. rank: the highest rank that an adapter may have. for_gpu:
        whether to treat a model without weights as one on a GPU. stage: the layers that the model has; what an
        adapter changes in other layers is left to their stages."""
        self._model, self._max_rank, self._stage = model, rank, stage
        self.rows = AdapterRows(max_tokens, device)
        self._layers: list[LinearAdapters | GroupedAdapters] = []
        self._places: dict[str, list[Place]] = {}
        self._experts: dict[str, ExpertPlaces] = {}  # by the module's name in adapters
        self._elsewhere: set[str] = set()  #: weights of experts of other ranks
        self._reasons = REASONS_ON_GPU if for_gpu or device.type == "cuda" else REASONS
        self._heads: dict[str, tuple[Shard, list[tuple[Place, Place]]]] = {}
        for path, module in model.named_modules():
            if path.startswith(NOT_IN_STEPS):
                continue
            if isinstance(module, Experts) and module.split.shared:
                self._reasons = self._reasons | REASONS_IF_SHARED
            if isinstance(module, Experts) and module.takes_addends and not for_gpu:
                self._add_experts(path, module)
            elif isinstance(module, HeadProjections) and module.heads_take_addends and not for_gpu:
                self._add_heads(path, module)
            elif isinstance(module, Product) and module.takes_addend:
                shards = list(module.weights.values())
                module.addend = layer = LinearAdapters(shards, slots, rank, self.rows, module.dtype, module.device)
                self._add(layer, path, module.weights, order=module.order)

    @property
    def linear(self) -> list[LinearAdapters]:
        """Of layers that keep adapters in slots."""
        return [layer for layer in self._layers if isinstance(layer, LinearAdapters)]

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots together. Adapters of experts and heads have no slots, and take memory when they are
        loaded."""
        return sum(layer.weights.a.nbytes + layer.weights.b.nbytes for layer in self.linear)

    def factors(self, files: AdapterFiles) -> dict[int, Factors]:
        """Return this rank's part of an adapter, by layer number. Raises AdapterError if the adapter does not fit the
        model, in particular if it changes a layer that the model lacks. Ignoring that layer would change what the
        adapter computes."""
        changes = list(self._changes(files))
        # before the rank: that of a layer without a place may be the rank of all experts together
        check_places(files, changes, self._reasons)
        rank = max((len(change.a) for change in changes), default=0)  # 0: it changes layers of other stages only
        if rank > self._max_rank:
            raise AdapterError(files.name, "r", rank, f"at most {self._max_rank} (max_lora_rank)")
        numbers = {id(layer): i for i, layer in enumerate(self._layers)}
        factors: dict[int, Factors] = {}
        for change in changes:
            a, b = change.a, change.b.float() * change.scale
            for place, start in zip(change.places, starts_of(files, change), strict=True):
                number = numbers[id(place.layer)]
                if number not in factors:
                    factors[number] = place.layer.empty_factors(filled(rank))
                copy_slice(factors[number], place, a, b, start)
        return factors

    def write(self, slot: int, factors: dict[int, Factors]) -> None:
        """Copy an adapter into a slot, which no row of a running step may use."""
        for i, layer in enumerate(self._layers):
            layer.write(slot, factors.get(i))

    def _add(
        self,
        layer: LinearAdapters | GroupedAdapters,
        path: str,
        weights: dict[str, Shard],
        product: int = 0,
        order: Order = AS_STORED,
    ) -> list[Place]:
        """Record the places of one product, and return them."""
        places = [Place(layer, product, i, shard, order) for i, shard in enumerate(weights.values())]
        for name, place in zip(weights, places, strict=True):
            tensor = f"{name}.weight".removeprefix(".").partition(":")[0]
            self._places.setdefault(self._model.checkpoint_name(f"{path}.{tensor}"), []).append(place)
        if product == 0:
            self._layers.append(layer)
        return places

    def _add_experts(self, path: str, module: Experts) -> None:
        *inputs, last = module.weights.items()
        layers, places = [], []
        for weights in (dict(inputs), dict([last])):
            shards = list(weights.values())
            layer = GroupedAdapters(
                shards, len(module.split.own), self.rows, module.dtype, module.device, max(1, len(module.kernels))
            )
            layers.append(layer)
            own = enumerate(module.split.own)
            places.append({expert: self._add(layer, f"{path}.{expert}", weights, i) for i, expert in own})
            others = set(range(module.num_experts)) - set(module.split.own)
            names = itertools.product(others, weights)
            self._elsewhere |= {self._model.checkpoint_name(f"{path}.{i}.{name}.weight") for i, name in names}
        module.addends = layers
        self._experts[self._model.checkpoint_name(path)] = ExpertPlaces(
            module,
            ExpertSizes(
                experts=module.num_experts,
                hidden=last[1].shape[OUTPUTS],
                intermediate=last[1].shape[INPUTS],
                wide=sum(shard.shape[OUTPUTS] for _, shard in inputs),
            ),
            (places[0], places[1]),
        )

    def _add_heads(self, path: str, module: HeadProjections) -> None:
        shard, layers, places = module.weights[""], [], []
        latent, size = shard.shape[INPUTS], shard.size // module.heads - module.nope_dim
        for outputs, inputs in ((latent, module.nope_dim), (size, latent)):
            own = Shard((outputs, inputs), OUTPUTS, 0, outputs)
            layers.append(layer := GroupedAdapters([own], module.heads, self.rows, module.dtype, module.device))
            places.append([Place(layer, head, 0, own, AS_STORED) for head in range(module.heads)])
        self._layers += layers
        module.key_addend, module.value_addend = layers
        self._heads[self._model.checkpoint_name(f"{path}.weight")] = shard, list(zip(*places, strict=True))

    def _changes(self, files: AdapterFiles) -> Iterator[Change]:
        """Yield what an adapter adds to each layer, one expert and one head at a time."""
        for module, pair in files.modules.items():
            if self._stage.is_elsewhere(canonical_name(f"{module}.weight")):
                continue
            a, b, name = tensor_of(pair.a), tensor_of(pair.b), self._name(module)
            match = ALL_EXPERTS.fullmatch(module)
            experts = "" if match is None else self._name(match["module"])
            if f"{name}.weight" in self._elsewhere:
                continue
            change = Change(module, a, b, files.config.scale(module, pair.rank), self._places.get(f"{name}.weight", []))
            if experts in self._experts:
                yield from self._of_experts(files, change, self._experts[experts])
            elif f"{name}.weight" in self._heads:
                yield from self._of_heads(files, change, *self._heads[f"{name}.weight"])
            else:
                yield change

    def _of_experts(self, files: AdapterFiles, change: Change, experts: ExpertPlaces) -> Iterator[Change]:
        """Yield what an adapter adds to each of this rank's experts of a layer."""
        module = experts.module
        swapped = not module.orientation_is_known and (module.is_stored_transposed or files.config.may_be_swapped)
        is_first, each = of_each_expert(files.name, change.name, change.a, change.b, experts.sizes, swapped)
        parameter = ("gate_up_proj" if module.gated else "up_proj") if is_first else "down_proj"
        name, places = f"{change.name.removesuffix('.base_layer')}.{parameter}", experts.places[0 if is_first else 1]
        for expert, (a, b) in enumerate(each):
            files.config.check_rank(name, len(a))
            if expert in places:
                yield Change(change.name, a, b, files.config.scale(name, len(a)), places[expert])

    def _of_heads(
        self, files: AdapterFiles, change: Change, shard: Shard, heads: list[tuple[Place, Place]]
    ) -> Iterator[Change]:
        """Yield what an adapter adds to each head's projections to keys and values: A transposed times B transposed,
        with B's rows for the keys of that head, and B A, with B's rows for its values. shard: this rank's outputs of
        both."""
        check_sizes(files, change, *shard.shape)
        own = change.b[shard.start : shard.start + shard.size].unflatten(0, (len(heads), -1))
        for b, (to_keys, to_values) in zip(own, heads, strict=True):
            keys, values = b.tensor_split([to_keys.shard.shape[INPUTS]])
            yield replace(change, a=keys.T, b=change.a.T, places=[to_keys])
            yield replace(change, b=values, places=[to_values])

    def _name(self, module: str) -> str:
        """Return the canonical name of an adapter's module; empty if the text model has no such module."""
        return (self._model.canonical_name(f"{module}.weight") or "").removesuffix(".weight")


def check_places(files: AdapterFiles, changes: Sequence[Change], reasons: dict[str, str]) -> None:
    """Raise AdapterError if a change has no place. reasons: why, by a part of the layer's name."""
    lost = [change.name for change in changes if not change.places]
    if not lost:
        return
    shown = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
    why = next((f" ({reason})" for part, reason in reasons.items() if part in lost[0]), "")
    got = Described(f"{len(lost)} of {len(files.modules)} without a matching layer: {shown}")
    raise AdapterError(files.name, WEIGHTS_FILE, got, f"of linear layers that this model has{why}")


def tensor_of(stored: TensorEntry) -> Tensor:
    return torch.frombuffer(stored.data, dtype=DTYPES[stored.dtype]).view(stored.shape)


def starts_of(files: AdapterFiles, change: Change) -> list[int]:
    """Return the index in B at which the outputs of each place begin. If the checkpoint holds a layer in one tensor and
    the model computes it in several slices, B has the outputs of all slices. Raises AdapterError if the factors have
    the sizes of another layer."""
    places, outputs = change.places, len(change.b)
    sizes = [place.shard.shape[OUTPUTS] for place in places]
    whole = sum(sizes) if len(set(sizes)) > 1 or sizes[0] != outputs else outputs
    check_sizes(files, change, whole, places[0].shard.shape[INPUTS])
    return [0] * len(places) if sizes[0] == outputs else list(itertools.accumulate(sizes[:-1], initial=0))


def check_sizes(files: AdapterFiles, change: Change, outputs: int, inputs: int) -> None:
    if (found := (change.a.shape[1], len(change.b))) != (inputs, outputs):
        wanted = f"of a layer with {inputs} inputs and {outputs} outputs"
        raise AdapterError(files.name, change.name, Described(f"{found[0]} and {found[1]}"), wanted)


def copy_slice(own: Factors, place: Place, a: Tensor, b: Tensor, start: int) -> None:
    """Copy this rank's part of A [rank, inputs] and B [outputs, rank]. start: index in B of the place's first
    output."""
    shard, rank = place.shard, len(a)
    outputs = shard if shard.dim == OUTPUTS else replace(shard, dim=OUTPUTS, start=0, size=shard.shape[OUTPUTS])
    if shard.dim == INPUTS:
        a = a[:, shard.start : shard.start + shard.size]
    columns = in_columns(a.T)
    own.a[place.product, place.slice, : len(columns)] = columns
    first = sum(filled(size.local_shape[OUTPUTS]) for size in place.layer.shards[: place.slice])
    begin = start + outputs.start
    columns = in_columns(b[begin : begin + outputs.size][place.order].T)
    own.b[place.product, first // LANES :, :rank][: len(columns)] = columns
    own.used[place.product] = True
