"""Compares the layout of each model with the best one that formulas find for the cluster's GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from cluster.cli.check.finding import Finding
from cluster.config.app_config import AppConfig
from cluster.lab.planning.known_models import find_layouts, lines, machines_of
from cluster.lab.planning.layouts import Workload
from cluster.lab.simulator.cost_model import CARDS, Card, ModelShape
from engine.model.checkpoint.overlay import engine_folder
from placement.capacity import Node

CONTEXT = 4096  # tokens of a sequence, if max_model_len does not say less


def check_layouts(config: AppConfig, nodes: Sequence[Node], network_gbit: float | None = None) -> Iterator[Finding]:
    """Say for each model with GPUs which layout suits the cluster, and why. Nothing for a cluster whose GPUs are of no
    known kind."""
    found = gpus_of(nodes)
    if found is None:
        return
    card, count, devices = found
    machines = machines_of(card, count, devices, network_gbit)
    for model in config.models:
        if not model.pools["decode"].num_gpus:
            continue
        engine = model.engine_config("decode")
        context = min(CONTEXT, engine.max_model_len or CONTEXT)
        load = Workload(context, context, model.slo.itl_ms / 1000, engine.max_num_seqs, engine.all2all_backend)
        layouts = find_layouts(ModelShape.from_folder(engine_folder(engine)), machines, load)
        data, spread = (
            engine.data_parallel_size,
            engine.enable_expert_parallel and engine.tensor_parallel_size * engine.data_parallel_size > 1,
        )
        own = engine.tensor_parallel_size, engine.pipeline_parallel_size, spread, data
        message = "; ".join(lines(layouts, load))
        now = next((one for one in layouts if own == (one.tensor, one.pipeline, one.expert, one.data)), layouts[0])
        advice = "" if now is layouts[0] else f"Configured: {now}"
        yield Finding("ok", f"layout of {model.name}", message, advice)


def gpus_of(nodes: Sequence[Node]) -> tuple[Card, int, int] | None:
    """Return the card of the most common kind of nodes with GPUs, the number of such nodes, and of cards of each; None
    if there are no GPUs with a known data sheet."""
    kinds = Counter(
        (name, int(node.resources["GPU"]))
        for node in nodes
        if node.resources.get("GPU", 0) >= 1
        for name in (kind_of(node),)
        if name
    )
    if not kinds:
        return None
    (name, devices), count = kinds.most_common(1)[0]
    return CARDS[name], count, devices


def kind_of(node: Node) -> str:
    """Return the card of a node, as CARDS names it; empty if it is not there."""
    kinds = (key.partition(":")[2].lower() for key in node.resources if key.startswith("accelerator_type:"))
    return next((name for kind in kinds for name in CARDS if kind == name or kind.startswith(f"{name}-")), "")
