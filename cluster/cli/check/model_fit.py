"""Whether the models of a configuration fit: replicas onto nodes, weights and KV cache into memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from cluster.cli.check.finding import Finding
from cluster.cli.check.machine import cpu_flags, has_bfloat16
from cluster.config import AppConfig, ModelSection
from deployments.routing.config import Role
from engine.config import EngineConfig
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError, OutOfMemory
from engine.model import folder as model_folder
from engine.model.config import ModelConfig
from engine.model.loader import tensors_by_file
from engine.runner import kv_cache
from placement import capacity
from placement.capacity import Node

GIB = 2**30
STORED = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # bytes of what is turned into the model's dtype as it is loaded


def check_models(config: AppConfig, nodes: Sequence[Node], *, here: bool) -> Iterator[Finding]:
    """nodes: of the cluster. here: they are this very machine, so what it has is what the engines get."""
    for model in config.models:
        for role in model.pools:
            yield check_placement(model, role, nodes)
            yield from check_engine(model, role, here=here)
    yield check_together(config, nodes)


def check_placement(model: ModelSection, role: Role, nodes: Sequence[Node]) -> Finding:
    topic = f"{role} of {model.name}"
    problem = capacity.missing(model.group_spec(role), nodes)
    if problem is None:
        return Finding("ok", topic, "a replica fits the cluster")
    if capacity.can_grow(nodes):
        return Finding("warning", topic, problem, "It will wait for the autoscaler to add a node")
    return Finding("problem", topic, problem, f"Lower num_cpus, num_gpus or tensor_parallel of `{role}`, or add a node")


def check_together(config: AppConfig, nodes: Sequence[Node]) -> Finding:
    """All replicas that there are at least, against the whole cluster."""
    need: Counter[str] = Counter({"CPU": config.ingress.num_replicas * config.ingress.num_cpus})
    for model in config.models:
        for role, pool in model.pools.items():
            for bundle in model.group_spec(role).bundles * pool.bounds[0]:
                need.update({name: amount for name, amount in bundle.items() if name in ("CPU", "GPU")})
    have: Counter[str] = Counter()
    for node in nodes:
        have.update({name: node.resources.get(name, 0.0) for name in need})
    told = " and ".join(f"{need[name]:g} of {have[name]:g} {name}" for name in need if need[name])
    if all(need[name] <= have[name] + capacity.EPSILON for name in need):
        return Finding("ok", "all replicas", f"take {told}")
    if capacity.can_grow(nodes):
        return Finding("warning", "all replicas", f"would take {told}", "Some wait for the autoscaler to add nodes")
    return Finding("problem", "all replicas", f"would take {told}", "Use fewer replicas, or less for each")


def check_engine(model: ModelSection, role: Role, *, here: bool) -> Iterator[Finding]:
    topic, pool, engine = f"{role} of {model.name}", model.pools[role], model.engine_config(role)
    folder = model_folder.resolve(model.model)
    shape = ModelConfig.from_folder(folder)
    dtype = getattr(torch, shape.dtype if engine.dtype == "auto" else engine.dtype)
    on_gpu = pool.num_gpus > 0 and engine.device != "cpu"
    weights = weight_bytes(folder, dtype) // engine.tensor_parallel
    quantized = " before they are quantized" if engine.quantization is not None else ""
    yield Finding("ok", topic, f"about {weights / GIB:.2f} GiB of weights per rank, in {_name(dtype)}{quantized}")
    if not here:
        return
    yield check_dtype(topic, dtype, on_gpu)
    if on_gpu and not torch.cuda.is_available():
        return  # check_placement has said so
    yield check_kv_cache(topic, engine, shape, dtype, weights, on_gpu=on_gpu)


def check_kv_cache(
    topic: str, engine: EngineConfig, shape: ModelConfig, dtype: torch.dtype, weights: int, *, on_gpu: bool
) -> Finding:
    """As a rank decides at its start, on this machine with nothing else on it. weights: bytes per rank."""
    if on_gpu:
        _, total = torch.cuda.mem_get_info()
        free, less = int(total * engine.gpu_memory_utilization) - weights, ", less what a step's activations take"
    else:
        free, less = kv_cache.free_host_bytes() // engine.tensor_parallel - weights, ""
    if free <= 0:
        told = f"the weights ({weights / GIB:.2f} GiB per rank) do not fit into memory"
        return Finding("problem", topic, told, "Raise tensor_parallel, or take a smaller model")
    device, tp = torch.device("cuda" if on_gpu else "cpu"), TPGroup(0, engine.tensor_parallel)
    size = engine.known_block_size
    try:
        kv_dtype = kv_cache.cache_dtype(engine, dtype, device)
        blocks, longest = kv_cache.choose_num_blocks(engine, size, shape, kv_dtype, device, tp, free)
    except (OutOfMemory, ConfigError) as error:
        return Finding("problem", topic, str(error))
    tokens = blocks * size
    told = f"KV cache for {tokens:,} tokens{less}: {tokens / longest:.1f} requests of max_model_len {longest:,}"
    if longest < (engine.max_model_len or shape.max_position_embeddings):
        return Finding("warning", topic, told, "The context is cut to what fits; raise kv_cache_memory_gib for more")
    return Finding("ok", topic, told)


def check_dtype(topic: str, dtype: torch.dtype, on_gpu: bool) -> Finding:
    """Whether this machine computes in it without detours."""
    name = _name(dtype)
    if on_gpu:
        if dtype is torch.bfloat16 and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(False):
            return Finding("warning", topic, f"this GPU emulates {name}", "Use --dtype float16")
    elif dtype is torch.float16:
        return Finding("warning", topic, f"CPUs compute slowly in {name}", "Use --dtype bfloat16 or float32")
    elif dtype is torch.bfloat16 and not has_bfloat16(cpu_flags(Path("/proc/cpuinfo"))):
        advice = "--dtype float32 may be faster, and takes twice the memory"
        return Finding("warning", topic, f"this CPU emulates {name}", advice)
    return Finding("ok", topic, f"computes in {name}")


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Of the whole model, read off the headers of its files. dtype: that it is loaded in; quantized tensors stay so."""
    total = 0
    for file, names in tensors_by_file(folder).items():
        with safe_open(file, framework="pt") as tensors:
            for name in names:
                part = tensors.get_slice(name)
                count = torch.Size(part.get_shape()).numel()
                total += count * (dtype.itemsize if part.get_dtype() in STORED else 1)
    return total


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
