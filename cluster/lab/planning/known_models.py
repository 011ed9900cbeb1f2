"""Layouts of known models on known GPUs, for `manta doctor` and `manta simulate --plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.config.simulation_options import SimulationOptions
from cluster.lab.planning.layouts import Link, Machines, ModelSizes, ParallelLayout, Workload, plan, why
from cluster.lab.simulator.cost_model import Card, ModelShape, find_card, find_model
from cluster.lab.simulator.trace import Trace
from engine.model.config import DTYPES

SHOWN = 3  # layouts after the best one
FAST_LATENCY_S, NETWORK_LATENCY_S = 5e-6, 20e-6


def sizes_of(shape: ModelShape) -> ModelSizes:
    """Return the sizes of a known model, or of a model folder."""
    cfg = shape.config
    sizes = ModelSizes(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        item_bytes=2.0,
        dense_bytes=shape.weight_bytes,
        active=shape.active,
        kv_bytes=shape.kv_bytes,
    )
    if cfg is None:
        return sizes
    item = DTYPES[cfg.dtype]
    sizes = replace(sizes, item_bytes=item, kv_heads=1 if cfg.latent is not None else cfg.num_kv_heads)
    if cfg.moe is None:
        return sizes
    moe, layers = cfg.moe, len(cfg.moe.layers)
    experts = 3.0 * item * layers * moe.num_experts * cfg.hidden_size * moe.intermediate_size
    return replace(
        sizes,
        dense_bytes=shape.weight_bytes - experts,
        expert_bytes=experts,
        num_experts=moe.num_experts,
        experts_per_token=moe.experts_per_token,
        expert_size=moe.intermediate_size,
        expert_layers=layers,
    )


def machines_of(card: Card, nodes: int, devices: int, network_gbit: float | None = None) -> Machines:
    """Return nodes with the same cards. network_gbit: of a node; by default, that of the NICs of all its cards."""
    network = card.network * devices if network_gbit is None else network_gbit / 8 * 1e9
    return Machines(
        nodes=nodes,
        devices=devices,
        flops=card.flops,
        bandwidth=card.bandwidth,
        memory=card.memory,
        inside=Link(card.peers, FAST_LATENCY_S),
        between=Link(network, NETWORK_LATENCY_S),
    )


def lines(found: Sequence[ParallelLayout], load: Workload) -> list[str]:
    """Return what to say about layouts, the best first: it, why it is the best, and the next ones."""
    best, *others = found
    return [f"best: {best}", f"because {why(best, found, load)}", *(f"also: {layout}" for layout in others[:SHOWN])]


def find_layouts(shape: ModelShape, machines: Machines, load: Workload) -> list[ParallelLayout]:
    return plan(sizes_of(shape), machines, load)


def replica_sizes(options: SimulationOptions, traffic: Trace, max_gpus: int) -> tuple[list[int], list[str]]:
    """Return the numbers of cards that a replica can have, the best by formulas first, and what there is to say about
    its layouts. The simulator knows only tensor parallel ranks inside a machine; other layouts are only named."""
    nodes, devices = max(1, max_gpus // options.cards_per_node), min(options.cards_per_node, max_gpus)
    machines = machines_of(find_card(options.card), nodes, devices, options.network_gbit)
    load = Workload(traffic.mean, traffic.longest, options.tpot_ms / 1000, options.max_num_seqs)
    found = find_layouts(find_model(options.model), machines, load)
    known = [layout for layout in found if layout.ranks == layout.tensor and layout.tensor_inside]
    told = lines(found, load)
    sizes = list(dict.fromkeys(layout.tensor for layout in known))
    if known[0] is not found[0]:
        tried = ", ".join(map(str, sorted(sizes)))
        why_others = "because the simulator knows neither stages nor sums between machines"
        told.append(f"simulated: tensor_parallel_size {tried}, {why_others}")
    return sizes, told
