"""Checks whether the models of a configuration fit: replicas on nodes, weights and KV cache in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from cluster.cli.check.finding import Finding
from cluster.cli.check.parts import part_checks
from cluster.cli.check.placement import Deployment, deployments_of, place
from cluster.config.app_config import AppConfig
from cluster.config.model_section import ModelSection
from deployments.routing.config import Role
from engine.assembly.open_setup import check_tested
from engine.config import EngineConfig
from engine.devices.host_memory import free_host_memory
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError, OutOfMemory
from engine.kv_transfer.transport import nixl
from engine.model.checkpoint.overlay import engine_folder
from engine.model.config import ModelConfig
from engine.model.config_parts.stage import ALL_LAYERS, Stage
from engine.model.loader import open_weights, tensors_by_file
from engine.model.models.images.encoder_config import encoder_config
from engine.model.quantization.method import METHODS
from engine.model.quantization.packed_int import PackedInt
from engine.model.stage import config_of, nth_stage
from engine.model.state import StateSpec, state_specs
from engine.model.tensor_names import canonical_name, is_of_text
from engine.parts.kv_groups.rank.snapshot_memory import choose_num_snapshots, snapshot_bytes
from engine.parts.stages.rank.pipeline_stage import divide_layers
from engine.runner import fp8_kv_cache, kv_cache
from engine.runner.graphs.gpu_memory import usable_gpu_memory
from placement.capacity import Node, can_grow, missing

GIB = 2**30
PACKED = ("qweight", "weight_packed")  # names of tensors whose words of 32 bits hold several weights
CONVERTED = {"F64", "F32", "BF16", "F16"}  # dtypes in files that are converted to the model's when it is loaded


def this_machine() -> Node:
    """Return this machine as the node of a cluster that `manta serve` would start."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Node({"CPU": float(cores), "GPU": float(torch.cuda.device_count())}, {})


def check_models(config: AppConfig, nodes: Sequence[Node], *, here: bool) -> Iterator[Finding]:
    """Check each pool, and all pools together. here: whether the only node is this machine, whose memory can be
    inspected."""
    for model in config.models:
        for role in model.pools:
            yield check_placement(model, role, nodes)
            yield from check_memory(model, role, here=here)
    yield check_together(deployments_of(config), nodes)


def check_placement(model: ModelSection, role: Role, nodes: Sequence[Node]) -> Finding:
    topic, problem = f"{role} of {model.name}", missing(model.group_spec(role), nodes)
    if problem is None:
        return Finding("ok", topic, "a replica fits the cluster")
    if can_grow(nodes):
        return Finding("warning", topic, problem, "The replica waits until the autoscaler adds a node")
    return Finding(
        "problem", topic, problem, f"Lower num_cpus or num_gpus of `{role}`, or its number of ranks, or add a node"
    )


def check_together(deployments: Sequence[Deployment], nodes: Sequence[Node]) -> Finding:
    """Check whether the minimum number of replicas of all pools fits the cluster."""
    wanted = {deployment.name: deployment.min_replicas for deployment in deployments}
    placed = place(wanted, deployments, nodes)
    message = ", ".join(f"{name} {placed[name]} of {count}" for name, count in wanted.items())
    if placed == wanted:
        return Finding("ok", "all replicas", f"fit together: {message}")
    advice = (
        "Some replicas wait until the autoscaler adds nodes"
        if can_grow(nodes)
        else "Use fewer replicas, or fewer CPUs and GPUs for each"
    )
    return Finding(
        "warning" if can_grow(nodes) else "problem", "all replicas", f"do not fit together: {message}", advice
    )


