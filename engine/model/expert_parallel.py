"""Checks whether the experts of a model can be spread over ranks, and chooses how tokens travel to them. Imports no
torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.model.config import ModelConfig

if TYPE_CHECKING:
    from engine.config import EngineConfig


def check_experts(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError if the experts of a model cannot be spread over its ranks. The experts of a model that
    transformers' own code computes are known only once the model is built."""
    engines = config.data_parallel_size
    if engines > 1 and (model.transformers or model.moe is None):
        why = "which transformers' own code computes" if model.transformers else "which has no experts to share"
        limit = f"1 for {model.architecture}, {why}; for independent engines, use replicas instead"
        raise ConfigError("data_parallel_size", engines, limit)
    if not config.enable_expert_parallel or model.transformers:
        return
    if model.moe is None:
        raise ConfigError("enable_expert_parallel", True, f"left out for {model.architecture}, which has no experts")
    if model.moe.zero_experts:
        limit = f"left out for {model.architecture}, some of whose experts are on every rank"
        raise ConfigError("enable_expert_parallel", True, limit)
    if engines > 1:
        check_shared(model.moe.num_experts, engines, config.tensor_parallel_size, config.redundant_experts)
    elif config.tensor_parallel_size > 1:
        check_count(model.moe.num_experts, config.tensor_parallel_size, config.redundant_experts)


def check_shared(num_experts: int, engines: int, ranks: int, redundant: int | None) -> None:
    """Do what `check_count` does, for several engines with this number of ranks each."""
    options = "data_parallel_size" if ranks == 1 else "data_parallel_size * tensor_parallel_size"
    check_count(num_experts, engines * ranks, redundant, options)


def check_count(num_experts: int, ranks: int, redundant: int | None, option: str = "tensor_parallel_size") -> None:
    """Raise ConfigError if a rank would have no expert, or if experts move (`redundant` is not None) and ranks would
    have unequal numbers of slots, or more slots than there are experts. option: what sets the number of ranks."""
    if num_experts < ranks:
        limit = f"at most the model's number of experts ({num_experts}) with enable_expert_parallel"
        raise ConfigError(option, ranks, limit)
    if redundant is None:
        return
    key, most = "eplb_config.num_redundant_experts", num_experts * (ranks - 1)
    if (num_experts + redundant) % ranks:
        fits = redundant + -(num_experts + redundant) % ranks
        limit = f"such that ranks have equal numbers of experts, as with {fits}: the model has {num_experts}"
        raise ConfigError(key, redundant, limit)
    if redundant > most:
        raise ConfigError(key, redundant, f"at most {most}, with which every rank has all {num_experts} experts")


def remote_ranks(num_experts: int, experts_per_token: int, ranks: int) -> float:
    """Return how many other ranks have an expert of a token, on average, if all experts are chosen equally often."""
    elsewhere = num_experts - num_experts / ranks
    none = 1.0
    for i in range(experts_per_token):
        none *= max(0.0, elsewhere - i) / (num_experts - i)
    return (ranks - 1) * (1 - none)


def choose_backend(asked: str, ranks: int, *, on_gpu: bool) -> tuple[str, str]:
    """Return a value of `all2all_backend` other than `auto`, and why it is chosen. asked: the configured one."""
    if asked != "auto":
        return asked, "it is configured"
    if on_gpu:
        return "allgather_reducescatter", "the host need not wait for the GPU, and CUDA graphs can hold it"
    if ranks == 2:
        return "allgather_reducescatter", "two ranks would send as much by all-to-all, in more exchanges"
    return "alltoall", "tokens go only to the ranks that have their experts"
