"""Chooses how a model is divided over ranks: (tensor, pipeline, expert, data). Formulas only: no clock, no file.

A step of n sequences passes through the stages one after the other, in as many micro-batches as there are stages. In
each stage a rank reads its weights and the KV of its sequences, computes, and exchanges two sums per layer with the
other tensor ranks. A link takes its latency, and the bytes divided by its rate. Ranks of a stage are neighbours, so
they use the fast link inside a node if a node has room for all of them.

Experts are whole on each rank (`expert`) if slices of them would be narrower than the tile of a matrix product, or
cannot be cut. With `data` engines, each engine computes the attention of its own sequences on its `tensor` ranks, and
all ranks together hold the experts: each rank sends its share of an engine's tokens to all others, or only to those
that have one of their experts, and gets back their part of it, in each layer with experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.model.expert_parallel import choose_backend, remote_ranks

COMPUTE_FRACTION = 0.6  # of the peak that matrix products reach
MEMORY_FRACTION = 0.8  # of the memory bandwidth that a decode step reaches
USABLE = 0.85  # of the memory; the rest is for activations and graphs
STEP_S = 0.002  # per step besides the model: planning, launching, sampling
TILE = 128  # columns of a matrix product below which a smaller product takes as long
BALANCE = 0.8  # mean load of ranks with whole experts, as a fraction of the largest
GIB = 2**30
GATHERED = "allgather_reducescatter"  # the exchange that sends every token to every rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a model on which the choice depends."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int  #: 1 for latent attention
    item_bytes: float  #: bytes of a number of an activation
    dense_bytes: float  #: weights without the routed experts
    expert_bytes: float = 0.0  #: routed experts of all layers together
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0  #: intermediate size of an expert
    expert_layers: int = 0
    active: float  #: parameters that compute a token
    kv_bytes: float  #: of a token in all layers


@dataclass(frozen=True, slots=True)
class Link:
    bytes_per_s: float
    latency_s: float

    def seconds(self, count: float, size: float) -> float:
        """Return the time of `count` exchanges with `size` bytes together."""
        return count * self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Equal nodes with equal devices."""

    nodes: int
    devices: int  #: of a node
    flops: float  #: peak of a device, per second
    bandwidth: float  #: of its memory, bytes per second
    memory: float  #: of a device, bytes
    inside: Link  #: between devices of a node
    between: Link  #: between nodes