def check_memory(model: ModelSection, role: Role, *, here: bool) -> Iterator[Finding]:
    topic, pool, engine = f"{role} of {model.name}", model.pools[role], model.engine_config(role)
    folder = engine_folder(engine)
    shape = ModelConfig.from_folder(folder, engine.quantization)
    shape = encoder_config(shape) if role == "encode" else shape
    dtype = getattr(torch, shape.dtype if engine.dtype == "auto" else engine.dtype)
    on_gpu = pool.num_gpus > 0 and engine.device != "cpu"
    if on_gpu and role != "encode":
        try:
            check_tested(engine, shape)
        except ConfigError as error:
            yield Finding("problem", topic, str(error))
    packed = packed_numbers(shape) if on_gpu else 0
    weights = weight_bytes(folder, dtype, with_text=role != "encode", packed=packed) // engine.tensor_parallel_size
    if engine.pipeline_parallel_size > 1:
        counts = divide_layers(engine, shape)
        stages = [nth_stage(stage, counts, shape) for stage in range(len(counts))]
        sizes = [
            weight_bytes(folder, dtype, stage=stage, packed=packed) // engine.tensor_parallel_size for stage in stages
        ]
        told = (f"{count} layers with {size / GIB:.2f} GiB" for count, size in zip(counts, sizes, strict=True))
        yield Finding("ok", topic, f"{len(counts)} pipeline stages, of which a rank has {', '.join(told)} of weights")
        weights, _, fullest = max(zip(sizes, counts, range(len(counts)), strict=True))
        shape = config_of(stages[fullest], shape)
    quantized = " before they are quantized" if engine.quantization in METHODS else ""
    if packed or (on_gpu and engine.quantization == "int4"):
        quantized = ", to which a GPU dequantizes weights of four bits"
    most = "at most" if engine.pipeline_parallel_size > 1 else "about"
    yield Finding("ok", topic, f"{most} {weights / GIB:.2f} GiB of weights per rank, in {str(dtype)[6:]}{quantized}")
    for check in part_checks():
        added, findings = check.pool(model, role, topic)
        weights += added
        yield from findings
    if engine.enable_expert_parallel and shape.moe is not None:
        experts, ranks = shape.moe.num_experts, engine.tensor_parallel_size * engine.data_parallel_size
        largest = -(-(experts + (engine.redundant_experts or 0)) // ranks)
        yield Finding("ok", topic, f"{experts} experts over {ranks} ranks: at most {largest} of each layer per rank")
        of_experts = weight_bytes(folder, dtype, stage=shape.stage, part=".experts.")
        weights += of_experts * largest // experts - of_experts // engine.tensor_parallel_size
        if engine.enable_eplb and on_gpu:  # room for those of one layer that arrive
            layers = max(1, sum(number in shape.stage.layers for number in shape.moe.layers))
            weights += of_experts * largest // (experts * layers)
    if here and (torch.cuda.is_available() or not on_gpu):
        yield check_kv_cache(topic, engine, shape, dtype, weights, on_gpu=on_gpu)


def check_kv_cache(
    topic: str, engine: EngineConfig, shape: ModelConfig, dtype: torch.dtype, weights: int, *, on_gpu: bool
) -> Finding:
    """Size a KV cache as a rank does when it starts, assuming that nothing else runs on this machine. weights: bytes
    per rank, including slots for adapters."""
    if on_gpu:
        _, total = torch.cuda.mem_get_info()
        usable, less = usable_gpu_memory(total, engine), ", minus the memory of a step's activations"
    else:
        usable, less = free_host_memory().shared_by(engine.world_size), ""
    free = usable.less(weights)
    if free.size <= 0:
        message = f"the weights ({weights / GIB:.2f} GiB per rank) do not fit into memory: only {usable}"
        return Finding(
            "problem", topic, message, "Raise tensor_parallel_size or pipeline_parallel_size, or use a smaller model"
        )
    device, tp = torch.device("cuda" if on_gpu else "cpu"), TPGroup(0, engine.tensor_parallel_size)
    size = engine.known_block_size
    try:
        kv_dtype = fp8_kv_cache.cache_dtype(engine, dtype, device)
        needs = kv_cache.group_needs(engine, size, shape, kv_dtype, tp)
        free = free.less(nixl.reserved_bytes(engine, [need.block_bytes for need in needs], device))
        specs = state_specs(shape.recurrent, str(dtype)[6:], tp.size)
        snapshots = choose_num_snapshots(engine, size, shape, specs, kv_dtype, device, tp, free)
        states = snapshots * snapshot_bytes(specs)
        longest = shape.longest_sequence(engine.max_model_len)
        blocks, longest = kv_cache.choose_num_blocks(engine, needs, longest, device, free, states)
    except (OutOfMemory, ConfigError) as error:
        return Finding("problem", topic, str(error))
    requests = kv_cache.full_requests(needs, blocks, longest)
    message = f"KV cache for {blocks[0] * size:,} tokens{less}: {requests:.1f} requests of max_model_len {longest:,}"
    message = "; ".join([message, *kv_cache.describe_groups(needs, blocks), *describe_states(engine, specs, snapshots)])
    if longest < (engine.max_model_len or shape.max_position_embeddings):
        return Finding("warning", topic, message, "The context is cut to fit; raise kv_cache_memory_bytes for more")
    return Finding("ok", topic, message)


def describe_states(engine: EngineConfig, specs: list[StateSpec], snapshots: int) -> list[str]:
    """Return the memory of a model's recurrent states on one rank, if it has any."""
    kept, seqs = snapshot_bytes(specs), engine.max_num_seqs
    running = seqs * (kept + sum(spec.row_bytes for spec in specs))
    found = f"states of {seqs} running sequences: {running / GIB:.2f} GiB"
    return [f"{found}, and {snapshots} snapshots: {snapshots * kept / GIB:.2f} GiB"] if specs else []


def packed_numbers(shape: ModelConfig) -> int:
    """Return how many weights a word of 32 bits holds in the checkpoint, if a GPU has to dequantize them as they are
    loaded; 0 if it has not, or if the weights are stored otherwise. Experts stay as they are stored."""
    for rule in () if shape.quantization is None else shape.quantization.rules:
        if rule.format is not None and isinstance(made := rule.format.make(), PackedInt):
            return made.word
    return 0


def weight_bytes(
    folder: Path,
    dtype: torch.dtype,
    *,
    with_text: bool = True,
    stage: Stage = ALL_LAYERS,
    part: str = "",
    packed: int = 0,
) -> int:
    """Return the bytes of the whole model, or of a stage, when loaded in `dtype`, computed from its files' headers.

    with_text: whether to count the language model; without it, only the image encoder counts. part: what the names of
    all counted tensors contain. packed: of `packed_numbers`.
    """

    def counts(name: str) -> bool:
        if not is_of_text(name):
            return stage.is_first
        return with_text and (stage.is_whole or stage.holds(canonical_name(name)))

    total = 0
    for file, names in tensors_by_file(folder).items():
        with open_weights(file) as tensors:
            for name in (name for name in names if part in name and counts(name)):
                tensor = tensors.get_slice(name)
                count, stored = torch.Size(tensor.get_shape()).numel(), tensor.get_dtype()
                if packed and name.endswith(PACKED) and ".experts." not in name:
                    total += count * packed * dtype.itemsize
                else:
                    total += count * (dtype.itemsize if stored in CONVERTED else 4 if stored == "I32" else 1)
    return total