@dataclass(frozen=True, slots=True)
class Workload:
    """What a layout is judged by."""

    context: int = 4096  #: mean tokens of a sequence, prompt and answer
    longest: int = 0  #: tokens of the longest sequence, for which a replica must have room
    itl_s: float = 0.05  #: limit of the time between tokens
    max_num_seqs: int = 256
    all2all_backend: str = "auto"  #: how tokens are to travel between engines


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """One way to divide a model, and what is expected of it."""

    tensor: int
    pipeline: int
    expert: bool
    data: int
    replicas: int  #: that the machines have room for
    weight_bytes: float  #: of the fullest rank
    kv_tokens: int  #: whose KV a replica has room for; negative if the weights do not fit
    tensor_bytes: float  #: that a rank sends per token for sums
    tensor_inside: bool  #: whether these stay inside a node
    expert_bytes: float  #: that a rank sends per token to other engines' experts, and back to other engines
    expert_inside: bool  #: whether these stay inside a node
    all2all_backend: str  #: by which they are sent
    routed_bytes: float  #: that a rank would send per token if tokens went only to ranks that have their experts
    stage_bytes: float  #: that a stage sends per token to the next one
    sequences: int  #: of a replica at a time, as many as the limits allow; 0 if not one fits
    itl_s: float  #: expected time between tokens with so many sequences, or with one

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of all replicas."""
        return self.replicas * self.sequences / self.itl_s

    @property
    def name(self) -> str:
        sizes = (
            ("tensor_parallel_size", self.tensor),
            ("pipeline_parallel_size", self.pipeline),
            ("data_parallel_size", self.data),
        )
        named = [f"{key} {size}" for key, size in sizes if size > 1]
        return ", ".join([*named, *(["enable_expert_parallel"] if self.expert else [])]) or "one rank"

    @property
    def exchanged(self) -> str:
        """By what tokens travel to experts, and how much all-to-all would send instead."""
        less = self.routed_bytes < self.expert_bytes
        return f"{self.all2all_backend} ({self.routed_bytes / 1024:.0f} by alltoall)" if less else self.all2all_backend

    def __str__(self) -> str:
        sent = (
            (self.tensor_bytes, f"for sums {place_of(self.tensor_inside)}"),
            (self.expert_bytes, f"for experts {place_of(self.expert_inside)} by {self.exchanged}"),
            (self.stage_bytes, "between stages"),
        )
        links = [f"{size / 1024:.0f} KiB per token {what}" for size, what in sent if size]
        told = [f"{self.weight_bytes / GIB:.1f} GiB of weights per rank", *links]
        if not self.sequences:
            return f"{self.name}: {', '.join(told)}; does not fit"
        speed = (
            f"{1000 * self.itl_s:.1f} ms per token with {self.sequences} sequences of each of {self.replicas} replicas"
        )
        return f"{self.name}: {', '.join(told)}; {speed}, {self.tokens_per_s:.0f} tokens/s"


def place_of(inside: bool) -> str:
    return "inside a node" if inside else "between nodes"


def plan(model: ModelSizes, machines: Machines, load: Workload) -> list[ParallelLayout]:
    """Return all layouts that the machines have room for, the best first: most tokens/s of those that keep the limit of
    the time between tokens; then the fastest of the others."""
    found = [layout for layout in layouts(model, machines, load) if layout.replicas]
    return sorted(found, key=lambda layout: rank_of(layout, load))


def rank_of(layout: ParallelLayout, load: Workload) -> tuple[object, ...]:
    """Return the key by which layouts are sorted. Of equally good ones, the simplest comes first."""
    simple = layout.ranks, layout.data, layout.pipeline, layout.expert
    if not layout.sequences:
        return 2, layout.weight_bytes, *simple
    if layout.itl_s > load.itl_s:
        return 1, layout.itl_s, *simple
    return 0, -round(layout.tokens_per_s, 3), *simple


def why(best: ParallelLayout, others: Sequence[ParallelLayout], load: Workload) -> str:
    """Return in one sentence why a layout is better than what comes next to mind: the fewest ranks, and the same number
    of tensor ranks."""
    if not best.sequences:
        return f"no layout fits: {best.weight_bytes / GIB:.0f} GiB of weights per rank is the least"
    reasons = []
    fitting = {layout.ranks for layout in others if layout.sequences}
    if fewer := {layout.ranks for layout in others if layout.ranks < best.ranks} - fitting:
        reasons.append(f"on {max(fewer)} rank{'s' * (max(fewer) > 1)} weights and KV do not fit")
    tensor = [o for o in others if o.ranks == best.ranks == o.tensor and o.sequences and o is not best]
    if tensor and best.pipeline > 1:
        slow = "between nodes " if not tensor[0].tensor_inside else ""
        kib = f"{tensor[0].tensor_bytes / 1024:.0f} KiB per token"
        sums = f"the sums of tensor_parallel_size {tensor[0].tensor} would send {kib}"
        reasons.append(f"{sums} {slow}({1000 * tensor[0].itl_s:.1f} ms per token)")
    if best.expert and best.data == 1:
        reasons.append("slices of its experts would be too narrow")
    if best.data > 1:
        reasons.append("each engine keeps its own KV once")
        if best.tensor > 1 and best.expert_inside != best.tensor_inside:
            reasons.append("the ranks of an engine are on one node, and only rows of experts pass between nodes")
    if best.itl_s > load.itl_s:
        reasons.append(f"no layout keeps {1000 * load.itl_s:g} ms between tokens, and this is the fastest")
    return "; ".join(reasons) or "it computes most tokens per second within the limit of the time between tokens"


def layouts(model: ModelSizes, machines: Machines, load: Workload) -> Iterator[ParallelLayout]:
    """Yield the layouts that the model permits, with powers of 2 as sizes."""
    devices = machines.nodes * machines.devices
    for tensor in powers(devices):
        if model.heads % tensor or (model.kv_heads % tensor and tensor % model.kv_heads):
            continue
        for data in powers(devices // tensor if model.num_experts else 1):
            ranks = tensor * data  # that hold the experts together
            cuts = model.expert_size % tensor == 0 and model.expert_size // tensor >= TILE
            expert = ranks > 1 and 0 < ranks <= model.num_experts and (data > 1 or not cuts)
            if model.num_experts and not expert and model.expert_size % tensor:
                continue
            for pipeline in powers(min(devices // ranks, model.layers) if data == 1 else 1):
                yield judge(model, machines, load, tensor, pipeline, expert, data)


def judge(
    model: ModelSizes, machines: Machines, load: Workload, tensor: int, pipeline: int, expert: bool, data: int
) -> ParallelLayout:
    """Return a layout with what is expected of it."""
    ranks = tensor * data
    weights = (model.dense_bytes / tensor + model.expert_bytes / ranks) / pipeline
    copies = max(1, tensor / model.kv_heads)  # ranks that keep the same KV
    free = machines.memory * USABLE - weights
    kv_tokens = int(free * pipeline * tensor / copies / model.kv_bytes) * data
    tensor_inside, expert_inside = tensor <= machines.devices, ranks <= machines.devices
    link = machines.inside if tensor_inside else machines.between
    expert_link = machines.inside if expert_inside else machines.between
    row = model.hidden * model.item_bytes
    sums = 4 * (tensor - 1) / tensor * row * model.layers
    sent = routed = 0.0
    backend = ""
    if data > 1:
        experts, k = model.num_experts, model.experts_per_token
        backend, _ = choose_backend(load.all2all_backend, ranks, on_gpu=True)
        routed = 2 * remote_ranks(experts, k, ranks) / tensor * row * model.expert_layers
        sent = 2 * (data - 1 / tensor) * row * model.expert_layers if backend == GATHERED else routed
    nodes = -(-ranks * pipeline // machines.devices)
    replicas = machines.nodes // nodes if nodes > 1 else machines.nodes * (machines.devices // (ranks * pipeline))
    hop = machines.inside if ranks * pipeline <= machines.devices else machines.between

    def itl(sequences: int) -> float:
        batch = -(-sequences // (pipeline * data))  # of a group and micro-batch
        return STEP_S + stages_s(batch) + pipeline * (hop.seconds(1, batch * row) if pipeline > 1 else 0.0)

    def stages_s(batch: int) -> float:
        """Return the time of a micro-batch in all stages together."""
        together = batch * data
        touched = 1 - (1 - model.experts_per_token / model.num_experts) ** together if model.num_experts else 0.0
        imbalance = 1 / BALANCE if expert else 1.0
        width = 1.0 if expert or not model.num_experts else min(1.0, model.expert_size / tensor / TILE)
        read = model.dense_bytes / tensor + model.expert_bytes / ranks * touched * imbalance / width
        kv = batch * load.context * model.kv_bytes / tensor * copies
        memory = (read + kv) / (machines.bandwidth * MEMORY_FRACTION)
        compute = 2 * model.active * batch / tensor * imbalance / (machines.flops * COMPUTE_FRACTION)
        exchange = link.seconds(2 * model.layers, batch * sums) if tensor > 1 else 0.0
        experts = expert_link.seconds(2 * model.expert_layers, batch * sent) if data > 1 else 0.0
        return max(memory, compute) + exchange + experts

    most = 0 if kv_tokens <= load.longest else min(load.max_num_seqs * data, kv_tokens // load.context)
    sequences = most
    while sequences > 1 and itl(sequences) > load.itl_s:
        sequences //= 2
    return ParallelLayout(
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        data=data,
        replicas=replicas,
        weight_bytes=weights,
        kv_tokens=kv_tokens,
        tensor_bytes=sums,
        tensor_inside=tensor_inside,
        expert_bytes=sent,
        expert_inside=expert_inside,
        all2all_backend=backend,
        routed_bytes=routed,
        stage_bytes=row if pipeline > 1 else 0.0,
        sequences=sequences,
        itl_s=itl(max(1, sequences)),
    )


def powers(limit: int) -> Iterator[int]:
    """Yield 1, 2, 4 and so on up to `limit`."""
    size = 1
    while size <= limit:
        yield size
        size *= 2
